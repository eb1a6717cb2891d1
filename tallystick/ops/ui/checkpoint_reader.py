"""The facts of a checkpoint and its Kafka, whether a process runs the pipeline or not.

Reads, never changes anything. Each question is asked where a command of `tallystick` asks it too.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from tallystick.checkpoint.decision_log import decider_of
from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.checkpoint.newest import ask_nobody
from tallystick.epoch.manifest import Manifest
from tallystick.errors import TallystickError
from tallystick.host.stopwatch import now_ms
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
from tallystick.values import CheckFinding, Severity, TopicPartition

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
            timeouts = {name: str(value) for name, value in patience.items()}
            self._config = KafkaConfig.from_options({**options, **timeouts})

    def read(self) -> PageFacts:
        """Look now; an error becomes a finding."""
        looked_ms = now_ms()  # all that is found was there then, or came later
        findings = self._findings()
        # A Kafka that does not answer is not waited for twice.
        is_there = not any(finding.check == "kafka" for finding in findings)
        kafka = _Kafka(self._config) if self._config is not None and is_there else None
        facts = PageFacts("", self._storage.location, looked_ms, kafka=kafka is not None)
        try:
            facts = self._read(facts, kafka)
        except (TallystickError, OSError) as error:
            known = {finding.found for finding in findings}
            if str(error) not in known:
                findings = (CheckFinding(Severity.ERROR, "page", str(error)), *findings)
        finally:
            if kafka is not None:
                kafka.close()
        return replace(facts, findings=findings)

    def _findings(self) -> tuple[CheckFinding, ...]:
        if self._options is not None:
            place = self._storage.uri
            diagnosis = diagnose(place, self._options, verify=False, patience_ms=PATIENCE_MS)
            return diagnosis.findings
        try:
            report = inspect(self._storage)
        except TallystickError as error:
            return (CheckFinding(Severity.ERROR, "checkpoint", str(error)),)
        return tuple(file_findings(report))

    def _read(self, facts: PageFacts, kafka: "_Kafka | None") -> PageFacts:
        open_now = () if kafka is None else kafka.cluster.lingering()
        ask = ask_nobody if kafka is None else asking_again(kafka.cluster.ask)
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
            output.manifest_path
            for output in report.outputs
            if output.standing not in (FAILED, UNDECIDED)
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
        self.cluster = KafkaCluster(config)

    def close(self) -> None:
        """Close the connections."""
        self.client.close()
        self.cluster.close()


def rows_of(manifest: Manifest) -> int:
    """Return the number of rows that an epoch put out, in all sinks."""
    rows = sum(produced.record_count for produced in manifest.produced)
    return rows + sum(committable.record_count for committable in manifest.committables)


def _sources(manifest: Manifest) -> list[SourceOffsets]:
    """Return the positions of the sources that are ours."""
    parsed = map(parse_source, manifest.sources)
    return [source for source in parsed if source is not None]


def _offsets_between(before: Manifest | None, manifest: Manifest) -> int | None:
    """Return the number of offsets read by an epoch; None if the manifest before is gone."""
    if before is None or before.checkpoint_id != manifest.checkpoint_id - 1:
        return None
    starts = {source.input: source for source in _sources(before)}
    return sum(
        split.offset_count
        for stop in _sources(manifest)
        for start in [starts.get(stop.input, SourceOffsets(stop.cluster_id, stop.group))]
        if not stop.initial
        for split in plan_splits(start, stop)
    )


def _partitions(manifest: Manifest, kafka: _Kafka | None) -> tuple[PartitionFact, ...]:
    """Return the position of each partition, and its end if the partition's cluster is asked."""
    facts = []
    for source in _sources(manifest):
        ends: Mapping[TopicPartition, int] = {}
        if kafka is not None and source.cluster_id == cluster.cluster_id(kafka.client):
            ends = cluster.list_offsets(kafka.client, source.positions, LATEST, absent_after_s=0.0)
        facts += [
            PartitionFact(*of_input(source.input, partition), position, ends.get(partition))
            for partition, position in sorted(source.positions.items())
        ]
    return tuple(facts)


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
    lingering: Iterable[LingeringTransaction], view: CheckpointView
) -> tuple[TransactionFact, ...]:
    """Return the transactions that belong to the pipeline."""
    described = [
        (transaction, describe(transaction, view)) for transaction in in_order(lingering, view)
    ]
    return tuple(
        TransactionFact(
            name=transaction.transactional_id,
            state=transaction.state,
            age_ms=max(0, now_ms() - transaction.begun_ms) if transaction.begun_ms else None,
            timeout_ms=transaction.timeout_ms,
            partitions=tuple(map(str, transaction.partitions)),
            says=description.says,
        )
        for transaction, description in described
        if description.standing in OURS or description.standing is TransactionStatus.ENDING
    )


def _producer(manifest: Manifest) -> str:
    """Return the writer of an epoch, in words."""
    producer = manifest.producer
    if not producer.transactional_id:
        return ""
    return (
        f"{producer.transactional_id}, producer {producer.producer_id}, "
        f"epoch {producer.producer_epoch}"
    )
