"""From a query's options to the columns of its rows: as DDL for Spark, as a layout for tasks."""

import pyarrow as pa

from tallystick.errors import OptionError
from tallystick.formats import DEADLETTER, PERMISSIVE
from tallystick.options import SourceOptions
from tallystick.registry import schema_source
from tallystick.source.avro_reader import AvroReader
from tallystick.source.columns import Layout, ddl
from tallystick.source.json_reader import JsonReader
from tallystick.source.parsed import ValueReader
from tallystick.source.text_reader import TextReader


def columns_ddl(options: SourceOptions) -> str:
    """The columns of a query's rows, as Spark's DDL text."""
    return ddl(
        options.value_schema,
        mode=options.value_mode,
        prefix=options.metadata_prefix,
        headers=options.headers,
        text=options.value_format == "string",
        metadata=options.metadata_columns,
    )


def layout_of(options: SourceOptions, schema: pa.Schema, *, dead_letters: bool = False) -> Layout:
    """The layout whose columns are `schema`, parsed from our DDL.

    Args:
        options: of the query.
        schema: its columns.
        dead_letters: whether whoever reads writes the malformed records to a topic of their own.

    Raises:
        OptionError: the value cannot be read as asked, or malformed records would have to go to a
            topic of their own and nobody writes them there.
    """
    if options.value_mode == DEADLETTER and not dead_letters:
        raise OptionError(
            "value.mode=deadletter works in a Pipeline only, whose sink has a dead_letter_topic: "
            "in a query of your own use permissive, and split the rows yourself by "
            "whether _corrupt_record is null"
        )
    return Layout(
        _reader(options, schema),
        options.value_mode,
        options.metadata_prefix,
        options.headers,
        options.metadata_columns,
    )


def _reader(options: SourceOptions, schema: pa.Schema) -> ValueReader | None:
    if options.value_format == "string":
        return TextReader()
    if options.value_format == "json":
        return JsonReader(_value_schema(options, schema))
    if options.avro is not None:
        return AvroReader(_value_schema(options, schema), schema_source(options.avro))
    return None


def _value_schema(options: SourceOptions, schema: pa.Schema) -> pa.Schema:
    """The fields that the value becomes: they stand before Kafka's own."""
    beside = len(options.metadata_columns) + options.headers + (options.value_mode == PERMISSIVE)
    return pa.schema(list(schema)[: len(schema) - beside])
