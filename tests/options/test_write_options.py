"""What users type wrong after `writeStream`, and what they are told."""

from collections.abc import Mapping

import pytest

from tallystick.codec.formats import Json
from tallystick.errors import OptionError
from tallystick.options.sink import (
    SINK,
    WriteOptions,
    parse_batch_write_options,
    parse_write_options,
)
from tallystick.options.table import Option

GOOD = {
    "kafka.bootstrap.servers": "host:9092",
    "topic": "counts",
    "checkpointLocation": "/checkpoints/counts",
}


def parse(changed: Mapping[str, str]) -> WriteOptions:
    """Good options, changed; an empty text takes one away."""
    options = {**GOOD, **changed}
    return parse_write_options({name: text for name, text in options.items() if text})


def test_names_are_understood_in_any_case_and_sparks_own_are_taken() -> None:
    options = parse(
        {
            "queryName": "counts",
            "VALUE.FORMAT": "JSON",
            "key.field": "dest",
            "transaction.timeout.ms": "60000",
            "max.recovery.time.ms": "30000",
            "kafka.security.protocol": "SSL",
            "accept": "lost-output-of-epoch-7, another",
        }
    )

    assert options.query_name == "counts"
    assert options.checkpoint == "/checkpoints/counts"
    output = options.output
    assert (output.value, output.key) == (Json(), "dest")
    assert (output.transaction_timeout_ms, output.max_recovery_ms) == (60_000, 30_000)
    assert output.config.bootstrap_servers == "host:9092"
    assert output.config.security_protocol == "SSL"
    assert options.accepted == {"lost-output-of-epoch-7", "another"}
    assert output.token_topic == "counts"


@pytest.mark.parametrize("option", SINK.options, ids=lambda option: option.name)
def test_every_option_of_the_table_is_understood(option: Option) -> None:
    """Its example changes something, so it is not passed over."""
    others = {"topic": "all", **({"value.format": "json"} if option.name == "key.field" else {})}

    assert parse({**others, option.name: option.example}) != parse(others)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"compresion": "lz4"}, "did you mean 'compression'"),
        (
            {"subscribe": "flights"},
            "unknown option 'subscribe' of the tallystick sink: known: topic",
        ),
        ({"path": "counts"}, "unknown option 'path'"),
        ({"kafka.bootstrap.servers": ""}, "kafka.bootstrap.servers is missing"),
        ({"kafka.group.id": "billing"}, "kafka.group.id is for reading"),
        ({"checkpointLocation": ""}, "checkpointLocation is missing.*Name it on the query"),
        ({"topic": ""}, "token.topic has to name an existing topic"),
        ({"topic": " "}, "topic=' ': expected a topic's name"),
        ({"value.format": "avro"}, "value.format='avro': expected one of raw, json"),
        ({"key.field": "dest"}, "names a column for value.format=json"),
        ({"compression": "brotli"}, "compression='brotli': expected one of none, gzip"),
        ({"batch.bytes": "10"}, "batch.bytes='10': expected a whole number from 1024"),
        ({"transaction.timeout.ms": "1m"}, "transaction.timeout.ms='1m': expected a whole number"),
        ({"guarantee": "none", "max.recovery.time.ms": "9"}, "is for guarantee=exactly_once"),
        ({"guarantee": "at_most_once"}, "expected one of exactly_once, at_least_once, none"),
    ],
)
def test_what_cannot_work_is_refused(changed: dict[str, str], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        parse(changed)


def test_secrets_are_not_shown() -> None:
    secret = {
        "kafka.sasl.password": "hunter2",
        "checkpointLocation": "s3://key:hunter2@bucket/counts",
    }

    assert "hunter2" not in repr(parse(secret))


def test_a_batch_takes_what_is_not_for_streams() -> None:
    servers = {"kafka.bootstrap.servers": "host:9092"}
    taken = {each.name: each.example for each in SINK.options if each.only != "stream"}

    options = parse_batch_write_options({**servers, **taken, "value.format": "json"})

    assert options.id_prefix == "billing-counts"
    assert options.output.topic == "counts"
    assert options.output.transaction_timeout_ms == 600_000
    assert parse_batch_write_options(servers).output.topic is None  # rows name their topics
    for option in SINK.options:
        if option.only == "stream":
            with pytest.raises(OptionError, match=f"{option.name} means nothing for df.write"):
                parse_batch_write_options({**servers, option.name: option.example})
