"""Brokers that are not Kafka's answer fewer requests and settings: what is missing is *unknown*.

Each stands before a real Kafka, hides what docs/brokers.md says that it lacks, and is asked as a
start asks.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tallystick.errors import OptionError
from tallystick.kafka import cluster
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.output import KafkaOutput
from tallystick.kafka.preflight import Findings, check
from tallystick.testing import EmbeddedKafka
from tests.failover.sink_job import PARTITIONS, SinkJob, kafka_sink, read_topic
from tests.kafka.other_broker import REDPANDA, OtherBroker

pytestmark = pytest.mark.broker

VERIFICATION = "transaction.partition.verification.enable"
UNVERIFIED = frozenset({"unverified-partitions"})
WARPSTREAM: dict[str, Any] = {
    "without_settings": cluster.FACT_SETTINGS,
    "without_apis": ["DescribeProducers", "DescribeQuorum", "DeleteRecords"],
}
URSA: dict[str, Any] = {
    "without_settings": cluster.FACT_SETTINGS,
    "without_apis": [
        *("AddPartitionsToTxn", "AddOffsetsToTxn", "EndTxn", "DescribeQuorum"),
        *("DescribeProducers", "DescribeTransactions", "ListTransactions"),
    ],
}
MANAGED_KAFKA: dict[str, Any] = {"without_settings": cluster.FACT_SETTINGS, "has_features": True}
Answers = Callable[..., OtherBroker]


@pytest.fixture
def answers(tallystick_kafka: EmbeddedKafka) -> Iterator[Answers]:
    """Makes a broker that answers as one does."""
    running: list[OtherBroker] = []

    def make(**how: Any) -> OtherBroker:
        running.append(OtherBroker(tallystick_kafka.bootstrap_servers, **how).__enter__())
        return running[-1]

    yield make
    for broker in running:
        broker.__exit__()


def findings_of(broker: OtherBroker, accepted: frozenset[str] = frozenset()) -> Findings:
    """Return the facts that a start learns about a broker."""
    config = KafkaConfig(broker.address)
    client = KafkaBroker(config).client
    facts = cluster.cluster_facts(client)
    client.close()
    output = KafkaOutput(config, "out", "out", transaction_timeout_ms=300_000)
    return check(facts, output, trigger_interval_ms=None, accepted=accepted)


def test_brokers_that_do_not_say_whether_they_verify_need_a_person_s_decision(
    answers: Answers,
) -> None:
    broker = answers(**REDPANDA)

    (problem,) = findings_of(broker).problems
    assert "a stray write of an earlier run would be committed with the next epoch" in problem
    assert "accept=['unverified-partitions']" in problem

    accepted = findings_of(broker, UNVERIFIED)
    assert accepted.problems == ()
    assert problem in accepted.warnings, "the risk is named at each start"
    assert VERIFICATION in broker.hidden, "it is left out of an answer"


def test_brokers_of_a_release_that_verifies_need_none(answers: Answers) -> None:
    """A managed Kafka that keeps its settings to itself tells its release by `metadata.version`."""
    broker = answers(**MANAGED_KAFKA)

    findings = findings_of(broker)

    assert findings.problems == ()
    assert any("Kafka 3.6 and later do by default" in warning for warning in findings.warnings)
    assert VERIFICATION in broker.hidden


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (WARPSTREAM, "do not answer DescribeProducers, without which"),
        (
            URSA,
            "do not answer AddOffsetsToTxn, AddPartitionsToTxn, DescribeProducers, "
            "DescribeTransactions, EndTxn, without which",
        ),
    ],
    ids=["WarpStream", "Ursa"],
)
def test_requests_that_are_needed_and_not_offered_are_named_before_the_start(
    kind: dict[str, Any], named: str, answers: Answers
) -> None:
    """No word makes up for them."""
    (problem,) = findings_of(answers(**kind), UNVERIFIED).problems

    assert named in problem


def test_with_that_decision_epochs_are_committed_exactly_once(
    answers: Answers, tallystick_kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    """Through sinks as a start makes them, and a second run that goes on from the first."""
    broker = answers(**REDPANDA)
    topic = tallystick_kafka.create_topic("on-another-broker", PARTITIONS)
    sink = kafka_sink(tallystick_kafka, topic, bootstrap_servers=broker.address)
    job = SinkJob("on-another-broker", tmp_path, [sink])

    with pytest.raises(OptionError, match="unverified-partitions"):
        job.run_next()
    job.restart(accepted=UNVERIFIED)
    job.run_until(2)
    job.restart()
    job.run_until(3)
    job.close()

    assert read_topic(tallystick_kafka, topic) == job.expected()
    assert VERIFICATION in broker.hidden
    assert broker.refused == []
