"""The wheels have everything they need, outside of the repository.

With `WHEEL=1`, as in `make stress`, they are also installed with all their packages, in an
environment of their own, by pip, pipx and uvx; each takes minutes.
"""

import os
from pathlib import Path

import pytest

from tests.wheel import RECORDS, ROOT, Way, beside_packages, build, by_pip, by_pipx, by_uvx, use

WAYS = (by_pip, by_pipx, by_uvx) if "WHEEL" in os.environ else (beside_packages,)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as it is now, the tools' beside it; the build asserts that every file is there."""
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


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
