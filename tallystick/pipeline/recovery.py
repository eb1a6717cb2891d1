"""The first steps of a pipeline's start, and nothing after them: no task runs, so no Spark."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tallystick.checkpoint.folder import CheckpointFolder, existing_lineage
from tallystick.checkpoint.newest_run import note_run
from tallystick.epoch.manifest import Identity
from tallystick.epoch.two_phase import Committable, Outcome
from tallystick.epoch.verdict import FIRST_EPOCH
from tallystick.kafka.preflight import UNVERIFIED
from tallystick.pipeline.loop import opened
from tallystick.pipeline.sinks import Sinks
from tallystick.pipeline.topology import OutputTopology
from tallystick.run.participants import ABORTED, Result
from tallystick.spark.cluster import Cluster


@dataclass(frozen=True, slots=True)
class SinkRecovery:
    """The outcome of a recovery in one sink.

    Args:
        uid: the sink's.
        committed: how many transactions of the newest epoch are visible for certain; some may have
            been before.
        aborted: how many transactions were aborted, which no decided epoch names.
        lost: how many transactions of the newest epoch can no longer be committed.
        failures: why others could be neither committed nor aborted.
    """

    uid: str
    committed: int = 0
    aborted: int = 0
    lost: int = 0
    failures: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = {"committed": self.committed, "aborted": self.aborted, "lost": self.lost}
        done = [
            f"{count} transaction{'s' * (count != 1)} {what}"
            for what, count in counts.items()
            if count
        ]
        failed = [f"not settled: {failure}" for failure in self.failures]
        return f"sink {self.uid}: {'; '.join([*done, *failed]) or 'nothing to do'}"


@dataclass(frozen=True, slots=True)
class Recovery:
    """The outcome of `Pipeline.recover`: the committed epoch, and the outcome in each sink.

    `print` shows it in words.

    Args:
        pipeline: the name.
        checkpoint: the location.
        epoch: the newest epoch that is committed in every sink; None: no epoch is.
        decider: the uid of the sink whose transaction decides epochs; "": the checkpoint decides.
        sinks: the outcome in each other sink.
        runs_again: a decided epoch that has lost all its output, to timeouts or by hand; the next
            start runs it again. None: no such epoch.
    """

    pipeline: str
    checkpoint: str
    epoch: int | None
    decider: str
    sinks: tuple[SinkRecovery, ...]
    runs_again: int | None = None

    def __str__(self) -> str:
        lines = [f"pipeline {self.pipeline!r}, checkpoint {self.checkpoint}"]
        if self.runs_again is not None:
            lines.append(
                f"epoch {self.runs_again} is decided, and all that it wrote is lost, to timeouts "
                f"or by hand: start the pipeline, which runs it again"
            )
        elif self.epoch is None:
            lines.append("no epoch is committed yet")
        else:
            lines.append(f"epoch {self.epoch} is committed, and nothing after it")
        if self.decider:
            lines.append(f"sink {self.decider}: decides; what was open in its transaction is gone")
        return "\n".join([*lines, *map(str, self.sinks)])


def recover(name: str, topology: OutputTopology, checkpoint: str) -> Recovery:
    """Fence earlier runs, commit decided transactions, and abort the others.

    Args:
        name: the pipeline's.
        topology: its sinks.
        checkpoint: its folder.

    Returns:
        The outcome, for `print`.

    Raises:
        TallystickError: as at a start. The error's notes list the transactions ended before it.
    """
    storage = opened(checkpoint, name)
    lineage = existing_lineage(CheckpointFolder(storage))
    # What is decided is settled on any broker; whether it may decide more is the next start's.
    identity = Identity(name, lineage, storage.location, frozenset({UNVERIFIED}))
    uids = [uid for uid, _ in topology.others]
    results: dict[Committable, Result] = {}
    sinks = Sinks(topology, name, Cluster.at_hand(None), trigger_interval_ms=None)
    try:
        driver = sinks.make_driver(identity, storage, note=results.__setitem__)
        driver.check_name(sinks.newest_token(lineage))
        note_run(storage)
        runs_again = driver.recover_newest()
    except BaseException as error:
        for sink in _by_sink(results, ()):
            error.add_note(str(sink))
        raise
    finally:
        sinks.close()
    newest = driver.coordinator.committed_manifest
    epoch = None if newest is None else newest.checkpoint_id
    return Recovery(
        pipeline=name,
        checkpoint=storage.location,
        epoch=epoch if epoch is not None and epoch >= FIRST_EPOCH else None,
        decider=topology.uid,
        sinks=_by_sink(results, uids),
        runs_again=runs_again,
    )


def _by_sink(
    results: Mapping[Committable, Result], uids: Collection[str]
) -> tuple[SinkRecovery, ...]:
    """Count the outcomes of committables, per sink.

    Args:
        results: the last one of each committable.
        uids: of sinks that are listed in any case.
    """
    of_sink = defaultdict[str, list[Result]](list, {uid: [] for uid in uids})
    for committable, result in results.items():
        of_sink[committable.sink].append(result)
    return tuple(
        SinkRecovery(
            uid=uid,
            committed=outcomes.count(Outcome.COMMITTED),
            aborted=outcomes.count(ABORTED),
            lost=outcomes.count(Outcome.LOST),
            failures=tuple(str(outcome) for outcome in outcomes if isinstance(outcome, Exception)),
        )
        for uid, outcomes in of_sink.items()
    )
