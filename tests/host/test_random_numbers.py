"""Forks draw numbers of their own."""

import json
import subprocess
import sys

import pytest

DRAW = """
import json, os, sys
import numpy as np, numpy.random
from tallystick.host.forks import draw_anew, make_ready_for_forks

def in_fork(work):
    read, write = os.pipe()
    if not os.fork():
        work()
        os.write(write, json.dumps(np.random.random()).encode() + b"\\n")
        os._exit(0)
    os.wait()
    return float(os.read(read, 100))

def of_a_fork():
    os.write(second[1], json.dumps([in_fork(lambda: None) for _ in range(2)]).encode())

how, second = sys.argv[1], os.pipe()
if how == "all":
    make_ready_for_forks()
alike = [in_fork(draw_anew if how == "each" else lambda: None) for _ in range(3)]
in_fork(of_a_fork)
print(json.dumps([alike, json.loads(os.read(second[0], 100))]))
"""


@pytest.mark.parametrize(("how", "different"), [("none", 1), ("each", 3), ("all", 3)])
def test_forks_draw_alike_unless_they_are_seeded(how: str, different: int) -> None:
    """Those that a fork makes itself are its own: a user may have seeded them."""
    command = [sys.executable, "-c", DRAW, how]
    forks, of_a_fork = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert len(set(forks)) == different
    assert len(set(of_a_fork)) == 1


def test_it_imports_nothing() -> None:
    check = "import sys, tallystick.host.forks as r; r.draw_anew(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", check], capture_output=True, check=True).stdout
    assert b"numpy" not in loaded.split()
