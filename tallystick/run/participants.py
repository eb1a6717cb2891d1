"""The `ports.Participants` of a run: the sinks that wait for the decision.

Every call is idempotent, and every committable is tried before an error is raised, as long as its
own sink has time: what one sink cannot do now must not leave another's output unseen.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby
from typing import Literal, Protocol, runtime_checkable

from tallystick.epoch.two_phase import (
    PATIENCE_S,
    Answer,
    Committable,
    DueOutput,
    Lost,
    Outcome,
    Owner,
    TwoPhaseCommitSink,
    commit_all,
    try_ends_at,
)
from tallystick.errors import OptionError, RetriableError
from tallystick.host.stopwatch import now_ms

logger = logging.getLogger(__name__)


@runtime_checkable
class KnowsNewest(Protocol):
    """A sink whose system can detect later epochs, committed by another run."""

    def check_newest(self, committable: Committable) -> None:
        """Raise if an epoch after the committable's is committed, of the same checkpoint.

        Raises:
            FencedError: a later epoch is committed.
        """
        ...


@runtime_checkable
class KnowsPrepared(Protocol):
    """A sink whose system times prepared transactions out, and can detect a lost transaction."""

    def check_prepared(self, committable: Committable) -> None:
        """Check that a prepared transaction can still be committed.

        Raises:
            EpochAbortedError: the transaction is gone.
        """
        ...


@runtime_checkable
class CommitsBeside(Protocol):
    """A sink that commits several transactions at a time, all of an epoch within one deadline.

    Any other sink is called in the thread that runs the epoch, for one transaction after the other,
    and limits the time of each call itself. When `PATIENCE_S` is over, and one has failed for now,
    the others are not tried; so it is with a sink that takes one at a time.
    """

    @property
    def commits_at_once(self) -> int:
        """The number of threads that may call `commit_by` at a time; they are not the epoch's."""
        ...

    @property
    def commit_patience_s(self) -> float:
        """The time for all commits of an epoch together; and for all aborts at a time."""
        ...

    def commit_by(self, committable: Committable, until: float) -> Outcome:
        """Do as `TwoPhaseCommitSink.commit`; wait for none after `until`, but finish what goes on.

        To give up work that takes longer would repeat it at each start. The others then have their
        turn late, each with a try of its own.

        Args:
            committable: which.
            until: a point of `time.monotonic`.
        """
        ...


@runtime_checkable
class CommitsTogether(Protocol):
    """A sink that commits all transactions of an epoch at once, with one outcome for all."""

    def commit_together(self, committables: Sequence[Committable]) -> Outcome:
        """Do as `TwoPhaseCommitSink.commit`, for all committables of the sink in one epoch."""
        ...


@runtime_checkable
class KeepsDue(Protocol):
    """A sink that publishes decided epochs later, many at a time."""

    def due_output(self) -> DueOutput:
        """Return what waits to be published; from any thread, without asking the sink's system."""
        ...


@runtime_checkable
class AbortsBy(Protocol):
    """A sink whose aborts take a deadline; other sinks limit the time of an abort themselves."""

    def abort_by(self, committable: Committable, until: float) -> None:
        """Do as `TwoPhaseCommitSink.abort`; for `until` see `CommitsBeside.commit_by`.

        Args:
            committable: which.
            until: a point of `time.monotonic`.
        """
        ...


class _Turns:
    """The time that all commits of a call, or all its aborts, share in each sink."""

    def __init__(self) -> None:
        self._all_end_at: dict[str, float] = {}
        self._failed: dict[str, str] = {}

    @contextmanager
    def turn(
        self, sink: TwoPhaseCommitSink, committable: Committable, *, always: bool = False
    ) -> Iterator[float]:
        """Run the block for one committable, and yield the deadline of the block.

        Args:
            sink: the time begins with the sink's first committable.
            committable: the transaction that the block commits or aborts.
            always: run the block even if the time is over and another one has failed.

        Raises:
            RetriableError: the time is over, and another one has failed.
        """
        uid, now = committable.sink, time.monotonic()
        patience_s = sink.commit_patience_s if isinstance(sink, CommitsBeside) else PATIENCE_S
        all_end_at = self._all_end_at.setdefault(uid, now + patience_s)
        failed = self._failed.get(uid)
        if failed is not None and now >= all_end_at and not always:
            raise RetriableError(
                f"sink {uid}: {committable.name} was not tried, since there is no time left: "
                f"{failed}"
            )
        try:
            yield try_ends_at(all_end_at, now)
        except RetriableError as error:
            self._failed.setdefault(uid, str(error))
            raise


ABORTED: Literal["aborted"] = "aborted"
Result = Answer | Literal["aborted"]
"""The outcome of one try to commit or abort; an exception: it is open, and tried again."""
Note = Callable[[Committable, Result], None]
OnLingering = Callable[[tuple[Committable, ...]], None]


class OpenSinks:
    """The sinks of one run, by uid.

    Args:
        sinks: the opened sinks.
        owners: of the transactions of each sink.
        now_ms: the wall clock.
        note: called with the result of each commit and abort, from any thread.
        on_lingering: called with all lingering transactions, at each look for them.
    """

    def __init__(
        self,
        sinks: Mapping[str, TwoPhaseCommitSink],
        owners: Mapping[str, Owner],
        now_ms: Callable[[], int] = now_ms,
        note: Note = lambda *_: None,
        on_lingering: OnLingering = lambda _: None,
    ) -> None:
        assert sinks.keys() == owners.keys(), "each sink has its owner"
        self._sinks = sinks
        self._owners = owners
        self._now_ms = now_ms
        self._note = note
        self._on_lingering = on_lingering
        self._turns = _Turns()  # of the commits, or aborts, under way

    def commit(self, committables: tuple[Committable, ...]) -> tuple[Lost, ...]:
        """See `ports.Participants.commit`.

        Raises:
            OptionError: a sink is no longer in the pipeline; the others are committed.
        """
        in_order = sorted(
            committables, key=lambda committable: (committable.checkpoint_id, committable)
        )
        self._turns = _Turns()
        settled = commit_all(in_order, self._commit_one, self._beside)
        if settled.error is not None:
            raise settled.error
        return tuple(
            Lost(committable, self._sinks[committable.sink].describe(committable))
            for committable in settled.lost
        )

    def check_prepared(self, committables: tuple[Committable, ...]) -> None:
        """See `ports.Participants.check_prepared`."""
        for committable in committables:
            sink = self._sinks[committable.sink]
            if isinstance(sink, KnowsPrepared):
                sink.check_prepared(committable)

    def lingering(self) -> tuple[Committable, ...]:
        """See `ports.Participants.lingering`."""
        lingering = tuple(
            committable
            for uid, sink in self._sinks.items()
            for committable in sink.lingering(self._owners[uid])
        )
        self._on_lingering(lingering)
        return lingering

    def abort(self, committables: tuple[Committable, ...]) -> None:
        """See `ports.Participants.abort`."""
        self._turns = _Turns()
        first: Exception | None = None
        for committable in committables:
            try:
                self._abort_one(committable)
            except Exception as error:
                self._note(committable, error)
                first = first or error
            else:
                self._note(committable, ABORTED)
        if first is not None:
            raise first

    def check_newest(self, settled: tuple[Committable, ...]) -> None:
        """See `ports.Participants.check_newest`; of sinks that are still in the pipeline."""
        for committable in settled:
            sink: object = self._sinks.get(committable.sink)
            if isinstance(sink, KnowsNewest):
                sink.check_newest(committable)

    def close(self) -> None:
        """Close every sink's connections, and raise the first error only after the last sink."""
        first: Exception | None = None
        for sink in self._sinks.values():
            try:
                sink.close()
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def _beside(
        self, attempt: Callable[[Committable], Answer], committables: Sequence[Committable]
    ) -> list[Answer]:
        """Run attempts epoch after epoch; within an epoch, beside each other if the sinks allow."""
        return [
            answer
            for _, epoch in groupby(committables, lambda committable: committable.checkpoint_id)
            for answer in self._beside_in_epoch(attempt, tuple(epoch))
        ]

    def _beside_in_epoch(
        self, attempt: Callable[[Committable], Answer], committables: Sequence[Committable]
    ) -> list[Answer]:
        if len(committables) == 1 and not self._is_together(committables[0].sink):
            return [attempt(committables[0])]
        pools: dict[str, ThreadPoolExecutor] = {}
        by_sink = defaultdict[str, list[Committable]](list)
        for committable in committables:
            by_sink[committable.sink].append(committable)
        under_way: dict[Committable, Future[Answer]] = {}
        answers: dict[Committable, Answer] = {}
        try:
            for uid, of_sink in by_sink.items():
                sink: object = self._sinks.get(uid)
                if isinstance(sink, CommitsTogether):
                    answer = self._commit_together(sink, of_sink)
                    answers |= dict.fromkeys(of_sink, answer)
                elif isinstance(sink, CommitsBeside):
                    pools[uid] = ThreadPoolExecutor(min(len(of_sink), sink.commits_at_once))
                    under_way |= {
                        committable: pools[uid].submit(attempt, committable)
                        for committable in of_sink
                    }
            for committable in committables:
                if committable not in under_way and committable not in answers:
                    answers[committable] = attempt(committable)
            answers |= {committable: future.result() for committable, future in under_way.items()}
        finally:
            for pool in pools.values():
                pool.shutdown(cancel_futures=True)
        return [answers[committable] for committable in committables]

    def _is_together(self, uid: str) -> bool:
        sink: object = self._sinks.get(uid)
        return isinstance(sink, CommitsTogether)

    def _commit_together(
        self, sink: CommitsTogether, committables: Sequence[Committable]
    ) -> Answer:
        answer: Answer
        try:
            answer = sink.commit_together(committables)
        except Exception as error:
            answer = error
        for committable in committables:
            self._note(committable, answer)
        return answer

    def _commit_one(self, committable: Committable) -> Outcome:
        try:
            outcome = self._try_commit(committable)
        except Exception as error:
            self._note(committable, error)
            raise
        self._note(committable, outcome)
        return outcome

    def _try_commit(self, committable: Committable) -> Outcome:
        sink = self._sinks.get(committable.sink)
        if sink is None:
            raise OptionError(
                f"epoch {committable.checkpoint_id} was decided with a transaction of sink "
                f"{committable.sink!r} ({committable.name}), which the pipeline does not have any "
                f"more (it has {', '.join(self._sinks) or 'none'}). It is prepared and has to be "
                f"committed. Add the sink again, with this uid, for one start."
            )
        self._warn_of_timeout(sink, committable)
        if not isinstance(sink, CommitsBeside):
            with self._turns.turn(sink, committable):
                return sink.commit(committable)
        # Of several at a time one may hang while the others' systems are well.
        with self._turns.turn(sink, committable, always=sink.commits_at_once > 1) as until:
            return sink.commit_by(committable, until)

    def _abort_one(self, committable: Committable) -> None:
        sink = self._sinks[committable.sink]
        with self._turns.turn(sink, committable) as until:
            logger.info("aborting what no completed checkpoint names: %s", committable.name)
            if isinstance(sink, AbortsBy):
                sink.abort_by(committable, until)
            else:
                sink.abort(committable)

    def _warn_of_timeout(self, sink: TwoPhaseCommitSink, committable: Committable) -> None:
        """Warn like Flink's enableTransactionTimeoutWarnings."""
        timeout = sink.timeout
        if timeout is None or not committable.begun_ms:
            return
        name = (
            f"sink {committable.sink}: transaction {committable.name} of epoch "
            f"{committable.checkpoint_id}"
        )
        if warning := timeout.warning(name, self._now_ms() - committable.begun_ms):
            logger.warning(warning)
