"""Bytes that once did harm: another error than ours, a hang, or the end of the process."""

import importlib
import json
import struct
import sys
import zlib

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from tallystick.epoch.manifest import seal
from tallystick.errors import ManifestError
from tallystick.kafka import protocol
from tallystick.state.pyspark.values import struct_from_text
from tests.fuzz import stored
from tests.fuzz.child import run_case
from tests.fuzz.decoders import DECODERS
from tests.kafka.fake_broker import payload_of

TOKEN = {"tallystick": 1, "lineage": "l", "checkpoint": "c", "manifest": "m"}
DEEP = "[" * 100_000 + "]" * 100_000
SOURCE = json.loads(stored.sources_text())
FILES = json.loads(stored.files_committable().details)
POSTGRES = json.loads(stored.postgres_committable().details)
KAFKA = json.loads(stored.kafka_committable().details)
COMMITTABLES = json.loads(stored.manifests()[0].split(b"\n")[0])["committables"]
REGISTERED = {"schema": "x", "id": 3}
REFERENCES = {
    "type": "object",
    "properties": {"id": {"$ref": "#/$defs/d0"}},
    "$defs": {
        f"d{number}": {
            "type": "object",
            "properties": {name: {"$ref": f"#/$defs/d{number + 1}"} for name in "ab"},
        }
        for number in range(40)
    }
    | {"d40": {}},
}


RECORD = {"type": "record", "name": "r"}
HALF_A_CHARACTER = {"type": "enum", "name": "n", "symbols": ["\ud800"]}


def with_decimal(precision: int, scale: int) -> dict[str, object]:
    kind = f"decimal({precision},{scale})"
    return {"type": "struct", "fields": [{"name": "d", "type": kind, "nullable": True}]}


def forged_manifest(**changed: object) -> bytes:
    header = json.loads(stored.manifests()[0].split(b"\n")[0])
    return seal(header.pop("version"), header | changed)


FOUND: list[tuple[str, object]] = [
    *(("token", TOKEN | {"takeovers": takeovers}) for takeovers in (float("inf"), -1, "x")),
    *(("token", TOKEN | {name: None}) for name in ("lineage", "checkpoint", "manifest")),
    *((name, DEEP) for name in ("token", "token of a task", "lineage", "source offsets")),
    *((f"details of {name}", DEEP) for name in ("PostgreSQL", "files", "Kafka")),
    *(("details of " + name, "no JSON") for name in ("PostgreSQL", "Kafka")),
    ("token of a task", {"lineage": "l", "nonce": "n", "producer_id": 1e999, "producer_epoch": 1}),
    ("details of PostgreSQL", POSTGRES | {"schema": ["public"]}),
    ("details of PostgreSQL", POSTGRES | {"tokens_id": "5"}),
    ("details of files", FILES | {"hidden": 5}),
    ("details of files", FILES | {"files": [[True, 0, 1]]}),
    ("details of Kafka", {name: KAFKA[name] for name in KAFKA if name != "produced"}),
    ("details of Kafka", KAFKA | {"produced": [dict(KAFKA["produced"][0], first_offset=-1)]}),
    ("details of Kafka", KAFKA | {"producer_id": "7"}),
    *(("source offsets", SOURCE | {name: "x"}) for name in ("topics", "gone", "skipped", "ids")),
    ("source offsets", SOURCE | {"topics": {"orders": ["5"]}}),
    ("manifest, forged", forged_manifest(committables=[COMMITTABLES[1] | {"details": 1.5}])),
    ("decision log, forged", seal(1, {"run": "r", "token": None, "id": ["i"]})),
    ("decider, forged", seal(1, {"decided_by": "x", "transactional_id": "", "cluster_id": ""})),
    ("decider, forged", seal(1, {"decided_by": "kafka", "transactional_id": "", "cluster_id": 1})),
    ("Spark's log", 'v1\n[]\n{"a":1}'),
    ("Spark's log", 'v1\nx\n{"a":1}'),
    ("Spark's log", f"v1\n{{}}\n{{{DEEP}"),
    ("value as msgpack", b"\x91\x01"),
    ("value as msgpack", b"\xc1"),
    ("schema of a value", '{"type":"struct"}'),
    ("schema of a value", DEEP),
    *(("schema of a value", with_decimal(*scale)) for scale in ((10**30, 0), (1, -(10**30)))),
    ("schema of columns", '[["a","decimal128(99999999999999999999, 0)"]]'),
    ("schema of columns", json.dumps([["a", "list<" * 5000]])),
    ("Protobuf", b"\0\0\0\0\5\1"),  # read for ever: its message index is -1
    ("Protobuf descriptor", b"\xff" * 17),
    ("JSON Schema", REFERENCES),
    ("JSON Schema", {"type": "object", "required": [None, "id"]}),
    ("Avro schema", {**RECORD, "fields": [{"name": "e", "type": HALF_A_CHARACTER}]}),
    ("answer of a registry", REGISTERED | {"references": [{"subject": "s", "version": "1/.."}]}),
    ("answer of a registry", REGISTERED | {"references": [{"subject": "\ud800", "version": 1}]}),
    ("answer of a registry", DEEP),
    ("record batches", struct.pack(">qih", 100, 2, 0)),
    ("login by SCRAM", b"r=nserver,s=c2FsdA==,i=1"),
    ("login by SCRAM", b"r=nserver"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), FOUND)
def test_it_is_refused_by_an_error_of_ours(name: str, value: object) -> None:
    text = value if isinstance(value, str) else json.dumps(value) if isinstance(value, dict) else ""
    data = value if isinstance(value, bytes) else text.encode()

    assert not run_case(DECODERS[name], data, DECODERS[name].samples()[0])


def test_a_map_of_protobuf_whose_entries_have_no_key_is_refused() -> None:
    decoder = DECODERS["Protobuf descriptor"]
    sound = decoder.samples()[0]
    file = FileDescriptorProto.FromString(sound)
    entry = next(
        message for message in file.message_type[0].nested_type if message.options.map_entry
    )
    assert entry.field[0].name == "key"
    entry.field[0].name = "keq"

    assert not run_case(decoder, file.SerializeToString(), sound)


@pytest.mark.parametrize("size", [2**31, 2**64, 10**30])
def test_a_fixed_type_larger_than_any_record_is_refused(size: int) -> None:
    decoder = DECODERS["Avro schema"]
    fixed = {"type": "fixed", "name": "f", "size": size}
    schema = {"type": "record", "name": "r", "fields": [{"name": "n", "type": fixed}]}

    assert not run_case(decoder, json.dumps(schema).encode(), decoder.samples()[0])


def forged_segment(old: bytes, new: bytes) -> tuple[bytes, bytes]:
    """Return a state file of one segment with other bytes in it, checksums right; and the sound."""
    sound = stored.state_files()[0]
    assert sound.count(old) == 1
    index_size, body = int.from_bytes(sound[:4], "big"), sound[4:]
    assert index_size == 28 + 12, "one segment"
    start = len(body) - index_size
    index, body = bytearray(body[start:]), body.replace(old, new)
    offset, length = (int.from_bytes(index[at : at + 8], "little") for at in (8, 16))
    index[24:28] = zlib.crc32(body[offset : offset + length]).to_bytes(4, "little")
    return sound[:4] + body[:start] + index, sound


def offsets(*ends: int) -> bytes:
    return b"".join(end.to_bytes(4, "little") for end in ends)


@pytest.mark.parametrize(
    ("new", "what"),
    [
        (offsets(0, 4, 2**31 - 1, 11), "keys that leave their buffer"),
        (offsets(0, 4, 2, 11), "keys that run backwards"),
        (offsets(0, 2, 8, 11), "a key without the number of its state"),
        (offsets(0, 1, 8, 11), "another key group"),
    ],
)
def test_entries_of_a_forged_state_file_are_refused(new: bytes, what: str) -> None:
    """Before it was checked, the process died of some."""
    data, sound = forged_segment(offsets(0, 4, 8, 11), new)
    decoder = DECODERS["state file"]

    assert run_case(decoder, sound, sound)
    assert not run_case(decoder, data, sound), what


def test_an_index_of_a_state_file_that_is_too_short_or_disordered_is_refused() -> None:
    decoder, sound = DECODERS["state file"], stored.state_files()[1]
    index_size, body = int.from_bytes(sound[:4], "big"), sound[4:]
    index = body[len(body) - index_size :]
    assert index_size > 2 * 28 + 12, "several segments"
    swapped = index[28:56] + index[:28] + index[56:]

    for data in (b"\0\0\0\5" + body, sound[:4] + body[: len(body) - index_size] + swapped):
        assert not run_case(decoder, data, sound)


def test_a_user_defined_type_in_a_stored_schema_is_neither_imported_nor_unpickled(
    tmp_path, monkeypatch
) -> None:
    """PySpark imports the module of such a type, and up to 4.1 unpickles its class."""
    (tmp_path / "module_of_a_stranger.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    kind = {"type": "udt", "pyClass": "module_of_a_stranger.Type", "serializedClass": "gAROLg=="}
    field = {"name": "x", "type": kind, "nullable": True, "metadata": {}}
    text = json.dumps({"type": "struct", "fields": [field]})

    with pytest.raises(ManifestError, match="expected one of Spark's"):
        struct_from_text(text.replace("udt", "\\u0075dt"))

    assert "module_of_a_stranger" not in sys.modules
    assert importlib.import_module("module_of_a_stranger"), "it could have been"


@pytest.mark.parametrize(
    ("name", "null"),
    [("Metadata", "brokers"), ("OffsetFetch", "groups"), ("ListOffsets", "topics")],
)
def test_an_answer_without_a_list_that_kafka_always_sends_is_no_answer(
    name: str, null: str
) -> None:
    request_class = getattr(protocol, f"{name}Request")
    request = request_class(**({"groups": []} if name == "OffsetFetch" else {"topics": []}))
    request.version = {"Metadata": 12, "OffsetFetch": 8, "ListOffsets": 7}[name]
    sent, _ = protocol.encode_request(request, 5, "client")
    good = payload_of(request, request.response(), 5)
    length = 9  # after the header and the throttle time
    assert good[length] == 1, "the list is empty"
    bad = good[:length] + b"\0" + good[length + 1 :]

    assert getattr(protocol.decode_response(sent, memoryview(good)), null) == []
    with pytest.raises(ConnectionError, match="cannot be read"):
        protocol.decode_response(sent, memoryview(bad))
