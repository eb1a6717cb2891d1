"""A broker dies or hangs while an epoch stands at any step of the protocol, or at any moment.

All on one cluster: to start three brokers, and to have them at hand, costs more than a test.
"""

from pathlib import Path

import pytest

from tallystick.kafka.client import Attempts, Client
from tallystick.kafka.config import KafkaConfig
from tallystick.testing import EmbeddedKafka
from tests.failover.chaos import KILLS_MIN, LAST_EPOCHS, run_campaign
from tests.failover.outage import CASES, Case, Fault, Outcome, run_outage

pytestmark = pytest.mark.broker

OUTAGES = [(Fault.KILL, 1), (Fault.PAUSE, 2), (Fault.RESTART, 3)]
"""Faults and the broker that they happen to."""
Outcomes = dict[Case, Outcome]


@pytest.fixture(scope="module", params=OUTAGES, ids=lambda outage: outage[0].name)
def outcomes(
    request: pytest.FixtureRequest, cluster: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory
) -> Outcomes:
    """One outage for all cases: pipelines do not disturb each other, and time is saved."""
    fault, victim = request.param
    topic = cluster.create_topic(f"rows-{fault.name}", 3)
    wait_until_all_lead(cluster, topic)
    return run_outage(cluster, topic, victim, fault, tmp_path_factory.mktemp(fault.name))


def wait_until_all_lead(cluster: EmbeddedKafka, topic: str) -> None:
    """Brokers that were down get back what they led before, so that each is worth an outage."""
    client = Client(KafkaConfig(cluster.bootstrap_servers))
    attempts = Attempts(client.deadline(60_000), "waiting", "preferred leaders")
    while True:
        topics = client.metadata([topic, "__transaction_state", "__consumer_offsets"]).topics
        moved = [
            f"{topic_metadata.name}-{part.partition_index}"
            for topic_metadata in topics
            for part in topic_metadata.partitions
            if part.leader_id != part.replica_nodes[0]
        ]
        if not moved:
            break
        attempts.pause(f"still with others: {moved}")
    client.close()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_epoch_is_visible_once_and_whole(outcomes: Outcomes, case: Case) -> None:
    outcome = outcomes[case]

    assert outcome.problems == []
    if case.patient:
        assert outcome.restarts == int(case.dies), outcome.errors


def test_impatient_pipelines_have_really_failed(outcomes: Outcomes) -> None:
    """Else nothing was tested with them."""
    assert any(outcome.restarts for case, outcome in outcomes.items() if not case.patient)


@pytest.mark.chaos
def test_a_short_campaign_ends_exact(cluster: EmbeddedKafka, tmp_path: Path) -> None:
    """Long ones can be trusted to run."""
    verdict = run_campaign(cluster, seconds=5.0, seed=1, folder=tmp_path, lives_s=(0.0, 3.0))

    assert verdict.problems == []
    assert verdict.is_exact, (tmp_path / "drivers.log").read_text()[-4_000:]
    assert verdict.broker_kills + verdict.broker_pauses > 0
    assert verdict.driver_kills >= KILLS_MIN
    assert verdict.epochs > LAST_EPOCHS
    assert sum(verdict.zombie_answers.values()) > 0, "tasks outlive their driver, and write on"
