"""The wheel has everything it needs, in an environment of its own; it takes minutes.

It runs with `WHEEL=1`, as in `make stress`; else only what is inside the wheel is looked at.
"""

import os
from pathlib import Path

import pytest

from tests.wheel import RECORDS, ROOT, build, use


def test_the_wheel_has_every_file_of_the_package(tmp_path: Path) -> None:
    wheel = build(ROOT, tmp_path)  # asserts it

    assert wheel.suffix == ".whl"


@pytest.mark.broker
@pytest.mark.spark
@pytest.mark.chaos
@pytest.mark.skipif("WHEEL" not in os.environ, reason="installs PySpark again: WHEEL=1, make wheel")
@pytest.mark.timeout(1800)
def test_the_demo_runs_from_the_wheel_alone(tmp_path: Path) -> None:
    verdict = use(build(ROOT, tmp_path))

    assert (verdict["input"], verdict["kills"]) == (RECORDS, 1)
    faults = ("lost", "duplicated", "wrong", "out_of_order")
    assert [verdict[name] for name in faults] == [0, 0, 0, 0]
    assert verdict["output"] == verdict["expected"] > 0
