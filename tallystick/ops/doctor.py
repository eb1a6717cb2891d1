"""Checks of a checkpoint, of its Kafka cluster, and of the local machine.

Reads, never changes anything; the pipeline may run meanwhile, or be dead. Each check is one
function that yields findings, and asks the code that a start or another command uses for the same:
`inspect`, `transactions list`, the pre-flight check and its rights.

What only the pipeline's code says (its timeouts, `max_recovery_ms`, topics and rights before the
first epoch) is checked where the pipeline is named: `doctor_pipeline`.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from tallystick.checkpoint.decision_log import decider_of
from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.checkpoint.local.store import disk_space
from tallystick.checkpoint.newest import Ask, TokenAnswer, ask_nobody
from tallystick.errors import AuthorizationError, OptionError, TallystickError
from tallystick.kafka import cluster
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.ops.checkpoint_view import look
from tallystick.ops.doctor_kafka import CHECKS
from tallystick.ops.doctor_subject import Subject
from tallystick.ops.inspection import Report, inspect
from tallystick.ops.transactions import KafkaCluster
from tallystick.ops.versions import versions
from tallystick.storage.file_storage import FileStorage
from tallystick.values import CheckFinding, Severity

if TYPE_CHECKING:
    from tallystick.ops.doctor_pipeline import DeclaredPipeline

PATIENCE_MS = 30_000
"""The time Kafka has for an answer: a person waits, and can try again."""
ASKS_MAX = 30
ASK_AGAIN_S = 0.1
GUESSED = ("settings", "rights")
"""Checks of `CHECKS` that are made with the pipeline's own settings where these are known."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings, the worst first.

    Args:
        checkpoint: its location.
        checks: the names of the checks that were made.
        findings: of these checks.
    """

    checkpoint: str
    checks: tuple[str, ...]
    findings: tuple[CheckFinding, ...]

    @property
    def exit_code(self) -> int:
        """0: nothing but information; 1: warnings; 2: errors."""
        return max((int(finding.severity) for finding in self.findings), default=0)


@dataclass(slots=True)
class _Round:
    """The checks made so far, and their findings, each listed once."""

    on_check: Callable[[str], None]
    names: list[str] = field(default_factory=list)
    findings: list[CheckFinding] = field(default_factory=list)

    def make(self, name: str, check: Callable[[], Iterable[CheckFinding]]) -> list[CheckFinding]:
        """Make a check; a check that cannot be finished is a finding too."""
        self.on_check(name)
        self.names.append(name)
        try:
            findings = list(check())
        except TallystickError as error:
            findings = [_unfinished(name, error)]
        self.findings += [finding for finding in findings if finding not in self.findings]
        return findings


def diagnose(
    checkpoint: str,
    options: Mapping[str, str],
    *,
    verify: bool = True,
    patience_ms: int = PATIENCE_MS,
    pipeline: "DeclaredPipeline | None" = None,
    trigger_interval_ms: int | None = None,
    storage_of: Callable[[str], FileStorage] = FileStorage,
    on_check: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """Make every check.

    Args:
        checkpoint: its location.
        options: of the connection to the cluster that decides, with Kafka's names.
        verify: read every file of the checkpoint; else only look that the files exist.
        patience_ms: how long Kafka has for an answer, unless `options` say otherwise.
        pipeline: the checkpoint's pipeline, where its code is at hand.
        trigger_interval_ms: of the pipeline; None: not known, or epochs follow each other at once.
        storage_of: makes the storage of the checkpoint.
        on_check: called with the name of each check before it is made.

    Raises:
        OptionError: an option or the location cannot work.
    """
    storage = storage_of(checkpoint)
    config = KafkaConfig.from_options({"delivery.timeout.ms": str(patience_ms), **options})
    client, kafka = Client(config), KafkaCluster(config)
    checks = _Round(on_check)
    checks.make("versions", versions)
    checks.make("disk", lambda: disk_space(storage.uri))
    try:
        unreachable = checks.make("kafka", lambda: _brokers(client))
        ask = ask_nobody if unreachable else asking_again(kafka.ask)
        files = partial(checkpoint_files, storage, ask, verify=verify, may_be_new=bool(pipeline))
        damage = checks.make("checkpoint", files)
        subject = None
        if not unreachable and CheckpointFolder(storage).is_begun:
            look_at = partial(_subject, storage, ask, kafka, options, client, trigger_interval_ms)
            subject = _known(look_at, checks, damage)
        if subject is not None:
            for name, check in CHECKS.items():
                if pipeline is None or name not in GUESSED:
                    checks.make(name, partial(check, subject))
        if pipeline is not None:
            written = () if subject is None else subject.output_topics
            _check_pipeline(checks, pipeline, storage, written, trigger_interval_ms)
    finally:
        kafka.close()
        client.close()
    worst_first = sorted(checks.findings, key=lambda finding: -finding.severity)
    return Diagnosis(storage.location, tuple(checks.names), tuple(worst_first))


def _check_pipeline(
    checks: _Round,
    pipeline: "DeclaredPipeline",
    storage: FileStorage,
    written: Collection[str],
    trigger_interval_ms: int | None,
) -> None:
    from tallystick.ops.doctor_pipeline import PIPELINE_CHECKS, DeclaredSubject  # they need PySpark

    declared = DeclaredSubject(pipeline, storage, written, trigger_interval_ms)
    for name, check in PIPELINE_CHECKS.items():
        checks.make(name, partial(check, declared))


def _subject(
    storage: FileStorage,
    ask: Ask,
    kafka: KafkaCluster,
    options: Mapping[str, str],
    client: Client,
    trigger_interval_ms: int | None,
) -> Subject:
    view, folder = look(storage, ask), CheckpointFolder(storage)
    retained = folder.manifests(folder.manifest_paths()).values()
    return Subject(
        options=options,
        client=client,
        open_transactions=kafka.lingering,
        view=view,
        manifests=tuple(manifest for manifest in retained if manifest.lineage == view.lineage),
        decider=decider_of(storage),
        trigger_interval_ms=trigger_interval_ms,
    )


def _known(
    look_at: Callable[[], Subject], checks: _Round, damage: list[CheckFinding]
) -> Subject | None:
    """Return the subject of further checks; None, and a finding, if damage makes it unreadable."""
    try:
        return look_at()
    except TallystickError as error:
        finding = _unfinished("decision", error)
        is_known = finding.found in {other.found for other in damage}
        checks.make("decision", lambda: [] if is_known else [finding])
        return None


def asking_again(ask: Ask) -> Ask:
    """Return a function that asks Kafka again while in doubt: a pipeline may just be committing."""

    def asking(transactional_id: str, lineage: str) -> TokenAnswer:
        for _ in range(ASKS_MAX):
            answer = ask(transactional_id, lineage)
            if answer.token is not None or not answer.doubt:
                break
            time.sleep(ASK_AGAIN_S)
        return answer

    return asking


def _unfinished(name: str, error: TallystickError) -> CheckFinding:
    is_right = isinstance(error, AuthorizationError)
    return CheckFinding(
        Severity.WARNING if is_right else Severity.ERROR,
        name,
        str(error),
        "The check could not be finished, and what it would find is not known.",
        "Use the pipeline's own login (--kafka-options), or grant it the right."
        if is_right
        else "Do what the message says, then call the doctor again.",
    )


def _brokers(client: Client) -> Iterator[CheckFinding]:
    """Reach the cluster; nothing is found if it answers."""
    cluster.cluster_id(client)
    yield from ()


# --- the checkpoint ---------------------------------------------------------------------------


def checkpoint_files(
    storage: FileStorage, ask: Ask, *, verify: bool, may_be_new: bool = False
) -> Iterator[CheckFinding]:
    """Check all files of the checkpoint, as `tallystick inspect` does.

    Args:
        storage: the checkpoint.
        ask: asks Kafka.
        verify: read every file.
        may_be_new: nothing is wrong if no run has begun there yet.
    """
    name, location = "checkpoint", storage.location
    try:
        report = inspect(storage, verify=verify, ask=ask)
    except OptionError as error:
        is_begun = CheckpointFolder(storage).is_begun
        if may_be_new and not is_begun:
            yield CheckFinding(Severity.INFO, name, f"{location} is new: no run has begun there")
            return
        yield CheckFinding(
            Severity.WARNING if is_begun else Severity.ERROR,
            name,
            str(error),
            "Its first epoch is under way, or never ended." if is_begun else "",
            "Start the pipeline, and wait for an epoch." if is_begun else f"ls {location}",
        )
        return
    yield from file_findings(report)


def file_findings(report: Report) -> Iterator[CheckFinding]:
    """Report missing and damaged files of a checkpoint, and the notes about it."""
    name, location = "checkpoint", report.location
    for problem in dict.fromkeys(problem for epoch in report.epochs for problem in epoch.problems):
        counts = any(problem in epoch.problems for epoch in report.epochs[-1:])
        whole = report.newest_whole
        yield CheckFinding(
            Severity.ERROR if counts else Severity.WARNING,
            name,
            problem,
            f"The next start that reads it stops. The newest epoch that is whole is {whole}."
            if counts
            else "Only an older epoch needs it: no savepoint can be taken of that one.",
            f"Put it back from a backup; then tallystick inspect {location} --verify"
            + (
                f". Or go back: tallystick savepoint create {location} SAVEPOINT --epoch {whole}, "
                f"and restore that into a new checkpoint."
                if counts and whole is not None
                else ""
            ),
        )
    for note in report.notes:
        yield CheckFinding(Severity.INFO, name, note)
