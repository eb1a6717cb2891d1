"""`writeStream.format("mortal")`: ours, and at the n-th occurrence of a fact something dies.

Spark plans and decides an epoch in processes of its own, not in the user's. So what is to happen
is told to them by an option. They count facts in a folder that all of them see.

Whoever uses it pickles it by value: those processes need no tests.
"""

import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tallystick.epoch.protocol import Event
from tallystick.kafka.task_sink import KafkaTaskSink
from tallystick.spark.streaming.source import TallystickSource
from tallystick.spark.streaming.stream_writer import StreamWriter, TaskWriter

PREPARED = "TaskPrepared"
DUE = "CommitOfOneTaskDue"
RETURNED = "CommitReturned"
"""Not events of the coordinator."""


@dataclass(frozen=True)
class Death:
    """What dies where.

    Args:
        folder: where facts are counted.
        at: the fact.
        occurrence: the how-manieth of its kind.
        victims: processes that are killed, and the one that met it too; none: it raises an error.
        waits_for: instead of all that, wait until this file exists.
    """

    folder: str
    at: str = ""
    occurrence: int = 1
    victims: tuple[int, ...] = ()
    waits_for: str = ""

    def to_option(self) -> dict[str, str]:
        """For `writeStream`."""
        return {"death": json.dumps(asdict(self))}

    def hear(self, event: Event) -> None:
        """Called by the driver with each event."""
        self.meet(type(event).__name__)

    def meet(self, fact: str) -> None:
        """Count it, and let come what must."""
        number = 1
        while not _created(Path(self.folder, f"{fact}-{number}")):
            number += 1
        if (fact, number) != (self.at, self.occurrence):
            return
        if self.waits_for:
            while not Path(self.waits_for).exists():
                time.sleep(0.1)
            return
        if not self.victims:
            raise RuntimeError(f"this is the end, at {fact}")
        for victim in (*self.victims, os.getpid()):
            os.kill(victim, signal.SIGKILL)


def _created(path: Path) -> bool:
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class MortalWriter(StreamWriter):
    """Dies in the plan or the decision."""

    def __init__(self, options: dict[str, str], death: Death) -> None:
        super().__init__(options, death.hear)
        self._death = death

    def __reduce__(self) -> Any:
        _, arguments = super().__reduce__()
        return MortalTask, (*arguments, self._death)

    def commit(self, messages: Any, batchId: int) -> None:
        """Commit, and die in the middle of it or behind it."""
        inner, death = KafkaTaskSink.commit_by, self._death

        def commit_one(sink: KafkaTaskSink, committable: Any, until: float) -> Any:
            death.meet(DUE)
            return inner(sink, committable, until)

        KafkaTaskSink.commit_by = commit_one  # type: ignore[method-assign]
        try:
            super().commit(messages, batchId)
        finally:
            KafkaTaskSink.commit_by = inner  # type: ignore[method-assign]
        self._death.meet(RETURNED)


class MortalTask(TaskWriter):
    """Dies when it has prepared, and not said so."""

    def __init__(self, planned: Any, owner: Any, plan: Any, death: Death) -> None:
        super().__init__(planned, owner, plan)
        self._death = death

    def write(self, iterator: Any) -> Any:
        """Write, and maybe die."""
        message = super().write(iterator)
        if '"committables": []' not in message.text:
            self._death.meet(PREPARED)
        return message


class MortalFormat(TallystickSource):
    """Hands the option on."""

    @classmethod
    def name(cls) -> str:
        """Beside the one that is meant."""
        return "mortal"

    def streamWriter(self, schema: Any, overwrite: bool) -> MortalWriter:
        """For `writeStream`."""
        options = dict(self.options)
        return MortalWriter(options, Death(**json.loads(options.pop("death"))))
