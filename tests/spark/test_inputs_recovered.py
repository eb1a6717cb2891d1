"""Two inputs of a pipeline that is rescaled while it runs, or dies and is recovered."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.source.offsets import parse_source
from tallystick.testing import EmbeddedKafka
from tests.spark.flow import Facts, Flow, die, finish
from tests.spark.sources import Sources
from tests.spark.sunk import open_ids
from tests.spark.topics import read_committed, wait_until_nothing_is_pending

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.fixture(params=["resident", "jobs"])
def sources(
    request: pytest.FixtureRequest,
    tallystick_kafka: EmbeddedKafka,
    spark: SparkSession,
    tmp_path: Path,
) -> Sources:
    return Sources(Flow(tallystick_kafka, spark, tmp_path, execution=request.param))


def test_a_live_rescale_keeps_the_positions_of_both_inputs(sources: Sources) -> None:
    sources.feed(40, 30)
    pipeline = sources.pipeline(sources.numbers(), sources.texts(), parallelism=None)
    query = sources.start(pipeline, trigger={"processingTime": "0 seconds"})
    for parallelism in (3, 1, 4, 2):
        query.processAllAvailable()
        query.rescale(parallelism=parallelism)
        sources.feed(25, 35)
    query.processAllAvailable()
    query.stop()
    sources.assert_exact()
    manifest = sources.manifest()
    assert manifest.state is not None
    assert [step.parallelism for step in manifest.state] == [2]
    read = {
        position.input: sum(position.positions.values())
        for position in map(parse_source, manifest.sources)
    }
    assert read == {"numbers": 140, "texts": 170}

    sources.feed(5, 5)
    sources.run(sources.texts(), sources.numbers(), parallelism=3)
    sources.assert_exact()


@pytest.mark.parametrize(
    ("transactions", "fact", "epoch"),
    [
        ("task", "TransactionCommitted", 2),
        ("task", "ManifestWritten", 1),
        ("epoch", "TransactionCommitted", 2),
        ("epoch", "ManifestWritten", 1),
    ],
)
def test_what_a_dead_driver_left_of_two_inputs_is_settled_and_nothing_is_read_twice(
    sources: Sources, transactions: str, fact: str, epoch: int
) -> None:
    def pipeline() -> ts.Pipeline:
        source = sources.flow.source(value=ts.Json("k string, n bigint"))
        numbers = ts.stream(source, uid="numbers").map_batches(
            chosen(), schema="k string, n bigint"
        )
        return sources.pipeline(numbers, sources.texts(), transactions=transactions)

    sources.feed(60, 40)
    finish(lambda: sources.start(pipeline()))
    sources.feed(30, 50)
    with pytest.raises(RuntimeError, match=f"died after {fact}"):
        finish(lambda: sources.start(pipeline(), listener=Facts(fact, die)))

    done = pipeline().recover(checkpoint=str(sources.flow.checkpoint))

    assert done.epoch == epoch
    wait_until_nothing_is_pending(sources.flow.confluent, sources.flow.topic_out)
    assert open_ids(sources.flow) == []
    visible = len(read_committed(sources.flow.confluent, sources.flow.topic_out))
    assert visible == (180 if epoch == 2 else 100)
    sources.feed(7, 9)
    finish(lambda: sources.start(pipeline()))
    sources.assert_exact()


def chosen() -> Any:
    """The columns of a row, of a function that workers get by value."""

    def select(rows: Any) -> Any:
        return rows.select(["k", "n"])

    return select
