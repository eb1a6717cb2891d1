"""A pipeline's recovery with a database beside Kafka: what is prepared there, and listed before."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from postgres_writing import COLUMNS, opened, prepared, rows_of
from typer.testing import CliRunner

import tallystick as ts
from tallystick.__main__ import app
from tallystick.epoch.two_phase import Owner
from tallystick.pipeline.recovery import SinkRecovery
from tallystick.testing.kafka import EmbeddedKafka
from tests.lingering_job import LingeringJob
from tests.postgres.real_postgres import PostgresServer

OWNER = Owner("recovered", "postgres-1", "L")


@pytest.mark.broker
@pytest.mark.parametrize("way", ["prepared", "staged"])
def test_what_is_prepared_in_a_database_is_listed_and_recovered(
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
    (decided,) = prepared(driver, rows_of(1, 2), checkpoint_id=1, owner=OWNER)
    (undecided,) = prepared(driver, rows_of(3), checkpoint_id=1, task=1, owner=OWNER)
    driver.close()
    job = LingeringJob(tmp_path / "checkpoint", OWNER.pipeline, OWNER.lineage, is_loops=True)
    job.decide(1, job.prepare(1, [decided]))
    monkeypatch.setenv("TALLYSTICK_POSTGRES_DSN", postgres.dsn)
    servers = tallystick_kafka.kafka_options["kafka.bootstrap.servers"]
    sink = ts.PostgresSink(postgres.dsn, table=name, transactions=way)
    source = ts.KafkaSource(servers, topics=["no-such-topic"])
    pipeline = ts.Pipeline(OWNER.pipeline).read(source).write(sink)

    def listed() -> dict[str, tuple[str, str, str]]:
        words = ["transactions", "list", "--json", "--pipeline", OWNER.pipeline]
        where = ["--bootstrap-servers", servers, "--checkpoint", str(job.folder)]
        transactions = json.loads(CliRunner().invoke(app, [*words, *where]).stdout)["transactions"]
        return {entry["transaction"]: (entry["standing"], entry["system"], entry["state"])
                for entry in transactions}  # fmt: skip

    before = listed()
    done = pipeline.recover(checkpoint=str(job.folder))
    again = pipeline.recover(checkpoint=str(job.folder))

    assert before == {
        decided.name: ("due", "postgres", way),
        undecided.name: ("unnamed", "postgres", way),
    }
    assert done.sinks == (SinkRecovery("postgres-1", committed=1, aborted=1),)
    assert again.sinks == (SinkRecovery("postgres-1"),)
    assert postgres.query(f"SELECT a FROM {name} ORDER BY a") == [(1,), (2,)]
    assert listed() == {}
