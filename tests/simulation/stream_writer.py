"""A query with `writeStream.format("tallystick")`: Spark's calls of it, in Spark's order.

What plans, decides and gives up is the real code (`spark.streaming.write_epochs`); tasks are those
of `sink_engine`, and prepare under the plan. Spark asks processes that it keeps, and may ask
another one any time: what the code remembers is per driver, and is lost now and then.
"""

import json
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol
from unittest.mock import patch

from tallystick.checkpoint.spark_log import METADATA, SparkLog
from tallystick.epoch.two_phase import Committable, Owner, TwoPhaseCommitSink
from tallystick.errors import RetriableError, TallystickError
from tests.simulation.query import Surroundings
from tests.simulation.rows import Row
from tests.simulation.scheduler import Process
from tests.simulation.sinks import Sinks, numbered
from tests.simulation.spark import Checkpoint, ConcurrentRunError
from tests.simulation.storage import SimulatedStorage

QUERY_NAME = "sim"
FORGETTING_RATIO = 0.2
GONE = "Nothing of the epoch is visible"
"""What the code says where Spark has to run an epoch again, which it does after a start."""


class Place(Surroundings, Protocol):
    """What the query needs of the world."""

    sinks: Sinks | None
    accepted: set[str]


class StreamWriterQuery:
    """The query of a world, which each of its processes runs; instead of a `Query`."""

    is_users = False

    def __init__(self, world: Place) -> None:
        self._world = world

    def run(self, process: Process) -> None:
        """Run until there is nothing left to read."""
        world, checkpoint = self._world, self._world.checkpoint
        checkpoint.files.setdefault(METADATA, json.dumps({"id": checkpoint.lineage}).encode())
        SparkLog(SimulatedStorage.of(world, process, checkpoint)).mend()
        epoch = checkpoint.read_log()
        while True:
            if epoch not in checkpoint.offsets:
                ends = world.plan_positions(checkpoint.start_of(epoch))
                if ends is None:
                    return
                world.pass_by(process)
                checkpoint.log_offsets(epoch, ends, world.sources)
            process.offered = epoch
            self._run_epoch(process, checkpoint, epoch)
            world.pass_by(process)
            checkpoint.log_commit(epoch)
            epoch += 1

    def _run_epoch(self, process: Process, checkpoint: Checkpoint, epoch: int) -> None:
        """Plan, run the tasks, decide; where one fails after the plan, give up."""
        from tallystick.spark.streaming.write_epochs import WriteEpochs  # needs PySpark

        def opened(owner: Owner, *_: Any) -> TwoPhaseCommitSink:
            return self._sinks.open(process, owner.sink)

        storage: Any = SimulatedStorage.of(self._world, process, checkpoint)
        accepted = frozenset(self._world.accepted)
        epochs = WriteEpochs(storage, QUERY_NAME, accepted, "tallystick-sim", opened)
        planned = epochs.plan()
        if planned.checkpoint_id != epoch:  # tasks and commit check what they are for
            raise ConcurrentRunError(f"planned was {planned.checkpoint_id}, this is {epoch}")
        if planned.hold is None:
            return
        prepared: list[Committable] = []
        try:
            prepared += self._sinks.tasks(process).prepare(epoch, numbered(checkpoint, epoch))
            epochs.decide(planned, tuple(prepared))
        except TallystickError as error:
            with suppress(TallystickError):  # a warning there
                epochs.give_up(planned, tuple(prepared))
            if GONE in str(error):
                raise RetriableError(str(error)) from error
            raise

    @property
    def _sinks(self) -> Sinks:
        assert self._world.sinks is not None, "it is one of its own"
        return self._world.sinks

    def left_out_rows(self) -> list[Row]:
        """It leaves nothing out."""
        return []

    def give_up(self, refusal: str) -> None:
        """It catches nothing, so nobody is ever asked."""
        raise AssertionError(refusal)


class _PerProcess(MutableMapping[str, Any]):
    """What each driver's processes remember: each is a thread here, and a process there."""

    def __init__(self, world: Place) -> None:
        self._world = world
        self._held: dict[tuple[threading.Thread, str], Any] = {}

    def __getitem__(self, lineage: str) -> Any:
        if self._world.dice.random() < FORGETTING_RATIO:
            raise KeyError(lineage)
        return self._held[threading.current_thread(), lineage]

    def __setitem__(self, lineage: str, planned: Any) -> None:
        self._held[threading.current_thread(), lineage] = planned

    def __delitem__(self, lineage: str) -> None:
        del self._held[threading.current_thread(), lineage]

    def __iter__(self) -> Iterator[str]:
        return (lineage for _, lineage in self._held)

    def __len__(self) -> int:
        return len(self._held)


@contextmanager
def in_processes_of(world: Place) -> Iterator[None]:
    """Let the code have the world's clock, and remember what a process of Spark's would."""
    from tallystick.spark.streaming import write_epochs  # needs PySpark

    with (
        patch.object(write_epochs, "SystemClock", lambda: world),
        patch.object(write_epochs, "_planned", _PerProcess(world)),
    ):
        yield
