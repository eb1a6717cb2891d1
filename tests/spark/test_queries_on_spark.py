"""A query and expressions on Spark and a real broker: tasks get them without the parser."""

import json
from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.testing import EmbeddedKafka
from tests.spark.flow import Flow
from tests.spark.topics import produce, read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark]


@pytest.fixture
def flow(tallystick_kafka: EmbeddedKafka, spark: SparkSession, tmp_path: Path) -> Flow:
    return Flow(tallystick_kafka, spark, tmp_path)


@pytest.mark.parametrize("execution", ["resident", "jobs"])
def test_counts_of_a_query_go_on_over_a_restart(flow: Flow, execution: str) -> None:
    text = """
        SELECT upper(country) AS country, count(*) AS n, sum(amount * 2) AS total
        FROM orders WHERE amount > 1 AND 10 / amount > 1 GROUP BY upper(country)
    """
    orders = flow.source(value=ts.Json("country string, amount bigint"))
    pipeline = ts.sql(text, name=flow.name, orders=orders).write(
        ts.KafkaSink(
            flow.kafka.bootstrap_servers, topic=flow.topic_out, key="country", value=ts.Json()
        )
    )
    counts: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for start in (0, 100):
        rows = [{"country": "df"[n % 2] + "e", "amount": n % 12} for n in range(start, start + 100)]
        produce(flow.confluent, flow.topic_in, [(row["country"], json.dumps(row)) for row in rows])
        for row in rows:
            if 1 < int(row["amount"]) < 10:
                counts[str(row["country"]).upper()] += 1
                totals[str(row["country"]).upper()] += 2 * int(row["amount"])
        query = pipeline.start(
            flow.spark,
            checkpoint=str(flow.checkpoint),
            trigger={"availableNow": True},
            execution=execution,
        )
        assert query.awaitTermination(120)
    newest = {
        row["country"]: (row["n"], row["total"])
        for row in (
            json.loads(record.value or "")
            for record in read_committed(flow.confluent, flow.topic_out)
        )
    }
    assert newest == {name: (counts[name], totals[name]) for name in counts}
    assert len(newest) == 2
