"""What users type wrong, and what they are told."""

import pytest

from tallystick.errors import OptionError
from tallystick.options import (
    EARLIEST,
    LATEST,
    Assignment,
    OffsetSpec,
    TopicList,
    TopicPattern,
    parse_source_options,
)
from tallystick.topic_partition import TopicPartition

GOOD = {"kafka.bootstrap.servers": "host:9092", "subscribe": "flights"}


def parse(streaming=True, **changed):
    options = {**GOOD, **{name.replace("__", "."): value for name, value in changed.items()}}
    return parse_source_options({n: v for n, v in options.items() if v}, streaming=streaming)


def test_the_names_of_sparks_connector_are_understood_in_any_case():
    options = parse(STARTINGOFFSETS="earliest", maxoffsetspertrigger="10", IncludeHeaders="TRUE")

    assert options.subscription == TopicList(("flights",))
    assert options.starting_offsets == OffsetSpec(EARLIEST)
    assert options.offset_count_max == 10
    assert options.headers


def test_a_stream_starts_at_latest_and_a_batch_at_earliest_as_in_spark():
    assert parse(streaming=True).starting_offsets.default == LATEST
    assert parse(streaming=False).starting_offsets.default == EARLIEST


def test_offsets_are_given_per_partition_with_sparks_markers():
    options = parse(startingOffsets='{"flights": {"0": 23, "1": -2, "2": -1}}')

    assert options.starting_offsets.partitions == {
        TopicPartition("flights", 0): 23,
        TopicPartition("flights", 1): EARLIEST,
        TopicPartition("flights", 2): LATEST,
    }


def test_patterns_and_assignments_are_subscriptions_too():
    assert parse(subscribe="", subscribePattern="f.*").subscription == TopicPattern("f.*")
    assert parse(subscribe="", assign='{"f": [1, 0]}').subscription == Assignment(
        (TopicPartition("f", 0), TopicPartition("f", 1))
    )


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"startingOfsets": "earliest"}, "did you mean 'startingOffsets'"),
        ({"kafka__bootstrap__servers": ""}, "kafka.bootstrap.servers is missing"),
        ({"subscribe": ""}, "exactly one of subscribe, subscribePattern, assign; found none"),
        ({"assign": '{"f": [0]}'}, "found subscribe, assign"),
        ({"subscribe": " , "}, "names no topic"),
        ({"subscribe": "", "subscribePattern": "("}, "no regular expression"),
        ({"subscribe": "", "assign": "[1]"}, "expected {"),
        ({"startingOffsets": "first"}, "'first': expected"),
        ({"startingOffsets": '{"flights": {"0": -3}}'}, "-2 (earliest) or -1 (latest)"),
        ({"startingOffsets": '{"flights": {"x": 3}}'}, "expected"),
        ({"maxOffsetsPerTrigger": "0"}, "a whole number from 1"),
        ({"maxOffsetsPerTrigger": "many"}, "a whole number from 1"),
        ({"includeHeaders": "yes"}, "expected true or false"),
        ({"endingOffsets": "latest"}, "endingOffsets is for spark.read"),
        ({"value__format": "xml"}, "expected one of raw, json"),
        ({"value__format": "json"}, "needs value.schema"),
        ({"value__schema": "a int"}, "needs value.format=json"),
    ],
)
def test_a_wrong_option_is_named_with_the_way_out(changed, told):
    with pytest.raises(OptionError) as raised:
        parse(**changed)
    assert told in str(raised.value)


def test_secrets_are_not_in_the_repr():
    jaas = 'ScramLoginModule required username="u" password="hunter2-secret";'
    options = parse(**{"kafka.sasl.jaas.config": jaas})

    assert "hunter2-secret" not in repr(options)
    assert options.client["sasl.jaas.config"] == jaas
