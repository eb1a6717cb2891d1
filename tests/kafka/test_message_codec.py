"""Our codec of Kafka's messages beside kafka-python's, which is made of the same schemas."""

import random
import struct
import uuid
from functools import cache
from importlib import import_module
from typing import Any

import pytest

from tallystick.kafka import messages, protocol
from tallystick.testing.jars import jar_folder
from tests.kafka import message_schemas

PLACES = ("admin", "consumer", "metadata", "producer", "sasl")
VALUES_PER_VERSION = 12
VERSIONS = [
    (name, version)
    for name, kind in protocol.REQUESTS.items()
    for version in range(kind.versions[0], kind.versions[1] + 1)
]
BITS = "authorized_operations"
"""The peer gives these names of its own, and makes sets of them: they have their defaults here."""
TEXTS = ("", "orders", "é\U0001f600", "x" * 200)


@cache
def peer(name: str) -> Any:
    """The class of kafka-python."""
    modules = [import_module(f"kafka.protocol.{place}") for place in PLACES]
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def random_fields(kind: type[messages.Message], version: int, draw: random.Random) -> dict:
    return {
        field.name: random_value(field, version, draw)
        for field in kind.fields
        if field.is_in(version) and not field.name.endswith(BITS)
    }


def random_value(field: messages.Field, version: int, draw: random.Random) -> Any:
    if version in field.nullable and draw.random() < 0.2:
        return None
    if field.is_array:
        sizes = (0, 1, 2) if field.struct is not None else (0, 1, 2, 130)
        return [random_item(field, version, draw) for _ in range(draw.choice(sizes))]
    return random_item(field, version, draw)


def random_item(field: messages.Field, version: int, draw: random.Random) -> Any:
    if field.struct is not None:
        return field.struct(**random_fields(field.struct, version, draw))
    if field.kind == "bool":
        return draw.random() < 0.5
    if field.kind in messages.NUMBERS:
        width = struct.calcsize(messages.NUMBERS[field.kind]) * 8
        low = 0 if field.kind.startswith("u") else -(1 << width - 1)
        return draw.choice((0, 1, low, low + (1 << width) - 1))
    if field.kind == "string":
        return draw.choice(TEXTS)
    if field.kind == "uuid":
        return uuid.UUID(int=draw.getrandbits(128))
    return draw.randbytes(draw.choice((0, 1, 127, 128, 20_000)))


def as_peer(message: messages.Message, version: int, kind: Any) -> Any:
    """The same message as an object of kafka-python."""
    values = {}
    for field in message.fields:
        if not field.is_in(version) or field.name.endswith(BITS):
            continue
        value = getattr(message, field.name)
        if field.struct is not None and value is not None:
            nested = getattr(kind, field.kind)
            items = value if field.is_array else [value]
            peers = [as_peer(item, version, nested) for item in items]
            value = peers if field.is_array else peers[0]
        values[field.name] = value
    return kind(**values)


def plain(message: Any, fields: Any, version: int) -> Any:
    """The values of a message, ours or the peer's."""
    values = {}
    for field in fields:
        if not field.is_in(version) or field.name.endswith(BITS):
            continue
        value = getattr(message, field.name)
        if field.struct is not None and value is not None:
            items = value if field.is_array else [value]
            value = [plain(item, field.struct.fields, version) for item in items]
        elif isinstance(value, memoryview):
            value = bytes(value)
        values[field.name] = value
    return values


@pytest.mark.parametrize(("name", "version"), VERSIONS)
def test_requests_and_answers_are_the_bytes_of_an_independent_codec(name, version):
    """Both ways, for all versions of all messages that we speak, with random values."""
    request = protocol.REQUESTS[name]
    since, draw = request.flexible_since, random.Random(f"{name} {version}")
    for kind in (request, request.response):
        theirs = peer(kind.__name__)
        for _ in range(VALUES_PER_VERSION):
            values = random_fields(kind, version, draw)
            message = kind(**values)
            other = as_peer(message, version, theirs)
            other.API_VERSION = version
            expected = bytes(other.encode(framed=False, header=False))

            data = b"".join(messages.encode(message, version, since))
            decoded = messages.decode(kind, version, since, memoryview(data))

            assert data == expected
            assert plain(decoded, kind.fields, version) == plain(message, kind.fields, version)
            if kind.__name__ == "ApiVersionsResponse" and message.error_code:
                continue  # the peer takes any refusal for one in version 0
            peers = theirs.decode(data, version=version)
            assert plain(peers, kind.fields, version) == plain(message, kind.fields, version)


@pytest.mark.parametrize(("name", "version"), VERSIONS)
def test_damaged_answers_are_refused_or_read_and_nothing_else(name, version):
    request = protocol.REQUESTS[name]
    draw = random.Random(f"damage {name} {version}")
    sent = protocol.SentRequest(7, request, version)
    header = b"\0\0\0\x07"
    if version >= request.flexible_since and name != "ApiVersionsRequest":
        header += b"\0"
    values = random_fields(request.response, version, draw)
    body = messages.encode(request.response(**values), version, request.flexible_since)
    data = bytearray(header + b"".join(body))
    protocol.decode_response(sent, memoryview(bytes(data)))
    for _ in range(100):
        bad = bytearray(data)
        for _ in range(draw.choice((1, 3))):
            bad[draw.randrange(len(bad))] = draw.choice((0, 1, 127, 128, 255))
        cut = draw.choice((len(bad), draw.randrange(len(bad))))
        try:
            protocol.decode_response(sent, memoryview(bytes(bad[:cut])))
        except ConnectionError:
            continue


def test_a_value_that_a_version_cannot_hold_is_not_lost_in_silence():
    request = protocol.REQUESTS["FindCoordinatorRequest"]
    several = request(key_type=1, coordinator_keys=["a", "b"])

    with pytest.raises(ValueError, match="version 3 cannot hold coordinator_keys"):
        messages.encode(several, 3, request.flexible_since)


def test_a_null_that_the_schema_does_not_have_is_refused():
    request = protocol.REQUESTS["MetadataRequest"]
    sent = protocol.SentRequest(1, request, 12)
    no_brokers = b"\0\0\0\x01" + b"\0" + b"\0\0\0\0" + b"\0"  # header, throttle, brokers: null

    with pytest.raises(ConnectionError, match="cannot be read"):
        protocol.decode_response(sent, memoryview(no_brokers))


def test_of_many_structures_of_numbers_only_those_that_are_read_are_made():
    """A count before a commit looks at its own producer's, whoever else writes to the topic."""
    request = protocol.REQUESTS["DescribeProducersRequest"]
    part_class = request.response.TopicResponse.PartitionResponse
    states = [part_class.ProducerState(producer_id=n % 500, last_sequence=n) for n in range(2000)]
    topic = request.response.TopicResponse(
        name="t", partitions=[part_class(partition_index=0, active_producers=states)]
    )
    data = b"".join(messages.encode(request.response(topics=[topic]), 0, 0))

    ((read,),) = [
        topic_data.partitions
        for topic_data in messages.decode(request.response, 0, 0, memoryview(data)).topics
    ]
    rows = read.active_producers

    assert isinstance(rows, messages.Rows)
    assert [row.last_sequence for row in rows.where("producer_id", 7)] == [7, 507, 1007, 1507]
    assert [row.last_sequence for row in rows] == list(range(2000))
    assert rows[-1].producer_id == 499
    assert [row.last_sequence for row in rows[3:5]] == [3, 4]
    assert len(rows) == 2000


def test_unknown_fields_are_named():
    with pytest.raises(TypeError, match="EndTxnRequest has no field comitted"):
        protocol.EndTxnRequest(comitted=True)


@pytest.mark.broker
def test_the_schemas_are_those_of_kafkas_own_jar(tallystick_kafka):
    """The jar of the embedded broker has them; `messages.json` is made of nothing else."""
    jar = jar_folder("4.3.0") / "kafka-clients-4.3.0.jar"
    text = message_schemas.text_of(message_schemas.schemas(jar))

    assert text == message_schemas.TARGET.read_text()
