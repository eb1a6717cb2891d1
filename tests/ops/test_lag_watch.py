"""The lag of a pipeline of which no epoch ends."""

import itertools
from collections.abc import Iterator
from contextlib import closing
from threading import Event

import confluent_kafka
import pytest
from prometheus_client import CollectorRegistry

from tallystick.kafka.config import KafkaConfig
from tallystick.ops import metrics
from tallystick.pipeline import lag_watch
from tallystick.pipeline.lag_watch import LagWatch
from tallystick.pipeline.listeners import OBSERVERS, PIPELINES
from tallystick.source.offsets import SourceOffsets
from tallystick.testing.kafka import EmbeddedKafka
from tallystick.testing.process import free_ports
from tallystick.values import TopicPartition
from tests.waiting import wait_for

pytestmark = pytest.mark.broker
_numbers = itertools.count()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[CollectorRegistry]:
    """Metrics of pipelines that are watched without the usual patience."""
    monkeypatch.setattr(lag_watch, "WATCH_S", 0.2)
    registry = CollectorRegistry()
    collector = metrics.register(registry)
    yield registry
    OBSERVERS.remove(collector.observe)


def test_lag_is_known_while_no_epoch_ends(
    tallystick_kafka: EmbeddedKafka, registry: CollectorRegistry
) -> None:
    name = topic = f"lags-{next(_numbers)}"
    tallystick_kafka.create_topic(topic, 1)
    config = KafkaConfig(tallystick_kafka.bootstrap_servers)
    reached = (SourceOffsets("cluster", "group", {TopicPartition(topic, 0): 2}),)
    labels = {"query": name, "source": "0", "topic": topic, "partition": "0"}

    def lag() -> float | None:
        return registry.get_sample_value("tallystick_source_lag_offsets", labels)

    def feed(count: int) -> None:
        producer = confluent_kafka.Producer(tallystick_kafka.confluent_options())
        for _ in range(count):
            producer.produce(topic, b"x", partition=0)
        assert producer.flush(20) == 0

    with closing(LagWatch(name, {reached[0].input: config}, lambda: reached)) as watch:
        feed(5)
        wait_for(lag, 3, "the lag")
        feed(5)
        wait_for(lag, 8, "the lag, which grows")
        watch.epoch_ended()
        assert lag() is None, "the epoch's own progress has it"
        wait_for(lag, 8, "the lag, when no other epoch ends")
    assert PIPELINES[name].watched == ()


def test_lag_is_not_known_while_kafka_is_away(registry: CollectorRegistry) -> None:
    name = f"away-{next(_numbers)}"
    (port,) = free_ports(1, "127.0.0.1")
    reached = (SourceOffsets("cluster", "group", {TopicPartition("t", 0): 2}),)
    configs = {reached[0].input: KafkaConfig(f"127.0.0.1:{port}")}
    with closing(LagWatch(name, configs, lambda: reached)):
        wait_for(lambda: len(PIPELINES[name].watched), 1, "the inputs that were looked at")
        (seen,) = PIPELINES[name].watched

    assert (seen.positions, seen.lag_total) == (reached[0].positions, None)


def test_nobody_asks_kafka_where_nobody_observes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lag_watch, "WATCH_S", 0.01)
    monkeypatch.setattr(lag_watch, "OBSERVERS", [])
    asked: list[bool] = []
    reached: list[SourceOffsets] = []

    def positions() -> tuple[SourceOffsets, ...]:
        asked.append(True)
        return tuple(reached)

    with closing(LagWatch("unseen", {}, positions)):
        assert not Event().wait(0.2)
        assert asked == []
        monkeypatch.setattr(lag_watch, "OBSERVERS", [lambda *_: None])
        wait_for(lambda: bool(asked), True, "a question, as soon as somebody observes")
