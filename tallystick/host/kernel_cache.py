"""The folder of numba's compiled kernels, so that they are compiled once per machine.

Packages with kernels import this before numba, which reads NUMBA_CACHE_DIR at once. numba's own
default is a folder beside the source, often read-only, and a Spark executor may have no home.

    tallystick warm-up      compiles every kernel into the cache
"""

import importlib
import os
import sys
import tempfile
from pathlib import Path

from tallystick.host.user_cache import cache_directory

WARM_UP_MODULES = (
    "tallystick.kafka.records",
    "tallystick.codec.json_writer",
    "tallystick.codec.rows",
    "tallystick.state.keys",
    "tallystick.state.row_codec",
    "tallystick.state.functions.keyed_batch",
    "tallystick.codec.json_reader",
    "tallystick.codec.avro.reader",
)
"""Modules with a `warm_up()` that compiles each kernel they use: first those of every pipeline."""


def kernel_directory() -> Path:
    """`numba` in our cache folder, else in a temporary one of this user, else a fresh one."""
    try:
        directory = cache_directory() / "numba"
        if _is_ours(directory):
            return directory
    except (OSError, RuntimeError):  # not writable; no home
        pass
    directory = Path(tempfile.gettempdir()) / f"tallystick-numba-{os.getuid()}"
    return directory if _is_ours(directory) else Path(tempfile.mkdtemp(prefix="tallystick-numba-"))


def _is_ours(directory: Path) -> bool:
    """True if we can write there and nobody else can.

    numba unpickles what it finds in its cache: files of another user would run as our code.
    """
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.stat()
    except OSError:
        return False
    is_private = status.st_uid == os.getuid() and not status.st_mode & 0o022
    return is_private and os.access(directory, os.W_OK | os.X_OK)


def directory_in_use() -> Path:
    """Return the folder of this process's kernels: `kernel_directory`, or numba's own setting."""
    return Path(os.environ["NUMBA_CACHE_DIR"])


def warm_up() -> None:
    """Compile every kernel, or load it from the cache."""
    for module in WARM_UP_MODULES:
        importlib.import_module(module).warm_up()


def _set_directory() -> None:
    if "NUMBA_CACHE_DIR" in os.environ:
        return
    os.environ["NUMBA_CACHE_DIR"] = str(kernel_directory())
    if "numba" in sys.modules:  # it came first, and has read its environment already
        sys.modules["numba"].config.CACHE_DIR = os.environ["NUMBA_CACHE_DIR"]


_set_directory()
