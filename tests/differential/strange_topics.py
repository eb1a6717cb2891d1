"""Topics with all that a log can hold, written by librdkafka: what both connectors have to read."""

import time
from collections.abc import Iterable
from typing import Any

from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tallystick.testing import EmbeddedKafka
from tests.spark.topics import WAIT_S, read_committed

BROKER = {"log.cleaner.backoff.ms": "100"}
"""Compaction within a second; Kafka looks every 15 s otherwise."""
MIDNIGHT_MS = 1_700_000_000_000
MINUTE_MS = 60_000
COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
TRANSACTION_TIMEOUT_MS = 600_000
CLOCK_RECORDS = 12
COMPACTED_KEYS = 5


class StrangeTopics:
    """Writes the topics, and keeps one transaction open until `close`."""

    def __init__(self, kafka: EmbeddedKafka) -> None:
        self._kafka = kafka
        self._open: Producer | None = None

    def write(self) -> None:
        """Write all of them."""
        self._oddities()
        self._compressed()
        self._clock()
        self._unequal()
        self._stamped_by_the_broker()
        self._transactions()
        self._deleted()
        self._compacted()

    def close(self) -> None:
        """End the transaction that was left open."""
        if self._open is not None:
            self._open.abort_transaction(WAIT_S)

    def _oddities(self) -> None:
        """Null, empty and repeated: keys, values, headers."""
        self._kafka.create_topic("oddities", 1)
        headers: list[Any] = [("h", b"1"), ("h", None), ("", b""), ("h", b"1"), ("ü", b"\xff\x00")]
        self._produce(
            "oddities",
            (
                {"key": key, "value": value, "headers": header_list, "partition": 0}
                for key in (None, b"", b"key", b"\x00\xff")
                for value in (None, b"", b"value")
                for header_list in ([], headers, headers[:1])
            ),
        )

    def _compressed(self) -> None:
        self._kafka.create_topic("compressed", 2)
        for name in COMPRESSIONS:
            records = ({"value": f"{name} {i} " * 20, "partition": i % 2} for i in range(60))
            self._produce("compressed", records, **{"compression.type": name})

    def _clock(self) -> None:
        """One record a minute, an hour of them in partition 2 unordered, none in partition 3."""
        self._kafka.create_topic("clock", 4)
        minutes = [(0, i) for i in range(CLOCK_RECORDS)] + [(1, i // 2) for i in range(4)]
        minutes += [(2, i) for i in (5, 1, 9, 3, 11, 0)]
        self._produce(
            "clock",
            (
                {"value": str(m), "partition": p, "timestamp": MIDNIGHT_MS + m * MINUTE_MS}
                for p, m in minutes
            ),
        )

    def _unequal(self) -> None:
        """Much, little, nothing, one."""
        self._kafka.create_topic("unequal", 4)
        partitions = [0] * 700 + [1] * 30 + [3]
        self._produce(
            "unequal",
            ({"key": f"k{i}", "value": str(i), "partition": p} for i, p in enumerate(partitions)),
        )

    def _stamped_by_the_broker(self) -> None:
        config = {"message.timestamp.type": "LogAppendTime"}
        self._kafka.create_topic("appended", 2, config=config)
        records = ({"value": str(i), "partition": i % 2, "timestamp": 1} for i in range(20))
        self._produce("appended", records)

    def _transactions(self) -> None:
        """Committed, aborted, plain in between, and one that is still open at the end."""
        self._kafka.create_topic("transactions", 3)
        self._kafka.create_topic("aborted", 1)
        first, second = self._transactional("first"), self._transactional("second")
        for number in range(6):
            first.begin_transaction()
            second.begin_transaction()
            for i in range(10):
                first.produce("transactions", f"first {number} {i}", partition=i % 2)
                second.produce("transactions", f"second {number} {i}", partition=i % 2)
            second.produce("aborted", str(number), partition=0)
            second.flush(WAIT_S)
            first.commit_transaction(WAIT_S)
            second.abort_transaction(WAIT_S)
            plain = [{"value": f"plain {number}", "partition": p} for p in (0, 2)]
            self._produce("transactions", plain)
        first.begin_transaction()
        first.produce("transactions", "open", partition=1)
        first.produce("transactions", "open", partition=2)
        assert first.flush(WAIT_S) == 0
        self._produce("transactions", [{"value": "after the open one", "partition": 2}])
        self._open = first

    def _deleted(self) -> None:
        """Its first 40 records are gone."""
        self._kafka.create_topic("deleted", 1)
        self._produce("deleted", ({"value": str(i), "partition": 0} for i in range(100)))
        admin = AdminClient(self._kafka.confluent_options())
        for future in admin.delete_records([TopicPartition("deleted", 0, 40)]).values():
            future.result(WAIT_S)

    def _compacted(self) -> None:
        """A log with gaps in it, and some at its ends."""
        config = {
            "cleanup.policy": "compact",
            "segment.ms": "100",
            "min.cleanable.dirty.ratio": "0.01",
            "delete.retention.ms": "0",
        }
        self._kafka.create_topic("compacted", 1, config=config)
        for value in range(40):
            record = {"key": f"k{value % COMPACTED_KEYS}", "value": str(value), "partition": 0}
            self._produce("compacted", [record])
        deadline = time.monotonic() + WAIT_S
        while (count := len(read_committed(self._kafka.confluent_options(), "compacted"))) > 12:
            assert time.monotonic() < deadline, f"not compacted: {count} records are left"
            time.sleep(0.12)  # older than segment.ms, so the next record closes the segment
            self._produce("compacted", [{"key": "last", "value": None, "partition": 0}])

    def _produce(self, topic: str, records: Iterable[dict[str, Any]], **options: Any) -> None:
        producer = Producer({**self._kafka.confluent_options(), "linger.ms": 5, **options})
        for record in records:
            producer.produce(topic, **record)
        assert producer.flush(WAIT_S) == 0

    def _transactional(self, name: str) -> Producer:
        producer = Producer(
            {
                **self._kafka.confluent_options(),
                "transactional.id": name,
                "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
            }
        )
        producer.init_transactions(WAIT_S)
        return producer
