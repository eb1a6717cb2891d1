"""The newest run of a checkpoint: host, process, time and job, for errors, requests and the page.

    tallystick/run.json      {host, pid, started, run, graph}

A note for people: nothing about epochs is decided by it, and a damaged or missing file says
nothing.
"""

import contextlib
import json
import os
import socket
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from tallystick.epoch.manifest import FOLDER
from tallystick.errors import UNREADABLE, StorageError
from tallystick.ports import Storage
from tallystick.values import GraphNode, JobGraph

RUN = f"{FOLDER}/run.json"


@dataclass(frozen=True, slots=True)
class NewestRun:
    """The run that was begun last.

    Args:
        host: of its driver.
        pid: of its process there.
        started: the time, in ISO's form.
        run: the id that requests are addressed to; "": a recovery, or a run of an older version.
        graph: the job; empty: an older version noted the run.
    """

    host: str
    pid: int
    started: str
    run: str = ""
    graph: JobGraph = ()

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}, started at {self.started}"


def note_run(storage: Storage, run: str = "", graph: JobGraph | None = None) -> None:
    """Note this process as the newest run, right before it fences the others.

    Args:
        storage: of the checkpoint.
        run: its id, for requests; "": a recovery.
        graph: of its job; None: that of the run before.
    """
    with contextlib.suppress(StorageError):
        if graph is None:
            before = newest_run(storage)
            graph = before.graph if before else ()
        started = datetime.now(UTC).isoformat(timespec="seconds")
        newest = NewestRun(socket.gethostname(), os.getpid(), started, run, graph)
        storage.put(RUN, json.dumps(asdict(newest)).encode())


def newest_run(storage: Storage) -> NewestRun | None:
    """Return the newest run; None: none is noted.

    Raises:
        StorageError: the storage does not answer.
    """
    try:
        run = json.loads(storage.get(RUN) or b"{}")
        graph = tuple(
            tuple(
                GraphNode(str(node["kind"]), str(node["name"]), tuple(map(str, node["texts"])))
                for node in layer
            )
            for layer in run.get("graph", ())
        )
        return NewestRun(
            str(run["host"]), int(run["pid"]), str(run["started"]), str(run.get("run", "")), graph
        )
    except UNREADABLE:
        return None


def newer_run(storage: Storage) -> str:
    """Return a sentence that names the newer run; "" if it used another checkpoint."""
    try:
        newest = newest_run(storage)
    except StorageError:
        return ""
    if newest is None or (newest.host, newest.pid) == (socket.gethostname(), os.getpid()):
        return ""
    return f"The newer run: {newest}. Keep one of the two."
