"""Requests to a running pipeline, sent and waited for: by the command line and by the page."""

import time
from datetime import UTC, datetime

from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.checkpoint.newest_run import NewestRun, newest_run
from tallystick.checkpoint.requests import (
    DONE,
    DRAIN_S,
    RESCALE,
    STOP,
    TAKEN,
    Answer,
    Request,
    answer_to,
    asker,
    remove,
    send,
    withdraw,
)
from tallystick.epoch.manifest import epoch_of
from tallystick.errors import OptionError, TallystickError
from tallystick.storage.file_storage import FileStorage, user_part
from tallystick.storage.places import resolved

PATIENCE_S = 10.0
"""The longest silence of a run that lives: it looks, and shows that it is at work, every 2 s."""
POLL_S = 0.25


def stop(
    checkpoint: str,
    *,
    drain: bool = False,
    savepoint: str = "",
    timeout_s: float = DRAIN_S,
    patience_s: float = PATIENCE_S,
) -> str:
    """Stop the run of a checkpoint; return the result in words.

    Args:
        checkpoint: its location.
        drain: finish and commit the running epoch first.
        savepoint: a new folder for a savepoint of the last epoch, which the run writes; drains.
        timeout_s: how long the running epoch may take to end.
        patience_s: the longest silence of the run.

    Raises:
        OptionError: there is no run, or the savepoint's place cannot be used.
        TallystickError: the run is not alive, or could not do it.
    """
    if savepoint:
        savepoint = resolved(savepoint, "savepoint")
        if user_part(savepoint):
            raise OptionError(
                "the place of the savepoint has a login in it. The run writes the savepoint, with "
                "the login that it has: leave the other one out"
            )
        folder = FileStorage(savepoint)
        if taken := folder.names(""):
            raise OptionError(
                f"{folder.location} is not empty, it has {taken[0]}: name a new folder for the "
                f"savepoint. The run goes on."
            )
    run = _run_of(checkpoint)
    return _ask(
        checkpoint,
        Request(run.run, STOP, asker(), drain=drain, savepoint=savepoint, timeout_s=timeout_s),
        patience_s,
    )


def rescale(checkpoint: str, parallelism: int, *, patience_s: float = PATIENCE_S) -> str:
    """Let the run of a checkpoint go on with another parallelism; return the result in words.

    Raises:
        OptionError: there is no run.
        TallystickError: the run is not alive, or could not do it.
    """
    run = _run_of(checkpoint)
    return _ask(checkpoint, Request(run.run, RESCALE, asker(), parallelism=parallelism), patience_s)


def _run_of(checkpoint: str) -> NewestRun:
    storage = FileStorage(checkpoint)
    run = newest_run(storage)
    if run is None:
        raise OptionError(
            f"no run of {storage.location} is alive: no pipeline has begun there yet, or it is no "
            f"checkpoint of a pipeline. A query of Structured Streaming is stopped by its own "
            f"program."
        )
    if not run.run:
        raise OptionError(
            f"no run of {storage.location} takes requests. Last seen {_last_seen(storage, run)}: "
            f"a recovery, or a run of an older version, which its own program stops."
        )
    return run


def _ask(checkpoint: str, request: Request, patience_s: float) -> str:
    """Send a request and wait for the answer; a run that is silent for too long is not alive."""
    storage = FileStorage(checkpoint)
    path = send(storage, request)
    answer: Answer | None = None
    silent_since_s = time.monotonic()
    try:
        while answer is None or answer.state == TAKEN:
            time.sleep(POLL_S)
            now = answer_to(storage, path)
            if now != answer:
                answer, silent_since_s = now, time.monotonic()
            elif time.monotonic() - silent_since_s > patience_s:
                answer, taken = withdraw(storage, path), answer
                if answer is None or answer == taken:
                    raise TallystickError(_silence(storage, request, answer, patience_s))
                silent_since_s = time.monotonic()
    finally:
        withdraw(storage, path)
        if answer is None or answer.state != TAKEN:
            remove(storage, path)
    if answer.state != DONE:
        raise TallystickError(answer.text or "the request was withdrawn")
    return answer.text


def _silence(
    storage: FileStorage, request: Request, answer: Answer | None, patience_s: float
) -> str:
    run = newest_run(storage)
    seen = "" if run is None else f"; last seen {_last_seen(storage, run)}"
    if run is not None and run.run != request.run:
        return f"another run has begun meanwhile{seen}: ask again, which asks that one"
    if answer is not None:
        return (
            f"the run took the request, and fell silent for {patience_s:.0f} s before it had "
            f"answered{seen}. Look at the checkpoint: tallystick inspect {storage.location}"
        )
    return (
        f"no run of {storage.location} is alive{seen}. Nothing answered within "
        f"{patience_s:.0f} s, and the request is withdrawn. (A run that still starts takes "
        f"requests from its first epoch on.)"
    )


def _last_seen(storage: FileStorage, run: NewestRun) -> str:
    """Return the newest trace of a run: its start, or an epoch written since."""
    paths = CheckpointFolder(storage).manifest_paths()
    written_ms = storage.written_ms(paths[-1]) if paths else None
    if written_ms is None:
        return str(run)
    written = datetime.fromtimestamp(written_ms / 1000, UTC).isoformat(timespec="seconds")
    if written < run.started:
        return str(run)
    return f"at {written}, with epoch {epoch_of(paths[-1])}: {run}"
