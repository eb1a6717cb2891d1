import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from numba.core.dispatcher import Dispatcher

from tallystick.codec.json import read as json_reader
from tallystick.host import kernel_cache


def directory_in(environment: dict[str, str], before: str = "") -> str:
    """What numba takes for its cache in a fresh process."""
    inherited = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    script = f"{before}\nfrom tallystick.host import kernel_cache\nimport numba\n"
    script += "print(numba.config.CACHE_DIR)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip()


def test_kernels_are_kept_in_our_cache_folder(tmp_path: Path) -> None:
    assert directory_in({"TALLYSTICK_CACHE": str(tmp_path)}) == str(tmp_path / "numba")


def test_it_is_not_too_late_when_numba_is_imported_already(tmp_path: Path) -> None:
    folder = directory_in({"TALLYSTICK_CACHE": str(tmp_path)}, before="import numba")

    assert folder == str(tmp_path / "numba")


def test_a_folder_that_numba_was_told_stays(tmp_path: Path) -> None:
    assert directory_in({"NUMBA_CACHE_DIR": str(tmp_path)}) == str(tmp_path)


def test_without_a_writable_cache_folder_a_temporary_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Spark executor may have no home."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TALLYSTICK_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(kernel_cache.tempfile, "gettempdir", lambda: str(tmp_path))

    assert kernel_cache.kernel_directory() == tmp_path / f"tallystick-numba-{os.getuid()}"


def test_a_folder_that_others_can_write_to_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numba runs what it finds there."""
    shared = tmp_path / "numba"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("TALLYSTICK_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel_cache.tempfile, "gettempdir", lambda: str(tmp_path))

    assert kernel_cache.kernel_directory() != shared
    assert kernel_cache.kernel_directory().stat().st_mode & 0o077 == 0


def test_warm_up_compiles_every_kernel_that_python_calls() -> None:
    kernel_cache.warm_up()

    paths = sorted(Path("tallystick").rglob("*kernels.py"))
    modules = [import_module(".".join(path.with_suffix("").parts)) for path in paths]
    kernels = [
        kernel
        for module in modules
        for kernel in vars(module).values()
        if isinstance(kernel, Dispatcher)
        and kernel.__module__ == module.__name__
        and not kernel.__name__.startswith("_")
        and not kernel.targetoptions.get("no_cpython_wrapper")  # called by other kernels only
    ]
    assert len(kernels) > 40
    assert [kernel for kernel in kernels if not kernel.signatures] == []


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A machine that never compiled anything; the commands of processes that are started."""
    started: list[list[str]] = []
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernel_cache, "LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(
        kernel_cache.subprocess, "Popen", lambda command, **_: started.append(command) or started
    )
    return started


def test_one_process_compiles_what_is_missing_until_all_is_there(
    empty_cache: list[list[str]],
) -> None:
    are_compiled = kernel_cache._KernelState()

    assert [are_compiled() for _ in range(3)] == [False] * 3
    assert empty_cache == [[sys.executable, "-m", "tallystick.host.kernel_cache"]]
    kernel_cache._mark().touch()
    assert are_compiled()
    kernel_cache._mark().unlink()
    assert are_compiled()  # it is loaded by now, and nobody looks again


@pytest.mark.parametrize("is_helped", [True, False], ids=["by a process", "by one that fails"])
def test_a_warm_up_leaves_the_longest_modules_to_a_process(
    is_helped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernel_cache, "are_compiled", kernel_cache._KernelState())
    steps: list[str] = []
    modules = (*kernel_cache.EVERY_PIPELINE, *kernel_cache.OTHERS)
    beside = [name for name in modules if name != kernel_cache.LONGEST]

    class Process:
        def __init__(self, command: list[str], **_: object) -> None:
            assert command == [sys.executable, "-m", "tallystick.host.kernel_cache"]

        def wait(self) -> None:
            steps.append("wait")
            if is_helped:
                kernel_cache._mark().touch()

    def imported(name: str) -> SimpleNamespace:
        return SimpleNamespace(warm_up=lambda: steps.append(name))

    monkeypatch.setattr(kernel_cache.subprocess, "Popen", Process)
    monkeypatch.setattr(kernel_cache.importlib, "import_module", imported)

    kernel_cache.warm_up_on_two_cores()
    assert steps == [*beside, "wait", *kernel_cache.WARM_UP_MODULES]
    assert kernel_cache._mark().exists()

    steps.clear()
    monkeypatch.setattr(kernel_cache, "are_compiled", kernel_cache._KernelState())
    kernel_cache.warm_up_on_two_cores()
    assert steps == [*kernel_cache.WARM_UP_MODULES], "a second time nothing is compiled"


def test_nobody_compiles_beside_another_process(
    empty_cache: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(kernel_cache, "warm_up", compiled.extend)
    monkeypatch.setattr(kernel_cache.os, "nice", lambda _: None)
    with open(tmp_path / "compiling", "wb") as other:
        kernel_cache.fcntl.flock(other, kernel_cache.fcntl.LOCK_EX)
        kernel_cache._compile_in_background()
        assert compiled == []
    kernel_cache._compile_in_background()
    assert sorted(compiled) == sorted(kernel_cache.WARM_UP_MODULES)


def test_the_mark_is_of_these_sources_and_this_numba(
    empty_cache: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kernel_cache._mark()
    assert kernel_cache._mark() == before
    monkeypatch.setattr("numba.__version__", "0.0.1")
    assert kernel_cache._mark() != before


def test_without_its_kernel_json_is_read_all_the_same(
    empty_cache: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = pa.array([b'{"a": 1, "b": "x"}', b'{"a": "no"}', None, b'{"b": "\xc3\xa9"}'])
    schema = pa.schema([("a", pa.int64()), ("b", pa.string())])
    by_kernel = json_reader.parse_json(values, schema, "permissive", str)
    read: list[object] = []
    columns = json_reader.FlatColumns
    monkeypatch.setattr(
        json_reader, "FlatColumns", lambda *given: read.append(given) or columns(*given)
    )
    json_reader.parse_json(values, schema, "permissive", str)
    assert len(read) == 1, "the kernel reads where it is ready"

    monkeypatch.setattr(json_reader, "is_kernel_ready", lambda: False)

    assert json_reader.parse_json(values, schema, "permissive", str) == by_kernel
    assert len(read) == 1
