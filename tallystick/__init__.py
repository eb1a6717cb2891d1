"""Tallystick: exactly-once streaming for people who have PySpark and Kafka.

The public names are loaded when they are used: workers, pytest runs and `--help` import this
package too, and need not wait for Spark.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tallystick.api.kafka_sink import KafkaSink
    from tallystick.api.kafka_source import KafkaSource
    from tallystick.api.pipeline import Pipeline
    from tallystick.codec.formats import Avro, Json, Text
    from tallystick.epoch.two_phase import (
        Committable,
        Outcome,
        Owner,
        Place,
        RunFacts,
        Sink,
        Timeout,
        Transaction,
        TwoPhaseCommitSink,
    )
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
        SecondCallError,
        SparkLogError,
        StateError,
        StateFileError,
        StorageError,
        TallystickError,
        TopicRecreatedError,
    )
    from tallystick.files.sink import FileSink
    from tallystick.ops.state_table import read_state
    from tallystick.postgres.sink import PostgresSink
    from tallystick.run.query import Query
    from tallystick.source.losses import LossPolicy
    from tallystick.spark.context import configure, spark_session
    from tallystick.spark.progress import SourceProgress, source_progress
    from tallystick.spark.recovery import Recovery
    from tallystick.spark.streaming.source import register
    from tallystick.state.functions.keyed_batch import KeyedBatch, Update
    from tallystick.state.functions.ready_made import (
        aggregate,
        count,
        deduplicate,
        last_value,
        maximum,
        minimum,
        sum,
        top_n,
    )
    from tallystick.state.functions.sessions import sessions
    from tallystick.state.functions.vectorised import vectorised

__version__ = "0.1.0"

__all__ = [
    "AuthorizationError",
    "Avro",
    "BrokerUnavailableError",
    "Committable",
    "DataLossError",
    "FencedError",
    "FileSink",
    "ForeignRowsError",
    "Json",
    "KafkaSink",
    "KafkaSource",
    "KeyedBatch",
    "LogTruncatedError",
    "LossPolicy",
    "ManifestError",
    "OptionError",
    "Outcome",
    "Owner",
    "PartitionRemovedError",
    "Pipeline",
    "Place",
    "PostgresSink",
    "Query",
    "RecordError",
    "RecordsExpiredError",
    "Recovery",
    "RunFacts",
    "SecondCallError",
    "Sink",
    "SourceProgress",
    "SparkLogError",
    "StateError",
    "StateFileError",
    "StorageError",
    "TallystickError",
    "Text",
    "Timeout",
    "TopicRecreatedError",
    "Transaction",
    "TwoPhaseCommitSink",
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
    "Avro": "codec.formats",
    "Committable": "epoch.two_phase",
    "FileSink": "files.sink",
    "Json": "codec.formats",
    "KafkaSink": "api.kafka_sink",
    "KafkaSource": "api.kafka_source",
    "KeyedBatch": "state.functions.keyed_batch",
    "LossPolicy": "source.losses",
    "Outcome": "epoch.two_phase",
    "Owner": "epoch.two_phase",
    "Pipeline": "api.pipeline",
    "Place": "epoch.two_phase",
    "PostgresSink": "postgres.sink",
    "Query": "run.query",
    "Recovery": "spark.recovery",
    "RunFacts": "epoch.two_phase",
    "Sink": "epoch.two_phase",
    "SourceProgress": "spark.progress",
    "Text": "codec.formats",
    "Timeout": "epoch.two_phase",
    "Transaction": "epoch.two_phase",
    "TwoPhaseCommitSink": "epoch.two_phase",
    "Update": "state.functions.keyed_batch",
    "aggregate": "state.functions.ready_made",
    "configure": "spark.context",
    "count": "state.functions.ready_made",
    "deduplicate": "state.functions.ready_made",
    "last_value": "state.functions.ready_made",
    "maximum": "state.functions.ready_made",
    "minimum": "state.functions.ready_made",
    "read_state": "ops.state_table",
    "register": "spark.streaming.source",
    "sessions": "state.functions.sessions",
    "source_progress": "spark.progress",
    "spark_session": "spark.context",
    "sum": "state.functions.ready_made",
    "top_n": "state.functions.ready_made",
    "vectorised": "state.functions.vectorised",
}
"""Public name -> the module that it is loaded from; all others are errors."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
