"""Schemas as users write them for Spark.

Of its DDL a little is left to Spark itself (collations, geometry), where a JVM is: so schemas are
read on the driver, and tasks get them as JSON.
"""

import json

import pyarrow as pa
from pyspark import SparkContext
from pyspark.sql import types
from pyspark.sql.pandas.types import to_arrow_schema

from tallystick.codec import ddl
from tallystick.errors import OptionError


def struct_of(schema: types.StructType | str) -> types.StructType:
    """A schema that a user gave.

    Raises:
        OptionError: it is no schema of columns, or only a running Spark session could read it.
    """
    if isinstance(schema, types.StructType):
        return schema
    if not isinstance(schema, str):
        raise OptionError(f"{schema!r} is no schema: give a StructType, or DDL like 'n bigint'")
    found = type_from_ddl(schema, "the schema")
    if not isinstance(found, types.StructType):
        raise OptionError(f"the schema {schema!r} is one type: name its columns, e.g. 'n bigint'")
    return found


def type_from_ddl(text: str, name: str) -> types.DataType:
    """Read DDL; what only Spark can read, by Spark, if it runs.

    Args:
        text: the DDL.
        name: what it is of, for errors.

    Raises:
        OptionError: it cannot be read.
    """
    try:
        return types._parse_datatype_json_value(ddl.parse(text, name))
    except ddl.DdlError as error:
        if SparkContext._active_spark_context is None:
            raise
        try:
            return types.DataType.fromDDL(text)
        except Exception:
            raise error from None


def struct_from_text(text: str) -> types.StructType:
    """Read back `StructType.json()`."""
    return types.StructType.fromJson(json.loads(text))


def arrow_schema_of(schema: types.StructType | pa.Schema | str) -> pa.Schema:
    """The Arrow columns of an output; moments are in UTC.

    Raises:
        OptionError: it is no schema of columns.
    """
    if isinstance(schema, pa.Schema):
        return schema
    return to_arrow_schema(struct_of(schema), timezone="UTC")
