"""The cluster of a chaos run."""

import socket

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource

from tallystick.testing import EmbeddedKafka
from tallystick.testing.process import free_ports
from tallystick_tools.chaos import cluster as chaos_cluster
from tallystick_tools.chaos.cluster import running
from tallystick_tools.chaos.proxy import HOST

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]


@pytest.mark.parametrize(("brokers", "timeout_ms"), [(1, 15_000), (3, 3_000)])
def test_a_broker_that_is_paused_counts_as_dead_only_where_another_can_take_its_place(
    brokers: int, timeout_ms: int
) -> None:
    """Else Kafka leaves out markers of what it has committed, and rows stay invisible."""
    with running(brokers, ["in"], ["out"], partitions=1) as cluster:
        admin = AdminClient({"bootstrap.servers": cluster.direct})
        (description,) = admin.describe_configs([ConfigResource("BROKER", "1")]).values()
        setting = description.result(30)["broker.session.timeout.ms"]

    assert int(setting.value) == timeout_ms


def test_the_proxies_hold_their_ports_before_the_brokers_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another run on the same machine would find them free for seconds, and end this one."""
    start, drawn, bound = EmbeddedKafka.start, [], []

    def draw(count: int, host: str) -> list[int]:
        drawn.extend(free_ports(count, host))
        return drawn

    def look_and_start(kafka: EmbeddedKafka) -> None:
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind((HOST, drawn[0]))
        bound.append(drawn[0])
        start(kafka)

    monkeypatch.setattr(chaos_cluster, "free_ports", draw)
    monkeypatch.setattr(EmbeddedKafka, "start", look_and_start)
    with running(1, ["in"], ["out"], partitions=1) as cluster:
        assert cluster.ends(["in"], committed=True) == {("in", 0): 0}
        assert cluster.proxies.bootstrap_servers == f"{HOST}:{bound[0]}"
