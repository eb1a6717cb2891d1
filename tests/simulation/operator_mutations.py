"""Operator state broken on purpose: lists of readers, and tables; in the table of `mutations`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pyarrow as pa

from tallystick.state.overlay import ENTRIES
from tallystick.tasks import operator_state
from tallystick.tasks.epoch_plan import PipelinePlan
from tallystick.tasks.operator_state import ListPlan, OpenList, TablePlan, TableStep
from tests.simulation.faults import Fault
from tests.simulation.mutations import mutation as entered


def mutation(
    sentence: str, where: Any, name: str, *needs: Fault, is_keyed: bool = False
) -> Callable[[Any], Any]:
    """Enter the decorated function in the table."""
    pipeline = {
        "is_keyed": is_keyed,
        "has_loop": True,
        "has_gang": True,
        "has_operator_state": True,
    }
    return entered(f"{sentence} (operator state)", where, name, *needs, **pipeline)


def rescaled(sentence: str, where: Any, name: str) -> Callable[[Any], Any]:
    """Enter the decorated function, which only a rescale brings to light, in the table."""
    return mutation(sentence, where, name, Fault.RESCALED_LIVE, is_keyed=True)


# Lists.


@mutation("each epoch begins with an empty list", OpenList, "_known")
def _(_: Any) -> Any:
    return lambda self, version: pa.array([], pa.binary())


@rescaled("lists stay where they are when there are other readers", ListPlan, "is_rescaled")
def _(_: Any) -> Any:
    return property(lambda self: False)


@rescaled("union list state is divided as other lists are", operator_state, "shared_values")
def _(original: Any) -> Any:
    def shared_values(*where: Any, is_union: bool = False) -> Any:
        return original(*where)

    return shared_values


@rescaled("each new reader has the elements of all old ones", operator_state, "shared_values")
def _(original: Any) -> Any:
    def shared_values(*where: Any, is_union: bool = False) -> Any:
        return original(*where, is_union=True)

    return shared_values


@rescaled("lists of readers that there are no longer stay", operator_state, "deletions_beyond")
def _(_: Any) -> Any:
    return lambda entries, parallelism: ENTRIES.empty_table().to_batches()[0]


@rescaled("a reader without rows leaves the list that it had before", OpenList, "notes")
def _(original: Any) -> Any:
    def notes(self: Any) -> Any:
        if self._elements is None:
            self._plan = replace(self._plan, before=self._plan.base.parallelism)
        return original(self)

    return notes


@mutation(
    "a list in memory goes on from an epoch that was given up",
    OpenList,
    "_hold",
    Fault.READ_FAILED,
)
def _(original: Any) -> Any:
    def hold(self: Any, version: Any, values: Any) -> Any:
        base = self._plan.base.version
        return original(self, version if base is None else base, values)

    return hold


# Tables.


@mutation(
    "a table in memory goes on from an epoch that was given up",
    operator_state,
    "_hold",
    Fault.READ_FAILED,
)
def _(original: Any) -> Any:
    newest: dict[Any, Any] = {}

    def hold(place: Any, version: Any, note: Any) -> Any:
        if note.changes is None and place in newest:
            return original(place, version, newest[place])
        newest[place] = note
        return original(place, version, note)

    return hold


@mutation("control records count in the epoch after their own", TablePlan, "rows")
def _(_: Any) -> Any:
    return property(lambda self: self._base().rows)


@mutation("rows of a table are never deleted", TableStep, "entries")
def _(original: Any) -> Any:
    return lambda self, rows: original(replace(self, deleted=None), rows)


@mutation("control records of one key count in any order", operator_state, "newest_entries")
def _(original: Any) -> Any:
    return lambda batches: original([batch.take(_backwards(batch)) for batch in batches[::-1]])


def _backwards(batch: pa.RecordBatch) -> pa.Array:
    return pa.array(range(batch.num_rows - 1, -1, -1), pa.int64())


@mutation(
    "an epoch without rows drops lists and tables", PipelinePlan, "carried", Fault.EMPTY_EPOCH
)
def _(_: Any) -> Any:
    return lambda self, state: ()


@mutation("no file says what a control record has changed", TablePlan, "_written")
def _(original: Any) -> Any:
    def _written(self: Any, table: Any) -> Any:
        with patch.object(operator_state, "write_changelog", lambda *name: None):
            return list(original(self, table))

    return _written
