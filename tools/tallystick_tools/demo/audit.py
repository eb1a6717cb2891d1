"""The audit: an independent consumer against the source data.

Reads the whole output with confluent-kafka under read_committed, and compares every record with the
flights. It knows nothing of the pipeline, its checkpoint or its offsets.

The state at the end is read from its files by a process of its own: no Kafka, no pipeline.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from confluent_kafka import Consumer, TopicPartition

import tallystick as ts
from tallystick_tools.demo.flights import STEP
from tallystick_tools.reading import read_to_end

IDLE_S = 20.0
"""Longer than any wait of a healthy broker; then the audit fails instead of hanging."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The faults of the output and of the state; all four are 0, or there is a bug."""

    output: int
    lost: int
    duplicated: int
    wrong: int
    out_of_order: int

    @property
    def exact(self) -> bool:
        """True if every record is there, once, right, and in order."""
        return not (self.lost or self.duplicated or self.wrong or self.out_of_order)


def read_all(bootstrap_servers: str, topic: str) -> pd.DataFrame:
    """Read all committed records of a topic: key and fields of the JSON value, in log order."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "flights-demo-audit",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "check.crcs": True,
        }
    )
    try:
        partitions = consumer.list_topics(topic, timeout=IDLE_S).topics[topic].partitions
        consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
        read = read_to_end(consumer, IDLE_S)
    finally:
        consumer.close()
    rows = pd.DataFrame([json.loads(message.value()) for message in read])
    return rows.assign(
        _partition=[message.partition() for message in read],
        _key=[message.key().decode() for message in read],
    )


def audit(output: pd.DataFrame, expected: pd.DataFrame, *, key: str = "carrier") -> Verdict:
    """Compare the output with the expected rows.

    Args:
        output: as `read_all` gives it.
        expected: by id.
        key: the column that is the output's key; flights by "dest" are counted in `nth`.
    """
    if output.empty:
        return Verdict(0, len(expected), 0, 0, 0)
    first = output.drop_duplicates("id").set_index("id")
    both = expected.index.intersection(first.index)
    columns = list(expected.columns)
    same = (first.loc[both, columns] == expected.loc[both, columns]).all(axis=1)
    same &= first.loc[both, "_key"] == expected.loc[both, key]
    strangers = len(first.index.difference(expected.index))
    wrong = int((~same).sum()) + strangers
    behind = output.groupby(["_key", "carrier"])["id"].diff() <= 0
    if key == "dest":
        step = first["nth"] - first.groupby("_key")["nth"].shift(fill_value=0)
        wrong += int((step != 1).sum())
    return Verdict(
        output=len(output),
        lost=len(expected.index.difference(first.index)),
        duplicated=len(output) - len(first),
        wrong=wrong,
        out_of_order=int(behind.sum()),
    )


def audit_state(actual: Mapping[str, int], expected: Mapping[str, int]) -> int:
    """Return the number of keys with a wrong count in the state."""
    return sum(actual.get(key) != expected.get(key) for key in actual.keys() | expected.keys())


def read_counts(checkpoint: Path, log: Path) -> dict[str, int] | None:
    """Return the number of flights to each destination by the state; None: it cannot be read.

    Args:
        checkpoint: of a pipeline that was killed.
        log: the file for the output of the reading process.
    """
    command = [sys.executable, "-m", __name__, str(checkpoint)]
    with log.open("a") as file:
        read = subprocess.run(command, stdout=subprocess.PIPE, stderr=file, text=True)
    lines = [line for line in read.stdout.splitlines() if line.startswith("{")]
    counts: dict[str, int] | None = json.loads(lines[-1]) if read.returncode == 0 else None
    return counts


def main() -> None:
    """Print the counts as JSON."""
    spark = ts.spark_session("state", master="local[2]", config={"spark.ui.enabled": "false"})
    rows = ts.read_state(spark, sys.argv[1], STEP).select("dest", "nth").collect()
    print(json.dumps({row["dest"]: row["nth"] for row in rows}))


if __name__ == "__main__":
    main()
