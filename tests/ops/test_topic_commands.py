"""`tallystick topic` and `tallystick broker start --topics --sample`, beside confluent-kafka."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from typer.testing import CliRunner

from tallystick.__main__ import app
from tallystick.codec.records.plain import PlainRecord
from tallystick.errors import OptionError
from tallystick.ops import cli_topic
from tallystick.testing.process import free_ports
from tallystick.testing.samples import sample
from tests.waiting import wait_until

WAIT_S = 120.0


def record(value: bytes | None, key: bytes | None = None, *headers: Any) -> PlainRecord:
    return PlainRecord(7, 1000, key, value, headers)


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (b'{"a": 1.0, "b": 1e400}', '{"a": 1.0, "b": 1e400}'),
        (b'{\n  "a": 1\n}\n', '{   "a": 1 }'),
        ('{"a":"\u009b2Jé\u202e"}'.encode(), r'{"a":"\u009b2Jé\u202e"}'),
        (b"late", '"late"'),
        (b"NaN", '"NaN"'),
        (b"two\nlines", r'"two\nlines"'),
        (b"", '""'),
        (b"\xff\x00", '{"base64": "/wA="}'),
        (None, "null"),
    ],
)
def test_any_value_is_one_line_of_json(value: bytes | None, line: str) -> None:
    """It neither ends the line nor steers the terminal, and JSON keeps its numbers as written."""
    assert cli_topic._line(0, record(value), keys=False, headers=False) == line
    json.loads(line)


def test_keys_and_headers_stand_beside_the_value_if_they_are_wanted() -> None:
    shown = record(b'{"n":1}', b"JFK", ("trace", b"a"), ("trace", None))

    assert json.loads(cli_topic._line(2, shown, keys=True, headers=True)) == {
        "partition": 2,
        "offset": 7,
        "timestamp": 1000,
        "key": "JFK",
        "headers": [["trace", "a"], ["trace", None]],
        "value": {"n": 1},
    }
    assert "headers" not in cli_topic._line(2, shown, keys=True, headers=False)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (b'{"dest": "JFK"}', b"JFK"),
        (b'{"dest": null}', None),
        (b'{"dest": 4.50}', b"4.5"),
        (b'{"dest": true}', b"true"),
        (b'{"dest": {"a": [1]}}', b'{"a":[1]}'),
    ],
)
def test_the_key_is_the_text_of_a_field(text: bytes, key: bytes | None) -> None:
    assert cli_topic._key(text, "dest") == key
    assert cli_topic._key(text, None) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{dest: 1}", "no JSON: Expecting property name"),
        (b'{"dest": NaN}', "NaN is no JSON"),
        (b'{"dst": "JFK"}', "no field 'dest' for the key. Did you mean 'dst'?"),
        (b"[1]", "no field 'dest' for the key"),
    ],
)
def test_a_line_that_has_no_key_is_told(text: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("?", r"\?")):
        cli_topic._key(text, "dest")


def test_topics_are_named_with_their_partitions() -> None:
    assert cli_topic.partition_counts(["flights:3", "late"]) == {"flights": 3, "late": 1}
    for text in ("flights:", "flights:0", "flights:x", ":3", ""):
        with pytest.raises(OptionError, match="expected NAME:PARTITIONS, such as flights:3"):
            cli_topic.partition_counts([text])
    with pytest.raises(OptionError, match="'late' is named twice"):
        cli_topic.partition_counts(["late:1", "late"])


def test_a_broker_that_is_not_there_is_told_with_the_reason() -> None:
    (port,) = free_ports(1, "127.0.0.1")
    ran = CliRunner().invoke(
        app, ["topic", "read", "late", "--bootstrap-servers", f"127.0.0.1:{port}"]
    )

    assert ran.exit_code == 1
    assert f"127.0.0.1:{port}: connection refused" in ran.output
    assert "Traceback" not in ran.output


def test_an_unknown_sample_is_refused_before_anything_starts() -> None:
    ran = CliRunner().invoke(app, ["broker", "start", "--sample", "flight"])

    assert ran.exit_code == 1
    assert "Did you mean 'flights'?" in ran.output


def test_a_reader_of_topics_loads_no_compiled_kernels() -> None:
    """They take longer to load than the first record may take to be shown."""
    program = (
        "import sys, tallystick.__main__, tallystick.kafka.topics, tallystick.kafka.reach\n"
        "print([name for name in ('numba', 'pandas', 'pyspark') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert ran.stdout == "[]\n", ran.stderr


def test_the_sample_is_real_flights() -> None:
    rows = sample("flights")

    assert len(rows) == 1000
    assert [row["id"] for row in rows] == [*range(1000)]
    assert rows[0]["dest"] == "IAH"
    assert sum(row["dep_delay"] is None for row in rows) == 4


class Command:
    """A command in a process of its own, with Ctrl-C as in a terminal."""

    def __init__(self, folder: Path, name: str, *words: str, stdin: Any = None) -> None:
        self.output, self.errors = folder / f"{name}.out", folder / f"{name}.err"
        with self.output.open("wb") as output, self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tallystick", *words],
                stdin=stdin,
                stdout=output,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
            )

    def wait_for(self, path: Path, text: str) -> None:
        def is_there() -> bool:
            assert self.process.poll() is None or text in path.read_text(), self.errors.read_text()
            return text in path.read_text()

        wait_until(is_there, lambda: f"{text!r}: {path.read_text()}", timeout_s=WAIT_S)

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(WAIT_S)


@contextmanager
def started(command: Command) -> Iterator[Command]:
    try:
        yield command
    finally:
        command.process.kill()
        command.process.wait()


def consumed(servers: str, topic: str, count: int) -> list[Any]:
    """The committed records of a topic by an independent client."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "independent"})
    try:
        consumer.assign([TopicPartition(topic, partition, 0) for partition in range(3)])
        records = consumer.consume(count, timeout=WAIT_S)
        return [*records, *consumer.consume(1, timeout=1.0)]
    finally:
        consumer.close()


@pytest.mark.broker
def test_topics_are_made_filled_and_read_beside_confluent_kafka(tmp_path: Path) -> None:
    (port,) = free_ports(1, "127.0.0.1")
    servers = f"127.0.0.1:{port}"
    start = ["broker", "start", "--port", str(port), "--topics", "flights:3,late:3"]
    with started(Command(tmp_path, "broker", *start, "--sample", "flights")) as broker:
        broker.wait_for(broker.errors, "Ctrl-C stops it.")
        assert "Topic 'flights': 3 partitions, 1,000 records." in broker.errors.read_text()
        assert f"tallystick topic read flights --bootstrap-servers {servers}" in (
            broker.errors.read_text()
        )
        assert broker.output.read_text() == f"{servers}\n"
        check_sample_written(servers)
        check_committed_only(servers, tmp_path)
        check_put(servers)
        check_errors(servers)
        assert broker.interrupt() == 0
        assert broker.errors.read_text().endswith("Stopped.\n")


def run(servers: str, *words: str, stdin: str = "", exit_code: int = 0) -> tuple[list[str], str]:
    """Run a topic command; return its lines and its messages."""
    ran = CliRunner().invoke(
        app, ["topic", *words, "--bootstrap-servers", servers], input=stdin.encode()
    )
    assert ran.exit_code == exit_code, ran.output
    return ran.stdout.splitlines(), ran.stderr


def check_sample_written(servers: str) -> None:
    records = consumed(servers, "flights", 1000)
    lines, words = run(servers, "read", "flights")

    assert sorted(lines) == sorted(one.value().decode() for one in records)
    assert words == "1,000 records of 'flights'.\n"
    assert sorted(map(json.loads, lines), key=lambda row: row["id"]) == sample("flights")
    assert {one.key().decode() for one in records} == {row["carrier"] for row in sample("flights")}
    (count,), _ = run(servers, "read", "flights", "--count")
    assert json.loads(count)["records"] == 1000
    assert sum(json.loads(count)["partitions"].values()) == 1000


def check_committed_only(servers: str, folder: Path) -> None:
    """Records of an aborted and of an open transaction are not shown; a follower sees the rest."""
    producer = Producer({"bootstrap.servers": servers, "transactional.id": "late-writer"})
    producer.init_transactions(WAIT_S)
    for value, commits in (("aborted", False), ("committed", True)):
        producer.begin_transaction()
        producer.produce("late", json.dumps(value), b"key", headers=[("trace", b"\xff")])
        producer.flush(WAIT_S)
        producer.commit_transaction(WAIT_S) if commits else producer.abort_transaction(WAIT_S)
    producer.begin_transaction()
    producer.produce("late", '"open"')
    producer.flush(WAIT_S)

    (line,), words = run(servers, "read", "late", "--keys", "--headers")
    shown = json.loads(line)
    follow = ["topic", "read", "late", "--follow", "--bootstrap-servers", servers]
    with started(Command(folder, "follow", *follow)) as follower:
        follower.wait_for(follower.output, "committed")
        producer.commit_transaction(WAIT_S)
        follower.wait_for(follower.output, "open")
        assert follower.interrupt() == 0
        assert follower.errors.read_text() == "2 records of 'late'.\n"

    assert (shown["value"], shown["key"]) == ("committed", "key")
    assert shown["headers"] == [["trace", {"base64": "/w=="}]]
    assert words == "1 record of 'late'.\n"
    assert follower.output.read_text().splitlines() == ['"committed"', '"open"']


def check_put(servers: str) -> None:
    _, made = run(servers, "create", "put:3", "--config", "retention.ms=60000")
    run(servers, "create", "put:3")
    _, other = run(servers, "create", "put:4", exit_code=1)
    values = [json.dumps({"dest": f"D{number % 7}", "n": number}) for number in range(300)]
    _, words = run(servers, "put", "put", "--key", "dest", stdin="\n".join(values))
    _, wrong = run(servers, "put", "put", stdin='{"n": 1}\n\n{n: 2}\n{"n": 3}\n', exit_code=1)
    records = consumed(servers, "put", 301)

    assert made == "Topic 'put' has 3 partitions.\n"
    assert "exists already, with 3 partitions: expected 4" in other
    assert words == "300 records to 'put'.\n"
    assert wrong.startswith("1 record to 'put'.\nline 3: no JSON:")
    assert sorted(one.value().decode() for one in records) == sorted([*values, '{"n": 1}'])
    places: dict[bytes, set[int]] = {}
    for one in records:
        if one.key() is not None:
            assert one.key().decode() == json.loads(one.value())["dest"]
            places.setdefault(one.key(), set()).add(one.partition())
    assert all(len(partitions) == 1 for partitions in places.values()), "one place for each key"
    assert len(set.union(*places.values())) > 1


def check_errors(servers: str) -> None:
    _, words = run(servers, "read", "flght", exit_code=1)

    assert f"topic 'flght' does not exist at {servers}. Did you mean 'flights'?" in words
    assert "`tallystick topic create flght` makes it" in words
