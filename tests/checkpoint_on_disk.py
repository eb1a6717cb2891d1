"""A checkpoint as a pipeline with one keyed step leaves it, without the pipeline."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from tallystick.checkpoint.collection import Collection
from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.checkpoint.state_files import (
    read_entries,
    write_changelog,
    write_merged,
)
from tallystick.epoch import manifest as m
from tallystick.epoch.manifest import Manifest
from tallystick.ops import savepoints
from tallystick.ports import Storage
from tallystick.source.offsets import SourceOffsets
from tallystick.state.catalog import StepState, Version
from tallystick.state.file_sets import MERGED_FILES_MIN, due_merges, extend
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.keys import HASH_VERSION, KeyCodec
from tallystick.state.overlay import ENTRIES
from tallystick.storage.file_storage import FileStorage
from tallystick.values import ProducedRange, Producer, TopicPartition

KEY_SCHEMA = KeyCodec(pa.schema([("user", pa.string())])).schema_text
ALL = KeyGroupRange(0, 127)
PRODUCED = (ProducedRange("out", 0, 3, 10, 12),)


def folder(path: Path) -> FileStorage:
    """A place for a savepoint."""
    return FileStorage(str(path))


class Job:
    """The pipeline that is not there."""

    def __init__(self, folder: Path, uri: str = "") -> None:
        self.folder = folder
        self.storage = FileStorage(uri or str(folder))
        self.state = StepState("counts", 128, 2, KEY_SCHEMA, HASH_VERSION)
        self.epoch = -1
        self.base_path = ""
        self.storage.put("metadata", b'{"id":"first-lineage"}')

    def run(self, epochs: int = 1, files_min: int = MERGED_FILES_MIN) -> Manifest:
        """Each epoch sets one key, and changes one that all set; `files_min` changelogs merge."""
        for _ in range(epochs):
            merged = [
                write_merged(
                    self.storage, "counts", self.epoch, 0, f"n{self.epoch}", loads, base=self.state
                )
                for loads in due_merges(self.state, 2, files_min).values()
            ]
            self.epoch += 1
            value = b"of %d" % self.epoch
            keys = [b"\x00\x03\x01\x01all\x00\x00", b"\x00\x05\x01\x01%03d\x00\x00" % self.epoch]
            table = pa.table([keys, [value, value]], schema=ENTRIES)
            nonce = f"n{self.epoch}"
            file = write_changelog(self.storage, "counts", self.epoch, 0, nonce, table)
            assert file is not None
            self.state = extend(self.state, Version(self.epoch, nonce), [*merged, file])
            manifest = replace(self.manifest(PRODUCED), base_path=self.base_path)
            self.base_path = m.manifest_path(manifest, nonce)
            self.storage.put(self.base_path, manifest.encode())
            self.storage.put(f"offsets/{self.epoch}", b"v1\n{}\n{ends %d}" % self.epoch)
            self.storage.put(f"commits/{self.epoch}", b"v1\n{}")
        return manifest

    def clear_up(self) -> None:
        """Remove what no retained manifest names, as the driver does between two epochs."""
        here = CheckpointFolder(self.storage)
        Collection(here).go_on(here.read_manifest(here.manifest_paths()[-1]))

    def manifest(self, produced: tuple[ProducedRange, ...] = ()) -> Manifest:
        """Of the newest epoch."""
        producer = Producer("t", 1, self.epoch)
        positions = {TopicPartition("in", 0): 10 * self.epoch}
        sources = (json.dumps(SourceOffsets("cluster", "group", positions).to_json()),)
        return Manifest(
            self.epoch, "job", "first-lineage", sources, produced, producer, (self.state,)
        )

    def manifest_path(self, nonce: str) -> str:
        """Of another attempt of the newest epoch."""
        return m.manifest_path(self.manifest(), nonce)

    def entries(self) -> dict[bytes, bytes]:
        """What its state is."""
        return entries_of(self.state, ALL, self.storage)


def entries_of(step: StepState, groups: KeyGroupRange, storage: Storage) -> dict[bytes, bytes]:
    """Committed entries, to be compared with a dictionary."""
    keys, values = (column.to_pylist() for column in read_entries(step, groups, storage).columns)
    return dict(zip(keys, values, strict=True))


def job_with_savepoint(place: Path) -> Job:
    """Three epochs in `checkpoint`, the newest of them saved in `saved`."""
    job = Job(place / "checkpoint")
    job.run(3)
    savepoints.create(job.storage, folder(place / "saved"))
    return job
