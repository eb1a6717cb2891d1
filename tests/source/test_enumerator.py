"""Which partitions are read from where, through restarts, additions, removals and re-creations."""

import json

import pytest

from tallystick.errors import (
    LogTruncatedError,
    OptionError,
    PartitionRemovedError,
    TopicRecreatedError,
)
from tallystick.source.enumerator import Enumerator
from tallystick.source.offsets import SourceOffsets, from_json
from tallystick.source.splits import plan_splits, share_out
from tallystick.source.subscription import (
    LOSS_WORDS,
    Assignment,
    FoundTopic,
    LossPolicy,
    TopicList,
    TopicPattern,
)
from tallystick.values import SplitRange, TopicPartition

T0, T1, T2 = (TopicPartition("t", index) for index in range(3))
READ_T = TopicList(("t",))
STOP = LossPolicy()


def fresh(subscription=READ_T, starts=None, stops=None, policy=STOP, **partitions):
    """An enumerator and the first offsets of a new query."""
    enumerator = Enumerator(subscription, policy)
    enumerator.discovered(topics(**partitions), now_ms=0)
    enumerator.resolved(starts or dict.fromkeys(enumerator.unresolved, 0))
    return enumerator, enumerator.first("c", "g", stops)


def topics(**partitions):
    """Topics by name: a partition count, or (count, id)."""
    pairs = {n: f if isinstance(f, tuple) else (f, f"id-{n}") for n, f in partitions.items()}
    return {name: FoundTopic(topic_id, count) for name, (count, topic_id) in pairs.items()}


def restarted(offsets, topics_now, subscription=READ_T, policy=STOP, now_ms=1):
    """A new process that goes on from what Spark logged, after its first discovery."""
    enumerator = Enumerator(subscription, policy)
    enumerator.restored(from_json(json.loads(json.dumps(offsets.to_json()))))
    enumerator.discovered(topics_now, now_ms)
    return enumerator


def planned(enumerator, ends, earliest=0, limit=None):
    """The next epoch; new partitions begin at `earliest`."""
    enumerator.resolved(dict.fromkeys(enumerator.unresolved, earliest))
    enumerator.ended(ends)
    return enumerator.plan(limit)


def test_the_first_epoch_is_logged_even_without_records_so_that_the_start_is_settled():
    """Else `latest` would be resolved again after a crash, and what came in between lost."""
    enumerator, first = fresh(starts={T0: 40}, t=1)
    enumerator.restored(first)

    plan = planned(enumerator, {T0: 40})

    assert plan.offsets.starts == {T0: 40}
    assert not plan.offsets.initial
    assert plan_splits(SourceOffsets("c", "g"), plan.offsets) == ()


def test_the_first_epoch_reads_from_the_starts_that_its_own_log_entry_holds():
    enumerator, first = fresh(starts={T0: 40, T1: 7}, t=2)
    enumerator.restored(first)

    plan = planned(enumerator, {T0: 45, T1: 9})

    assert plan_splits(SourceOffsets("c", "g"), plan.offsets) == (
        SplitRange("t", 0, 40, 45, "id-t"),
        SplitRange("t", 1, 7, 9, "id-t"),
    )


def test_nothing_new_means_no_epoch():
    enumerator, _ = fresh(t=1)
    known = SourceOffsets("c", "g", {T0: 5}, topic_ids={"t": "id-t"})
    enumerator.restored(known)

    assert planned(enumerator, {T0: 5}).offsets is known


def test_a_partition_added_while_the_job_was_down_is_read_from_its_beginning():
    """Whatever startingOffsets says; the restored ones go on where they were."""
    stored = SourceOffsets("c", "g", {T0: 5}, topic_ids={"t": "id-t"})
    enumerator = restarted(stored, topics(t=3))

    assert enumerator.unresolved == [T1, T2]
    plan = planned(enumerator, {T0: 8, T1: 2, T2: 0})
    assert plan_splits(stored, plan.offsets) == (
        SplitRange("t", 0, 5, 8, "id-t"),
        SplitRange("t", 1, 0, 2, "id-t"),
    )
    assert plan.offsets.positions[T2] == 0


def test_a_restored_enumerator_does_not_hand_out_a_second_time():
    """The double assignment of apache/beam#31313.

    At the snapshot T0 was assigned, T1 discovered and not yet assigned; after the restore discovery
    finds both again.
    """
    enumerator, first = fresh(t=1)
    enumerator.restored(first)
    snapshot = planned(enumerator, {T0: 10}).offsets
    enumerator.discovered(topics(t=2), now_ms=1)  # T1 is seen, and the process dies

    again = restarted(snapshot, topics(t=2))
    assert again.unresolved == [T1]
    plan = planned(again, {T0: 10, T1: 4})

    assert plan_splits(snapshot, plan.offsets) == (SplitRange("t", 1, 0, 4, "id-t"),)
    again.restored(plan.offsets)
    again.discovered(topics(t=2), now_ms=2)
    assert again.unresolved == []
    assert planned(again, {T0: 10, T1: 4}).offsets is plan.offsets


@pytest.mark.parametrize("reader_count", [1, 2, 3, 7])
def test_a_failed_epoch_gives_the_same_splits_to_other_readers_whatever_their_number(reader_count):
    enumerator, first = fresh(t=3)
    enumerator.restored(first)
    splits = plan_splits(first, planned(enumerator, {T0: 3, T1: 3, T2: 3}).offsets)

    shares = share_out(splits, reader_count)

    assert sorted(split for share in shares for split in share) == sorted(splits)


def test_what_an_epoch_completed_is_not_handed_out_again_whoever_fails_later():
    """Flink's FailedSubtaskDoNotRevertCompletedCheckpoint.

    An epoch that was not completed is the same log entry again, its counterpart
    SubtaskFailedAndRevertUncompletedAssignments.
    """
    enumerator, first = fresh(t=1)
    enumerator.restored(first)
    completed = planned(enumerator, {T0: 4}).offsets
    enumerator.restored(completed)
    failed = planned(enumerator, {T0: 9}).offsets

    again = restarted(failed, topics(t=1))
    later = planned(again, {T0: 12}).offsets

    assert plan_splits(completed, failed) == (SplitRange("t", 0, 4, 9, "id-t"),)
    assert plan_splits(failed, later) == (SplitRange("t", 0, 9, 12, "id-t"),)


def test_a_restored_partition_that_cannot_be_seen_keeps_its_position():
    """FLINK-6006 and FLINK-10342: what is visible right now says nothing about what was read."""
    stored = SourceOffsets("c", "g", {T0: 5}, topic_ids={"t": "id-t"})
    policy = LossPolicy(removed="keep", keep_ms=1000)
    enumerator = restarted(stored, {}, policy=policy, now_ms=10)

    assert planned(enumerator, {}).offsets.positions == {T0: 5}
    enumerator.discovered(topics(t=1), now_ms=500)
    plan = planned(enumerator, {T0: 9})
    assert plan_splits(stored, plan.offsets) == (SplitRange("t", 0, 5, 9, "id-t"),)


def test_a_topic_that_the_subscription_left_is_not_read_and_resumed_when_it_is_back():
    kept = TopicPartition("old", 0)
    stored = SourceOffsets("c", "g", {T0: 5, kept: 3}, topic_ids={"t": "id-t", "old": "id-old"})

    without = restarted(stored, topics(t=1))
    assert without.readable == [T0]
    later = planned(without, {T0: 9}).offsets
    again = restarted(later, topics(t=1, old=1), subscription=TopicPattern("t|old"))
    assert again.unresolved == []
    plan = planned(again, {T0: 9, kept: 8})
    assert plan_splits(later, plan.offsets) == (SplitRange("old", 0, 3, 8, "id-old"),)


def test_a_removed_topic_stops_the_query_by_default():
    stored = SourceOffsets("c", "g", {T0: 5}, topic_ids={"t": "id-t"})

    with pytest.raises(PartitionRemovedError, match=r"'t' is gone.*t-0 offset 5.*when.removed"):
        restarted(stored, {})


def test_a_removed_topic_can_be_dropped_and_is_read_from_its_beginning_when_it_is_back():
    policy = LossPolicy(removed="drop")
    stored = SourceOffsets("c", "g", {T0: 5}, topic_ids={"t": "id-t"})

    plan = planned(restarted(stored, {}, policy=policy), {})
    assert plan.offsets.positions == {}
    assert "dropped t-0 offset 5" in plan.notes[0]
    back = restarted(plan.offsets, topics(t=(1, "other")), policy=policy)
    assert back.unresolved == [T0]


def test_a_kept_position_is_dropped_after_its_time():
    policy = LossPolicy(removed="keep", keep_ms=1000)
    other = TopicPartition("u", 0)
    stored = SourceOffsets("c", "g", {T0: 5, other: 1}, topic_ids={"t": "id-t", "u": "id-u"})
    both = TopicPattern("t|u")
    enumerator = restarted(stored, topics(u=1), subscription=both, policy=policy, now_ms=100)

    waiting = planned(enumerator, {other: 2}).offsets
    assert waiting.positions[T0] == 5
    assert waiting.gone == {"t": 100}
    late = restarted(waiting, topics(u=1), subscription=both, policy=policy, now_ms=1100)
    assert planned(late, {other: 2}).offsets.positions == {other: 2}


def test_a_kept_position_is_dropped_after_its_time_without_any_epoch_in_between():
    stored = SourceOffsets("c", "g", {T0: 5}, topic_ids={"t": "id-t"})
    enumerator = restarted(stored, {}, policy=LossPolicy(removed="keep", keep_ms=1000), now_ms=100)

    enumerator.discovered({}, now_ms=600)
    assert planned(enumerator, {}).offsets.positions == {T0: 5}
    enumerator.discovered({}, now_ms=1100)
    assert planned(enumerator, {}).offsets.positions == {}


def test_a_recreated_topic_is_known_by_its_id_even_if_it_has_more_records_than_before():
    stored = SourceOffsets("c", "g", {T0: 5}, topic_ids={"t": "id-t"})
    recreated = topics(t=(1, "another"))

    with pytest.raises(TopicRecreatedError, match=r"id was id-t, and is another.*t-0 offset 5"):
        restarted(stored, recreated)
    plan = planned(restarted(stored, recreated, policy=LossPolicy(recreated="restart")), {T0: 50})
    assert plan_splits(stored, plan.offsets) == (SplitRange("t", 0, 0, 50, "another"),)


def test_a_recreated_topic_with_fewer_partitions_leaves_no_position_behind():
    """Else the position of the old one would be taken up when the new one grows."""
    stored = SourceOffsets("c", "g", {T0: 5, T1: 9}, topic_ids={"t": "id-t"})
    policy = LossPolicy(recreated="restart")

    plan = planned(restarted(stored, topics(t=(1, "another")), policy=policy), {T0: 2}).offsets

    assert plan.positions == {T0: 2}
    assert restarted(plan, topics(t=(2, "another")), policy=policy).unresolved == [T1]


def test_a_checkpoint_without_ids_takes_the_first_that_it_sees():
    stored = SourceOffsets("c", "g", {T0: 5})

    plan = planned(restarted(stored, topics(t=1)), {T0: 6})

    assert plan.offsets.topic_ids == {"t": "id-t"}


def test_without_ids_fewer_partitions_tell_a_recreated_topic():
    stored = SourceOffsets("c", "g", {T0: 5, T1: 5})

    with pytest.raises(TopicRecreatedError, match="not known, and is id-t"):
        restarted(stored, topics(t=1))
    with_id = SourceOffsets("c", "g", {T0: 5, T1: 5}, topic_ids={"t": "id-t"})
    assert restarted(with_id, topics(t=1)).readable == [T0, T1]  # that broker only lags behind


def test_the_end_of_a_stream_means_nothing_in_a_recreated_topic():
    stored = SourceOffsets("c", "g", {T0: 5}, topic_ids={"t": "id-t"}, stops={T0: 50})

    with pytest.raises(TopicRecreatedError, match="start from a new checkpoint"):
        restarted(stored, topics(t=(1, "another")), policy=LossPolicy(recreated="restart"))


def test_a_dropped_topic_is_dropped_once():
    stored = SourceOffsets("c", "g", {T0: 5}, topic_ids={"t": "id-t"})
    enumerator = restarted(stored, {}, policy=LossPolicy(removed="drop"))
    dropped = planned(enumerator, {}).offsets

    enumerator.restored(dropped)
    again = planned(enumerator, {})

    assert again.offsets is dropped
    assert again.notes == ()
    assert enumerator.missed == set()


def test_the_starts_of_a_new_query_are_forgotten_where_it_goes_on_from_a_log():
    """Spark asks for them also when it runs the very first epoch again."""
    enumerator = Enumerator(READ_T, STOP)
    enumerator.discovered(topics(t=2), now_ms=0)
    enumerator.resolved({T0: 40, T1: 10})
    enumerator.first("c", "g", None)

    enumerator.restored(SourceOffsets("c", "g", {T0: 40}, topic_ids={"t": "id-t"}))

    assert enumerator.unresolved == [T1]


@pytest.mark.parametrize(
    ("topics_now", "error"),
    [(topics(t=(1, "another")), TopicRecreatedError), ({}, PartitionRemovedError)],
    ids=["re-created", "removed"],
)
def test_the_policy_holds_also_when_topics_were_seen_before_the_log(topics_now, error):
    """So it is when Spark runs the very first epoch again."""
    enumerator = Enumerator(READ_T, STOP)
    enumerator.discovered(topics_now, now_ms=1)
    enumerator.restored(SourceOffsets("c", "g", {T0: 5}, topic_ids={"t": "id-t"}))

    with pytest.raises(error):
        planned(enumerator, {T0: 9})


def test_a_truncated_log_stops_the_query_or_is_resumed_at_its_new_end():
    stored = SourceOffsets("c", "g", {T0: 50}, topic_ids={"t": "id-t"})

    with pytest.raises(LogTruncatedError, match=r"offset 50, but the log ends at 20"):
        planned(restarted(stored, topics(t=1)), {T0: 20})
    resumed = planned(
        restarted(stored, topics(t=1), policy=LossPolicy(truncated="resume")), {T0: 20}
    ).offsets
    assert plan_splits(stored, resumed) == ()
    later = restarted(resumed, topics(t=1), policy=LossPolicy(truncated="resume"))
    assert plan_splits(resumed, planned(later, {T0: 23}).offsets) == (
        SplitRange("t", 0, 20, 23, "id-t"),
    )


def test_expired_records_are_skipped_with_their_range_in_the_log():
    stored = SourceOffsets("c", "g", {T0: 5}, topic_ids={"t": "id-t"})
    enumerator = restarted(stored, topics(t=1), policy=LossPolicy(expired="skip"))
    enumerator.begun({T0: 30})

    plan = planned(enumerator, {T0: 40})

    assert plan.offsets.skipped == {T0: (5, 30)}
    assert plan_splits(stored, plan.offsets) == (SplitRange("t", 0, 30, 40, "id-t"),)
    assert "offsets 5 to 29 (25) were deleted" in plan.notes[0]


def test_a_bounded_stream_ends_at_its_stops_and_takes_no_new_partitions():
    enumerator, first = fresh(t=1, stops={T0: 10})
    enumerator.restored(first)
    enumerator.discovered(topics(t=2), now_ms=1)

    assert enumerator.unresolved == []
    done = planned(enumerator, {T0: 25}).offsets
    assert done.positions == {T0: 10}
    enumerator.restored(done)
    assert planned(enumerator, {T0: 30}).offsets is done


def test_only_the_assigned_partitions_are_read():
    _enumerator, first = fresh(subscription=Assignment((T1,)), t=3)

    assert first.positions == {T1: 0}


def test_a_topic_without_records_gives_no_split_and_is_not_forgotten():
    enumerator, first = fresh(t=2)
    enumerator.restored(first)
    done = planned(enumerator, {T0: 0, T1: 0}).offsets
    enumerator.restored(done)

    assert plan_splits(first, done) == ()
    assert plan_splits(done, planned(enumerator, {T0: 0, T1: 6}).offsets) == (
        SplitRange("t", 1, 0, 6, "id-t"),
    )


def test_a_partition_that_is_held_keeps_its_position_and_is_read_later():
    enumerator, _ = fresh(t=2)
    known = SourceOffsets("c", "g", {T0: 5, T1: 5}, topic_ids={"t": "id-t"})
    enumerator.restored(known)
    planned(enumerator, {T0: 9, T1: 8})

    plan = enumerator.plan(None, {T1})
    assert (plan.offsets.positions, plan.waiting) == ({T0: 9, T1: 5}, 4)
    assert enumerator.plan(None, {T0, T1}).offsets is known, "nothing is left to be read"
    assert enumerator.plan(None).offsets.positions == {T0: 9, T1: 8}


@pytest.mark.parametrize("field", LOSS_WORDS)
def test_a_word_that_a_loss_policy_does_not_know_is_refused_with_those_that_there_are(field):
    words = LOSS_WORDS[field]
    assert {getattr(LossPolicy(**{field: word}), field) for word in words} == set(words)

    with pytest.raises(OptionError) as caught:
        LossPolicy(**{field: "warn"})
    assert str(caught.value).startswith(f"LossPolicy({field}='warn'): expected ")
    assert all(repr(word) in str(caught.value) for word in words)


@pytest.mark.parametrize("keep_ms", [-1, 1.5, "1h", True])
def test_a_loss_policy_keeps_for_a_whole_number_of_ms(keep_ms):
    with pytest.raises(OptionError, match=r"LossPolicy\(keep_ms=.*expected (ms|a whole number)"):
        LossPolicy(removed="keep", keep_ms=keep_ms)
