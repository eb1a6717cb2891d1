"""What driver and members pickle for each other: small orders, and whatever users write."""

import subprocess
import sys
import textwrap
from threading import Lock
from typing import Any

import pyarrow as pa
import pytest

from tallystick.codec.json.read import JsonReader
from tallystick.codec.json.write import JsonWriter
from tallystick.codec.layout import Layout
from tallystick.codec.rows import RowLayout
from tallystick.errors import NOT_SHOWN, FunctionError
from tallystick.host.failure import Failure
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.fetcher import KafkaFetch
from tallystick.kafka.writer import KafkaProduce
from tallystick.spark.gang.messages import (
    Order,
    PicklingError,
    SharedObjects,
    dumps,
    loads,
    loads_failure,
)
from tallystick.spark.tasks import Unread, UnreadInput
from tallystick.state.functions.keyed_batch import KeyedBatch, Update
from tallystick.state.functions.vectorised import vectorised
from tallystick.tasks.epoch_plan import PipelinePlan
from tallystick.tasks.read import EncodePlan, Route, WritePlan
from tallystick.tasks.read_plan import ReadPlan
from tallystick.values import Producer, SplitRange
from tests.keyed_job import EVENTS, MemoryHost, step

CONFIG = KafkaConfig("broker-1.of.some.cluster:9092,broker-2.of.some.cluster:9092")
ORDER_BYTES_MAX = 8_000
"""For a few splits and two keyed steps; it is made, sent and read in every epoch."""


def numbering(batch: KeyedBatch) -> Update:
    numbers, totals = batch.running_count(start=batch.held("n"))
    columns = {"user": batch.rows["user"], "n": batch.rows["n"], "at": numbers}
    return Update(pa.record_batch(columns, schema=EVENTS), {"n": totals})


def keyed_order(table: dict[int, str]) -> tuple[Order, tuple[Any, ...]]:
    """An epoch's order, and what its pipeline's epochs have in common."""

    def look_up(rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows if table else rows.slice(0, 0)

    functions, worker_host = (look_up,), MemoryHost()
    processor = vectorised(numbering, state="n bigint")
    steps = tuple(step(processor, uid=uid, functions=functions) for uid in ("one", "two"))
    read = ReadPlan(KafkaFetch(CONFIG), Layout(JsonReader(EVENTS)), functions=functions)
    encode = EncodePlan(
        (Route(RowLayout({"out": 3}, "out", value=JsonWriter(), key="user"), "none", 1 << 20),), 3
    )
    epoch = PipelinePlan(steps, task_count=4, worker_host=worker_host).epoch(
        7, 1, "token", (), encode
    )
    shares = tuple((SplitRange("in", partition, 1000, 2000),) for partition in range(8))
    order = Order(
        run=3,
        unread=Unread((UnreadInput(shares, read),)),
        first=epoch.first,
        plans=epoch.plans,
        writer_count=epoch.writer_count,
        write=WritePlan(KafkaProduce(CONFIG, 2), Producer("tallystick:p", 5, 6)),
    )
    return order, (CONFIG, read.layout, functions, worker_host, *steps)


def test_an_order_leaves_out_what_members_have_and_stays_small() -> None:
    order, shared = keyed_order({number: str(number) for number in range(100_000)})
    known = SharedObjects(shared)
    data = known.dumps(order)
    assert len(data) < ORDER_BYTES_MAX
    assert len(dumps(order)) > 1_000_000

    members: Any = loads(dumps(known.objects))
    again = SharedObjects.loads(data, members)
    (read,), (own,) = again.unread.inputs, order.unread.inputs
    assert read.shares == own.shares
    assert read.plan.layout is members[known.objects.index(own.plan.layout)]
    assert again.plans[1].step is members[known.objects.index(order.plans[1].step)]
    rows = pa.record_batch({"user": ["a"], "n": [1], "at": [2]}, schema=EVENTS)
    assert read.plan.functions[0](rows) == rows


def test_only_the_very_object_is_left_out() -> None:
    """One that is equal may be changed later; what the order has travels."""
    known = SharedObjects([("one", 1), {"two": 2}])
    equal: Any = {"two": 2}
    data = known.dumps(Order(1, equal, known.objects[0], (), 0, known.objects[1]))
    again: Any = SharedObjects.loads(data, ("first", "second"))
    assert (again.first, again.write, again.unread) == ("first", "second", equal)


@pytest.mark.parametrize("shared", SharedObjects.SHARED, ids=repr)
def test_what_all_of_python_shares_stands_for_itself(shared: Any) -> None:
    known = SharedObjects([shared, CONFIG])
    order, _ = keyed_order({})
    again = SharedObjects.loads(
        known.dumps(Order(1, shared, shared, (), 0, shared)), ("of the member",)
    )
    assert (again.unread, again.first, again.write) == (shared, shared, shared)
    assert SharedObjects.loads(known.dumps(order), (CONFIG,)).run == 3


def test_functions_of_functions_arrive() -> None:
    def factorial(n: int) -> int:
        return 1 if n == 0 else n * factorial(n - 1)

    def is_even(n: int) -> bool:
        return n == 0 or is_odd(n - 1)

    def is_odd(n: int) -> bool:
        return n != 0 and is_even(n - 1)

    lambdas = [lambda n, k=k: factorial(n) * k for k in range(3)]
    copies: Any = loads(dumps((factorial, is_even, lambdas)))
    assert copies[0](5) == 120
    assert copies[1](10)
    assert [function(3) for function in copies[2]] == [0, 6, 12]


def test_a_function_that_cannot_be_pickled_is_said_so() -> None:
    lock = Lock()
    with pytest.raises((PicklingError, TypeError), match="pickle"):
        dumps(lambda: lock)


def test_classes_of_a_script_arrive_and_its_errors_come_back_as_what_they_are() -> None:
    """The script's own classes are nobody's to import; the other process is not the script."""
    script = """
        import subprocess, sys
        from tallystick.spark.gang.messages import dumps, loads_failure

        class Mistake(ValueError):
            def __init__(self, row):
                super().__init__(f"in row {row}")
                self.row = row
            def __reduce__(self):
                return Mistake, (self.row,)

        class Doubler:
            def of(self, n):
                if n < 0:
                    raise Mistake(n)
                return 2 * n

        member = '''if True:
            import sys
            from tallystick.spark.gang.messages import dumps_failure, loads
            doubler = loads(sys.stdin.buffer.read())
            assert doubler.of(4) == 8
            try:
                doubler.of(-4)
            except ValueError as error:
                sys.stdout.buffer.write(dumps_failure(error))
        '''
        found = subprocess.run(
            [sys.executable, "-c", member], input=dumps(Doubler()), capture_output=True, check=True
        )
        error = loads_failure(found.stdout)
        assert isinstance(error, Mistake) and error.row == -4, repr(error)
        assert type(error).__name__ == "Mistake" and str(error).startswith("Mistake: in row -4 (")
        assert "in of" in "".join(error.__notes__)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_an_error_whose_class_the_driver_does_not_have_keeps_its_text() -> None:
    class Elsewhere:
        def __reduce__(self) -> Any:
            return __import__, ("a_module_of_the_executors",)

    there = Failure("TheirError", ("TheirError", "Exception"), "no such row")
    error = loads_failure(dumps((there, dumps(Elsewhere()))))
    assert isinstance(error, FunctionError)
    assert (type(error).__name__, str(error)) == ("TheirError", "TheirError: no such row")
    assert error.without_values == NOT_SHOWN
