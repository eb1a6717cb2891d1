"""Schemas as users write them for Spark.

Only Spark itself knows all of its DDL, and only where a JVM is: so schemas are read on the driver,
and tasks get them as JSON.
"""

import json
import re

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import types
from pyspark.sql.pandas.types import to_arrow_schema

from tallystick.errors import OptionError

_NAMES: dict[str, types.DataType] = {
    "boolean": types.BooleanType(),
    "tinyint": types.ByteType(),
    "byte": types.ByteType(),
    "smallint": types.ShortType(),
    "short": types.ShortType(),
    "int": types.IntegerType(),
    "integer": types.IntegerType(),
    "bigint": types.LongType(),
    "long": types.LongType(),
    "float": types.FloatType(),
    "real": types.FloatType(),
    "double": types.DoubleType(),
    "string": types.StringType(),
    "binary": types.BinaryType(),
    "date": types.DateType(),
    "timestamp_ntz": types.TimestampNTZType(),
}
"""Types that are the same in every session; `timestamp` is not, by `spark.sql.timestampType`."""
_COLUMN = re.compile(r"\s*(\w+)(?:\s*:\s*|\s+)(\w+)\s*")


def struct_of(schema: types.StructType | str) -> types.StructType:
    """A schema that a user gave.

    Raises:
        OptionError: it is no schema of columns, or only a running Spark session could read it.
    """
    if isinstance(schema, types.StructType):
        return schema
    if not isinstance(schema, str):
        raise OptionError(f"{schema!r} is no schema: give a StructType, or DDL like 'n bigint'")
    columns = [_COLUMN.fullmatch(part) for part in schema.split(",")]
    if all(column is not None and column[2].lower() in _NAMES for column in columns):
        return types.StructType(
            [types.StructField(c[1], _NAMES[c[2].lower()]) for c in columns if c is not None]
        )
    try:
        found = types.DataType.fromDDL(schema)
    except (PySparkException, AssertionError) as error:
        raise OptionError(
            f"the schema {schema!r} cannot be read: {str(error).splitlines()[0]}. Write it as "
            f"'name type, name type'; without a running Spark session give a StructType"
        ) from error
    if not isinstance(found, types.StructType):
        raise OptionError(f"the schema {schema!r} is one type: name its columns, e.g. 'n bigint'")
    return found


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
