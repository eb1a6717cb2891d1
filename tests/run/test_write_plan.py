"""The guards of a writing task, over a port that only notes what it is asked."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from tallystick.codec.records.encoder import EncodedBatch
from tallystick.errors import (
    EpochAbortedError,
    OtherOffsetsError,
    TallystickError,
    WorkerOrphanedError,
)
from tallystick.tasks.frames import Frame, last_frames
from tallystick.tasks.read import Report, WritePlan
from tallystick.values import ProducedRange, Producer, TopicPartition

PRODUCER = Producer("tallystick:p", 5, 6)
OUT = TopicPartition("out", 0)
PRODUCED = (ProducedRange("out", 0, 2, 0, 1),)


@dataclass
class Notebook:
    """Both `Produce` and `Writer`: notes the calls, and answers as it is set."""

    sequences: Mapping[TopicPartition, int] | None = field(default_factory=dict)
    error: Exception | None = None
    calls: list[str] = field(default_factory=list)

    def writer(self, producer: Producer) -> "Notebook":
        assert producer == PRODUCER
        return self

    def last_sequences(
        self, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, int] | None:
        self.calls.append(f"last_sequences of {', '.join(map(str, partitions))}")
        return self.sequences

    def write(self, batches: Sequence[tuple[TopicPartition, EncodedBatch]]) -> None:
        self.calls.append(f"write {sum(batch.record_count for _, batch in batches)}")
        if self.error is not None:
            raise self.error

    def close(self) -> tuple[ProducedRange, ...]:
        self.calls.append("close")
        return PRODUCED


def frames(partition: int = 0) -> list[Frame]:
    own = [Frame(0, 0, at, "out", partition, 1, b"rows", 9) for at in range(2)]
    return [*own, *last_frames(0, 2, 9, 1)]


def error_of(report: Report) -> Exception:
    """The error that the driver raises for a report which came through Spark."""
    failure = Report.from_json(report.to_json()).failure
    assert failure is not None
    return failure.to_error()


def test_a_task_looks_writes_and_closes_before_it_reports() -> None:
    kafka = Notebook()

    report = WritePlan(kafka, PRODUCER).write(iter(frames()), 0)

    assert kafka.calls == ["last_sequences of out-0", "write 2", "close"]
    assert (report.produced, report.failure) == (PRODUCED, None)


def test_a_resident_task_need_not_look() -> None:
    kafka = Notebook()

    WritePlan(kafka, PRODUCER, has_second_attempts=False).write(iter(frames()), 0)

    assert kafka.calls == ["write 2", "close"]


def test_a_later_attempt_does_not_even_begin() -> None:
    kafka = Notebook()

    report = WritePlan(kafka, PRODUCER).write(iter(frames()), 1)

    assert kafka.calls == []
    assert isinstance(error_of(report), EpochAbortedError)


def test_a_partition_that_holds_rows_of_this_producer_is_not_written() -> None:
    kafka = Notebook({OUT: 4})

    report = WritePlan(kafka, PRODUCER).write(iter(frames()), 0)

    assert kafka.calls == ["last_sequences of out-0", "close"]
    error = error_of(report)
    assert isinstance(error, EpochAbortedError)
    assert "out-0 already holds rows" in str(error)
    assert "up to sequence 4" in str(error)


def test_where_nobody_may_look_the_check_passes() -> None:
    kafka = Notebook(None)

    report = WritePlan(kafka, PRODUCER).write(iter(frames()), 0)

    assert (report.produced, report.failure) == (PRODUCED, None)


def test_each_partition_is_looked_at_once_whichever_group_brings_it() -> None:
    kafka = Notebook()
    many = [*frames()[:2] * 40, *frames(1)]

    WritePlan(kafka, PRODUCER).write(iter(many), 0)

    lookups = [call for call in kafka.calls if call.startswith("last")]
    assert lookups == ["last_sequences of out-0", "last_sequences of out-1"]


@pytest.mark.parametrize("error", [EpochAbortedError("lost"), WorkerOrphanedError("alone")])
def test_an_error_closes_the_writer_too(error: Exception) -> None:
    """It is reported; but a worker without its daemon raises, so that Spark does not keep it."""
    kafka = Notebook(error=error)
    plan = WritePlan(kafka, PRODUCER)

    if isinstance(error, WorkerOrphanedError):
        with pytest.raises(WorkerOrphanedError):
            plan.write(iter(frames()), 0)
    else:
        assert isinstance(error_of(plan.write(iter(frames()), 0)), EpochAbortedError)
    assert kafka.calls[-1] == "close"


def test_a_reported_error_whose_class_needs_more_than_its_text_arrives_as_its_base() -> None:
    class NeedsRowError(EpochAbortedError):
        def __init__(self, row: int) -> None:
            super().__init__(f"row {row}")

    error = error_of(WritePlan(Notebook(error=NeedsRowError(4)), PRODUCER).write(iter(frames()), 0))
    assert (type(error), str(error)) == (EpochAbortedError, "row 4")
    other = OtherOffsetsError("epoch 3 is committed", 3, ("a",), ("b",))
    error = error_of(WritePlan(Notebook(error=other), PRODUCER).write(iter(frames()), 0))
    assert isinstance(error, TallystickError)
    assert str(error) == str(other)
