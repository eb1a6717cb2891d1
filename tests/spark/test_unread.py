"""What each reader has of several inputs, without Kafka."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

from tallystick.spark.tasks import InputSplits, Unread, UnreadInput, share
from tallystick.tasks.read_plan import ReadPlan
from tallystick.values import SplitRange


@dataclass(frozen=True)
class Log:
    """Records that say whose they are, as `ports.Fetch`."""

    input: str

    def read(
        self, splits: Iterable[SplitRange], **_: Any
    ) -> Iterator[tuple[SplitRange, pa.RecordBatch]]:
        for split in splits:
            for offset in range(split.start_offset, split.stop_offset):
                yield split, record(f"{self.input} {split.topic} {split.partition} {offset}")


def record(text: str) -> pa.RecordBatch:
    return pa.record_batch({"value": [text.encode()]})


@dataclass(frozen=True)
class AsTheyAre:
    """A layout that makes rows of records."""

    mode = "permissive"
    fetches_headers = False

    def build(self, records: pa.RecordBatch, _: Any) -> Any:
        return Built(records)


@dataclass(frozen=True)
class Built:
    """See `codec.layout.LayoutRows`."""

    rows: pa.RecordBatch
    dead_letters: None = None
    reasons: Any = ()


def splits(topic: str, *sizes: int) -> tuple[SplitRange, ...]:
    return tuple(SplitRange(topic, number, 0, size) for number, size in enumerate(sizes))


def unread(readers: int, **inputs: InputSplits) -> Unread:
    shares = share(readers, *inputs.values())
    plans = [ReadPlan(Log(uid), AsTheyAre(), input=uid) for uid in inputs]  # type: ignore[arg-type]
    return Unread(tuple(map(UnreadInput, shares, plans)))


@pytest.mark.parametrize("readers", [1, 2, 3, 20])
@pytest.mark.parametrize("pieces", [None, 7])
def test_each_record_of_each_input_has_one_reader(readers: int, pieces: int | None) -> None:
    """Also of a topic that both inputs read."""
    it = unread(
        readers,
        a=InputSplits(splits("in", 5, 1, 3), pieces),
        b=InputSplits((*splits("in", 4, 0), *splits("other", 2))),
    )
    assert it.reader_count == min(readers, (3 if pieces is None else 7) + 3)
    numbers = [
        value.decode()
        for reader in range(it.reader_count)
        for rows in it.read([reader])
        for value in rows["value"].to_pylist()
    ]
    expected = [f"a in {n} {at}" for n, size in enumerate((5, 1, 3)) for at in range(size)]
    expected += [f"b in 0 {at}" for at in range(4)] + [f"b other 0 {at}" for at in range(2)]
    assert sorted(numbers) == sorted(expected)
    if pieces is None:
        assert not it.is_cut
    if readers == 20:
        assert it.is_cut == (pieces is not None), "the other input's partitions stay whole"


def test_only_what_is_of_one_topic_of_one_input_stays_in_place() -> None:
    assert unread(2, a=InputSplits(splits("in", 5, 1))).only_topic == "in"
    assert unread(2, a=InputSplits((*splits("in", 5), *splits("x", 1)))).only_topic == ""
    two = unread(2, a=InputSplits(splits("in", 5)), b=InputSplits(splits("in", 5)))
    assert two.only_topic == ""


def test_nothing_to_read_is_seen() -> None:
    assert unread(2, a=InputSplits(()), b=InputSplits(())).is_empty
    assert not unread(2, a=InputSplits(()), b=InputSplits(splits("in", 1))).is_empty
