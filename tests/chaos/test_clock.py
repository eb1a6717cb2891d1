"""A program's own clock: it jumps, and nothing else does."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tallystick.errors import OptionError
from tallystick_tools.chaos import clock as clocks
from tallystick_tools.chaos.clock import clock_of, find_compiler
from tallystick_tools.chaos.program import ProgramSettings, Supervisor
from tests.waiting import wait_until

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")
PROGRAM = """
import datetime, pathlib, subprocess, sys, threading, time
pathlib.Path(sys.argv[1]).touch()
while True:
    began = time.monotonic()
    threading.Event().wait(0.1)
    time.sleep(0.1)
    waited = time.monotonic() - began
    command = [sys.executable, "-c", "import time; print(time.time())"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
    now = datetime.datetime.now().timestamp()
    changed = pathlib.Path(sys.argv[1]).stat().st_mtime
    print(time.time(), time.time_ns() / 1e9, now, child, waited, changed, flush=True)
"""


@needs_compiler
@pytest.mark.parametrize("ahead_s", [86_400, -86_400, -61])
def test_the_clocks_of_a_program_and_its_children_jump_and_waits_and_files_do_not(
    tmp_path: Path, ahead_s: int
) -> None:
    clock = clock_of(tmp_path)
    command = (sys.executable, "-c", PROGRAM, str(tmp_path / "touched"))
    settings = ProgramSettings(command, "here:1", tmp_path, clock=clock)
    supervisor = Supervisor(settings, lambda text: None)

    def shown() -> list[float]:
        lines = settings.log.read_text().splitlines(keepends=True)
        return [float(word) for word in lines[-1].split()] if lines and "\n" in lines[-1] else []

    def is_ahead_by(seconds: int) -> bool:
        times = shown()[:4]
        return len(times) == 4 and all(abs(time_s - time.time() - seconds) < 30 for time_s in times)

    def what() -> str:
        return f"at {time.time():.0f} the program's clocks show {shown()}"

    try:
        wait_until(lambda: is_ahead_by(0), what)
        clock.set(ahead_s)
        wait_until(lambda: is_ahead_by(ahead_s), what)
        waited, changed = shown()[4:]
        assert waited > 0.19
        assert abs(changed - time.time()) < 600, "the time of a file"
        clock.set(0)
        wait_until(lambda: is_ahead_by(0), what)
    finally:
        supervisor.close()


def test_without_a_compiler_the_fault_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clocks, "COMPILERS", ("no-such-compiler",))
    assert find_compiler() is None
    with pytest.raises(OptionError, match=r"no-such-compiler.*apt-get install gcc"):
        clock_of(tmp_path)


def test_a_compiler_that_fails_is_named_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clocks, "find_compiler", lambda: "false")
    with pytest.raises(OptionError, match="false failed"):
        clock_of(tmp_path)


@needs_compiler
def test_timed_waits_of_a_jvm_are_as_long_as_before(tmp_path: Path) -> None:
    """Waits that end at once would make a JVM run in circles."""
    source = tmp_path / "Wait.java"
    source.write_text(
        "public class Wait { public static void main(String[] a) throws Exception {"
        " Object o = new Object(); long began = System.nanoTime();"
        " synchronized (o) { o.wait(300); }"
        " System.out.println((System.nanoTime() - began) / 1000000"
        ' + " " + System.currentTimeMillis()); } }'
    )
    clock = clock_of(tmp_path)
    clock.set(86_400)
    done = subprocess.run(
        ["java", str(source)],
        capture_output=True,
        text=True,
        env={**os.environ, **clock.environment},
    )
    waited_ms, now_ms = map(int, done.stdout.split())
    assert waited_ms >= 299
    assert abs(now_ms / 1000 - time.time() - 86_400) < 60
