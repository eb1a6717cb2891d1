"""Operator state of the simulated world: two lists of the readers, and a table that each task has.

- `tallies` is divided evenly among other readers. An element counts records of a partition,
  wherever it is held: those of a partition add up to what was read of it.
- `marks` is union list state, as a source of Flink's keeps it: an element is where the reading of a
  partition goes on. It follows its partition to the reader of it, which compares it with what
  comes.
- `rules` is a table from a topic of its own, with rows that are deleted. Each reader compares it
  with what the epoch's offsets say.

What readers find is wrong, they raise, and no driver may end so. `wrong_state` reads the files that
a manifest names, and says what they hold besides.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import pyarrow as pa

from tallystick.ports import Storage
from tallystick.source.offsets import ONLY_INPUT, of_input
from tallystick.state.catalog import StepState
from tallystick.state.operator_state import ListCodec, TableCodec
from tallystick.tasks.epoch_plan import EpochPlan, PipelinePlan
from tallystick.tasks.frames import Frame, Note
from tallystick.tasks.keyed import WorkerHost
from tallystick.tasks.operator_state import (
    ListFunction,
    ListStep,
    OpenList,
    TableFunction,
    TablePlan,
    TableStep,
    with_lists,
    with_tables,
)
from tallystick.tasks.read import BatchFunction
from tallystick.tasks.read_plan import ReadPlan, send_read
from tallystick.values import SplitRange, TopicPartition
from tests.simulation.fetch import parts_of, read_plan
from tests.simulation.rows import RULES, key_of
from tests.simulation.storage import SimulatedStorage

TALLIES, MARKS, TABLE = "tallies", "marks", "rules"
UIDS = (TABLE, TALLIES, MARKS)
ELEMENTS = pa.schema(
    [
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int64()),
        pa.field("number", pa.int64()),
    ]
)
LIST_CODEC = ListCodec(ELEMENTS)
RULE_COLUMNS = pa.schema([pa.field("rule", pa.int64()), pa.field("value", pa.int64())])
TABLE_CODEC = TableCodec(RULE_COLUMNS, ["rule"])
RULES_SPLIT = TopicPartition("rules", 0)
DELETES_EVERY = 4
"""One control record in so many deletes the row of its key."""

Rules = Mapping[int, int]
Numbers = Mapping[TopicPartition, int]
BeforeAnswer = Callable[[TopicPartition], None]


class WrongStateError(Exception):
    """A reader found other state than it must have."""


# What it must be.


def rules_in(offsets: range) -> Rules:
    """Return the table after these control records."""
    content: dict[int, int] = {}
    for offset in offsets:
        rule = key_of(RULES_SPLIT, offset)
        content.pop(rule, None)
        if offset % DELETES_EVERY:
            content[rule] = offset
    return content


def wrong_state(
    begins: Numbers,
    ends: Numbers,
    state: Collection[StepState],
    entries_of: Callable[[StepState], Mapping[bytes, bytes]],
) -> Iterator[str]:
    """Yield what is wrong with the state that a manifest names.

    Args:
        begins: the positions with which the state began.
        ends: those of the manifest.
        state: all of it.
        entries_of: reads the files of one.
    """
    read = {at: end - begins[at] for at, end in ends.items() if at != RULES and end > begins[at]}
    by_uid = {step_state.uid: step_state for step_state in state}
    if not by_uid.keys() >= set(UIDS):
        if read:
            yield f"it has only {sorted(by_uid)}"
        return
    tallies = Counter[TopicPartition]()
    for at, number in _elements(by_uid[TALLIES], entries_of):
        tallies[at] += number
    if tallies != read:
        yield f"its tallies are {dict(tallies)}, expected {read}"
    marks = sorted(_elements(by_uid[MARKS], entries_of))
    if marks != sorted((at, ends[at]) for at in read):
        yield f"its marks are {marks}, expected {[(at, ends[at]) for at in sorted(read)]}"
    rules = _rules(by_uid[TABLE], entries_of)
    if rules != (expected := rules_in(range(begins[RULES], ends[RULES]))):
        yield f"its rules are {rules}, expected {expected}"


def _elements(
    step: StepState, entries_of: Callable[[StepState], Mapping[bytes, bytes]]
) -> list[tuple[TopicPartition, int]]:
    """Return the elements of all tasks that there are."""
    entries = entries_of(step)
    tasks = [int.from_bytes(key[:2], "big") for key in entries]
    if any(task >= step.parallelism for task in tasks):
        return [(TopicPartition(f"of a task that is gone: {tasks}", 0), 0)]
    return _numbers(LIST_CODEC.decode(pa.array(entries.values(), pa.binary())))


def _numbers(elements: pa.RecordBatch) -> list[tuple[TopicPartition, int]]:
    return [
        (TopicPartition(element["topic"], element["partition"]), element["number"])
        for element in elements.to_pylist()
    ]


def _rules(
    step: StepState, entries_of: Callable[[StepState], Mapping[bytes, bytes]]
) -> dict[int, int]:
    entries = entries_of(step)
    keys, values = pa.array(entries, pa.binary()), pa.array(entries.values(), pa.binary())
    rows = TABLE_CODEC.rows(pa.record_batch({"key": keys, "value": values}))
    return _as_rules(rows)


def _as_rules(rows: pa.Table) -> dict[int, int]:
    return dict(zip(rows["rule"].to_pylist(), rows["value"].to_pylist(), strict=True))


# What readers do.


@dataclass(frozen=True)
class Memory:
    """A task's way to the checkpoint, from a process that remembers what it has seen."""

    files: Storage

    def storage(self) -> Storage:
        """See `tasks.operator_state.StateFiles.storage`."""
        return self.files


def memory_of(worker_host: WorkerHost, process: str) -> Memory:
    """Return the way of a task in a process: state in memory is told apart by the location."""
    files = worker_host.storage()
    assert isinstance(files, SimulatedStorage)
    return Memory(files.seen_from(process))


def with_operator_state(
    steps: PipelinePlan, worker_host: WorkerHost, partitions: Collection[TopicPartition]
) -> PipelinePlan:
    """Return the steps of a run with its table and lists."""
    names = sorted(partitions)

    def own(elements: pa.RecordBatch, task: int, count: int) -> pa.RecordBatch:
        is_own = [owner(at, names, count) == task for at, _ in _numbers(elements)]
        return elements.filter(pa.array(is_own, pa.bool_()))

    never = read_plan(random.Random(), lambda _: None, _as_rule_rows)  # each reader has its own
    table = TableStep(TABLE, TABLE_CODEC, never, _deletes)
    lists = ListStep(TALLIES, LIST_CODEC), ListStep(MARKS, LIST_CODEC, own)
    return replace(steps, worker_host=worker_host, tables=(table,), lists=lists)


def owner(partition: TopicPartition, names: list[TopicPartition], count: int) -> int:
    """Return the reader of a partition: the same one as long as there are as many readers."""
    return names.index(partition) % count


@dataclass(frozen=True)
class Reading:
    """The readers of an epoch with operator state.

    Args:
        epoch: the plans.
        ranges: what is read, by partition.
        rules: the table that it must have.
        dice: see `SimulatedFetch`.
    """

    epoch: EpochPlan
    ranges: Mapping[TopicPartition, range]
    rules: Rules
    dice: random.Random

    @property
    def reader_count(self) -> int:
        """The number of readers: all tasks are, those with nothing to read too."""
        return self.epoch.lists[0].base.parallelism

    def send(
        self,
        reader: int,
        plan: Callable[[str], ReadPlan],
        memory: Memory,
        before_answer: BeforeAnswer,
        attempt_number: int = 0,
    ) -> Iterator[Frame]:
        """Yield the frames of a reader, as `spark.tasks.Unread.send` does.

        Args:
            reader: its index.
            plan: how it reads an input, but for the state.
            memory: of its process.
            before_answer: see `SimulatedFetch`.
            attempt_number: Spark's.
        """
        rules = read_plan(self.dice, before_answer, _as_rule_rows)
        tables = [
            replace(table, step=replace(table.step, read=rules), files=memory)
            for table in self.epoch.tables
        ]
        lists = [
            (operator_list.step.uid, replace(operator_list, files=memory).opened(reader))
            for operator_list in self.epoch.lists
        ]

        def with_state(input_: str) -> ReadPlan:
            planned = plan(input_)
            return replace(
                planned, functions=(*self._functions(input_, tables, lists), *planned.functions)
            )

        def notes() -> list[Note]:
            of_tables = [note for table in tables for note in table.notes(reader)]
            return [
                *of_tables,
                *(note for _, operator_list in lists for note in operator_list.notes()),
            ]

        names, count = sorted(self.ranges), self.reader_count
        own_ranges = {at: self.ranges[at] for at in names if owner(at, names, count) == reader}
        parts = parts_of(with_state, own_ranges) or [(with_state(ONLY_INPUT), [])]
        return send_read(parts, self.epoch.first, reader, attempt_number, notes)

    def _functions(
        self, input_: str, tables: list[TablePlan], lists: list[tuple[str, OpenList]]
    ) -> tuple[BatchFunction, ...]:
        functions = (
            TableFunction(_compared_with(self.rules), TABLE),
            ListFunction(_counted(input_), TALLIES),
            ListFunction(_marked(input_), MARKS),
        )
        return with_lists(with_tables(functions, tables), lists)


def rules_splits(offsets: range) -> dict[str, tuple[SplitRange, ...]]:
    """Return what is new in the control topic, as epochs are planned with it."""
    if not offsets:
        return {}
    return {TABLE: (SplitRange(*RULES_SPLIT, offsets.start, offsets.stop),)}


def _as_rule_rows(rows: pa.RecordBatch) -> pa.RecordBatch:
    rules = [int(value) for value in rows["value"].to_pylist()]
    return pa.record_batch([pa.array(rules, pa.int64()), rows["offset"]], schema=RULE_COLUMNS)


def _deletes(rows: pa.RecordBatch) -> pa.Array:
    deletes = [not value % DELETES_EVERY for value in rows["value"].to_pylist()]
    return pa.array(deletes, pa.bool_())


def _compared_with(expected: Rules) -> Callable[[pa.RecordBatch, pa.Table], pa.RecordBatch]:
    def compared(rows: pa.RecordBatch, table: pa.Table) -> pa.RecordBatch:
        if (rules_read := _as_rules(table)) != expected:
            raise WrongStateError(f"a reader has the rules {rules_read}, expected {dict(expected)}")
        return rows

    return compared


ListChange = Callable[[pa.RecordBatch, pa.RecordBatch], tuple[pa.RecordBatch, pa.RecordBatch]]


def _counted(input_: str) -> ListChange:
    def counted(
        rows: pa.RecordBatch, elements: pa.RecordBatch
    ) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        numbers = dict.fromkeys((at for at, _ in _numbers(elements)), 0)
        for at, number in [*_numbers(elements), *((at, 1) for at, _ in _places(rows, input_))]:
            numbers[at] = numbers.get(at, 0) + number
        return rows, _as_elements(numbers)

    return counted


def _marked(input_: str) -> ListChange:
    def marked(
        rows: pa.RecordBatch, elements: pa.RecordBatch
    ) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        marks = dict(_numbers(elements))
        for at, offset in _places(rows, input_):
            if marks.get(at, offset) != offset:
                raise WrongStateError(f"a reader of {at} is at {offset}, its mark at {marks[at]}")
            marks[at] = offset + 1
        return rows, _as_elements(marks)

    return marked


def _places(rows: pa.RecordBatch, input_: str) -> list[tuple[TopicPartition, int]]:
    names = ("topic", "partition", "offset")
    places = zip(*(rows[name].to_pylist() for name in names), strict=True)
    return [(of_input(input_, TopicPartition(*at)), offset) for *at, offset in places]


def _as_elements(numbers: Numbers) -> pa.RecordBatch:
    columns = [
        pa.array([at.topic for at in numbers], pa.string()),
        pa.array([at.partition for at in numbers], pa.int64()),
        pa.array(numbers.values(), pa.int64()),
    ]
    return pa.record_batch(columns, schema=ELEMENTS)
