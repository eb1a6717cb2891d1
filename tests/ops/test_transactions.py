"""What is said of a lingering transaction: each case, and what must never be said."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.epoch.manifest import CHECKPOINT, Manifest
from tallystick.epoch.transactional_ids import ID_PREFIX, batch_name
from tallystick.epoch.two_phase import Committable
from tallystick.ops.checkpoint_view import CheckpointView
from tallystick.ops.transactions import (
    FILES,
    KAFKA,
    ONGOING,
    POSTGRES,
    WAITS,
    LingeringTransaction,
    TransactionStatus,
    describe,
    in_order,
    of_prefixes,
)
from tallystick.values import Producer

PREFIX = "tallystick-flights"


def lingering(
    task: int = 0, epoch: int = 7, prefix: str = PREFIX, **changes: object
) -> LingeringTransaction:
    """A task's transaction, of a producer epoch."""
    name = f"{prefix}/kafka-1/{task}/0"
    transaction = LingeringTransaction(
        KAFKA, name, f"{name}:1:{epoch}", ONGOING, producer_id=1, producer_epoch=epoch
    )
    return replace(transaction, **changes)


def named(*transactions: LingeringTransaction, epoch: int = 4) -> Manifest:
    """A manifest that names them."""
    committables = [
        Committable(transaction.sink or "kafka-1", epoch, 0, transaction.name, 10, 1)
        for transaction in transactions
    ]
    return Manifest(
        epoch, "flights", "L", ("{}",), (), Producer(PREFIX, 1, 1),
        committables=tuple(committables), decided_by=CHECKPOINT,
    )  # fmt: skip


def view(decided: Manifest | None = None, **changes: object) -> CheckpointView:
    checkpoint = CheckpointView(
        location="/checkpoint",
        pipeline="flights",
        lineage="L",
        prefixes=frozenset({PREFIX}),
        decided_path="" if decided is None else "tallystick/4.json",
        decided=decided,
    )
    return replace(checkpoint, **changes)


ONE = lingering()
WHOLE = lingering(transactional_id=PREFIX, name=f"{PREFIX}:1:7")
OTHER_WHOLE = replace(WHOLE, transactional_id="tallystick-other", name="tallystick-other:1:7")
BATCH = replace(WHOLE, transactional_id=f"{ID_PREFIX}{batch_name('0123456789abcdef')}")
WAITING = (("tallystick/5.json", named(ONE, epoch=5)),)

TABLE = [
    ("being ended", lingering(state="PrepareCommit"), view(named(ONE)), TransactionStatus.ENDING),
    ("another program's", lingering(prefix="bank"), view(), TransactionStatus.FOREIGN),
    ("another program's, no checkpoint", replace(WHOLE, transactional_id="bank"), None,
     TransactionStatus.FOREIGN),
    ("another pipeline's", OTHER_WHOLE, view(), TransactionStatus.FOREIGN),
    ("a batch write's", BATCH, view(), TransactionStatus.FOREIGN),
    ("a batch write's, no checkpoint", BATCH, None, TransactionStatus.FOREIGN),
    ("no checkpoint", ONE, None, TransactionStatus.UNKNOWN),
    ("whole epoch, no checkpoint", WHOLE, None, TransactionStatus.UNKNOWN),
    ("whole epoch", WHOLE, view(doubt="who knows"), TransactionStatus.WHOLE_EPOCH),
    ("due", ONE, view(named(ONE)), TransactionStatus.DUE),
    ("due in doubt", ONE, view(named(ONE), doubt="who knows"), TransactionStatus.DUE),
    ("named, of another producer epoch", lingering(epoch=8), view(named(ONE)),
     TransactionStatus.UNNAMED),
    ("doubt", ONE, view(doubt="no token"), TransactionStatus.UNKNOWN),
    ("named by nothing", ONE, view(named()), TransactionStatus.UNNAMED),
    ("prepared", ONE, view(named(), undecided=WAITING), TransactionStatus.UNNAMED),
    ("never a checkpoint", ONE, view(), TransactionStatus.UNNAMED),
]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "transaction", "says", "standing"), TABLE, ids=[line[0] for line in TABLE]
)
def test_each_case(what, transaction, says, standing):
    assert describe(transaction, says).standing is standing


transactions = st.builds(
    lingering,
    task=st.integers(0, 2),
    epoch=st.integers(7, 8),
    prefix=st.sampled_from([PREFIX, "tallystick-other", "bank"]),
    state=st.sampled_from([ONGOING, "PrepareCommit", "PrepareAbort"]),
    system=st.sampled_from([KAFKA, KAFKA, POSTGRES, FILES]),
) | st.sampled_from([WHOLE, OTHER_WHOLE])
manifests = st.builds(lambda some: named(*some), st.lists(transactions, max_size=3))
checkpoints = st.builds(
    view,
    decided=st.none() | manifests,
    doubt=st.sampled_from(["", "", "who knows"]),
    undecided=st.lists(st.tuples(st.just("tallystick/5.json"), manifests), max_size=2).map(tuple),
)


@given(transactions, st.none() | checkpoints)
def test_only_what_the_decided_manifest_names_is_said_to_be_committed(transaction, checkpoint):
    described = describe(transaction, checkpoint)

    assert ("commits it" in described.says) == (described.standing is TransactionStatus.DUE)
    if described.standing is TransactionStatus.DUE:
        assert described.named in checkpoint.decided.committables
        assert described.named.name == transaction.name
    if "aborts it" in described.says and described.standing is not TransactionStatus.WHOLE_EPOCH:
        names = () if checkpoint.decided is None else checkpoint.decided.committables
        assert transaction.name not in {name.name for name in names if transaction.sink == ""}
        assert not checkpoint.doubt


@given(st.lists(transactions), st.none() | checkpoints)
def test_ours_come_first(unordered, checkpoint):
    ordered = in_order(unordered, checkpoint)

    ours = [
        checkpoint is None or transaction in of_prefixes([transaction], checkpoint, {PREFIX})
        for transaction in ordered
    ]
    assert sorted(unordered, key=id) == sorted(ordered, key=id)
    assert ours == sorted(ours, reverse=True)


def test_what_waits_for_a_decision_is_told_with_its_epoch():
    described = describe(ONE, view(named(), undecided=WAITING))

    assert (described.named.checkpoint_id, described.manifest_path) == (5, "tallystick/5.json")
    assert "prepared for epoch 5, which is not decided" in described.says


def test_the_name_of_another_sinks_files_is_no_name_of_ones_own():
    """In two folders of files the same name may occur."""
    ours = lingering(system=FILES, name="00000004-00000-ab", sink="files-1")
    theirs = replace(ours, sink="files-2")

    standings = [
        describe(transaction, view(named(ours))).standing for transaction in (ours, theirs)
    ]

    assert standings == [TransactionStatus.DUE, TransactionStatus.UNNAMED]


def test_an_epoch_that_waits_for_a_commit_of_its_table_is_due_whatever_the_checkpoint_names():
    waits = LingeringTransaction(FILES, "_tallystick/p/s/l/due/00000007", "", WAITS, sink="s")

    for checkpoint in (view(), view(named(ONE)), view(doubt="no token")):
        described = describe(waits, checkpoint)
        assert described.standing is TransactionStatus.DUE
        assert "epoch 7 is decided and waits for a commit of the table" in described.says


def test_a_batch_write_is_called_one_and_ends_by_itself():
    assert "a batch write's" in describe(BATCH, None).says
    assert "a batch write's" in describe(BATCH, view()).says
    pipeline = view(prefixes=frozenset({BATCH.transactional_id}))
    assert describe(BATCH, pipeline).standing is TransactionStatus.WHOLE_EPOCH
