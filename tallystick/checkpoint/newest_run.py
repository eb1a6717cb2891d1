"""The newest run of a checkpoint: host, process and time, for the error of the run before it.

    tallystick/run.json      {host, pid, started}

A note for people: nothing is decided by it, and a damaged or missing file says nothing.
"""

import contextlib
import json
import os
import socket
from datetime import UTC, datetime

from tallystick.epoch.manifest import FOLDER
from tallystick.errors import UNREADABLE, StorageError
from tallystick.ports import Storage

RUN = f"{FOLDER}/run.json"


def note_run(storage: Storage) -> None:
    """Note this process as the newest run, right before it fences the others."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    run = {"host": socket.gethostname(), "pid": os.getpid(), "started": started}
    with contextlib.suppress(StorageError):
        storage.put(RUN, json.dumps(run).encode())


def newer_run(storage: Storage) -> str:
    """Return a sentence that names the newer run; "" if it used another checkpoint."""
    try:
        run = json.loads(storage.get(RUN) or b"{}")
        host, pid, started = str(run["host"]), int(run["pid"]), str(run["started"])
    except (StorageError, *UNREADABLE):
        return ""
    is_own = (host, pid) == (socket.gethostname(), os.getpid())
    return (
        ""
        if is_own
        else f"The newer run: process {pid} on host {host}, started at {started}. Keep one of the "
        f"two."
    )
