"""The sinks of a run: all are tried, gone ones are named, timeouts are told of in time."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.epoch.two_phase import (
    LAST_TRY_S,
    Committable,
    Lost,
    Outcome,
    Owner,
    RunFacts,
    Timeout,
    TransactionPlan,
)
from tallystick.errors import (
    BrokerUnavailableError,
    EpochAbortedError,
    FencedError,
    OptionError,
)
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.output import KafkaOutput
from tallystick.kafka.task_sink import KafkaTaskSink
from tallystick.pipeline.listeners import OpenTransactions
from tallystick.run import participants
from tallystick.run.participants import OpenSinks

TIMEOUT_MS = 60_000
NOW_MS = 1_000_000
LOGGER = "tallystick.run.participants"


@dataclass
class Noting:
    """A sink that notes what it is asked for."""

    timeout: Timeout | None = None
    outcome: Outcome = Outcome.COMMITTED
    error: Exception | None = None
    remaining: tuple[Committable, ...] = ()
    calls: list[tuple[str, str]] = field(default_factory=list)
    owners: list[Owner] = field(default_factory=list)

    def plan(self) -> TransactionPlan:
        raise NotImplementedError

    def commit(self, committable: Committable) -> Outcome:
        self._note("commit", committable.name)
        return self.outcome

    def abort(self, committable: Committable) -> None:
        self._note("abort", committable.name)

    def lingering(self, owner: Owner) -> Iterable[Committable]:
        self.owners.append(owner)
        return iter(self.remaining)

    def describe(self, committable: Committable) -> str:
        return f"transaction {committable.name} of 5 rows"

    def close(self) -> None:
        self._note("close", "")

    def _note(self, what: str, name: str) -> None:
        self.calls.append((what, name))
        if self.error is not None:
            raise self.error


def of(sink: str, name: str, epoch: int = 0, begun_ms: int = 0) -> Committable:
    return Committable(sink, epoch, 0, name, 5, begun_ms)


def test_what_is_found_is_reported_with_each_look_and_each_result_after_it():
    remaining = (of("a", "one"), of("a", "two"))
    a, b = (
        Noting(remaining=remaining),
        Noting(remaining=(of("b", "three"),), error=OSError("no way")),
    )
    open_now = OpenTransactions()
    owners = {uid: Owner("pipeline", uid, "lineage") for uid in "ab"}
    sinks = OpenSinks(
        {"a": a, "b": b}, owners, note=open_now.note, on_lingering=open_now.replace_all
    )

    open_now.prepared([of("a", "gone by itself")])
    lingering = sinks.lingering()
    assert open_now.begun_ms() == {"a": [0, 0], "b": [0]}
    with pytest.raises(OSError, match="no way"):
        sinks.abort(lingering)
    assert open_now.begun_ms() == {"b": [0]}, "what could not be aborted is still open"
    b.error = None
    sinks.commit((of("b", "three"),))
    assert open_now.begun_ms() == {}


def opened(**sinks: Noting) -> OpenSinks:
    owners = {uid: Owner("pipeline", uid, "lineage") for uid in sinks}
    return OpenSinks(sinks, owners, lambda: NOW_MS)


def test_what_one_sink_cannot_do_now_leaves_no_other_ones_output_unseen():
    away, well = Noting(error=BrokerUnavailableError("away")), Noting()
    sinks = opened(away=away, well=well)

    with pytest.raises(BrokerUnavailableError, match="away"):
        sinks.commit((of("away", "a"), of("away", "b"), of("well", "c")))

    assert away.calls == [("commit", "a"), ("commit", "b")]
    assert well.calls == [("commit", "c")]


@dataclass
class Beside(Noting):
    """A sink that takes several commits at a time, each of which waits for so many others."""

    at_once: int = 4
    patience_s: float = 60.0
    meeting: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))
    untils: list[float] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    @property
    def commits_at_once(self) -> int:
        return self.at_once

    @property
    def commit_patience_s(self) -> float:
        return self.patience_s

    def commit_by(self, committable: Committable, until: float) -> Outcome:
        self.untils.append(until)
        self.threads.add(threading.get_ident())
        self.meeting.wait(30)
        return self.commit(committable)


class InOneThread(Noting):
    """A sink that says nothing of threads."""

    def commit(self, committable: Committable) -> Outcome:
        assert threading.current_thread() is threading.main_thread()
        return super().commit(committable)


def test_commits_run_beside_each_other_where_a_sink_allows_it():
    """The others' are called as ever: in this thread, in order, while those are under way."""
    meeting = threading.Barrier(5)

    class Meets(InOneThread):
        def commit(self, committable: Committable) -> Outcome:
            if committable.name == "b":
                meeting.wait(30)
            return super().commit(committable)

    beside, plain = Beside(meeting=meeting, error=BrokerUnavailableError("away")), Meets()
    sinks = opened(beside=beside, plain=plain)
    many = [of("beside", name) for name in "1234"]
    before = threading.active_count()

    with pytest.raises(BrokerUnavailableError, match="away"):
        sinks.commit((*many, of("plain", "a"), of("plain", "b"), of("plain", "c")))

    assert sorted(beside.calls) == [("commit", name) for name in "1234"]
    assert plain.calls == [("commit", name) for name in "abc"]
    assert len(beside.threads) == 4
    assert threading.active_count() == before


def test_no_more_commits_run_at_once_than_a_sink_says_and_all_have_one_deadline():
    sink = Beside(at_once=2, meeting=threading.Barrier(2))
    began = time.monotonic()

    assert opened(db=sink).commit(tuple(of("db", name) for name in "abcdefgh")) == ()

    assert len(sink.threads) <= 2
    assert len(set(sink.untils)) == 1, "none began to count when it had its turn"
    assert 0 <= sink.untils[0] - began - sink.patience_s < 30
    late = Beside(patience_s=0.0)
    opened(db=late).commit(tuple(of("db", name) for name in "abc"))
    assert all(until >= began + LAST_TRY_S for until in late.untils)


def test_an_older_epoch_is_over_before_a_newer_one_is_committed():
    sink = Beside(at_once=8)

    opened(db=sink).commit(tuple(of("db", f"{n}", epoch=2 - n % 2) for n in range(8)))

    assert {name for _, name in sink.calls[:4]} == {"1", "3", "5", "7"}


def test_the_older_epoch_is_committed_first():
    sink = Noting()

    opened(db=sink).commit((of("db", "a", epoch=2), of("db", "b", epoch=1)))

    assert sink.calls == [("commit", "b"), ("commit", "a")]


@given(st.permutations(range(6)))
def test_commits_go_by_epoch_and_then_in_one_order(order):
    """A manifest that was read again commits as the one that was written."""
    expected = [of("db", f"{n % 3}", epoch=n // 3) for n in range(6)]
    sink = Noting()

    opened(db=sink).commit(tuple(expected[n] for n in order))

    assert sink.calls == [("commit", committable.name) for committable in expected]


def test_nothing_to_commit_is_no_work():
    assert opened(db=Noting(error=ValueError("asked"))).commit(()) == ()


def test_what_is_lost_is_described_as_its_sink_knows_it():
    lost = of("db", "a")

    assert opened(db=Noting(outcome=Outcome.LOST)).commit((lost,)) == (
        Lost(lost, "transaction a of 5 rows"),
    )


def test_lost_counts_only_when_it_is_proved():
    """An error on commit, also in a recovery, is no proof: the outcome is asked for again.

    Flink's ignoreFailuresAfterTransactionTimeout takes the error for the proof.
    """
    sinks = opened(db=Noting(error=BrokerUnavailableError("no such transaction, perhaps")))

    with pytest.raises(BrokerUnavailableError):
        sinks.commit((of("db", "a", begun_ms=1),))


def test_a_sink_that_is_gone_is_named_and_the_others_are_committed():
    sink = Noting()

    with pytest.raises(OptionError) as raised:
        opened(db=sink).commit((of("before", "a", epoch=7), of("db", "b", epoch=7)))

    for part in ("epoch 7", "'before'", "(a)", "it has db", "Add the sink again"):
        assert part in str(raised.value)
    assert sink.calls == [("commit", "b")]


def test_each_sink_is_asked_what_lingers_of_its_own():
    one, other = (
        Noting(remaining=(of("one", "a"),)),
        Noting(remaining=(of("other", "b"), of("other", "c"))),
    )

    assert opened(one=one, other=other).lingering() == (*one.remaining, *other.remaining)
    assert one.owners == [Owner("pipeline", "one", "lineage")]
    assert other.owners == [Owner("pipeline", "other", "lineage")]


def test_all_are_aborted_before_the_first_error_is_told():
    away, well = Noting(error=BrokerUnavailableError("away")), Noting()

    with pytest.raises(BrokerUnavailableError, match="away"):
        opened(away=away, well=well).abort((of("away", "a"), of("well", "b")))

    assert well.calls == [("abort", "b")]


@dataclass
class Slow(Noting):
    """A sink that takes its time, and fails for now or not at all."""

    def _note(self, what: str, name: str) -> None:
        time.sleep(0.05)
        super()._note(what, name)


@dataclass
class SlowBeside(Beside):
    """The same, of a sink that can be given an end."""

    def commit(self, committable: Committable) -> Outcome:
        time.sleep(0.05)
        return super().commit(committable)

    def abort_by(self, committable: Committable, until: float) -> None:
        self.untils.append(until)
        time.sleep(0.05)
        self.abort(committable)


@pytest.mark.parametrize("act", ["commit", "abort"])
@pytest.mark.parametrize("make", [Slow, lambda: SlowBeside(at_once=1, patience_s=0.2)])
def test_what_all_fails_in_turn_shares_one_deadline(monkeypatch, act, make):
    """Two hundred tasks' transactions, one after the other, hold nothing up for hours."""
    monkeypatch.setattr(participants, "PATIENCE_S", 0.2)
    sink, other = make(), Noting()
    sinks = opened(db=sink, other=other)
    many = tuple(of("db", f"{number:02}") for number in range(40))
    sink.error = BrokerUnavailableError("away")

    with pytest.raises(BrokerUnavailableError, match="away"):
        getattr(sinks, act)((*many, of("other", "x")))
    assert 2 <= len(sink.calls) <= 5
    assert other.calls == [(act, "x")]

    sink.error = None
    sink.calls.clear()
    getattr(sinks, act)(many)
    assert sink.calls == [(act, committable.name) for committable in many], (
        "what goes on has all the time"
    )


def test_all_aborts_are_given_one_end():
    sink = SlowBeside(patience_s=60)

    opened(db=sink).abort((of("db", "a"), of("db", "b")))

    assert sink.calls == [("abort", "a"), ("abort", "b")]
    assert len(set(sink.untils)) == 1


def test_all_are_closed_before_the_first_error_is_told():
    away, well = Noting(error=BrokerUnavailableError("away")), Noting()

    with pytest.raises(BrokerUnavailableError, match="away"):
        opened(away=away, well=well).close()

    assert well.calls == [("close", "")]


@pytest.mark.parametrize(
    ("age_ms", "share", "is_warned"),
    [(47_999, 0.8, False), (48_000, 0.8, True), (90_000, 0.8, True), (30_000, 0.5, True)],
)
def test_a_commit_that_comes_close_to_the_timeout_is_warned_about(caplog, age_ms, share, is_warned):
    """With the numbers; in a recovery the same call, with an older transaction."""
    sinks = opened(db=Noting(timeout=Timeout(TIMEOUT_MS, share)))

    with caplog.at_level(logging.WARNING, LOGGER):
        sinks.commit((of("db", "a", epoch=3, begun_ms=NOW_MS - age_ms),))

    assert bool(caplog.records) is is_warned
    if is_warned:
        for part in ("sink db", "transaction a", "epoch 3", f"{age_ms} ms", f"{TIMEOUT_MS} ms"):
            assert part in caplog.text
        assert f"{100 * age_ms // TIMEOUT_MS} %" in caplog.text


@pytest.mark.parametrize(("timeout", "begun_ms"), [(None, 1), (Timeout(TIMEOUT_MS), 0)])
def test_what_never_times_out_or_has_no_known_age_is_not_warned_about(caplog, timeout, begun_ms):
    with caplog.at_level(logging.WARNING, LOGGER):
        opened(db=Noting(timeout=timeout)).commit((of("db", "a", begun_ms=begun_ms),))

    assert caplog.records == []


class Knowing(Noting):
    """A sink whose system can tell what is gone and what is newer."""

    def check_newest(self, committable: Committable) -> None:
        self._note("newest", committable.name)

    def check_prepared(self, committable: Committable) -> None:
        self._note("prepared", committable.name)


def test_whoever_can_tell_is_asked_what_is_gone_and_what_is_newer():
    """A sink that was taken out is not asked what is newer: what was settled in it is over."""
    knowing, other = Knowing(), Noting()
    sinks = opened(knowing=knowing, other=other)
    prepared = of("other", "a"), of("knowing", "b"), of("knowing", "c")

    sinks.check_prepared(prepared)
    sinks.check_newest((*prepared, of("taken out", "d")))

    assert knowing.calls == [("prepared", "b"), ("prepared", "c"), ("newest", "b"), ("newest", "c")]
    assert other.calls == []


def test_what_is_gone_or_newer_ends_the_check():
    for error in (EpochAbortedError("it timed out"), FencedError("another run has gone on")):
        sinks = opened(knowing=Knowing(error=error))
        for check in (sinks.check_prepared, sinks.check_newest):
            with pytest.raises(type(error), match=str(error)):
                check((of("knowing", "a"),))


def test_kafka_is_asked_all_that_it_can_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names of its methods: one with another name would be passed over."""
    calls: list[tuple[str, str]] = []
    two_at_once = threading.Barrier(2, timeout=10)

    def answer(name: str, act: Callable[[], Outcome | None]) -> None:
        def method(self: Any, committable: Committable, until: float = 0.0) -> Outcome | None:
            calls.append((name, committable.name))
            return act()

        monkeypatch.setattr(KafkaTaskSink, name, method)

    def meet() -> Outcome:
        two_at_once.wait()
        return Outcome.COMMITTED

    answer("commit_by", meet)
    for name in ("abort_by", "check_prepared", "check_newest"):
        answer(name, lambda: None)
    monkeypatch.setattr(KafkaTaskSink, "_check", lambda *_: None)
    config = KafkaConfig("nobody:9092", delivery_timeout_ms=70_000)
    output = KafkaOutput(config, "out", "out", compression="none", transaction_timeout_ms=90_000)
    owner = Owner("pipeline", "kafka", "lineage")
    sink = KafkaTaskSink(output, owner, RunFacts(), id_prefix="tallystick-pipeline")
    sinks = OpenSinks({"kafka": sink}, {"kafka": owner})
    one, other = of("kafka", "one"), of("kafka", "other")

    sinks.check_prepared((one,))
    sinks.check_newest((one,))
    assert calls == [("check_prepared", "one"), ("check_newest", "one")]
    assert sinks.commit((one, other)) == ()
    assert sorted(calls[2:]) == [("commit_by", "one"), ("commit_by", "other")]
    sinks.abort((other,))
    assert calls[4:] == [("abort_by", "other")]
    assert sink.commit_patience_s == 70
    sink.close()


@dataclass
class Together(Noting):
    """A sink that commits an epoch as a whole."""

    def commit_together(self, committables: Sequence[Committable]) -> Outcome:
        self._note("together", " ".join(committable.name for committable in committables))
        return self.outcome


def test_a_sink_that_commits_epochs_as_a_whole_gets_each_epoch_once():
    """One outcome, or error, is that of all; other sinks have theirs one by one."""
    table, other = Together(), Noting()
    sinks = opened(table=table, other=other)
    of_two = (of("table", "b", 2), of("table", "a", 2), of("other", "x", 2), of("table", "c", 1))

    assert sinks.commit(of_two) == ()
    assert table.calls == [("together", "c"), ("together", "a b")]
    assert other.calls == [("commit", "x")]

    table.outcome = Outcome.LOST
    assert [lost.committable.name for lost in sinks.commit(of_two)] == ["c", "a", "b"]
    table.error = BrokerUnavailableError("away")
    with pytest.raises(BrokerUnavailableError, match="away"):
        sinks.commit(of_two)
    assert other.calls == [("commit", "x")] * 3
