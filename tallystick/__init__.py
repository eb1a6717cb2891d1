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
        StateError,
        StateFileError,
        StorageError,
        TallystickError,
        TopicRecreatedError,
    )
    from tallystick.formats import Avro, Json, Text
    from tallystick.pipeline import Pipeline
    from tallystick.source.losses import LossPolicy
    from tallystick.spark.progress import SourceProgress, source_progress
    from tallystick.spark.session import configure, spark_session
    from tallystick.spark.source import register
    from tallystick.state.keyed_batch import KeyedBatch, Update
    from tallystick.state.ready_made import (
        aggregate,
        count,
        deduplicate,
        last_value,
        maximum,
        minimum,
        sum,
        top_n,
    )
    from tallystick.state.sessions import sessions
    from tallystick.state.vectorised import vectorised
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
    "KeyedBatch",
    "LogTruncatedError",
    "LossPolicy",
    "ManifestError",
    "OptionError",
    "PartitionRemovedError",
    "Pipeline",
    "RecordError",
    "RecordsExpiredError",
    "SourceProgress",
    "StateError",
    "StateFileError",
    "StorageError",
    "TallystickError",
    "Text",
    "TopicRecreatedError",
    "Update",
    "aggregate",
    "configure",
    "count",
    "deduplicate",
    "last_value",
    "maximum",
    "minimum",
    "read_state",
    "register",
    "sessions",
    "source_progress",
    "spark_session",
    "sum",
    "top_n",
    "vectorised",
]

_HOMES = {
    "Avro": "formats",
    "Json": "formats",
    "KafkaSink": "endpoints",
    "KafkaSource": "endpoints",
    "KeyedBatch": "state.keyed_batch",
    "LossPolicy": "source.losses",
    "Pipeline": "pipeline",
    "SourceProgress": "spark.progress",
    "Text": "formats",
    "Update": "state.keyed_batch",
    "aggregate": "state.ready_made",
    "configure": "spark.session",
    "count": "state.ready_made",
    "deduplicate": "state.ready_made",
    "last_value": "state.ready_made",
    "maximum": "state.ready_made",
    "minimum": "state.ready_made",
    "read_state": "state_table",
    "register": "spark.source",
    "sessions": "state.sessions",
    "source_progress": "spark.progress",
    "spark_session": "spark.session",
    "sum": "state.ready_made",
    "top_n": "state.ready_made",
    "vectorised": "state.vectorised",
}
"""Public name -> the module that it is loaded from; all others are errors."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
