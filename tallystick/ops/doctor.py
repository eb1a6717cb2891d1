"""Checks of a checkpoint, of its Kafka cluster, and of the local machine.

Reads, never changes anything; the pipeline may run meanwhile, or be dead. Each check is one
function that yields findings, and asks the code that a start or another command uses for the same:
`inspect`, `transactions list`, the pre-flight check and its rights.

What only the pipeline's code says (its timeouts, `max_recovery_ms`, topics and rights before the
first epoch) is checked where the pipeline is named: `doctor_pipeline`.
"""

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from statistics import median_low
from typing import TYPE_CHECKING

from tallystick.checkpoint.decision_log import decider_of
from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.checkpoint.local.store import disk_space
from tallystick.checkpoint.newest import Ask, ask_nobody
from tallystick.epoch.manifest import KAFKA, DeciderName, Manifest
from tallystick.epoch.transactional_ids import parse, token_group
from tallystick.errors import (
    AuthorizationError,
    BrokerUnavailableError,
    TallystickError,
)
from tallystick.host import stopwatch
from tallystick.kafka import broker_settings, cluster
from tallystick.kafka.audit import transaction_state
from tallystick.kafka.client import Client
from tallystick.kafka.config import TRANSACTION_TIMEOUT_MS, KafkaConfig
from tallystick.kafka.output import KafkaOutput
from tallystick.kafka.preflight import (
    UNVERIFIED,
    ClusterFacts,
    Right,
    check,
    grants_message,
    missing_rights,
    rights_to_commit,
    rights_to_read,
    rights_to_show,
    rights_to_write,
)
from tallystick.ops.checkpoint_view import CheckpointView, asking_again, look
from tallystick.ops.cli_show import time_text
from tallystick.ops.file_checks import checkpoint_files
from tallystick.ops.transactions import (
    OURS,
    KafkaCluster,
    LingeringTransaction,
    TransactionStatus,
    describe,
    recovery,
)
from tallystick.source.offsets import SourceOffsets, parse_source
from tallystick.source.subscription import EARLIEST, LATEST
from tallystick.storage.file_storage import FileStorage
from tallystick.values import CheckFinding, Severity

if TYPE_CHECKING:
    from tallystick.ops.doctor_pipeline import DeclaredPipeline


@dataclass(frozen=True, slots=True)
class Subject:
    """The checkpoint that is checked, and the cluster.

    Args:
        options: of the connection, as the user gave them.
        client: of the cluster; it knows the cluster's id.
        open_transactions: lists those of the cluster.
        view: the checkpoint, with what Kafka knows of it.
        manifests: those that are retained, oldest first.
        decider: of the checkpoint; None: nothing was decided yet.
        decided_ms: when the manifests of the retained epochs were written, up to the newest
            decided one, in ms since 1970.
        trigger_interval_ms: of the pipeline; None: not given.
    """

    options: Mapping[str, str]
    client: Client
    open_transactions: Callable[[], Iterable[LingeringTransaction]]
    view: CheckpointView
    manifests: tuple[Manifest, ...]
    decider: DeciderName | None
    decided_ms: tuple[int, ...] = ()
    trigger_interval_ms: int | None = None

    @property
    def usual_ms(self) -> int | None:
        """The usual time between two decisions; None: too few epochs are retained."""
        gaps = [after - before for before, after in pairwise(self.decided_ms)]
        return median_low(gaps) if len(gaps) >= GAPS_MIN else None

    @property
    def patience_ms(self) -> int:
        """The age of the newest decision from which on the pipeline stands still."""
        usual_ms = self.usual_ms
        least_ms = UNUSUAL_MS if usual_ms is None else STANDS_MS
        return max(least_ms, INTERVALS * max(usual_ms or 0, self.trigger_interval_ms or 0))

    @property
    def sources(self) -> list[SourceOffsets]:
        """The positions of the sources that are ours."""
        newest = self.view.decided or next(reversed(self.manifests), None)
        texts = () if newest is None else newest.sources
        return [source for source in map(parse_source, texts) if source is not None]

    @property
    def output_topics(self) -> list[str]:
        """The topics that the retained epochs have rows in."""
        return sorted({rows.topic for manifest in self.manifests for rows in manifest.produced})

    @property
    def transactional_ids(self) -> list[str]:
        """The ids that the next start writes with: that of the decider first, then of tasks."""
        decides = [] if self.decider is None else [self.decider.transactional_id]
        names = {
            committable.name for manifest in self.manifests for committable in manifest.committables
        }
        ids = sorted({name.rsplit(":", 2)[0] for name in names})
        return [
            *filter(None, decides),
            *(pooled_id for pooled_id in ids if parse(pooled_id) is not None),
        ]


PACKAGES = ("tallystick", "pyspark", "pyarrow", "numpy", "lmdb")
PYTHONS = ((3, 11), (3, 13))
PYSPARKS = ((3, 5), (4, 3))
"""The oldest and the newest that `make matrix` tries."""
PYSPARK_FOR_QUERIES = (4, 2)
KAFKA_RELEASES = {
    12: "3.6", 15: "3.7", 20: "3.8", 21: "3.9", 22: "4.0", 26: "4.1", 28: "4.2", 30: "4.3",
}  # fmt: skip
"""The first `metadata.version` of each release of Kafka that is supported."""
MATRIX = "benchmarks/MATRIX.md has those that were tried"


def versions() -> Iterator[CheckFinding]:
    """Yield the installed versions, and findings about Python and PySpark."""
    installed = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    names = [f"{package} {number}" for package, number in installed.items()]
    python = f"Python {sys.version.split()[0]}"
    yield CheckFinding(Severity.INFO, "versions", ", ".join([python, *names]))
    yield from judge_python(sys.version.split()[0])
    yield from judge_pyspark(installed.get("pyspark", ""))


def judge_python(text: str) -> Iterator[CheckFinding]:
    """Yield a finding if Python is newer than tried; older versions cannot run this code."""
    if _number(text) > PYTHONS[1]:
        yield _untried(f"Python {text}", PYTHONS[1])


def judge_pyspark(text: str) -> Iterator[CheckFinding]:
    """Yield a finding if PySpark is absent (""), too old, or newer than tried."""
    oldest, newest = PYSPARKS
    install = f"pip install 'pyspark>={_text(oldest)},<5'"
    if not text:
        observation, meaning = "PySpark is not installed", "No pipeline can start from here."
        yield CheckFinding(Severity.ERROR, "versions", observation, meaning, install)
    elif _number(text) < oldest:
        observation = f"PySpark {text} is installed, and {_text(oldest)} is the oldest that works"
        yield CheckFinding(
            Severity.ERROR, "versions", observation, "Every start is refused.", install
        )
    elif _number(text) > newest:
        yield _untried(f"PySpark {text}", newest)
    elif _number(text) < PYSPARK_FOR_QUERIES:
        observation = (
            f"PySpark {text} runs pipelines; Structured Streaming queries of your own need "
            f"{_text(PYSPARK_FOR_QUERIES)}"
        )
        yield CheckFinding(Severity.INFO, "versions", observation)


def judge_brokers(facts: ClusterFacts) -> Iterator[CheckFinding]:
    """Yield the release of the brokers, an error if too old; without KRaft none is reported."""
    level = facts.metadata_version
    if level is None:
        return
    release = next((name for least, name in reversed(KAFKA_RELEASES.items()) if level >= least), "")
    if release:
        newest = max(KAFKA_RELEASES)
        later = " or later" if level > newest else ""
        observation = f"the brokers are of Kafka {release}{later} (metadata.version {level})"
        yield CheckFinding(Severity.INFO, "versions", observation)
    else:
        yield CheckFinding(
            Severity.ERROR,
            "versions",
            f"the brokers are older than Kafka 3.6 (metadata.version {level})",
            "They do not verify that a partition belongs to a transaction: a stray write of an "
            "earlier run would be committed with the next epoch, so a start is refused.",
            "Upgrade the brokers to Kafka 3.6 or later.",
        )


def _untried(what: str, newest: tuple[int, int]) -> CheckFinding:
    return CheckFinding(
        Severity.WARNING,
        "versions",
        f"{what} is newer than {_text(newest)}, the newest that was tried",
        "It may work; nobody has looked.",
        f"{MATRIX}: install one of them.",
    )


def _number(text: str) -> tuple[int, int]:
    major, minor, *_ = text.split(".")
    return int(major), int(minor)


def _text(number: tuple[int, int]) -> str:
    return ".".join(map(str, number))


LINGERS_MS = 60_000
"""A transaction that is open for longer was left, or belongs to an epoch worth a look."""
STANDS_MS = 10_000
"""A start, or an epoch of a backlog, may well take this long."""
UNUSUAL_MS = 60_000
"""The same where the usual time between two decisions is not known."""
INTERVALS = 5
"""The number of usual intervals without a decision from which on a pipeline stands still."""
GAPS_MIN = 2


def decision(subject: Subject) -> Iterator[CheckFinding]:
    """Check that the newest decision can be proved."""
    name, view, decider = "decision", subject.view, subject.decider
    if decider is None:
        yield CheckFinding(Severity.INFO, name, "nothing was decided in this checkpoint yet")
        return
    here = subject.client.cluster_id
    if decider.cluster_id not in ("", here):
        yield CheckFinding(
            Severity.ERROR,
            name,
            f"the checkpoint's epochs are decided by {decider}, and these servers are cluster "
            f"{here!r}",
            "What was found in Kafka is not about this pipeline; a start with these servers is "
            "refused.",
            "Give the servers of that cluster as --bootstrap-servers.",
        )
        return
    has_run = any(manifest.origin is None for manifest in subject.manifests)
    if has_run and (view.doubt or (decider.decided_by == KAFKA and view.decided is None)):
        yield CheckFinding(
            Severity.ERROR,
            name,
            view.doubt or f"Kafka holds no token of {decider.transactional_id!r}",
            "Which epoch was committed last cannot be proved: the next start stops with a "
            "DataLossError and asks for a decision (accept=), or clears it up by itself.",
            "Start the pipeline and read what it says; do not reset offsets of its token group, "
            f"{token_group(decider.transactional_id)!r}."
            if decider.transactional_id
            else "Start the pipeline and read what it says.",
        )


def lingering(subject: Subject) -> Iterator[CheckFinding]:
    """Look for transactions of the pipeline that are open for long."""
    view = subject.view
    for transaction in subject.open_transactions():
        description = describe(transaction, view)
        if description.standing not in OURS:
            continue
        age_ms = max(0, stopwatch.now_ms() - transaction.begun_ms)
        is_due = description.standing is TransactionStatus.DUE
        limits_ms = LINGERS_MS, transaction.timeout_ms // 2 or LINGERS_MS, subject.patience_ms
        is_old = age_ms >= min(limits_ms)
        consequence = f"Kafka aborts it after {time_text(transaction.timeout_ms)}"
        command = recovery(view)
        remedy = f"If the pipeline is dead: {command}" if command else "Start the query."
        yield CheckFinding(
            (Severity.ERROR if is_due else Severity.WARNING) if is_old else Severity.INFO,
            "transactions",
            f"{transaction.transactional_id} is open for {time_text(age_ms)}: {description.says}",
            f"Readers of committed records wait for it. {consequence}"
            + (", and rows of a decided epoch are gone from the output then." if is_due else "."),
            remedy if is_old else "",
        )


def progress(subject: Subject) -> Iterator[CheckFinding]:
    """Look for a pipeline that stands still: decisions are overdue, and records wait for them."""
    if subject.view.decided is None or not subject.decided_ms:
        return
    now_ms = broker_settings.earlier_now_ms(subject.client)
    age_ms, epoch = now_ms - subject.decided_ms[-1], subject.view.decided.checkpoint_id
    if age_ms <= subject.patience_ms or not (waiting := _waiting(subject, now_ms)):
        return
    usual_ms = subject.usual_ms
    usual = "" if usual_ms is None else f", and one came every {usual_ms / 1000:.1f} s"
    command = recovery(subject.view)
    yield CheckFinding(
        Severity.WARNING,
        "progress",
        f"the newest decision, of epoch {epoch}, is {time_text(age_ms)} old{usual}; "
        f"{waiting} offsets wait to be read",
        "The pipeline stands still: its process is dead, one of its functions hangs, or what it "
        "needs does not answer. Nothing is lost.",
        "If its process is there, its log and its page say what it waits for. If it is dead, start "
        "it" + (f"; or, only to settle its transactions: {command}" if command else ""),
    )


def _waiting(subject: Subject, now_ms: int) -> int:
    """Return the number of unread offsets; 0 if all came later than the patience began."""
    client, old_ms = subject.client, now_ms - subject.patience_ms
    unread, is_overdue = 0, False
    for source in subject.sources:
        if source.cluster_id != client.cluster_id:
            continue
        ends = cluster.list_offsets(client, source.positions, LATEST, absent_after_s=0.0)
        late = {at: end for at, end in ends.items() if source.positions[at] < end}
        unread += sum(end - source.positions[at] for at, end in late.items())
        times = dict.fromkeys(late, old_ms)
        recent = cluster.offsets_for_times(client, times, absent_after_s=0.0)
        is_overdue |= any(
            source.positions[at] < (late[at] if first is None else first)
            for at, first in recent.items()
        )
    return unread if is_overdue else 0


def settings(subject: Subject) -> Iterator[CheckFinding]:
    """Make the pre-flight check of a start, with the timeout that the last run had."""
    timeout_ms = TRANSACTION_TIMEOUT_MS
    for transactional_id in subject.transactional_ids[:1]:
        state = transaction_state(subject.client, transactional_id)
        timeout_ms = timeout_ms if state is None else int(state.transaction_timeout_ms)
    config = KafkaConfig.from_options(subject.options, transaction_timeout_ms=timeout_ms)
    output = KafkaOutput(config, None, "", transaction_timeout_ms=timeout_ms)
    facts = cluster.cluster_facts(subject.client)
    interval_ms, accepted = subject.trigger_interval_ms, frozenset({UNVERIFIED})
    preflight = check(facts, output, trigger_interval_ms=interval_ms, accepted=accepted)
    for problem in preflight.problems:
        yield CheckFinding(Severity.ERROR, "settings", problem, "The next start is refused.")
    for warning in preflight.warnings:
        yield CheckFinding(Severity.WARNING, "settings", warning)
    yield from judge_brokers(facts)
    if facts.transaction_version is not None:
        feature = f"the brokers' feature transaction.version is {facts.transaction_version}"
        yield CheckFinding(Severity.INFO, "versions", feature)
    if subject.transactional_ids:
        yield from broker_settings.retention(facts)


def topics(subject: Subject) -> Iterator[CheckFinding]:
    """Compare the topics of sources and outputs with what the checkpoint knows of them."""
    here, name = subject.client.cluster_id, "topics"
    for source in subject.sources:
        if source.cluster_id != here:
            yield CheckFinding(
                Severity.INFO,
                name,
                f"a source reads cluster {source.cluster_id!r}; its topics were not looked at",
            )
            continue
        named = {partition.topic for partition in source.positions} - set(source.gone)
        there = cluster.describe_topics(subject.client, named)
        starts = cluster.list_offsets(
            subject.client, source.positions, EARLIEST, absent_after_s=0.0
        )
        for at, start in sorted(starts.items()):
            if source.positions[at] < start:
                gone = f"offsets {source.positions[at]} to {start - 1} of {at} were deleted unread"
                yield _topic_lost(gone, "Retention, or somebody, removed them")
        for topic in sorted(named):
            expected = source.topic_ids.get(topic, "")
            if topic not in there:
                yield _topic_lost(f"source topic {topic!r} does not exist")
            elif expected not in ("", there[topic].topic_id):
                yield _topic_lost(
                    f"source topic {topic!r} has id {there[topic].topic_id}, and the checkpoint's "
                    f"positions are of id {expected}: it was deleted and created again"
                )
    there = cluster.describe_topics(subject.client, subject.output_topics)
    for topic, replication in cluster.cluster_facts(subject.client, there).replication.items():
        yield from broker_settings.copies(topic, replication)
    for topic in subject.output_topics:
        if topic not in there:
            yield CheckFinding(
                Severity.ERROR,
                name,
                f"output topic {topic!r} does not exist",
                "What was written to it is gone, and the next start is refused.",
                f"kafka-topics --bootstrap-server SERVERS --create --topic {topic} --partitions N",
            )


def _topic_lost(observation: str, cause: str = "Look who removed it") -> CheckFinding:
    return CheckFinding(
        Severity.ERROR,
        "topics",
        observation,
        "Records after the checkpoint's positions are gone. What the next epoch does is up to the "
        "source's LossPolicy: by default it stops.",
        f"{cause}; then choose losses=LossPolicy(...) of the KafkaSource.",
    )


def authorization(subject: Subject) -> Iterator[CheckFinding]:
    """Ask the brokers which rights of the next start this login lacks, as the start does."""
    client = subject.client
    wanted: list[Right] = [*rights_to_write(subject.output_topics)]
    for transactional_id in subject.transactional_ids:
        group = token_group(transactional_id)
        wanted += rights_to_commit(transactional_id, group, "")[:2]
    for source in subject.sources:
        if source.cluster_id == client.cluster_id:
            named = {partition.topic for partition in source.positions}
            wanted += rights_to_show(source.group, named) if source.group else rights_to_read(named)
    missing = missing_rights(client, wanted)
    if missing:
        yield CheckFinding(
            Severity.ERROR,
            "rights",
            grants_message(missing, client.config.sasl_username),
            "The next start with this login is refused, if it is the one of both source and sink.",
            "Each of the kafka-acls arguments above, with --bootstrap-server SERVERS.",
        )


def clock(subject: Subject) -> Iterator[CheckFinding]:
    """Compare the clock of this machine with the clock of the cluster's controller."""
    return broker_settings.clock(subject.client)


CHECKS: dict[str, Callable[[Subject], Iterator[CheckFinding]]] = {
    "decision": decision,
    "transactions": lingering,
    "progress": progress,
    "settings": settings,
    "topics": topics,
    "rights": authorization,
    "clock": clock,
}
"""Checks that need both the checkpoint and Kafka, in the order in which they are made."""


PATIENCE_MS = 30_000
"""The time Kafka has for an answer: a person waits, and can try again."""
REACH_S = 7.0
"""The time the servers have for a first answer: two may hang before one gives it."""
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
    findings = [
        replace(finding, remedy=finding.remedy.replace("SERVERS", config.bootstrap_servers))
        for finding in checks.findings
    ]
    worst_first = sorted(findings, key=lambda finding: -finding.severity)
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
    for name, pipeline_check in PIPELINE_CHECKS.items():
        checks.make(name, partial(pipeline_check, declared))


def _subject(
    storage: FileStorage,
    ask: Ask,
    kafka: KafkaCluster,
    options: Mapping[str, str],
    client: Client,
    trigger_interval_ms: int | None,
) -> Subject:
    view, folder = look(storage, ask), CheckpointFolder(storage)
    retained = folder.manifests(folder.manifest_paths())
    newest = -1 if view.decided is None else view.decided.checkpoint_id
    counting = [
        path
        for path, manifest in retained.items()
        if manifest.lineage == view.lineage and manifest.checkpoint_id <= newest
    ]
    return Subject(
        options=options,
        client=client,
        open_transactions=kafka.lingering,
        view=view,
        manifests=tuple(
            manifest for manifest in retained.values() if manifest.lineage == view.lineage
        ),
        decider=decider_of(storage),
        decided_ms=tuple(sorted(filter(None, map(storage.written_ms, counting)))),
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


def _unfinished(name: str, error: TallystickError) -> CheckFinding:
    remedy = "Do what the message says, then call the doctor again."
    if isinstance(error, AuthorizationError):
        remedy = "Use the pipeline's own login (--kafka-options), or grant it the right."
    elif isinstance(error, BrokerUnavailableError):
        remedy = (
            "Check that host and port are those of the brokers' client listener, that they run, "
            "and that its login and TLS are given (--kafka-options); then call the doctor again."
        )
    return CheckFinding(
        Severity.WARNING if isinstance(error, AuthorizationError) else Severity.ERROR,
        name,
        str(error),
        "The check could not be finished, and what it would find is not known.",
        remedy,
    )


def _brokers(client: Client) -> Iterator[CheckFinding]:
    """Reach the cluster; nothing is found if it answers."""
    with client.within(time.monotonic() + REACH_S):
        cluster.cluster_id(client)
    yield from ()
