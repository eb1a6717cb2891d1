"""The contents of a checkpoint: epochs, positions, state by key groups, files, damage, rubbish.

Reads, never changes anything; the pipeline may run meanwhile. Where Kafka decides and cannot be
asked, what is decided last may not be known here.
"""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tallystick.checkpoint.folder import CheckpointFolder, Integrity, RetainedEpoch, newest_whole
from tallystick.checkpoint.newest import (
    Ask,
    CheckpointEnd,
    Epochs,
    ask_nobody,
    call_failed,
    never_committed,
    refuse_nothing_settled,
)
from tallystick.codec.ddl import ddl_of
from tallystick.epoch.manifest import (
    CHECKPOINT,
    Manifest,
    attempt_of,
    epoch_of,
    expired_manifests,
    retained_manifests,
)
from tallystick.errors import ManifestError
from tallystick.ops.due import DueSink, due_sinks
from tallystick.ports import Storage
from tallystick.source.offsets import parse_source
from tallystick.state.catalog import SNAPSHOT, StateField, StateFile, StepState
from tallystick.state.changelog import DamagedError, parse_index
from tallystick.state.compatibility import is_operator_state, parts_of
from tallystick.state.file_sets import collectable, due_merges, due_snapshots, needed
from tallystick.state.functions.processing import COLUMNS, ELEMENTS, TABLE
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.schema import schema_from_text

LOOKS_MAX = 3
"""The number of looks at a checkpoint that a running pipeline changes meanwhile."""
SETTLED = "settled"
"""Decided, and visible in every sink."""
DECIDED = "decided, not settled"
"""Nothing says that its sinks have committed all of it; the next start sees to it."""
FAILED = "failed attempt"
"""Another manifest of the epoch counts."""
UNDECIDED = "not decided"
"""Nothing of it counts, as far as its decider knows."""
KAFKA_KNOWS = "Kafka knows"
"""Only its token in Kafka says whether it is decided."""

Float64Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Part:
    """The state of one task's key groups; files that several tasks share count by segments."""

    first: int
    last: int
    size: int
    files: int


@dataclass(frozen=True, slots=True)
class StepReport:
    """A keyed step.

    Args:
        states: what it keeps per key; see `state_text`.
        skew: the size of the largest part over that of the average; 1.0: all are alike.
        snapshots_due: ranges of key groups that are written again with the next epoch.
        merges_due: how many changelogs are merged with the next epoch.
    """

    uid: str
    key: str
    states: tuple[str, ...]
    max_parallelism: int
    parallelism: int
    watermark_ms: int | None
    size: int
    entries: int
    snapshots: int
    changelogs: int
    parts: tuple[Part, ...]
    skew: float
    snapshots_due: tuple[tuple[int, int], ...]
    merges_due: int


@dataclass(frozen=True, slots=True)
class SinkOutput:
    """The transactions prepared by the tasks of one sink for an epoch."""

    uid: str
    transactions: int
    records: int


@dataclass(frozen=True, slots=True)
class Output:
    """The output that a manifest makes visible.

    Args:
        epoch: the number of the epoch.
        manifest_path: the path of the manifest.
        decided_by: `kafka`: a transaction with the epoch's rows; `checkpoint`: its own log.
        standing: one of the words above, from `SETTLED` on.
        records: the number of records in the deciding transaction.
        sinks: the transactions of other sinks, committed after the decision.
    """

    epoch: int
    manifest_path: str
    decided_by: str
    standing: str
    records: int
    sinks: tuple[SinkOutput, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """A checkpoint.

    Args:
        location: the location of the checkpoint.
        epoch: the newest epoch that is certainly settled.
        logged: the newest epoch that was begun; it may be under way, or have failed.
        origin: the savepoint that was restored, while no epoch has run since.
        positions: per source, the next offset of each partition.
        inputs: the id of each source.
        epochs: the epochs whose manifests exist, oldest first.
        newest_whole: the newest epoch with all its files; None: none has all.
        outputs: the output of these epochs, and of later manifests; oldest first.
        rubbish: the files that the pipeline would remove now.
        verified: whether the bytes of all files were compared with their checksums.
        notes: further remarks for the reader.
        due: the sinks in which decided epochs wait to be published.
    """

    location: str
    pipeline: str
    lineage: str
    epoch: int
    logged: int
    origin: str
    positions: tuple[dict[str, int], ...]
    inputs: tuple[str, ...]
    steps: tuple[StepReport, ...]
    epochs: tuple[RetainedEpoch, ...]
    newest_whole: int | None
    rubbish: tuple[str, ...]
    verified: bool
    notes: tuple[str, ...] = ()
    outputs: tuple[Output, ...] = ()
    due: tuple[DueSink, ...] = ()

    @property
    def is_whole(self) -> bool:
        """True if the newest epoch has all its files."""
        return self.newest_whole == self.epoch


def inspect(checkpoint: Storage, *, verify: bool = False, ask: Ask | None = None) -> Report:
    """Look into a checkpoint.

    Args:
        checkpoint: its location.
        verify: read every file, and compare it with its checksums.
        ask: asks Kafka for the last decision; None: Kafka cannot be asked.

    Raises:
        OptionError: the checkpoint holds no committed epoch.
        ManifestError: the manifest of the committed epoch is missing or damaged.
        DataLossError: no epoch is committed, since a call of the sink failed.
    """
    for _ in range(LOOKS_MAX):
        report = _Look(checkpoint, verify, ask).report()
        if report.is_whole or _Look(checkpoint, verify, ask).committed == report.epoch:
            break
    return report


@dataclass
class _Look:
    """One look at a checkpoint.

    Args:
        storage: its location.
        verify: see `inspect`.
        ask: see `inspect`.
    """

    storage: Storage
    verify: bool
    ask: Ask | None

    def __post_init__(self) -> None:
        self.known = Epochs(self.storage)
        refuse_nothing_settled(self.storage, self.known)
        self.last = self._decided_last()
        is_loops = self.known.is_loops
        self.committed = self.last.settled if is_loops else self.known.newest_written()
        self.paths = self.known.paths
        self.files = Integrity(self.storage, self.verify)

    def report(self) -> Report:
        path, notes = self._manifest_of_committed()
        manifest = CheckpointFolder(self.storage).read_manifest(path)
        outputs, more = self._outputs()
        epochs = self.files.epochs(self.committed)
        return Report(
            location=self.storage.location,
            pipeline=manifest.pipeline,
            lineage=manifest.lineage,
            epoch=self.committed,
            logged=max(self.known.newest_begun, self.committed),
            origin="" if manifest.origin is None else manifest.origin.savepoint,
            positions=_positions(manifest),
            inputs=tuple(source.input for source in map(parse_source, manifest.sources) if source),
            steps=tuple(self._step(step) for step in manifest.state),
            epochs=tuple(epochs),
            newest_whole=newest_whole(epochs),
            rubbish=self._rubbish(),
            verified=self.verify,
            notes=(*notes, *self._doubts(path, outputs), *more),
            outputs=outputs,
            due=self._due(),
        )

    def _outputs(self) -> tuple[tuple[Output, ...], tuple[str, ...]]:
        """Return the output of each readable retained manifest, and of a decision after them.

        Damage to one is reported with the epochs.
        """
        token, outputs = self.last.decided, []
        for path in sorted(retained_manifests(self.paths, self.committed), key=attempt_of):
            try:
                manifest = CheckpointFolder(self.storage).read_manifest(path)
                standing = self._standing(path, manifest)
            except ManifestError:
                continue
            outputs.append(_output(path, manifest, standing))
        if self.known.is_loops and self.last.doubt:
            doubt = f"what is decided after epoch {self.committed} is not known: {self.last.doubt}"
            return tuple(outputs), (f"{doubt}.",)
        if token is None or token.checkpoint_id <= self.committed:
            return tuple(outputs), ()
        note = (
            f"epoch {token.checkpoint_id} is decided, and nothing says yet that it is settled: "
            f"what its sinks have prepared may not be committed in all of them. A run that is at "
            f"work, the next start, or a pipeline's `tallystick recover` settles it; `tallystick "
            f"transactions list` shows what is open."
        )
        return tuple(outputs), (note,)

    def _decided_last(self) -> CheckpointEnd:
        try:
            return self.known.last(self.ask or ask_nobody, self.known.lineage)
        except ManifestError as error:  # damage to one of an epoch that is not settled yet
            if self.known.settled() in (-1, self.known.newest_begun):
                raise
            return CheckpointEnd(self.known.settled(), "", None, str(error))

    def _standing(self, path: str, manifest: Manifest) -> str:
        epoch, token = epoch_of(path), self.last.decided
        if epoch > self.committed or self.known.doubts(path):
            if token is not None and path == token.manifest_path:
                return DECIDED
            is_told = self.ask is not None and not self.last.doubt
            return UNDECIDED if is_told or manifest.decided_by == CHECKPOINT else KAFKA_KNOWS
        counts = self.last.settled_path if epoch == self.committed else ""
        counts = counts or self.known.counting(epoch)
        if counts not in ("", path):
            return FAILED
        is_newest = epoch == self.committed
        if is_newest and self.known.is_denied(path, self.ask or ask_nobody):
            return UNDECIDED
        return SETTLED if counts else KAFKA_KNOWS

    def _manifest_of_committed(self) -> tuple[str, tuple[str, ...]]:
        paths = self.known.of(self.committed)
        if self.last.settled_path or len(paths) == 1:
            return self.last.settled_path or paths[0], ()
        if not paths and (failures := self.known.failures(self.committed)):
            raise call_failed(self.storage, self.committed, failures)
        if not paths:
            raise ManifestError(
                f"checkpoint {self.storage.location}: Spark logged epoch {self.committed} as done, "
                f"but there is no manifest of it. Put a whole copy of the checkpoint back."
            )
        shown = f"epoch {self.committed} has {len(paths)} manifests, since an attempt failed; shown"
        path = self.known.counting(self.committed)
        if path:
            return path, (f"{shown} is {path}, which counts.",)
        newest = max(paths, key=attempt_of)
        note = (
            f"{shown} is {newest}, of the newest producer. Only Kafka's token proves which one "
            f"counts."
        )
        return newest, (note,)

    def _doubts(self, path: str, outputs: Iterable[Output]) -> tuple[str, ...]:
        """Return the reasons why the newest written manifest may not count, or does not."""
        if doubts := self.known.doubts(path):
            return (str(call_failed(self.storage, self.committed, doubts)),)
        is_denied = any(
            output.manifest_path == path for output in outputs if output.standing == UNDECIDED
        )
        return (never_committed(self.committed, path),) if is_denied else ()

    def _rubbish(self) -> tuple[str, ...]:
        """Return the files to be collected: none of state while a manifest is unreadable."""
        gone = expired_manifests(self.paths, self.committed)
        with contextlib.suppress(ManifestError):  # damage to one is reported with the epochs
            retained = retained_manifests(self.paths, self.committed)
            kept = [CheckpointFolder(self.storage).read_manifest(path).state for path in retained]
            gone += collectable(sorted(self.files.paths()), self.committed, kept)
        return tuple(gone)

    def _due(self) -> tuple[DueSink, ...]:
        manifests = []
        for path in self.paths:
            with contextlib.suppress(ManifestError):  # damage to one is reported with the epochs
                manifests.append(CheckpointFolder(self.storage).read_manifest(path))
        return due_sinks(manifests)

    def _step(self, step: StepState) -> StepReport:
        sizes, files = self._sizes(step)
        parts = []
        for groups in parts_of(step):
            window = slice(groups.first, groups.last + 1)
            touching = sum(file.groups.intersection(groups).count > 0 for file in files)
            parts.append(
                Part(groups.first, groups.last, round(float(sizes[window].sum())), touching)
            )
        average = sum(part.size for part in parts) / len(parts)
        snapshots = sum(file.kind == SNAPSHOT for file in files)
        writers = 1 if is_operator_state(step) else step.parallelism
        due = due_snapshots(step, writers).values()
        return StepReport(
            uid=step.uid,
            key=step.key_schema,
            states=tuple(map(state_text, step.fields)),
            max_parallelism=step.max_parallelism,
            parallelism=step.parallelism,
            watermark_ms=step.watermark_ms,
            size=sum(file.size for file in files),
            entries=sum(file.rows for file in files),
            snapshots=snapshots,
            changelogs=len(files) - snapshots,
            parts=tuple(parts),
            skew=max(part.size for part in parts) / average if average else 1.0,
            snapshots_due=tuple((groups.first, groups.last) for groups in due),
            merges_due=sum(len(loads) for loads in due_merges(step, writers).values()),
        )

    def _sizes(self, step: StepState) -> tuple[Float64Array, list[StateFile]]:
        """Return the approximate bytes of each key group, by the files' indexes, and the files."""
        sizes = np.zeros(step.max_parallelism)
        everything = KeyGroupRange(0, step.max_parallelism - 1)
        loads = needed(step.files, everything)
        for load in loads:
            wanted = np.zeros(step.max_parallelism, np.bool_)
            for groups in load.groups:
                wanted[groups.first : groups.last + 1] = True
            for first, last, size in self._segments(load.file):
                window = slice(first, last + 1)
                sizes[window] += wanted[window] * (size / (last - first + 1))
        return sizes, [load.file for load in loads]

    def _segments(self, file: StateFile) -> list[tuple[int, int, int]]:
        """Return key groups and bytes of each segment; a damaged file counts as one."""
        tail = self.storage.get_range(file.path, -file.index_size, file.index_size)
        try:
            segments = parse_index(tail or b"", file.checksum)
        except DamagedError:
            return [(file.first, file.last, file.size)]
        return [(segment.first, segment.last, segment.length) for segment in segments]


def state_text(state: StateField) -> str:
    """Return a state of a step as text: of a vectorised function, the columns and their types."""
    if state.kind in (COLUMNS, TABLE, ELEMENTS):
        columns = ddl_of(schema_from_text(state.value_schema))
        return columns if state.kind == COLUMNS else f"{state.kind} ({columns})"
    return f"{state.name} ({state.kind})"


def _output(path: str, manifest: Manifest, standing: str) -> Output:
    sinks: dict[str, list[int]] = {}
    for committable in manifest.committables:
        sinks.setdefault(committable.sink, []).append(committable.record_count)
    return Output(
        epoch=manifest.checkpoint_id,
        manifest_path=path,
        decided_by=manifest.decided_by,
        standing=standing,
        records=sum(produced.record_count for produced in manifest.produced),
        sinks=tuple(
            SinkOutput(uid, len(counts), sum(counts)) for uid, counts in sorted(sinks.items())
        ),
    )


def _positions(manifest: Manifest) -> tuple[dict[str, int], ...]:
    sources = filter(None, map(parse_source, manifest.sources))
    return tuple(
        {str(partition): offset for partition, offset in sorted(source.positions.items())}
        for source in sources
    )
