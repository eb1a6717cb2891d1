"""The benchmark's topics: made, watched and removed through librdkafka, which is cheap to poll."""

import time
from dataclasses import dataclass
from typing import Self

from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

PARTITION_COUNT = 8
"""The loader and the verifier of `peers` know no other number."""
REQUEST_TIMEOUT_S = 10.0
KNOWN_TIMEOUT_S = 30.0
POLL_S = 0.1
END = -1
"""Asked for as a timestamp, it is the end of the log, as in Kafka's ListOffsets."""


class TopicsError(Exception):
    """The broker did not do, or did not tell, what the benchmark asked for."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Where a topic ends, summed over its partitions; the committed ends also one by one."""

    written: int
    committed: int
    committed_each: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.committed >= 0, self


class Topics:
    """Makes, watches and removes topics of `PARTITION_COUNT` partitions; a context manager.

    Args:
        bootstrap: `host:port` of the broker.
    """

    def __init__(self, bootstrap: str) -> None:
        # Quiet: what goes wrong is raised.
        config = {"bootstrap.servers": bootstrap, "log_level": 0}
        consumer = {**config, "group.id": "benchmark", "enable.auto.commit": False}
        self._admin = AdminClient(config)
        self._committed = Consumer({**consumer, "isolation.level": "read_committed"})
        self._written = Consumer({**consumer, "isolation.level": "read_uncommitted"})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._committed.close()
        self._written.close()

    def create(self, topic: str, *, compression: str = "producer") -> None:
        """Create a topic that does not exist yet, and wait until its ends can be asked for.

        Args:
            topic: its name.
            compression: of what the broker keeps: Kafka's `compression.type`.

        Raises:
            TopicsError: the broker refused, or does not know the topic in time.
        """
        new = NewTopic(
            topic,
            num_partitions=PARTITION_COUNT,
            replication_factor=1,
            config={"compression.type": compression},
        )
        try:
            self._admin.create_topics([new])[topic].result(REQUEST_TIMEOUT_S)
        except KafkaException as error:
            raise TopicsError(f"topic {topic} could not be created: {error}") from error
        self._wait_until_known(topic)

    def delete(self, topic: str) -> None:
        """Remove a topic."""
        self._admin.delete_topics([topic])[topic].result(REQUEST_TIMEOUT_S)

    def ends(self, topic: str) -> Ends:
        """The topic's ends now.

        Raises:
            TopicsError: the broker gave no answer.
        """
        # The committed end first: asked second, it could be ahead of the written one.
        committed = _ends(self._committed, topic)
        return Ends(sum(_ends(self._written, topic)), sum(committed), committed)

    def delete_below(self, prefix: str) -> None:
        """Remove the topics that a job made for itself: those whose names begin so."""
        names = self._admin.list_topics(timeout=REQUEST_TIMEOUT_S).topics
        for name in [name for name in names if name.startswith(prefix)]:
            self.delete(name)

    def _wait_until_known(self, topic: str) -> None:
        deadline_s = time.monotonic() + KNOWN_TIMEOUT_S
        while True:
            try:
                # A client that asked for the topic too early takes it for missing until told anew.
                for consumer in (self._committed, self._written):
                    consumer.list_topics(topic, timeout=REQUEST_TIMEOUT_S)
                self.ends(topic)
                return
            except (TopicsError, KafkaException) as error:
                if time.monotonic() > deadline_s:
                    raise TopicsError(f"new topic {topic} stays unknown: {error}") from error
                time.sleep(POLL_S)


def _ends(consumer: Consumer, topic: str) -> tuple[int, ...]:
    partitions = [TopicPartition(topic, number, END) for number in range(PARTITION_COUNT)]
    try:
        offsets = consumer.offsets_for_times(partitions, timeout=REQUEST_TIMEOUT_S)
    except KafkaException as error:
        raise TopicsError(f"the ends of topic {topic} are not to be had: {error}") from error
    errors = [offset.error for offset in offsets if offset.error is not None]
    if errors:
        raise TopicsError(f"the ends of topic {topic} are not to be had: {errors[0]}")
    return tuple(offset.offset for offset in offsets)
