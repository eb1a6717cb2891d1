"""`tallystick chaos` on users' programs: clean ones pass, planted mistakes are found."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from pyarrow import fs

from tallystick.testing.kafka import EmbeddedKafka
from tallystick_tools.chaos.schedule import Fault, as_json, plan
from tests.postgres.real_postgres import PostgresServer
from tests.storage.test_storage_s3 import Server

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "chaos.md"
RECORDS = 6_000

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(1800)]


@pytest.fixture
def flights(tmp_path: Path) -> Path:
    """A file with records of flights."""
    chance = random.Random(1)
    path = tmp_path / "flights.ndjson"
    with path.open("w") as file:
        for number in range(RECORDS):
            flight = {
                "id": number,
                "dest": chance.choice("ABCDEFGHIJ"),
                "delay": chance.randint(-10, 60),
            }
            file.write(json.dumps(flight) + "\n")
    return path


def chaos(
    flights: Path,
    report: Path,
    *options: str,
    output: tuple[str, ...] = ("--output", "late"),
    topic: str = "flights",
) -> tuple[int, dict, str]:
    """Run the command; return its exit code, its report for programs, and what it printed."""
    command = [sys.executable, "-m", "tallystick", "chaos", "--input", f"{topic}={flights}"]
    command += ["--key", f"{topic}=dest", "--json", str(report), *output, *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert report.exists(), (done.returncode, done.stderr[-4000:])
    return done.returncode, json.loads(report.read_text()), done.stdout


def program(name: str, *arguments: str) -> list[str]:
    return ["--", sys.executable, str(HERE / name), *arguments]


@pytest.fixture
def late(tmp_path: Path) -> list[str]:
    """The program on the page about chaos."""
    (text,) = re.findall(r"```python\n(import os\n.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "late.py"
    path.write_text(text)
    return ["--", sys.executable, str(path)]


def hits(report: dict) -> set[str]:
    return {fault["kind"] for fault in report["faults"] if fault["hit"]}


JUMPS = [Fault("clock", 0.1, 2.0, pick) for pick in (0.99, 0.01, 0.8, 0.3)]
FAULTS = plan(5, 3, ("driver", "worker", "zombie", "state", "lose-reply"))


def test_a_keyed_program_is_exact_and_its_state_too(flights, late, tmp_path):
    """Its clock jumps a day on and back again, too."""
    page, schedule = tmp_path / "report.html", tmp_path / "schedule.json"
    schedule.write_text(as_json([*FAULTS, *JUMPS[:2]]))
    code, report, printed = chaos(
        flights, tmp_path / "report.json", "--schedule", str(schedule), "--compare", "final",
        "--html", str(page), *late,
    )  # fmt: skip
    assert (code, report["exact"], report["problems"], report["differences"]) == (0, True, [], [])
    assert hits(report) == {"driver", "worker", "zombie", "lose-reply", "state", "clock"}
    assert report["starts"] >= 4  # the first, and one after each of driver, zombie and state
    assert report["state_keys"] == {"counts": 10}
    assert "EXACT" in printed.splitlines()[-2]
    assert all(f"<td>{kind}</td>" in page.read_text() for kind in hits(report))


def test_a_counter_in_the_process_is_found_and_named(flights, tallystick_kafka, tmp_path):
    """On a broker that is there: of its three runs each would start one.

    The topics have names that no other test of this broker uses.
    """
    code, report, printed = chaos(
        flights, tmp_path / "report.json", "--kills", "1", "--faults", "driver",
        "--bootstrap-servers", tallystick_kafka.bootstrap_servers,
        "--compare", "rows", *program("broken.py", "counter", "chaos-"),
        topic="chaos-flights", output=("--output", "chaos-late"),
    )  # fmt: skip
    assert (code, report["exact"], hits(report)) == (1, False, {"driver"})
    assert report["differences"]
    assert "global variable" in report["explanation"]
    assert "delay" in report["explanation"]
    assert report["explanation"] in printed


def test_the_fixture_finds_and_names_a_clock(flights, tallystick_chaos):
    with pytest.raises(AssertionError, match="not deterministic") as raised:
        tallystick_chaos(
            [sys.executable, str(HERE / "broken.py"), "clock"],
            inputs={"flights": flights}, outputs=["late"], keys={"flights": "dest"},
            kills=1, kinds=["driver"],
        )  # fmt: skip
    assert "the field delay" in str(raised.value)


def test_a_program_that_trusts_the_wall_clock_is_found(flights, tmp_path):
    schedule = tmp_path / "schedule.json"
    schedule.write_text(as_json(JUMPS))
    code, report, _ = chaos(
        flights, tmp_path / "report.json", "--schedule", str(schedule),
        "--compare", "rows", *program("broken.py", "today"),
    )  # fmt: skip
    assert (code, report["exact"], hits(report)) == (1, False, {"clock"})
    assert any(": lost " in difference for difference in report["differences"])


def test_a_keyed_program_is_exact_though_its_clock_jumps_back_and_forth(flights, late, tmp_path):
    schedule = tmp_path / "schedule.json"
    schedule.write_text(as_json([*JUMPS, Fault("driver", 0.5, 0.0, 0.5), JUMPS[0]]))
    code, report, _ = chaos(
        flights, tmp_path / "report.json", "--schedule", str(schedule), "--compare", "final", *late
    )
    assert (code, report["problems"], report["differences"]) == (0, [], [])
    assert hits(report) == {"clock", "driver"}
    assert report["state_keys"] == {"counts": 10}
    whats = [
        fault["hit"] for fault in report["faults"] if fault["kind"] == "clock" and fault["hit"]
    ]
    assert {"+86400 s", "-86400 s"} <= {f"{what.split()[3]} s" for what in whats}


def test_rows_written_beside_the_epoch_are_found_with_a_schedule_of_them(flights, tmp_path):
    code, report, printed = chaos(
        flights, tmp_path / "report.json", "--kills", "3", "--faults", "worker,driver", "--shrink",
        "--compare", "rows", "--folder", str(tmp_path), *program("broken.py", "producer"),
    )  # fmt: skip
    assert (code, report["exact"]) == (1, False)
    assert all("does not have" in difference for difference in report["differences"])
    assert "not part of the epoch" in report["explanation"]
    assert 1 <= len(report["smallest"]) <= 3  # whether fewer do depends on the moment of each
    path = tmp_path / "smallest.json"
    assert f"again: --schedule {path}" in printed
    assert json.loads(path.read_text()) == report["smallest"]


def test_a_keyed_program_is_exact_on_a_cluster_that_was_there(flights, late, tmp_path):
    with EmbeddedKafka() as kafka:
        code, report, _ = chaos(
            flights, tmp_path / "report.json", "--bootstrap-servers", kafka.bootstrap_servers,
            "--kills", "4", "--faults", "zombie,lose-reply,isolate,host", "--compare", "final",
            *late,
        )  # fmt: skip
        topics = AdminClient(kafka.confluent_options()).list_topics(timeout=20).topics
    assert (code, report["problems"], report["differences"]) == (0, [], [])
    assert hits(report) == {"zombie", "lose-reply", "isolate", "host"}
    assert report["state_keys"] == {"counts": 10}
    assert not {"flights", "late"} & topics.keys()


def test_a_program_that_writes_files_is_exact(flights, tmp_path):
    code, report, _ = chaos(
        flights, tmp_path / "report.json", "--kills", "4", "--faults", "driver,worker,disk,zombie",
        "--folder", str(tmp_path), *program("beside_topics.py"), output=("--output-files",),
    )  # fmt: skip
    assert (code, report["problems"], report["differences"]) == (0, [], [])
    assert hits(report) == {"driver", "worker", "disk", "zombie"}
    assert report["records"] == {"undisturbed": RECORDS, "found": RECORDS}
    folders = {path.name for path in (tmp_path / "faults" / "files").glob("dest=*")}
    assert folders == {f"dest={dest}" for dest in "ABCDEFGHIJ"}


def test_a_checkpoint_in_an_object_store_that_is_out_of_reach_again_and_again(
    flights, late, tmp_path, monkeypatch
):
    server = Server(tmp_path)
    s3 = server.create_bucket("bucket", access_key="key", secret_key="secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{server.host}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    try:
        code, report, _ = chaos(
            flights, tmp_path / "report.json", "--kills", "4", "--faults", "object-store,driver",
            "--compare", "final", "--checkpoint", "s3://bucket/chaos", *late,
        )  # fmt: skip
        kept = fs.FileSelector("bucket/chaos", recursive=True)
        paths = [info.path for info in s3.get_file_info(kept) if info.is_file]
    finally:
        server.stop()
    assert (code, report["problems"], report["differences"]) == (0, [], [])
    assert hits(report) == {"object-store", "driver"}
    assert report["state_keys"] == {"counts": 10}
    assert len({path.split("/")[2] for path in paths}) == 2, "one for each run"


def test_a_program_that_writes_a_table_is_exact(flights, tmp_path):
    server = PostgresServer()
    try:
        server.query("CREATE TABLE late (id bigint, dest text, delay bigint)")
        code, report, _ = chaos(
            flights, tmp_path / "report.json", "--kills", "3", "--faults", "driver,worker,zombie",
            "--postgres", server.dsn, *program("beside_topics.py", server.dsn),
            output=("--output-table", "late"),
        )  # fmt: skip
        rows = server.query("SELECT id FROM late ORDER BY id")
    finally:
        server.stop()
    assert (code, report["problems"], report["differences"]) == (0, [], [])
    assert hits(report) == {"driver", "worker", "zombie"}
    assert rows == [(number,) for number in range(RECORDS)]


def test_a_topic_and_tables_of_three_kinds_hold_the_same_rows(flights, tmp_path):
    server = PostgresServer()
    try:
        server.query("CREATE TABLE late (id bigint, dest text, delay bigint)")
        code, report, _ = chaos(
            flights, tmp_path / "report.json", "--kills", "4", "--faults",
            "driver,worker,zombie,host", "--postgres", server.dsn,
            *program("all_sinks.py", server.dsn),
            output=(
                "--output", "late", "--output-delta", "delta", "--output-iceberg", "air.late",
                "--output-table", "late",
            ),
        )  # fmt: skip
    finally:
        server.stop()
    assert (code, report["problems"], report["differences"]) == (0, [], [])
    assert hits(report) == {"driver", "worker", "zombie", "host"}
    assert report["records"] == {"undisturbed": 4 * RECORDS, "found": 4 * RECORDS}


def test_a_program_without_state_is_exact_in_order_through_all_faults(flights, tmp_path):
    code, report, _ = chaos(
        flights, tmp_path / "report.json", "--kills", "15", "--brokers", "3",
        *program("broken.py", "nothing"),
    )  # fmt: skip
    assert (code, report["problems"], report["differences"]) == (0, [], [])
    assert len(hits(report)) >= 10  # of 15 kinds: a busy machine leaves some without a target
    assert report["records"]["found"] == RECORDS
