"""Tallystick: exactly-once streaming for people who have PySpark and Kafka.

The public names are loaded when they are used: workers, pytest runs and `--help` import this
package too, and need not wait for Spark.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tallystick.endpoints import KafkaSink, KafkaSource
    from tallystick.errors import (
        AuthorizationError,
        BrokerUnavailableError,
        DataLossError,
        FencedError,
        ForeignRowsError,
        ManifestError,
        OptionError,
        RecordError,
        TallystickError,
    )
    from tallystick.json_format import Json
    from tallystick.pipeline import Pipeline
    from tallystick.spark.session import configure, spark_session
    from tallystick.spark.source import register

__version__ = "0.1.0"

__all__ = [
    "AuthorizationError",
    "BrokerUnavailableError",
    "DataLossError",
    "FencedError",
    "ForeignRowsError",
    "Json",
    "KafkaSink",
    "KafkaSource",
    "ManifestError",
    "OptionError",
    "Pipeline",
    "RecordError",
    "TallystickError",
    "configure",
    "register",
    "spark_session",
]

_HOMES = {
    "Json": "json_format",
    "KafkaSink": "endpoints",
    "KafkaSource": "endpoints",
    "Pipeline": "pipeline",
    "configure": "spark.session",
    "register": "spark.source",
    "spark_session": "spark.session",
}
"""Public name -> the module that it is loaded from; all others are errors."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
