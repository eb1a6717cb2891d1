"""A wall clock of the program's own, which may jump; the machine's clock stays as it is.

A few lines of C stand before the C library of each process of the program, its JVM and its Python
workers too, and add a number of seconds to the wall clock. Monotonic times, waits, and the times of
files stay as they are, as where a machine's clock is set. (libfaketime would do more than that: if
told to leave monotonic times alone, it refuses each `time.sleep` of Python with EINVAL.)
"""

import os
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tallystick.errors import OptionError

COMPILERS = ("cc", "gcc", "clang")
JUMPS_S = (-86_400, -3_600, -61, -2, 2, 61, 3_600, 86_400)
"""A time server corrects the small ones at once; the others are a wrong time zone, or date."""
FILE_VARIABLE = "TALLYSTICK_CHAOS_CLOCK"
_SECONDS = struct.Struct("=q")
_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *ahead_s;
static int (*real)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv(FILE_VARIABLE);
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *page = MAP_FAILED;
    if (file >= 0) page = mmap(NULL, sizeof *ahead_s, PROT_READ, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    if (page != MAP_FAILED) ahead_s = page;
    real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int refused = real ? real(clock, now) : (int)syscall(SYS_clock_gettime, clock, now);
    if (!refused && ahead_s && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *ahead_s;
    return refused;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    if (!now || clock_gettime(CLOCK_REALTIME, &exact)) return now ? -1 : 0;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *kept) {
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now)) return (time_t)-1;
    if (kept) *kept = now.tv_sec;
    return now.tv_sec;
}
"""


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock of one run's program.

    Args:
        library: Stands before the C library.
        file: Holds the number of seconds by which the clock is ahead; each process maps it.
    """

    library: Path
    file: Path

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that give the clock to a process and its children."""
        before = os.environ.get("LD_PRELOAD", "")
        return {"LD_PRELOAD": f"{self.library} {before}".strip(), FILE_VARIABLE: str(self.file)}

    def set(self, ahead_s: int) -> None:
        """Set the clock of all processes ahead by seconds, or behind if negative."""
        with self.file.open("r+b") as file:
            file.write(_SECONDS.pack(ahead_s))


def find_compiler() -> str | None:
    """Return the path of a C compiler for Linux; None: not found."""
    if sys.platform != "linux":
        return None
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def clock_of(folder: Path) -> Clock:
    """Return a clock that shows the right time.

    Args:
        folder: For the clock's files.

    Raises:
        OptionError: There is no C compiler, or it cannot make the library.
    """
    compiler = find_compiler()
    if compiler is None:
        raise OptionError(
            f"the fault 'clock' needs a C compiler, and there is none of {', '.join(COMPILERS)}: "
            f"apt-get install gcc libc6-dev (Linux only)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    library, file = folder / "clock.so", folder / "clock"
    variable = f'-DFILE_VARIABLE="{FILE_VARIABLE}"'
    command = [compiler, "-shared", "-fPIC", "-O2", variable]
    command += ["-x", "c", "-", "-o", str(library), "-ldl"]
    done = subprocess.run(command, input=_SOURCE, capture_output=True, text=True)
    if done.returncode:
        raise OptionError(
            f"the fault 'clock' needs a C compiler, and {compiler} failed: "
            f"{done.stderr.strip()[-500:]}"
        )
    file.write_bytes(_SECONDS.pack(0))
    return Clock(library, file)
