"""What waits for a decision: that no error ends the others, and what a recovery aborts."""

from collections.abc import Callable

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.epoch.two_phase import (
    LAST_TRY_S,
    Committable,
    LossyTransaction,
    Outcome,
    Owner,
    Place,
    commit_all,
    to_abort,
    try_ends_at,
)
from tallystick.errors import BrokerUnavailableError


def of(epoch: int, name: str, sink: str = "db") -> Committable:
    return Committable(sink, epoch, 0, name, 1, 0)


committables = st.builds(
    Committable,
    st.sampled_from(("db", "files")),
    st.integers(0, 5),
    st.integers(0, 3),
    st.text("abc", min_size=1, max_size=3),
    st.integers(0, 9),
    st.integers(0, 9),
    st.text(max_size=5),
)


@given(committables)
def test_a_committable_reads_back_as_it_was(committable):
    assert Committable.from_fields(committable.to_fields()) == committable


def answering(answers: dict[str, Outcome | Exception]) -> Callable[[Committable], Outcome]:
    def commit(committable: Committable) -> Outcome:
        answer = answers[committable.name]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return commit


outcomes = st.sampled_from((Outcome.COMMITTED, Outcome.LOST)) | st.builds(
    BrokerUnavailableError, st.sampled_from(("first", "second"))
)


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=2), outcomes, max_size=6))
def test_every_one_is_tried_before_the_first_error_is_told(answers):
    tried = []
    commit = answering(answers)

    def noting(committable: Committable) -> Outcome:
        tried.append(committable.name)
        return commit(committable)

    settled = commit_all([of(0, name) for name in answers], noting)

    assert tried == list(answers)
    errors = [answer for answer in answers.values() if isinstance(answer, Exception)]
    assert settled.error is (errors[0] if errors else None)
    lost = [name for name, answer in answers.items() if answer is Outcome.LOST]
    assert [transaction.name for transaction in settled.lost] == lost


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=2), outcomes, max_size=6), st.data())
def test_the_first_error_is_the_first_in_order_whatever_runs_first(answers, data):
    tried = data.draw(st.permutations(range(len(answers))))

    def in_any_order(attempt, waiting):
        outcomes = {index: attempt(waiting[index]) for index in tried}
        return [outcomes[index] for index in range(len(waiting))]

    waiting = [of(0, name) for name in answers]
    in_order = commit_all(waiting, answering(answers))

    assert commit_all(waiting, answering(answers), in_any_order) == in_order


@given(st.integers(1, 400), st.integers(1, 16), st.integers(0, 300))
def test_commits_that_all_hang_share_one_deadline(count, at_once, patience_s):
    """Two hundred of them hold an epoch up for minutes, not for hours; and each has its try."""
    free_at = [0.0] * at_once
    for _ in range(count):
        now = min(free_at)
        until = try_ends_at(patience_s, now)
        assert until - now >= LAST_TRY_S
        free_at[free_at.index(now)] = until

    rounds = -(-count // at_once)
    assert max(free_at) <= max(patience_s, LAST_TRY_S) + (rounds - 1) * LAST_TRY_S


def test_a_process_that_is_told_to_end_ends():
    """Only errors wait for the others."""

    def commit(_: Committable) -> Outcome:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        commit_all([of(0, "a")], commit)


@given(st.lists(committables), st.lists(committables))
def test_aborted_is_what_no_decision_names_and_nothing_else(lingering, decided):
    """What lingers is known by its name: a recovery does not see the rest as a manifest has it."""
    doomed = to_abort(lingering, decided)
    named = {(transaction.sink, transaction.name) for transaction in decided}

    assert [transaction for transaction in lingering if transaction in doomed] == list(doomed)
    assert all((transaction.sink, transaction.name) not in named for transaction in doomed)
    assert all(
        (transaction.sink, transaction.name) in named
        for transaction in lingering
        if transaction not in doomed
    )


def test_the_same_name_in_another_sink_is_another_transaction():
    assert to_abort([of(0, "a", "files")], [of(0, "a", "db")]) == (of(0, "a", "files"),)


def test_a_decided_one_is_kept_however_little_a_recovery_sees_of_it():
    seen = Committable("db", 0, 0, "a", 0, 0)
    decided = Committable("db", 7, 2, "a", 5, 123, "where it is")

    assert to_abort([seen], [decided]) == ()


class Half:
    """A transaction of which every row fails from a number on."""

    def __init__(self, taken: list[int], fails_from: int, error: Exception) -> None:
        self._taken, self._fails_from, self._error = taken, fails_from, error
        self._rows: list[int] = []

    def write(self, rows: pa.RecordBatch) -> None:
        self._rows += rows.column(0).to_pylist()
        if self._rows[-1] >= self._fails_from:
            raise self._error

    def prepare(self) -> list[Committable]:
        self._taken += self._rows
        return []

    def abort(self) -> None:
        self._rows.clear()


@given(st.lists(st.integers(0, 4), max_size=6), st.integers(0, 20), st.booleans())
def test_with_none_rows_are_written_or_counted_as_lost(sizes, fails_from, by_batch):
    taken, warnings = [], []
    place = Place(Owner("pipeline", "db", "L"), 3, 1, 0, "ab")
    error = BrokerUnavailableError("away")
    lossy = LossyTransaction(
        lambda: Half(taken, fails_from, error),
        place,
        (BrokerUnavailableError,),
        warnings.append,
        by_batch=by_batch,
    )
    numbers = iter(range(100))
    for size in sizes:
        lossy.write(pa.record_batch({"n": [next(numbers) for _ in range(size + 1)]}))

    assert lossy.prepare() == ()
    count = next(numbers)
    lost = count - len(taken)
    assert taken == list(range(len(taken)))
    assert len(taken) == count or by_batch or not taken, "a task has one transaction, and one fate"
    assert len(warnings) == (lost > 0)
    assert all(f"{lost} rows of epoch 3, task 1 are lost" in warning for warning in warnings)
    assert (lost > 0) is (count > fails_from)


def test_with_none_other_errors_end_the_attempt():
    taken = []
    lossy = LossyTransaction(
        lambda: Half(taken, 0, ValueError("a bug")),
        Place(Owner("pipeline", "db", "L"), 0, 0, 0, "ab"),
        (BrokerUnavailableError,),
        pytest.fail,
        by_batch=True,
    )
    with pytest.raises(ValueError, match="a bug"):
        lossy.write(pa.record_batch({"n": [1]}))
    lossy.abort()

    assert taken == []
