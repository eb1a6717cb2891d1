"""The outputs of a pipeline, main output and named side outputs, and the rows that a sink gets.

    function ─► main output  ─► next step ─► … ─► its sinks
            └─► side output, by name ─────────► its sinks

A side output passes by all later steps. Malformed records do so too, as an output whose name no
user can give. Source: the behaviour of Flink's side outputs (OutputTag).
"""

import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypeAlias

import pyarrow as pa

from tallystick.arguments import checked
from tallystick.errors import OptionError
from tallystick.host.user_code import calling_user
from tallystick.state.functions.processing import SideRows
from tallystick.tasks.dataframes import as_arrow
from tallystick.tasks.frames import Frame, conform, from_ipc, to_ipc
from tallystick.tasks.hints import hinting, name_of

MAIN = ""
"""The name of the main output."""
DEAD_LETTERS = "dead letters"
"""The name of the output of malformed records: no identifier, so no user's output has it."""
NAME_LENGTH_MAX = 30

Batch: TypeAlias = pa.RecordBatch | pa.Table | None
Predicate = Callable[[pa.RecordBatch], pa.Array | pa.ChunkedArray]
"""Maps a batch to a column of booleans: the rows that are meant. Null is false."""


class DeadLetters(NamedTuple):
    """Malformed records as raw rows for the sink, among the batches that a reader yields."""

    records: pa.RecordBatch


PASSING = "/"
"""Before the name of an output, in the place of a frame's topic: no topic of Kafka's has it."""


def passing(
    sent: SideRows | DeadLetters, target: int, source: int, sequence: int, attempt: int
) -> Frame:
    """Return the frame in which rows pass by a keyed step."""
    rows = sent.rows if isinstance(sent, SideRows) else sent.records
    name = sent.output if isinstance(sent, SideRows) else DEAD_LETTERS
    topic = f"{PASSING}{name}"
    return Frame(target, source, sequence, topic, 0, rows.num_rows, to_ipc(rows), attempt)


def passed_by(frame: Frame) -> SideRows | DeadLetters:
    """Read back what `passing` made."""
    assert frame.topic.startswith(PASSING), frame.topic
    name, rows = frame.topic.removeprefix(PASSING), from_ipc(frame.data)
    return DeadLetters(rows) if name == DEAD_LETTERS else SideRows(name, rows)


@checked
@dataclass(frozen=True)
class Rows:
    """The result of a `map_batches` function that puts out more than the main output.

    Source: Flink's `ProcessFunction.Context.output(OutputTag, value)`.

    Args:
        main: rows for the next step, in Arrow, pandas or Polars; None: none.
        outputs: rows of side outputs, by the names that `map_batches(outputs=...)` declares; a
            name that is left out has none.
    """

    main: Annotated[Batch, as_arrow] = None
    outputs: Mapping[str, Annotated[Batch, as_arrow]] = field(default_factory=dict)


@dataclass(frozen=True)
class DeclaredFunction:
    """A function of `map_batches` with its declared columns.

    Args:
        function: as the user wrote it.
        outputs: the columns of each side output.
        columns: of the main output; None: not declared.
    """

    function: Callable[[pa.RecordBatch], Batch | Rows]
    outputs: Mapping[str, pa.Schema] = field(default_factory=dict)
    columns: pa.Schema | None = None

    @property
    def __name__(self) -> str:
        """The name of the user's function, for messages."""
        return name_of(self.function)

    def __call__(self, rows: pa.RecordBatch) -> Batch | Rows:
        """Call the function."""
        return self.function(rows)


def users_function(function: Any) -> Any:
    """Return the function that a user wrote, without the wrappers of a step."""
    while type(function).__module__.startswith("tallystick.") and hasattr(function, "function"):
        function = function.function
    return function


def reuses_memory(function: Any) -> bool:
    """True if a function may be a user's, and use the memory of earlier rows; expressions do not.

    Those of the package say so by `reuses_memory = False`.
    """
    inner = function.predicate if isinstance(function, Filter) else function
    return bool(getattr(inner, "reuses_memory", True))


def _shown(returned: object) -> str:
    """Return the value that a function returned as text on one line."""
    if isinstance(returned, pa.RecordBatch | pa.Table):
        return f"a {type(returned).__name__}"
    return " ".join(reprlib.repr(returned).split())


def conformed(
    side: SideRows, declared: Mapping[str, pa.Schema], what: str, where: str
) -> Iterator[SideRows]:
    """Yield rows of a side output with the columns that were declared; nothing if there are none.

    Args:
        side: as a function put them out.
        declared: the columns of its side outputs.
        what: puts them out, for messages.
        where: side outputs of it are declared, for messages.

    Raises:
        OptionError: the output is not declared, or a column is missing or one too many.
        RecordError: a value does not fit the declared type.
    """
    columns = declared.get(side.output)
    if columns is None:
        known = ", ".join(declared) or "none"
        raise OptionError(
            f"{what} puts out rows for {side.output!r}, and declares {known}: declare it with its "
            f"columns, {where}(..., outputs={{{side.output!r}: 'user string, why string'}})"
        )
    rows = conform(side.rows, columns, f"{what}, output {side.output!r}")
    if rows.num_rows:
        yield SideRows(side.output, rows)


@dataclass(frozen=True)
class Selection:
    """The selection of rows for one sink.

    Args:
        output: the name of the output.
        when: true for the rows to take; None: takes all rows.
        functions: the functions that the rows pass through before the sink, see `task.selected`.
    """

    output: str = MAIN
    when: Predicate | None = None
    functions: tuple[Callable[[pa.RecordBatch], Batch], ...] = ()

    def of(self, rows: pa.RecordBatch, output: str = MAIN) -> pa.RecordBatch | None:
        """Return the selected rows of a batch of an output, or None if no row is selected.

        Raises:
            OptionError: the predicate returned something else than a column of booleans.
        """
        if output != self.output:
            return None
        if self.when is None:
            return rows
        kept = rows.filter(mask_of(self.when, rows, "when()"))
        return kept if kept.num_rows else None


def mask_of(predicate: Predicate, rows: pa.RecordBatch, what: str) -> pa.Array:
    """Return the mask of the rows for which a predicate is true.

    Args:
        predicate: the user's.
        rows: the batch.
        what: the name of the predicate, for the message.

    Raises:
        OptionError: the predicate returned something else than a column of booleans.
    """
    step = f"{what} {name_of(predicate)}"
    with calling_user(step, rows), hinting(rows):
        chosen = predicate(rows)
    is_column = isinstance(chosen, pa.Array | pa.ChunkedArray)
    if not is_column or not pa.types.is_boolean(chosen.type) or len(chosen) != rows.num_rows:
        is_numpy = type(chosen).__module__ == "numpy"
        returned = f"{len(chosen)} values of type {chosen.type}" if is_column else _shown(chosen)
        remedy = "; pa.array(mask) makes one of numpy's" if is_numpy else ""
        raise OptionError(
            f"{what}: the predicate returned {returned}: expected a boolean column of the batch's "
            f"{rows.num_rows} rows, such as pc.greater(rows['delay'], 15){remedy}"
        )
    return chosen.combine_chunks() if isinstance(chosen, pa.ChunkedArray) else chosen


@dataclass(frozen=True)
class Filter:
    """A function of `map_batches` that keeps the rows for which a predicate is true."""

    predicate: Predicate

    @property
    def __name__(self) -> str:
        """The step with the user's predicate, for messages and the page."""
        return f"filter({name_of(self.predicate)})"

    def __call__(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows that are kept; none of their columns changes."""
        return rows.filter(mask_of(self.predicate, rows, "filter()"))


OF_MAIN = Selection()
"""All rows of the main output."""
OF_DEAD_LETTERS = Selection(DEAD_LETTERS)


def check_output_name(name: str, what: str) -> None:
    """Refuse a name that `write` could not be given.

    Raises:
        OptionError: it is no identifier, too long, or stands for the main output.
    """
    if name == "main":
        raise OptionError(
            f"{what}: 'main' would be read as the main output, which has no name: its rows are "
            f"what the function returns, and its sinks stand first in write(). Name it otherwise"
        )
    is_plain = isinstance(name, str) and name.isascii() and name.isidentifier()
    if not is_plain or name.startswith("_") or len(name) > NAME_LENGTH_MAX:
        raise OptionError(
            f"{what}: the name {name!r}: expected up to {NAME_LENGTH_MAX} letters, digits and '_', "
            f"the first a letter: write({name}=sink) names it too"
        )
