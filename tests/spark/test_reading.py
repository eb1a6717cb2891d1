"""Spark is told of the columns that tasks build, for every format and mode."""

from itertools import product

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

from tallystick.codec.formats import MODES
from tallystick.errors import OptionError
from tallystick.options.source import SourceOptions, parse_source_options
from tallystick.pipeline.topics import columns_ddl, layout_of
from tallystick.state.schema import schema_of

pytestmark = pytest.mark.spark

FORMATS = (
    {"value.format": "raw"},
    {"value.format": "string"},
    {
        "value.format": "json_schema",
        "value.schema": "n bigint, at timestamp,",
        "metadata.prefix": "kafka_",
    },
    {
        "value.format": "avro",
        "value.schema": "n bigint, tags array<string>,",
        "value.registry.file": "asked-when-it-reads.json",
        "value.name.column": "the type",
        "metadata.columns": "offset, KEY",
    },
    {"value.format": "json", "value.schema": "n bigint", "metadata.columns": "none"},
    {
        "value.format": "json",
        "value.schema": "n bigint",
        "key.format": "json",
        "key.schema": "n bigint, `odd ``one` array<struct<d: decimal(9, 2), at: timestamp>>",
        "metadata.columns": "offset, key",
    },
    {"value.format": "string", "key.format": "json", "key.schema": "f float", "key.prefix": "k."},
    {
        "key.format": "avro",
        "key.schema": "m map<string, int>, b binary, t timestamp_ntz",
        "key.registry.file": "asked-when-it-reads.json",
        "key.name.column": "type",
    },
)


def options(settings: dict[str, str]) -> SourceOptions:
    return parse_source_options(
        {"kafka.bootstrap.servers": "nowhere:1", "subscribe": "t", **settings}, streaming=True
    )


def test_the_schema_that_spark_reads_from_our_ddl_is_that_of_the_rows(spark: SparkSession) -> None:
    for form, mode, headers in product(FORMATS, MODES, ("true", "false")):
        has_mode = form.get("value.format", "raw") != "raw" or "key.format" in form
        modes = {"value.mode": mode} if has_mode else {}
        parsed = options({**form, **modes, "includeHeaders": headers})
        schema = to_arrow_schema(
            spark.createDataFrame([], columns_ddl(parsed)).schema, timezone="UTC"
        )

        layout = layout_of(parsed, schema, dead_letters=True)

        assert layout.schema == schema, (form, mode, headers)


def test_dead_letters_need_somebody_who_writes_them() -> None:
    parsed = options({"value.format": "string", "value.mode": "deadletter"})
    schema = schema_of(columns_ddl(parsed), "columns")

    with pytest.raises(OptionError, match=r"in a Pipeline only.*use permissive"):
        layout_of(parsed, schema)
