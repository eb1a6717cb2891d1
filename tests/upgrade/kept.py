"""What is kept of a release: an archive, and a JSON file of what is known about it.

The archive has two checkpoints, whose drivers died after an epoch was decided and before its files
were made visible; a savepoint of one of them, taken earlier; the sinks' files; and the data folder
of the X the positions in Kafka.
"""

import io
import json
import lzma
import tarfile
import zlib
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
from pyspark import cloudpickle
from pyspark.sql import Row, SparkSession

import tallystick as ts
from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.checkpoint.state_files import read_entries
from tallystick.epoch import protocol as c
from tallystick.state.entries import ID_AT, TIMERS_BY_KEY, TIMERS_BY_TIME
from tallystick.state.key_groups import KeyGroupRange
from tallystick.storage.file_storage import FileStorage
from tallystick.testing import EmbeddedKafka
from tests.spark.topics import (
    produce,
    read_committed,
    read_group_offsets,
    wait_until_nothing_is_pending,
)
from tests.upgrade import pipelines
from tests.upgrade.oracle import Expected, Rows, Window
from tests.upgrade.pipelines import FORK, PAID, SHOP, Record

cloudpickle.register_pickle_by_value(pipelines)  # workers need no tests

RELEASES = Path(__file__).parent / "releases"
KAFKA = "4.3.0"
"""The broker that makes new ones; one that is kept runs on the version that made it, or later."""
FOR_EVER = "2147483647"
BROKER = {
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    # A release is years old when it is tried: Kafka must not forget meanwhile.
    "offsets.retention.minutes": FOR_EVER,
    "offsets.retention.check.interval.ms": FOR_EVER,
    "transactional.id.expiration.ms": FOR_EVER,
    "transaction.remove.expired.transaction.cleanup.interval.ms": FOR_EVER,
}
GROUPS = (
    f"tallystick-{SHOP}-token",
    *(f"tallystick-{SHOP}/{uid}" for uid in ("orders", "returns", "prices")),
    *(f"tallystick-{PAID}/{uid}" for uid in ("orders", "payments")),
)
PARTS = ("shop", "paid", "savepoint", "shop-files", "paid-files", "broker/node-1/data")
LEFT_OUT = (".index", ".timeindex", ".lock")
"""Kafka makes them again."""
WITHOUT_MEANING = ("paid", "savepoint")
"""The folders whose states are laid out as those that were written before they had a meaning."""
STATES = ("totals", "habits", "windows", "prices", "held")


def releases() -> list[str]:
    """The versions of which something is kept, oldest first."""
    names = [path.name.removesuffix(".json") for path in RELEASES.glob("*.json")]
    return sorted(names, key=lambda name: [int(part) for part in name.split(".")])


def facts_of(release: str) -> dict[str, Any]:
    """What is known about a release."""
    return json.loads((RELEASES / f"{release}.json").read_text())


def tokens_of(facts: dict[str, Any]) -> list[str]:
    """The tokens that Kafka held."""
    return [
        offset_and_metadata[1]
        for offset_and_metadata in facts["groups"][f"tallystick-{SHOP}-token"].values()
    ]


def keep(release: str, folder: Path, facts: dict[str, Any]) -> None:
    """Write archive and facts; the same bytes for the same files."""
    RELEASES.mkdir(exist_ok=True)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(file for part in PARTS for file in (folder / part).rglob("*")):
            if path.is_file() and path.suffix not in LEFT_OUT and path.name != ".lock":
                entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
                entry.size = path.stat().st_size
                archive.addfile(entry, io.BytesIO(path.read_bytes()))
    compressed = lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME)
    (RELEASES / f"{release}.tar.xz").write_bytes(compressed)
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in sorted(facts.items())]
    (RELEASES / f"{release}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def unpack(release: str, folder: Path) -> None:
    """Lay out what is kept.

    A manifest names the folder of files that its decision makes visible. That is another one on
    each machine: its name is replaced, and the checksum of that file made again. In some of them
    states have no meaning, as early builds of 0.1.0 wrote them.
    """
    with tarfile.open(RELEASES / f"{release}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    old, new = facts_of(release)["folder"], str(folder)
    for path in sorted([*folder.glob("*/tallystick/*.json"), *folder.glob("*/savepoint.json")]):
        before = path.read_bytes().splitlines()[0]
        line = before.replace(f"{old}/".encode(), f"{new}/".encode())
        if path.relative_to(folder).parts[0] in WITHOUT_MEANING:
            line = _without_meaning(line)
        if line != before:
            path.write_bytes(line + b"\n%08x\n" % zlib.crc32(line))


def _without_meaning(line: bytes) -> bytes:
    """A manifest or a savepoint whose states do not say what they mean."""
    fields = json.loads(line)
    for step in fields.get("manifest", fields).get("state", ()):
        for field in step["fields"]:
            field.pop("meaning", None)
    return json.dumps(fields, sort_keys=True).encode()


class Shop:
    """The pipelines on a broker, in a folder, and what outsiders see of them.

    Args:
        kafka: the broker.
        spark: the session.
        folder: has checkpoints, savepoints, files.
    """

    def __init__(self, kafka: EmbeddedKafka, spark: SparkSession, folder: Path) -> None:
        self.kafka, self.spark, self.folder = kafka, spark, folder
        self.epoch_rows = 12
        """How many orders an epoch has at most."""

    def feed(self, records: Iterable[Record]) -> None:
        """Append the records, of each topic in their order."""
        by_topic: dict[str, list[tuple[str, str]]] = {}
        for topic, key, value in records:
            by_topic.setdefault(topic, []).append((key, value))
        for topic, pairs in by_topic.items():
            produce(self.kafka.confluent_options(), topic, pairs)

    def run(self, name: str, parallelism: int, listener: Any = None) -> int:
        """Run a pipeline over all that is there, and return how many epochs that took.

        Args:
            name: `SHOP`, `PAID` or `FORK`.
            parallelism: of its keyed steps.
            listener: as for `Pipeline.start`.
        """
        files = self.folder / f"{folder_of(name)}-files"
        common = (self.kafka.bootstrap_servers, files, parallelism, self.epoch_rows)
        if name == PAID:
            pipeline = pipelines.paid(*common)
        else:
            pipeline = pipelines.shop(*common, name, "windows-fork" if name == FORK else "windows")
        committed: list[c.Event] = []

        def hear(event: c.Event) -> None:
            if isinstance(event, c.TransactionCommitted):
                committed.append(event)
            if listener is not None:
                listener(event)

        query = pipeline.start(
            self.spark,
            checkpoint=str(self.folder / folder_of(name)),
            trigger={"availableNow": True},
            listener=hear,
        )
        assert query.awaitTermination(300) is not False, f"the query hangs: {query.status}"
        return len(committed)

    def state(self, folder: str, uid: str) -> Rows:
        """What a checkpoint or a savepoint holds."""
        servers = self.kafka.bootstrap_servers
        rows = ts.read_state(self.spark, str(self.folder / folder), uid, bootstrap_servers=servers)
        rows_read: Rows = [_as_json(row) for row in rows.collect()]
        return sorted(rows_read, key=json.dumps)

    def windows(self, topic: str) -> Rows:
        """The windows that were put out, in the order of partitions and offsets."""
        wait_until_nothing_is_pending(self.kafka.confluent_options(), topic)
        records = read_committed(self.kafka.confluent_options(), topic)
        rows: Rows = [json.loads(record.value or "") for record in records]
        for row in rows:
            start = datetime.fromisoformat(row["window_start"])
            row["window_start"] = round(start.timestamp() * 1000)
        return rows

    def groups(self) -> dict[str, dict[str, list[Any]]]:
        """What Kafka holds of token and positions, as JSON has it."""
        options = self.kafka.confluent_options()
        return {
            group: {
                f"{topic}-{partition}": list(entry)
                for (topic, partition), entry in sorted(read_group_offsets(options, group).items())
            }
            for group in GROUPS
        }

    def rows(self, folder: str) -> Rows:
        """The visible rows of files."""
        path = self.folder / folder
        rows_read: Rows = ds.dataset(path, format="parquet").to_table().to_pylist()
        return sorted(rows_read, key=lambda row: row["n"])

    def seen(self, name: str) -> dict[str, Rows]:
        """What a pipeline has written and holds: its files, its topic, its state by uid."""
        folder = folder_of(name)
        content = {"files": self.rows(f"{folder}-files")}
        if name == PAID:
            return content | {"paid": self.state(folder, "paid")}
        content["output"] = self.windows("windows-fork" if name == FORK else "windows")
        return content | {uid: self.state(folder, uid) for uid in STATES}


def _as_json(value: Any) -> Any:
    """A row as an object, a map as a list of its pairs."""
    if isinstance(value, Row):
        return {name: _as_json(member) for name, member in value.asDict().items()}
    if isinstance(value, dict):
        return sorted(
            ([_as_json(member) for member in pair] for pair in value.items()), key=json.dumps
        )
    return [_as_json(member) for member in value] if isinstance(value, list) else value


def check(
    name: str, seen: dict[str, Rows], expected: Expected, before: dict[str, Rows] | None = None
) -> None:
    """Compare what a pipeline has written and holds with what it must.

    Args:
        name: of the pipeline.
        seen: as `Shop.seen` returns it.
        expected: what follows from its input.
        before: for a fork, windows and lots of the original before the savepoint.
    """
    if name == PAID:
        waiting = {row["n"] for row in seen["paid"] if row["left"]}
        return expected.check_paid(seen["files"], waiting)
    expected.check_state(seen)
    expected.check_lots([*(before or {}).get("files", ()), *seen["files"]], seen["held"])
    expected.check_windows(
        [*(before or {}).get("output", ()), *seen["output"]], panes_of(seen["windows"])
    )


def folder_of(name: str) -> str:
    """Where a pipeline's checkpoint lies, below the folder."""
    return name.removeprefix("kept-")


def panes_of(rows: Rows) -> dict[Window, dict[str, Any]]:
    """The open windows that the state holds."""
    return {
        (row["item"], pane["start"] // 1000): pane for row in rows for pane in row["panes"] or ()
    }


def entries_of(folder: Path) -> dict[str, dict[str, list[list[str]]]]:
    """Return the entries of a checkpoint's newest state, by step and state, as hexadecimal text.

    Without those that depend on when and by whom they were written: what has a time to live, the
    elements that each task has, and windows, which close with the epochs.
    """
    storage = FileStorage(str(folder))
    (manifest,) = CheckpointFolder(storage).newest_manifests(1)
    entries_by_step: dict[str, dict[str, list[list[str]]]] = {}
    for step in manifest.state:
        names = {field.state_id: field.name for field in step.fields if not field.ttl_ms}
        names |= {TIMERS_BY_TIME: "timers by time", TIMERS_BY_KEY: "timers by key"}
        entries = read_entries(step, KeyGroupRange(0, step.max_parallelism - 1), storage)
        for key, value in zip(*entries.to_pydict().values(), strict=True):
            if key[ID_AT] in names and step.uid not in ("held", "windows"):
                state = entries_by_step.setdefault(step.uid, {}).setdefault(names[key[ID_AT]], [])
                state.append([key.hex(), value.hex()])
    return entries_by_step
