"""The wheels have everything they need, outside of the repository.

With `WHEEL=1`, as in `make stress`, they are also installed with all their packages, in an
environment of their own, by pip, pipx and uvx; each takes minutes.
"""

import os
import tarfile
from email.parser import Parser
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
    sdist_beside,
    tools_beside,
    use,
)

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


def test_sdists_have_license_notice_and_metadata(wheel: Path) -> None:
    uplot = "tallystick/ops/ui/static/uPlot.LICENSE.txt"
    licenses = {wheel: ["LICENSE", "NOTICE", uplot], tools_beside(wheel): ["LICENSE"]}
    for path, names in licenses.items():
        with tarfile.open(sdist_beside(path)) as archive:
            (top,) = {name.partition("/")[0] for name in archive.getnames()}
            packed = archive.extractfile(f"{top}/PKG-INFO")
            assert packed is not None
            metadata = Parser().parsestr(packed.read().decode())
            assert {f"{top}/{name}" for name in names} <= set(archive.getnames())
        assert (metadata["License-Expression"] or "").startswith("Apache-2.0")
        assert metadata.get_all("License-File") == names
        assert "Typing :: Typed" in (metadata.get_all("Classifier") or ())
