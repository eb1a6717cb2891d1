"""Users' schemas in Spark's forms, and values of state as msgpack, checked against the schemas.

A little of Spark's DDL (collations, geometry) is left to Spark itself, which needs a JVM: so
schemas are read on the driver, and tasks get them as JSON.

msgpack knows numbers, text, bytes, lists and maps, nothing that could run code when it is read.
Spark turns a value of another type silently into NULL, or breaks the query's socket; here it is an
error that names state and value.
"""

import datetime
import decimal
import json
import math
import re
from collections.abc import Callable
from typing import Annotated, Any, cast

import msgspec
import numpy as np
import pyarrow as pa
from pyspark import SparkContext
from pyspark.sql import types
from pyspark.sql.pandas.types import to_arrow_schema

from tallystick.codec import ddl
from tallystick.errors import UNREADABLE, ManifestError, OptionError, StateError
from tallystick.state.pyspark.rows import field_misfit, order_misfit, row_maker


def struct_of(schema: types.StructType | str) -> types.StructType:
    """Return a user's schema as a `StructType`.

    Raises:
        OptionError: it is no schema of columns, or only a running Spark session could read it.
    """
    if isinstance(schema, types.StructType):
        return schema
    if not isinstance(schema, str):
        raise OptionError(f"{schema!r} is no schema: give a StructType, or DDL like 'n bigint'")
    parsed = type_from_ddl(schema, "the schema")
    if not isinstance(parsed, types.StructType):
        raise OptionError(f"the schema {schema!r} is one type: name its columns, e.g. 'n bigint'")
    return parsed


def type_from_ddl(text: str, name: str) -> types.DataType:
    """Read a type from DDL; where our parser fails, ask Spark, if a context runs.

    Args:
        text: the DDL.
        name: what the type is of, for errors.

    Raises:
        OptionError: the DDL cannot be read.
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
    """Read back `StructType.json()`.

    A user-defined type is refused: PySpark would import, and before 4.2 unpickle, what it names. A
    decimal that Spark cannot have is refused too: PySpark takes it.

    Raises:
        ManifestError: the text is no such JSON.
    """
    try:
        return types.StructType.fromJson(json.loads(text, object_hook=_possible))
    except UNREADABLE as error:
        raise ManifestError(
            f"a schema in the checkpoint is {text[:200]!r}: expected one of Spark's, as JSON. It "
            f"was edited, or made by somebody else."
        ) from error


def arrow_schema_of(schema: types.StructType | pa.Schema | str) -> pa.Schema:
    """Return the Arrow columns of an output; moments are in UTC.

    Raises:
        OptionError: it is no schema of columns.
    """
    if isinstance(schema, pa.Schema):
        return schema
    return to_arrow_schema(struct_of(schema), timezone="UTC")


def _possible(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("type") == "udt":
        raise ValueError("a user-defined type")
    for name in ("type", "elementType", "keyType", "valueType"):
        if digits := _DECIMAL.match(str(value.get(name))):
            precision, scale = map(int, digits.groups())
            if not abs(scale) <= precision <= _DECIMAL_DIGITS_MAX:
                raise ValueError(
                    f"a decimal of {precision} digits, {scale} of them behind the point"
                )
    return value


Convert = Callable[[Any], Any]

_BITS: dict[type[types.DataType], int] = {
    types.ByteType: 8,
    types.ShortType: 16,
    types.IntegerType: 32,
    types.LongType: 64,
}
_TEXT = (types.StringType, types.CharType, types.VarcharType)
_ONE_FORM = (*_BITS, types.StringType, types.BinaryType, types.BooleanType)
_TIMESTAMPS = (types.TimestampType, types.TimestampNTZType)
_EPOCH_DAY = datetime.date(1970, 1, 1).toordinal()
_DECIMAL_DIGITS_MAX = 38
_DECIMAL = re.compile(r"decimal\(\s*(\d+)\s*,\s*(-?\d+)\s*\)")
"""PySpark's own, for the start of a text."""
_DECIMALS = decimal.Context(prec=2 * _DECIMAL_DIGITS_MAX, rounding=decimal.ROUND_HALF_UP)


class ValueCodec:
    """The storage format of the tuples of one schema.

    Args:
        owner: the name for errors, e.g. `state 'count'`.
        schema: of the tuples.
        as_stored: moments come back as the microseconds since 1970 that are stored, for Arrow;
            as a datetime, one of the local time zone has lost which zone that was.
        is_key: tuples that are equal get equal bytes, as the key of a map's entry needs them.

    Raises:
        OptionError: a type cannot be stored.
    """

    def __init__(
        self, owner: str, schema: types.StructType, *, as_stored: bool = False, is_key: bool = False
    ) -> None:
        self._owner, self._schema = owner, schema
        kinds = [field.dataType for field in schema.fields]
        for kind in kinds:
            _check_storable(owner, kind)
        self._store = [_storing(kind) for kind in kinds]
        self._pack = msgspec.msgpack.Encoder().encode
        wire: Any = tuple[tuple(_wire_type(kind) | None for kind in kinds)]  # type: ignore[misc]
        self._unpack = msgspec.msgpack.Decoder(wire).decode
        self._is_plain = all(map(_is_plain, kinds))
        self._is_key = is_key
        # 10 and 10.0 are equal, and so are 0.0 and -0.0, but msgpack writes each otherwise.
        self._packs_as_is = self._is_plain and (
            not is_key or all(type(kind) in _ONE_FORM for kind in kinds)
        )
        self._restore = [_restoring(kind, as_stored) for kind in kinds]
        self._row = row_maker(schema.names)

    def encode(self, value: Any) -> bytes:
        """Return the bytes of a tuple, list or Row with a value per column.

        Raises:
            StateError: the value does not fit the schema.
        """
        if self._packs_as_is and type(value) is tuple:
            # msgpack writes some types as others (a date as text): what is read back decides.
            try:
                data = self._pack(value)
                if self._unpack(data) == value:
                    return data
            except (TypeError, ValueError, OverflowError):  # msgspec's are ValueErrors
                pass
        return self._encode_with_care(value)

    def decode(self, data: bytes) -> tuple[Any, ...]:
        """Decode a tuple from the bytes of `encode`.

        Raises:
            ManifestError: the bytes are not of this schema.
        """
        try:
            if self._is_plain:
                return cast(tuple[Any, ...], self._unpack(data))
            return tuple(
                [
                    None if value is None else restore(value)
                    for restore, value in zip(self._restore, self._unpack(data), strict=True)
                ]
            )
        except (msgspec.MsgspecError, *UNREADABLE) as error:
            raise ManifestError(
                f"{self._owner}: a stored value is not of {self._schema.simpleString()}: it was "
                f"written for another schema, or is damaged. Restore an older checkpoint or a "
                f"savepoint."
            ) from error

    def decode_row(self, data: bytes) -> types.Row:
        """Decode a tuple as a `Row`."""
        return self._row(self.decode(data))

    def _encode_with_care(self, value: Any) -> bytes:
        if not isinstance(value, tuple | list) or len(value) != len(self._store):
            is_tuple = isinstance(value, tuple | list)
            what = f"it has {len(value)} values" if is_tuple else "it is no tuple"
            raise self._misfit(value, f"{what}, expected a tuple of {len(self._store)}")
        if misfit := order_misfit(value, self._schema.names):
            raise self._misfit(value, f"it {misfit}")
        stored = []
        for name, store, part in zip(self._schema.names, self._store, value, strict=True):
            try:
                stored.append(None if part is None else store(part))
            except (TypeError, ValueError, ArithmeticError) as error:
                raise self._misfit(value, f"{name}: {error}") from None
        return self._pack(_one_form(stored) if self._is_key else stored)

    def _misfit(self, value: Any, reason: str) -> StateError:
        columns = ", ".join(f"{f.name} {f.dataType.simpleString()}" for f in self._schema.fields)
        return StateError(
            f"{self._owner} holds ({columns}), and was given {value!r}: {reason}. Convert the "
            f"value, or declare the state with another schema"
        )


def _one_form(stored: Any) -> Any:
    """Return a stored value with a single form of zero and of NaN."""
    if isinstance(stored, float):
        return math.nan if math.isnan(stored) else stored + 0.0
    return [_one_form(part) for part in stored] if isinstance(stored, list | tuple) else stored


def _check_storable(owner: str, kind: types.DataType) -> None:
    if isinstance(kind, types.ArrayType):
        _check_storable(owner, kind.elementType)
    elif isinstance(kind, types.MapType):
        _check_storable(owner, kind.keyType)
        _check_storable(owner, kind.valueType)
    elif isinstance(kind, types.StructType):
        for field in kind.fields:
            _check_storable(owner, field.dataType)
    elif not isinstance(
        kind,
        types.BooleanType
        | types.BinaryType
        | types.FloatType
        | types.DoubleType
        | types.DateType
        | types.DecimalType
        | types.DayTimeIntervalType,
    ) and not isinstance(kind, (*_BITS, *_TEXT, *_TIMESTAMPS)):
        raise OptionError(
            f"{owner} has a column of type {kind.simpleString()}, which state cannot hold: use "
            f"string or binary, and convert in the processor"
        )


def _is_plain(kind: types.DataType) -> bool:
    """True if msgpack gives values of the type back as a processor expects them."""
    if isinstance(kind, types.ArrayType):
        return _is_plain(kind.elementType)
    if isinstance(kind, types.MapType):
        return type(kind.keyType) in (*_BITS, types.StringType) and _is_plain(kind.valueType)
    plain = (types.StringType, types.DoubleType, types.BooleanType, types.BinaryType)
    return type(kind) in (*_BITS, *plain)


def _wire_type(kind: types.DataType) -> Any:
    """Return the Python type in which msgpack holds values of a Spark type."""
    if type(kind) in _BITS:
        half = 1 << (_BITS[type(kind)] - 1)
        return Annotated[int, msgspec.Meta(ge=-half, le=half - 1)]
    if isinstance(kind, types.BooleanType):
        return bool
    if isinstance(kind, types.BinaryType):
        return bytes
    if isinstance(kind, types.FloatType | types.DoubleType):
        return float
    if isinstance(kind, (*_TEXT, types.DecimalType)):
        return str
    if isinstance(kind, types.ArrayType):
        return list[_wire_type(kind.elementType) | None]  # type: ignore[misc]
    if isinstance(kind, types.MapType) and _is_plain(kind):
        return dict[_wire_type(kind.keyType), _wire_type(kind.valueType) | None]  # type: ignore[misc]
    if isinstance(kind, types.MapType):
        pair: Any = tuple[_wire_type(kind.keyType), _wire_type(kind.valueType) | None]  # type: ignore[misc]
        return list[pair]
    if isinstance(kind, types.StructType):
        return tuple[tuple(_wire_type(field.dataType) | None for field in kind.fields)]  # type: ignore[misc]
    return int


def _storing(kind: types.DataType) -> Convert:
    """Return a function that makes a value, not None, fit for msgpack; it raises on a misfit."""
    if type(kind) in _BITS:
        return _integers(_BITS[type(kind)], kind)
    if isinstance(kind, types.ArrayType):
        element = _storing(kind.elementType)
        return lambda value: [
            None if part is None else element(part)
            for part in _expect(value, (list, tuple, np.ndarray), kind)
        ]
    if isinstance(kind, types.MapType):
        return _maps(kind)
    if isinstance(kind, types.StructType):
        return _structs(kind)
    if isinstance(kind, types.DecimalType):
        return _decimals(kind)
    if isinstance(kind, _TIMESTAMPS):
        return lambda value: kind.toInternal(_expect(_datetime(value), datetime.datetime, kind))
    if isinstance(kind, types.FloatType | types.DoubleType):
        number = np.float32 if isinstance(kind, types.FloatType) else float
        wanted = (float, int, np.floating, np.integer)
        return lambda value: float(number(_expect(value, wanted, kind)))
    wanted, make = _SIMPLE[types.StringType if isinstance(kind, _TEXT) else type(kind)]
    return lambda value: make(_expect(value, wanted, kind))


_SIMPLE: dict[type[types.DataType], tuple[Any, Convert]] = {
    types.BooleanType: ((bool, np.bool_), bool),
    types.StringType: (str, str),
    types.BinaryType: ((bytes, bytearray, memoryview), bytes),
    types.DateType: (datetime.date, lambda value: value.toordinal() - _EPOCH_DAY),
    types.DayTimeIntervalType: (
        datetime.timedelta,
        lambda value: value // datetime.timedelta(microseconds=1),
    ),
}


def _expect(value: Any, wanted: Any, kind: types.DataType) -> Any:
    is_flag = isinstance(value, bool) and not isinstance(kind, types.BooleanType)
    if is_flag or not isinstance(value, wanted):
        raise TypeError(f"{value!r} is a {type(value).__name__}, expected {kind.simpleString()}")
    return value


def _integers(bits: int, kind: types.DataType) -> Convert:
    half = 1 << (bits - 1)

    def store(value: Any) -> int:
        number = int(_expect(value, (int, np.integer), kind))
        if not -half <= number < half:
            raise OverflowError(f"{number} does not fit {kind.simpleString()}")
        return number

    return store


def _decimals(kind: types.DecimalType) -> Convert:
    step = decimal.Decimal(1).scaleb(-kind.scale)
    limit = decimal.Decimal(1).scaleb(kind.precision - kind.scale)

    def store(value: Any) -> str:
        number = _expect(value, decimal.Decimal, kind)
        rounded = number.quantize(step, context=_DECIMALS) if number.is_finite() else number
        if not number.is_finite() or abs(rounded) >= limit:
            raise OverflowError(f"{number} does not fit {kind.simpleString()}")
        return str(rounded or rounded.copy_abs())  # a decimal column has one zero

    return store


def _maps(kind: types.MapType) -> Convert:
    key, element = _storing(kind.keyType), _storing(kind.valueType)

    def pairs(value: Any) -> list[Any]:
        items = _expect(value, dict, kind).items()
        if any(name is None for name, _ in items):
            raise TypeError(f"{value!r} has None as a key")
        return [(key(name), None if part is None else element(part)) for name, part in items]

    return (lambda value: dict(pairs(value))) if _is_plain(kind) else pairs


def _structs(kind: types.StructType) -> Convert:
    stores = [_storing(field.dataType) for field in kind.fields]

    def store(value: Any) -> list[Any]:
        if isinstance(value, dict):
            if misfit := field_misfit(tuple(value), kind.names):
                raise ValueError(f"{value!r} {misfit}")
            value = tuple(value[name] for name in kind.names)
        if misfit := order_misfit(value, kind.names):
            raise ValueError(f"{value!r} {misfit}")
        if len(_expect(value, (tuple, list), kind)) != len(stores):
            raise ValueError(f"{value!r} has not the {len(stores)} fields of {kind.simpleString()}")
        return [
            None if part is None else one(part) for one, part in zip(stores, value, strict=True)
        ]

    return store


def _datetime(value: Any) -> Any:
    """Convert a moment of pandas' or numpy's to Python's."""
    if isinstance(value, np.datetime64):
        return value.astype("datetime64[us]").item()
    return value.to_pydatetime() if hasattr(value, "to_pydatetime") else value


def _restoring(kind: types.DataType, as_stored: bool) -> Convert:
    """Return the inverse of `_storing`, in the types that Spark's own state gives."""
    if _is_plain(kind) or (as_stored and isinstance(kind, _TIMESTAMPS)):
        return lambda value: value
    if isinstance(kind, types.DecimalType):
        return decimal.Decimal
    if isinstance(kind, types.DateType):
        return lambda value: datetime.date.fromordinal(value + _EPOCH_DAY)
    if isinstance(kind, (*_TIMESTAMPS, types.DayTimeIntervalType)):
        return kind.fromInternal
    if isinstance(kind, types.ArrayType):
        element = _restoring(kind.elementType, as_stored)
        return lambda value: [None if part is None else element(part) for part in value]
    if isinstance(kind, types.MapType):
        key, part = _restoring(kind.keyType, as_stored), _restoring(kind.valueType, as_stored)
        return lambda value: {key(k): None if v is None else part(v) for k, v in value}
    if isinstance(kind, types.StructType):
        parts = [_restoring(field.dataType, as_stored) for field in kind.fields]
        make = row_maker(kind.names)
        return lambda value: make(
            None if part is None else one(part) for one, part in zip(parts, value, strict=True)
        )
    return lambda value: value
