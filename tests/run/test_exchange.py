"""All writers of an epoch see the same attempt of each source, or the epoch does not count."""

import pyarrow as pa
import pytest

from tallystick.codec.rows import RowLayout
from tallystick.errors import EpochAbortedError
from tallystick.source.splits import share_out
from tallystick.tasks.frames import FrameSources, check_same_attempts
from tallystick.tasks.read import EncodePlan, Route, send
from tallystick.values import SplitRange

ROWS = pa.record_batch({"value": pa.array([b"a", b"b", b"c"])})
TASKS = 3


def heard_by_each_writer(batches):
    """Run a source once; what each writer hears of it, and the frames with rows that it gets."""
    layout = RowLayout({"t": 3}, "t")
    plan = EncodePlan((Route(layout, "none", 1000),), TASKS)
    frames = list(send(plan, batches, source=0))
    receivers = [FrameSources(0) for _ in range(TASKS)]
    rows = [
        [*receivers[target].with_rows(f for f in frames if f.target == target)]
        for target in range(TASKS)
    ]
    return [receiver.attempts for receiver in receivers], rows


def test_rows_of_a_partition_are_written_where_the_partition_of_that_number_is_read():
    """Strays, whose key belongs to another partition, go to the reader of that one."""
    splits = [SplitRange("in", partition, 0, 10) for partition in range(8)]
    for reader_count in (1, 2, 3, 8):
        shares = share_out(splits, reader_count)
        layout = RowLayout({"out": 8}, "out")
        plan = EncodePlan((Route(layout, "none", 1000),), reader_count, follows="in")
        rows = pa.record_batch(
            {"value": pa.array([b"v"] * 8), "partition": pa.array(range(8), pa.int32())}
        )

        for source, share in enumerate(shares):
            own = {split.partition for split in share}
            frames = [frame for frame in send(plan, [rows], source) if frame.record_count]
            assert sorted(frame.partition for frame in frames) == list(range(8))
            assert {frame.partition for frame in frames if frame.target == source} == own


def test_every_writer_hears_of_every_source_even_if_it_gets_no_row_of_it():
    attempts, rows = heard_by_each_writer([ROWS])

    assert [len(pairs) for pairs in attempts] == [1] * TASKS
    assert sum(frame.record_count for frames in rows for frame in frames) == ROWS.num_rows
    assert any(not frames for frames in rows)
    check_same_attempts(attempts)


def test_a_source_that_ran_again_between_two_writers_is_found_also_by_one_without_rows():
    first, _ = heard_by_each_writer([ROWS])
    second, rows = heard_by_each_writer([ROWS])
    without_rows = next(target for target in range(TASKS) if not rows[target])

    with pytest.raises(EpochAbortedError, match="task 0 of stage 0 ran a second time"):
        check_same_attempts([first[(without_rows + 1) % TASKS], second[without_rows]])
