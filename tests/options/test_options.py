"""What users type wrong, and what they are told."""

from pathlib import Path

import pytest

from tallystick.errors import OptionError
from tallystick.kafka import java_settings
from tallystick.kafka.java_settings import say_passed_over
from tallystick.options.source import (
    OFFSETS_MAX,
    PASSED_OVER,
    SOURCE,
    WITH_SCHEMA,
    parse_source_options,
)
from tallystick.source.subscription import (
    EARLIEST,
    LATEST,
    LENIENT,
    Assignment,
    AtCommitted,
    AtOffsets,
    AtTime,
    LossPolicy,
    TopicList,
    TopicPattern,
)
from tallystick.values import TopicPartition

GOOD = {"kafka.bootstrap.servers": "host:9092", "subscribe": "flights"}


def parse(streaming=True, **changed):
    options = {**GOOD, **{name.replace("__", "."): value for name, value in changed.items()}}
    return parse_source_options({n: v for n, v in options.items() if v}, streaming=streaming)


@pytest.mark.parametrize("word", WITH_SCHEMA)
def test_the_word_of_a_format_means_its_class(word):
    has_registry = word in ("avro", "protobuf")
    registry = {"value__registry__url": "http://registry:8081"} if has_registry else {}
    options = parse(value__format=word, value__schema="a int", **registry)

    assert type(options.value).__name__.lower() == word.replace("_", "")


def test_the_names_of_sparks_connector_are_understood_in_any_case():
    options = parse(STARTINGOFFSETS="earliest", maxoffsetspertrigger="10", IncludeHeaders="TRUE")

    assert options.subscription == TopicList(("flights",))
    assert options.start == AtOffsets(EARLIEST)
    assert options.offset_count_max == 10
    assert options.headers


def test_a_stream_starts_at_latest_and_a_batch_at_earliest_as_in_spark():
    assert parse(streaming=True).start.default == LATEST
    assert parse(streaming=False).start.default == EARLIEST


def test_offsets_are_given_per_partition_with_sparks_markers():
    options = parse(startingOffsets='{"flights": {"0": 23, "1": -2, "2": -1}}')

    assert options.start.partitions == {
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
    ("changed", "words"),
    [
        ({"startingOfsets": "earliest"}, "Did you mean 'startingOffsets'"),
        ({"kafka__bootstrap__servers": ""}, "kafka.bootstrap.servers is missing"),
        ({"subscribe": ""}, "exactly one of subscribe, subscribePattern, assign; found none"),
        ({"assign": '{"f": [0]}'}, "found subscribe, assign"),
        ({"subscribe": " , "}, "names no topic"),
        ({"subscribe": "", "subscribePattern": "("}, "no regular expression"),
        ({"subscribe": "", "assign": "[1]"}, "expected {"),
        ({"startingOffsets": "first"}, "'first': expected"),
        ({"startingOffsets": '{"flights": {"0": -3}}'}, "-2 (earliest) or -1 (latest)"),
        ({"startingOffsets": '{"flights": {"x": 3}}'}, "expected"),
        ({"startingOffsets": '{"flights": {"-1": 3}}'}, "numbered from 0"),
        ({"maxOffsetsPerTrigger": "0"}, "a whole number from 1, or 'all'"),
        ({"maxOffsetsPerTrigger": "many"}, "a whole number from 1"),
        ({"includeHeaders": "yes"}, "expected true or false"),
        ({"metadata.columns": "key,ofset"}, "'ofset' is none of key, topic"),
        ({"endingOffsets": "earliest"}, "would read nothing"),
        ({"value__format": "xml"}, "expected one of raw, string, json, avro, json_schema"),
        ({"value__format": "json"}, "needs value.schema"),
        ({"value__schema": "a int"}, "needs value.format=json, avro or protobuf"),
        ({"value__format": "avro", "value__schema": "a int"}, "set either registry"),
        ({"value__registry__url": "http://r"}, "needs no registry"),
        (
            {"value__format": "json", "value__schema": "a int", "value.name.column": "type"},
            "value.name.column is for value.format=avro",
        ),
        ({"key__format": "string"}, "expected one of raw, json, avro, json_schema"),
        ({"key__format": "json"}, "needs key.schema"),
        ({"value__format": "json_schema"}, "needs value.schema"),
        (
            {
                "value__format": "json_schema",
                "value__schema": "a int",
                "value.registry.url": "http://r",
            },
            "needs no registry and no subject",
        ),
        (
            {"value__format": "json_schema", "value.registry.subject": "t"},
            "or registry= and subject=",
        ),
        ({"key__schema": "a int"}, "needs key.format=json, avro or protobuf"),
        ({"key__format": "avro", "key__schema": "a int"}, "set either registry"),
        ({"key__registry__url": "http://r"}, "key.format=raw needs no registry"),
        ({"key__prefix": "k"}, "key.prefix is for a key.format"),
        (
            {"key__format": "json", "key__schema": "a int", "metadata.columns": "offset"},
            "which metadata.columns leaves out",
        ),
        ({"subscribe": "", "assign": "{}"}, "names no partition"),
        ({"subscribe": "", "assign": '{"f": "01"}'}, "expected {"),
        ({"startingOffsets": '{"flights": {"0": 1.7}}'}, "expected"),
        ({"startingOffsetsByTimestampStrategy": "latest"}, "is for startingTimestamp and"),
        ({"startingTimestamp": "5", "committed__fallback": "latest"}, "is for startingOffsets=com"),
        ({"value__mode": "permissive"}, "raw takes any bytes"),
        ({"metadata__prefix": "k_"}, "becomes one: remove it"),
        ({"startingOffsets": "committed"}, "Name the group in kafka.group.id"),
        ({"committed__fallback": "latest"}, "is for startingOffsets=committed"),
        ({"startingOffsets": "latest", "startingTimestamp": "5"}, "contradict each other"),
        ({"startingTimestamp": "yesterday"}, "expected a whole number from 0"),
        ({"startingOffsetsByTimestamp": '{"flights": {"0": -5}}'}, "expected ms since 1970"),
        (
            {"startingTimestamp": "5", "startingOffsetsByTimestampStrategy": "earliest"},
            "expected one of error, latest",
        ),
        ({"maxTriggerDelay": "soon"}, "expected a duration such as 500ms"),
        ({"when__expired": "drop"}, "expected one of fail, skip"),
        ({"partition__discovery__interval__ms": "5m"}, "expected a whole number"),
    ],
)
def test_a_wrong_option_is_named_with_the_way_out(changed, words):
    with pytest.raises(OptionError) as raised:
        parse(**changed)
    assert words in str(raised.value)


def test_a_start_can_be_a_time_or_what_a_group_committed():
    one = parse(startingTimestamp="1700000000000")
    options = parse(
        startingOffsetsByTimestamp='{"flights": {"1": 7}}',
        startingOffsetsByTimestampStrategy="latest",
    )
    group = {"kafka.group.id": "g", "startingOffsets": "committed", "committed.fallback": "latest"}

    assert one.start == AtTime(1_700_000_000_000)
    assert options.start == AtTime(None, {TopicPartition("flights", 1): 7}, LATEST)
    assert parse(**group).start == AtCommitted("g", LATEST)


def test_a_stream_has_an_end_only_when_told_and_a_batch_always():
    assert parse().stop is None
    assert parse(endingOffsets='{"flights": {"0": 5}}').stop.partitions
    assert parse(streaming=False).stop == AtOffsets(LATEST)


def test_fail_on_data_loss_is_short_for_four_choices_and_a_longer_one_wins():
    assert parse().policy == LossPolicy()
    assert parse(failOnDataLoss="false").policy == LENIENT
    mixed = parse(failOnDataLoss="false", when__recreated="fail").policy
    assert (mixed.recreated, mixed.expired) == ("fail", "skip")


def test_the_group_is_shown_unless_that_is_switched_off():
    group = {"kafka.group.id": "g"}

    assert parse(**group).shown_group == "g"
    assert parse(**group, commit__offsets__on__checkpoint="false").shown_group == ""


def test_a_batch_that_starts_at_the_end_is_a_mistake():
    with pytest.raises(OptionError, match="would read nothing in a batch"):
        parse(streaming=False, startingOffsets="latest")


def test_an_option_of_streams_means_nothing_for_a_batch():
    with pytest.raises(OptionError, match=r"maxOffsetsPerTrigger means nothing for spark\.read"):
        parse(streaming=False, maxOffsetsPerTrigger="5")


@pytest.mark.parametrize("option", SOURCE.options, ids=lambda option: option.name)
def test_the_example_of_every_option_changes_something(option):
    """With what else it needs: the page "Reading from Kafka" shows these examples."""
    json = {"value.format": "json", "value.schema": "a int"}
    avro = {"value.format": "avro", "value.schema": "a int"}
    registry = {**avro, "value.registry.url": "http://host:8081"}
    key_json = {"key.format": "json", "key.schema": "a int"}
    key_avro = {"key.format": "avro", "key.schema": "a int"}
    key_registry = {**key_avro, "key.registry.url": "http://host:8081"}
    needed = {
        "startingOffsetsByTimestampStrategy": {"startingTimestamp": "5"},
        "committed.fallback": {"startingOffsets": "committed", "kafka.group.id": "g"},
        "value.mode": json,
        "metadata.prefix": json,
        "value.registry.user.info": registry,
        "value.registry.ca": registry,
        "value.name.column": registry,
        "key.prefix": key_json,
        "key.registry.user.info": key_registry,
        "key.registry.ca": key_registry,
        "key.name.column": key_registry,
    }.get(option.name, {})
    instead = {  # means nothing without the option
        "assign": {"subscribe": ""},
        "subscribePattern": {"subscribe": ""},
        "value.format": {"value.schema": "a int"},
        "value.schema": {"value.format": "json"},
        "value.registry.url": avro,
        "value.registry.file": avro,
        "value.registry.subject": {
            "value.format": "json_schema",
            "value.registry.url": "http://host:8081",
        },
        "key.format": {"key.schema": "a int"},
        "key.schema": {"key.format": "json"},
        "key.registry.url": key_avro,
        "key.registry.file": key_avro,
    }.get(option.name, {})

    assert parse(**needed, **instead, **{option.name: option.example}) != parse(**needed)


def test_secrets_are_not_in_the_repr():
    jaas = 'ScramLoginModule required username="u" password="hunter2-secret";'
    options = parse(**{"kafka.sasl.jaas.config": jaas})

    assert "hunter2-secret" not in repr(options)
    assert options.config.sasl_password == "hunter2-secret"


def test_epochs_are_bounded_unless_all_is_asked_for():
    assert parse().offset_count_max == OFFSETS_MAX
    assert parse(maxOffsetsPerTrigger="All").offset_count_max is None
    for limit, count in ((None, OFFSETS_MAX), ("all", None), ("7", 7)):
        own = {**GOOD} if limit is None else {**GOOD, "MAXOFFSETSPERTRIGGER": limit}
        options = parse_source_options(own)
        assert (options.offset_count_max, options.is_bounded) == (count, limit is not None)
        assert options.own_count_max == (7 if limit == "7" else None)
        assert options.takes_all == (limit == "all")


@pytest.mark.parametrize(
    "name", [*PASSED_OVER, *(f"kafka.{passed_over}" for passed_over in java_settings.PASSED_OVER)]
)
def test_what_only_tunes_another_connector_is_passed_over_with_a_warning(name, caplog):
    say_passed_over.cache_clear()

    assert parse(**{name.upper(): "7"}) == parse()
    assert [name in record.getMessage() for record in caplog.records] == [True]


def test_the_docs_name_what_is_passed_over():
    page = Path("docs/reading-from-kafka.md").read_text()
    section = page.partition('## Coming from `format("kafka")`')[2].partition("\n## ")[0]
    for name in PASSED_OVER:
        assert f"`{name}`" in section


def test_a_setting_that_has_one_value_here_may_be_written_down():
    assert parse(**{"kafka.isolation.level": "read_committed", "kafka.acks": "-1"}) == parse()
    with pytest.raises(OptionError, match=r"level is 'read_uncommitted': it must be one"):
        parse(**{"kafka.isolation.level": "read_uncommitted"})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("kafka.auto.offset.reset", "use startingOffsets"),
        ("kafka.interceptor.classes", "no Java class can run here"),
        ("kafka.ssl.cipher.suites", "OPENSSL_CONF"),
        ("kafka.ssl.truststore.passwort", "is no option that Tallystick knows"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_to_do_instead(name, words):
    with pytest.raises(OptionError, match=words):
        parse(**{name: "x"})
