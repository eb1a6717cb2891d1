"""`tallystick transactions` with a database beside Kafka: what is prepared there."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from postgres_writing import COLUMNS, opened, prepared, rows_of
from real_postgres import PostgresServer
from typer.testing import CliRunner, Result

from tallystick.cli import app
from tallystick.sink.two_phase import Owner
from tallystick.testing.kafka import EmbeddedKafka
from tests.lingering_job import LingeringJob

OWNER = Owner("by hand", "postgres-1", "L")


@pytest.mark.broker
@pytest.mark.parametrize("way", ["prepared", "staged"])
def test_what_is_prepared_in_a_database_is_listed_and_settled_by_hand(
    way: str,
    tallystick_kafka: EmbeddedKafka,
    postgres: PostgresServer,
    table: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connection string comes from the environment: it may hold a password."""
    name = table(COLUMNS)
    driver = opened(postgres.dsn, name, OWNER, transactions=way)
    (decided,) = prepared(driver, rows_of(1, 2), checkpoint_id=0, owner=OWNER)
    (left,) = prepared(driver, rows_of(3), checkpoint_id=0, task=1, owner=OWNER)
    driver.close()
    job = LingeringJob(tmp_path / "checkpoint", OWNER.pipeline, OWNER.lineage)
    job.plan(0)
    job.decide(0, job.prepare(0, [decided]))
    monkeypatch.setenv("TALLYSTICK_POSTGRES_DSN", postgres.dsn)
    servers = tallystick_kafka.kafka_options["kafka.bootstrap.servers"]

    def call(command: str, *arguments: str) -> Result:
        words = ["transactions", command, *arguments, "--bootstrap-servers", servers]
        words += ["--checkpoint", str(job.folder), "--quiet-for", "0"]
        return CliRunner().invoke(app, words)

    told = json.loads(call("list", "--json", "--pipeline", OWNER.pipeline).stdout)["transactions"]
    described = call("describe", decided.name).output

    assert {each["transaction"]: each["standing"] for each in told} == {
        decided.name: "due",
        left.name: "unnamed",
    }
    assert {(each["system"], each["state"]) for each in told} == {("postgres", way)}
    assert "2 rows for table" in " ".join(described.split())
    assert call("commit", left.name).exit_code == 3
    assert call("abort", decided.name).exit_code == 3
    assert call("commit", decided.name).exit_code == 0
    assert call("abort", left.name).exit_code == 0
    assert postgres.query(f"SELECT a FROM {name} ORDER BY a") == [(1,), (2,)]
    assert json.loads(call("list", "--json", "--pipeline", OWNER.pipeline).stdout) == {
        "running": "",
        "transactions": [],
    }
