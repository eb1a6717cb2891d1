"""What a run opened on the driver is closed when it ends: connections, sessions, threads."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException

import tallystick as ts
from tallystick.errors import OptionError
from tallystick.testing.process import free_ports
from tests.postgres.real_postgres import PostgresServer
from tests.spark.flow import Flow, finish, pass_on
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.spark]

WAIT_S = 20.0
ESTABLISHED = "01"


class OverTcp(PostgresServer):
    """A server whose sessions of one process can be told from those that its workers keep."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1, "127.0.0.1")
        super().__init__(listen_addresses="'127.0.0.1'", port=str(self.port))

    @property
    def dsn(self) -> str:
        """How to connect."""
        return f"host=127.0.0.1 port={self.port} user=postgres dbname=postgres"


@pytest.fixture(scope="module")
def postgres() -> Iterator[OverTcp]:
    server = OverTcp()
    yield server
    server.stop()


def sockets(port: int) -> int:
    """How many connections to this port on this machine are this process's own."""
    peers = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == ESTABLISHED and int(fields[2].rpartition(":")[2], 16) == port:
                peers.add(f"socket:[{fields[9]}]")
    return sum(_target(path) in peers for path in Path("/proc/self/fd").iterdir())


def _target(path: Path) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:  # closed meanwhile
        return ""


class Open:
    """What is open now, to compare with later."""

    def __init__(self, flow: Flow, postgres: OverTcp) -> None:
        broker = flow.kafka.bootstrap_servers.split(",")[0]
        self._ports = (int(broker.rpartition(":")[2]), postgres.port)
        self._before = self._now()

    def _now(self) -> tuple[int, int, int]:
        threads = [
            thread for thread in threading.enumerate() if thread.name.startswith("tallystick")
        ]
        broker, database = map(sockets, self._ports)
        return broker, database, len(threads)

    def assert_more(self) -> None:
        """The sinks are connected: the test can fail."""
        more = [now > before for now, before in zip(self._now(), self._before, strict=True)]
        assert more[:2] == [True, True], (self._before, self._now())

    def assert_as_before(self) -> None:
        """Spark tells of the end a little later, so it may take a moment."""
        deadline = time.monotonic() + WAIT_S
        while any(now > before for now, before in zip(self._now(), self._before, strict=True)):
            assert time.monotonic() < deadline, (self._before, self._now())
            time.sleep(0.1)


def to_postgres(postgres: OverTcp, flow: Flow) -> ts.PostgresSink:
    table = f'"{flow.name}"'
    postgres.query(f"CREATE TABLE {table} (key bytea, value bytea NOT NULL)")
    return ts.PostgresSink(postgres.dsn, table=table)


@pytest.mark.parametrize("transactions", ["epoch", "task"])
def test_a_pipeline_that_ended_leaves_nothing_open(
    flow: Flow, postgres: OverTcp, transactions: str
) -> None:
    flow.feed(30)
    table = to_postgres(postgres, flow)
    opened = Open(flow, postgres)
    pipeline = ts.Pipeline(flow.name).read(flow.source()).map_batches(pass_on())
    seen: list[None] = []

    def look(_: object) -> None:
        if not seen:
            opened.assert_more()
            seen.append(None)

    flow.run(
        pipeline.write(flow.sink(transactions=transactions), table),
        listener=look,
    )
    flow.assert_exact()
    assert seen
    opened.assert_as_before()


def test_a_start_that_is_refused_leaves_nothing_open(flow: Flow, postgres: OverTcp) -> None:
    flow.feed(30)
    opened = Open(flow, postgres)
    pipeline = ts.Pipeline(flow.name).read(flow.source()).map_batches(pass_on())
    missing = ts.PostgresSink(postgres.dsn, table="missing")
    with pytest.raises(OptionError, match="missing"):
        flow.run(pipeline.write(flow.sink(), missing))
    opened.assert_as_before()


def test_a_query_that_failed_leaves_nothing_open(flow: Flow, postgres: OverTcp) -> None:
    """After a source that is not ours, whose session nobody listens to otherwise."""
    assert flow.spark is not None
    opened = Open(flow, postgres)
    rows = flow.spark.readStream.format("rate").load().selectExpr("string(value) AS value")
    sink = flow.sink(name=flow.name)

    def fails(batch: object, batch_id: int) -> None:
        sink(batch, batch_id)
        raise RuntimeError("after the epoch")

    with pytest.raises(StreamingQueryException, match="after the epoch"):
        finish(
            rows.writeStream.option("checkpointLocation", str(flow.checkpoint))
            .trigger(processingTime="0 seconds")
            .foreachBatch(fails)
            .start
        )
    opened.assert_as_before()
    wait_until(lambda: not sink._runner._runners, lambda: f"open: {sink._runner._runners}")
