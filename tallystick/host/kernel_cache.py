"""The folder of numba's compiled kernels, so that they are compiled once per machine.

Packages with kernels import this before numba, which reads NUMBA_CACHE_DIR at once. numba's own
default is a folder beside the source, often read-only, and a Spark executor may have no home.

    tallystick warm-up      compiles every kernel into the cache

Without that, a background process compiles them while the first epochs run; until then, code that
has a slower way without a kernel uses it.
"""

import fcntl
import hashlib
import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from tallystick.host.user_cache import cache_directory

EVERY_PIPELINE = (
    "tallystick.codec.records.decoder",
    "tallystick.codec.json.write",
    "tallystick.codec.rows",
    "tallystick.codec.json.read",
)
KEYED_PIPELINES = (
    "tallystick.state.keys",
    "tallystick.state.row_codec",
    "tallystick.state.functions.keyed_batch",
)
LONGEST = "tallystick.codec.json.flat"
"""The module whose kernels take a third of all the time."""
OTHERS = (
    LONGEST,
    "tallystick.codec.avro.reader",
    "tallystick.codec.avro.writer",
    "tallystick.codec.protobuf.reader",
)
WARM_UP_MODULES = (*EVERY_PIPELINE, *KEYED_PIPELINES, *OTHERS)
"""Modules with a `warm_up()` that compiles each kernel they use, in the order of need."""
IN_BACKGROUND = (*KEYED_PIPELINES, *OTHERS, *EVERY_PIPELINE)
"""The same modules, those of every pipeline last: the pipeline's own processes begin with these."""
LOOK_AGAIN_S = 0.5
NICENESS = 10
"""Low priority: a task that needs a kernel compiles it itself, and goes first."""
_SOURCES = ("codec", "state", "kafka")
"""The folders of the package that have kernels."""


def kernel_directory() -> Path:
    """Return our cache's folder `numba`, else a temporary folder of the user, else a fresh one."""
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

    numba unpickles the files in its cache: files of another user would run as our code.
    """
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.stat()
    except OSError:
        return False
    is_private = status.st_uid == os.getuid() and not status.st_mode & 0o022
    return is_private and os.access(directory, os.W_OK | os.X_OK)


def load_numba() -> None:
    """Load all that numba loads before its first kernel, most of what a first test waits for."""
    from numba.core.registry import cpu_target

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()


def directory_in_use() -> Path:
    """Return the folder of this process's kernels: `kernel_directory`, or numba's own setting."""
    return Path(os.environ["NUMBA_CACHE_DIR"])


def load(modules: Iterable[str]) -> None:
    """Load the kernels of some modules from the cache, and compile those that it lacks."""
    for module in modules:
        importlib.import_module(module).warm_up()


def warm_up(modules: tuple[str, ...] = WARM_UP_MODULES) -> None:
    """Compile every kernel or load it from the cache, then leave the mark that all are compiled."""
    load(modules)
    _mark().touch()


def warm_up_on_two_cores() -> None:
    """Compile every kernel as `warm_up` does, with the process of `are_compiled` beside.

    That one begins with the modules of keyed pipelines and `LONGEST`; this one takes the others.
    """
    are_compiled()
    if are_compiled.compiler is not None:
        load(module for module in (*EVERY_PIPELINE, *OTHERS) if module != LONGEST)
        are_compiled.compiler.wait()
    warm_up()  # from the cache, but for what a process that failed has not compiled


class _KernelState:
    """A check whether every kernel is compiled, made again until the answer is yes.

    Attributes:
        compiler: the process that the first check started, if there were kernels to compile.
    """

    def __init__(self) -> None:
        self._is_so = False
        self._looked_s = float("-inf")
        self.compiler: subprocess.Popen[bytes] | None = None

    def __call__(self) -> bool:
        """Return True if all kernels are compiled; else start a process to compile them, once."""
        now_s = time.monotonic()
        if not self._is_so and now_s - self._looked_s > LOOK_AGAIN_S:
            self._looked_s = now_s
            self._is_so = _mark().exists()
            if not self._is_so and self.compiler is None:
                self.compiler = subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                    start_new_session=True,  # it is of use to the next run, too
                )
        return self._is_so


are_compiled = _KernelState()
"""True once all kernels are compiled: for code that has a slower way, and for early daemons."""


def _compile_in_background() -> None:
    """Compile all kernels, unless another process is compiling them just now."""
    with open(directory_in_use() / "compiling", "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        os.nice(NICENESS)
        warm_up(IN_BACKGROUND)


def _mark() -> Path:
    """Return the path of the mark, a file that exists once all kernels are compiled.

    Its name depends on the kernels' sources, the versions of Python and numba, and the CPU.
    """
    import llvmlite.binding
    import numba

    package = Path(__file__).parents[1]
    paths = sorted(path for folder in _SOURCES for path in (package / folder).rglob("*.py"))
    stamps = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in paths]
    cpu = (llvmlite.binding.get_host_cpu_name(), numba.config.CPU_NAME, numba.config.CPU_FEATURES)
    known = repr((sys.version, numba.__version__, llvmlite.__version__, cpu, stamps))
    return directory_in_use() / f"all-{hashlib.sha256(known.encode()).hexdigest()[:32]}"


def _set_directory() -> None:
    if "NUMBA_CACHE_DIR" in os.environ:
        return
    os.environ["NUMBA_CACHE_DIR"] = str(kernel_directory())
    if "numba" in sys.modules:  # it came first, and has read its environment already
        sys.modules["numba"].config.CACHE_DIR = os.environ["NUMBA_CACHE_DIR"]


_set_directory()

if __name__ == "__main__":
    _compile_in_background()
