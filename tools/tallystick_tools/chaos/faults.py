"""The injection of faults: into the program, its brokers, and the network between."""

import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from tallystick.host.processes import Process
from tallystick_tools.chaos.clock import JUMPS_S
from tallystick_tools.chaos.cluster import Cluster
from tallystick_tools.chaos.program import Supervisor, executors, python_workers
from tallystick_tools.chaos.proxy import APIS, PRODUCE, Loss
from tallystick_tools.chaos.schedule import Fault

FOUND_S = 30.0
"""The longest wait for the process, connection or request that a fault is about."""
RARE_S = 3.0
"""The wait for the one request that was drawn, before any of its kind will do."""
DISK_S = 1.0
SLOWEST_S = 0.4
TAKEN_OVER_S = 90.0
"""The longest wait for a second program to commit something while the first stands still."""
FENCED_S = 5.0
"""The longest wait for a program that wakes up to find out that it was replaced."""
WORKED_S = 60.0
"""The longest wait for a program to commit something by a clock that has jumped."""
WAIT_S = 0.1


class Injector:
    """The injector of faults into a run.

    Args:
        cluster: The brokers and proxies.
        program: The user's program.
        progress: Returns the number of input records committed as read, as far as known.
    """

    def __init__(self, cluster: Cluster, program: Supervisor, progress: Callable[[], int]) -> None:
        self._cluster = cluster
        self._program = program
        self._progress = progress

    def inject(self, fault: Fault) -> str:  # noqa: PLR0912  a case for each kind
        """Carry a fault out, to its end; return the target as text, or "" if none was found."""
        match fault.kind:
            case "driver":
                self._program.life.kill()
                return f"process {self._program.life.process.pid}"
            case "host" | "state" | "parallelism":
                return self._kill_host(fault.kind)
            case "worker":
                return self._kill_one(fault, python_workers)
            case "executor":
                return self._kill_one(fault, executors)
            case "pause":
                return self._pause(fault)
            case "zombie":
                return self._zombie()
            case "clock":
                return self._move_clock(fault)
            case "disk":
                return self._fill_disk()
            case "broker" | "broker-pause":
                return self._disturb_broker(fault)
            case "isolate":
                return self._isolate(fault)
            case "object-store":
                return self._cut_object_store(fault)
            case "slow":
                return self._slow(fault)
            case "lose-request" | "lose-reply" | "repeat":
                return self._lose(fault, fault.kind)
        raise AssertionError(fault.kind)

    def _kill_host(self, kind: str) -> str:
        count = self._program.life.kill_all()
        what = f"{count} processes"
        if kind == "state":
            folder = self._program.settings.state
            copies = sum(path.is_file() for path in folder.rglob("*")) if folder.exists() else 0
            shutil.rmtree(folder, ignore_errors=True)
            what += f", and {copies} files of state"
        if kind == "parallelism":
            what += f", then parallelism {self._program.use_another_parallelism()}"
        return what

    def _kill_one(self, fault: Fault, meant: Callable[[Sequence[Process]], list[Process]]) -> str:
        targets: list[Process] = []

        def are_there() -> bool:
            processes = self._program.life.processes()
            targets[:] = meant(processes) if processes else []
            return bool(targets)

        if not self._wait(FOUND_S, are_there):
            return ""
        chosen = targets[int(fault.pick * len(targets))]
        chosen.send(signal.SIGKILL)
        return f"process {chosen.pid}, one of {len(targets)}"

    def _pause(self, fault: Fault) -> str:
        life = self._program.life
        count = life.stop_still()
        time.sleep(fault.length_s)
        life.go_on()
        return f"{count} processes for {fault.length_s:.1f} s" if count else ""

    def _zombie(self) -> str:
        first, began = self._program.life, self._progress()
        first.stop_still()
        self._program.start()
        taken_over = self._wait(TAKEN_OVER_S, lambda: self._progress() > began)
        first.go_on()
        ended = self._wait(FENCED_S, lambda: first.exit_code is not None)
        # Without anything to read it does not find out: it is left beside its successor.
        outcome = f"woke up and ended with code {first.exit_code}" if ended else "woke up"
        return f"process {first.process.pid} {outcome}" if taken_over else ""

    def _move_clock(self, fault: Fault) -> str:
        clock = self._program.settings.clock
        assert clock is not None, "a run with this fault has one"
        ahead_s, began = JUMPS_S[int(fault.pick * len(JUMPS_S))], self._progress()
        clock.set(ahead_s)
        time.sleep(fault.length_s)
        has_worked = self._wait(WORKED_S, lambda: self._progress() > began)
        clock.set(0)
        count = len(self._program.life.processes())
        what = f"{count} processes by {ahead_s:+d} s, {self._progress() - began} records"
        return what if has_worked else ""

    def _fill_disk(self) -> str:
        if sys.platform != "linux":
            return ""
        life = self._program.life
        count = life.limit_files(True)
        time.sleep(DISK_S)
        life.limit_files(False)
        return f"{count} processes" if count else ""

    def _disturb_broker(self, fault: Fault) -> str:
        kafka = self._cluster.kafka
        assert kafka is not None, "`kinds_for` refuses this for a given cluster"
        node = kafka.nodes[int(fault.pick * len(kafka.nodes))].node_id
        if fault.kind == "broker":
            kafka.kill(node)
            time.sleep(fault.length_s)
            kafka.restart(node)
        else:
            kafka.pause(node)
            time.sleep(fault.length_s)
            kafka.resume(node)
        kafka.wait_until_in_sync()
        return f"broker {node} for {fault.length_s:.1f} s"

    def _isolate(self, fault: Fault) -> str:
        proxies = self._cluster.proxies
        index = int(fault.pick * proxies.count)
        has_clients = self._wait(FOUND_S, lambda: proxies.connections(index) > 0)
        count = proxies.cut(index)
        time.sleep(fault.length_s)
        proxies.mend(index)
        what = f"broker {index + 1} for {fault.length_s:.1f} s, {count} connections"
        return what if has_clients else ""

    def _cut_object_store(self, fault: Fault) -> str:
        store = self._program.settings.object_store
        assert store is not None, "`kinds_for` refuses this"
        before = store.proxy.refused(0)
        count = store.proxy.cut(0)
        time.sleep(fault.length_s)
        store.proxy.mend(0)
        refused = store.proxy.refused(0) - before
        what = f"{count} connections cut, {refused} refused, for {fault.length_s:.1f} s"
        return what if count + refused else ""

    def _slow(self, fault: Fault) -> str:
        proxies = self._cluster.proxies
        proxies.delay_s = max(0.05, fault.pick * SLOWEST_S)
        before = proxies.replies
        time.sleep(fault.length_s)
        what = f"{proxies.replies - before} replies by {proxies.delay_s * 1000:.0f} ms"
        hit = proxies.replies > before
        proxies.delay_s = 0.0
        return what if hit else ""

    def _lose(self, fault: Fault, loss: Loss) -> str:
        proxies = self._cluster.proxies
        drawn = PRODUCE if loss == "repeat" else sorted(APIS)[int(fault.pick * len(APIS))]
        trap = proxies.set_trap(loss, [drawn])
        if not trap.caught.wait(RARE_S) and loss != "repeat":
            trap = proxies.set_trap(loss, APIS)  # the one drawn may belong to a start only
        caught = trap.caught.wait(FOUND_S)
        proxies.remove_trap()
        return APIS[trap.api] if caught else ""

    def _wait(self, seconds: float, holds: Callable[[], bool]) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with suppress(OSError):
                if holds():
                    return True
            if self._program.life.exit_code is not None:
                self._program.look()
            time.sleep(WAIT_S)
        return False
