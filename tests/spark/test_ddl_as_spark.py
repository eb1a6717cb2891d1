"""DDL read without a JVM, against Spark's own parser: the same result, or both refuse."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from tallystick.codec import ddl
from tallystick.errors import OptionError
from tallystick.spark.cluster import Cluster
from tallystick.state.schema import arrow_schema

pytestmark = pytest.mark.spark

READ = r"""
a int
a: int
int
a int, b: int
`a``b` int
`` int
1a int
_ int

struct<>
a struct<>
array<int>
map<string,int>
struct<a:int>
a struct<b int not null comment 'x', c:string>
a int NOT NULL
a int not  null comment 'it''s'
a int comment "d\n\t\u00e9q \u0041 \101 \% \\ \' \Z"
a int comment "say ""x"" again"
a int comment 'a' 'b'
a int comment r'a\n'
a int comment ''
a int COMMENT 'x\'y'
a decimal
a decimal(5)
a decimal(5,2)
a decimal ( 05 , 02 )
a numeric(3,1), b dec(3)
a char(5), b character(3), c varchar(0)
a timestamp, b timestamp(6), c timestamp without time zone, d timestamp with local time zone
a timestamp_ltz, b timestamp_ntz, c timestamp_ltz(6)
a time, b time(6), c time(0), d time(9), e time without time zone
a interval, b interval year, c interval year to month, d interval day to second
a interval second, b interval minute to second not null
interval day
interval int
a void
a variant
A INT, a int
a struct<b:int,b:int>
a int -- c
a int /* x /* y */ z */ , b int
/* c */ a int
a array<struct<x:map<string,array<decimal(3,1)>>>>
a array < int >
a map < string , array < int > >
a struct <>
a struct<> not null
from int, table string, not int, null int, array int, map map<int,int>, struct struct<int:int>
left int, on string, union int, comment string comment 'x', identifier int, interval int
a binary, b boolean, c date, d float, e double, f real
a tinyint, b smallint, c bigint, d byte, e short, f long, g integer
""".strip("\n").split("\n")  # fmt: skip
REFUSED = r"""
a-b int
ünï int
1 int
1L int
1e5 int
a.b int
a int,
a array
a array<>
a map<string>
a int null
a int comment 'x' not null
a decimal(39,2)
a decimal(5,6)
a decimal(5,-1)
a decimal(5L)
a decimal(99999999999999999999)
a char
a varchar
a string(5)
a int(5)
a timestamp(3)
a time(10)
a interval month to year
a interval day to month
a interval hour to hour
a null
a bool
a datetime
a number
a geometry
a int /*+ x */
a struct<int>
a struct<b: int>>
a struct<b: int,>
a struct<,>
not not null
a not null
a int;
a int b int
a int, , b int
a 'x' int
"a" int
'a' int
a: array<int not null>
a: int: int
a::int
a :b
x://y int
value
a.b
a <> int
a int comment
a int comment 'x
`a
a /* int
$a int
日本 int
?a int
:a int
a int default 3
a `int`
""".strip("\n").split("\n")  # fmt: skip
LEFT_TO_SPARK = (
    "a geometry(4326)",
    "a struct<b: geography(any)>",
    "a string collate UNICODE_CI",
    "identifier('x') int",
)


def by_spark(spark: SparkSession, text: str) -> Any:
    """What Spark reads, as JSON; None where it refuses."""
    try:
        return spark.sparkContext._parse_ddl(text).jsonValue()
    except Exception:
        return None


def by_us(text: str) -> Any:
    try:
        return ddl.parse(text, "schema")
    except OptionError:
        return None


@pytest.mark.parametrize("text", [*READ, "a int -- c\n, b int", "a\t\xa0\u3000int\r\n,b int"])
def test_the_result_is_sparks(spark: SparkSession, text: str) -> None:
    parsed = ddl.parse(text, "schema")

    assert parsed == by_spark(spark, text)
    if "char" not in text:  # of which a DataFrame makes strings
        assert ddl.columns(text, "schema") == spark.createDataFrame([], text).schema.jsonValue()


@pytest.mark.parametrize("text", REFUSED)
def test_what_spark_refuses_is_refused(spark: SparkSession, text: str) -> None:
    assert by_spark(spark, text) is None
    with pytest.raises(OptionError, match=r"^schema: .*cannot be read at"):
        ddl.parse(text, "schema")


@pytest.mark.parametrize("text", LEFT_TO_SPARK)
def test_what_is_left_to_spark_is_read_where_a_context_is(spark: SparkSession, text: str) -> None:
    with pytest.raises(OptionError, match="is left to Spark's own parser"):
        ddl.parse(text, "schema")
    arrow_schema = to_arrow_schema(spark.createDataFrame([], text).schema, timezone="UTC")
    if "geo" in text:
        with pytest.raises(OptionError, match="no counterpart in Arrow"):
            Cluster.of(spark.sparkContext).columns(text, "schema")
    else:
        assert Cluster.of(spark.sparkContext).columns(text, "schema") == arrow_schema


def test_every_word_that_spark_knows_may_be_a_name(spark: SparkSession) -> None:
    words = [row.keyword for row in spark.sql("SELECT keyword FROM sql_keywords()").collect()]
    assert len(words) > 300
    for word in words:
        assert by_us(f"{word} int, b {word}") == by_spark(spark, f"{word} int, b {word}"), word
        assert by_us(f"{word} int") == by_spark(spark, f"{word} int"), word


def test_a_timestamp_is_what_the_session_says(spark: SparkSession) -> None:
    name = "spark.sql.timestampType"
    spark.conf.set(name, "TIMESTAMP_NTZ")
    try:
        arrow_schema = to_arrow_schema(
            spark.createDataFrame([], "a timestamp").schema, timezone="UTC"
        )
        assert Cluster.of(spark).columns("a timestamp", "schema") == arrow_schema
    finally:
        spark.conf.unset(name)
    arrow_schema = to_arrow_schema(spark.createDataFrame([], "a timestamp").schema, timezone="UTC")
    assert Cluster.of(spark).columns("a timestamp", "schema") == arrow_schema


NAMES = st.one_of(
    st.sampled_from(["a", "B_1", "timestamp", "struct", "2x", "not"]),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5).map(
        lambda name: "`" + name.replace("`", "``") + "`"
    ),
)
PLAIN = st.sampled_from(
    [
        *("boolean", "TINYINT", "smallint", "Int", "bigint", "float", "double", "string"),
        *("binary", "date", "timestamp", "timestamp_ntz", "decimal(38, 18)", "dec(7)", "void"),
    ]
)
COMMENTS = st.sampled_from(["", " NOT NULL", " comment 'c'", " not null comment 'it''s'"])


@st.composite
def column(draw: st.DrawFn, types: st.SearchStrategy[str]) -> str:
    return draw(NAMES) + draw(st.sampled_from([" ", ": "])) + draw(types) + draw(COMMENTS)


def columns(types: st.SearchStrategy[str], least: int) -> st.SearchStrategy[str]:
    return st.lists(column(types), min_size=least, max_size=4).map(", ".join)


TYPES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        inner.map(lambda kind: f"array<{kind}>"),
        st.tuples(inner, inner).map(lambda kinds: f"MAP<{kinds[0]}, {kinds[1]}>"),
        columns(inner, 0).map(lambda fields: f"struct<{fields}>"),
    ),
    max_leaves=6,
)
MANY = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@MANY
@given(columns(TYPES, 1))
def test_nested_columns_are_read_as_spark_reads_them(spark: SparkSession, text: str) -> None:
    parsed = by_spark(spark, text)
    assert parsed is not None
    assert json.dumps(ddl.parse(text, "schema")) == json.dumps(parsed)
    try:
        schema = to_arrow_schema(StructType.fromJson(parsed), timezone="UTC")
    except ValueError:  # void that is not null
        with pytest.raises(OptionError, match="no counterpart in Arrow"):
            arrow_schema(parsed, "schema")
    else:
        assert arrow_schema(parsed, "schema") == schema


@MANY
@given(
    st.lists(
        st.sampled_from(
            [
                *("a", "b", "int", "struct", "array", "map", "not null", "comment", "decimal", "3"),
                *("interval", "day", "to", "second", "timestamp", "<>", "/*", "--", "'", "`"),
                *"<>(),:-",
            ]
        ),
        max_size=12,
    ).map(" ".join)
)
def test_any_text_is_read_or_refused_as_spark_does(spark: SparkSession, text: str) -> None:
    if "--" not in text:  # Spark closes a bracket of its own after the text, in the comment
        assert by_us(text) == by_spark(spark, text)
