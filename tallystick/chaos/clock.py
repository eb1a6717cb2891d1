"""A wall clock of the program's own, which may jump; the machine's clock stays as it is.

libfaketime (Debian's package `faketime`) is loaded before the C library of each process of the
program, its JVM and its Python workers too, and adds the number of seconds in a file to the wall
clock. Monotonic times (CLOCK_MONOTONIC) and the times of files are left as they are, as where a
machine's clock is set.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from tallystick.errors import OptionError

LIBRARY = "faketime/libfaketimeMT.so.1"
PLACES = ("/usr/lib/*", "/usr/lib", "/usr/lib64", "/usr/local/lib")
REREAD_S = 1
"""After so long a process looks at the file again."""
JUMPS_S = (-86_400, -3_600, -61, -2, 2, 61, 3_600, 86_400)
"""A time server corrects the small ones at once; the others are a wrong time zone, or date."""
SHARED = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock of one run's program.

    Args:
        library: The library of libfaketime.
        file: Holds the number of seconds by which the clock is ahead.
    """

    library: Path
    file: Path

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that give the clock to a process and its children."""
        before = os.environ.get("LD_PRELOAD", "")
        return {
            "LD_PRELOAD": f"{self.library} {before}".strip(),
            "FAKETIME_TIMESTAMP_FILE": str(self.file),
            "FAKETIME_CACHE_DURATION": str(REREAD_S),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",  # with it, timed waits of a JVM end at once
            "NO_FAKE_STAT": "1",
        }

    def set(self, ahead_s: int) -> None:
        """Set the clock ahead by seconds, or behind if negative, with effect in a moment."""
        new = self.file.with_suffix(".new")
        new.write_text(f"{ahead_s:+d}\n")
        new.replace(self.file)

    def forget(self, pid: int) -> None:
        """Remove the shared memory of a process that was killed."""
        for name in (f"faketime_shm_{pid}", f"sem.faketime_sem_{pid}"):
            (SHARED / name).unlink(missing_ok=True)


def find_library() -> Path | None:
    """Return the path of libfaketime; None: not found."""
    for place in PLACES:
        root = Path("/")
        for found in sorted(root.glob(f"{place.removeprefix('/')}/{LIBRARY}")):
            return found
    return None


def clock_of(folder: Path) -> Clock:
    """Return a clock that shows the right time.

    Args:
        folder: For the clock's file.

    Raises:
        OptionError: There is no libfaketime.
    """
    library = find_library()
    if library is None:
        raise OptionError(
            f"the fault 'clock' needs libfaketime ({LIBRARY}), and there is none below "
            f"{', '.join(PLACES)}: apt-get install faketime"
        )
    clock = Clock(library, folder / "clock")
    folder.mkdir(parents=True, exist_ok=True)
    clock.set(0)
    return clock
