"""What lies on storage: manifests, savepoints, the log of decisions, Spark's log, files of state.

What a checksum guards is damaged twice: as it is, which must be noticed, and sealed again, as
somebody does who means harm.
"""

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from random import Random
from typing import Any

import pyarrow as pa
from pyspark.sql import types

from tallystick.checkpoint import decision_log
from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.checkpoint.spark_log import SparkLog, parse_entry
from tallystick.checkpoint.state_files import read_entries
from tallystick.epoch import manifest, micro_batches, savepoint, tokens, transactional_ids
from tallystick.epoch.manifest import Manifest
from tallystick.epoch.two_phase import Committable
from tallystick.files.drafts import Drafts, File, parse_draft, parse_name
from tallystick.files.folder import HIDDEN
from tallystick.kafka.outcome import TaskToken, TaskTransaction
from tallystick.postgres.transactions import Details
from tallystick.source.offsets import SourceOffsets, parse_source
from tallystick.state.catalog import SNAPSHOT, StateField, StateFile, StepState, Version
from tallystick.state.changelog import damage_of, encode, parse_index
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.keys import KeyCodec
from tallystick.state.overlay import ENTRIES
from tallystick.state.pyspark.values import ValueCodec, struct_from_text
from tallystick.state.row_codec import ColumnsCodec
from tallystick.state.schema import schema_from_text, text_of
from tallystick.values import ProducedRange, Producer, TopicPartition
from tests.fuzz.decoder import Decoder, Mutate
from tests.fuzz.guarded import GuardedMemory
from tests.fuzz.mutations import mutated, mutated_json, mutated_text

MEMORY = GuardedMemory()
MANIFEST_PATH = "tallystick/000000000003-2-abcdef.json"
STATE_PATH = "keyed-state/count/000000000003-0-abcdef.changelog"
ALL = KeyGroupRange(0, 127)


class Files:
    """A `ports.Storage` in memory."""

    location = "memory:"

    def __init__(self, **files: bytes) -> None:
        self.files = {path.replace("__", "/"): data for path, data in files.items()}

    def get(self, path: str) -> bytes | None:
        return self.files.get(path)

    def get_range(self, path: str, offset: int, length: int) -> bytes | None:
        data = self.files.get(path)
        if data is None:
            return None
        start = offset if offset >= 0 else max(0, len(data) + offset)
        return data[start : start + length]

    def names(self, folder: str) -> list[str]:
        return sorted(path for path in self.files if path.rpartition("/")[0] == folder)

    def put(self, path: str, data: bytes) -> None:
        self.files[path] = data

    def delete(self, path: str) -> None:
        self.files.pop(path, None)


# ---- sealed files ----


def resealed(data: bytes, chance: Random, others: Sequence[bytes]) -> bytes:
    """Change values of a sealed file, and seal it again."""
    line = mutated_json(data.partition(b"\n")[0].decode(), chance).encode()
    return line + b"\n%08x\n" % zlib.crc32(line)


def unchanged(encoded: bytes, data: bytes, original: bytes) -> bool:
    """True; what is read of damaged bytes with an unknown checksum is what was written."""
    same = data.rstrip(b"\n") == original.rstrip(b"\n")
    assert same or zlib.crc32(data.partition(b"\n")[0]) == int(data.split(b"\n")[1], 16)
    assert not same or encoded.rstrip(b"\n") == original.rstrip(b"\n")
    return True


def sources_text() -> str:
    """Return the positions of a source."""
    orders, lines = TopicPartition("orders", 0), TopicPartition("lines", 2)
    source = SourceOffsets(
        cluster_id="c",
        group="g",
        positions={orders: 5, lines: 7},
        starts={orders: 1},
        topic_ids={"orders": "AAAAAAAAAAAAAAAAAAAAAA"},
        stops={orders: 9, lines: 9},
        gone={"lines": 1_700_000_000_000},
        skipped={orders: (1, 2)},
        tick=3,
        input="left",
    )
    return json.dumps(source.to_json())


@cache
def tables() -> list[pa.Table]:
    """Return entries of state: a few short ones, and enough to be compressed."""
    few = [(b"\0\1\1a", b"x"), (b"\0\1\1b", None), (b"\0\x7f\1", b"y" * 50)]
    many = [(g.to_bytes(2, "big") + b"\1%04d" % n, b"v" * 20) for g in range(60) for n in range(80)]
    return [pa.table(list(zip(*rows, strict=True)), schema=ENTRIES) for rows in (few, many)]


def state_file(data: bytes, index_size: int) -> StateFile:
    """Return what a manifest says of a file with this tail."""
    checksum = zlib.crc32(data[len(data) - index_size :])
    size = len(data)
    return StateFile(STATE_PATH, SNAPSHOT, 3, 0, 127, size, index_size, checksum, 4)


def step_of(file: StateFile) -> StepState:
    """Return the state that consists of a file."""
    keys = text_of(pa.schema([("flight", pa.string())]))
    field = StateField("count", 1, "columns", "", text_of(pa.schema([("n", pa.int64())])))
    return StepState(
        *("count", 128, 2, keys, 1, (field,), 2, (file,)),
        trail=(Version(2, "a"), Version(3, "b")),
        watermark_ms=5,
        partition_times=(),
    )


@cache
def whole_manifest() -> Manifest:
    """Return a manifest with all that there can be in one."""
    encoded = encode(tables()[0], ALL)
    return Manifest(
        checkpoint_id=3,
        pipeline="flights",
        lineage="l",
        sources=(sources_text(), "-"),
        produced=(ProducedRange("out", 1, 10, 5, 14),),
        producer=Producer("flights-epochs", 7, 2),
        state=(step_of(state_file(encoded.data, encoded.index_size)),),
        committables=(postgres_committable(), files_committable(), kafka_committable()),
        base_path="tallystick/000000000002-2-abcdef.json",
    )


def postgres_committable() -> Committable:
    details = Details("prepared", "public", '"t"', "s", "d", 5)
    return Committable("pg", 3, 1, "name", 7, 5, details.to_text())


def files_committable() -> Committable:
    hidden = f"{HIDDEN}/flights/files/l"
    name = "00000003-00001-abcdef-012345678901"
    drafts = Drafts("file:/out", hidden, name, (File("day=1", 0, 99), File("", 1, 5)))
    return Committable("files", 3, 1, name, 7, 5, drafts.details)


def kafka_committable() -> Committable:
    parts = (ProducedRange("out", 0, 2, 0, 1),)
    transaction = TaskTransaction("t", 7, 2, 2, "c", "l", "n", "g", "tokens", "id", parts)
    return Committable("kafka", 3, 1, transaction.name, 7, 5, transaction.to_json())


@cache
def manifests() -> list[bytes]:
    return [whole_manifest().encode()]


def read_manifest(data: bytes, original: bytes) -> bool:
    """Read a manifest, and what its texts say to those who need them."""
    decoded = manifest.decode(data, MANIFEST_PATH)
    unchanged(decoded.encode(), data, original)
    for text in decoded.sources:
        parse_source(text)
    for committable in decoded.committables:
        read_committable(committable)
    for step in decoded.state:
        schema_from_text(step.key_schema)
    manifest.attempt_of(manifest.manifest_path(decoded, "abcdef"))
    return True


def read_committable(committable: Committable) -> None:
    """Read the details, as the sink of the name does."""
    match committable.sink:
        case "pg":
            Details.from_text(committable.details)
        case "files":
            drafts = Drafts.of(committable)
            for file in drafts.files or ():
                assert ".." not in drafts.final(file).split("/"), drafts
        case "kafka":
            TaskTransaction.from_json(committable.details)


@cache
def savepoints() -> list[bytes]:
    seed = replace(whole_manifest(), committables=())
    logs = {"offsets/2": "v1", "offsets/3": "v1", "commits/3": "v1", "sources/0/0": "x"}
    saved = savepoint.Savepoint(
        "monday", "2024-01-01T00:00:00Z", "file:/c", MANIFEST_PATH, seed, logs
    )
    return [saved.encode(), replace(saved, spark={}).encode()]


def read_savepoint(data: bytes, original: bytes) -> bool:
    decoded = savepoint.decode(data, "savepoint.json")
    unchanged(decoded.encode(), data, original)
    for step in decoded.manifest.state:
        for file in step.files:
            assert file.path.startswith("keyed-state/"), file
            assert ".." not in file.path.split("/"), file
    savepoint.seed_of(decoded, "file:/s", "lineage")
    return True


@cache
def slots() -> list[bytes]:
    token = tokens.Token(3, "l", "file:/c", MANIFEST_PATH, 1)
    entry = decision_log.Entry(5, "run", token, "flights")
    return [decision_log._encode(entry), decision_log._encode(entry._replace(token=None))]


def read_slot(data: bytes, original: bytes) -> bool:
    files = Files(tallystick__decisions__0000000000000005_json=b"")
    files.files = {decision_log.slot_path(5): data}
    entry = decision_log.newest_entry(files)
    assert entry is not None
    decision_log.transactional_ids(files)
    return unchanged(decision_log._encode(entry), data, original)


def deciders() -> list[bytes]:
    decider_fields = decision_log.DeciderName("kafka", "flights-epochs", "c")._asdict()
    return [manifest.seal(1, decider_fields), manifest.seal(1, decision_log.LOG._asdict())]


def read_decider(data: bytes, original: bytes) -> bool:
    files = Files()
    files.files[decision_log.DECIDER] = data
    decider = decision_log.decider_of(files)
    assert decider is not None
    assert decider.decided_by in ("kafka", "checkpoint"), decider
    return unchanged(manifest.seal(1, decider._asdict()), data, original)


# ---- Spark's log, and the texts that Kafka keeps ----


def log_entries() -> list[bytes]:
    head = '{"batchWatermarkMs":0,"batchTimestampMs":1700000000000,"conf":{}}'
    return [f"v1\n{head}\n{sources_text()}\n-".encode()]


def read_log(data: bytes, original: bytes) -> bool:
    """Read an entry, and mend the log."""
    entry = parse_entry(data)
    files = Files(offsets__0=original, offsets__1=data, commits__0=data, metadata=b'{"id":"x"}')
    files.files[MANIFEST_PATH.replace("03-", "01-")] = manifests()[0]
    log = SparkLog(files)
    log.sources(1)
    log.mend()
    log.batch(1)
    if entry is None:
        return False
    _ = entry.timestamp_ms
    for text in entry.sources:
        parse_source(text)
    return True


def read_lineage(data: bytes, original: bytes) -> bool:
    assert CheckpointFolder(Files(metadata=data)).lineage() is not None
    return True


def read_source(data: bytes, original: bytes) -> bool:
    parsed = parse_source(data.decode())
    if parsed is None:
        return False
    assert parse_source(json.dumps(parsed.to_json())) == parsed
    return True


def token_texts() -> list[bytes]:
    token = tokens.Token(3, "l", "file:/c", MANIFEST_PATH, 1)
    return [tokens.encode_token(token)[1].encode()]


def read_token(data: bytes, original: bytes) -> bool:
    place, other = TopicPartition("out", 0), TopicPartition("old", 0)
    good = tokens.encode_token(tokens.Token(2, "l", "file:/c", MANIFEST_PATH))
    chance = Random(zlib.crc32(data))
    offset = 4 if data == original else chance.choice((4, 0, -1, -2, 2**63 - 1))
    offsets = {place: (offset, data.decode()), other: good}
    token = tokens.newest_token(offsets, place, "l")
    assert token is not None
    assert isinstance(token.manifest_path, str), token
    tokens.takeover_count(offsets, "l")
    return True


def task_token_texts() -> list[bytes]:
    transaction = TaskTransaction.from_json(kafka_committable().details)
    return [transaction.token_metadata(1).encode()]


def read_task_token(data: bytes, original: bytes) -> bool:
    return TaskToken.read(4, data.decode()).lineage != ""


def details(committable: Callable[[], Committable]) -> Decoder:
    """Return a decoder of the details of one kind of committable."""

    def read(data: bytes, original: bytes) -> bool:
        read_committable(replace(committable(), details=data.decode()))
        return True

    return Decoder(lambda: [committable().details.encode()], read, mutated_text)


def names() -> list[bytes]:
    """Return names of ours as a folder or a cluster lists them."""
    return [
        *(MANIFEST_PATH.encode(), b"tallystick/settled-000000000003-2-abcdef"),
        b"00000003-00001-abcdef-012345678901",
        b"day=1/part-00000003-00001-abcdef-012345678901.1.parquet.draft",
        transactional_ids.SEPARATOR.join(("flights", "kafka", "1", "2")).encode(),
    ]


def read_name(data: bytes, original: bytes) -> bool:
    """Read a name in all ways."""
    name = data.decode("utf-8", "surrogateescape")
    listed = manifest.manifests([name])
    attempts = [manifest.attempt_of(path) for path in listed]
    micro_batches.traces_between([name], 0, 10)
    micro_batches.newest_settled([name])
    manifest.expired_manifests(listed, 10)
    one = (transactional_ids.parse(name), parse_name(name), parse_draft(name, 1))
    notes = micro_batches.settled_notes([name], 10**30)
    return any(attempt is not None for attempt in (*attempts, *one, *notes))


# ---- state ----


def state_files() -> list[bytes]:
    """Return files of state, and the size of their index before each."""
    segments = [encode(table, ALL) for table in tables()]
    return [segment.index_size.to_bytes(4, "big") + segment.data for segment in segments]


def damaged_state(data: bytes, chance: Random, others: Sequence[bytes]) -> bytes:
    """Damage a file; mostly the records or the index, and make the checksums right again."""
    if chance.random() < 0.2:
        return mutated(data, chance, others)
    index_size, body = int.from_bytes(data[:4], "big"), data[4:]
    start = len(body) - index_size
    index = bytearray(body[start:])
    if chance.random() < 0.2:
        index = bytearray(mutated(bytes(index), chance, [bytes(index)]))
        return len(index).to_bytes(4, "big") + body[:start] + index
    segments = parse_index(bytes(index), zlib.crc32(index))
    which = chance.randrange(len(segments))
    segment = segments[which]
    blob = mutated(body[segment.offset : segment.offset + segment.length], chance, [body[:start]])
    blob = blob[: segment.length].ljust(segment.length, b"\0")
    line = len(index) - 12 - 28 * (len(segments) - which)
    index[line + 24 : line + 28] = zlib.crc32(blob).to_bytes(4, "little")
    whole = body[: segment.offset] + blob + body[segment.offset + segment.length : start]
    return data[:4] + whole + index


def read_state_file(data: bytes, original: bytes) -> bool:
    """Read all of a file, and a part; the manifest's checksum fits the index."""
    index_size, body = int.from_bytes(data[:4], "big"), data[4:]
    whole = original[4:]
    is_forged = data[:4] != original[:4] or body[-12:] == whole[-12:]
    if not 0 <= index_size <= len(body):
        return False
    file = state_file(body if is_forged else whole, index_size)
    files = Files()
    files.files[STATE_PATH] = body
    is_whole = not damage_of(file, body)
    for groups in (ALL, KeyGroupRange(1, 40)):
        entries = read_entries(step_of(file), groups, files)
        entries.validate(full=True)
        entries.to_pylist()
    return is_whole


KEYS = pa.schema([("a", pa.string()), ("b", pa.int64()), ("c", pa.decimal128(38, 2))])
TIME = pa.field("t", pa.timestamp("us", "UTC"))
COLUMNS = pa.schema(
    [*KEYS, ("many", pa.list_(pa.string())), ("numbers", pa.list_(pa.int16())), ("z", pa.binary())]
)


def rows(schema: pa.Schema) -> pa.RecordBatch:
    values = {"a": "x\0é", "b": -5, "c": 7, "many": ["a", None, "bc"], "numbers": [1, None, 3]}
    nested_rows = [{**values, "z": b"\0" * 9}, {"a": "", "many": [], "numbers": []}]
    nested_rows = [{field.name: row.get(field.name) for field in schema} for row in nested_rows]
    return pa.RecordBatch.from_pylist(nested_rows, schema=schema)


def column(data: bytes) -> pa.Array:
    """Return the bytes as a column of one value, whose last byte is the last."""
    offsets = pa.py_buffer(b"\0\0\0\0" + len(data).to_bytes(4, "little"))
    return pa.Array.from_buffers(
        pa.binary(), 1, [None, offsets, pa.py_buffer(MEMORY.holding(data))]
    )


def read_key(data: bytes, original: bytes) -> bool:
    """Read a key of a step; what is read is that key, and no other."""
    codec = KeyCodec(KEYS)
    codec.decode_start(column(data))
    batch = codec.decode(column(data))
    batch.validate(full=True)
    assert codec.encode(batch).to_pylist() == [data]
    return True


def read_columns(data: bytes, original: bytes) -> bool:
    """Read the state of a vectorised function."""
    codec = ColumnsCodec(COLUMNS)
    batch = codec.decode(column(data))
    batch.validate(full=True)
    again = codec.encode(batch)
    assert codec.encode(codec.decode(again)).to_pylist() == again.to_pylist()
    return True


@cache
def struct_text() -> str:
    fields = [
        *(("l", types.LongType()), ("s", types.StringType()), ("d", types.DecimalType(20, 3))),
        *(("t", types.TimestampType()), ("day", types.DateType()), ("b", types.BinaryType())),
        ("many", types.ArrayType(types.StructType([types.StructField("x", types.DoubleType())]))),
        ("map", types.MapType(types.StringType(), types.ShortType())),
    ]
    return types.StructType([types.StructField(*field) for field in fields]).json()


@cache
def msgpacked() -> list[bytes]:
    codec = ValueCodec("state", struct_from_text(struct_text()))
    day = datetime(2024, 2, 29, 12, tzinfo=UTC)
    row = (1, "é", Decimal("1.500"), day, day.date(), b"\xff", [(1.5,), None], {"a": 1, "b": None})
    return [codec.encode(row), codec.encode((None,) * 8)]


def read_msgpack(data: bytes, original: bytes) -> bool:
    """Read a value of a StatefulProcessor's state."""
    ValueCodec("state", struct_from_text(struct_text())).decode(data)
    ValueCodec("state", struct_from_text(struct_text()), as_stored=True).decode(data)
    return True


def read_struct(data: bytes, original: bytes) -> bool:
    """Read the schema of such a value."""
    ValueCodec("state", struct_from_text(data.decode()))
    return True


def read_schema(data: bytes, original: bytes) -> bool:
    """Read the schema of a key or of columns."""
    schema = schema_from_text(data.decode())
    KeyCodec(schema)
    ColumnsCodec(schema)
    return True


def twice(name: str, samples: Any, read: Any, forge: Mutate) -> dict[str, Decoder]:
    """Return a decoder of bytes that are damaged, and one of bytes that are forged."""
    return {name: Decoder(samples, read), f"{name}, forged": Decoder(samples, read, forge)}


DECODERS = {
    **twice("manifest", manifests, read_manifest, resealed),
    **twice("savepoint", savepoints, read_savepoint, resealed),
    **twice("decision log", slots, read_slot, resealed),
    **twice("decider", deciders, read_decider, resealed),
    "Spark's log": Decoder(log_entries, read_log),
    "lineage": Decoder(lambda: [b'{"id":"x"}'], read_lineage, mutated_text),
    "source offsets": Decoder(lambda: [sources_text().encode()], read_source, mutated_text),
    "token": Decoder(token_texts, read_token, mutated_text),
    "token of a task": Decoder(task_token_texts, read_task_token, mutated_text),
    "details of PostgreSQL": details(postgres_committable),
    "details of files": details(files_committable),
    "details of Kafka": details(kafka_committable),
    "names": Decoder(names, read_name),
    "state file": Decoder(state_files, read_state_file, damaged_state),
    "key": Decoder(lambda: KeyCodec(KEYS).encode(rows(KEYS)).to_pylist(), read_key),
    "columns": Decoder(
        lambda: ColumnsCodec(COLUMNS).encode(rows(COLUMNS)).to_pylist(), read_columns
    ),
    "value as msgpack": Decoder(msgpacked, read_msgpack),
    "schema of a value": Decoder(lambda: [struct_text().encode()], read_struct, mutated_text),
    "schema of columns": Decoder(
        lambda: [text_of(columns).encode() for columns in (KEYS, KEYS.append(TIME))],
        read_schema,
        mutated_text,
    ),
}
