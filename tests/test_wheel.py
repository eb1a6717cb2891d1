"""The wheels have everything they need, outside of the repository.

`make stress` runs a demo from them, beside the packages that are here; and with `WHEEL=1` from what
pip, pipx and uvx install in an environment of their own, each of which takes minutes.
"""

import os
from pathlib import Path

import pytest

from tests.wheel import (
    RECORDS,
    ROOT,
    Way,
    beside_packages,
    build,
    by_pip,
    by_pipx,
    by_uvx,
    check_installed,
    use,
)

WAYS = (by_pip, by_pipx, by_uvx) if "WHEEL" in os.environ else (beside_packages,)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as it is now, the tools' beside it; the build asserts that every file is there."""
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


def test_the_command_line_runs_from_the_wheels_alone(wheel: Path, tmp_path: Path) -> None:
    """With the subcommands of both."""
    beside_packages(wheel, tmp_path)
    check_installed(tmp_path)


@pytest.mark.broker
@pytest.mark.spark
@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_demo_runs_from_the_wheel(wheel: Path, way: Way) -> None:
    verdict = use(wheel, way)

    assert (verdict["input"], verdict["kills"]) == (RECORDS, 1)
    faults = ("lost", "duplicated", "wrong", "out_of_order")
    assert [verdict[name] for name in faults] == [0, 0, 0, 0]
    assert verdict["output"] == verdict["expected"] > 0
