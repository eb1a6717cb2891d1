"""A broker dies or hangs while an epoch stands at any step of the protocol."""

import time

import pytest

from tallystick.errors import BrokerUnavailableError
from tallystick.kafka.client import Attempts, Client
from tallystick.kafka.config import KafkaConfig
from tallystick.participants import OpenSinks
from tallystick.sink.two_phase import Owner
from tallystick.testing import EmbeddedKafka
from tests.failover.outage import CASES, Case, Fault, Outcome, run_outage
from tests.failover.wire import coordinator_of
from tests.kafka.task_sinks import LINEAGE, opened, place_of, written_by

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
        found = client.metadata([topic, "__transaction_state", "__consumer_offsets"]).topics
        moved = [
            f"{told.name}-{part.partition_index}"
            for told in found
            for part in told.partitions
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


def test_a_coordinator_that_hangs_holds_up_neither_the_others_nor_the_epoch_for_long(
    cluster: EmbeddedKafka,
) -> None:
    """All commits of an epoch share one delivery.timeout; what others coordinate is visible."""
    wait_until_all_lead(cluster, topic := cluster.create_topic("many-commits", 3))
    options = {"delivery.timeout.ms": "6000", "request.timeout.ms": "3000"}
    config = KafkaConfig.from_options({"bootstrap.servers": cluster.bootstrap_servers, **options})
    name, victim, tasks = "many-commits", 2, 30
    client = Client(config)
    with opened(config, topic, name) as sink:
        sinks = OpenSinks({"out": sink}, {"out": Owner(name, "out", LINEAGE)})
        plan = sink.plan()
        all_of_them = tuple(
            written_by(plan, place_of(name, 0, task), f"row {task}") for task in range(tasks)
        )
        ids = {each.name.rsplit(":", 2)[0] for each in all_of_them}
        hanging = [each for each in ids if coordinator_of(client, "transaction", each) == victim]
        one_by_one_s = len(hanging) * config.delivery_timeout_ms / 1000
        assert one_by_one_s >= 24, "enough of them hang"
        cluster.pause(victim)
        try:
            began = time.monotonic()
            with pytest.raises(BrokerUnavailableError, match=r"EndTxn|FindCoordinator"):
                sinks.commit(all_of_them)
            took_s = time.monotonic() - began
        finally:
            cluster.resume(victim)
        cluster.wait_until_in_sync()
        assert took_s < one_by_one_s - 6, (took_s, one_by_one_s)
        assert {each.name.rsplit(":", 2)[0] for each in sinks.lingering()} <= set(hanging)

        assert sinks.commit(all_of_them) == ()
        assert sinks.lingering() == ()
    client.close()
