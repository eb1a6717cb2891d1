"""What is lost is run again where that is exact; else a person is told all there is to know."""

import json
from dataclasses import replace

import pytest

from tallystick.epoch import refusals
from tallystick.epoch.facts import CommittedEpoch
from tallystick.epoch.manifest import CHECKPOINT, KAFKA, Identity, Manifest
from tallystick.epoch.tokens import Token
from tallystick.epoch.two_phase import Committable, Lost
from tallystick.errors import DataLossError, EpochAbortedError
from tallystick.source.offsets import SourceOffsets
from tallystick.values import ProducedRange, Producer, TopicPartition

OURS = Identity("late-flights", "lineage", "s3://checkpoint")
TOKEN = Token(5, "lineage", "s3://checkpoint", "m5")
POSITIONS = SourceOffsets("c", "g", {TopicPartition("in", 0): 70, TopicPartition("in", 1): 8})
ALL = tuple(Committable("db", 5, task, f"t{task}", 10, 0) for task in range(3))
LOST = tuple(
    Lost(committable, f"database flights: transaction {committable.name}") for committable in ALL
)
MANIFEST = Manifest(
    5,
    "late-flights",
    "lineage",
    (json.dumps(POSITIONS.to_json()),),
    (),
    Producer("t", 1, 1),
    committables=ALL,
    decided_by=CHECKPOINT,
    base_path="m4",
)
BEFORE = replace(MANIFEST, checkpoint_id=4)
WRITTEN = (ProducedRange("out", 0, 1, 0, 0),)


@pytest.mark.parametrize(
    ("changes", "before", "lost", "expected"),
    [
        ({}, BEFORE, LOST, True),
        ({"base_path": ""}, None, LOST, True),
        ({}, BEFORE, tuple(reversed(LOST)), True),
        ({}, BEFORE, LOST[:2], False),
        ({}, None, LOST, False),
        ({"decided_by": KAFKA}, BEFORE, LOST, False),
        ({"produced": WRITTEN}, BEFORE, LOST, False),
    ],
    ids=[
        "all of it",
        "of a first epoch",
        "in whatever order",
        "a part is visible",
        "the state before is gone",
        "Kafka's transaction shows positions",
        "the decider's rows are visible",
    ],
)
def test_an_epoch_runs_again_only_if_that_repeats_nothing(changes, before, lost, expected):
    committed = CommittedEpoch(TOKEN, replace(MANIFEST, **changes), True, before=before)

    assert refusals.is_replayable(committed, lost) is expected


def test_nothing_is_run_again_without_a_manifest():
    assert not refusals.is_replayable(CommittedEpoch(TOKEN, None, False), LOST)


def test_the_error_says_which_transactions_how_many_records_of_which_input_and_the_ways_on():
    error = refusals.output_lost(OURS, MANIFEST, LOST[1:])

    assert isinstance(error, DataLossError)
    for part in (
        "'late-flights'",
        "epoch 5",
        "2 of its 3 transactions with 20 records",
        "database flights: transaction t1; database flights: transaction t2",
        "in-0 up to offset 70, in-1 up to offset 8",
        "accept='lost-output-of-epoch-5'",
        "longer timeout",
    ):
        assert part in str(error)


def test_long_lists_are_cut_and_counted():
    many = LOST * 10
    positions = {TopicPartition("in", partition): 1 for partition in range(25)}
    sources = (json.dumps(SourceOffsets("c", "g", positions).to_json()),)
    error = str(refusals.output_lost(OURS, replace(MANIFEST, sources=sources), many))

    assert "and 10 more" in error
    assert "and 5 partitions more" in error


def test_what_is_lost_again_and_again_is_no_loss_unless_a_part_is_visible():
    """Nobody must be asked to write by other means what the next start writes."""
    again = refusals.lost_repeatedly(OURS, MANIFEST, LOST)

    assert isinstance(again, EpochAbortedError)
    assert "accept=" not in str(again)
    assert isinstance(refusals.lost_repeatedly(OURS, MANIFEST, LOST[:1]), DataLossError)


def test_sinks_that_are_gone_are_named():
    text = str(refusals.no_sinks(OURS, ALL))

    assert "3 decided transactions" in text
    assert "no longer has: db." in text
