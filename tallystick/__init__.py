"""Tallystick: exactly-once streaming for people who have PySpark and Kafka."""

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
