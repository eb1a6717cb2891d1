"""The tasks of an epoch: what rows pass through, encode, write. Nothing here knows Spark or Kafka.

The task that reads is in `read_plan`.

A task holds nothing that the next one may not get: connections are kept per worker process because
they are dear, and are made again where they are missing.

Invariants of the writing task, which together close the one hole that Kafka leaves (it cannot tell
two attempts of a task apart, they share producer id and epoch):
    * Only a first attempt writes; any other reports that the epoch must be aborted.
    * Before its first write to a partition it asks Kafka whether the partition holds anything of
      this producer epoch; if so it does not write. A resident task need not ask: it has no second
      attempt (`spark.gang`).
    * It closes the writer before it reports, and never writes after.
    * What goes wrong is reported, not raised: Spark would start another attempt. Only a worker that
      lost its daemon raises: Spark must not take it back, and that attempt is refused.
"""

import contextlib
import json
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar, Protocol, Self, TypeAlias

import pyarrow as pa

from tallystick.codec.output_records import OutputRecords, letters_of, told_of
from tallystick.codec.own_memory import own
from tallystick.codec.records.encoder import EncodedBatch
from tallystick.codec.rows import RowLayout
from tallystick.errors import (
    EpochAbortedError,
    OptionError,
    TallystickError,
    WorkerOrphanedError,
)
from tallystick.host import stopwatch as clock
from tallystick.host.failure import Failure
from tallystick.host.forks import check_parent
from tallystick.host.stopwatch import now_ms
from tallystick.host.user_code import calling_user
from tallystick.ports import Produce, Writer
from tallystick.state.functions.processing import SideRows
from tallystick.tasks.frames import (
    Attempt,
    Frame,
    FrameSources,
    Note,
    NoteKind,
    conform,
    grouped,
    last_frames,
    target_of,
)
from tallystick.tasks.hints import hinting, name_of, note_result, remedy_of
from tallystick.tasks.outputs import (
    DEAD_LETTERS,
    MAIN,
    OF_MAIN,
    Batch,
    DeadLetters,
    DeclaredFunction,
    Rows,
    Selection,
    conformed,
    reuses_memory,
    users_function,
)
from tallystick.values import ProducedRange, Producer, TopicPartition

logger = logging.getLogger(__name__)

BatchFunction = Callable[[pa.RecordBatch], Batch | Rows]
COMBINED_BYTES_MAX = 1 << 31
"""A column of text, or of lists, that is one array holds less; larger tables stay in chunks."""


def apply(
    functions: Iterable[BatchFunction], rows: pa.RecordBatch
) -> Iterator[pa.RecordBatch | SideRows]:
    """Pass a batch through the user's functions; an empty or missing result ends the way.

    What a function puts out beside the main output passes by the functions after it. A user's
    function gets a copy of the rows of the one before, which may use the same buffers; see
    `own_memory`.
    """
    batches: Iterator[pa.RecordBatch | SideRows] = iter([rows])
    is_of_users = False
    for function in functions:
        reuses = reuses_memory(function)
        batches = _passed(function, batches, of_users=reuses and is_of_users)
        is_of_users |= reuses
    return (batch for batch in batches if isinstance(batch, SideRows) or batch.num_rows)


def selected(selection: Selection, rows: pa.RecordBatch, output: str) -> Iterator[pa.RecordBatch]:
    """Yield what a sink gets of a batch of an output."""
    chosen = selection.of(rows, output)
    if chosen is not None:
        for part in apply(selection.functions, chosen):
            assert isinstance(part, pa.RecordBatch), "such a function declares no side outputs"
            yield part


def for_sinks(rows: pa.RecordBatch, selections: Sequence[Selection]) -> pa.RecordBatch:
    """Return rows for sinks: a copy if functions of a sink run, of one sink too.

    Such a function may use the same buffers as the last one before the sinks.
    """
    functions = [one for selection in selections for one in (*selection.functions, selection.when)]
    return own(rows) if any(one and reuses_memory(one) for one in functions) else rows


def _passed(
    function: BatchFunction, batches: Iterator[pa.RecordBatch | SideRows], *, of_users: bool
) -> Iterator[pa.RecordBatch | SideRows]:
    for rows in batches:
        if isinstance(rows, SideRows):
            yield rows
        elif rows.num_rows:
            with clock.counted_as(clock.FUNCTIONS):
                with calling_user(f"map_batches {name_of(function)}", rows), hinting(rows):
                    result = function(own(rows) if of_users else rows)
                note_result("map_batches", users_function(function), is_none=result is None)
                outputs = _outputs_of(function, result)
                # While the first is on its way, other functions run, and the others wait.
                outputs[1:] = map(_own, outputs[1:])
            yield from outputs


def _own(rows: pa.RecordBatch | SideRows) -> pa.RecordBatch | SideRows:
    return SideRows(rows.output, own(rows.rows)) if isinstance(rows, SideRows) else own(rows)


def _outputs_of(function: BatchFunction, result: Batch | Rows) -> list[pa.RecordBatch | SideRows]:
    """Return the result of a user's function, conformed to the declared columns."""
    declared = function if isinstance(function, DeclaredFunction) else DeclaredFunction(function)
    what = f"map_batches {name_of(function)}"

    def main(result: Batch) -> list[pa.RecordBatch]:
        batches, columns = _batches_of(function, result), declared.columns
        if columns is None:
            return batches
        return [conform(rows, columns, f"{what}, schema=") for rows in batches]

    if not isinstance(result, Rows):
        return [*main(result)]
    sides = [
        side
        for name, batch in result.outputs.items()
        for rows in _batches_of(function, batch)
        for side in conformed(SideRows(name, rows), declared.outputs, what, "map_batches")
    ]
    return [*main(result.main), *sides]


def _batches_of(function: BatchFunction, result: Batch) -> list[pa.RecordBatch]:
    """Return a function's result, in as few batches as Arrow's limits allow."""
    if result is None:
        return []
    if isinstance(result, pa.Table):
        whole = result
        if result.nbytes < COMBINED_BYTES_MAX:
            with contextlib.suppress(pa.ArrowInvalid):  # dictionaries that are too large together
                whole = result.combine_chunks()
        batches: list[pa.RecordBatch] = whole.to_batches()
        return batches
    if not isinstance(result, pa.RecordBatch):
        raise OptionError(
            f"map_batches: {name_of(function)!r} returned {type(result).__name__}: expected a "
            f"pyarrow RecordBatch or Table, None for no rows, or ts.Rows with side outputs"
            f"{remedy_of(result)}"
        )
    return [result]


Sent: TypeAlias = pa.RecordBatch | SideRows | DeadLetters
"""A task's output: rows of the main output, rows of a side output, or malformed records."""


def named(sent: Sent) -> tuple[str, pa.RecordBatch]:
    """Return the name of an output, and its rows."""
    match sent:
        case SideRows(output, rows):
            return output, rows
        case DeadLetters(records):
            return DEAD_LETTERS, records
        case _:
            return MAIN, sent


class OpenOutlet(Protocol):
    """An outlet, opened for one attempt of a task."""

    def frames(self, sent: Sent, sequence: int) -> Iterator[Frame]:
        """Yield the frames of a batch, numbered from `sequence` on."""
        ...

    def finish(self) -> Iterable[Note]:
        """End the output after the last batch; return notes for the driver."""
        ...

    def abandon(self) -> None:
        """Give the output up: the attempt failed, or nobody wants its frames any more."""
        ...


class Outlet(Protocol):
    """The destination of a task's rows: writing tasks, tasks of a keyed step, or sinks."""

    @property
    def target_count(self) -> int:
        """The number of tasks."""
        ...

    @property
    def part(self) -> str:
        """The name of its work; see `stopwatch`."""
        ...

    def begun(self, source: int, attempt: int, attempt_number: int) -> OpenOutlet:
        """Open the outlet for an attempt: index of the task, random number, Spark's number."""
        ...


@dataclass(frozen=True)
class StatelessOutlet:
    """The `OpenOutlet` of an outlet that makes frames and keeps nothing."""

    make: Callable[[Sent, int, int, int], Iterator[Frame]]
    source: int
    attempt: int

    def frames(self, sent: Sent, sequence: int) -> Iterator[Frame]:
        """See `OpenOutlet.frames`."""
        return self.make(sent, self.source, sequence, self.attempt)

    def finish(self) -> Iterable[Note]:
        """See `OpenOutlet.finish`."""
        return ()

    def abandon(self) -> None:
        """See `OpenOutlet.abandon`."""


def send(
    outlet: Outlet,
    batches: Iterable[Sent],
    source: int,
    notes: Callable[[], Iterable[Note]] = tuple,
    attempt_number: int = 0,
    stage: int = 0,
) -> Iterator[Frame]:
    """Yield all frames of a task's attempt, then an end frame per target with its number.

    Args:
        outlet: where the frames go.
        batches: the rows that the task made.
        source: the task's index.
        notes: called after the last batch; returns notes for the first target.
        attempt_number: Spark's number of the attempt.
        stage: of the task.
    """
    check_parent()
    sequence, attempt = 0, secrets.randbits(63)
    with clock.stopwatch() as watch:
        opened = outlet.begun(source, attempt, attempt_number)
        try:
            for batch in batches:
                for frame in clock.timed(outlet.part, opened.frames(batch, sequence)):
                    clock.count(clock.ROWS_OUT, frame.record_count)
                    with clock.counted_as(clock.EXCHANGE):
                        yield frame
                    sequence += 1
            with clock.counted_as(outlet.part):
                closing_notes = [*notes(), *opened.finish()]
        except BaseException:
            opened.abandon()
            raise
        closing_notes.append(Note(NoteKind.TIMES, watch.times(stage, source).to_fields()))
    yield from last_frames(source, sequence, attempt, outlet.target_count, closing_notes)


@dataclass(frozen=True)
class Route:
    """The way of one sink's rows into the epoch's transaction.

    Args:
        rows: how rows become records.
        compression: as `KafkaSink` names it.
        batch_bytes: how large a record batch becomes before compression.
        selection: the output, and the rows to take from it.
    """

    rows: RowLayout
    compression: str
    batch_bytes: int
    selection: Selection = OF_MAIN


@dataclass(frozen=True)
class EncodePlan:
    """The encoding of rows as frames for writing tasks.

    Args:
        routes: the sinks that share the epoch's transaction; malformed records have one too.
        target_count: how many tasks write.
        functions: what rows of the main output pass through first.
        follows: the input topic whose readers write the partitions of the same numbers: where they
            have the same keys, no row leaves its process. Empty: none.
    """

    routes: tuple[Route, ...]
    target_count: int
    functions: tuple[BatchFunction, ...] = ()
    follows: str = ""
    part: ClassVar[str] = clock.WRITE

    def begun(self, source: int, attempt: int, attempt_number: int) -> OpenOutlet:
        """See `Outlet.begun`."""
        return StatelessOutlet(self.frames, source, attempt)

    def target(self, partition: TopicPartition) -> int:
        """Return the index of the task that writes a partition."""
        topic = self.follows or partition.topic
        return target_of(TopicPartition(topic, partition.partition), self.target_count)

    def frames(self, sent: Sent, source: int, sequence: int, attempt: int) -> Iterator[Frame]:
        """Partition, encode and compress a batch, for each sink that gets rows of it."""
        if isinstance(sent, DeadLetters):
            has_route = any(route.selection.output == DEAD_LETTERS for route in self.routes)
            assert has_route, "dead letters, and no topic for them"
        parts = apply(self.functions, sent) if isinstance(sent, pa.RecordBatch) else [sent]
        for part in parts:
            output, rows = named(part)
            rows = for_sinks(rows, [route.selection for route in self.routes])
            for route in self.routes:
                for chosen in selected(route.selection, rows, output):
                    for frame in self._encoded(route, chosen, source, sequence, attempt):
                        yield frame
                        sequence += 1

    def _encoded(
        self, route: Route, rows: pa.RecordBatch, source: int, sequence: int, attempt: int
    ) -> Iterator[Frame]:
        letter_route = next(
            (other for other in self.routes if other.selection.output == DEAD_LETTERS), None
        )
        letters: list[pa.RecordBatch] | None = None if letter_route is None else []
        records = OutputRecords(route.rows, route.compression, route.batch_bytes, letters)
        for partition, encoded in records.encode(rows, spread=source + sequence, now_ms=now_ms()):
            clock.count(clock.WRITTEN_BYTES, len(encoded.data))
            yield Frame(
                self.target(partition),
                source,
                sequence,
                partition.topic,
                partition.partition,
                encoded.record_count,
                encoded.data,
                attempt,
            )
            sequence += 1
        if letters and letter_route is not None:
            yield from self._letters(letters, letter_route, route, source, sequence, attempt)

    def _letters(
        self,
        letters: list[pa.RecordBatch],
        letter_route: Route,
        route: Route,
        source: int,
        sequence: int,
        attempt: int,
    ) -> Iterator[Frame]:
        """Yield the dead letters of records that were too large, the cut ones of letters too."""
        whole = letters_of(letters)
        logger.warning("%s", told_of(whole))
        if route is letter_route:  # a cut letter that is too large is an error
            only = replace(self, routes=(replace(letter_route, selection=OF_MAIN),))
            yield from only._encoded(only.routes[0], whole, source, sequence, attempt)
        else:
            yield from self._encoded(letter_route, whole, source, sequence, attempt)


@dataclass(frozen=True)
class Report:
    """A writing task's report: the ranges written, or the reason to give the epoch up.

    `attempts` and `notes` are of the sources that sent rows; see `frames`.
    """

    produced: tuple[ProducedRange, ...] = ()
    failure: Failure | None = None
    attempts: tuple[Attempt, ...] = ()
    notes: tuple[Note, ...] = ()

    def to_json(self) -> str:
        """Return the text that travels back through Spark."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read back what `to_json` made."""
        fields = json.loads(text)
        produced = tuple(ProducedRange(**written) for written in fields["produced"])
        failure = fields["failure"] and Failure.from_fields(fields["failure"])
        attempts = tuple(Attempt(*attempt) for attempt in fields["attempts"])
        return cls(produced, failure, attempts, tuple(map(Note.of, fields["notes"])))


@dataclass(frozen=True)
class WritePlan:
    """The writing of frames into the open transaction.

    Args:
        produce: the connection to the cluster.
        producer: of the transaction.
        stage: of the tasks that send the frames.
        has_second_attempts: whoever runs the tasks may run one twice with one producer; a gang
            does not: an order goes to one process, and a gang that is lost is fenced.
    """

    produce: Produce
    producer: Producer
    stage: int = 0
    has_second_attempts: bool = True

    def write(self, frames: Iterator[Frame], attempt_number: int) -> Report:
        """Write all frames, in order per partition; report once, and never write after.

        Args:
            frames: those of this task's partitions, sorted by source and sequence.
            attempt_number: Spark's; only 0 may write.

        Raises:
            WorkerOrphanedError: of this process; a report would put it back into Spark's pool.
        """
        try:
            if attempt_number > 0:
                raise EpochAbortedError(
                    f"attempt {attempt_number} of a writing task: an earlier attempt may still be "
                    f"writing with the same producer epoch, so this one does not"
                )
            sources = FrameSources(self.stage)
            with clock.stopwatch() as watch:
                produced = self._write(clock.timed(clock.WAIT, sources.with_rows(frames)))
            own = Note(NoteKind.TIMES, watch.times(self.stage + 1).to_fields())
            return Report(produced, attempts=sources.attempts, notes=(*sources.notes, own))
        except WorkerOrphanedError:
            raise
        except TallystickError as error:
            return Report(failure=Failure.of(error))

    def _write(self, frames: Iterator[Frame]) -> tuple[ProducedRange, ...]:
        check_parent()
        writer = self.produce.writer(self.producer)
        seen: set[TopicPartition] = set()
        try:
            for group in grouped(frames):
                check_parent()
                new = {frame.topic_partition for frame in group} - seen
                if new and self.has_second_attempts:
                    self._check_untouched(writer, sorted(new))
                    seen |= new
                encoded = [(f.topic_partition, EncodedBatch(f.record_count, f.data)) for f in group]
                with clock.counted_as(clock.WRITE):
                    writer.write(encoded)
        finally:
            with clock.counted_as(clock.WRITE):
                produced = writer.close()
        return produced

    def _check_untouched(self, writer: Writer, partitions: Iterable[TopicPartition]) -> None:
        """Raise if a partition already holds records of the producer epoch.

        Where Kafka does not tell (no READ on the topic) the check cannot be made, and passes.

        Raises:
            EpochAbortedError: another attempt of the task has written.
        """
        for partition, sequence in sorted((writer.last_sequences(partitions) or {}).items()):
            raise EpochAbortedError(
                f"{partition} already holds rows of {self.producer} up to sequence {sequence}: "
                f"another attempt of this task has written. The epoch must run again."
            )
