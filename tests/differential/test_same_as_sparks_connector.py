"""Spark's own connector and ours give the same DataFrame, whatever a log holds, or both refuse."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from pyspark.sql import SparkSession

from tallystick.spark.streaming.source import FORMAT
from tallystick.testing import EmbeddedKafka
from tests.differential.cases import CASES, DIFFERENT
from tests.differential.connector_process import ConnectorProcess
from tests.differential.reading import Case, Outcome, read_all
from tests.differential.strange_topics import BROKER, StrangeTopics
from tests.spark import jvm

pytestmark = [pytest.mark.broker, pytest.mark.spark]


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectorProcess]:
    """Spark's connector, on its way up."""
    started = ConnectorProcess(tmp_path_factory.mktemp("connector"))
    yield started
    started.stop()


@pytest.fixture(scope="module")
def cases(process: ConnectorProcess) -> Iterator[dict[str, Case]]:
    """All cases on a broker that holds what they read; Spark's connector is at them."""
    with EmbeddedKafka(properties=BROKER) as kafka:
        topics = StrangeTopics(kafka)
        topics.write()
        cases_to_read = {
            name: replace(case, options={**kafka.kafka_options, **case.options})
            for name, case in (CASES | DIFFERENT).items()
        }
        process.begin(cases_to_read)
        yield cases_to_read
        topics.close()


@pytest.fixture(scope="module")
def spark(cases: dict[str, Case], shared_spark: SparkSession) -> Iterator[SparkSession]:
    """A session for ours, which comes up while the other one works."""
    with jvm.interpreting(shared_spark):
        yield shared_spark


@pytest.fixture(scope="module")
def ours(
    cases: dict[str, Case], spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Outcome]:
    """What came of each case in ours."""
    return read_all(spark, FORMAT, cases, tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def theirs(
    process: ConnectorProcess, cases: dict[str, Case], ours: dict[str, Outcome]
) -> dict[str, Outcome]:
    """What came of it in Spark's connector; waited for only when ours is done, they overlap."""
    return process.outcomes(cases)


@pytest.mark.parametrize("name", CASES)
def test_both_connectors_agree(
    name: str, ours: dict[str, Outcome], theirs: dict[str, Outcome]
) -> None:
    case, actual, expected = CASES[name], ours[name], theirs[name]

    if case.fails:
        assert expected.error, "Spark's connector reads it"
        assert actual.error, "ours reads it"
        return
    assert (expected.error, actual.error) == ("", "")
    assert actual.schema == expected.schema
    assert actual.rows.schema == expected.rows.schema
    assert actual.rows.to_pylist() == expected.rows.to_pylist()
    assert actual.epochs == expected.epochs
    assert sum(actual.epochs) == (actual.rows.num_rows if case.streaming else 0)
    assert case.empty == (expected.rows.num_rows == 0), "the case tells nothing"


def test_differences_are_those_that_are_meant(
    ours: dict[str, Outcome], theirs: dict[str, Outcome]
) -> None:
    for name in DIFFERENT:
        assert not theirs[name].error, name
        assert theirs[name].rows.num_rows, name
    assert ours["a pattern of a part of names"].rows.num_rows == 0
    assert "startingOffsets and startingTimestamp contradict" in ours["two starts"].error
