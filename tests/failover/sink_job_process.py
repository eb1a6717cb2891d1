"""A pipeline of `sink_job` in a process of its own, to be killed: `python -m … '{"name": …}'`.

It says each epoch that is done, a line each, and goes on after errors as a supervisor would start
it again.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tallystick as ts
from tallystick.epoch import protocol as c
from tests.failover.sink_job import SinkJob

ROOT = Path(__file__).parents[2]
WAIT_S = 120


class JobProcess:
    """The test's side.

    Args:
        log: where goes what it prints to stderr.
        spec: `name`, `folder`, `sinks` (settings of each `KafkaSink`), `until`; and if wanted
            `logged`, `parallelism`, `partitions`, `pause_s` between two epochs, `kill_at` and
            `occurrence`.
    """

    def __init__(self, log: Path, **spec: Any) -> None:
        self._log = log.open("a")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.failover.sink_job_process", json.dumps(spec)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.logged = int(spec.get("logged", 0))

    def wait(self) -> int:
        """How it ended; `logged` says how far it came."""
        try:
            output, _ = self.process.communicate(timeout=WAIT_S)
        finally:
            self.kill()
        self.logged = max([self.logged, *map(int, output.split())])
        return self.process.returncode

    def stop(self, by: signal.Signals) -> None:
        """End it by a signal, in the middle of whatever it does."""
        self.process.send_signal(by)
        self.wait()

    def kill(self) -> None:
        """SIGKILL; again is fine."""
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(ValueError):
            self._log.close()


def _killer(spec: dict[str, Any]) -> Callable[[c.Event], None]:
    remaining = [int(spec.get("occurrence", 1))]

    def listen(event: c.Event) -> None:
        remaining[0] -= type(event).__name__ == spec.get("kill_at")
        if not remaining[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    return listen


def main() -> None:
    """Run until an epoch."""
    # A test run in the background of a shell has it ignored, and its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    spec = json.loads(sys.argv[1])
    job = SinkJob(
        spec["name"],
        Path(spec["folder"]),
        [ts.KafkaSink(**options) for options in spec["sinks"]],
        on_event=_killer(spec),
        **{name: spec[name] for name in ("logged", "parallelism", "partitions") if name in spec},
    )
    while job.logged < spec["until"]:
        job.run_until(job.logged + 1)
        print(job.logged, flush=True)
        time.sleep(spec.get("pause_s", 0))
    job.close()


if __name__ == "__main__":
    main()
