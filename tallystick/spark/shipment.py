"""The plans of a Spark job on their way to its tasks, and what they leave on the driver's disk.

A task's function travels with all that it holds. Above 1 MiB (`spark.broadcast.
UDFCompressionThreshold`) PySpark makes a broadcast variable of it, whose file lies on the driver's
disk as long as the SparkContext lives: a file per job, for ever. A function of the user's that
holds a table or a model is as large, and so are the splits or state files of ten thousand. So large
plans are broadcast here, and destroyed when their job has ended.
"""

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from pyspark import Broadcast, SparkContext
from pyspark.serializers import CloudPickleSerializer

logger = logging.getLogger(__name__)

LARGE_BYTES = 256 << 10
"""Plans from this size on are broadcast; a task's function holds three at most."""

_Plan = TypeVar("_Plan")
_SERIALIZER: Any = CloudPickleSerializer()  # type: ignore[no-untyped-call]


class Shipment:
    """What one job's tasks get; leaving it destroys what was broadcast for them."""

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
        """Destroy what was broadcast; the job has ended, or failed."""
        while self._broadcasts:
            try:
                self._broadcasts.pop().destroy()
            except Exception as failed:  # the session is stopping, perhaps; the job's error counts
                logger.warning("a broadcast variable is not destroyed: %s", failed)

    def pack(self, plan: _Plan) -> "Parcel[_Plan]":
        """A plan for a task's function to hold."""
        return Parcel(plan, self._ship)

    def _ship(self, data: bytes) -> bytes | Broadcast[bytes]:
        if len(data) < LARGE_BYTES:
            return data
        self._broadcasts.append(self._context.broadcast(data))
        return self._broadcasts[-1]


class Parcel(Generic[_Plan]):
    """A plan that a task's function holds.

    It is pickled when the function is, on the same thread, so that PySpark learns then of broadcast
    variables of the user's own that are in it.
    """

    def __init__(
        self, plan: _Plan, ship: Callable[[bytes], bytes | Broadcast[bytes]] | None = None
    ) -> None:
        self.plan = plan
        self._ship = ship

    def __reduce__(
        self,
    ) -> tuple[Callable[[bytes | Broadcast[bytes]], "Parcel[_Plan]"], tuple[object]]:
        assert self._ship is not None, "tasks send no parcels on"
        return _unpacked, (self._ship(_SERIALIZER.dumps(self.plan)),)


def _unpacked(shipped: bytes | Broadcast[bytes]) -> Parcel[_Plan]:
    return Parcel(_SERIALIZER.loads(shipped if isinstance(shipped, bytes) else shipped.value))
