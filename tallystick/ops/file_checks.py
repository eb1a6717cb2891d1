"""Checks of a checkpoint's files, and of the folders of tables that its manifests name."""

from collections.abc import Iterable, Iterator

from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.checkpoint.newest import Ask
from tallystick.errors import OptionError
from tallystick.ops.cli_show import due_text
from tallystick.ops.due import DueSink
from tallystick.ops.inspection import Report, inspect
from tallystick.storage.file_storage import FileStorage
from tallystick.values import CheckFinding, Severity

OVERDUE_TIMES, OVERDUE_MS = 3, 60_000
"""An epoch is overdue if it waits this many times `commit_every`, and this much longer."""


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
    yield from due_findings(report.due)


def due_findings(due: Iterable[DueSink]) -> Iterator[CheckFinding]:
    """Report what is due; a warning if it has waited for much longer than it is meant to."""
    for sink in due:
        late_ms = max(OVERDUE_TIMES * sink.every_ms, sink.every_ms + OVERDUE_MS)
        is_late = not sink.unknown and sink.waited_ms > late_ms
        yield CheckFinding(
            Severity.WARNING if is_late else Severity.INFO,
            "tables",
            due_text(sink),
            "Nothing is lost, and readers of the table do not see it yet." if is_late else "",
            "If the pipeline runs, its log says why the table refuses the commit. If it does not: "
            "start it, which publishes what is due."
            if is_late
            else "",
        )
