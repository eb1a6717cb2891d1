"""`ConsoleSink`: the rows of committed epochs, printed by the driver.

A task's rows travel to the driver in the details of what it prepared. So they are printed after
the decision, and those of an aborted epoch never; a run that dies between decision and print has
its rows printed by the next one, and some may be printed twice.
"""

import base64
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from threading import Lock
from typing import Any, TextIO

import pyarrow as pa

from tallystick.api.tables import SHOWN_MAX, as_html, as_text, counted
from tallystick.arguments import checked
from tallystick.epoch.two_phase import Committable, Outcome, Owner, Place, RunFacts
from tallystick.tasks.frames import from_ipc, to_ipc

KIND = "console"
ROWS_MAX = 1_000
BYTES_MAX = 64 * 1024
"""The most rows, and bytes of rows, of a task's epoch that travel through a checkpoint."""
_PRINTING = Lock()
"""Several sinks and runs print to one stdout."""


@checked
@dataclass(frozen=True)
class ConsoleSink:
    """Prints rows once their epoch is committed: to look at what comes out.

    A terminal and a notebook show a table per epoch and task, of 20 rows at most; a pipe gets all
    rows as JSON lines. On Spark up to 1,000 rows of each task's epoch travel to the driver, 64 KiB
    in all, and the others are counted.

    Args:
        uid: names the sink where a pipeline has several; None: `console-1` and so on.
    """

    _: KW_ONLY
    uid: str | None = None

    @property
    def kind(self) -> str:
        """See `epoch.two_phase.Sink`."""
        return KIND

    def open(self, owner: Owner, facts: RunFacts) -> "OpenConsoleSink":
        """See `epoch.two_phase.Sink`; there is nothing to connect to."""
        return OpenConsoleSink(ConsolePlan())


@dataclass(frozen=True)
class WholeConsoleSink:
    """A `ConsoleSink` whose rows stay in this process, so that none has to be left out."""

    uid: str
    kind: str = KIND

    def open(self, owner: Owner, facts: RunFacts) -> "OpenConsoleSink":
        """See `epoch.two_phase.Sink`."""
        return OpenConsoleSink(ConsolePlan(is_whole=True))


@dataclass(frozen=True)
class ConsolePlan:
    """The plan of a task's transactions; see `epoch.two_phase.TransactionPlan`."""

    is_whole: bool = False

    def begin(self, place: Place) -> "ConsoleTransaction":
        """Begin a transaction."""
        return ConsoleTransaction(place, is_whole=self.is_whole)


class ConsoleTransaction:
    """The rows of a task in an epoch; see `epoch.two_phase.Transaction`."""

    def __init__(self, place: Place, *, is_whole: bool) -> None:
        self._place, self._is_whole = place, is_whole
        self._count = self._kept_count = 0
        self._batches: list[pa.RecordBatch] = []

    def write(self, rows: pa.RecordBatch) -> None:
        """Keep rows; beyond the bound, count them."""
        self._count += rows.num_rows
        if not self._is_whole:
            rows = rows.slice(0, ROWS_MAX - self._kept_count)
        if rows.num_rows:
            self._kept_count += rows.num_rows
            self._batches.append(rows)

    def prepare(self) -> Sequence[Committable]:
        """Hand the rows over."""
        place, table = self._place, pa.Table.from_batches(self._batches).combine_chunks()
        (rows,) = table.to_batches()
        data = to_ipc(rows)
        while not self._is_whole and len(data) > BYTES_MAX and rows.num_rows:
            rows = rows.slice(0, rows.num_rows // 2)
            data = to_ipc(rows)
        text = base64.b64encode(data).decode()
        name = f"{place.checkpoint_id}-{place.task}-{place.nonce}"
        owner = place.owner.sink
        return [Committable(owner, place.checkpoint_id, place.task, name, self._count, 0, text)]

    def abort(self) -> None:
        """Do nothing: what was kept is the transaction's own."""


class OpenConsoleSink:
    """The driver's side; see `epoch.two_phase.TwoPhaseCommitSink`."""

    timeout = None

    def __init__(self, plan: ConsolePlan) -> None:
        self._plan = plan
        self._printed: set[str] = set()

    def plan(self) -> ConsolePlan:
        """Return the plan of an epoch."""
        return self._plan

    def commit(self, committable: Committable) -> Outcome:
        """Print the rows; a second call prints nothing."""
        with _PRINTING:
            if committable.name not in self._printed:
                _show(committable, sys.stdout)
                self._printed = {committable.name, *list(self._printed)[:ROWS_MAX]}
        return Outcome.COMMITTED

    def abort(self, committable: Committable) -> None:
        """Do nothing: the rows are with the committable."""

    def lingering(self, owner: Owner) -> Iterable[Committable]:
        """Return nothing: no other system holds rows."""
        return ()

    def describe(self, committable: Committable) -> str:
        """Describe rows to a person."""
        return f"{committable.record_count} rows to print"

    def close(self) -> None:
        """Do nothing: stdout stays open."""


def _show(committable: Committable, stream: TextIO) -> None:
    rows = pa.Table.from_batches([from_ipc(base64.b64decode(committable.details))])
    title = "" if committable.sink == f"{KIND}-1" else f"{committable.sink}: "
    count, there = committable.record_count, rows.num_rows
    last_line = title + counted(count, min(there, SHOWN_MAX))
    if (display := _notebook()) is not None:
        display({"text/html": as_html(rows, last_line)}, raw=True)
        return
    if stream.isatty():
        lines = [as_text(rows, last_line)]
    else:
        lines = [json.dumps(row, default=_plain, ensure_ascii=False) for row in rows.to_pylist()]
        if count > there:
            text = f"{count - there} more rows of epoch {committable.checkpoint_id} are not shown"
            sys.stderr.write(f"{committable.sink}: {text}\n")
    stream.write("".join(f"{line}\n" for line in lines))
    stream.flush()


def _plain(value: Any) -> Any:
    """Return a value that JSON has no type for, as Spark's `to_json` writes it."""
    match value:
        case datetime() | date() | time():
            return value.isoformat()
        case Decimal() | timedelta():
            return str(value)
        case bytes():
            return base64.b64encode(value).decode()
    raise TypeError(f"no JSON for {type(value).__name__}")


def _notebook() -> Any:
    """Return the function of a notebook that displays a table; None: this is no notebook."""
    interactive = sys.modules.get("IPython")
    shell = interactive and interactive.get_ipython()
    if shell is None or type(shell).__name__ != "ZMQInteractiveShell":
        return None
    return sys.modules["IPython.display"].display
