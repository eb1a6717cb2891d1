"""The time until a worker has state: after a restore, a rescale, a change, or many epochs.

    .venv/bin/python benchmarks/rescale.py [--keys N] [--from N] [--to N] [--epochs N]
        [--changed SHARE] [--checkpoint URI]

No Spark and no Kafka: the state files and the local store of a keyed step, as its tasks use them.
State is that of the job `count`: a user as key, a count and a sum. It is built as epochs build it:
all keys in the first, a share of them in each later one, snapshots and merges when they are due.
Then each range of key groups is brought into an empty store, one after the other in one process;
appended to `results.jsonl`. The page cache is warm: files were written just now. A changed program
has a column more, or a time to live that there was none of: the first start after the change, and
an epoch later.
"""

import argparse
import itertools
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from harness import results

from tallystick.checkpoint.local.store import open_store
from tallystick.checkpoint.state_files import (
    bring_forward,
    write_changelog,
    write_merged,
    write_snapshot,
)
from tallystick.state.catalog import SNAPSHOT, StateField, StateFile, StepState, Version
from tallystick.state.evolution import evolved
from tallystick.state.file_sets import due_merges, due_snapshots, extend
from tallystick.state.functions.processing import COLUMNS, VALUE
from tallystick.state.key_groups import KeyGroupRange, key_group_range, key_groups_of
from tallystick.state.keys import HASH_VERSION, KeyCodec, entry_keys
from tallystick.state.overlay import ENTRIES
from tallystick.state.row_codec import ColumnsCodec
from tallystick.state.schema import text_of
from tallystick.storage.file_storage import FileStorage

HERE = Path(__file__).resolve().parent
UID, LINEAGE, STATE_ID = "count", "benchmark", 1
KEY = KeyCodec(pa.schema([("user", pa.string())]))
TOTALS = ColumnsCodec(pa.schema([("count", pa.int64()), ("sum", pa.float64())]))
SEED = 42
KEYS = 2_000_000
MAX_PARALLELISM = 128
FROM, TO = 2, 3
EPOCHS = 5
CHANGED = 0.1
GIGA, MEGA = 1e9, 1e6
_COLUMNS = StateField("wider", STATE_ID, COLUMNS, "", text_of(TOTALS.schema))
_WIDER = text_of(TOTALS.schema.append(pa.field("least", pa.int64())))
_VALUE = StateField("lasting", STATE_ID, VALUE, "", '{"type":"struct","fields":[]}')
CHANGES = [
    ("a column more", _COLUMNS, replace(_COLUMNS, value_schema=_WIDER)),
    ("a time to live", _VALUE, replace(_VALUE, ttl_ms=86_400_000)),
]
"""Changes of a program, with the state before and after; a time to live reads no values."""
HEADINGS = [
    *("what", "tasks", "seconds", "slowest task s", "CPU s", "MB read", "requests"),
    *("share of the files", "s per GB read", "s per GB of entries", "µs per key"),
]


@dataclass(frozen=True, slots=True)
class Times:
    """What it took to bring stores forward; `file_bytes` is the size of all files there were."""

    seconds: float
    slowest_s: float
    cpu_s: float
    bytes_read: int
    requests: int
    file_bytes: int


class Step:
    """A keyed step's checkpoint, written as a driver and its tasks write it.

    Args:
        storage: where its files go.
        keys: how many there are.
        max_parallelism: how many key groups.
        parallelism: how many tasks.
    """

    def __init__(
        self, storage: FileStorage, keys: int, max_parallelism: int, parallelism: int
    ) -> None:
        self.storage = storage
        self.parallelism = parallelism
        self.state = StepState(UID, max_parallelism, parallelism, KEY.schema_text, HASH_VERSION)
        users = pc.binary_join_element_wise("u", pa.array(range(keys)).cast(pa.string()), "")
        rows = pa.record_batch({"user": users})
        groups = key_groups_of(KEY.hash_codes(rows), max_parallelism)
        entries = entry_keys(groups, STATE_ID, KEY.encode(rows))
        order = pc.sort_indices(entries)
        self._keys = entries.take(order)
        self._groups = groups[order.to_numpy()]
        self._chance = np.random.default_rng(SEED)
        self._nonces = map(str, itertools.count())
        self.entry_bytes = 0

    def ranges(self, parallelism: int) -> list[KeyGroupRange]:
        """The key groups of each of so many tasks."""
        whole = self.state.max_parallelism
        return [key_group_range(whole, parallelism, index) for index in range(parallelism)]

    def run_epoch(self, root: Path, share: float) -> None:
        """Change a share of the keys, and commit.

        Args:
            root: of the local stores, which are brought to the committed state.
            share: of the keys, at random.
        """
        base = self.state.version
        epoch = base.epoch + 1 if base else 0
        snapshots = due_snapshots(self.state, self.parallelism)
        merges = due_merges(self.state, self.parallelism)
        files: list[StateFile] = []
        for index, groups in enumerate(self.ranges(self.parallelism)):
            store = open_store(root, LINEAGE, UID, groups)
            bring_forward(store, self.state, groups, self.storage)
            before = (self.storage, UID, epoch - 1, index)
            if index in merges:
                nonce = next(self._nonces)
                files.append(write_merged(*before, nonce, merges[index], base=self.state))
            if index in snapshots:
                with store.view(base) as view:
                    assert view is not None
                    nonce = next(self._nonces)
                    files.append(write_snapshot(*before, nonce, view, snapshots[index]))
            table = self._changes(groups, share)
            file = write_changelog(self.storage, UID, epoch, index, next(self._nonces), table)
            files += [file] if file else []
        self.state = extend(self.state, Version(epoch, next(self._nonces)), files)

    def _changes(self, groups: KeyGroupRange, share: float) -> pa.Table:
        first, stop = np.searchsorted(self._groups, [groups.first, groups.last + 1])
        keys = self._keys.slice(first, stop - first)
        if share < 1:
            keys = keys.filter(pa.array(self._chance.random(len(keys)) < share))
        counts = self._chance.integers(1, 100, len(keys))
        totals = pa.record_batch({"count": counts, "sum": np.round(counts * 50.37, 2)})
        values = TOTALS.encode(totals)
        if share >= 1:
            lengths = [pc.sum(pc.binary_length(column)).as_py() for column in (keys, values)]
            self.entry_bytes += sum(lengths)
        return pa.table([keys, values], schema=ENTRIES)


def main() -> None:
    """Build state, bring it into stores in all the ways there are, print what it took."""
    arguments = parse_arguments()
    directory = Path(tempfile.mkdtemp(dir=arguments.work))
    try:
        location = arguments.checkpoint or str(directory / "checkpoint")
        step = Step(
            FileStorage(location), arguments.keys, arguments.max_parallelism, arguments.parallelism
        )
        build(step, directory, arguments)
        report(step, directory, arguments)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def parse_arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--keys", type=int, default=KEYS)
    parser.add_argument("--max-parallelism", type=int, default=MAX_PARALLELISM, help="key groups")
    parser.add_argument("--from", type=int, default=FROM, dest="parallelism", help="tasks")
    parser.add_argument("--to", type=int, default=TO, help="tasks after the rescale")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="after the first")
    parser.add_argument("--changed", type=float, default=CHANGED, help="share of the keys, each")
    parser.add_argument("--checkpoint", help="a URI, where the state files go and stay")
    parser.add_argument("--work", type=Path, default=HERE / "work")
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    return arguments


def build(step: Step, directory: Path, arguments: argparse.Namespace) -> None:
    """Write the state, epoch by epoch."""
    started_s = time.perf_counter()
    step.run_epoch(directory / "writers", 1.0)
    for _ in range(arguments.epochs):
        step.run_epoch(directory / "writers", arguments.changed)
    files = step.state.files
    print(
        f"{arguments.keys:,} keys in {arguments.max_parallelism} key groups; "
        f"{step.entry_bytes / MEGA:,.1f} MB of entries; {len(files)} files, "
        f"{sum(file.kind == SNAPSHOT for file in files)} of them snapshots, "
        f"{size_of(files) / MEGA:,.1f} MB; built in {time.perf_counter() - started_s:.1f} s",
        flush=True,
    )


def report(step: Step, directory: Path, arguments: argparse.Namespace) -> None:
    """Bring stores forward in all ways, print and keep what it took."""
    old, new = step.ranges(arguments.parallelism), step.ranges(arguments.to)
    behind = directory / "behind"
    cases = [
        ("restore", len(old), True, timed(step, old, directory / "restored")),
        ("nothing to do", len(old), False, timed(step, old, directory / "restored")),
        (f"rescale to {arguments.to}", len(new), True, timed(step, new, directory / "rescaled")),
        ("rescale, one range", 1, True, timed(step, new[:1], directory / "one")),
    ]
    timed(step, old, behind)
    unchanged = step.state
    step.run_epoch(directory / "writers", arguments.changed)
    cases.append(("one epoch behind", len(old), False, timed(step, old, behind)))
    for what, before, now in CHANGES:
        # Each has writers of its own: a copy belongs to a schema.
        root = directory / now.name
        fields = replace(unchanged, fields=(before,))
        step.state = evolved(fields, [now], STATE_ID + 1, {}, timestamp_ms=1, defaults={})
        cases.append((f"restore, {what}", len(old), True, timed(step, old, root / "behind")))
        timed(step, old, root / "writers")
        step.run_epoch(root / "writers", arguments.changed)
        times = timed(step, old, root / "behind")
        cases.append((f"one epoch behind, {what}", len(old), False, times))
    rows = []
    for what, tasks, loads_all, times in cases:
        # Of all entries; only what came from a checkpoint tells of its speed.
        share = (1 / len(new) if tasks == 1 else 1.0) if loads_all else 0.0
        rows.append(
            [
                *(what, str(tasks), f"{times.seconds:.3f}", f"{times.slowest_s:.3f}"),
                *(f"{times.cpu_s:.3f}", f"{times.bytes_read / MEGA:,.2f}", str(times.requests)),
                f"{times.bytes_read / times.file_bytes:.3f}",
                per(times.seconds, times.bytes_read / GIGA),
                per(times.seconds, share * step.entry_bytes / GIGA),
                per(times.seconds * MEGA, share * arguments.keys),
            ]
        )
        chosen = ("keys", "max_parallelism", "parallelism", "to", "epochs", "changed")
        settings = {name: getattr(arguments, name) for name in chosen}
        config = {**results.environment(HERE), **settings}
        row = {"tasks": tasks, **{name: getattr(times, name) for name in Times.__slots__}}
        row["entry_bytes"] = step.entry_bytes
        results.append_row(arguments.results, f"rescale: {what}", row, config=config)
    print(f"\n{results.markdown(HEADINGS, rows)}")


def timed(step: Step, ranges: Sequence[KeyGroupRange], root: Path) -> Times:
    """Bring a store of each range to the committed state, one after the other."""
    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    each_s, bytes_read, requests = [], 0, 0
    for groups in ranges:
        before_s = time.perf_counter()
        store = open_store(root, LINEAGE, UID, groups)
        restored = bring_forward(store, step.state, groups, step.storage)
        assert store.version() == step.state.version, store
        each_s.append(time.perf_counter() - before_s)
        bytes_read, requests = bytes_read + restored.bytes_read, requests + restored.requests
    return Times(
        seconds=time.perf_counter() - began_s,
        slowest_s=max(each_s),
        cpu_s=time.process_time() - cpu_began_s,
        bytes_read=bytes_read,
        requests=requests,
        file_bytes=size_of(step.state.files),
    )


def per(amount: float, of: float) -> str:
    """A quotient as text; nothing where there is nothing to divide by."""
    return f"{amount / of:.2f}" if of else "-"


def size_of(files: Sequence[StateFile]) -> int:
    """Bytes of all of them."""
    return sum(file.size for file in files)


if __name__ == "__main__":
    main()
