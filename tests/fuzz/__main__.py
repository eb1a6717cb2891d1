"""`python -m tests.fuzz --seconds 60 --seed 1`: damaged bytes for every decoder of outside bytes.

Each decoder must return a value, or raise an error of ours: no other exception, no crash, no hang,
no more memory than bytes of that size are worth. Each runs in a child process, which says which
case it is at; so a case that kills it is known. `--only NAME --case N` runs one case here.

`--bounds` is the same with numba's checks of array indices; memory that kernels read by address is
guarded in either case (see `guarded`). Exit code 1 when anything failed.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tests.fuzz.child import Plan, Progress, Standing, data_of, run_case

DECODERS = "tests.fuzz.decoders"
HANG_S = 30.0
START_S = 300.0
"""Until the first case: with bounds checks all kernels are compiled anew."""
DEATHS_MAX = 5
"""A decoder that kills more processes is left alone: each takes seconds to start."""
ROOT = Path(__file__).parents[2]


@dataclass
class Result:
    """What became of the cases of one decoder."""

    read: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def case_count(self) -> int:
        """All of them."""
        return self.read + self.refused + len(self.failures)


def run(plan: Plan, *, has_bounds: bool = False, hang_s: float = HANG_S) -> dict[str, Result]:
    """Run a plan in child processes, a new one after each that died."""
    results, deaths = {name: Result() for name in plan.names}, Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        while plan.names:
            child = _Child(plan, Path(folder), has_bounds, hang_s)
            end = child.wait(results)
            if end is None:
                break
            standing, how = end
            name = plan.names[standing.decoder]
            results[name].read += standing.read
            results[name].refused += standing.refused
            results[name].failures.append(f"case {standing.case}: {how}")
            print(f"{name}, case {standing.case}: {how}", file=sys.stderr, flush=True)
            deaths[name] += 1
            if deaths[name] < DEATHS_MAX:
                plan = replace(plan, names=plan.names[standing.decoder :], first=standing.case + 1)
            else:
                plan = replace(plan, names=plan.names[standing.decoder + 1 :], first=0)
    return results


class _Child:
    def __init__(self, plan: Plan, folder: Path, has_bounds: bool, hang_s: float) -> None:
        path = folder / "progress"
        path.unlink(missing_ok=True)
        self._progress, self._hang_s = Progress(path), hang_s
        self._said, self._errors = folder / "said", folder / "errors"
        with self._said.open("wb") as output, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.child", json.dumps(asdict(plan)), str(path)],
                stdout=output, stderr=errors, env=_environment(has_bounds), cwd=ROOT,
            )  # fmt: skip

    def wait(self, results: dict[str, Result]) -> tuple[Standing, str] | None:
        """Wait for its end; return where and how, if not by itself."""
        how = self._how_it_ends()
        for line in self._said.read_text().splitlines():
            line_fields = json.loads(line)
            result = results[line_fields["name"]]
            if "what" in line_fields:
                result.failures.append(f"case {line_fields['case']}: {line_fields['what']}")
            else:
                result.read += line_fields["read"]
                result.refused += line_fields["refused"]
        standing = self._progress.read()
        self._progress.close()
        if how is None:
            return None
        errors = self._errors.read_text()
        if standing is None or standing.is_done:
            raise RuntimeError(f"a child did not run a case: {how}\n{errors}")
        return standing, f"{how} {' '.join(errors.splitlines()[-2:])[:300]}"

    def _how_it_ends(self) -> str | None:
        before, since = None, time.monotonic()
        while (code := self._process.poll()) is None:
            standing, now = self._progress.read(), time.monotonic()
            if standing != before:
                before, since = standing, now
            elif now - since > (START_S if standing is None else self._hang_s):
                self._process.kill()
                self._process.wait()
                return f"no end after {now - since:.0f} s"
            time.sleep(0.05)
        return None if code == 0 else f"the process died ({code})"


def _environment(has_bounds: bool) -> dict[str, str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "ARROW_DEFAULT_MEMORY_POOL": "system",  # others reserve address space in advance
        "OMP_NUM_THREADS": "1",
    }
    if has_bounds:
        folder = Path(tempfile.gettempdir()) / f"tallystick-fuzz-bounds-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        environment |= {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(folder)}
    return environment


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all of them together")
    parser.add_argument("--seed", type=int, default=1, help="of all chance (default %(default)s)")
    parser.add_argument("--only", action="append", help="this decoder; may be given several times")
    parser.add_argument("--case", type=int, help="this case of it, in this process")
    parser.add_argument("--bounds", action="store_true", help="with numba's checks of indices")
    options = parser.parse_args(arguments)
    known = importlib.import_module(DECODERS).DECODERS
    names = options.only or list(known)
    if options.case is not None:
        (name,) = names
        data, original = data_of(known[name], name, options.seed, options.case)
        print(f"{data[:2000]!r}\nof {original[:2000]!r}", flush=True)
        print("read" if run_case(known[name], data, original) else "refused")
        return 0
    plan = Plan(DECODERS, names, options.seed, 0, sys.maxsize, options.seconds / len(names))
    return show(run(plan, has_bounds=options.bounds))


def show(results: dict[str, Result]) -> int:
    """Print a table, and each failure; the exit code."""
    print(f"{'decoder':<28}{'cases':>10}{'read':>10}{'refused':>10}{'failed':>8}")
    for name, result in sorted(results.items()):
        counts = (
            f"{result.case_count:>10}{result.read:>10}{result.refused:>10}{len(result.failures):>8}"
        )
        print(f"{name:<28}{counts}")
    failures = [(name, failure) for name, result in results.items() for failure in result.failures]
    for name, failure in failures:
        print(f"FAILED {name}, {failure}")
    print(f"{sum(result.case_count for result in results.values())} cases, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
