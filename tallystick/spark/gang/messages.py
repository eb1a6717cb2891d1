"""The messages between driver and members, pickled; the only place that unpickles anything.

It comes over a `link.Link`, so from a process that knows the gang's secret.
"""

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pyspark import cloudpickle as pyspark_cloudpickle

from tallystick.host.failure import Failure
from tallystick.spark.tasks import Unread
from tallystick.tasks.keyed import ProcessPlan
from tallystick.tasks.read import Outlet, WritePlan
from tallystick.tasks.write import CollectPlan

cloudpickle: Any = pyspark_cloudpickle
PicklingError = pickle.PicklingError


def dumps(what: object) -> bytes:
    """Pickle anything, functions and classes of a script included."""
    data: bytes = cloudpickle.dumps(what)
    return data


def loads(data: bytes) -> Any:
    """Read what `dumps` made."""
    return pickle.loads(data)  # noqa: S301  see above


@dataclass(frozen=True)
class Order:
    """The order to run an epoch's tasks.

    Args:
        run: counts the runs of a gang, from 1 on.
        unread: the splits and plans of the readers.
        first: where readers send rows.
        plans: of the keyed steps.
        writer_count: how many tasks write; 0: the last tasks before them report instead.
        write: what those tasks do.
        attempt_number: of tasks that send to sinks of their own; from 1 on, members of a lost gang
            may have begun transactions there.
    """

    run: int
    unread: Unread
    first: Outlet
    plans: tuple[ProcessPlan, ...]
    writer_count: int
    write: WritePlan | CollectPlan
    attempt_number: int = 0


def dumps_failure(error: BaseException) -> bytes:
    """Pickle the failure of a member, with the error itself if it can be pickled and read again."""
    failure = Failure.of(error)
    try:
        data = dumps(error)
        if type(loads(data)) is not type(error) or not isinstance(error, Exception):
            data = b""
    except Exception:
        data = b""
    return dumps((failure, data))


def loads_failure(data: bytes) -> Exception:
    """Return the error of a member, of the original class if the class can be unpickled here."""
    failure, pickled = loads(data)
    try:
        original: Exception | None = loads(pickled)
    except Exception:  # the class may not be importable here
        original = None
    error: Exception = failure.to_error(original)
    return error


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Leaves a number in the place of what the other side has; found by identity."""

    def __init__(self, file: io.BytesIO, numbers: dict[int, int]) -> None:
        super().__init__(file)
        self._numbers = numbers

    def persistent_id(self, value: object) -> int | None:
        return self._numbers.get(id(value))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, known: Sequence[Any]) -> None:
        super().__init__(file)
        self._known = known

    def persistent_load(self, number: int) -> Any:
        return self._known[number]


class SharedObjects:
    """The objects that the driver and every member hold, in the same order.

    They go to the members once, when the gang starts: settings, layouts, the user's functions. Any
    other object travels with every order.
    """

    SHARED: ClassVar = (None, True, False, (), "", b"", 0)
    """Values that Python itself shares: equal ones are the same object wherever they occur."""

    def __init__(self, known: Sequence[Any]) -> None:
        self.objects = tuple(
            value for value in known if not any(value is shared for shared in self.SHARED)
        )
        self._numbers = {id(value): at for at, value in enumerate(self.objects)}

    def dumps(self, order: Order) -> bytes:
        """Pickle an order."""
        file = io.BytesIO()
        _Pickler(file, self._numbers).dump(order)
        return file.getvalue()

    @staticmethod
    def loads(data: bytes, known: Sequence[Any]) -> Order:
        """Read an order, in a member."""
        order: Order = _Unpickler(io.BytesIO(data), known).load()
        return order
