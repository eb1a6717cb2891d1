"""The cluster of a chaos run."""

import socket

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource

from tallystick.testing import EmbeddedKafka
from tallystick.testing.process import free_ports
from tallystick_tools.chaos import cluster as chaos_cluster
from tallystick_tools.chaos.cluster import Cluster, running
from tallystick_tools.chaos.proxy import HOST

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]


def dead_after_ms(cluster: Cluster) -> int:
    """Return how long a broker of a cluster may be silent before another takes its place."""
    admin = AdminClient({"bootstrap.servers": cluster.direct})
    (description,) = admin.describe_configs([ConfigResource("BROKER", "1")]).values()
    return int(description.result(30)["broker.session.timeout.ms"].value)


def test_a_broker_that_is_paused_counts_as_dead_where_another_can_take_its_place() -> None:
    with running(3, ["in"], ["out"], partitions=1) as cluster:
        assert dead_after_ms(cluster) == 3_000


def test_the_proxies_hold_their_ports_before_the_only_broker_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another run on the same machine would find them free for seconds, and end this one.

    Nor does a broker count as dead where no other can take its place: Kafka would leave out markers
    of what it has committed, and rows stay invisible.
    """
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
        assert dead_after_ms(cluster) == 15_000
