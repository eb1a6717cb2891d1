"""List state in readers, without Spark and Kafka: tasks, attempts, rescales."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest

from tallystick.errors import BrokenInvariantError, OptionError, RecordError
from tallystick.state.catalog import SNAPSHOT, StepState
from tallystick.state.operator_state import ListCodec
from tallystick.tasks import operator_state
from tallystick.tasks.epoch_plan import PipelinePlan
from tallystick.tasks.operator_state import ListFunction, ListStep, OpenList, with_lists
from tallystick.tasks.outputs import DeclaredFunction
from tallystick.tasks.read import EncodePlan
from tests.keyed_job import MemoryHost

COLUMNS = pa.schema([("n", pa.int64())])
STEP = ListStep("buffer", ListCodec(COLUMNS))


def batch(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(numbers, pa.int64())})


class Host:
    """A checkpoint; it plays driver and readers."""

    def __init__(self, step: ListStep = STEP) -> None:
        self.step = step
        self.worker_host = MemoryHost()
        self.state: tuple[StepState, ...] = ()
        self.epoch = -1
        operator_state._lists.clear()

    def plan(self, parallelism: int) -> Any:
        self.epoch += 1
        keyed = PipelinePlan(
            lists=(self.step,), task_count=parallelism, worker_host=self.worker_host
        )
        return keyed.epoch(self.epoch, 0, f"{random.random()}", self.state, EncodePlan((), 1))

    def commit(self, epoch: Any, opened: list[OpenList]) -> None:
        notes = [note.fields for task in opened for note in task.notes()]
        self.state = tuple(operator_state.lists_after(epoch.lists, notes))

    def open(self, parallelism: int) -> tuple[Any, list[OpenList]]:
        epoch = self.plan(parallelism)
        (plan,) = epoch.lists
        return epoch, [plan.opened(task) for task in range(parallelism)]

    def elements(self, parallelism: int) -> list[list[int]]:
        _, opened = self.open(parallelism)
        self.epoch -= 1
        return [task.elements["n"].to_pylist() for task in opened]


def keep(*numbers: int) -> Any:
    """A function that makes the list these elements."""
    return lambda rows, elements: (rows, batch(*numbers))


def shared(lists_of_tasks: list[list[int]], parallelism: int) -> list[list[int]]:
    """The same elements, evenly in other lists."""
    if len(lists_of_tasks) == parallelism:
        return lists_of_tasks
    flat = [n for numbers in lists_of_tasks for n in numbers]
    least, more = divmod(len(flat), parallelism)
    ends = [at * least + min(at, more) for at in range(parallelism + 1)]
    return [flat[a:b] for a, b in pairwise(ends)]


@pytest.mark.parametrize("seed", range(8))
def test_lists_go_on_whatever_a_process_remembers(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    due = {0: operator_state.ALL_TASKS}
    monkeypatch.setattr(
        "tallystick.tasks.operator_state.due_snapshots",
        lambda *_: due if chance.random() < 0.1 else {},
    )
    host, memories = Host(), [dict[Any, Any]() for _ in range(2)]
    parallelism, committed, snapshots = 2, [list[int]() for _ in range(2)], 0
    for number in range(60):
        if chance.random() < 0.15:
            parallelism = chance.randint(1, 5)
        operator_state._lists = chance.choice(memories)
        if chance.random() < 0.3:
            operator_state._lists.clear()
        epoch, opened = host.open(parallelism)
        expected = shared(committed, parallelism)
        after = [[*elements] for elements in expected]
        for task, opened_list in enumerate(opened):
            if chance.random() < 0.6:
                assert opened_list.elements["n"].to_pylist() == expected[task]
                after[task] = [n for n in expected[task] if chance.random() < 0.8] + [number]
                opened_list.call(keep(*after[task]), batch())
        if chance.random() < 0.2:  # the attempt does not count
            _ = [opened_list.notes() for opened_list in opened]
            host.epoch -= 1
            continue
        host.commit(epoch, opened)
        committed = after
        snapshots += any(file.kind == SNAPSHOT for step in host.state for file in step.files)
    expected = shared(committed, parallelism)
    assert snapshots
    operator_state._lists.clear()
    assert host.elements(parallelism) == expected
    (list_state,) = host.state
    assert len(list_state.files) < 60, "changelogs are merged"


def test_a_list_that_nobody_calls_for_costs_nothing() -> None:
    host = Host()
    epoch, opened = host.open(2)
    opened[1].call(keep(1, 2), batch())
    host.commit(epoch, opened)
    before, files = host.state, dict(host.worker_host.files.files)
    epoch, opened = host.open(2)
    host.commit(epoch, opened)
    assert (host.state, host.worker_host.files.files) == (before, files)
    epoch, opened = host.open(2)
    opened[1].call(keep(1, 2), batch())  # as it was
    host.commit(epoch, opened)
    assert host.state == before


def test_each_new_task_takes_its_share_called_or_not() -> None:
    host = Host()
    epoch, opened = host.open(3)
    for task, opened_list in enumerate(opened):
        opened_list.call(keep(*range(10 * task, 10 * task + 3)), batch())
    host.commit(epoch, opened)
    epoch, opened = host.open(2)
    with pytest.raises(BrokenInvariantError, match=r"tasks \[0\] came back, expected \[0, 1\]"):
        host.commit(epoch, opened[:1])
    host.epoch -= 1
    epoch, opened = host.open(2)
    host.commit(epoch, opened)
    assert host.elements(2) == [[0, 1, 2, 10, 11], [12, 20, 21, 22]]
    (list_state,) = host.state
    assert list_state.parallelism == 2


def test_functions_get_the_list_of_their_attempt() -> None:
    host = Host()
    _, (first,) = host.open(1)

    def count(rows: pa.RecordBatch, elements: pa.RecordBatch) -> Any:
        return rows.slice(0, elements.num_rows), pa.table({"n": range(elements.num_rows + 1)})

    function = ListFunction(count, "buffer")
    inner = DeclaredFunction(function, {})
    plain, own = with_lists((inner, function), [("buffer", first)])
    assert [plain(batch(5, 6)).num_rows for _ in range(2)] == [0, 1]
    assert own(batch(5, 6)).num_rows == 2
    assert first.elements.num_rows == 3
    assert list(operator_state.parts_of((inner,))) == [inner, function, count]


def test_what_a_function_returns_is_checked() -> None:
    host = Host()
    _, (first,) = host.open(1)
    with pytest.raises(OptionError, match="'buffer': the function returned RecordBatch: expected"):
        first.call(lambda rows, elements: rows, batch())
    with pytest.raises(OptionError, match="'buffer': the elements: column 'n' is not there"):
        first.call(lambda rows, elements: (rows, rows.rename_columns(["m"])), batch())
    with pytest.raises(RecordError, match="column 'n' is string, and was declared int64"):
        first.call(lambda rows, elements: (rows, pa.record_batch({"n": ["a"]})), batch())


def test_of_a_union_each_new_task_keeps_what_it_says_is_its_own() -> None:
    seen = []

    def own(elements: pa.RecordBatch, task: int, count: int) -> pa.Table:
        seen.append(elements["n"].to_pylist())
        mine = [n % count == task for n in elements["n"].to_pylist()]
        return pa.Table.from_batches([elements.filter(pa.array(mine, pa.bool_()))])

    host = Host(replace(STEP, union=own))
    epoch, opened = host.open(2)
    opened[0].call(keep(5, 6), batch())
    opened[1].call(keep(7), batch())
    host.commit(epoch, opened)
    assert host.elements(2) == [[5, 6], [7]]
    assert not seen
    epoch, opened = host.open(3)
    host.commit(epoch, opened)
    assert seen == [[5, 6, 7]] * 3
    assert host.elements(3) == [[6], [7], [5]]

    host.step = replace(STEP, union=lambda elements, *_: elements.rename_columns(["m"]))
    _, opened = host.open(1)
    with pytest.raises(OptionError, match="'buffer': those of union=: column 'n' is not there"):
        opened[0].notes()
