"""Arguments of a source mean the options that the docs explain, and nothing is said twice."""

import re
from datetime import UTC, datetime

import pytest

import tallystick as ts
from tallystick.source.subscription import LATEST, AtTime
from tallystick.values import TopicPartition

SERVERS = "host:9092"


def parsed(**settings):
    source = ts.KafkaSource(SERVERS, **{"topics": ["t"], **settings})
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
    with pytest.raises(ts.OptionError, match="expected Json"):
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
        ({"options": {"partition.discovery": "1"}}, "did you mean 'partition.discovery.interval"),
        ({"assignment": {}, "topics": None}, "names no partition"),
        ({"metadata_prefix": "k_"}, "becomes one"),
        ({"value": ts.Json()}, "reading needs a schema"),
        ({"group_id": "tallystick-orders-token"}, "pipeline 'orders' keeps its token"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once(settings, message):
    with pytest.raises(ts.OptionError, match=re.escape(message)):
        parsed(**settings)
