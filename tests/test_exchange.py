"""All writers of an epoch see the same attempt of each source, or the epoch does not count."""

import pyarrow as pa
import pytest

from tallystick.errors import EpochAbortedError
from tallystick.exchange import Heard, check_same_attempts
from tallystick.sink.rows import RowLayout
from tallystick.task import EncodePlan, send

ROWS = pa.record_batch({"value": pa.array([b"a", b"b", b"c"])})
TASKS = 3


def heard_by_each_writer(batches):
    """Run a source once; what each writer hears of it, and the frames with rows that it gets."""
    layout = RowLayout({"t": 3}, "t", False, None)
    plan = EncodePlan(layout, TASKS, compression="none", batch_bytes=1000)
    frames = list(send(plan, batches, source=0))
    heard = [Heard(0) for _ in range(TASKS)]
    rows = [
        [*heard[target].with_rows(f for f in frames if f.target == target)]
        for target in range(TASKS)
    ]
    return [each.attempts for each in heard], rows


def test_every_writer_hears_of_every_source_even_if_it_gets_no_row_of_it():
    heard, rows = heard_by_each_writer([ROWS])

    assert [len(pairs) for pairs in heard] == [1] * TASKS
    assert sum(frame.record_count for frames in rows for frame in frames) == ROWS.num_rows
    assert any(not frames for frames in rows)
    check_same_attempts(heard)


def test_a_source_that_ran_again_between_two_writers_is_found_also_by_one_without_rows():
    first, _ = heard_by_each_writer([ROWS])
    second, rows = heard_by_each_writer([ROWS])
    without_rows = next(target for target in range(TASKS) if not rows[target])

    with pytest.raises(EpochAbortedError, match="task 0 of stage 0 ran a second time"):
        check_same_attempts([first[(without_rows + 1) % TASKS], second[without_rows]])
