"""Tallystick: exactly-once streaming for people who have PySpark and Kafka.

The public names are loaded when they are used: workers, pytest runs and `--help` import this
package too, and need not wait for Spark.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tallystick.endpoints import KafkaSource
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
    from tallystick.formats import Avro, Json, Text
    from tallystick.kafka_sink import KafkaSink
    from tallystick.pipeline import Pipeline
    from tallystick.postgres.sink import PostgresSink
    from tallystick.run.query import Query
    from tallystick.sink.two_phase import (
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
    "Avro": "formats",
    "Committable": "sink.two_phase",
    "FileSink": "files.sink",
    "Json": "formats",
    "KafkaSink": "kafka_sink",
    "KafkaSource": "endpoints",
    "KeyedBatch": "state.keyed_batch",
    "LossPolicy": "source.losses",
    "Outcome": "sink.two_phase",
    "Owner": "sink.two_phase",
    "Pipeline": "pipeline",
    "Place": "sink.two_phase",
    "PostgresSink": "postgres.sink",
    "Query": "run.query",
    "RunFacts": "sink.two_phase",
    "Sink": "sink.two_phase",
    "SourceProgress": "spark.progress",
    "Text": "formats",
    "Timeout": "sink.two_phase",
    "Transaction": "sink.two_phase",
    "TwoPhaseCommitSink": "sink.two_phase",
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
