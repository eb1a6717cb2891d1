"""The lines about a run: by `logging`, and on a terminal by themselves, with a live line."""

import io
import json
import os
import pty
import subprocess
import sys

import pytest

from tallystick.errors import NOT_SHOWN
from tallystick.run import console as console_module
from tallystick.run.console import CLEAR, Console, Terminal, logger

PROGRAM = """
import json, logging, sys
from tallystick.run.console import Console
spec = json.loads(sys.argv[1])
if spec.get("logging"):
    logging.basicConfig(level=logging.INFO, format="LOG %(message)s")
console = Console("late", is_quiet=spec.get("quiet", False))
console.open()
console.info("begins")
console.draw("5 records/s")
console.draw("7 records/s")
logging.getLogger("tallystick.kafka").warning("a warning")
console.close()
logging.getLogger("tallystick").info("nobody asked for this")
"""


def on_a_terminal(environment: dict[str, str] | None = None, **spec: bool) -> str:
    """Return what a program prints on a terminal of its own."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(spec)],
        stderr=theirs,
        env={**os.environ, "COLUMNS": "80", **(environment or {})},
    )
    os.close(theirs)
    data = b""
    try:
        while piece := os.read(ours, 4096):
            data += piece
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0, data
    return data.decode().replace("\r\n", "\n")


def test_a_terminal_has_lines_and_one_that_is_drawn_again_in_place() -> None:
    text = on_a_terminal()

    first, *_ = text.split("\n")
    assert first.endswith(" late: begins")
    assert f"{CLEAR}late: 5 records/s{CLEAR}late: 7 records/s{CLEAR}" in text
    assert "a warning\nlate: 7 records/s" in text, "lines stand above it"
    assert text.endswith(CLEAR), "it is gone at the end"
    assert "nobody asked" not in text


@pytest.mark.parametrize(
    ("environment", "spec"),
    [({"TALLYSTICK_QUIET": "1"}, {}), ({}, {"quiet": True})],
    ids=["variable", "argument"],
)
def test_a_quiet_run_prints_only_warnings(
    environment: dict[str, str], spec: dict[str, bool]
) -> None:
    assert on_a_terminal(environment, **spec) == "a warning\n"


def test_where_logging_is_set_up_each_line_is_there_once() -> None:
    assert on_a_terminal(logging=True).splitlines()[:2] == ["LOG late: begins", "LOG a warning"]


def test_a_pipe_has_nothing() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM, "{}"], capture_output=True, text=True, check=True
    )

    assert completed.stderr == "a warning\n"


def test_several_runs_share_the_line_and_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(console_module, "is_logging_set_up", lambda _: False)
    stream = io.StringIO()
    terminal = Terminal(stream)
    terminal.add("late")
    terminal.add("early")
    try:
        terminal.draw("late", "late: 1 records/s")
        terminal.draw("early", "early: 2 records/s, lag 1000")
        assert stream.getvalue().endswith(f"{CLEAR}late: 1 records/s | early: 2 records/s,")
        terminal.remove("late")
        assert stream.getvalue().endswith(f"{CLEAR}early: 2 records/s, lag 1000")
    finally:
        terminal.remove("early")
    assert terminal not in logger.handlers


def test_a_farewell_is_printed_where_nobody_reads_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console_module, "is_logging_set_up", lambda *_: False)
    Console("late").farewell("stopped")
    Console("late", is_quiet=True).farewell("stopped")

    assert capsys.readouterr().err == "late: stopped\n"


PROGRAM_WITH_A_PAGE = """
import logging, sys
from tallystick.run.console import Console, LINES
if "logging" in sys.argv:
    logging.basicConfig(format="LOG %(message)s")
LINES.attach()
log = logging.getLogger("tallystick.kafka")
Console("late").info("begins")
log.info("not wanted by any level")
log.warning("step %s failed: %s", "a", ValueError("row S3CR3T"))
log.warning("%d", "no number")
for line in LINES.newest():
    print(line.level, line.text)
for number in range(500):
    log.warning("again")
print(len(LINES.newest()))
"""


@pytest.mark.parametrize("by", ["logging", "nothing"])
def test_a_page_has_the_newest_lines_without_values_and_prints_no_line_less_or_more(
    by: str,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM_WITH_A_PAGE, by], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert lines == [
        "INFO late: begins",
        f"WARNING step a failed: {NOT_SHOWN}",
        "WARNING %d",
        "200",
    ]
    prefix = "LOG " if by == "logging" else ""
    assert done.stderr.count(f"{prefix}step a failed: row S3CR3T\n") == 1
    assert done.stderr.count(f"{prefix}again\n") == 500
    assert "begins" not in done.stderr
