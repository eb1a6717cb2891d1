"""`tallystick doctor` as users with the least rights, and with each of them missing."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tallystick.__main__ import app
from tallystick.testing import EmbeddedKafka
from tests.failover.job import Job
from tests.failover.known_rows import Shape
from tests.security.people import PASSWORDS, TOPIC, config_of, options_of
from tests.security.test_rights import LACKING, assert_no_secret

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]
USERS = {**LACKING, "observer": []}


@pytest.mark.parametrize(("user", "lacking"), USERS.items(), ids=USERS)
def test_what_a_login_lacks_is_found_with_the_acl_to_add(
    user: str, lacking: list, guarded: EmbeddedKafka, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "metadata").write_text('{"id": "doctors"}')
    shape = Shape(user, TOPIC, (0, 1))
    job = Job(
        shape, config_of(guarded, "admin"), folder, lineage="doctors", has_loop=True,
        accepted=frozenset({"new-lineage-after-" + user}),
    )  # fmt: skip
    job.run_until(1)
    job.close()
    options = options_of(guarded, user)
    servers = options.pop("bootstrap.servers")
    login = tmp_path / "login.properties"
    login.write_text("".join(f"{name}={value}\n" for name, value in options.items()))
    words = ["doctor", str(folder), "--bootstrap-servers", servers, "--kafka-options", str(login)]

    result = CliRunner().invoke(app, [*words, "--json"])

    report = json.loads(result.stdout)
    findings = [finding for finding in report["findings"] if finding["check"] == "rights"]
    assert [finding["severity"] for finding in findings] == ["error"] * bool(lacking)
    for right in lacking:
        assert f"user {user!r} lacks" in findings[0]["found"]
        assert str(right) in findings[0]["found"]
        assert right.grant in findings[0]["found"]
    wrong = {finding["check"] for finding in report["findings"] if finding["severity"] != "info"}
    if user == "alice":
        assert (result.exit_code, wrong) == (1, {"settings"}), "she may not see settings"
    elif user == "observer":
        assert (result.exit_code, wrong) == (0, set())
    else:
        assert result.exit_code == 2
    assert user in PASSWORDS
    assert_no_secret(result.output)


@pytest.mark.parametrize(
    ("user", "says"),
    [
        ("alice", ""),
        ("no-topic-write", f"WRITE on topic '{TOPIC}-out'"),
        ("no-topic-read", f"READ on topic '{TOPIC}-in'"),
        ("no-group", "READ on group 'tallystick-no-group-token'"),
        ("no-transactional-id", "WRITE on transactional id 'tallystick-no-transactional-id'"),
    ],
)
@pytest.mark.parametrize("transactions", ["epoch", "task"])
def test_a_pipelines_own_login_is_looked_at_before_it_has_run(
    user: str,
    says: str,
    transactions: str,
    guarded: EmbeddedKafka,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    options = guarded.kafka_options_for(user)
    servers = options.pop("kafka.bootstrap.servers")
    module = f"login_{transactions}_{user.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(
        "import tallystick as ts\n"
        f"source = ts.KafkaSource({servers!r}, topics=['{TOPIC}-in'], options={options!r})\n"
        f"sink = ts.KafkaSink({servers!r}, topic='{TOPIC}-out', options={options!r}, "
        f"transactions={transactions!r})\n"
        f"pipeline = ts.Pipeline({user!r}).read(source).write(sink)\n"
    )
    words = ["doctor", str(tmp_path / "new"), "--pipeline", f"{module}:pipeline", "--json"]

    result = CliRunner().invoke(app, words)

    findings = json.loads(result.stdout)["findings"]
    errors = [finding for finding in findings if finding["severity"] == "error"]
    assert result.exit_code == (2 if says else 1), "she may not see settings"
    assert {error["check"] for error in errors} == ({"rights"} if says else set())
    if transactions == "epoch" or user not in ("no-group", "no-transactional-id"):
        assert any(says in error["found"] for error in errors) or not says
    assert_no_secret(result.output)
