"""Arguments of a source mean the options that the docs explain, and nothing is said twice."""

import re
from datetime import UTC, datetime

import numpy as np
import pytest

import tallystick as ts
from tallystick.source.subscription import LATEST, AtCommitted, AtTime
from tallystick.values import TopicPartition

SERVERS = "host:9092"


def parsed(**settings):
    source = ts.KafkaSource(**{"bootstrap_servers": SERVERS, "topics": ["t"], **settings})
    return source.read_options("p")


def test_the_flags_of_a_pattern_come_along():
    options = parsed(topics=re.compile("flights-.*", re.I))

    assert options.subscription.covers(TopicPartition("Flights-x", 0))


def test_losses_and_values_become_options():
    options = parsed(
        losses=ts.LossPolicy(expired="skip", removed="keep", keep_ms=5),
        value=ts.Avro("a int", registry="http://user:secret@host:8081", mode="permissive"),
        metadata_prefix="k_",
    )

    assert options.policy == ts.LossPolicy(expired="skip", removed="keep", keep_ms=5)
    assert options.value == ts.Avro(
        "a int", registry="http://user:secret@host:8081", mode="permissive"
    )
    assert "secret" not in repr(options) + repr(ts.KafkaSource(SERVERS, topics=["t"]))
    assert options.metadata_prefix == "k_"
    assert parsed(value=ts.Text()).value == ts.Text()


def test_a_key_is_read_as_the_value_is_in_the_same_mode():
    avro = ts.Avro("a int", registry="http://user:secret@host:8081", mode="deadletter")
    options = parsed(value=ts.Json("b int", "deadletter"), key=avro, key_prefix="")

    assert (options.key, options.key_prefix) == (avro, "")
    assert options.value == ts.Json("b int", "deadletter")
    assert parsed(key=ts.Json("a int", "permissive")).value_mode == "permissive"
    assert parsed(key=ts.Json("a int")).key_prefix == "key_"
    with pytest.raises(ts.OptionError, match=r"expected ts\.Json"):
        parsed(key=ts.Text())
    with pytest.raises(ts.OptionError, match="a record has one mode"):
        parsed(value=ts.Text(), key=avro)


def test_json_schema_is_read_as_named_fields_or_as_a_subject_says():
    schema = ts.JsonSchema(
        registry="http://r", subject="s", user_info="u:secret", mode="permissive"
    )
    options = parsed(value=schema)

    assert (options.value, options.value_schema) == (schema, None)
    assert "secret" not in repr(options)
    assert parsed(value=ts.JsonSchema("a int")).value == ts.JsonSchema("a int")
    assert parsed(key=ts.JsonSchema("a int")).key == ts.JsonSchema("a int")
    for wrong in (
        ts.JsonSchema(),
        ts.JsonSchema("a int", registry="http://r"),
        ts.JsonSchema(registry="http://r"),
        ts.JsonSchema("a int", registry="http://r", register=True),
    ):
        with pytest.raises(ts.OptionError, match=r"JsonSchema\("):
            parsed(value=wrong)
    with pytest.raises(ts.OptionError, match="reading keys needs the schema="):
        parsed(key=schema)


def test_a_start_is_a_time_of_a_known_zone():
    at = datetime(2026, 11, 21, tzinfo=UTC)
    times = {"t": {1: at}}

    assert parsed(starting_time=at).start == AtTime(1_795_219_200_000, fallback=LATEST)
    strict = parsed(starting_time=at, starting_time_fallback="error")
    assert strict.start == AtTime(1_795_219_200_000)
    given = {"StartingOffsetsByTimestampStrategy": "error"}
    assert parsed(starting_time=at, options=given).start == strict.start
    assert parsed(starting_time=times).start.partitions == {
        TopicPartition("t", 1): 1_795_219_200_000
    }
    with pytest.raises(ts.OptionError, match="has no time zone"):
        parsed(starting_time=at.replace(tzinfo=None))


ARGUMENTS_AND_TEXTS = [
    ({"topics": ["a", "b", "a"]}, {"subscribe": "a, b"}),
    ({"topics": re.compile("a.*")}, {"subscribePattern": "a.*"}),
    ({"assignment": {"t": range(2), "a": (1,)}}, {"assign": '{"t": [0, 1], "a": [1]}'}),
    ({"starting_offsets": "Earliest"}, {"startingOffsets": "earliest"}),
    ({"starting_offsets": {"t": {0: 23, 1: -2}}}, {"startingOffsets": '{"t": {"0": 23, "1": -2}}'}),
    ({"starting_offsets": '{"t": {"0": 5}}'}, {"startingOffsets": '{"t": {"0": 5}}'}),
    ({"ending_offsets": {"t": {"0": np.int64(7)}}}, {"endingOffsets": '{"t": {"0": 7}}'}),
    (
        {"starting_time": datetime(1970, 1, 2, tzinfo=UTC), "starting_time_fallback": "error"},
        {"startingTimestamp": "86400000"},
    ),
    (
        {"starting_time": {"t": {3: datetime(1970, 1, 2, tzinfo=UTC)}}},
        {
            "startingOffsetsByTimestamp": '{"t": {"3": 86400000}}',
            "startingOffsetsByTimestampStrategy": "latest",
        },
    ),
    ({"max_offsets_per_trigger": "all"}, {"maxOffsetsPerTrigger": "all"}),
    ({"max_offsets_per_trigger": 7}, {"maxOffsetsPerTrigger": "7"}),
    ({"max_bytes_per_task": np.int32(8)}, {"maxBytesPerTask": "8"}),
    ({"min_partitions": 9}, {"minPartitions": "9"}),
    ({"headers": True}, {"includeHeaders": "true"}),
    (
        {"losses": ts.LossPolicy("skip", "keep", "restart", "resume", 5, "skip")},
        {
            "when.expired": "skip",
            "when.removed": "keep",
            "when.recreated": "restart",
            "when.truncated": "resume",
            "when.removed.keep.ms": "5",
            "when.unreadable": "skip",
        },
    ),
    ({"value": ts.Text("permissive")}, {"value.format": "string", "value.mode": "permissive"}),
    (
        {"value": ts.Json("a int"), "metadata_prefix": "k_"},
        {"value.format": "json", "value.schema": "a int", "metadata.prefix": "k_"},
    ),
    (
        {"value": ts.Avro("a int", schemas="here.json", name_column="type")},
        {
            "value.format": "avro",
            "value.schema": "a int",
            "value.registry.file": "here.json",
            "value.name.column": "type",
        },
    ),
    (
        {"key": ts.Avro("a int", schemas="here.json", mode="dropmalformed"), "key_prefix": "k_"},
        {
            "key.format": "avro",
            "key.schema": "a int",
            "key.registry.file": "here.json",
            "value.mode": "dropmalformed",
            "key.prefix": "k_",
        },
    ),
    (
        {"value": ts.JsonSchema(registry="http://r", subject="s", user_info="u:p", ca="here.pem")},
        {
            "value.format": "json_schema",
            "value.registry.url": "http://r",
            "value.registry.subject": "s",
            "value.registry.user.info": "u:p",
            "value.registry.ca": "here.pem",
        },
    ),
]


@pytest.mark.parametrize(("settings", "texts"), ARGUMENTS_AND_TEXTS)
def test_an_argument_means_what_its_option_means_as_a_text(settings, texts):
    names_topics = bool({"subscribe", "subscribePattern", "assign"} & texts.keys())
    topics = {"topics": None} if names_topics else {}

    assert parsed(**{**({"topics": None} if "assignment" in settings else {}), **settings}) == (
        parsed(**topics, options=texts)
    )


def test_options_complete_what_no_argument_says():
    avro = ts.Avro("a int", registry="http://r")
    login = {"value.registry.user.info": "u:secret", "value.registry.ca": "here.pem"}
    group = {"committed.fallback": "latest", "failOnDataLoss": "false", "includeHeaders": "true"}
    options = parsed(
        value=avro,
        starting_offsets="committed",
        losses=ts.LossPolicy(removed="keep"),
        options={**login, **group},
    )

    assert options.value == ts.Avro(
        "a int", registry="http://r", user_info="u:secret", ca="here.pem"
    )
    assert options.start == AtCommitted("tallystick-p", LATEST)
    assert (options.policy.removed, options.policy.expired) == ("keep", "skip")
    assert options.headers
    texts = {"value.format": "json", "value.schema": "b int"}
    assert parsed(key=ts.Json("a int", "permissive"), options=texts).value_mode == "permissive"
    for name in ("value.schema", "value.registry.url", "value.mode", "Value.Registry.File"):
        with pytest.raises(ts.OptionError, match="is set by an argument already"):
            parsed(value=avro, options={name: "permissive"})
    with pytest.raises(ts.OptionError, match="is set by an argument already"):
        parsed(value=ts.Json("a int"), options=login)


def test_the_group_is_the_pipelines_own_unless_named_or_switched_off():
    assert parsed().group == "tallystick-p"
    assert parsed(group_id="billing").group == "billing"
    assert parsed(group_id="").shown_group == ""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"topics": "flights"}, "expected a list"),
        ({"topics": re.compile(b"f")}, "expected a pattern of text"),
        ({"options": {"SUBSCRIBE": "u"}}, "set by an argument already"),
        ({"options": {"kafka.bootstrap.servers": "other:9092"}}, "set by an argument already"),
        ({"options": {"partition.discovery": "1"}}, "Did you mean 'partition.discovery.interval"),
        ({"assignment": {}, "topics": None}, "names no partition"),
        ({"assignment": {"t": "01"}, "topics": None}, "assignment['t']='01'): expected a list"),
        ({"topics": []}, "topics=[]: names no topic: expected e.g. ['flights', 'orders']"),
        ({"topics": ["a b"]}, "topics: 'a b': expected a topic's name"),
        ({"starting_offsets": "first"}, "starting_offsets='first': expected"),
        (
            {"starting_offsets": {"t": {0: 1.5}}},
            "starting_offsets['t'][0]=1.5): expected",
        ),
        ({"starting_offsets": {"t": {True: 1}}}, "expected"),
        ({"starting_offsets": {"t": {0: -3}}}, "-2 (earliest) or -1 (latest)"),
        ({"ending_offsets": {"t": {-1: 3}}}, "numbered from 0"),
        ({"max_offsets_per_trigger": 0}, "max_offsets_per_trigger=0: expected a whole number from"),
        ({"max_bytes_per_task": True}, "max_bytes_per_task=True): expected a whole number"),
        ({"min_partitions": 1.5}, "min_partitions=1.5): expected a whole number"),
        ({"headers": 1}, "headers=1): expected True or False"),
        ({"value": "json"}, "value='json'): expected ts.Json(…)"),
        (
            {"starting_time": datetime(1969, 1, 1, tzinfo=UTC)},
            "starting_time=-31536000000: expected a whole number from 0 (milliseconds)",
        ),
        (
            {"starting_time": datetime(2026, 1, 1, tzinfo=UTC), "starting_time_fallback": "no"},
            "starting_time_fallback='no'): expected 'latest' or 'error'",
        ),
        ({"bootstrap_servers": ""}, "KafkaSource(bootstrap_servers=''): expected brokers"),
        ({"metadata_prefix": "k_"}, "becomes one"),
        ({"value": ts.Json()}, "reading needs a schema"),
        ({"group_id": "tallystick-orders-token"}, "pipeline 'orders' keeps its token"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once(settings, message):
    with pytest.raises(ts.OptionError, match=re.escape(message)):
        parsed(**settings)
