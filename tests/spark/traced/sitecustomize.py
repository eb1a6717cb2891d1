"""Notes the calls of a process, and their returns, while the folder `TRACED` has a file `on`.

Python imports it at the start of each process that has this folder on its path: the driver's, and
the daemons that tasks are forked from. `tests/spark/way_job.py` says when.
"""

import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

FOLDER = Path(os.environ["TRACED"])
PACKAGE = os.environ["TRACED_PACKAGE"] + "/"

calls: list[str] = []
is_on = False


def note(frame: FrameType, event: str, _: object) -> None:
    """Note a call, or a return: reports return to the driver; the profiler of each thread."""
    code = frame.f_code
    if is_on and event in ("call", "return") and code.co_filename.startswith(PACKAGE):
        module = code.co_filename.removeprefix(PACKAGE)
        calls.append(f"{threading.get_ident()} {module} {code.co_qualname}\n")


def follow(state: Path) -> None:
    """Begin and end with the file `on`; the name of `state` says how far this process is."""
    global is_on
    while not is_on:
        time.sleep(0.02)
        is_on = (FOLDER / "on").exists()
    state = state.rename(state.with_suffix(".tracing"))
    while is_on:
        time.sleep(0.02)
        is_on = (FOLDER / "on").exists()
    state.write_text("".join(calls))
    state.rename(state.with_suffix(".calls"))


def begin() -> None:
    """Follow the calls of this process, which may be a fork."""
    state = FOLDER / f"{os.getpid()}.waiting"
    state.touch()
    threading.setprofile(note)
    sys.setprofile(note)
    threading.Thread(target=follow, args=(state,), daemon=True).start()


begin()
os.register_at_fork(after_in_child=begin)
