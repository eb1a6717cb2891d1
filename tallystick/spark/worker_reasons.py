"""The reasons why no task of Spark's can come up, as far as a user can mend them.

Spark gives the output of a Python worker that does not come up as a text of hundreds of lines.
"""

import os
import re
import sys
from importlib.util import find_spec

from tallystick.errors import OptionError

_MISSING = re.compile(r"No module named '?([\w.]+)'?")
_OTHER_VERSION = re.compile(
    r"different (?:minor )?version:? (\d+\.\d+) than that in driver:? (\d+\.\d+)"
)
_NO_PROGRAM = re.compile(
    r'Cannot run program "([^"]+)".*?(No such file or directory|Permission denied|Exec format)'
)


def why_no_worker(text: str) -> OptionError | None:
    """Return the error for workers that can never come up; None: another attempt may succeed.

    Args:
        text: of Spark's error.
    """
    worker = os.environ.get("PYSPARK_PYTHON", "python3")
    remedy = f"set PYSPARK_PYTHON={sys.executable}, or to a Python of the workers that has the same"
    if other := _OTHER_VERSION.search(text):
        return OptionError(
            f"Spark's workers run Python {other[1]} ({worker}), and this program runs {other[2]}: "
            f"{remedy} version and packages"
        )
    if no_program := _NO_PROGRAM.search(text):
        return OptionError(
            f"Spark's workers cannot be started: {no_program[1]}: {no_program[2]}. Set "
            f"PYSPARK_PYTHON={sys.executable}, or to a Python that the workers have"
        )
    if missing := _MISSING.search(text):
        module = missing[1]
        if _is_package(module):
            return OptionError(
                f"Spark's workers run {worker}, which has no module named {module!r} "
                f"(ModuleNotFoundError): {remedy} packages"
            )
        return OptionError(
            f"ModuleNotFoundError: No module named {module!r} in Spark's workers, which do not "
            f"look where this program looks: put its folder into PYTHONPATH, or give the file to "
            f"Spark, spark.submit.pyFiles or sparkContext.addPyFile('{module.split('.')[0]}.py')"
        )
    return None


def _is_package(module: str) -> bool:
    """True if this Python has a module installed, so that it is no file of the user's."""
    root = module.split(".")[0]
    try:
        spec = find_spec(root)
    except (ImportError, ValueError):
        return False
    places = [*(spec.submodule_search_locations or ()), spec.origin or ""] if spec else []
    is_own = root in ("tallystick", "pyspark", "py4j")
    return is_own or any("site-packages" in place or "dist-packages" in place for place in places)
