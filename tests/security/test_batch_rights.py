"""A batch write with the least rights, and with one of them missing: each has an id of its own."""

import pytest

from tallystick.epoch.transactional_ids import batch_name
from tallystick.epoch.two_phase import RunFacts
from tallystick.errors import AuthorizationError
from tallystick.kafka.output import KafkaOutput
from tallystick.pipeline.sinks import SinkCluster, preflight
from tallystick.testing import EmbeddedKafka
from tests.security.people import TOPIC, config_of

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]
NAME = batch_name("0123456789abcdef")


def check(kafka: EmbeddedKafka, user: str, id_prefix: str) -> None:
    """Check what a write checks before it begins."""
    output = KafkaOutput(config_of(kafka, user), TOPIC, TOPIC, id_prefix=id_prefix)
    sinks = SinkCluster(output)
    try:
        preflight(sinks, NAME, {}, RunFacts())
    finally:
        sinks.broker.close()


def test_a_prefix_of_the_users_own_is_enough(guarded: EmbeddedKafka) -> None:
    check(guarded, "alice", "tallystick-alice-")


def test_the_right_to_be_granted_is_that_of_all_batch_writes(guarded: EmbeddedKafka) -> None:
    with pytest.raises(AuthorizationError) as refused:
        check(guarded, "alice", "tallystick-")

    message = str(refused.value)
    for kind in ("--transactional-id", "--group"):
        assert f"{kind} 'tallystick-batch-' --resource-pattern-type prefixed" in message
    assert message.count("--operation") == 2
    assert NAME not in message.partition("--operation")[2]
