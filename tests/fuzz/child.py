"""The process in which decoders read damaged bytes: `python -m tests.fuzz.child PLAN PROGRESS`.

It says on standard output what went wrong, a line of JSON each, and keeps in the file PROGRESS
where it stands, for its parent to know if it dies or hangs.
"""

import importlib
import json
import os
import resource
import struct
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

from tests.fuzz.decoder import Decoder

MEMORY_BYTES_MAX = 768 << 20
"""What reading damaged bytes may take, beyond what the process has with all its libraries."""
SAME_FAILURES_MAX = 2
"""More of one kind, at one place of the code, are no news."""


@dataclass(frozen=True)
class Plan:
    """The cases to run.

    Args:
        module: has the decoders, as `DECODERS`.
        names: which, one after the other.
        seed: of all chance.
        first: the first case of the first one.
        case_count: of each decoder, at most.
        seconds: for each decoder, at most.
    """

    module: str
    names: list[str]
    seed: int
    first: int
    case_count: int
    seconds: float


class Standing(NamedTuple):
    """Where a child stands: its decoder, the case that runs, and the counts of that decoder."""

    decoder: int
    case: int
    read: int
    refused: int
    is_done: int = 0


class Progress:
    """A file that outlives the process that writes it."""

    FORM = struct.Struct("<5q")

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def write(self, standing: Standing) -> None:
        """Note where this process stands."""
        os.pwrite(self._file, self.FORM.pack(*standing), 0)

    def read(self) -> Standing | None:
        """Return what was noted last."""
        data = os.pread(self._file, self.FORM.size, 0)
        return Standing(*self.FORM.unpack(data)) if data else None

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def data_of(decoder: Decoder, name: str, seed: int, case: int) -> tuple[bytes, bytes]:
    """Return the bytes of a case and the sample they were made of: the same each time."""
    chance = Random(f"{name} {seed} {case}")
    samples = decoder.samples()
    original = chance.choice(samples)
    return decoder.mutate(original, chance, samples), original


def run_case(decoder: Decoder, data: bytes, original: bytes) -> bool:
    """Return True if the bytes were read, False if they were refused; raise what must not be."""
    try:
        return decoder.read(data, original)
    except decoder.refusals:
        return False


def limit_memory() -> None:
    """Let this process have only so much more memory than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES_MAX
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def report(name: str, case: int, error: BaseException, known: Counter[str]) -> None:
    """Say what went wrong and where."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno} {frame.name}"
    known[place] += 1
    if known[place] <= SAME_FAILURES_MAX:
        what = f"{place}: {str(error)[:200]}"
        print(json.dumps({"name": name, "case": case, "what": what}), flush=True)


def main(plan: Plan, progress: Progress) -> None:
    """Run a plan."""
    known: dict[str, Decoder] = importlib.import_module(plan.module).DECODERS
    for name in plan.names:
        for sample in known[name].samples():
            assert known[name].read(sample, sample), f"{name}: a sample is not read"
    limit_memory()
    for index, name in enumerate(plan.names):
        decoder, case, read, refused = known[name], 0 if index else plan.first, 0, 0
        failed = Counter[str]()
        until = time.monotonic() + plan.seconds
        while case < plan.case_count and time.monotonic() < until:
            progress.write(Standing(index, case, read, refused))
            data, original = data_of(decoder, name, plan.seed, case)
            try:
                is_read = run_case(decoder, data, original)
            except BaseException as error:
                report(name, case, error, failed)
            else:
                read, refused = read + is_read, refused + (not is_read)
            case += 1
        progress.write(Standing(index, case, read, refused, 1))
        print(json.dumps({"name": name, "read": read, "refused": refused}), flush=True)


if __name__ == "__main__":
    main(Plan(**json.loads(sys.argv[1])), Progress(Path(sys.argv[2])))
