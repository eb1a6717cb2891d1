"""Rows to several sinks in one task: what is begun when, and what the driver is told."""

from dataclasses import dataclass, field

import pyarrow as pa
import pytest

from tallystick.epoch.two_phase import Committable, Owner, Place
from tallystick.errors import BrokenInvariantError, RecordError
from tallystick.tasks.frames import Attempt, FrameSources
from tallystick.tasks.outputs import DeadLetters
from tallystick.tasks.read import send
from tallystick.tasks.write import Branch, CollectPlan, FanOut, check_notes, split_notes

ROWS = pa.RecordBatch.from_pydict({"n": [1, 2, 3]})
LETTERS = DeadLetters(pa.RecordBatch.from_pydict({"value": [b"?"]}))


@dataclass
class Notebook:
    """A sink that writes down what it is told."""

    name: str
    fails_at: str = ""
    calls: list[str] = field(default_factory=list)

    def begin(self, place: Place) -> "Notebook":
        self._note(f"begin {place.checkpoint_id}/{place.task}/{place.attempt}")
        return self

    def write(self, rows: pa.RecordBatch) -> None:
        self._note(f"write {rows.num_rows}")

    def write_dead_letters(self, records: pa.RecordBatch) -> None:
        self._note(f"letters {records.num_rows}")

    def prepare(self) -> list[Committable]:
        self._note("prepare")
        return [Committable(self.name, 7, 4, f"{self.name}-x", 3, 1)]

    def abort(self) -> None:
        self._note("abort")

    def _note(self, what: str) -> None:
        if what.split()[0] == self.fails_at:
            raise RecordError(f"{self.name}: {what}")
        self.calls.append(what)


def fan_out(*sinks: Notebook, letters: str = "", functions: tuple = ()) -> FanOut:
    branches = [
        Branch(Owner("p", sink.name, "l"), sink, takes_dead_letters=sink.name == letters)
        for sink in sinks
    ]
    return FanOut(tuple(branches), None, 7, functions)


def sent(outlet: FanOut, *batches: object) -> tuple[list, list[Attempt]]:
    """The notes of an attempt, and which attempts were heard."""
    sources = FrameSources(0)
    frames = send(outlet, batches, 4, attempt_number=2)
    assert list(sources.with_rows(frames)) == [], "rows do not travel"
    others, notes, *_ = split_notes(sources.notes)
    assert others == []
    return notes, list(sources.attempts)


def test_each_sink_gets_all_rows_and_the_driver_hears_what_was_prepared() -> None:
    one, two = Notebook("one"), Notebook("two")

    notes, sources = sent(fan_out(one, two), ROWS, ROWS.slice(1))

    assert one.calls == two.calls == ["begin 7/4/2", "write 3", "write 2", "prepare"]
    sinks = [committable.sink for note in notes for committable in note.committables]
    assert sinks == ["one", "two"]
    check_notes(notes, sources, 0)


def test_a_task_without_rows_begins_nothing_and_is_heard_of() -> None:
    one = Notebook("one")

    notes, sources = sent(fan_out(one, functions=(lambda rows: None,)), ROWS)

    assert one.calls == []
    assert [note.committables for note in notes] == [()]
    check_notes(notes, sources, 0)


def test_malformed_records_begin_the_transaction_of_their_sink_alone() -> None:
    one, two = Notebook("one"), Notebook("two")

    sent(fan_out(one, two, letters="two"), LETTERS)

    assert (one.calls, two.calls) == ([], ["begin 7/4/2", "letters 1", "prepare"])
    with pytest.raises(BrokenInvariantError, match="no sink that takes them"):
        sent(fan_out(one), LETTERS)


@pytest.mark.parametrize("fails_at", ["write", "prepare"])
def test_what_fails_in_one_sink_is_let_go_of_in_all(fails_at: str) -> None:
    one, two = Notebook("one"), Notebook("two", fails_at)

    with pytest.raises(RecordError, match=f"two: {fails_at}"):
        sent(fan_out(one, two), ROWS)

    assert one.calls[-1] == "abort"
    assert two.calls[-1] == "abort"


def test_an_attempt_that_nobody_wants_to_hear_lets_go() -> None:
    one = Notebook("one")
    frames = send(fan_out(one), iter([ROWS, LETTERS]), 4)

    with pytest.raises(BrokenInvariantError):
        next(frames)
    assert one.calls == ["begin 7/4/0", "write 3", "abort"]


def test_a_note_too_few_or_too_many_is_found() -> None:
    notes, sources = sent(fan_out(Notebook("one")), ROWS)
    others, _ = sent(fan_out(Notebook("one")), ROWS)

    for wrong_notes in ([], [*notes, *notes], others):
        with pytest.raises(BrokenInvariantError, match="expected"):
            check_notes(wrong_notes, sources, 0)


def test_reports_gather_notes_and_rows_that_nobody_writes_are_a_bug() -> None:
    outlet = fan_out(Notebook("one"))
    report = CollectPlan(stage=0).write(send(outlet, [ROWS], 4), attempt_number=3)
    notes = split_notes(report.notes).sinks

    assert report.failure is None
    check_notes(notes, report.attempts, 0)
    frames = [frame._replace(record_count=1) for frame in send(outlet, [ROWS], 4)]
    failure = CollectPlan().write(iter(frames), 0).failure
    assert failure is not None
    assert failure.name == BrokenInvariantError.__name__
