"""Checks of a checkpoint, of the Kafka that it belongs to, and of this machine.

Reads, never changes anything; the pipeline may run meanwhile, or be dead. Each check is one
function that yields findings, and asks the code that a start or another command uses for the same:
`inspect`, `transactions list`, the pre-flight check and its rights.

What only the pipeline's code says (trigger interval, `max_recovery_ms`, topics that rows name) is
checked by its start.
"""

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from tallystick.checkpoint.decider import decider_of
from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.checkpoint.local.local_state import state_folder
from tallystick.checkpoint.newest_epoch import Ask, TokenAnswer, ask_nobody
from tallystick.errors import AuthorizationError, OptionError, TallystickError
from tallystick.kafka import cluster
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.ops.checkpoint_view import look
from tallystick.ops.cli_show import size_text
from tallystick.ops.doctor_kafka import CHECKS
from tallystick.ops.findings import CheckFinding, Severity, Subject
from tallystick.ops.inspection import inspect
from tallystick.ops.transactions import KafkaCluster
from tallystick.storage.file_storage import FileStorage, local_path

PATIENCE_MS = "30000"
"""How long Kafka has for an answer: a person waits, and can try again."""
ASKS_MAX = 30
ASK_AGAIN_S = 0.1
FREE_MIN_BYTES = 1 << 30
FREE_MIN_SHARE = 0.05
PACKAGES = ("tallystick", "pyspark", "pyarrow", "numpy", "lmdb")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings, the worst first.

    Args:
        checkpoint: its location.
        checks: the names of those that were made.
        findings: of them.
    """

    checkpoint: str
    checks: tuple[str, ...]
    findings: tuple[CheckFinding, ...]

    @property
    def exit_code(self) -> int:
        """0: nothing but information; 1: warnings; 2: errors."""
        return max((int(each.severity) for each in self.findings), default=0)


def diagnose(checkpoint: str, options: Mapping[str, str]) -> Diagnosis:
    """Make every check.

    Args:
        checkpoint: its location.
        options: of the connection to the cluster that decides, with Kafka's names.

    Raises:
        OptionError: an option or the location cannot work.
    """
    storage = FileStorage(checkpoint)
    config = KafkaConfig.from_options({"delivery.timeout.ms": PATIENCE_MS, **options})
    client, asked = Client(config), KafkaCluster(config)
    findings = [*versions(), *_finished("disk", lambda: disk(checkpoint))]
    made = ["versions", "disk", "kafka", "checkpoint"]
    try:
        unreachable = [*_finished("kafka", lambda: _no_findings(cluster.cluster_id(client)))]
        ask = ask_nobody if unreachable else _asking_again(asked.ask)
        files = [*_finished("checkpoint", lambda: checkpoint_files(storage, ask))]
        findings += [*unreachable, *files]
        if not unreachable and CheckpointFolder(storage).is_begun:
            try:
                subject = _subject(storage, ask, asked, options, client)
            except TallystickError as error:
                made.append("decision")
                findings += _without_repeats([_unfinished("decision", error)], files)
            else:
                for name, each in CHECKS.items():
                    made.append(name)
                    findings += _finished(name, partial(each, subject))
    finally:
        asked.close()
        client.close()
    findings.sort(key=lambda each: -each.severity)
    return Diagnosis(storage.location, tuple(made), tuple(findings))


def _subject(
    storage: FileStorage,
    ask: Ask,
    asked: KafkaCluster,
    options: Mapping[str, str],
    client: Client,
) -> Subject:
    view, folder = look(storage, ask), CheckpointFolder(storage)
    retained = folder.manifests(folder.manifest_paths()).values()
    return Subject(
        options=options,
        client=client,
        open_transactions=asked.lingering,
        view=view,
        manifests=tuple(each for each in retained if each.lineage == view.lineage),
        decider=decider_of(storage),
    )


def _asking_again(ask: Ask) -> Ask:
    """Return who asks Kafka until it is sure: a running pipeline is often just committing."""

    def asking(transactional_id: str, lineage: str) -> TokenAnswer:
        for _ in range(ASKS_MAX):
            answer = ask(transactional_id, lineage)
            if answer.token is not None or not answer.doubt:
                break
            time.sleep(ASK_AGAIN_S)
        return answer

    return asking


def _finished(name: str, made: Callable[[], Iterable[CheckFinding]]) -> list[CheckFinding]:
    """Return what a check finds; that it could not be finished is a finding too."""
    try:
        return list(made())
    except TallystickError as error:
        return [_unfinished(name, error)]


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


def _no_findings(_: object) -> tuple[CheckFinding, ...]:
    return ()


def _without_repeats(new: list[CheckFinding], known: list[CheckFinding]) -> list[CheckFinding]:
    return [each for each in new if each.found not in {one.found for one in known}]


# --- this machine -----------------------------------------------------------------------------


def versions() -> Iterator[CheckFinding]:
    """Name what is installed here."""
    found = [f"Python {sys.version.split()[0]}"]
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    yield CheckFinding(Severity.INFO, "versions", ", ".join(found))


def disk(checkpoint: str) -> Iterator[CheckFinding]:
    """Look at the space that is left for the checkpoint, and for copies of state on this host."""
    places = {"copies of state": state_folder(), "the checkpoint": local_path(checkpoint)}
    for what, place in places.items():
        while place is not None and not place.exists():
            place = place.parent
        if place is None:
            continue
        usage = shutil.disk_usage(place)
        if usage.free < max(FREE_MIN_BYTES, FREE_MIN_SHARE * usage.total):
            yield CheckFinding(
                Severity.WARNING,
                "disk",
                f"{size_text(usage.free)} of {size_text(usage.total)} are free on the disk of "
                f"{what} ({place})",
                "When it is full, epochs are aborted and run again until there is space; nothing "
                "is lost.",
                f"df -h {place}; then make space, or move it: the checkpoint to a larger disk "
                f"while the pipeline is stopped, copies of state by TALLYSTICK_STATE_DIR.",
            )


# --- the checkpoint ---------------------------------------------------------------------------


def checkpoint_files(storage: FileStorage, ask: Ask) -> Iterator[CheckFinding]:
    """Read all files of the checkpoint, as `tallystick inspect --verify` does."""
    name, location = "checkpoint", storage.location
    try:
        report = inspect(storage, verify=True, ask=ask)
    except OptionError as error:
        is_begun = CheckpointFolder(storage).is_begun
        yield CheckFinding(
            Severity.WARNING if is_begun else Severity.ERROR,
            name,
            str(error),
            "Its first epoch is under way, or never ended." if is_begun else "",
            "Start the pipeline, and wait for an epoch." if is_begun else f"ls {location}",
        )
        return
    for problem in dict.fromkeys(each for epoch in report.epochs for each in epoch.problems):
        counts = any(problem in each.problems for each in report.epochs[-1:])
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
