"""Whose transactional id it is, by its text alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.api.kafka_source import KafkaSource
from tallystick.api.pipeline import Pipeline
from tallystick.epoch.transactional_ids import (
    SLOT_COUNT,
    PooledId,
    checkpoint_prefix,
    default_prefix,
    owned,
    parse,
    slot_of,
    token_group,
    transactional_id,
)
from tallystick.epoch.two_phase import Owner
from tallystick.errors import OptionError
from tallystick.files.drafts import hidden_folder
from tallystick.postgres.names import application_prefix, owner_prefix

NAMES = st.text("ab01._-", min_size=1, max_size=6)
"""What pipelines and uids are made of; dashes and digits are where ids could be misread."""
PIPELINES = st.lists(
    st.sampled_from(("a", "b", "0", "-", ".", "-token", "token", "kafka-1", "b" * 60)), max_size=4
).map("".join)
PREFIXES = NAMES.map(default_prefix) | st.text("a/0-", min_size=1, max_size=8)
"""A user may choose any prefix, one that looks like the beginning of an id too."""
TASKS = st.integers(0, 200)
SLOTS = st.integers(0, SLOT_COUNT - 1)
IDS = st.builds(PooledId, PREFIXES, NAMES, TASKS, SLOTS)
PARALLELISMS = st.lists(st.integers(1, 8), max_size=4)


@given(IDS)
def test_an_id_is_read_back_as_what_it_was_made_of(pooled: PooledId) -> None:
    assert parse(transactional_id(*pooled)) == pooled


@given(IDS, IDS)
def test_different_places_have_different_ids(one: PooledId, other: PooledId) -> None:
    """Two attempts never share one; nor do two sinks or two pipelines, and so their tokens."""
    assert (transactional_id(*one) == transactional_id(*other)) == (one == other)
    assert (token_group(str(one)) == token_group(str(other))) == (one == other)


def names_in_kafka(pipeline: str, sink: str, lineage: str) -> tuple[set[str], set[str]]:
    """Of one pipeline: its groups, and its transactional ids."""
    source = KafkaSource("host:9092", topics=["t"])
    own = default_prefix(pipeline)
    prefix = checkpoint_prefix(own, lineage)
    ids = {own, *(transactional_id(prefix, sink, task, slot) for task in (0, 1) for slot in (0, 1))}
    return {source.read_options(pipeline).group, *map(token_group, ids)}, ids


@given(PIPELINES, PIPELINES, st.booleans(), NAMES, NAMES)
def test_two_names_that_are_accepted_have_nothing_in_common(
    one: str, more: str, is_longer: bool, sink: str, lineage: str
) -> None:
    """Neither in Kafka nor in PostgreSQL nor in a folder, and no listing of one finds the other's.

    Their sinks and even their lineages may be called alike.
    """
    other = one + more if is_longer else more
    try:
        Pipeline(one), Pipeline(other)
        named = [names_in_kafka(owner, sink, lineage) for owner in (one, other)]
    except OptionError:
        return
    if one == other:
        return
    for mine, theirs in zip(*named, strict=True):
        assert not mine & theirs
    ids, prefix = named[1][1], checkpoint_prefix(default_prefix(one), lineage)
    assert not owned(ids, [default_prefix(one), prefix], [sink])
    owners = [Owner(pipeline, sink, lineage) for pipeline in (one, other)]
    texts = [
        (owner_prefix(owner), application_prefix(owner), hidden_folder(owner) + "/")
        for owner in owners
    ]
    for mine, theirs in zip(*texts, strict=True):
        assert not theirs.startswith(mine)
        assert not mine.startswith(theirs)


def test_a_name_that_ends_in_token_is_accepted_with_another_group() -> None:
    """So a checkpoint of that name can go on: its ids are as they were."""
    source = KafkaSource("host:9092", topics=["t"], group_id="tallystick-orders-token/positions")

    assert source.read_options("orders-token").group == "tallystick-orders-token/positions"


@given(st.text(max_size=20) | st.text("a/0-", max_size=12))
def test_whatever_a_cluster_lists_is_read_or_left_alone(listed: str) -> None:
    """Each id has one text: nothing else is taken for it."""
    read = parse(listed)

    assert read is None or str(read) == listed


@given(PREFIXES, st.sets(PREFIXES), NAMES, PARALLELISMS, st.data())
def test_all_that_a_sink_ever_opened_is_its_own_and_nothing_else(
    prefix: str, earlier: set[str], sink: str, parallelisms: list[int], data: st.DataObject
) -> None:
    """However often the pipeline grew and shrank, with no state of which epoch it was.

    Each run has a parallelism and a prefix that the pipeline uses then; it dies at any moment.
    """
    prefixes = earlier | {prefix}
    opened = set()
    for parallelism in parallelisms:
        chosen = data.draw(st.sampled_from(sorted(prefixes)))
        tasks = data.draw(st.sets(st.integers(0, parallelism - 1)))
        opened |= {transactional_id(chosen, sink, task, data.draw(SLOTS)) for task in tasks}
    foreign = {
        str(ident)
        for ident in data.draw(st.lists(IDS))
        if ident.prefix not in prefixes or ident.sink != sink
    }

    own = owned(opened | foreign, prefixes, [sink])

    assert {str(ident) for ident in own} == opened


def test_a_pipeline_does_not_own_the_ids_of_one_whose_name_begins_with_its_own() -> None:
    listed = [
        transactional_id(default_prefix(pipeline), sink, 0, 0)
        for pipeline, sink in [("a", "b-c"), ("a-b", "c"), ("a", "b"), ("a-b-c", "0")]
    ]

    assert len(set(listed)) == 4
    for name in listed:
        pipeline = name.split("/")[0]
        own = {str(ident) for ident in owned(listed, [pipeline], ["b-c", "b", "c", "0"])}
        assert own == {ident for ident in listed if ident.split("/")[0] == pipeline}
    assert owned(["tallystick-a", "tallystick-a-b-0-0", "a/b/00/0", "a/b/0/٣"], ["a"], ["b"]) == ()


def test_a_changed_prefix_is_given_and_then_owned() -> None:
    old = transactional_id("old", "out", 7, 1)

    assert owned([old], {"new"}, ["out"]) == ()
    assert owned([old], {"new", "old"}, ["out"]) == (PooledId("old", "out", 7, 1),)


def test_a_task_that_used_up_its_ids_says_so() -> None:
    assert [slot_of(attempt, 3) for attempt in range(SLOT_COUNT)] == list(range(SLOT_COUNT))
    with pytest.raises(OptionError, match=r"attempt 16 of task 3.*spark\.task\.maxFailures"):
        slot_of(SLOT_COUNT, 3)
