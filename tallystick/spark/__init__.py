"""Engines: Spark's context and cluster, resident tasks and jobs."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

from tallystick.errors import OptionError


def _pyspark_version() -> str:
    """Return PySpark's version.

    The file that says it is read: the process that Spark starts as `early_daemon` has no other use
    for PySpark, and the first task of a pipeline would wait for the import, 0.08 s of 0.12.
    """
    if "pyspark" not in sys.modules:
        spec: Any = importlib.util.find_spec("pyspark")
        if spec is not None and spec.origin and hasattr(spec.loader, "get_data"):
            text = spec.loader.get_data(str(Path(spec.origin).with_name("version.py"))).decode()
            if version := re.search(r"^__version__.*?=\s*[\"'](.+?)[\"']", text, re.MULTILINE):
                return version[1]
    import pyspark

    return pyspark.__version__


_VERSION = _pyspark_version()
PYSPARK_VERSION = tuple(map(int, _VERSION.split(".")[:2]))
PYSPARK_VERSION_MIN = (3, 5)
"""The oldest that benchmarks/MATRIX.md shows at work; what needs a later one refuses by itself."""

if PYSPARK_VERSION < PYSPARK_VERSION_MIN:
    raise OptionError(
        f"PySpark {_VERSION} is installed, and Tallystick needs 3.5 or later: "
        f"run `pip install 'pyspark>=3.5,<5'`"
    )
