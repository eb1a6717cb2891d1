"""The programs of a campaign; argv says which, with what parallelism, and which transactions.

python -m tests.campaign.jobs keyed SERVERS CHECKPOINT PARALLELISM
"""

import os
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.catalog import load_catalog
from pyiceberg.schema import Schema
from pyiceberg.table.sorting import SortDirection, SortField, SortOrder
from pyiceberg.types import LongType, NestedField, StringType
from pyspark import cloudpickle
from pyspark.sql import DataFrame

import tallystick as ts
from tallystick.kafka.config import KafkaConfig
from tallystick.ops import savepoints
from tallystick.ops.checkpoint_view import asking
from tallystick.storage.file_storage import FileStorage
from tallystick_tools.chaos.program import FILES_VARIABLE
from tests.campaign import oracles
from tests.campaign.stores import DELTA, DSN_VARIABLE, LAKE, PREPARED, STAGED
from tests.iceberg.iceberg_sinks import NAME, catalog_in
from tests.spark import lines_sink
from tests.spark.lines_sink import LinesSink

cloudpickle.register_pickle_by_value(lines_sink)  # workers need no tests

BETS = "id long, player string, amount long, at long"
ODDS = "player string, odds long, at long"
BETS_TOPIC, ODDS_TOPIC = "bets", "odds"


@dataclass(frozen=True)
class Workload:
    """A program, and what two runs of it have in common whatever happens.

    Args:
        start: Starts it, given the servers, the checkpoint and the parallelism; returns a query.
        compare: As `tallystick chaos --compare` has it.
        inputs: Topics that it reads.
        outputs: Topics that it writes.
        asks: The questions, in Jepsen's words, that it answers.
        store: The place beside topics that it writes, by its name in `STORES`; "": none.
    """

    start: Callable[[str, str, int], object]
    compare: str
    outputs: tuple[str, ...]
    asks: str
    inputs: tuple[str, ...] = (BETS_TOPIC,)
    store: str = ""
    oracle: Callable[[oracles.Inputs], list[oracles.Row]] | None = None
    """The rows that it must write, by the input alone; None: those of an undisturbed run."""
    own: str = ""
    """With an oracle: a field in which each row has a value of its own, by chance."""
    copies: tuple[str, ...] = ()
    """With an oracle: the outputs, as the store names them, that have the topics' rows too."""


def source(servers: str, topic: str = BETS_TOPIC, columns: str = BETS) -> ts.KafkaSource:
    return ts.KafkaSource(
        servers, topics=[topic], value=ts.Json(columns), starting_offsets="earliest"
    )


def sink(servers: str, topic: str = "out", **options: object) -> ts.KafkaSink:
    return ts.KafkaSink(servers, topic=topic, key="player", value=ts.Json(), **options)


def large(bets: pa.RecordBatch) -> pa.RecordBatch:
    return bets.filter(pc.greater(bets["amount"], 20))


def rows_through(
    name: str,
    servers: str,
    checkpoint: str,
    function: Callable[[pa.RecordBatch], pa.RecordBatch],
    *sinks: object,
) -> object:
    """Start a pipeline of one function of rows."""
    return (
        ts.Pipeline(name)
        .read(source(servers))
        .map_batches(function)
        .write(*sinks)
        .start(checkpoint=checkpoint)
    )


def copied(servers: str, checkpoint: str, parallelism: int) -> object:
    return rows_through("copied", servers, checkpoint, large, sink(servers))


def by_task(servers: str, checkpoint: str, parallelism: int) -> object:
    return rows_through("by-task", servers, checkpoint, large, sink(servers, transactions="task"))


def keyed(servers: str, checkpoint: str, parallelism: int) -> object:
    totals = ts.aggregate({"n": ts.count(), "amount": ts.sum("amount"), "last": ts.maximum("id")})
    return (
        ts.Pipeline("keyed")
        .read(source(servers))
        .key_by("player")
        .process(totals, uid="totals", parallelism=parallelism)
        .write(sink(servers))
        .start(checkpoint=checkpoint)
    )


def windowed(servers: str, checkpoint: str, parallelism: int) -> object:
    minutes = ts.windowed(
        ts.hopping("10 seconds", every="5 seconds"), {"n": ts.count(), "amount": ts.sum("amount")}
    )
    return (
        ts.Pipeline("windowed")
        .read(source(servers))
        .key_by("player")
        .process(
            minutes,
            uid="minutes",
            event_time="at",
            watermark_delay="2 seconds",
            idle_after="1 hour",  # a partition that is behind makes no row late
            parallelism=parallelism,
        )
        .write(sink(servers))
        .start(checkpoint=checkpoint)
    )


def joined(servers: str, checkpoint: str, parallelism: int) -> object:
    return (
        ts.Pipeline("joined")
        .read(bets=source(servers), odds=source(servers, ODDS_TOPIC, ODDS))
        .key_by(bets="player", odds="player")
        .process(
            ts.interval_join("bets", "odds", lower="-1 second", upper="1 second"),
            event_time={"bets": "at", "odds": "at"},
            watermark_delay="2 seconds",
            idle_after="1 hour",  # a partition that is behind makes no row late
            uid="joined",
            parallelism=parallelism,
        )
        .write(sink(servers))
        .start(checkpoint=checkpoint)
    )


def two_topics(servers: str, checkpoint: str, parallelism: int) -> object:
    once = ts.deduplicate()
    return (
        ts.Pipeline("two-topics")
        .read(source(servers))
        .key_by("player", "id")
        .process(once, uid="once", parallelism=parallelism)
        .write(sink(servers), sink(servers, "copy", transactions="task"))
        .start(checkpoint=checkpoint)
    )


def files(servers: str, checkpoint: str, parallelism: int) -> object:
    return rows_through(
        "files", servers, checkpoint, large, sink(servers), ts.FileSink(os.environ[FILES_VARIABLE])
    )


def tables(servers: str, checkpoint: str, parallelism: int) -> object:
    """Write into two tables, and nothing to Kafka: the checkpoint decides."""
    return rows_through(
        "tables",
        servers,
        checkpoint,
        columns,
        ts.PostgresSink(os.environ[DSN_VARIABLE], table=PREPARED),
        ts.PostgresSink(
            os.environ[DSN_VARIABLE], table=STAGED, transactions="staged", key=["player", "id"]
        ),
    )


def table(servers: str, checkpoint: str, parallelism: int) -> object:
    return rows_through(
        "table",
        servers,
        checkpoint,
        columns,
        sink(servers),
        ts.PostgresSink(os.environ[DSN_VARIABLE], table=PREPARED),
    )


def lake(servers: str, checkpoint: str, parallelism: int) -> object:
    """Write to a topic, and to tables that are committed for many epochs at a time."""
    folder = os.environ[FILES_VARIABLE]
    catalog = catalog_in(Path(folder))
    columns = [(name, pa.int64()) for name in ("id", "amount", "at")]
    columns += [(name, pa.string()) for name in ("player", "team")]
    settings = {"schema": pa.schema(columns), "commit_every": "2 seconds"}
    make_sorted_table(catalog)
    return rows_through(
        "lake",
        servers,
        checkpoint,
        with_team,
        sink(servers),
        ts.DeltaSink(f"{folder}/{DELTA}", create=True, partition_by=["team"], **settings),
        ts.IcebergSink(catalog, NAME, **settings),
    )


def make_sorted_table(settings: dict[str, str]) -> None:
    """Make the Iceberg table of bets, the latest first, unless another life has made it."""
    catalog = load_catalog("default", **settings)
    catalog.create_namespace_if_not_exists(NAME.partition(".")[0])
    columns = [NestedField(at, name, LongType()) for at, name in enumerate(["id", "amount", "at"])]
    columns += [NestedField(3, "player", StringType()), NestedField(4, "team", StringType())]
    latest_first = SortOrder(SortField(source_id=0, direction=SortDirection.DESC))
    catalog.create_table_if_not_exists(NAME, Schema(*columns), sort_order=latest_first)


def answered(servers: str, checkpoint: str, parallelism: int) -> object:
    """Ask a server for each row, with what a module has made at its import."""
    from tests.campaign import lookups  # it connects

    def ask(bets: pa.RecordBatch) -> pa.RecordBatch:
        players = bets["player"].to_pylist()
        count = lookups.REFRESHER.count
        if players:
            lookups.wait_for_refresh(count)
        return pa.record_batch(
            {
                "player": bets["player"],
                "id": bets["id"],
                "answer": [lookups.CLIENT.ask(f"{value}") for value in bets["id"].to_pylist()],
                "team": [lookups.team_of(player) for player in players],
                "is_refreshed": [lookups.REFRESHER.count > count] * len(players),
                "draw": [lookups.GENERATOR.getrandbits(62) for _ in players],
            }
        )

    return rows_through("answered", servers, checkpoint, ask, sink(servers))


def twice_windowed(servers: str, checkpoint: str, parallelism: int) -> object:
    """Windows of windows, behind a step without time, of partitions that are not equally far."""
    sums = {"n": ts.count(), "amount": ts.sum("amount")}
    long = {"n": ts.sum("n"), "amount": ts.sum("amount"), "windows": ts.count()}
    return (
        ts.Pipeline("twice-windowed")
        .read(source(servers, oracles.UNEVEN_TOPIC))
        .map_batches(with_team, schema=f"{BETS}, team string")
        .key_by("player", "id")
        .process(ts.deduplicate(), uid="once", parallelism=parallelism)
        .key_by("team", "player")
        .process(
            ts.windowed(ts.tumbling("1 second"), sums),
            uid="players",
            event_time="at",
            watermark_delay=f"{oracles.DELAY_MS} milliseconds",
            idle_after="1 hour",  # a partition that is behind makes no row late
            parallelism=parallelism,
        )
        .key_by("team")
        .process(
            ts.windowed(ts.tumbling("10 seconds"), long),
            uid="teams",
            event_time="window_end",
            parallelism=parallelism,
        )
        .write(ts.KafkaSink(servers, topic="out", key="team", value=ts.Json()))
        .start(checkpoint=checkpoint)
    )


def with_team(bets: pa.RecordBatch) -> pa.RecordBatch:
    numbers = [int(player[1:]) % 3 for player in bets["player"].to_pylist()]
    teams = pa.array([f"t{number}" for number in numbers], pa.string())
    return bets.select(["id", "player", "amount", "at"]).append_column("team", teams)


def own_sink(servers: str, checkpoint: str, parallelism: int) -> object:
    return rows_through(
        "own-sink",
        servers,
        checkpoint,
        keyed_text,
        ts.KafkaSink(servers, topic="out"),
        LinesSink(os.environ[FILES_VARIABLE]),
    )


def columns(bets: pa.RecordBatch) -> pa.RecordBatch:
    return bets.select(["player", "id", "amount", "at"])


def keyed_text(bets: pa.RecordBatch) -> pa.RecordBatch:
    columns = [bets["player"].cast(pa.binary()), bets["id"].cast(pa.string()).cast(pa.binary())]
    return pa.record_batch(columns, ["key", "value"])


def moved(servers: str, checkpoint: str, parallelism: int) -> object:
    """Each life begins with a savepoint of the last one's checkpoint, restored into a new one."""
    totals = ts.aggregate({"n": ts.count(), "amount": ts.sum("amount"), "last": ts.maximum("id")})
    pipeline = (
        ts.Pipeline("moved")
        .read(source(servers))
        .key_by("player")
        .process(totals, uid="totals", parallelism=parallelism)
        .write(sink(servers))
    )
    lives = Path(checkpoint, "lives")
    lives.mkdir(parents=True, exist_ok=True)
    before = sorted(path for path in lives.iterdir() if path.suffix == ".life")
    if not before:
        _claim(lives, 0, "first")
        return pipeline.start(checkpoint=f"{checkpoint}/first")
    last = f"{checkpoint}/{before[-1].read_text()}"
    pipeline.recover(checkpoint=last)
    name = uuid.uuid4().hex
    kept, restored = FileStorage(f"{checkpoint}/kept-{name}"), FileStorage(f"{checkpoint}/{name}")
    try:
        savepoints.create(FileStorage(last), kept, ask_kafka=asking(KafkaConfig(servers)))
    except ts.OptionError:  # it was killed before its first epoch
        return pipeline.start(checkpoint=last)
    savepoints.restore(kept, restored)
    _claim(lives, len(before), name)
    return pipeline.start(checkpoint=restored.location)


def _claim(lives: Path, number: int, name: str) -> None:
    """Say which checkpoint comes next; fail if another life, begun meanwhile, has said so."""
    text = lives / f"{name}.draft"
    text.write_text(name)
    os.link(text, lives / f"{number:04d}.life")


def foreach_batch(servers: str, checkpoint: str, parallelism: int) -> object:
    return (
        stream(servers)
        .writeStream.foreachBatch(ts.KafkaSink(servers, topic="out"))
        .option("checkpointLocation", checkpoint)
        .start()
    )


def stream(servers: str) -> DataFrame:
    spark = ts.spark_session("campaign", master="local[2]")
    ts.register(spark)
    rows = (
        spark.readStream.format("tallystick")
        .option("kafka.bootstrap.servers", servers)
        .option("subscribe", BETS_TOPIC)
        .option("startingOffsets", "earliest")
        .option("kafka.group.id", "campaign")
        .load()
    )
    return rows.select("key", "value")


WORKLOADS = {
    "copied": Workload(copied, "sequence", ("out",), "lost write, duplicate, out of order"),
    "by-task": Workload(by_task, "sequence", ("out",), "the same with a transaction per task"),
    "keyed": Workload(keyed, "final", ("out",), "stale state, state that disagrees with output"),
    "windowed": Workload(windowed, "rows", ("out",), "timers and watermarks over restarts"),
    "joined": Workload(
        joined, "rows", ("out",), "two inputs in one epoch", (BETS_TOPIC, ODDS_TOPIC)
    ),
    "two-topics": Workload(two_topics, "rows", ("out", "copy"), "torn epoch over two sinks"),
    "files": Workload(files, "rows", ("out",), "a topic and files that disagree", store="files"),
    "table": Workload(table, "rows", ("out",), "a topic and a table that disagree", store="tables"),
    "tables": Workload(
        tables,
        "rows",
        (),
        "two tables, prepared and staged, without Kafka's decision",
        store="tables",
    ),
    "lake": Workload(
        lake,
        "rows",
        ("out",),
        "a topic, a Delta table and an Iceberg table that disagree",
        store="lake",
        oracle=oracles.with_teams,
        copies=LAKE,
    ),
    "own-sink": Workload(
        own_sink, "rows", ("out",), "a topic and a sink of the user's that disagree", store="lines"
    ),
    "answered": Workload(
        answered,
        "rows",
        ("out",),
        "clients, generators and threads of a module, each process's own",
        oracle=oracles.answered,
        own="draw",
    ),
    "twice-windowed": Workload(
        twice_windowed,
        "rows",
        ("out",),
        "watermarks through keyed steps, by the input alone",
        (oracles.UNEVEN_TOPIC,),
        oracle=oracles.windows_of_windows,
    ),
    "moved": Workload(moved, "final", ("out",), "recover, savepoint and restore at each start"),
    "foreach-batch": Workload(foreach_batch, "sequence", ("out",), "a query of Spark's own"),
}


if __name__ == "__main__":
    name, servers, checkpoint, parallelism = sys.argv[1:]
    os.environ["PYTHONPATH"] = os.pathsep.join(  # workers import what a function needs
        filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])
    )
    WORKLOADS[name].start(servers, checkpoint, int(parallelism)).awaitTermination()
