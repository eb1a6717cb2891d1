"""The tasks of an epoch, one after another in this process; see `spark.tasks.TaskRunner`."""

from collections.abc import Iterable, Iterator

from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.epoch.manifest import Identity
from tallystick.epoch.micro_batches import OWN_LOOP
from tallystick.host.failure import Failure
from tallystick.pipeline.compiled import PipelineRun
from tallystick.pipeline.sinks import Sinks
from tallystick.spark.tasks import Unread
from tallystick.tasks.epoch_plan import EpochPlan
from tallystick.tasks.frames import Frame
from tallystick.tasks.read import Report, WritePlan
from tallystick.tasks.write import CollectPlan
from tallystick.testing.columns import read_columns
from tallystick.testing.memory import MemoryFetch, MemoryHost, Topics
from tallystick.testing.planning import CLUSTER


class TasksInProcess:
    """Runs the tasks of epochs that begin with splits."""

    def run(self, unread: Unread, epoch: EpochPlan, write: WritePlan | CollectPlan) -> list[Report]:
        """Run all tasks of an epoch; an error is what the driver of a real run gets."""
        try:
            return self._reports(unread, epoch, write)
        except Exception as error:
            failure = Failure.of(error).to_error(error)
            if failure is error:
                raise
            raise failure from error

    def _reports(
        self, unread: Unread, epoch: EpochPlan, write: WritePlan | CollectPlan
    ) -> list[Report]:
        assert not epoch.writer_count, "sinks in memory have transactions of tasks"
        tasks = [
            list(unread.send(reader, epoch.first, attempt_number=0))
            for reader in range(unread.reader_count)
        ]
        for plan in epoch.plans:
            tasks = [
                list(plan.run(_for(tasks, index), index)) for index in range(plan.base.parallelism)
            ]
        return [write.write(iter(frames), attempt_number=0) for frames in tasks]


def _for(tasks: Iterable[Iterable[Frame]], index: int) -> Iterator[Frame]:
    """Yield the frames for a task, sorted by source and sequence."""
    frames = (frame for sent in tasks for frame in sent if frame.target == index)
    yield from sorted(frames, key=lambda frame: (frame.source, frame.sequence))


def begin_here(run: PipelineRun, sinks: Sinks, topics: Topics, host: MemoryHost) -> Identity:
    """Let the tasks of a run work in this process, and begin the run's checkpoint in memory.

    Args:
        run: of a pipeline that was just compiled.
        sinks: of the run.
        topics: what its inputs read.
        host: has the checkpoint.

    Returns:
        The identity of the run, for its driver.
    """
    run.use(sinks, TasksInProcess(), MemoryFetch(topics), host, CLUSTER)
    read_columns(run)
    folder = CheckpointFolder(host.files)
    identity = Identity(run.name, folder.begin(), folder.location, frozenset())
    folder.note(OWN_LOOP)
    return identity
