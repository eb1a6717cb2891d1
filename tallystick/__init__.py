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
        LogTruncatedError,
        ManifestError,
        OptionError,
        PartitionRemovedError,
        RecordError,
        RecordsExpiredError,
        TallystickError,
        TopicRecreatedError,
    )
    from tallystick.formats import Avro, Json, Text
    from tallystick.pipeline import Pipeline
    from tallystick.source.losses import LossPolicy
    from tallystick.spark.progress import SourceProgress, source_progress
    from tallystick.spark.session import configure, spark_session
    from tallystick.spark.source import register
    from tallystick.state_table import read_state

__version__ = "0.1.0"

__all__ = [
    "AuthorizationError",
    "Avro",
    "BrokerUnavailableError",
    "DataLossError",
    "FencedError",
    "ForeignRowsError",
    "Json",
    "KafkaSink",
    "KafkaSource",
    "LogTruncatedError",
    "LossPolicy",
    "ManifestError",
    "OptionError",
    "PartitionRemovedError",
    "Pipeline",
    "RecordError",
    "RecordsExpiredError",
    "SourceProgress",
    "TallystickError",
    "Text",
    "TopicRecreatedError",
    "configure",
    "read_state",
    "register",
    "source_progress",
    "spark_session",
]

_HOMES = {
    "Avro": "formats",
    "Json": "formats",
    "KafkaSink": "endpoints",
    "KafkaSource": "endpoints",
    "LossPolicy": "source.losses",
    "Pipeline": "pipeline",
    "Text": "formats",
    "configure": "spark.session",
    "SourceProgress": "spark.progress",
    "read_state": "state_table",
    "register": "spark.source",
    "source_progress": "spark.progress",
    "spark_session": "spark.session",
}
"""Public name -> the module that it is loaded from; all others are errors."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
