"""How fast rows get into PostgreSQL: our binary COPY beside a text COPY and executemany.

python benchmarks/postgres_copy.py [rows]

The server is one of the tests', in a temporary folder. Each way writes the same rows, of an
integer, a text of 40 characters, a float, a time and a decimal, into an empty table in one
transaction; then the cost of a commit is shown, by COMMIT PREPARED and by moving staged rows.
"""

import io
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "postgres"))

from real_postgres import PostgresServer

from tallystick.epoch.two_phase import Committable, Owner, Place, RunFacts
from tallystick.postgres.binary_copy import TableColumn, binary_copy, encoders_for
from tallystick.postgres.connection import idle_connections
from tallystick.postgres.sink import PostgresSink

ROWS = 1_000_000
BATCH_ROWS = 50_000
EXECUTEMANY_SHARE = 10
"""Of so many rows one: it would take minutes."""
OWNER = Owner("benchmark", "postgres", "lineage")
DDL = "n bigint, t text, f double precision, at timestamptz, d numeric"
KINDS = {"n": "int8", "t": "text", "f": "float8", "at": "timestamptz", "d": "numeric"}


def sample(count: int) -> list[pa.RecordBatch]:
    """Rows that do not repeat, in batches."""
    numbers = np.arange(count)
    table = pa.table(
        {
            "n": pa.array(numbers),
            "t": pa.array([f"flight {n:09d} was late again today".ljust(40) for n in numbers]),
            "f": pa.array(np.random.default_rng(0).random(count)),
            "at": pa.array(numbers * 1_000_003 + 1_700_000_000_000_000, pa.timestamp("us", "UTC")),
            "d": pa.array(numbers).cast(pa.decimal128(24, 2)),
        }
    )
    return list(table.to_batches(BATCH_ROWS))


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def encode(batches: list[pa.RecordBatch]) -> None:
    """Without a server."""
    columns = [TableColumn(name, kind, kind) for name, kind in KINDS.items()]
    encoders = encoders_for(batches[0].schema, columns, "t")
    for _ in binary_copy(batches, encoders):
        pass


def text_copy(server: PostgresServer, batches: list[pa.RecordBatch]) -> None:
    """As CSV, by pyarrow's writer: the fastest text there is."""
    options = csv.WriteOptions(include_header=False, quoting_style="none")
    with server.connect() as connection, connection.transaction():
        with connection.cursor().copy("COPY t FROM STDIN (FORMAT csv)") as copy:
            for rows in batches:
                out = io.BytesIO()
                csv.write_csv(rows, out, options)
                copy.write(out.getvalue())


def executemany(server: PostgresServer, batches: list[pa.RecordBatch]) -> None:
    """As Python rows, pipelined by psycopg."""
    with server.connect() as connection, connection.transaction():
        for rows in batches:
            connection.cursor().executemany(
                "INSERT INTO t VALUES (%s, %s, %s, %s, %s)",
                list(zip(*(column.to_pylist() for column in rows.columns), strict=True)),
            )


def report(what: str, seconds: float, count: int) -> float:
    """Print what was measured; returns rows per second."""
    rate = count / seconds
    print(f"{what:34} {seconds:8.3f} s {rate / 1e3:9.0f} thousand rows/s")
    return rate


def ours(server: PostgresServer, batches: list[pa.RecordBatch], way: str, count: int) -> float:
    """A task's part and the driver's; the rate of the task's."""
    driver = PostgresSink(server.dsn, table="t", transactions=way).open(OWNER, RunFacts())
    transaction = driver.plan().begin(Place(OWNER, 1, 0, 0, way))
    committables: list[Committable] = []

    def write() -> None:
        for rows in batches:
            transaction.write(rows)
        committables.extend(transaction.prepare())

    rate = report(f"binary COPY, {way}", timed(write), count)
    seconds = timed(lambda: [driver.commit(committable) for committable in committables])
    print(f"  its commit {seconds:31.3f} s")
    driver.close()
    assert server.query("SELECT count(*) FROM t") == [(count,)]
    server.query("TRUNCATE t")
    return rate


def main(count: int) -> None:
    """Run all ways once; print seconds, rates and ratios."""
    batches = sample(count)
    server = PostgresServer(max_wal_size="4GB", shared_buffers="256MB")
    try:
        server.query(f"CREATE TABLE t ({DDL})")
        report("encoding alone", timed(lambda: encode(batches)), count)
        binary = ours(server, batches, "prepared", count)
        ours(server, batches, "staged", count)
        text = report(
            "text COPY (CSV by pyarrow)", timed(lambda: text_copy(server, batches)), count
        )
        server.query("TRUNCATE t")
        few = batches[: max(1, len(batches) // EXECUTEMANY_SHARE)]
        some = sum(rows.num_rows for rows in few)
        many = report("executemany", timed(lambda: executemany(server, few)), some)
        print(
            f"binary COPY is {binary / text:.2f} times text COPY, {binary / many:.1f} times "
            f"executemany"
        )
    finally:
        idle_connections.close()
        server.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else ROWS)
