"""The cluster of a chaos run."""

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource

from tallystick.chaos.cluster import running

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]


@pytest.mark.parametrize(("brokers", "timeout_ms"), [(1, 15_000), (3, 3_000)])
def test_a_broker_that_is_paused_counts_as_dead_only_where_another_can_take_its_place(
    brokers: int, timeout_ms: int
) -> None:
    """Else Kafka leaves out markers of what it has committed, and rows stay invisible."""
    with running(brokers, ["in"], ["out"], partitions=1) as cluster:
        admin = AdminClient({"bootstrap.servers": cluster.direct})
        (asked,) = admin.describe_configs([ConfigResource("BROKER", "1")]).values()
        told = asked.result(30)["broker.session.timeout.ms"]

    assert int(told.value) == timeout_ms
