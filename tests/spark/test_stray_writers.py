"""The one hole: Kafka cannot tell two attempts of one task apart. The guards that close it."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tallystick.codec.output_records import PartitionLog
from tallystick.codec.records.encoder import encode
from tallystick.errors import ForeignRowsError
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.writer import PartitionWriter
from tallystick.values import ProducedRange, Producer, TopicPartition
from tests.spark.driver_process import Drivers
from tests.spark.flow import Facts, Flow
from tests.spark.topics import read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark]

STRAY = "written by nobody"


def write_stray_rows(
    flow: Flow, producer: Producer, partition: int, next_sequence: int, row_count: int = 3
) -> None:
    """Write as an attempt of a task that the driver knows nothing of: same id, same epoch."""
    target = TopicPartition(flow.topic_out, partition)
    rows = pa.RecordBatch.from_pydict(
        {
            "key": pa.array([None] * row_count, pa.binary()),
            "value": pa.array([STRAY.encode()] * row_count),
        }
    )
    client = Client(KafkaConfig.from_options({"bootstrap.servers": flow.kafka.bootstrap_servers}))
    try:
        writer = PartitionWriter(client, producer, transaction_version=2)
        writer._logs[target] = PartitionLog(
            next_sequence=next_sequence
        )  # where the other attempt stands
        writer.write([(target, encoded) for encoded in encode(rows, now_ms=1)])
        writer.close()
    finally:
        client.close()


class Stray:
    """A listener that lets stray rows in, once, at one fact of the first epoch with rows."""

    def __init__(self, flow: Flow, at: str, *, touched: bool = True) -> None:
        self.facts = Facts(at, self._write)
        self._flow, self._touched = flow, touched
        self._produced: tuple[ProducedRange, ...] = ()

    def __call__(self, event: Any) -> None:
        """Called by the driver."""
        self._produced = getattr(event, "produced", self._produced)
        self.facts(event)

    def _write(self, _: object) -> None:
        written = self._produced[0]
        if self._touched:
            partition, next_sequence = written.partition, written.record_count
        else:
            used = {produced.partition for produced in self._produced}
            partition, next_sequence = min(set(range(self._flow.partitions)) - used), 0
        write_stray_rows(self._flow, self.facts.producers[-1], partition, next_sequence)


@pytest.mark.parametrize("touched", [True, False], ids=["written to", "not written to"])
def test_stray_rows_found_by_the_count_abort_the_epoch_and_it_runs_again(
    flow: Flow, touched: bool
) -> None:
    """Wherever they stand: after the rows of a task, or in a partition that none wrote to."""
    keys = 7 if touched else 1  # one key leaves two partitions empty
    flow.feed(70, keys=keys)
    stray = Stray(flow, "EpochRan", touched=touched)

    flow.run(flow.pipeline(max_offsets_per_trigger="all"), listener=stray)

    assert stray.facts.names.count("EpochRan") == 2
    assert stray.facts.names.count("ProducerFenced") == 2
    flow.assert_exact()


def test_stray_rows_behind_the_last_count_stop_the_pipeline_until_a_person_has_decided(
    flow: Flow,
) -> None:
    flow.feed(70)

    with pytest.raises(ForeignRowsError) as stopped:
        flow.run(listener=Stray(flow, "OutputCounted"))
    assert f"{flow.topic_out}-" in str(stopped.value)
    assert ": 3" in str(stopped.value)
    with pytest.raises(ForeignRowsError):
        flow.run()  # it is not forgotten by starting again
    flow.feed(30)
    flow.run(accept=["foreign-rows-in-epoch-1"])

    records = read_committed(flow.confluent, flow.topic_out)
    strays = [record for record in records if record.value == STRAY]
    assert len(strays) == 3
    assert sorted(int(r.value or "") for r in records if r.value != STRAY) == list(range(100))


def test_a_second_attempt_of_a_writing_task_writes_nothing_and_the_epoch_runs_again(
    flow: Flow, drivers: Drivers, tmp_path: Path
) -> None:
    """And one of a reading task is none of our business: Spark tries again, the epoch goes on."""
    settings = {"master": "local[2,4]", "execution": "jobs", "epoch_records": "all"}
    flow.feed(100)
    driver = drivers.take()
    driver.run(flow.spec(**settings, writing_dies_once=str(tmp_path / "died")))
    assert driver.wait_for_end() is None
    assert driver.facts.count("ActionFailed") == 1
    assert driver.facts.count("EpochRan") == 1
    flow.assert_exact()

    flow.feed(100)
    driver.run(flow.spec(**settings, reading_dies=True))
    assert driver.wait_for_end() is None
    assert driver.facts.count("ActionFailed") == 0
    assert driver.facts.count("EpochRan") == 1
    flow.assert_exact()
    drivers.give_back(driver)
