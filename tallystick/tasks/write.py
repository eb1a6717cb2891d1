"""The way of rows into several sinks, or into a sink with transactions of its own.

    rows ─► functions ─┬─► transaction of sink 1 ─► committable ─┐
                       ├─► transaction of sink 2 ─► committable ─┴─► note ─► driver
                       └─► frames for the tasks that write into the epoch's transaction

It all happens in the task that has the rows: no exchange. Each attempt of a task has transactions
of its own, so Spark may run it again, and at the same time: what counts is what the note of the
attempt names whose rows, or whose report, Spark took.
"""

import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

import pyarrow as pa

from tallystick.codec.own_memory import own
from tallystick.epoch.two_phase import Committable, Owner, Place, Transaction, TransactionPlan
from tallystick.errors import BrokenInvariantError, TallystickError
from tallystick.host.failure import Failure
from tallystick.host.stopwatch import WRITE, TaskTimes
from tallystick.state.functions.processing import SideRows
from tallystick.tasks.event_times import LatestTimes
from tallystick.tasks.frames import Attempt, Frame, FrameSources, Note, NoteKind
from tallystick.tasks.keyed import TaskNote
from tallystick.tasks.outputs import OF_MAIN, DeadLetters, Selection
from tallystick.tasks.read import (
    BatchFunction,
    EncodePlan,
    Report,
    Sent,
    apply,
    for_sinks,
    named,
    selected,
)


class Branch(NamedTuple):
    """A sink with transactions of its own, in the plan sent to tasks.

    Args:
        owner: of the transactions.
        plan: how tasks begin transactions.
        takes_dead_letters: the sink gets malformed records.
        selection: the output and the rows of it that the sink gets.
    """

    owner: Owner
    plan: TransactionPlan
    takes_dead_letters: bool = False
    selection: Selection = OF_MAIN


@runtime_checkable
class TakesDeadLetters(Protocol):
    """A transaction that has a place for malformed records too."""

    def write_dead_letters(self, records: pa.RecordBatch) -> None:
        """Take malformed records, as the reader found them."""
        ...


@dataclass(frozen=True)
class SinkNote:
    """A report to the driver of the transactions that an attempt of a task prepared.

    Args:
        source: the task's index.
        attempt: the number drawn for the attempt.
        committables: the prepared transactions.
        attempt_number: Spark's number; from 1 on, earlier attempts may have begun transactions that
            no note names.
    """

    source: int
    attempt: int
    committables: tuple[Committable, ...]
    attempt_number: int = 0

    def to_note(self) -> Note:
        """Return the note that travels in a frame."""
        committables = [committable.to_fields() for committable in self.committables]
        return Note(NoteKind.SINKS, {**vars(self), "committables": committables})

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Read back the fields of a note."""
        committables = tuple(map(Committable.from_fields, fields["committables"]))
        return cls(**{**fields, "committables": committables})


class Notes(NamedTuple):
    """The notes of an epoch's tasks, by kind."""

    keyed: list[TaskNote]
    sinks: list[SinkNote]
    times: list[TaskTimes]
    event_times: list[LatestTimes]
    tables: list[dict[str, Any]]
    lists: list[dict[str, Any]]


def split_notes(notes: Iterable[Note]) -> Notes:
    """Return the notes of an epoch by their kind."""
    fields: dict[NoteKind, list[Any]] = {kind: [] for kind in NoteKind}
    for note in notes:
        fields[note.kind].append(note.fields)
    return Notes(
        keyed=list(map(TaskNote.from_fields, fields[NoteKind.KEYED])),
        sinks=list(map(SinkNote.from_fields, fields[NoteKind.SINKS])),
        times=[TaskTimes(*times) for times in fields[NoteKind.TIMES]],
        event_times=fields[NoteKind.EVENT_TIMES],
        tables=fields[NoteKind.TABLE],
        lists=fields[NoteKind.LIST],
    )


def check_notes(notes: Iterable[SinkNote], attempts: Iterable[Attempt], stage: int) -> None:
    """Check that every task that sent rows to sinks left a single note.

    The output of a task without a note would be lost.

    Args:
        notes: what came back.
        attempts: all attempts of tasks whose frames were taken.
        stage: of the tasks that send to sinks.

    Raises:
        BrokenInvariantError: a note is missing, or there is one too many.
    """
    expected = sorted(
        {(attempt.source, attempt.attempt) for attempt in attempts if attempt.stage == stage}
    )
    noted = sorted((note.source, note.attempt) for note in notes)
    if noted != expected:
        raise BrokenInvariantError(
            f"notes of the sinks came from the attempts {noted}, expected {expected}"
        )


@dataclass(frozen=True)
class FanOut:
    """The last outlet of a pipeline with participants.

    Args:
        branches: the participants.
        encode: how rows become frames of the epoch's own transaction; None: there is none.
        checkpoint_id: the epoch.
        functions: what rows pass through first.
        may_leave_strays: attempts may end without a word that no attempt number tells of.
    """

    branches: tuple[Branch, ...]
    encode: EncodePlan | None
    checkpoint_id: int
    functions: tuple[BatchFunction, ...] = ()
    may_leave_strays: bool = False
    part: ClassVar[str] = WRITE

    @property
    def target_count(self) -> int:
        """The number of tasks that get frames; 1 without a writing stage, for notes."""
        return 1 if self.encode is None else self.encode.target_count

    def begun(self, source: int, attempt: int, attempt_number: int) -> "_BranchWriter":
        """See `Outlet.begun`."""
        return _BranchWriter(self, source, attempt, attempt_number)


@dataclass
class _BranchWriter:
    """One attempt of a task that sends to sinks; a transaction is begun with the first rows."""

    plan: FanOut
    source: int
    attempt: int
    attempt_number: int
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    transactions: dict[int, Transaction] = field(default_factory=dict)  # by branch

    def frames(self, sent: Sent, sequence: int) -> Iterator[Frame]:
        """See `OpenOutlet.frames`."""
        encode = self.plan.encode
        if isinstance(sent, DeadLetters):
            if encode is None:
                self._write_dead_letters(sent.records)
            else:
                yield from encode.frames(sent, self.source, sequence, self.attempt)
            return
        is_main = isinstance(sent, pa.RecordBatch)
        selections = [branch.selection for branch in self.plan.branches]
        selections += [route.selection for route in encode.routes] if encode else []
        for part in apply(self.plan.functions, sent) if is_main else [sent]:
            output, rows = named(part)
            rows = for_sinks(rows, selections)
            for index, branch in enumerate(self.plan.branches):
                for chosen in selected(branch.selection, rows, output):
                    self._begun(index).write(own(chosen))  # it may keep them, see `own_memory`
            if encode is not None:
                part = SideRows(output, rows) if isinstance(part, SideRows) else rows
                for frame in encode.frames(part, self.source, sequence, self.attempt):
                    yield frame
                    sequence += 1

    def finish(self) -> list[Note]:
        """See `OpenOutlet.finish`."""
        begun = self.transactions.values()
        prepared = [committable for transaction in begun for committable in transaction.prepare()]
        note = SinkNote(self.source, self.attempt, tuple(prepared), self.attempt_number)
        return [note.to_note()]

    def abandon(self) -> None:
        """See `OpenOutlet.abandon`."""
        for transaction in self.transactions.values():
            transaction.abort()

    def _write_dead_letters(self, records: pa.RecordBatch) -> None:
        for index, branch in enumerate(self.plan.branches):
            if branch.takes_dead_letters:
                transaction = self._begun(index)
                assert isinstance(transaction, TakesDeadLetters), type(transaction)
                transaction.write_dead_letters(records)
                return
        raise BrokenInvariantError("malformed records, and no sink that takes them")

    def _begun(self, index: int) -> Transaction:
        """The transaction of a branch; begun with what is to be written first."""
        if index not in self.transactions:
            branch = self.plan.branches[index]
            place = Place(
                owner=branch.owner,
                checkpoint_id=self.plan.checkpoint_id,
                task=self.source,
                attempt=self.attempt_number,
                nonce=self.nonce,
            )
            self.transactions[index] = branch.plan.begin(place)
        return self.transactions[index]


@dataclass(frozen=True)
class CollectPlan:
    """The plan in place of a `WritePlan` if only sinks write: collects the notes of tasks.

    `stage` is the stage of the tasks that send the frames.
    """

    stage: int = 0

    def write(self, frames: Iterator[Frame], attempt_number: int) -> Report:
        """Gather attempts and notes from the frames; any attempt may."""
        try:
            sources = FrameSources(self.stage)
            rows = sum(1 for _ in sources.with_rows(frames))
            if rows:
                raise BrokenInvariantError(f"{rows} frames with rows, and no task to write them")
            return Report(attempts=sources.attempts, notes=tuple(sources.notes))
        except TallystickError as error:
            return Report(failure=Failure.of(error))
