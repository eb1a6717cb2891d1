"""A user's function of columns over several inputs.

The function is called like one of `vectorised`, and its state is kept in the same way:

    def function(batch: CoKeyedBatch) -> Update:
        bids = batch.of("bids")          # a KeyedBatch with the rows of this input alone
        highest = bids.max("price", start=batch.state["highest"])

Rows come as one table (`inputs.py`), from which the rows of an input are taken on demand.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tallystick.arguments import checked, not_one_of
from tallystick.state.functions.inputs import INPUT, TIME
from tallystick.state.functions.join_columns import columns_of_input, inputs_in
from tallystick.state.functions.keyed_batch import BoolArray, KeyedBatch, OwnUpdates, Update
from tallystick.state.functions.processing import NO_TIME, TIME_MODES
from tallystick.state.functions.vectorised import ByColumns, Output, VectorisedFunction
from tallystick.state.overlay import EpochTime
from tallystick.state.schema import schema_of


@dataclass(frozen=True)
class CoKeyedBatch:
    """An epoch's rows of several inputs, and their keys with the state that each has.

    Args:
        together: all rows as one table, with the number of their input; see `inputs.py`.
    """

    together: KeyedBatch

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self.together)

    @property
    def keys(self) -> pa.RecordBatch:
        """The distinct keys of all inputs' rows, as columns."""
        return self.together.keys

    @property
    def state(self) -> pa.RecordBatch:
        """The state of each key before the batch; null in all columns for a key without state."""
        return self.together.state

    @property
    def known(self) -> BoolArray:
        """An array that is true where a key has state."""
        return self.together.known

    @property
    def time(self) -> EpochTime:
        """The time of the epoch."""
        return self.together.time

    @property
    def timers(self) -> pa.Int64Array | None:
        """The moments at which the function is called again; see `KeyedBatch.timers`."""
        return self.together.timers

    @property
    def is_due(self) -> bool:
        """True in the call for keys with due timers."""
        return self.together.is_due

    def held(self, name: str, default: Any = 0) -> NDArray[Any]:
        """Return a state column as a numpy array of your own; `default` where it is null."""
        return self.together.held(name, default)

    def of(self, name: str) -> KeyedBatch:
        """Return a batch with the rows of one input, and the keys and the state of all inputs.

        Raises:
            OptionError: there is no such input.
        """
        part = self._parts.get(name)
        if part is None:
            columns = columns_of_input(self.together.rows.schema, name, "co_process")
            part = self._parts[name] = self._part(name, columns)
        return part

    def rows(self, name: str) -> pa.RecordBatch:
        """Return the rows of one input in the order of arrival, with the input's own columns."""
        return self.of(name).rows

    def codes(self, name: str) -> NDArray[np.int32]:
        """Return the number of the key of each row of one input."""
        return self.of(name).codes

    def times(self, name: str) -> pa.Int64Array:
        """Return the event times of one input's rows in ms; null where a row has none."""
        return self.together.rows.column(TIME).take(pa.array(self._places(name)))

    @cached_property
    def _parts(self) -> dict[str, KeyedBatch]:
        return {}

    def _places(self, name: str) -> NDArray[np.int64]:
        rows = self.together.rows
        number = inputs_in(rows.schema, "co_process").index(name)
        return np.flatnonzero(rows.column(INPUT).to_numpy() == number)

    def _part(self, name: str, columns: pa.Schema) -> KeyedBatch:
        at = self._places(name)
        arrays = self.together.rows.column(name).take(pa.array(at)).flatten()
        rows = pa.RecordBatch.from_arrays(arrays, schema=columns)
        return replace(self.together, rows=rows, codes=self.together.codes[at])


CoFunction = Callable[[CoKeyedBatch], Update]


@checked
def co_process(
    function: CoFunction,
    *,
    state: str | pa.Schema,
    time_mode: str = NO_TIME,
    output: Output | None = None,
) -> ByColumns:
    """Process the rows of several inputs with one call for all keys of an epoch.

    Args:
        function: gets a `CoKeyedBatch`, returns an `Update`. With timers it is called a second time
            for the keys that are due, without rows.
        state: its columns, one line per key for all inputs, as DDL or as a schema; "" if there are
            none.
        time_mode: with `ProcessingTime` or `EventTime` the function has timers, one per key.
        output: from the schemas of the key and of all rows to the schema of the output. None:
            `process` needs `output=`.

    Raises:
        OptionError: the state cannot be stored, or there is no such time mode.
    """
    schema = schema_of(state, "state")
    if time_mode not in TIME_MODES:
        raise not_one_of("time_mode", time_mode, TIME_MODES, of="co_process")

    @wraps(function)
    def one_table(batch: KeyedBatch) -> Update:
        return function(CoKeyedBatch(batch))

    def make(rows: pa.Schema) -> VectorisedFunction:
        inputs_in(rows, "co_process")
        return VectorisedFunction(OwnUpdates(one_table), schema, time_mode, None, output)

    return ByColumns(make, None, time_mode, has_timers=time_mode != NO_TIME)
