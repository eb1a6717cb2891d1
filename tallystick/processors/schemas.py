"""Schemas as users write them for Spark.

Only Spark itself knows all of its DDL, and only where a JVM is: so schemas are read on the driver,
and tasks get them as JSON.
"""

import json

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import types
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from tallystick.errors import OptionError
from tallystick.state.ddl import schema_of


def struct_of(schema: types.StructType | str) -> types.StructType:
    """A schema that a user gave.

    Raises:
        OptionError: it is no schema of columns, or only a running Spark session could read it.
    """
    if isinstance(schema, types.StructType):
        return schema
    if not isinstance(schema, str):
        raise OptionError(f"{schema!r} is no schema: give a StructType, or DDL like 'n bigint'")
    try:
        return from_arrow_schema(schema_of(schema, "schema"), prefer_timestamp_ntz=True)
    except OptionError:
        pass  # maps, structs, comments: Spark reads them
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
