"""Nexmark's topics: loaded, judged, and how far a job has read them, by its committed positions.

A job's progress is what its consumer groups have committed, which both systems do with what they
write: the rows of windows say little about how much input is behind them.
"""

from collections.abc import Sequence

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from .count_topics import parse, read_values
from .dataset import DatasetError, Judged, Verdict
from .nexmark_events import events, json_of
from .nexmark_truth import QUERIES, faults
from .systems import System
from .topics import PARTITION_COUNT, REQUEST_TIMEOUT_S, Ends, Topics, TopicsError

SEED = 42
EVENTS_AT_ONCE = 500_000
FLUSH_S = 60.0
_TYPES = {
    "price": pa.float64(),
    "average": pa.float64(),
    **dict.fromkeys(("window_start", "window_end"), pa.string()),
    **dict.fromkeys(("extra", "name", "city", "state"), pa.string()),
}


def load(bootstrap: str, prefix: str, kind: str, event_count: int) -> int:
    """Write the events of a kind to `<prefix><kind>`, each partition in the order of their times.

    Returns:
        How many there are.
    """
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "acks": 1,
            "linger.ms": 20,
            "batch.size": 1 << 20,
            "queue.buffering.max.messages": 2 * EVENTS_AT_ONCE,
            "queue.buffering.max.kbytes": 1 << 20,
        }
    )
    loaded = 0
    for first in range(0, event_count, EVENTS_AT_ONCE):
        stop = min(first + EVENTS_AT_ONCE, event_count)
        values = json_of(events(kind, first, stop, SEED)).cast(pa.binary()).to_pylist()
        for partition in range(PARTITION_COUNT):
            # By the number within the kind, so that chunks may begin anywhere.
            begin = (partition - loaded) % PARTITION_COUNT
            messages = [{"value": value} for value in values[begin::PARTITION_COUNT]]
            producer.produce_batch(f"{prefix}{kind}", messages, partition=partition)
        loaded += len(values)
        if producer.flush(FLUSH_S):
            raise DatasetError(f"{prefix}{kind}: not written within {FLUSH_S:.0f} s")
    return loaded


class Positions:
    """The topics of a broker, with a job's committed positions for the ends of its output.

    Args:
        topics: of the broker.
        bootstrap: its `host:port`.
        prefix: of the inputs' topics.
        inputs: those of the query that runs.
    """

    def __init__(self, topics: Topics, bootstrap: str, prefix: str, inputs: Sequence[str]) -> None:
        self._topics = topics
        self._bootstrap = bootstrap
        self._prefix = prefix
        self._inputs = inputs
        self._consumers: dict[str, Consumer] = {}

    def create(self, topic: str) -> None:
        """Create the output."""
        self._topics.create(topic)
        for name in self._inputs:
            self._consumers[name] = Consumer(
                {
                    "bootstrap.servers": self._bootstrap,
                    "group.id": f"{topic}-{name}",
                    "enable.auto.commit": False,
                    "log_level": 0,
                }
            )

    def delete(self, topic: str) -> None:
        """Remove it."""
        for consumer in self._consumers.values():
            consumer.close()
        self._topics.delete(topic)

    def delete_below(self, prefix: str) -> None:
        """Remove what a job made for itself."""
        self._topics.delete_below(prefix)

    def ends(self, topic: str) -> Ends:
        """How far the job that writes this topic has committed its inputs."""
        offsets: list[int] = []
        for name, consumer in self._consumers.items():
            partitions = [
                TopicPartition(f"{self._prefix}{name}", number) for number in range(PARTITION_COUNT)
            ]
            try:
                answers = consumer.committed(partitions, timeout=REQUEST_TIMEOUT_S)
            except KafkaException as error:
                raise TopicsError(f"the positions of {topic} are not to be had: {error}") from error
            offsets += [max(answer.offset, 0) for answer in answers]
        return Ends(sum(offsets), sum(offsets), tuple(offsets))


class NexmarkJudges:
    """Judges the outputs of queries.

    Args:
        bootstrap: `host:port` of the broker.
        event_counts: of how many events the inputs are, by the prefix of their topics.
        open_ms: of how much event time at the end a job of ours may leave windows open.
    """

    def __init__(self, bootstrap: str, event_counts: dict[str, int], open_ms: int) -> None:
        self._bootstrap = bootstrap
        self._event_counts = event_counts
        self._open_ms = open_ms

    def rows_min(self, system: System, records: int) -> float:
        """All jobs end by themselves: any number of rows may be right."""
        return 0

    def judge(
        self, system: System, input_topic: str, output_topic: str, *, cut_off: bool
    ) -> Judged:
        """Hold an output against its events, which are made again."""
        assert not cut_off, system
        query = QUERIES[system.job]
        rows = read_output(self._bootstrap, output_topic, system.job)
        inputs, latest = {}, 0
        for name in query.inputs:
            inputs[name] = events(name, 0, self._event_counts[input_topic], SEED).to_pandas()
            latest = max(latest, int(inputs[name]["dateTime"].iloc[-1]))
        is_ours = system.name.startswith("ours")
        wrong = faults(query, inputs, rows, latest - self._open_ms if is_ours else 1 << 62)
        records = sum(map(len, inputs.values()))
        return Judged(Verdict(records, len(rows), -1, not any(wrong.values()), wrong))


def read_output(bootstrap: str, topic: str, query: str) -> pd.DataFrame:
    """All committed rows of an output; its times in ms."""
    columns = QUERIES[query].columns
    types = _TYPES | ({} if query == "q1" else {"price": pa.int64()})
    schema = pa.schema([(name, types.get(name, pa.int64())) for name in columns])
    tables = [
        parse(values, schema)
        for partition in range(PARTITION_COUNT)
        for _, values in read_values(bootstrap, topic, partition)
    ]
    table = pa.concat_tables([schema.empty_table(), *tables])
    for number, name in enumerate(columns):
        if name in ("window_start", "window_end"):
            # Ours ends with Z, Flink's SQL has no zone; both are UTC.
            text = pc.utf8_rtrim(table.column(number), "Z")
            moments = text.cast(pa.timestamp("us")).cast(pa.timestamp("ms")).cast(pa.int64())
            table = table.set_column(number, name, moments)
    return table.to_pandas()
