"""Spark's daemon of Python workers, which has loaded what a pipeline's workers import.

A worker is a fork of the daemon: each would take 2 s of a core to import packages and kernels for
itself. Pipelines that make their own Spark have such a daemon too: `tallystick.spark.early_daemon`.
The daemons of other workers, as those that create a data source, are Spark's own.
"""

import importlib
import sys
from pathlib import Path

from tallystick.host.forks import seed_forks
from tallystick.host.kernel_cache import WARM_UP_MODULES, are_compiled
from tallystick.spark.early_daemon import PACKAGES

MODULE = "tests.spark.loaded_daemon"
SETTINGS = {
    "spark.python.daemon.module": MODULE,
    "spark.executorEnv.PYTHONPATH": str(Path(__file__).parents[2]),
}
"""Of a Spark whose workers are such forks."""
SPARKS_OWN = {"spark.python.daemon.module": "pyspark.daemon"}
TASKS = "pyspark.worker"


def main() -> None:
    """Load, and serve the JVM."""
    if sys.argv[1] == TASKS:
        for package in PACKAGES:
            importlib.import_module(package)
        if are_compiled():
            for module in WARM_UP_MODULES:
                importlib.import_module(module).warm_up()
        seed_forks()
    importlib.import_module("pyspark.daemon").manager()


if __name__ == "__main__":
    main()
