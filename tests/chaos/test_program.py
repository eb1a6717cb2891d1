"""The user's program as processes: its tree is found, stopped, limited and killed, and no other."""

import resource
import sys
import time
from pathlib import Path

import pytest

from tallystick.errors import OptionError
from tallystick.host.processes import Process
from tallystick_tools.chaos.program import Life, ProgramSettings, Supervisor, python_workers
from tests.waiting import wait_for, wait_until

PARENT = """
import subprocess, sys, time
sleep = "import time; time.sleep(100) # pyspark" + ".worker"
child = subprocess.Popen([sys.executable, "-c", sleep])
print("ready", "{servers}", "{checkpoint}", "{parallelism}", flush=True)
n = 0
while True:
    time.sleep(0.05)
    n += 1
    open(sys.argv[1], "a").write(f"{n}\\n")
"""


@pytest.fixture
def settings(tmp_path: Path) -> ProgramSettings:
    return ProgramSettings(
        (sys.executable, "-c", PARENT, str(tmp_path / "written")), "here:1", tmp_path / "folder"
    )


@pytest.fixture
def life(settings, tmp_path):
    settings.folder.mkdir()
    started = Life(settings, 3)
    wait_until(
        lambda: "ready" in settings.log.read_text() and len(started.processes()) == 2,
        lambda: f"not ready, of two processes: {started.processes()}; {settings.log.read_text()}",
    )
    wait_until((tmp_path / "written").exists, "the child wrote no file")
    yield started
    started.end()
    wait_for(started.processes, [], "processes of the program")


def test_the_command_is_filled_in(life, settings):
    assert settings.log.read_text() == f"ready here:1 {settings.checkpoint} 3\n"


def test_its_own_process_comes_first(life):
    program, child = life.processes()
    assert program.pid == life.process.pid
    assert child.parent == program.pid


def test_workers_are_the_last_forks_of_a_daemon_and_no_stand_in():
    early = "python -m tallystick.spark.early_daemon /tmp/socket 1"
    ours = [
        Process(1, 0, "python flights.py"),
        Process(2, 1, early),
        Process(3, 1, "java org.apache.spark.deploy.SparkSubmit"),
        Process(4, 3, "python -m tallystick.spark.early_daemon pyspark.worker"),
        Process(5, 2, early),
    ]
    workers = [Process(6, 5, early), Process(7, 5, early)]
    assert python_workers([*ours, *workers]) == workers
    assert python_workers(ours) == []

    sparks = [ours[0], ours[2], Process(4, 3, "python -m pyspark.daemon pyspark.worker")]
    worker = Process(5, 4, "python -m pyspark.daemon pyspark.worker")
    assert python_workers([*sparks, worker]) == [worker]
    assert python_workers(sparks) == []


def test_what_a_killed_program_leaves_behind_is_still_known(life):
    _, worker = life.processes()
    life.kill()
    assert life.exit_code == -9
    assert [process.pid for process in life.processes()] == [worker.pid]
    assert life.kill_all() == 1
    wait_for(life.processes, [], "processes of the program")


def test_a_program_that_stands_still_writes_nothing_and_goes_on(life, tmp_path):
    written = tmp_path / "written"
    assert life.stop_still() == 2
    time.sleep(0.2)
    size = written.stat().st_size
    time.sleep(0.3)
    assert written.stat().st_size == size
    life.go_on()
    wait_until(lambda: written.stat().st_size > size, f"the file has its {size} bytes still")


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit is Linux's")
def test_on_a_full_disk_no_file_grows(life, tmp_path):
    written = tmp_path / "written"
    worker = life.processes()[1].pid
    hard = resource.prlimit(worker, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(worker, resource.RLIMIT_FSIZE, (1 << 30, hard))
    assert life.limit_files(True) == 2
    assert resource.prlimit(worker, resource.RLIMIT_FSIZE) == (0, hard)
    time.sleep(0.2)
    size = written.stat().st_size
    time.sleep(0.3)
    assert written.stat().st_size == size
    assert life.exit_code is None
    assert life.limit_files(False) == 2
    assert resource.prlimit(worker, resource.RLIMIT_FSIZE) == (1 << 30, hard)
    wait_until(lambda: written.stat().st_size > size, f"the file has its {size} bytes still")


def test_a_program_that_ends_is_started_again_and_counted(tmp_path):
    settings = ProgramSettings((sys.executable, "-c", "raise SystemExit(7)"), "", tmp_path / "f")
    lines = []
    program = Supervisor(settings, lines.append)
    wait_until(lambda: program.life.exit_code is not None, "the program runs on")
    program.look()
    assert (program.starts, program.own_ends) == (2, [7])
    assert any("code 7" in line for line in lines)
    program.close()


def test_a_program_that_is_not_there_is_named(tmp_path):
    with pytest.raises(OptionError, match="no-such-program"):
        Supervisor(ProgramSettings(("no-such-program",), "", tmp_path / "f"), print)


def test_each_change_of_parallelism_shows_in_the_next_start(tmp_path):
    settings = ProgramSettings(
        (sys.executable, "-c", "print({parallelism}, flush=True)"), "", tmp_path / "f"
    )
    program = Supervisor(settings, lambda _: None)
    wait_until(lambda: program.life.exit_code is not None, "the program runs on")
    changed = program.use_another_parallelism()
    program.start()
    wait_until(lambda: program.life.exit_code is not None, "the program runs on")
    program.close()
    first, second = settings.log.read_text().split()
    assert int(second) == changed != int(first)
