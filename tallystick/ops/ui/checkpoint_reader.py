"""The facts of a checkpoint and its Kafka, whether a process runs the pipeline or not.

Reads, never changes anything. Each question is asked where a command of `tallystick` asks it too.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from tallystick.checkpoint.decision_log import decider_of
from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.checkpoint.newest_epoch import ask_nobody
from tallystick.epoch.findings import CheckFinding, Severity
from tallystick.epoch.manifest import Manifest
from tallystick.errors import TallystickError
from tallystick.kafka import cluster
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.ops.checkpoint_view import CheckpointView, look
from tallystick.ops.doctor import asking_again, diagnose, file_findings
from tallystick.ops.inspection import FAILED, UNDECIDED, Report, StepReport, inspect
from tallystick.ops.transactions import (
    OURS,
    KafkaCluster,
    LingeringTransaction,
    TransactionStatus,
    describe,
    in_order,
    recovery,
)
from tallystick.ops.ui.facts import EpochFact, PageFacts, PartitionFact, StepFact, TransactionFact
from tallystick.source.offsets import SourceOffsets, of_input, parse_source
from tallystick.source.splits import plan_splits
from tallystick.source.subscription import LATEST
from tallystick.storage.file_storage import FileStorage
from tallystick.values import TopicPartition

PATIENCE_MS = 5_000
"""The time Kafka has for an answer: a page shows soon what did not answer."""


class CheckpointReader:
    """A reader that looks at a checkpoint, and Kafka, on each request.

    Args:
        checkpoint: its location.
        options: of the connection to the cluster that decides, with Kafka's names; None: Kafka is
            not asked, and the page says so where a fact is not known.

    Raises:
        OptionError: the location or an option cannot work.
    """

    def __init__(self, checkpoint: str, options: Mapping[str, str] | None) -> None:
        self._storage = FileStorage(checkpoint)
        self._options = options
        self._config = None
        if options is not None:
            patience = {"delivery.timeout.ms": PATIENCE_MS, "request.timeout.ms": PATIENCE_MS - 1}
            told = {name: str(value) for name, value in patience.items()}
            self._config = KafkaConfig.from_options({**options, **told})

    def read(self) -> PageFacts:
        """Look now; an error becomes a finding."""
        looked_ms = now_ms()  # all that is found was there then, or came later
        findings = self._findings()
        is_there = not any(each.check == "kafka" for each in findings)  # it is not waited for twice
        kafka = _Kafka(self._config) if self._config is not None and is_there else None
        facts = PageFacts("", self._storage.location, looked_ms, kafka=kafka is not None)
        try:
            facts = self._read(facts, kafka)
        except (TallystickError, OSError) as error:
            told = {each.found for each in findings}
            if str(error) not in told:
                findings = (CheckFinding(Severity.ERROR, "page", str(error)), *findings)
        finally:
            if kafka is not None:
                kafka.close()
        return replace(facts, findings=findings)

    def _findings(self) -> tuple[CheckFinding, ...]:
        if self._options is not None:
            place = self._storage.uri
            found = diagnose(place, self._options, verify=False, patience_ms=PATIENCE_MS)
            return found.findings
        try:
            report = inspect(self._storage)
        except TallystickError as error:
            return (CheckFinding(Severity.ERROR, "checkpoint", str(error)),)
        return tuple(file_findings(report))

    def _read(self, facts: PageFacts, kafka: "_Kafka | None") -> PageFacts:
        open_now = () if kafka is None else kafka.asked.lingering()
        ask = ask_nobody if kafka is None else asking_again(kafka.asked.ask)
        view = look(self._storage, ask)
        decider = decider_of(self._storage)
        facts = replace(
            facts,
            name=view.pipeline,
            decided_by="" if decider is None else str(decider),
            transactions=_transactions(open_now, view),
            recovery=recovery(view),
        )
        newest = view.decided
        if newest is not None:
            facts = replace(
                facts,
                decided=self._epoch(view.decided_path, newest, None),
                producer=_producer(newest),
                partitions=_partitions(newest, kafka),
            )
        report = inspect(self._storage, ask=None if kafka is None else ask)
        steps = tuple(map(_step, report.steps))
        return replace(facts, steps=steps, epochs=self._epochs(report))

    def _epochs(self, report: Report) -> tuple[EpochFact, ...]:
        """Return the retained epochs that count, as far as is known."""
        paths = [
            each.manifest_path
            for each in report.outputs
            if each.standing not in (FAILED, UNDECIDED)
        ]
        known = CheckpointFolder(self._storage).manifests(paths)
        befores = [None, *known.values()]
        return tuple(
            self._epoch(path, manifest, before)
            for before, (path, manifest) in zip(befores, known.items(), strict=False)
            if manifest.origin is None
        )

    def _epoch(self, path: str, manifest: Manifest, before: Manifest | None) -> EpochFact:
        return EpochFact(
            number=manifest.checkpoint_id,
            decided_ms=self._storage.written_ms(path),
            offsets=_offsets_between(before, manifest),
            rows=rows_of(manifest),
        )


class _Kafka:
    """The cluster that decides."""

    def __init__(self, config: KafkaConfig) -> None:
        self.client = Client(config)
        self.asked = KafkaCluster(config)

    def close(self) -> None:
        """Close the connections."""
        self.client.close()
        self.asked.close()


def now_ms() -> int:
    """Return the time, in ms since 1970."""
    return time.time_ns() // 1_000_000


def rows_of(manifest: Manifest) -> int:
    """Return the number of rows that an epoch put out, in all sinks."""
    rows = sum(each.record_count for each in manifest.produced)
    return rows + sum(each.record_count for each in manifest.committables)


def _sources(manifest: Manifest) -> list[SourceOffsets]:
    """Return the positions of the sources that are ours."""
    found = map(parse_source, manifest.sources)
    return [each for each in found if each is not None]


def _offsets_between(before: Manifest | None, manifest: Manifest) -> int | None:
    """Return the number of offsets read by an epoch; None if the manifest before is gone."""
    if before is None or before.checkpoint_id != manifest.checkpoint_id - 1:
        return None
    starts = {each.input: each for each in _sources(before)}
    return sum(
        split.offset_count
        for stop in _sources(manifest)
        for start in [starts.get(stop.input, SourceOffsets(stop.cluster_id, stop.group))]
        if not stop.initial
        for split in plan_splits(start, stop)
    )


def _partitions(manifest: Manifest, kafka: _Kafka | None) -> tuple[PartitionFact, ...]:
    """Return the position of each partition, and its end if the partition's cluster is asked."""
    found = []
    for source in _sources(manifest):
        ends: Mapping[TopicPartition, int] = {}
        if kafka is not None and source.cluster_id == cluster.cluster_id(kafka.client):
            ends = cluster.list_offsets(kafka.client, source.positions, LATEST, absent_after_s=0.0)
        found += [
            PartitionFact(*of_input(source.input, each), position, ends.get(each))
            for each, position in sorted(source.positions.items())
        ]
    return tuple(found)


def _step(step: StepReport) -> StepFact:
    return StepFact(
        uid=step.uid,
        watermark_ms=step.watermark_ms,
        size=step.size,
        files=step.snapshots + step.changelogs,
        max_parallelism=step.max_parallelism,
        parts=tuple((part.first, part.last, part.size) for part in step.parts),
        skew=step.skew,
    )


def _transactions(
    found: Iterable[LingeringTransaction], view: CheckpointView
) -> tuple[TransactionFact, ...]:
    """Return the transactions that belong to the pipeline."""
    told = [(each, describe(each, view)) for each in in_order(found, view)]
    return tuple(
        TransactionFact(
            name=each.transactional_id,
            state=each.state,
            age_ms=max(0, now_ms() - each.begun_ms) if each.begun_ms else None,
            timeout_ms=each.timeout_ms,
            partitions=tuple(map(str, each.partitions)),
            says=said.says,
        )
        for each, said in told
        if said.standing in OURS or said.standing is TransactionStatus.ENDING
    )


def _producer(manifest: Manifest) -> str:
    """Return the writer of an epoch, in words."""
    its = manifest.producer
    if not its.transactional_id:
        return ""
    return f"{its.transactional_id}, producer {its.producer_id}, epoch {its.producer_epoch}"
