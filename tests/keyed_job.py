"""Keyed steps without Spark: what the engine does with frames, in one thread and in memory."""

import json
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pyarrow as pa

from tallystick.codec.json.write import JsonWriter
from tallystick.codec.records.decoder import decode
from tallystick.codec.records.encoder import stamp
from tallystick.codec.rows import RowLayout
from tallystick.epoch.protocol import EpochRan
from tallystick.state.catalog import StepState, Version
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.keys import KeyCodec
from tallystick.state.overlay import ENTRIES
from tallystick.tasks.epoch_plan import EpochPlan, PipelinePlan
from tallystick.tasks.event_times import InputState
from tallystick.tasks.frames import Frame, FrameSources
from tallystick.tasks.keyed import SLICE_BYTES, KeyedStep
from tallystick.tasks.outputs import OF_DEAD_LETTERS
from tallystick.tasks.read import EncodePlan, Report, Route, Sent, send
from tallystick.values import Producer, TopicPartition

EVENTS = pa.schema([("user", pa.string()), ("n", pa.int64()), ("at", pa.int64())])


@dataclass
class MemoryFiles:
    """The Storage port over a dict."""

    files: dict[str, bytes] = field(default_factory=dict)
    location: str = "memory:"

    def put(self, path: str, data: bytes) -> None:
        assert path not in self.files, f"{path} is written a second time"
        self.files[path] = data

    def get(self, path: str) -> bytes | None:
        return self.files.get(path)

    def get_range(self, path: str, offset: int, length: int) -> bytes | None:
        data = self.files.get(path)
        start = offset if offset >= 0 else max(0, len(data or b"") + offset)
        return None if data is None else data[start : start + length]

    def names(self, folder: str) -> list[str]:
        return sorted(path for path in self.files if path.startswith(f"{folder}/"))

    def delete(self, path: str) -> None:
        self.files.pop(path, None)


class MemoryStore:
    """The StateStore port, and its view, over a dict."""

    def __init__(self) -> None:
        self.entries: dict[bytes, bytes] = {}
        self.at: Version | None = None

    def version(self) -> Version | None:
        return self.at

    def apply(self, expected, version, steps: Iterable[KeyGroupRange | pa.RecordBatch]) -> bool:
        assert self.at == expected
        for step in steps:
            if isinstance(step, KeyGroupRange):
                low, high = (bound.to_bytes(2, "big") for bound in (step.first, step.last + 1))
                self.entries = {k: v for k, v in self.entries.items() if not low <= k < high}
                continue
            for key, value in zip(*(column.to_pylist() for column in step.columns), strict=True):
                self.entries.pop(key, None)
                if value is not None:
                    self.entries[key] = value
        self.at = version
        return True

    @contextmanager
    def view(self, version: Version | None) -> Iterator["MemoryStore | None"]:
        yield self if version == self.at else None

    def get_many(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        return pa.array([self.entries.get(key) for key in keys.to_pylist()], pa.binary())

    def scan(self, first: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        return ((k, v) for k, v in sorted(self.entries.items()) if first <= k < end)

    def batches(self, groups: KeyGroupRange) -> Iterator[pa.RecordBatch]:
        low, high = (bound.to_bytes(2, "big") for bound in (groups.first, groups.last + 1))
        entries = list(self.scan(low, high))
        if entries:
            keys, values = zip(*entries, strict=True)
            yield pa.record_batch([list(keys), list(values)], schema=ENTRIES)


@dataclass
class MemoryHost:
    """Files and stores of one host."""

    files: MemoryFiles = field(default_factory=MemoryFiles)
    stores: dict[tuple[str, KeyGroupRange], MemoryStore] = field(default_factory=dict)
    opened: list[str] = field(default_factory=list)

    def storage(self) -> MemoryFiles:
        return self.files

    def store(self, uid: str, groups: KeyGroupRange) -> MemoryStore:
        self.opened.append(uid)
        return self.stores.setdefault((uid, groups), MemoryStore())


def step(processor, *, uid="count", key=("user",), columns=EVENTS, output=None, **settings):
    """A keyed step; the output has the columns of `columns` if not said."""
    codec = KeyCodec(pa.schema([columns.field(name) for name in key]))
    return KeyedStep(
        uid=uid,
        key=codec,
        columns=columns,
        processor=processor,
        declared=processor.declared(codec),
        output=columns if output is None else output,
        **settings,
    )


@dataclass
class Job:
    """A pipeline's keyed steps over epochs; its output is JSON in two partitions of `out`."""

    steps: tuple[KeyedStep, ...]
    worker_host: MemoryHost = field(default_factory=MemoryHost)
    state: tuple[StepState, ...] = ()
    late: tuple[tuple[str, int], ...] = ()
    epoch: int = -1
    letters: RowLayout = field(default_factory=lambda: RowLayout({"dead": 1}, "dead"))
    routes: tuple[Route, ...] = ()
    slice_bytes: int = SLICE_BYTES
    shares: list[int] = field(default_factory=list)

    def run(self, *sources: list[Sent], at_ms: int = 0, **settings) -> list[dict]:
        """Run an epoch and commit it; the rows of the output, in order per partition."""
        planned = self.plan(at_ms=at_ms, **settings)
        prepared, rows = finish(planned, self.written(planned, sources))
        self.state, self.late = prepared.state, prepared.late
        return rows

    def plan(
        self,
        *,
        parallelism: int | None = None,
        at_ms: int = 0,
        source: InputState | None = None,
    ) -> EpochPlan:
        """Plan the next epoch."""
        steps = tuple(replace(s, parallelism=parallelism or s.parallelism) for s in self.steps)
        layout = RowLayout({"out": 2}, "out", value=JsonWriter(), key="user")
        letters = Route(self.letters, "none", 900_000, OF_DEAD_LETTERS)
        encode = EncodePlan((Route(layout, "none", 900_000), letters, *self.routes), 2)
        self.epoch += 1
        keyed = PipelinePlan(
            steps,
            task_count=2,
            worker_host=self.worker_host,
            slice_bytes=self.slice_bytes,
            on_share=self.shares.append,
        )
        return keyed.epoch(self.epoch, at_ms, f"token-{self.epoch}", self.state, encode, source)

    def written(self, planned: EpochPlan, sources: Iterable[list[Sent]]) -> list[list[Frame]]:
        """The frames of each writing task."""
        frames = [f for at, sent in enumerate(sources) for f in send(planned.first, sent, at)]
        for plan in planned.plans:
            shares = routed(frames, plan.base.parallelism)
            frames = [f for at, mine in enumerate(shares) for f in plan.run(mine, at)]
        return routed(frames, planned.writer_count)


def routed(frames: Iterable[Frame], count: int) -> list[list[Frame]]:
    """What the shuffle does."""
    ordered = sorted(frames, key=operator.attrgetter("source", "sequence"))
    return [[f for f in ordered if f.target == target] for target in range(count)]


def finish(planned: EpochPlan, written: list[list[Frame]]) -> tuple[EpochRan, list[dict]]:
    """What the writing tasks and the driver make of it."""
    reports, rows = [], []
    for frames in written:
        sources = FrameSources(planned.stage)
        rows += [row for f in sources.with_rows(frames) for row in values_of(f)]
        reports.append(Report(attempts=sources.attempts, notes=tuple(sources.notes)))
    return planned.prepared(reports), rows


def values_of(frame: Frame) -> list[dict]:
    """The records of a finished frame."""
    batch = decode(
        stamp(frame.data, Producer("t", 1, 0), 0),
        topic_partition=TopicPartition(frame.topic, frame.partition),
        start_offset=0,
        stop_offset=frame.record_count,
        aborted=None,
        headers=False,
    ).batch
    if frame.topic == "dead":
        return [{"dead": value.decode()} for value in batch["value"].to_pylist()]
    return [json.loads(value) for value in batch["value"].to_pylist()]


def events(*rows: tuple[str | None, int] | tuple[str | None, int, int]) -> pa.RecordBatch:
    """Rows (user, n[, at])."""
    return pa.RecordBatch.from_pylist(
        [dict(zip(EVENTS.names, (*row, 0)[:3], strict=True)) for row in rows], schema=EVENTS
    )


def by_user(rows: Iterable[dict], value: str = "n") -> dict[str, list[int]]:
    """The values of each user, in order."""
    values_by_user: dict[str, list[int]] = {}
    for row in rows:
        values_by_user.setdefault(row["user"], []).append(row[value])
    return values_by_user


Function = Callable[..., object]
