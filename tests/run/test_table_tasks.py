"""Broadcast tables in tasks, without Spark and Kafka: from files, from memory, from both."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tallystick.errors import BrokenInvariantError, EpochAbortedError, OptionError, RecordError
from tallystick.state.catalog import SNAPSHOT, StepState
from tallystick.state.operator_state import WHOLE, TableCodec, TableContent
from tallystick.tasks import operator_state
from tallystick.tasks.enrichment import Enrichment
from tallystick.tasks.epoch_plan import PipelinePlan
from tallystick.tasks.operator_state import TableFunction, TablePlan, TableStep, with_tables
from tallystick.tasks.outputs import DeclaredFunction
from tallystick.tasks.read import EncodePlan
from tallystick.values import SplitRange, TopicPartition
from tests.keyed_job import MemoryHost

COLUMNS = pa.schema([("k", pa.string()), ("v", pa.int64())])
CODEC = TableCodec(COLUMNS, ["k"])
Rows = list[tuple[str, int | None]]


@dataclass(frozen=True)
class Topic:
    """A control topic in memory, in the place of a `ReadPlan`; its batches come as they like."""

    partitions: tuple[Rows, ...]

    def read_by_partition(
        self, splits: Iterable[SplitRange]
    ) -> Iterator[tuple[TopicPartition, pa.RecordBatch]]:
        parts = [
            (split.topic_partition, self.partitions[split.partition][at : at + 1])
            for split in splits
            for at in range(split.start_offset, split.stop_offset)
        ]
        order = {split.topic_partition: random.random() for split in splits}
        for partition, rows in sorted(parts, key=lambda part: order[part[0]]):
            named = [{"k": k, "v": v} for k, v in rows]
            yield partition, pa.RecordBatch.from_pylist(named, schema=COLUMNS)


class Host:
    """A checkpoint and its control topic; it plays driver and tasks."""

    def __init__(self) -> None:
        self.worker_host = MemoryHost()
        self.state: tuple[StepState, ...] = ()
        self.topic: tuple[Rows, ...] = ([], [])
        self.read: list[int] = [0, 0]
        self.epoch = -1
        self.expected: dict[str, int] = {}
        operator_state._tables.clear()

    def say(self, partition: int, key: str, value: int | None) -> None:
        self.topic[partition].append((key, value))

    def plan(self) -> Any:
        """An epoch over all that is new."""
        step = TableStep("rules", CODEC, Topic(self.topic), lambda rows: pc.is_null(rows["v"]))
        splits = tuple(
            SplitRange("rules", number, start, len(rows))
            for number, (start, rows) in enumerate(zip(self.read, self.topic, strict=True))
            if start < len(rows)
        )
        self.epoch += 1
        keyed = PipelinePlan(tables=(step,), worker_host=self.worker_host)
        token = f"{random.random()}"
        return keyed.epoch(
            self.epoch, 0, token, self.state, EncodePlan((), 1), control={"rules": splits}
        )

    def commit(self, epoch: Any, readers: int = 2) -> None:
        """Let all readers look at the table, and decide for the epoch."""
        (plan,) = epoch.tables
        rows = [plan.rows for _ in range(readers)]
        notes = [note.fields for at in range(readers) for note in plan.notes(at)]
        self.state = tuple(operator_state.tables_after(epoch.tables, notes))
        for number, partition in enumerate(self.topic):
            for key, value in partition[self.read[number] :]:
                self.expected.pop(key, None)
                if value is not None:
                    self.expected[key] = value
            self.read[number] = len(partition)
        assert all(batch.to_pylist() == self.sorted for batch in rows)

    @property
    def sorted(self) -> list[dict[str, Any]]:
        return [{"k": k, "v": v} for k, v in sorted(self.expected.items())]


@pytest.mark.parametrize("seed", range(8))
def test_every_process_has_the_same_table_whatever_it_remembers(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged changelogs, snapshots, aborted attempts, processes that are new or were away."""
    random.seed(seed)
    chance = random.Random(seed)
    monkeypatch.setattr(operator_state, "HELD_BYTES", 64 if seed % 2 else 1 << 20)
    monkeypatch.setattr(
        operator_state, "due_snapshots", lambda *_: {0: WHOLE} if chance.random() < 0.1 else {}
    )
    host, memories = Host(), [dict[Any, Any]() for _ in range(3)]
    snapshots = 0
    for _ in range(60):
        for _ in range(chance.choice([0, 1, 1, 3, 20])):
            key = f"k{chance.randrange(12)}"
            host.say(int(key[1:]) % 2, key, chance.choice([None, *range(20)]))
        if chance.random() < 0.2:  # an attempt that does not count
            (plan,) = host.plan().tables
            assert plan.rows is not None
            host.epoch -= 1
        operator_state._tables = chance.choice(memories)
        if chance.random() < 0.2:
            operator_state._tables.clear()
        host.commit(host.plan())
        snapshots += any(file.kind == SNAPSHOT for step in host.state for file in step.files)
    assert snapshots
    (table_state,) = host.state
    assert len(table_state.files) < 40, "changelogs are merged"
    assert (table_state.parallelism, table_state.max_parallelism) == (1, 1)


def test_an_epoch_without_control_rows_reads_and_writes_nothing() -> None:
    host = Host()
    host.say(0, "a", 1)
    host.commit(host.plan())
    before, files = host.state, dict(host.worker_host.files.files)
    host.worker_host.files.files.clear()  # it is in memory
    host.commit(host.plan())
    assert host.state == before
    assert host.worker_host.files.files == {}
    operator_state._tables.clear()
    host.worker_host.files.files |= files
    host.commit(host.plan())


def test_tasks_that_read_different_rows_abort_the_epoch() -> None:
    host = Host()
    host.say(0, "a", 1)
    (plan,) = (epoch := host.plan()).tables
    notes = plan.notes(0)
    operator_state._tables.clear()  # another process, where compaction has left out the record
    host.topic[0][0] = ("a", 2)
    assert plan.rows.num_rows == 1
    notes += plan.notes(1)
    with pytest.raises(EpochAbortedError, match="table rules: the tasks of epoch 0 did not read"):
        operator_state.tables_after(epoch.tables, [note.fields for note in notes])
    with pytest.raises(BrokenInvariantError, match="0 tasks wrote what changed"):
        operator_state.tables_after(epoch.tables, [note.fields for note in notes[1:]])


def test_rows_of_one_key_count_in_the_order_of_their_partitions() -> None:
    """Whatever order a fetch brings them in: else two tasks would have two tables."""
    for _ in range(10):
        host = Host()
        for partition, value in ((1, 1), (0, 2), (0, 3)):
            host.say(partition, "a", value)
        (plan,) = host.plan().tables
        assert plan.rows.to_pylist() == [{"k": "a", "v": 1}]


def test_a_task_that_did_not_look_says_nothing() -> None:
    host = Host()
    host.say(0, "a", 1)
    (plan,) = host.plan().tables
    assert plan.notes(1) == plan.notes() == []
    assert plan.notes(0)


def test_a_table_that_leaves_the_memory_while_it_is_written_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others in the process read tables too, and push it out: simulator, seed 26026."""
    write, was_there = operator_state.write_changelog, []

    def write_and_forget(*args: Any) -> Any:
        was_there.append(bool(operator_state._tables))
        operator_state._tables.clear()
        return write(*args)

    monkeypatch.setattr(operator_state, "write_changelog", write_and_forget)
    host = Host()
    host.say(0, "a", 1)
    host.commit(host.plan())
    assert was_there == [True]
    assert host.state[0].files


def test_functions_get_the_table_of_their_epoch_and_no_others_change() -> None:
    plan = plan_of({"a": 1})
    function = TableFunction(lambda rows, table: rows.slice(0, table.num_rows), "rules")
    inner = DeclaredFunction(function, {})
    plain = pc.negate
    functions = with_tables((function, inner, plain), (plan,))
    rows = pa.record_batch({"x": [1, 2]})
    assert [bound_function(rows).num_rows for bound_function in functions[:2]] == [1, 1]
    assert functions[2] is plain
    assert (function,) == with_tables((function,), ())
    assert list(operator_state.parts_of((inner,))) == [inner, function, function.function]


def plan_of(table: dict[str, int | None]) -> TablePlan:
    """An epoch in which a table is made."""
    host = Host()
    for key, value in table.items():
        host.say(0, key, value)
    (plan,) = host.plan().tables
    return replace(plan, step=replace(plan.step, deleted=None))


def content_of(table: dict[str, int | None]) -> TableContent:
    return plan_of(table).content


def test_enriched_rows_are_those_of_a_dictionary() -> None:
    chance = random.Random(1)
    table = {f"k{n}": chance.choice([None, n]) for n in range(50)}
    content = content_of(table)
    keys = [chance.choice([None, f"k{chance.randrange(80)}"]) for _ in range(500)]
    rows = pa.record_batch({"key": pa.array(keys, pa.string()), "n": range(500)})
    joined = Enrichment("rules", ("key",), "left").join(rows, content)
    assert joined.to_pylist() == [
        {"key": key, "n": n, "v": table.get(key)} for n, key in enumerate(keys)
    ]
    inner = Enrichment("rules", ("key",), "inner", (("v", "rule"), ("k", "its"))).join(
        rows, content
    )
    assert inner.to_pylist() == [
        {"key": key, "n": n, "rule": table[key], "its": key}
        for n, key in enumerate(keys)
        if key in table
    ]
    assert inner.num_rows not in (0, 500)
    nothing = Enrichment("rules", ("key",), "inner").join(rows, content_of({}))
    assert (nothing.num_rows, nothing.schema.names) == (0, ["key", "n", "v"])
    nulls = Enrichment("rules", ("key",), "left").join(rows, content_of({}))
    assert nulls["v"].null_count == 500


def test_joins_that_cannot_be_are_refused_by_name() -> None:
    content = content_of({"a": 1})
    rows = pa.record_batch({"k": ["a"], "v": [7]})
    with pytest.raises(
        OptionError, match=r"enrich\(rules\): the result would have column 'v' twice"
    ):
        Enrichment("rules", ("k",)).join(rows, content)
    with pytest.raises(OptionError, match=r"there is no column 'w'\. The rows have k, v"):
        Enrichment("rules", ("k",), columns=(("w", "w"),)).join(rows, content)
    with pytest.raises(OptionError, match="on='x': there is no column 'x'"):
        Enrichment("rules", ("x",), columns=()).join(rows, content)
    with pytest.raises(RecordError, match="column 'k' is int64, and was declared string"):
        Enrichment("rules", ("v",), columns=()).join(rows, content)
