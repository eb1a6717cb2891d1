"""What is said of a lingering transaction: each line of the table, and what must never be said."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.checkpoint.manifest import CHECKPOINT, Manifest
from tallystick.sink.transaction import Producer
from tallystick.sink.two_phase import Committable
from tallystick.transactions import (
    FILES,
    KAFKA,
    ONGOING,
    POSTGRES,
    Lingering,
    Standing,
    Told,
    in_order,
    judge,
    sign_of_a_run,
)

PREFIX = "tallystick-flights"
RUNNING = "an epoch was planned 1 s ago"


def lingering(task: int = 0, epoch: int = 7, prefix: str = PREFIX, **changes: object) -> Lingering:
    """A task's transaction, of a producer epoch."""
    name = f"{prefix}/kafka-1/{task}/0"
    made = Lingering(KAFKA, name, f"{name}:1:{epoch}", ONGOING, producer_id=1, producer_epoch=epoch)
    return replace(made, **changes)


def named(*transactions: Lingering, epoch: int = 4) -> Manifest:
    """A manifest that names them."""
    committables = [
        Committable(each.sink or "kafka-1", epoch, 0, each.name, 10, 1) for each in transactions
    ]
    return Manifest(
        epoch, "flights", "L", ("{}",), (), Producer(PREFIX, 1, 1),
        committables=tuple(committables), decided_by=CHECKPOINT,
    )  # fmt: skip


def told(decided: Manifest | None = None, **changes: object) -> Told:
    path = "" if decided is None else "tallystick/4.json"
    made = Told("flights", "L", frozenset({PREFIX}), path, decided, done=3)
    return replace(made, **changes)


ONE = lingering()
WHOLE = lingering(transactional_id=PREFIX, name=f"{PREFIX}:1:7")

WHOLES = (WHOLE, replace(WHOLE, transactional_id="tallystick-other", name="tallystick-other:1:7"))

TABLE = [
    ("being ended", lingering(state="PrepareCommit"), told(named(ONE)), "", Standing.ENDING, 0, 0),
    ("another program's", lingering(prefix="bank"), told(), "", Standing.FOREIGN, 0, 0),
    ("the same, no checkpoint", replace(WHOLE, transactional_id="bank"), None, "",
     Standing.FOREIGN, 0, 0),
    ("no checkpoint", ONE, None, "", Standing.UNKNOWN, 0, 0),
    ("whole epoch, no checkpoint", WHOLE, None, "", Standing.UNKNOWN, 0, 0),
    ("whole epoch, running", WHOLE, told(), RUNNING, Standing.RUNNING, 0, 0),
    ("whole epoch", WHOLE, told(doubt="who knows"), "", Standing.WHOLE_EPOCH, 0, 1),
    ("due", ONE, told(named(ONE), under_way=4), "", Standing.DUE, 1, 0),
    ("due while a run is at work", ONE, told(named(ONE), under_way=4), RUNNING,
     Standing.DUE, 1, 0),
    ("named, of another producer epoch", lingering(epoch=8), told(named(ONE)), "",
     Standing.UNNAMED, 0, 1),
    ("doubt", ONE, told(doubt="no token"), "", Standing.UNKNOWN, 0, 0),
    ("another lineage", lingering(committed=("M", 1)), told(named()), "", Standing.UNKNOWN, 0, 0),
    ("an old copy", lingering(committed=("L", 5)), told(named()), "", Standing.UNKNOWN, 0, 0),
    ("of this checkpoint", lingering(committed=("L", 4)), told(named()), "",
     Standing.UNNAMED, 0, 1),
    ("nothing under way", ONE, told(named()), RUNNING, Standing.UNNAMED, 0, 1),
    ("under way and running", ONE, told(named(), under_way=5), RUNNING, Standing.RUNNING, 0, 0),
    ("under way, none runs", ONE, told(named(), under_way=5), "", Standing.UNNAMED, 0, 1),
    ("never a checkpoint", ONE, told(), "", Standing.UNNAMED, 0, 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "transaction", "says", "running", "standing", "commit", "abort"),
    TABLE,
    ids=[line[0] for line in TABLE],
)
def test_each_line_of_the_table(what, transaction, says, running, standing, commit, abort):
    judged = judge(transaction, says, running)

    assert judged.standing is standing
    assert (judged.may_commit, judged.may_abort) == (bool(commit), bool(abort))


transactions = st.builds(
    lingering,
    task=st.integers(0, 2),
    epoch=st.integers(7, 8),
    prefix=st.sampled_from([PREFIX, "tallystick-other", "bank"]),
    state=st.sampled_from([ONGOING, "PrepareCommit", "PrepareAbort"]),
    system=st.sampled_from([KAFKA, KAFKA, POSTGRES, FILES]),
    committed=st.sampled_from([None, ("L", 4), ("L", 9), ("M", 1)]),
    begun_ms=st.integers(0, 1000),
) | st.sampled_from(WHOLES)
manifests = st.builds(lambda some: named(*some), st.lists(transactions, max_size=3))
checkpoints = st.builds(
    told,
    decided=st.none() | manifests,
    doubt=st.sampled_from(["", "", "who knows"]),
    undecided=st.lists(st.tuples(st.just("tallystick/5.json"), manifests), max_size=2).map(tuple),
    under_way=st.sampled_from([None, 5]),
    planned_ms=st.integers(0, 1000),
)


@given(transactions, st.none() | checkpoints, st.sampled_from(["", RUNNING]))
def test_nothing_is_lost_or_repeated_by_what_is_offered(transaction, checkpoint, running):
    judged = judge(transaction, checkpoint, running)

    assert not (judged.may_commit and judged.may_abort)
    if judged.may_commit or judged.may_abort:
        assert checkpoint is not None
        assert checkpoint.owns(transaction)
        assert transaction.system != KAFKA or transaction.state == ONGOING
    is_named = checkpoint is not None and checkpoint.due(transaction) is not None
    if judged.may_commit:
        assert is_named
        assert transaction not in WHOLES
    if judged.may_abort and transaction not in WHOLES:
        assert not is_named
        assert not checkpoint.doubt
        assert checkpoint.under_way is None or judged.forestall
        assert checkpoint.under_way is None or not running


@given(transactions, st.none() | checkpoints, st.sampled_from(["", RUNNING]))
def test_what_is_refused_says_why_and_what_force_would_risk(transaction, checkpoint, running):
    """But there is no force for what Kafka is ending already, or for committing a whole epoch."""
    judged = judge(transaction, checkpoint, running)
    is_over = judged.standing is Standing.ENDING

    assert judged.says
    never = is_over or transaction in WHOLES
    assert judged.may_commit or bool(judged.risk_of_commit) != never
    assert judged.may_abort or bool(judged.risk_of_abort) != is_over


@given(checkpoints, st.lists(transactions), st.integers(0, 2000), st.integers(0, 2000))
def test_a_run_is_suspected_exactly_while_something_of_it_is_recent(
    checkpoint, found, now_ms, quiet_ms
):
    ours = [each.begun_ms for each in found if checkpoint.owns(each)]
    newest = max([checkpoint.planned_ms, *ours])

    sign = sign_of_a_run(checkpoint, found, now_ms, quiet_ms)

    assert bool(sign) == (newest > 0 and now_ms - newest < quiet_ms)
    assert sign_of_a_run(None, found, now_ms, quiet_ms) == ""


@given(st.lists(transactions), st.none() | checkpoints)
def test_ours_come_first(found, checkpoint):
    ordered = in_order(found, checkpoint)

    ours = [checkpoint is None or checkpoint.owns(each) for each in ordered]
    assert sorted(found, key=id) == sorted(ordered, key=id)
    assert ours == sorted(ours, reverse=True)


def test_what_waits_for_a_decision_is_told_with_its_epoch():
    waiting = (("tallystick/5.json", named(ONE, epoch=5)),)

    judged = judge(ONE, told(named(), under_way=5, undecided=waiting), "")

    assert (judged.epoch, judged.manifest_path) == (5, "tallystick/5.json")
    assert "prepared for epoch 5, which was never decided" in judged.says


def test_the_name_of_another_sinks_files_is_no_name_of_ones_own():
    """In two folders of files the same name may occur."""
    ours = lingering(system=FILES, name="00000004-00000-ab", sink="files-1")
    theirs = replace(ours, sink="files-2")

    judged = [judge(each, told(named(ours)), "").standing for each in (ours, theirs)]

    assert judged == [Standing.DUE, Standing.UNNAMED]
