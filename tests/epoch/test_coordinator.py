"""Every order of events that can happen, up to the end of the second epoch."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from tallystick.epoch import protocol as c
from tallystick.epoch.coordinator import ATTEMPTS_MAX, RECOVER_EVERY, Coordinator
from tallystick.epoch.facts import Base, CommittedEpoch, Request
from tallystick.epoch.manifest import CHECKPOINT, KAFKA, Identity, Manifest, Origin
from tallystick.epoch.phases import (
    NEXT_PHASES,
    CompletedPhase,
    ConfirmingPhase,
    Phase,
    ReadyPhase,
    StoppingPhase,
)
from tallystick.epoch.tokens import Token
from tallystick.epoch.two_phase import Committable, Lost
from tallystick.errors import (
    BrokerUnavailableError,
    DataLossError,
    EpochAbortedError,
    FencedError,
    OtherOffsetsError,
)
from tallystick.state.catalog import StepState
from tallystick.values import ProducedRange, Producer, TopicPartition

OURS = Identity("pipeline", "ours", "s3://checkpoint")
OWNER = Producer("t", 7, 1)
NEWER = Producer("t", 7, 2)
WRITTEN = (ProducedRange("out", 0, 3, 10, 12),)
OUT = TopicPartition("out", 0)
ERRORS = (
    BrokerUnavailableError("away"),
    EpochAbortedError("lost"),
    FencedError("replaced"),
    DataLossError("gone"),
    ValueError("the user's function"),
)
ORIGIN = Origin("pipeline", "savepoint's", "s3://older", "its manifest", "s3://savepoint")
EPOCHS = 2


def request(epoch: int) -> Request:
    return Request(epoch, (f"ends of {epoch}",), may_skip=True)


TWO = tuple(Committable("db", 0, task, f"prepared by {task}", 5, 0) for task in range(2))
LOST = tuple(Lost(committable, f"db: {committable.name}") for committable in TWO)


@dataclass(frozen=True)
class Kind:
    """Whose coordinator it is: a pipeline's with other sinks or without, and who decides."""

    decided_by: str = KAFKA
    has_participants: bool = False
    accepted: frozenset[str] = frozenset()
    has_loop: bool = False
    only_recovers: bool = False

    def new(self) -> Coordinator:
        identity = replace(OURS, accepted=self.accepted)
        return Coordinator(identity, self.decided_by, has_participants=self.has_participants)


PLAIN = Kind()
WORDS = frozenset(f"lost-output-of-epoch-{epoch}" for epoch in range(EPOCHS + 1))
KINDS = (
    PLAIN,
    Kind(KAFKA, True),
    Kind(CHECKPOINT, True),
    Kind(CHECKPOINT, True, WORDS),
    Kind(CHECKPOINT, False),
    Kind(has_loop=True),
    Kind(CHECKPOINT, True, has_loop=True),
)
RECOVERIES = (
    Kind(has_loop=True, only_recovers=True),
    Kind(KAFKA, True, has_loop=True, only_recovers=True),
    Kind(CHECKPOINT, True, has_loop=True, only_recovers=True),
)


def token_of(
    epoch: int, sources: tuple[str, ...] | None = None, kind: Kind = PLAIN
) -> CommittedEpoch:
    """Kafka holds the token of this epoch, -1 being the first one of a lineage."""
    if epoch < 0:
        return CommittedEpoch(Token(epoch, "ours", "s3://checkpoint", ""), None, False)
    before = manifest_of(epoch - 1, kind=kind) if epoch else None
    token = Token(epoch, "ours", "s3://checkpoint", f"path of {epoch}")
    return CommittedEpoch(token, manifest_of(epoch, sources, kind), True, before=before)


def manifest_of(epoch: int, sources: tuple[str, ...] | None = None, kind: Kind = PLAIN) -> Manifest:
    """With a state that tells which epoch it is of."""
    state = (StepState(f"step of {epoch}", 128, 1, "[]", 1),)
    ends = sources or request(epoch).sources
    return Manifest(
        epoch,
        "pipeline",
        "ours",
        ends,
        (),
        OWNER,
        state,
        committables=() if kind == PLAIN else TWO,
        decided_by=kind.decided_by,
        base_path=f"path of {epoch - 1}" if epoch else "",
    )


def answers(  # noqa: PLR0912 - one case per action
    action: c.Action, wanted: int, before: c.Event, kind: Kind
) -> Iterator[c.Event]:
    """Everything that the world may answer to an action."""
    match action:
        case c.FenceProducer():
            yield c.ProducerFenced(OWNER)
        case c.ReadCommitted():
            if isinstance(before, c.TransactionCommitted):  # the first token, just now
                yield c.CommittedRead(token_of(wanted - 1, kind=kind))
            else:
                yield from map(c.CommittedRead, possible_tokens(wanted, kind))
        case c.PlanEpoch(epoch, start, _):
            for looks_through in {False, kind.has_participants}:
                yield c.EpochPlanned(None, start or ("the beginning",), looks_through)
            yield c.EpochPlanned(request(epoch).sources, start or ("the beginning",))
        case c.RunEpoch() | c.EndEpoch() if kind.only_recovers:
            return  # the driver ends here
        case c.RunEpoch():
            yield from (c.EpochRan(()), c.EpochRan(WRITTEN))
            if kind.has_participants:
                yield c.EpochRan((), committables=TWO)
        case c.WriteManifest():
            yield c.ManifestWritten("path")
        case c.CountOutput(_, produced):
            reported = {written.topic_partition: written.last_sequence for written in produced}
            events = (None, reported, {}, {OUT: 3}, {TopicPartition("out", 1): 0})
            yield from map(c.OutputCounted, events)
        case c.CommitTransaction():
            yield c.TransactionCommitted(OWNER)
        case c.ConfirmOutput():
            yield from (c.OutputConfirmed({}), c.OutputConfirmed({OUT: 1}))
        case c.RecoverParticipants(_, decided):
            lost = LOST if decided else ()
            for some in {(), lost[:1], lost}:
                yield c.ParticipantsRecovered(some, NEWER)
        case c.CommitParticipants():
            yield from (c.OutputSettled(()), c.OutputSettled(LOST[:1]), c.OutputSettled(LOST))
        case c.AbortTransaction():
            yield c.TransactionAborted()
        case c.EndEpoch() if kind.has_loop:
            if wanted < EPOCHS:
                yield c.EpochWanted()
        case c.EndEpoch():
            for epoch in (wanted + 1, wanted + 2):
                if epoch <= EPOCHS:
                    yield c.EpochRequested(request(epoch), request(wanted).sources)
            if wanted == 0 and kind in KINDS[:2]:
                yield c.EpochRequested(request(1), ("replaced in the caller's log",))
            if wanted == 0 and kind == KINDS[1]:
                yield c.EpochRequested(request(RECOVER_EVERY))  # those in between were left out
    if not isinstance(action, c.EndEpoch | c.Stop):
        yield from map(c.ActionFailed, ERRORS if kind == PLAIN else ERRORS[::2])


def possible_tokens(wanted: int, kind: Kind) -> Iterator[CommittedEpoch]:
    yield CommittedEpoch(None, None, manifest_exists=False)
    yield CommittedEpoch(None, None, manifest_exists=True)
    yield from (token_of(epoch, kind=kind) for epoch in range(-1, EPOCHS + 1))
    yield replace(token_of(wanted, kind=kind), before=None)
    yield token_of(wanted, ("other ends",), kind)
    if wanted == 1:
        yield replace(token_of(1, kind=kind), is_partial=True)
        yield replace(token_of(0, kind=kind), logged=("other ends",))
        yield replace(token_of(0, kind=kind), has_failed=True)
    if wanted > 1:
        yield replace(token_of(0, kind=kind), begun=(1,))
        yield replace(token_of(0, kind=kind), begun=(2,))
        yield replace(token_of(0, kind=kind), is_settled=True)
        yield replace(token_of(0, kind=kind), is_set_back=True)
        yield replace(token_of(0, kind=kind), begun=(1,), has_failed=True)
    yield CommittedEpoch(token_of(wanted).token, None, manifest_exists=True)
    yield CommittedEpoch(Token(wanted, "theirs", "s3://other", "path"), None, manifest_exists=False)
    if wanted > 0:
        seed = Base("seed", replace(manifest_of(wanted - 1), origin=ORIGIN))
        for path in (ORIGIN.manifest_path, "a later one"):
            token = Token(wanted - 1, ORIGIN.lineage, ORIGIN.checkpoint, path)
            yield CommittedEpoch(token, None, False, True, (seed,))


Step = tuple[Coordinator, c.Action, c.Event, c.Action]


def request_of(state: Coordinator) -> Request | None:
    """Return the request of the epoch in flight, or of the one that was done last."""
    goal = getattr(state._state, "goal", state._state)
    return getattr(goal, "request", None)


def comparable(value: object) -> object:
    """Return what is equal for equal values; errors are only the same."""
    outcome = value.error if isinstance(value, c.Stop | StoppingPhase) else value
    return repr(outcome) if isinstance(outcome, Exception) else value


def explore(kind: Kind) -> list[Step]:
    """Each reachable (state, last action) once, with every answer to it and what follows."""
    waiting, seen, steps = [], set(), []
    # A restored checkpoint begins after its savepoint.
    wanted = [c.EpochRequested(request(epoch)) for epoch in (0, 1)]
    if kind.has_loop:
        wanted = [c.RecoveryWanted() if kind.only_recovers else c.EpochWanted()]
    for event in wanted:
        first = kind.new()
        waiting.append((first, first.step(event), event))
    while waiting:
        state, action, before = waiting.pop()
        request_wanted = request_of(state)
        epoch_wanted = request_wanted.checkpoint_id if request_wanted else EPOCHS
        for event in answers(action, epoch_wanted, before, kind):
            following = copy.copy(state)
            order = following.step(event)
            steps.append((state, action, event, order))
            after_commit = isinstance(event, c.TransactionCommitted)
            key = (*map(comparable, (*vars(following).values(), order)), after_commit)
            if key not in seen:
                seen.add(key)
                waiting.append((following, order, event))
    return steps


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    """No answer leads off the table (`_become` asserts it), and there is an end to them all."""
    return [step for kind in KINDS if not kind.has_loop for step in explore(kind)]


@pytest.fixture(scope="module")
def loop_steps() -> list[Step]:
    """The same where a loop of our own plans the epochs."""
    return [step for kind in KINDS if kind.has_loop for step in explore(kind)]


@pytest.fixture(scope="module")
def recovery_steps() -> list[Step]:
    """The same where nothing but what earlier runs left is settled."""
    return [step for kind in RECOVERIES for step in explore(kind)]


@pytest.fixture(scope="module")
def all_steps(steps, loop_steps, recovery_steps) -> list[Step]:
    return steps + loop_steps + recovery_steps


def test_every_phase_is_reached(all_steps):
    assert {state.phase for state, *_ in all_steps} | {Phase.STOPPED} == set(Phase) - {Phase.IDLE}


def test_every_way_on_in_the_table_is_taken(all_steps):
    """A phase change that nothing takes would be one that nobody has thought through."""
    taken = {Phase.IDLE: {Phase.FENCING}}
    for state, _, event, _ in all_steps:
        following = copy.copy(state)
        following.step(event)
        taken.setdefault(state.phase, set()).add(following.phase)
    unused = {
        (one, other)
        for one, others in NEXT_PHASES.items()
        for other in others - taken.get(one, set())
    }

    assert unused == set(), unused


def test_after_an_unanswered_commit_it_fences_as_the_owner_or_stops(all_steps):
    """Never an abort, never another try of the commit, never a take-over."""
    for _, action, event, order in all_steps:
        if isinstance(action, c.CommitTransaction) and isinstance(event, c.ActionFailed):
            assert isinstance(order, c.Stop) or order == c.FenceProducer(action.producer)


def test_only_a_run_that_never_owned_the_pipeline_takes_it_over(all_steps):
    for state, _, _, order in all_steps:
        if isinstance(order, c.FenceProducer) and order.current is None:
            assert state._owner is None


def test_rows_are_committed_after_a_durable_manifest_and_a_matching_count(steps):
    for state, action, event, order in steps:
        if isinstance(order, c.CommitTransaction):
            assert order.opens == isinstance(event, c.CommittedRead)  # with a token, and no rows
        if isinstance(order, c.CommitTransaction) and not order.opens:
            assert isinstance(action, c.CountOutput)
            assert action.token == order.token
            assert action.sources == state._state.manifest.sources
            assert isinstance(event, c.OutputCounted)
            assert isinstance(state._state, CompletedPhase)
            assert action.committables == state._state.manifest.committables
            counted = {w.topic_partition: w.last_sequence for w in action.produced}
            assert event.last_sequences in (None, counted)


def test_an_epoch_runs_only_after_the_question_what_is_committed(all_steps):
    for state, _, event, order in all_steps:
        if isinstance(order, c.RunEpoch):
            behind_failure = isinstance(event, c.OutputConfirmed) and state._known.has_failed
            known = c.CommittedRead | c.EpochRequested | c.EpochPlanned | c.ParticipantsRecovered
            assert behind_failure or isinstance(event, known)


def test_an_epoch_goes_on_from_the_state_of_the_epoch_before(all_steps):
    """Of the manifest that Kafka's token names, and of no other."""
    orders = [
        (order, event.committed if isinstance(event, c.CommittedRead) else state._known)
        for state, _, event, order in all_steps
        if isinstance(order, c.RunEpoch)
    ]
    for order, known in orders:
        newest = known.token.checkpoint_id  # before it others may have been left out
        base = min(newest, order.checkpoint_id - 1)
        assert [step.uid for step in order.state] in ([], [f"step of {base}"])
    assert any(order.state for order, _ in orders)


def test_a_lineage_begins_with_a_token_that_names_its_seed_and_with_no_rows(steps):
    named = set()
    for _, action, event, order in steps:
        if isinstance(order, c.CommitTransaction) and isinstance(event, c.CommittedRead):
            base = event.committed.seed
            assert order.token.manifest_path == ("" if base is None else base.path)
            assert order.opens
            assert isinstance(action, c.ReadCommitted)
            named.add(order.token.manifest_path)
    assert named == {"", "seed"}


def test_the_error_that_stops_a_run_is_the_first_one(all_steps):
    """What goes wrong while giving up does not hide why."""
    for state, _, event, order in all_steps:
        if isinstance(state._state, StoppingPhase):
            assert order == c.Stop(state._state.error)
        elif isinstance(order, c.Stop) and isinstance(event, c.ActionFailed):
            assert order.error is event.error


# A loop of our own.


def test_an_epoch_is_planned_behind_the_question_and_begins_where_the_one_before_ended(loop_steps):
    planned = 0
    for state, _, event, order in loop_steps:
        if isinstance(order, c.PlanEpoch):
            assert isinstance(event, c.CommittedRead | c.EpochWanted | c.OutputConfirmed)
            known = event.committed if isinstance(event, c.CommittedRead) else state._known
            manifest = known.manifest or (known.bases[0].manifest if known.bases else None)
            assert order.start == (() if manifest is None else manifest.sources)
            ours = known.token if known.token and known.token.lineage == "ours" else None
            newest = ours or manifest  # a token without a manifest: opened, and no epoch yet
            assert order.checkpoint_id == (1 if newest is None else newest.checkpoint_id + 1)
            planned += 1
        if isinstance(order, c.RunEpoch) and isinstance(event, c.EpochPlanned):
            manifest = state._known.manifest
            start = event.start if manifest is None else manifest.sources
            assert (order.start, order.sources) == (start, event.sources)
    assert planned


def test_a_lineage_begins_with_a_token_that_names_where_it_reads_from(loop_steps):
    """Before its first epoch is planned for good: `latest` must not move with a crash."""
    count = 0
    for _, action, event, order in loop_steps:
        if isinstance(order, c.WriteManifest) and order.is_seed:
            assert isinstance(event, c.EpochPlanned)
            assert order.manifest.sources == event.start
        if isinstance(action, c.WriteManifest) and isinstance(event, c.ManifestWritten):
            is_commit = isinstance(order, c.CommitTransaction)
            assert is_commit == action.is_seed
            if is_commit:
                assert order.opens
                assert order.token.manifest_path == event.path
                assert order.token.checkpoint_id == action.manifest.checkpoint_id
                count += 1
    assert count


def test_the_newest_epoch_is_settled_before_the_next_is_planned_unless_a_run_noted_that(loop_steps):
    settled = 0
    for _, _, event, order in loop_steps:
        if isinstance(event, c.CommittedRead) and isinstance(order, c.PlanEpoch):
            manifest = event.committed.manifest
            assert manifest is None or event.committed.is_settled or not manifest.committables
        if isinstance(event, c.CommittedRead) and isinstance(order, c.RecoverParticipants):
            settled += bool(order.committables)
    assert settled


def test_a_recovery_begins_no_epoch_and_decides_nothing(recovery_steps):
    again = 0
    for _, _, event, order in recovery_steps:
        assert not isinstance(order, c.PlanEpoch | c.WriteManifest | c.CountOutput)
        assert not isinstance(order, c.CommitTransaction | c.CommitParticipants)
        if isinstance(order, c.RunEpoch):  # its driver ends here, and says so
            assert isinstance(event, c.ParticipantsRecovered)
            assert event.lost
            again += 1
    assert again


def test_a_recovery_ends_behind_the_other_sinks(recovery_steps):
    """What no decided manifest names is aborted also where the newest epoch is noted as settled."""
    ends = 0
    for state, _, event, order in recovery_steps:
        if isinstance(order, c.EndEpoch):
            assert order == c.EndEpoch(None)
            if state._has_participants:
                assert isinstance(event, c.ParticipantsRecovered) or state._is_recovered
                ends += 1
    assert ends


@pytest.mark.parametrize("kind", RECOVERIES, ids=str)
def test_a_recovery_takes_the_first_steps_of_a_start(kind):
    """Up to where that plans: the same refusals, and the same is committed."""
    ends, same = 0, 0
    for epoch_wanted in range(EPOCHS + 1):
        for held_by_kafka in possible_tokens(epoch_wanted, kind):
            for committed in (held_by_kafka, replace(held_by_kafka, is_settled=True)):
                orders = []
                for wanted in (c.EpochWanted(), c.RecoveryWanted()):
                    state = kind.new()
                    state.step(wanted)
                    state.step(c.ProducerFenced(OWNER))
                    orders.append(state.step(c.CommittedRead(committed)))
                start, recovery = orders
                if isinstance(start, c.PlanEpoch):
                    named = () if committed.manifest is None else committed.manifest.committables
                    recovers = c.RecoverParticipants(OWNER, (), named)
                    assert recovery == (recovers if kind.has_participants else c.EndEpoch(None))
                    ends += 1
                else:
                    assert repr(recovery) == repr(start)
                    same += 1
    assert ends
    assert same


def test_a_manifest_two_epochs_behind_the_token_shows_that_it_was_set_back(loop_steps):
    orders = [
        order
        for state, _, event, order in loop_steps
        if isinstance(event, c.CommittedRead)
        and (2 in event.committed.begun or event.committed.is_set_back)
        and request_of(state) is None
    ]
    assert orders
    for order in orders:
        assert isinstance(order, c.FenceProducer | c.Stop)  # the proof that it still owns, first


def test_what_a_failed_call_left_is_made_good_and_looked_at_before_anything_else(steps):
    """The function may have caught what the sink raised, and Spark have logged the epoch."""
    made_good = confirmed = 0
    for state, _, event, order in steps:
        known = event.committed if isinstance(event, c.CommittedRead) else state._committed
        if known is None or not known.has_failed or state.phase is not Phase.RESTORING:
            continue
        named = () if known.manifest is None else known.manifest.committables
        if isinstance(event, c.CommittedRead) and named:
            assert order == c.RecoverParticipants(OWNER, named)
            made_good += 1
        elif isinstance(event, c.CommittedRead):
            refused = isinstance(order, c.FenceProducer | c.Stop)
            assert refused or isinstance(order, c.ConfirmOutput)
            confirmed += not refused
    assert made_good
    assert confirmed


# Other sinks.


def test_what_tasks_prepared_is_committed_behind_the_decision_and_before_spark_hears_of_it(steps):
    count = 0
    for state, action, event, order in steps:
        if isinstance(order, c.CommitParticipants):
            assert isinstance(action, c.CommitTransaction)
            assert isinstance(event, c.TransactionCommitted)
            assert order.committables == state._state.manifest.committables
            count += 1
        if isinstance(order, c.EndEpoch):
            assert isinstance(event, c.OutputConfirmed)
        if isinstance(order, c.ConfirmOutput) and isinstance(event, c.TransactionCommitted):
            assert state._state.manifest.committables == ()
    assert count


def test_with_other_sinks_no_epoch_runs_before_they_are_recovered(steps):
    """Unless it follows an epoch of the same run, which has settled all."""
    count = 0
    for state, action, event, order in steps:
        if isinstance(order, c.RunEpoch) and state._has_participants:
            is_confirmed = isinstance(state._state, ConfirmingPhase) and state._known.has_failed
            is_settled = isinstance(state._state, ReadyPhase) or is_confirmed
            assert isinstance(action, c.RecoverParticipants) or is_settled
            count += isinstance(event, c.ParticipantsRecovered)
    assert count


def test_a_run_with_nothing_to_read_removes_what_lingers_all_the_same(loop_steps):
    """At its start, and when it is due: as after a zombie that wrote late.

    But not where another lineage has the name.
    """
    pairs = set()
    for state, _, event, order in loop_steps:
        if isinstance(event, c.EpochPlanned) and event.sources is None:
            is_due = event.looks_through or not state._is_recovered
            may_linger = state._has_participants and is_due
            if isinstance(order, c.RecoverParticipants):
                newest = state._known.manifest
                assert may_linger
                assert (order.committables, order.settled) == ((), newest.committables)
                pairs.add((event.looks_through, state._is_recovered))
            else:
                assert order != c.EndEpoch(None) or not may_linger
    assert pairs == {(False, False), (True, False), (True, True)}


def test_a_recovery_commits_what_spark_has_not_logged_and_keeps_what_it_has(steps):
    seen = set()
    for state, _, event, order in steps:
        if isinstance(order, c.RecoverParticipants):
            known = state._known if isinstance(event, c.EpochRequested) else event.committed
            is_start = isinstance(event, c.CommittedRead)
            wanted_request = request_of(state) if is_start else event.request
            is_newest = (
                known.token.checkpoint_id == wanted_request.checkpoint_id or known.has_failed
            )
            named = () if known.manifest is None else known.manifest.committables
            assert (order.committables, order.settled) == (
                (named, ()) if is_newest else ((), named)
            )
            seen.add((is_newest, bool(named)))
    assert {(True, True), (False, True), (False, False)} <= seen


def test_now_and_then_a_healthy_run_looks_for_what_lost_attempts_left():
    steady = Coordinator(OURS, CHECKPOINT, has_participants=True)
    steady._owner, steady._is_recovered = Producer("t", 1, 0), True
    due = []
    for epoch in range(1, 3 * RECOVER_EVERY):
        token = Token(epoch - 1, OURS.lineage, OURS.checkpoint, "")
        steady._state = ReadyPhase(Request(epoch - 1, ("{}",), may_skip=False))
        steady._committed = CommittedEpoch(token, None, manifest_exists=False)
        order = steady.step(c.EpochRequested(Request(epoch, ("{}",), may_skip=False)))
        due += [epoch] if isinstance(order, c.RecoverParticipants) else []
    assert due == [RECOVER_EVERY, 2 * RECOVER_EVERY]


def test_a_pipeline_without_other_sinks_recovers_them_only_if_spark_does_not_know_the_epoch(steps):
    """Then nobody can commit what is prepared; else its sinks were taken out, rightly."""
    orders = [
        (state, order)
        for state, _, _, order in steps
        if isinstance(order, c.RecoverParticipants) and not state._has_participants
    ]
    assert orders
    assert all(order.committables and not order.settled for _, order in orders)


def test_an_epoch_is_requested_once_in_a_run_and_once_more_in_the_next(steps):
    """A second request would be taken for a replay, which the first one of a run may be."""
    ends = [
        (state, event, order) for state, _, event, order in steps if isinstance(order, c.EndEpoch)
    ]

    assert ends
    for state, event, order in ends:
        done = copy.copy(state)
        done.step(event)
        with pytest.raises(AssertionError, match="requested once in a run"):
            done.step(c.EpochRequested(order.request))
    assert any(
        isinstance(order, c.ConfirmOutput)
        for state, _, _, order in steps
        if state.phase is Phase.RESTORING
    ), "a replay"


def test_no_epoch_follows_one_whose_end_the_caller_has_otherwise_and_the_manifests_is_told(steps):
    """In a run as in a recovery; and not before the run has proved that it is not replaced."""
    stops = [
        (state, event.committed, order.error)
        for state, _, event, order in steps
        if isinstance(order, c.Stop) and isinstance(order.error, OtherOffsetsError)
    ]

    for state, committed, error in stops:
        assert state._state.goal.tries.was_refused
        assert error.sources == committed.manifest.sources
    requested = {(request_of(state).checkpoint_id, e.checkpoint_id) for state, _, e in stops}
    assert requested >= {(0, 0), (1, 0), (1, 1)}


def test_a_decided_epoch_runs_again_only_if_nothing_of_it_is_visible(steps):
    """From the state that it went on from before, and with the same base."""
    count = 0
    for state, action, event, order in steps:
        known = state._committed
        if not isinstance(order, c.RunEpoch) or known is None or known.token is None:
            continue
        wanted = request_of(state).checkpoint_id
        if known.token.checkpoint_id != wanted or not isinstance(action, c.RecoverParticipants):
            continue
        assert known.manifest.decided_by == CHECKPOINT
        assert {loss.committable for loss in event.lost} == set(known.manifest.committables)
        assert order.state == (known.before.state if wanted else ())
        assert state._identity.accepted == frozenset(), "a stated word goes before"
        following = copy.copy(state)
        following.step(event)
        assert following._state.base_path == known.manifest.base_path
        count += 1
    assert count


def test_lost_output_ends_a_run_or_is_run_again_but_is_never_passed_over(steps):
    seen = set()
    for state, _, event, order in steps:
        if not isinstance(event, c.ParticipantsRecovered | c.OutputSettled) or not event.lost:
            continue
        if state._known.begun:  # the gap is told first, the loss at the next start
            assert isinstance(order, c.FenceProducer | c.Stop)
            continue
        if state._identity.accepted:
            assert isinstance(order, c.ConfirmOutput)
            continue
        assert isinstance(order, c.FenceProducer | c.RunEpoch | c.Stop)
        if isinstance(order, c.Stop) and isinstance(order.error, DataLossError):
            assert all(loss.what in str(order.error) for loss in event.lost)
            assert "accept='lost-output-of-epoch-" in str(order.error)
        seen.add((type(event), type(order)))
    assert seen == {
        (c.ParticipantsRecovered, c.FenceProducer),
        (c.ParticipantsRecovered, c.RunEpoch),
        (c.ParticipantsRecovered, c.Stop),
        (c.OutputSettled, c.FenceProducer),
        (c.OutputSettled, c.Stop),
    }


def test_who_tells_of_a_loss_has_just_proved_that_it_is_not_replaced():
    """A successor may have run the epoch again by then, so that nothing is lost."""
    state = Kind(KAFKA, True).new()
    newest = c.CommittedRead(token_of(0, kind=Kind(KAFKA, True)))
    state.step(c.EpochRequested(request(0)))
    state.step(c.ProducerFenced(OWNER))
    assert isinstance(state.step(newest), c.RecoverParticipants)

    assert state.step(c.ParticipantsRecovered(LOST[:1], NEWER)) == c.FenceProducer(NEWER)
    state.step(c.ProducerFenced(NEWER))
    state.step(newest)
    order = state.step(c.ParticipantsRecovered(LOST[:1], NEWER))
    assert isinstance(order, c.Stop)
    assert isinstance(order.error, DataLossError)


def test_what_is_lost_each_time_that_it_runs_asks_nobody_for_a_decision():
    """Nothing of it is visible: a start with a longer timeout goes on exactly."""
    kind = Kind(CHECKPOINT, True)
    state, runs = kind.new(), 0
    action: c.Action = state.step(c.EpochRequested(request(0)))
    first = c.CommittedRead(token_of(-1, kind=kind))
    again = c.CommittedRead(token_of(0, kind=kind))
    while not isinstance(action, c.Stop):
        match action:
            case c.FenceProducer():
                action = state.step(c.ProducerFenced(OWNER))
            case c.ReadCommitted():
                action = state.step(again if runs else first)
            case c.RecoverParticipants(_, decided):
                action = state.step(c.ParticipantsRecovered(LOST if decided else (), OWNER))
            case c.RunEpoch():
                runs += 1
                action = state.step(c.EpochRan((), committables=TWO))
            case c.WriteManifest():
                action = state.step(c.ManifestWritten("path"))
            case c.CountOutput():
                action = state.step(c.OutputCounted({}))
            case c.CommitTransaction():
                action = state.step(c.TransactionCommitted(OWNER))
            case c.CommitParticipants():
                action = state.step(c.OutputSettled(LOST))

    assert runs > 1
    assert isinstance(action.error, EpochAbortedError)
    assert "Nothing of it is visible" in str(action.error)


@pytest.mark.parametrize("phase", [Phase.RECOVERING, Phase.SETTLING])
def test_a_run_that_is_replaced_while_it_settles_stops_and_aborts_nothing(steps, phase):
    """What it would abort could be its successor's."""
    count = 0
    for state, _, event, order in steps:
        if state.phase is phase and isinstance(event, c.ActionFailed):
            if isinstance(event.error, FencedError):
                assert order == c.Stop(event.error)
                count += 1
            assert not isinstance(order, c.AbortTransaction)
    assert count


def test_a_refusal_proves_first_that_the_run_is_not_just_replaced():
    state = Coordinator(OURS)
    state.step(c.EpochRequested(request(0)))
    state.step(c.ProducerFenced(OWNER))
    unknown = c.CommittedRead(token_of(EPOCHS))

    assert state.step(unknown) == c.FenceProducer(OWNER)
    assert isinstance(state.step(c.ActionFailed(FencedError("replaced"))), c.Stop)
    assert state.phase is Phase.STOPPED


def test_no_epoch_is_tried_for_ever():
    state = Coordinator(OURS)
    action: c.Action = state.step(c.EpochRequested(request(0)))
    tries = 0
    while not isinstance(action, c.Stop):
        match action:
            case c.FenceProducer():
                action = state.step(c.ProducerFenced(OWNER))
            case c.ReadCommitted():
                action = state.step(c.CommittedRead(token_of(-1)))
            case c.RunEpoch():
                tries += 1
                action = state.step(c.EpochRan(()))
            case c.WriteManifest():
                action = state.step(c.ManifestWritten("path"))
            case c.CountOutput():
                action = state.step(c.OutputCounted({}))
            case c.CommitTransaction():
                action = state.step(c.ActionFailed(BrokerUnavailableError("no answer")))

    assert tries == 2 * ATTEMPTS_MAX
