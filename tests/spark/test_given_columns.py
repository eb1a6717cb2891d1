"""Columns as users give them to a keyed step."""

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from tallystick.errors import OptionError
from tallystick.pipeline.keyed import columns_of

ARROW = pa.schema([("user", pa.string()), ("n", pa.int64())])
SPARK = StructType([StructField("user", StringType(), False), StructField("n", LongType())])


@pytest.mark.parametrize("given", [ARROW, SPARK])
def test_a_schema_is_sparks_or_arrows(given):
    assert columns_of(None, given) == ARROW


def test_anything_else_is_refused():
    with pytest.raises(OptionError, match=r"no schema: give a pyarrow\.Schema, a StructType"):
        columns_of(None, {"user": "string"})
