"""A password is nowhere: not in reprs, plans, errors, logs, checkpoints or process lists."""

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tallystick.kafka.broker import KafkaBroker
from tallystick.testing import EmbeddedKafka, Security
from tests.postgres.real_postgres import PostgresServer
from tests.spark import loaded_daemon
from tests.spark.driver_process import DriverProcess
from tests.spark.flow import Flow

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(900)]

PASSWORD = "Zebra.42-in-the-attic"


@pytest.fixture(scope="module")
def guarded_kafka() -> Iterator[EmbeddedKafka]:
    """A broker with TLS and passwords."""
    with EmbeddedKafka(security=Security({"admin": PASSWORD})) as kafka:
        yield kafka


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    """A server that takes any password."""
    server = PostgresServer()
    yield server
    server.stop()


@pytest.mark.parametrize("execution", ["resident", "jobs"])
def test_a_password_is_in_nothing_that_a_run_shows_or_leaves_behind(
    execution: str,
    guarded_kafka: EmbeddedKafka,
    postgres: PostgresServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs that succeed and one that fails, all said and kept by driver, workers and Spark."""
    monkeypatch.delenv(loaded_daemon.TEMPLATE)  # the workers' variables are Spark's own, then
    flow = Flow(guarded_kafka, None, tmp_path / "shown", execution=execution)
    flow.feed(30)
    folder, local = tmp_path / "left", tmp_path / "local"
    folder.mkdir()
    settings = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": folder.as_uri(),
        "spark.eventLog.compress": "false",
        "spark.local.dir": str(local),
        "log.level": "INFO",
    }
    with DriverProcess(folder / "driver.log", settings) as driver:
        prepared = Flow(guarded_kafka, None, tmp_path / "prepared", execution=execution)
        assert_no_process_shows_it(driver, local, prepared, postgres)
        driver.run(flow.spec(show=True, execution=execution))
        assert driver.wait_for_end() is None
        flow.feed(30)
        driver.run(flow.spec(show=True, execution=execution, reading_dies=True))
        error = driver.wait_for_end() or ""
    broker = KafkaBroker(flow.sink().output.config)
    token = broker.group_offsets(f"tallystick-{flow.name}-token")
    broker.close()

    assert PASSWORD in str(flow.kafka.kafka_options), "it is in use"
    texts = {
        "error": error,
        "token": str(token),
        "source": repr(flow.source()) + repr(flow.pipeline().inputs.declared(flow.name)),
        "sink": repr(flow.sink()) + repr(flow.sink().output),
        "pipeline": repr(flow.pipeline()),
    }
    checkpoints = (flow.checkpoint, prepared.checkpoint)
    for path in (path for kept in (folder, *checkpoints) for path in kept.rglob("*")):
        if path.is_file():
            texts[str(path.relative_to(tmp_path))] = path.read_bytes().decode("latin-1")
    assert f"{flow.checkpoint.name}/tallystick/" in " ".join(texts)
    assert "lineage" in texts["token"]
    assert any("SparkListenerSQLExecutionStart" in text for text in texts.values())
    assert "this attempt died while it read" in error
    assert "== Physical Plan ==" in texts["left/driver.log"]
    assert sorted(name for name, text in texts.items() if PASSWORD in text) == []


def assert_no_process_shows_it(
    driver: DriverProcess, local: Path, flow: Flow, postgres: PostgresServer
) -> None:
    """Driver, JVM and workers, while their output is prepared in Kafka and in PostgreSQL.

    Their arguments and variables are what `ps` and a core dump's collector see first. Spark's local
    folder holds what it spills and broadcasts.
    """
    pids = flow.folder.with_name("pids")
    table = f"public.of_{flow.execution}_{uuid.uuid4().hex}"
    postgres.query(f"CREATE TABLE {table} (key bytea, value bytea)")
    flow.feed(30)
    kafka = {"kind": "kafka", "uid": "one"}
    sql = {"kind": "postgres", "uid": "two", "table": table, "dsn": dsn_with_password(postgres)}
    driver.run(
        flow.spec(
            execution=flow.execution,
            sinks=[kafka, sql],
            tells_pids=str(pids),
            block_at="ManifestWritten",
            occurrence=2,  # after the seed, with all tasks done
        )
    )
    driver.wait_until_blocked()
    shown = {pid: text for pid in family_of(driver.pid) if (text := process_texts(pid))}
    files = [path for path in local.rglob("*") if path.is_file()]
    kept = {str(path): path.read_bytes() for path in files}
    assert postgres.query("SELECT count(*) > 0 FROM pg_prepared_xacts") == [(True,)]
    driver.go_on()
    assert driver.wait_for_end() is None

    assert postgres.query(f"SELECT count(*) FROM {table}") == [(30,)]
    workers = {int(path.name) for path in pids.iterdir()}
    assert workers
    assert {driver.pid, *workers} <= shown.keys()
    assert any(b"org.apache.spark.deploy.SparkSubmit" in text for text in shown.values())
    secret = PASSWORD.encode()
    assert [text for text in shown.values() if secret in text] == []
    assert sorted(name for name, text in kept.items() if secret in text) == []


def dsn_with_password(postgres: PostgresServer) -> str:
    return f"{postgres.dsn} password={PASSWORD}"


def family_of(pid: int) -> list[int]:
    """A process and all below it, those too that have ended and wait to be reaped."""
    pids = [pid]
    for process_id in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for thread in Path(f"/proc/{process_id}/task").iterdir():
                pids += map(int, (thread / "children").read_text().split())
    return pids


def process_texts(pid: int) -> bytes:
    """The arguments and the variables of a process; nothing if it has ended."""
    try:
        texts = [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
    except (FileNotFoundError, ProcessLookupError):
        return b""
    return b"\0".join(texts)
