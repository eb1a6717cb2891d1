"""Names that are accepted although they look like code or paths, in a real PostgreSQL and Kafka."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, Producer
from confluent_kafka.admin import AdminClient
from psycopg import sql
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.epoch.two_phase import Owner, RunFacts
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.config import KafkaConfig
from tallystick.ops.savepoints import create, restore
from tallystick.storage.file_storage import FileStorage
from tallystick.testing import EmbeddedKafka
from tallystick.values import TopicPartition
from tests.failover.evidence import read_committed
from tests.kafka.real_kafka import commit
from tests.postgres.postgres_writing import place_of
from tests.postgres.real_postgres import PostgresServer

NAMES = [
    "it's",
    'say "no"',
    "x; DROP TABLE public.victim; --",
    'x"; DROP TABLE public.victim; --',
    "'); DROP TABLE public.victim; --",
    "../../outside",
    "a.b",
    ".",
    "two words",
    "Größe 数 🎉",
    "%s %(a)s",
    "$1",
    "back\\slash",
    "{curly}",
    "select",
    "tab\tand\nline",
    "n" * 63,
]
PRINTABLE = [name for name in NAMES if name.isprintable()]


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    server.query("CREATE TABLE public.victim (id int)")
    yield server
    server.stop()


def relations(postgres: PostgresServer) -> set[tuple[str, str]]:
    """Schema and name of every table that is not PostgreSQL's."""
    return set(
        postgres.query(
            "SELECT schemaname, tablename FROM pg_tables WHERE schemaname !~ '^(pg_|information_)'"
        )
    )


@pytest.mark.parametrize("transactions", ["prepared", "staged"])
@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_postgresql_is_a_name(
    name: str, transactions: Any, postgres: PostgresServer
) -> None:
    """All names of a staged upsert at once: schema, table, columns, pipeline and lineage."""
    before = relations(postgres)
    table = sql.Identifier(name, name)
    other = f"{name[:-1]}2"
    with postgres.connect() as connection:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))
        shape = sql.SQL("CREATE TABLE {} ({} bigint PRIMARY KEY, {} text)")
        connection.execute(shape.format(table, sql.Identifier(name), sql.Identifier(other)))
    sink = ts.PostgresSink(
        postgres.dsn,
        table=table.as_string(None),
        key=[name] if transactions == "staged" else [],
        transactions=transactions,
    )
    owner = Owner(name, name, name)

    committer = sink.open(owner, RunFacts(tasks=2))
    for epoch, text in ((1, "first"), (2, name))[transactions == "prepared" :]:
        transaction = committer.plan().begin(place_of(epoch, owner=owner))
        transaction.write(pa.record_batch({name: [7, 8], other: [text, "other"]}))
        for committable in transaction.prepare():
            committer.commit(committable)
    committer.close()

    with postgres.connect() as connection:
        rows = connection.execute(sql.SQL("SELECT * FROM {} ORDER BY 1").format(table)).fetchall()
        assert rows == [(7, name), (8, "other")]
        assert postgres.query("SELECT count(*) FROM pg_prepared_xacts") == [(0,)]
        assert ("public", "victim") in relations(postgres)
        new = relations(postgres) - before
        assert (name, name) in new
        ours = new - {(name, name)}
        assert {schema for schema, _ in ours} <= {"tallystick_postgres"}
        assert all(new_table.startswith("tallystick_") for _, new_table in ours), ours
        connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(name)))


@pytest.mark.broker
def test_a_name_in_kafka_is_a_name(tallystick_kafka: EmbeddedKafka) -> None:
    """The independent client finds the transactional id and the group under exactly this name."""
    topic = tallystick_kafka.create_topic("..hostile__names..")
    witness = AdminClient(tallystick_kafka.confluent_options())
    broker = KafkaBroker(KafkaConfig(tallystick_kafka.bootstrap_servers))
    for number, name in enumerate(PRINTABLE):
        producer = broker.fence(f"{name}/kafka-1/0/0", None)
        broker.stage_offsets(producer, name, {TopicPartition(topic, 0): (number, "")})
        commit(broker, producer)

    groups = {group.group_id for group in witness.list_consumer_groups().result().valid}
    assert set(PRINTABLE) <= groups
    for number, name in enumerate(PRINTABLE):
        request = [ConsumerGroupTopicPartitions(name)]
        offsets = witness.list_consumer_group_offsets(request)[name].result().topic_partitions
        assert [(entry.topic, entry.offset) for entry in offsets] == [(topic, number)]
    broker.close()


@pytest.mark.broker
@pytest.mark.spark
def test_a_pipeline_with_hostile_names_everywhere_runs(
    shared_spark: SparkSession,
    tallystick_kafka: EmbeddedKafka,
    postgres: PostgresServer,
    tmp_path: Path,
) -> None:
    """Its checkpoint, savepoint, group, ids, table, columns and folders all have hostile names."""
    hostile = 'x\'; DROP TABLE "victim"; -- ../é 🎉'
    column = 'v"; DROP TABLE public.victim; --'
    topics = [
        tallystick_kafka.create_topic(f"..hostile.{direction}-") for direction in ("in", "out")
    ]
    producer = Producer(tallystick_kafka.confluent_options())
    for number in range(20):
        producer.produce(topics[0], str(number))
    producer.flush()
    postgres.query('CREATE TABLE public."t\'; --" (value bytea, kind text)')
    with postgres.connect() as connection:
        rename = sql.SQL('ALTER TABLE public."t\'; --" RENAME kind TO {}')
        connection.execute(rename.format(sql.Identifier(column)))

    def with_kind(rows: pa.RecordBatch) -> pa.RecordBatch:
        values = rows.column("value")
        return pa.record_batch({"value": values, column: pa.array([hostile] * len(values))})

    servers = tallystick_kafka.bootstrap_servers
    folder = tmp_path / "home" / "files"
    pipeline = (
        ts.Pipeline("..hostile.")
        .read(
            ts.KafkaSource(
                servers, topics=[topics[0]], starting_offsets="earliest", group_id=hostile
            )
        )
        .map_batches(with_kind)
        .write(
            ts.mapped(
                ts.KafkaSink(servers, topic=topics[1], transactional_id_prefix=hostile),
                lambda rows: rows.select(["value"]),
            ),
            ts.PostgresSink(postgres.dsn, table='public."t\'; --"'),
            ts.FileSink(str(folder), partition_by=[column]),
        )
    )
    checkpoint = str(tmp_path / hostile.replace("/", "∕"))

    query = pipeline.start(shared_spark, checkpoint=checkpoint, trigger={"availableNow": True})
    query.awaitTermination(150)

    rows_by_partition = read_committed(tallystick_kafka.confluent_options(), topics[1], 1)
    assert sorted(row for rows in rows_by_partition.values() for row in rows) == sorted(
        map(str, range(20))
    )
    with postgres.connect() as connection:
        count = sql.SQL('SELECT count(*) FROM public."t\'; --" WHERE {} = %s')
        assert connection.execute(count.format(sql.Identifier(column)), [hostile]).fetchone() == (
            20,
        )
    assert ("public", "victim") in relations(postgres)
    assert list(folder.rglob("*.parquet"))
    assert {path.name for path in folder.parent.iterdir()} == {"files"}
    witness = AdminClient(tallystick_kafka.confluent_options())
    groups = {group.group_id for group in witness.list_consumer_groups().result().valid}
    assert hostile in groups
    saved = FileStorage(f"{checkpoint}-saved; --")
    create(FileStorage(checkpoint), saved)
    restore(saved, FileStorage(f"{checkpoint}-new"))
