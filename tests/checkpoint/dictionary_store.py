"""The ports in memory: a store that is a dictionary, a storage that counts what is read."""

from contextlib import contextmanager

import pyarrow as pa

from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.overlay import ENTRIES


def group_of(key):
    return int.from_bytes(key[:2], "big")


def within(entries, groups):
    return {
        key: value for key, value in entries.items() if groups.first <= group_of(key) <= groups.last
    }


class DictionaryStore:
    """StateStore, with nothing that could go wrong."""

    def __init__(self):
        self.entries = {}
        self.at = None

    def version(self):
        return self.at

    def apply(self, expected, version, steps):
        if expected != self.at:
            return False
        self.at = None
        for step in steps:
            if isinstance(step, KeyGroupRange):
                for key in within(self.entries, step):
                    del self.entries[key]
            else:
                rows = dict(zip(*(column.to_pylist() for column in step.columns), strict=True))
                self.entries.update(rows)
        self.entries = {key: value for key, value in self.entries.items() if value is not None}
        self.at = version
        return True

    @contextmanager
    def view(self, version):
        yield DictionaryView(self.entries) if version == self.at else None


class DictionaryView:
    """StateView of a dictionary."""

    def __init__(self, entries):
        self.entries = dict(sorted(entries.items()))

    def get_many(self, keys):
        return pa.array([self.entries.get(key) for key in keys.to_pylist()], pa.binary())

    def scan(self, first, end):
        return iter([entry for entry in self.entries.items() if first <= entry[0] < end])

    def batches(self, groups):
        rows = within(self.entries, groups)
        if rows:
            columns = [pa.array(column, pa.binary()) for column in (rows.keys(), rows.values())]
            yield pa.RecordBatch.from_arrays(columns, schema=ENTRIES)


class MemoryStorage:
    """Storage; `read` counts the bytes of each path."""

    location = "memory://checkpoint"

    def __init__(self):
        self.files = {}
        self.read = {}

    def put(self, path, data):
        assert path not in self.files, "a name is used twice"
        self.files[path] = data

    def get(self, path):
        return self.get_range(path, 0, 1 << 60)

    def get_range(self, path, offset, length):
        if path not in self.files:
            return None
        data = self.files[path]
        start = offset if offset >= 0 else max(0, len(data) + offset)
        part = data[start : start + length]
        self.read[path] = self.read.get(path, 0) + len(part)
        return part

    def names(self, folder):
        return sorted(path for path in self.files if path.startswith(f"{folder}/"))

    def delete(self, path):
        self.files.pop(path, None)
