"""The port of both engines, and the plans of a Spark job on their way to its tasks.

A task's function travels with all that it holds. Above 1 MiB (`spark.broadcast.
UDFCompressionThreshold`) PySpark makes a broadcast variable of it, whose file lies on the driver's
disk as long as the SparkContext lives: a file per job, for ever. A function of the user's that
holds a table or a model is as large, and so are the splits or state files of ten thousand
partitions. So large plans are broadcast here, and destroyed when their job has ended.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import TracebackType
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import pyarrow as pa
from pyspark import Broadcast, SparkContext
from pyspark.serializers import CloudPickleSerializer

from tallystick.source.splits import cut_splits, share_out, share_pieces
from tallystick.tasks.epoch_plan import EpochPlan
from tallystick.tasks.frames import Frame, Note
from tallystick.tasks.operator_state import ListPlan, TablePlan, with_lists, with_tables
from tallystick.tasks.outputs import DeadLetters
from tallystick.tasks.read import Outlet, Report, WritePlan
from tallystick.tasks.read_plan import ReadPlan, send_read
from tallystick.tasks.write import CollectPlan
from tallystick.values import SplitRange, TopicPartition

logger = logging.getLogger(__name__)

LARGE_BYTES = 256 << 10
"""Plans from this size on are broadcast; a task's function holds three at most."""

_Plan = TypeVar("_Plan")
_SERIALIZER: Any = CloudPickleSerializer()  # type: ignore[no-untyped-call]


class BroadcastPlans:
    """The plans of a Spark job's tasks; leaving the context destroys their broadcast variables."""

    def __init__(self, context: SparkContext) -> None:
        self._context = context
        self._broadcasts: list[Broadcast[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Destroy the broadcast variables; the job has ended, or failed."""
        while self._broadcasts:
            try:
                self._broadcasts.pop().destroy()
            except Exception as failed:  # the session is stopping, perhaps; the job's error counts
                logger.warning("a broadcast variable is not destroyed: %s", failed)

    def pack(self, plan: _Plan) -> "Parcel[_Plan]":
        """Return a parcel of a plan, for a task's function to hold."""
        return Parcel(lambda: plan, self._ship)

    def _ship(self, data: bytes) -> bytes | Broadcast[bytes]:
        if len(data) < LARGE_BYTES:
            return data
        self._broadcasts.append(self._context.broadcast(data))
        return self._broadcasts[-1]


class Parcel(Generic[_Plan]):
    """A plan that a task's function holds.

    It is pickled when the function is, on the same thread, so that PySpark learns then of broadcast
    variables of the user's own that are in it. It is unpickled when its plan is first asked for: a
    process that only passes it on runs no code of the user's.

    Args:
        unpack: returns the plan.
        ship: takes the pickled plan to the tasks; None: it is there.
    """

    def __init__(
        self,
        unpack: Callable[[], _Plan],
        ship: Callable[[bytes], bytes | Broadcast[bytes]] | None = None,
    ) -> None:
        self._unpack = unpack
        self._ship = ship

    @property
    def is_open(self) -> bool:
        """True if this process, or the process it was forked from, has unpacked the plan."""
        return "plan" in vars(self)

    @cached_property
    def plan(self) -> _Plan:
        """The plan."""
        return self._unpack()

    def __reduce__(
        self,
    ) -> tuple[Callable[[bytes | Broadcast[bytes]], "Parcel[_Plan]"], tuple[object]]:
        assert self._ship is not None, "tasks send no parcels on"
        return _arrived, (self._ship(_SERIALIZER.dumps(self.plan)),)


def _arrived(shipped: bytes | Broadcast[bytes]) -> Parcel[_Plan]:
    def unpack() -> _Plan:
        plan: _Plan = _SERIALIZER.loads(shipped if isinstance(shipped, bytes) else shipped.value)
        return plan

    return Parcel(unpack)


Shares = tuple[tuple[SplitRange, ...], ...]
"""The splits of each reader."""


class InputSplits(NamedTuple):
    """The splits of one input.

    Args:
        splits: one per partition.
        split_count_min: partitions are cut into about this many pieces; None: partitions stay
            whole, and go to readers as in Flink.
    """

    splits: tuple[SplitRange, ...]
    split_count_min: int | None = None


def share(parallelism: int, *inputs: InputSplits, takes_all: bool = False) -> tuple[Shares, ...]:
    """Divide the splits of each input among the same readers.

    Args:
        parallelism: how many tasks run at a time, the most readers.
        inputs: the splits to read.
        takes_all: all tasks are readers, those with nothing to read too: so a partition that is
            not cut has the same reader in every epoch.
    """
    pieces = [cut_splits(*input_splits) for input_splits in inputs]
    reader_count = parallelism if takes_all else max(1, min(parallelism, sum(map(len, pieces))))
    return tuple(
        share_pieces(parts, reader_count)
        if len(parts) > len(input_splits.splits)
        else share_out(parts, reader_count)
        for parts, input_splits in zip(pieces, inputs, strict=True)
    )


@dataclass(frozen=True)
class UnreadInput:
    """The splits of an input by reader, with the plan to read them."""

    shares: Shares
    plan: ReadPlan

    @property
    def is_cut(self) -> bool:
        """True if several readers have parts of one partition."""
        partitions = [{split.topic_partition for split in share} for share in self.shares]
        return sum(map(len, partitions)) > len(set[TopicPartition]().union(*partitions))


@dataclass(frozen=True)
class Unread:
    """All that an epoch reads; each input is divided among the same readers.

    Args:
        inputs: of the pipeline.
        control: what is new for broadcast tables, by uid: each task reads it.
        tables: with their plans, which have the same.
        lists: list states of the readers.
    """

    inputs: tuple[UnreadInput, ...]
    control: Mapping[str, tuple[SplitRange, ...]] = field(default_factory=dict)
    tables: tuple[TablePlan, ...] = ()
    lists: tuple[ListPlan, ...] = ()

    def with_state(self, plans: tuple[TablePlan, ...], lists: tuple[ListPlan, ...]) -> "Unread":
        """Return the same with the operator state of an epoch."""
        if not (plans or lists):
            return self
        inputs = tuple(
            replace(
                source,
                plan=replace(source.plan, functions=with_tables(source.plan.functions, plans)),
            )
            for source in self.inputs
        )
        return Unread(inputs, tables=plans, lists=lists)

    @property
    def reader_count(self) -> int:
        """The number of readers."""
        return len(self.inputs[0].shares)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to be read."""
        shares = (share for source in self.inputs for share in source.shares)
        return not any((*shares, *self.control.values()))

    @property
    def only_topic(self) -> str:
        """The topic that everything is read from; "" where there are several, or none."""
        topics = {
            split.topic for source in self.inputs for share in source.shares for split in share
        }
        return next(iter(topics)) if len(self.inputs) == len(topics) == 1 else ""

    @property
    def is_cut(self) -> bool:
        """True if the order of a partition is that of the readers."""
        return any(source.is_cut for source in self.inputs)

    def send(self, reader: int, outlet: Outlet, attempt_number: int) -> Iterator[Frame]:
        """Yield the frames of a reader; see `read_plan.send_read`."""
        lists = [(plan.step.uid, plan.opened(reader)) for plan in self.lists]
        parts = [
            (
                replace(source.plan, functions=with_lists(source.plan.functions, lists)),
                source.shares[reader],
            )
            for source in self.inputs
        ]

        def notes() -> list[Note]:
            of_tables = [note for table in self.tables for note in table.notes(reader)]
            return [*of_tables, *(note for _, open_list in lists for note in open_list.notes())]

        return send_read(parts, outlet, reader, attempt_number, notes)

    def read(self, readers: Sequence[int]) -> Iterator[pa.RecordBatch]:
        """Yield the well-formed rows of some readers."""
        for plan, splits in self._parts(readers):
            yield from plan.read(splits)

    def read_dead_letters(self, readers: Sequence[int]) -> Iterator[DeadLetters]:
        """Yield the malformed records of some readers, of inputs that leave them to a topic."""
        for plan, splits in self._parts(readers):
            yield from plan.read_dead_letters(splits)

    def _parts(self, readers: Sequence[int]) -> Iterable[tuple[ReadPlan, list[SplitRange]]]:
        for source in self.inputs:
            yield source.plan, [split for reader in readers for split in source.shares[reader]]


class TaskRunner(Protocol):
    """Runs the tasks of epochs that begin with splits."""

    def run(self, unread: Unread, epoch: EpochPlan, write: WritePlan | CollectPlan) -> list[Report]:
        """Run all tasks of an epoch; each has stopped writing when this returns, or raises.

        Raises:
            EpochAbortedError: a task is lost, with all its work.
            what a function of the user's raised.
        """
        ...
