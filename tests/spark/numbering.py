"""A keyed step whose output shows whether state is right: each row with its number in its key."""

from typing import Any

import pyarrow as pa

from tallystick.state.functions.keyed_batch import KeyedBatch, Update
from tallystick.state.functions.vectorised import VectorisedFunction, vectorised


def picked() -> Any:
    """Only the columns of the value; made here, so that workers need no tests."""

    def only_values(rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows.select(["k", "n"])

    return only_values


def numbering() -> VectorisedFunction:
    """Each row with its number among the rows of its key."""

    def number(batch: KeyedBatch) -> Update:
        seen, totals = batch.running_count(start=batch.held("seen"))
        columns = {"k": batch.rows["k"], "n": batch.rows["n"], "seen": seen}
        return Update(pa.record_batch(columns), {"seen": totals})

    return vectorised(number, state="seen bigint")
