"""Python runs this at its start, in the processes that the JVM of the shared session starts.

Those that Spark starts for a data source or a stream are a daemon or a program of Spark's, whatever
daemon is configured. Here they give their place to a fork of the template (`loaded_daemon.py`),
which has imported what takes each a second of a core.
"""

import importlib.util
import os
import sys
from pathlib import Path

TEMPLATE = "TEST_DAEMONS_TEMPLATE"
PROGRAMS = (
    "tests.spark.loaded_daemon",  # it would do so itself, after some imports
    "pyspark.daemon",
    "pyspark.sql.streaming.python_streaming_source_runner",
    "pyspark.sql.streaming.transform_with_state_driver_worker",
)


def give_place(address: str) -> None:
    """End this process with the fork that takes the place; without one, go on."""
    package = importlib.util.find_spec("tallystick")
    assert package is not None
    assert package.origin is not None
    file = Path(package.origin).with_name("spark") / "early_daemon.py"
    spec = importlib.util.spec_from_file_location("early_daemon", file)
    assert spec is not None
    assert spec.loader is not None
    early_daemon = importlib.util.module_from_spec(spec)  # the package itself loads PySpark
    spec.loader.exec_module(early_daemon)
    before, sys.argv = sys.argv, sys.orig_argv[2:]
    if early_daemon.stand_in(address):
        os._exit(0)
    sys.argv = before


if sys.orig_argv[1:2] == ["-m"] and sys.orig_argv[2] in PROGRAMS and TEMPLATE in os.environ:
    give_place(os.environ.pop(TEMPLATE))
