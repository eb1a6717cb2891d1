"""A member keeps the memory that it needs again and again."""

import platform
import subprocess
import sys

import pytest

BLOCKS = """
import resource
import numpy
from tallystick.spark.gang.member import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        [numpy.ones(8 << 20, numpy.uint8) for _ in range(8)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

{call}
faults()
print(faults())
"""


def faults_of(call: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKS.format(call=call)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
def test_blocks_are_not_asked_of_the_kernel_each_time():
    assert faults_of("") > 100
    assert faults_of("keep_freed_memory()") < 20
