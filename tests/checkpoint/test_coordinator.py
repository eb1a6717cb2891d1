"""Every order of events that can happen, up to the end of the second epoch."""

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tallystick.checkpoint import protocol as c
from tallystick.checkpoint.coordinator import ATTEMPTS_MAX, Coordinator
from tallystick.checkpoint.manifest import Manifest, Origin
from tallystick.checkpoint.protocol import Phase
from tallystick.checkpoint.verdict import Base, Committed, Identity, Request
from tallystick.errors import (
    BrokerUnavailableError,
    DataLossError,
    EpochAbortedError,
    FencedError,
)
from tallystick.sink.transaction import ProducedRange, Producer, Token
from tallystick.state.handles import StepState
from tallystick.topic_partition import TopicPartition

OURS = Identity("pipeline", "ours", "s3://checkpoint")
OWNER = Producer("t", 7, 1)
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
    return Request(epoch, (f"ends of {epoch}",))


def held(epoch: int, sources: tuple[str, ...] | None = None) -> Committed:
    """Kafka holds the token of this epoch, -1 being the first one of a lineage."""
    if epoch < 0:
        return Committed(Token(epoch, "ours", "s3://checkpoint", ""), None, False)
    return Committed(
        Token(epoch, "ours", "s3://checkpoint", "path"), manifest_of(epoch, sources), True
    )


def manifest_of(epoch: int, sources: tuple[str, ...] | None = None) -> Manifest:
    """With a state that tells which epoch it is of."""
    state = (StepState(f"step of {epoch}", 128, 1, "[]", 1),)
    ends = sources or request(epoch).sources
    return Manifest(epoch, "pipeline", "ours", ends, (), OWNER, state)


def answers(  # noqa: PLR0912 - one case per action
    action: c.Action, asked: int, before: c.Event
) -> Iterator[c.Event]:
    """Everything that the world may answer to an action."""
    match action:
        case c.FenceProducer():
            yield c.ProducerFenced(OWNER)
        case c.ReadCommitted():
            if isinstance(before, c.TransactionCommitted):  # the first token, just now
                yield c.CommittedRead(held(asked - 1))
            else:
                yield from map(c.CommittedRead, possible_tokens(asked))
        case c.RunEpoch():
            yield from (c.EpochRan(()), c.EpochRan(WRITTEN))
        case c.WriteManifest():
            yield c.ManifestWritten("path")
        case c.CountOutput(_, produced):
            reported = {written.topic_partition: written.last_sequence for written in produced}
            found = (None, reported, {}, {OUT: 3}, {TopicPartition("out", 1): 0})
            yield from map(c.OutputCounted, found)
        case c.CommitTransaction():
            yield c.TransactionCommitted(OWNER)
        case c.ConfirmOutput():
            yield from (c.OutputConfirmed({}), c.OutputConfirmed({OUT: 1}))
        case c.AbortTransaction():
            yield c.TransactionAborted()
        case c.EndEpoch():
            for epoch in (asked, asked + 1, asked + 2):
                if epoch <= EPOCHS:
                    yield c.EpochRequested(request(epoch))
    if not isinstance(action, c.EndEpoch | c.Stop):
        yield from map(c.ActionFailed, ERRORS)


def possible_tokens(asked: int) -> Iterator[Committed]:
    yield Committed(None, None, manifest_exists=False)
    yield Committed(None, None, manifest_exists=True)
    yield from (held(epoch) for epoch in range(-1, EPOCHS + 1))
    yield held(asked, ("other ends",))
    yield Committed(held(asked).token, None, manifest_exists=True)
    yield Committed(Token(asked, "theirs", "s3://other", "path"), None, manifest_exists=False)
    if asked > 0:
        seed = Base("seed", replace(manifest_of(asked - 1), origin=ORIGIN))
        for path in (ORIGIN.manifest_path, "a later one"):
            token = Token(asked - 1, ORIGIN.lineage, ORIGIN.checkpoint, path)
            yield Committed(token, None, False, True, (seed,))


Step = tuple[Coordinator, c.Action, c.Event, c.Action]


def explore() -> list[Step]:
    """Each reachable (state, last action) once, with every answer to it and what follows."""
    waiting, seen, steps = [], set(), []
    for epoch in (0, 1):  # a restored checkpoint begins behind its savepoint
        first, event = Coordinator(OURS), c.EpochRequested(request(epoch))
        waiting.append((first, first.step(event), event))
    while waiting:
        state, action, before = waiting.pop()
        asked = state._asked.checkpoint_id
        for event in answers(action, asked, before):
            following = copy.copy(state)
            order = following.step(event)
            steps.append((state, action, event, order))
            after_commit = isinstance(event, c.TransactionCommitted)
            key = (repr(vars(following)), repr(order), after_commit)
            if key not in seen:
                seen.add(key)
                waiting.append((following, order, event))
    return steps


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    """No answer leads off the table (`_become` asserts it), and there is an end to them all."""
    return explore()


def test_every_phase_is_reached(steps):
    assert {state.phase for state, *_ in steps} | {Phase.STOPPED} == set(Phase) - {Phase.IDLE}


def test_every_way_on_in_the_table_is_taken(steps):
    """A phase change that nothing takes would be one that nobody has thought through."""
    taken = {Phase.IDLE: {Phase.FENCING}}
    for state, _, event, _ in steps:
        following = copy.copy(state)
        following.step(event)
        taken.setdefault(state.phase, set()).add(following.phase)
    unused = {
        (one, other)
        for one, others in c.NEXT_PHASES.items()
        for other in others - taken.get(one, set())
    }

    assert unused == set(), unused


def test_after_an_unanswered_commit_it_fences_as_the_owner_or_stops(steps):
    """Never an abort, never another try of the commit, never a take-over."""
    for _, action, event, order in steps:
        if isinstance(action, c.CommitTransaction) and isinstance(event, c.ActionFailed):
            assert isinstance(order, c.Stop) or order == c.FenceProducer(OWNER)


def test_only_a_run_that_never_owned_the_pipeline_takes_it_over(steps):
    for state, _, _, order in steps:
        if isinstance(order, c.FenceProducer) and order.current is None:
            assert state._owner is None


def test_rows_are_committed_after_a_durable_manifest_and_a_matching_count(steps):
    for state, action, event, order in steps:
        opens = isinstance(event, c.CommittedRead)  # with a token, and no rows
        if isinstance(order, c.CommitTransaction) and not opens:
            assert isinstance(action, c.CountOutput)
            assert isinstance(event, c.OutputCounted)
            assert state.phase is Phase.COMPLETED
            counted = {w.topic_partition: w.last_sequence for w in action.produced}
            assert event.last_sequences in (None, counted)


def test_an_epoch_runs_only_after_the_question_what_is_committed(steps):
    for _, _, event, order in steps:
        if isinstance(order, c.RunEpoch):
            assert isinstance(event, c.CommittedRead | c.EpochRequested)


def test_an_epoch_goes_on_from_the_state_of_the_epoch_before(steps):
    """Of the manifest that Kafka's token names, and of no other."""
    found = [(order, state) for state, _, _, order in steps if isinstance(order, c.RunEpoch)]
    for order, _ in found:
        names = [step.uid for step in order.state]
        assert names in ([], [f"step of {order.checkpoint_id - 1}"])
    assert any(order.state for order, _ in found)


def test_a_lineage_begins_with_a_token_that_names_its_seed_and_with_no_rows(steps):
    named = set()
    for _, action, event, order in steps:
        if isinstance(order, c.CommitTransaction) and isinstance(event, c.CommittedRead):
            base = event.committed.seed
            assert order.token.manifest_path == ("" if base is None else base.path)
            assert order.sources == ()
            assert isinstance(action, c.ReadCommitted)
            named.add(order.token.manifest_path)
    assert named == {"", "seed"}


def test_the_error_that_stops_a_run_is_the_first_one(steps):
    """What goes wrong while giving up does not hide why."""
    for state, _, event, order in steps:
        if state.phase is Phase.STOPPING:
            assert order == c.Stop(state._error)
        elif isinstance(order, c.Stop) and isinstance(event, c.ActionFailed):
            assert order.error is event.error


def test_a_refusal_proves_first_that_the_run_is_not_just_replaced():
    state = Coordinator(OURS)
    state.step(c.EpochRequested(request(0)))
    state.step(c.ProducerFenced(OWNER))
    unknown = c.CommittedRead(held(EPOCHS))

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
                action = state.step(c.CommittedRead(held(-1)))
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
