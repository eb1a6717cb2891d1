"""What waits for a decision: in which order it is settled, and that nothing ends the others.

Behaviours of Flink's TwoPhaseCommitSinkFunctionTest and CommittableCollector, in our words.
"""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tallystick.epoch.two_phase import (
    LAST_TRY_S,
    Committable,
    Committer,
    Outcome,
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


def test_completing_a_checkpoint_is_the_word_for_those_before_it():
    """A notification that was skipped is made up for by the next one (subsumption)."""
    committer = Committer()
    for epoch in (3, 1, 2):
        committer.prepared(epoch, [of(epoch, "a")])

    assert committer.completed(2) == (of(1, "a"), of(2, "a"))


def test_completing_a_checkpoint_leaves_later_ones_pending():
    committer = Committer()
    committer.prepared(1, [of(1, "a")])
    committer.prepared(2, [of(2, "a")])

    for due in committer.completed(1):
        committer.settled(due)

    assert committer.pending == (of(2, "a"),)
    assert committer.completed(1) == ()


def test_a_notification_that_comes_twice_or_late_finds_nothing_more_to_do():
    committer = Committer()
    committer.prepared(2, [of(2, "a")])
    for due in committer.completed(2):
        committer.settled(due)

    assert committer.completed(2) == committer.completed(1) == committer.pending == ()


def test_what_is_not_settled_is_due_again():
    """A failure between the notification and the commit: the next one includes it."""
    committer = Committer()
    committer.prepared(1, [of(1, "b"), of(1, "a")])
    committer.settled(of(1, "a"))
    committer.prepared(2, [of(2, "a")])

    assert committer.completed(2) == (of(1, "b"), of(2, "a"))


def test_a_checkpoint_that_failed_before_its_notification_is_never_due():
    """Nothing names what it prepared: a recovery aborts it."""
    committer = Committer()
    committer.prepared(1, [of(1, "a")])
    committer.forget(1)
    committer.forget(7)
    committer.prepared(2, [of(2, "a")])

    assert committer.completed(2) == (of(2, "a"),)


def test_a_checkpoint_that_runs_again_replaces_what_its_first_attempt_prepared():
    committer = Committer()
    committer.prepared(1, [of(1, "first")])
    committer.prepared(1, [of(1, "second")])

    assert committer.completed(1) == (of(1, "second"),)


class Checkpoints(RuleBasedStateMachine):
    """Any order of checkpoints, failures, notifications and commits, beside a plain model."""

    @initialize()
    def begin(self) -> None:
        self.committer = Committer()
        self.model: set[Committable] = set()

    @rule(epoch=st.integers(0, 4), names=st.sets(st.sampled_from("abc")))
    def prepare(self, epoch: int, names: set[str]) -> None:
        self.model = {each for each in self.model if each.checkpoint_id != epoch}
        self.model |= {of(epoch, name) for name in names}
        self.committer.prepared(epoch, [of(epoch, name) for name in names])

    @rule(epoch=st.integers(0, 4))
    def fail(self, epoch: int) -> None:
        self.model = {each for each in self.model if each.checkpoint_id != epoch}
        self.committer.forget(epoch)

    @rule(epoch=st.integers(0, 5), stops_after=st.integers(0, 4))
    def complete(self, epoch: int, stops_after: int) -> None:
        due = self.committer.completed(epoch)
        assert list(due) == sorted(
            (each for each in self.model if each.checkpoint_id <= epoch),
            key=lambda each: (each.checkpoint_id, each),
        )
        for each in due[:stops_after]:
            self.committer.settled(each)
            self.model.discard(each)

    @invariant()
    def all_that_is_not_settled_is_pending(self) -> None:
        if hasattr(self, "model"):
            assert set(self.committer.pending) == self.model
            epochs = [each.checkpoint_id for each in self.committer.pending]
            assert epochs == sorted(epochs)


TestCheckpoints = Checkpoints.TestCase


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
    tried, told = [], []
    commit = answering(answers)

    def noting(committable: Committable) -> Outcome:
        tried.append(committable.name)
        return commit(committable)

    settled = commit_all([of(0, name) for name in answers], noting, told.append)

    assert tried == list(answers)
    errors = [answer for answer in answers.values() if isinstance(answer, Exception)]
    assert settled.error is (errors[0] if errors else None)
    lost = [name for name, answer in answers.items() if answer is Outcome.LOST]
    assert [each.name for each in settled.lost] == lost
    known = [name for name, answer in answers.items() if not isinstance(answer, Exception)]
    assert [each.name for each in told] == known, "an error says nothing of the outcome"


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=2), outcomes, max_size=6), st.data())
def test_the_first_error_is_the_first_in_order_whatever_runs_first(answers, data):
    tried = data.draw(st.permutations(range(len(answers))))

    def in_any_order(attempt, waiting):
        found = {index: attempt(waiting[index]) for index in tried}
        return [found[index] for index in range(len(waiting))]

    told, others = [], []
    in_order = commit_all([of(0, name) for name in answers], answering(answers), told.append)
    settled = commit_all(
        [of(0, name) for name in answers], answering(answers), others.append, in_any_order
    )

    assert (settled, others) == (in_order, told)


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
    found = to_abort(lingering, decided)
    named = {(each.sink, each.name) for each in decided}

    assert [each for each in lingering if each in found] == list(found)
    assert all((each.sink, each.name) not in named for each in found)
    assert all((each.sink, each.name) in named for each in lingering if each not in found)


def test_the_same_name_in_another_sink_is_another_transaction():
    assert to_abort([of(0, "a", "files")], [of(0, "a", "db")]) == (of(0, "a", "files"),)


def test_a_decided_one_is_kept_however_little_a_recovery_sees_of_it():
    seen = Committable("db", 0, 0, "a", 0, 0)
    decided = Committable("db", 7, 2, "a", 5, 123, "where it is")

    assert to_abort([seen], [decided]) == ()
