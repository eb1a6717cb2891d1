"""JSON Schema, as far as columns can be read or written by a schema.

Read: types, properties, required, items, additionalProperties, references to its own parts, and a
union with null, as a list of types or as oneOf or anyOf. Other rules for values (enum, minimum,
pattern and so on) are not checked. Any other part is no error until a column meets it.

A reference, `$ref` as pointer, anchor or `$id`, is looked up in the schema's own text alone. A part
where no schema can stand (in an `enum`, in a word that JSON Schema does not know) has no `$id` and
no anchor, but a pointer may lead there.

Source: https://json-schema.org/draft/2020-12/json-schema-validation and core; drafts
from 4 on agree in the parts read here; https://www.rfc-editor.org/rfc/rfc6901;
JSON-Schema-Test-Suite's ref, anchor and id.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

import pyarrow as pa
import pyarrow.compute as pc

from tallystick.codec.json.write import check_schema, write_json
from tallystick.codec.wire_format import json_value
from tallystick.errors import UNREADABLE, OptionError, RecordError

SCHEMAS_KEPT_MAX = 64
PARTS_MAX = 10_000
"""The parts of one property. References to references multiply: forty of them, each followed twice,
would fill the memory."""
DEPTH_MAX = 100
"""The depth of parts in parts, references followed: far below Python's own limit."""
MAGIC = b"\0"
ANY, UNFIT = "any", "unfit"
_UTC_MICROS = pa.timestamp("us", tz="UTC")
_PLAIN = {"boolean": pa.bool_(), "integer": pa.int64(), "number": pa.float64()}
_TEXTS = {"date": pa.date32(), "date-time": _UTC_MICROS}
_UNREAD = (
    *("allOf", "not", "if", "patternProperties", "prefixItems", "dependentSchemas"),
    *("$dynamicRef", "$recursiveRef"),
)

_ONE = (
    *("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not"),
    *("if", "then", "else", "unevaluatedItems", "unevaluatedProperties", "contentSchema"),
)
_MANY = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = (
    *("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"),
    "dependencies",
)
"""The words whose values are a schema, a list of them, or an object of them."""
_OLD_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07")
"""Drafts in which all other words beside a `$ref` are ignored, `$id` too."""


class References:
    """The targets of references within a schema.

    Args:
        root: the whole schema.
    """

    def __init__(self, root: Any) -> None:
        draft = str(root.get("$schema", "")) if isinstance(root, dict) else ""
        self._is_old = any(old_draft in draft for old_draft in _OLD_DRAFTS)
        self._id = "id" if "draft-03" in draft or "draft-04" in draft else "$id"
        self._parts: dict[str, Any] = {"": root}
        self._bases = dict[int, str]()
        self._add(root, "")

    def part(self, reference: object, holder: Any) -> Any:
        """Return the part that a reference names.

        Args:
            reference: as the schema has it.
            holder: the part that has it.

        Raises:
            LookupError: the schema has no such part.
        """
        if not isinstance(reference, str):
            raise LookupError(reference)
        address, fragment = urldefrag(_joined(self._bases.get(id(holder), ""), reference))
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._parts[f"{address}#{fragment}"]
        part = self._parts[address]
        base = self._bases.get(id(part), address)
        for token in fragment.split("/")[1:]:
            part = _inside(part, token.replace("~1", "/").replace("~0", "~"))
            base = self._bases.get(id(part), base)
        if id(part) not in self._bases:
            self._add(part, base)
        return part

    def _add(self, part: Any, base: str) -> None:
        """Note a part and all schemas in it: their names, and the base of their references."""
        waiting = [(part, base)]
        while waiting:
            schema, base = waiting.pop()
            if not isinstance(schema, dict):
                continue
            name = schema.get(self._id)
            if isinstance(name, str) and not (self._is_old and "$ref" in schema):
                address, anchor = urldefrag(_joined(base, name))
                if not name.startswith("#"):
                    base = address
                    self._parts.setdefault(base, schema)
                if anchor:
                    self._parts.setdefault(f"{base}#{anchor}", schema)
            for word in ("$anchor", "$dynamicAnchor"):
                if isinstance(schema.get(word), str):
                    self._parts.setdefault(f"{base}#{schema[word]}", schema)
            self._bases[id(schema)] = base
            waiting += [(part, base) for part in reversed(_schemas_in(schema))]


def _schemas_in(schema: dict[str, Any]) -> list[Any]:
    parts = [schema[word] for word in _ONE if word in schema]
    for word in _MANY:
        if isinstance(schema.get(word), list):
            parts += schema[word]
    for word in _NAMED:
        if isinstance(schema.get(word), dict):
            parts += schema[word].values()
    return parts


def _joined(base: str, reference: str) -> str:
    """Return a reference resolved against the base of its schema."""
    if not base or reference.startswith("#"):
        return base + reference
    try:
        return urljoin(base, reference)
    except ValueError:  # no URI
        return reference


def _inside(part: Any, token: str) -> Any:
    """Return the value that a token of a pointer names in a part.

    Raises:
        LookupError: there is no such value.
    """
    if isinstance(part, dict):
        return part[token]
    is_index = token == "0" or (token.isascii() and token.isdigit() and token[0] != "0")
    if not isinstance(part, list) or not is_index:
        raise LookupError(token)
    return part[int(token)]


@dataclass(frozen=True, slots=True)
class Shape:
    """One type in a schema.

    Args:
        kind: object, array, string, integer, number, boolean, null, ANY, or UNFIT: not understood.
        nullable: whether null is allowed.
        reason: why it is UNFIT.
        format: of a string, as the schema has it.
        properties: name and type of an object's properties.
        required: the names that an object must have.
        items: the type of an array's items; None: any.
        more: the type of further properties of an object; None: it may have no others.
    """

    kind: str
    nullable: bool = False
    reason: str = ""
    format: str = ""
    properties: tuple[tuple[str, "Shape"], ...] = ()
    required: frozenset[str] = frozenset()
    items: "Shape | None" = None
    more: "Shape | None" = None

    def __str__(self) -> str:
        """Return the type as messages name it."""
        null = " or null" if self.nullable else ""
        return f"{self.kind}{null}"


_ANYTHING = Shape(ANY, nullable=True)


@lru_cache(maxsize=SCHEMAS_KEPT_MAX)
def parse_shape(text: str) -> Shape:
    """Return the type that a schema describes.

    Raises:
        OptionError: the text is no JSON, or no JSON Schema.
    """
    try:
        schema = json_value(text)
        return _shape(schema, _Root(References(schema)), ())
    except _TooManyPartsError as error:
        raise OptionError(f"the JSON Schema has {error}") from error
    except json.JSONDecodeError as error:
        raise OptionError(f"the JSON Schema is no JSON text: {error}") from error
    except RecursionError as error:
        raise OptionError("the JSON Schema is nested too deep") from error
    except UNREADABLE as error:
        raise OptionError(f"it is no valid JSON Schema: {error!r}") from error


class _TooManyPartsError(Exception):
    """A part of a schema is too large, references followed."""


@dataclass(slots=True)
class _Root:
    """The walk through a schema: references, and counts of parts, which references multiply.

    Args:
        references: of the schema.
        part_count: parts read so far of the current property.
        depth: depth of the current part.
        is_inside: whether the current part is inside of a property.
    """

    references: References
    part_count: int = 0
    depth: int = 0
    is_inside: bool = False


def _shape(schema: Any, root: _Root, way: tuple[int, ...]) -> Shape:
    """Return the type of a part.

    Args:
        schema: the part.
        root: the walk through the whole schema.
        way: the parts named by the references that led here.
    """
    root.part_count += 1
    if root.part_count > PARTS_MAX:
        raise _TooManyPartsError(f"more than {PARTS_MAX} parts, references followed")
    if root.depth == DEPTH_MAX:
        return _unfit(f"it is more than {DEPTH_MAX} parts deep, references followed")
    root.depth += 1
    shape = _known(schema, root, way)
    root.depth -= 1
    return shape


def _known(schema: Any, root: _Root, way: tuple[int, ...]) -> Shape:
    """Return the type of a part; see `_shape`."""
    if schema is True or schema == {}:
        return _ANYTHING
    if schema is False:
        return _unfit("it allows no value (false)")
    if "$ref" in schema:
        return _referred(schema, root, way)
    for word in _UNREAD:
        if word in schema:
            return _unfit(f"it says {word}")
    for word in ("oneOf", "anyOf"):
        if word in schema:
            return _choice([_shape(part, root, way) for part in schema[word]], word)
    return _typed(schema, root, way)


def _typed(schema: dict[str, Any], root: _Root, way: tuple[int, ...]) -> Shape:
    """Return the type of a part by its word `type`; without the word, any type."""
    kinds = schema.get("type", ())
    if isinstance(kinds, list):
        return _choice([_shape({**schema, "type": kind}, root, way) for kind in kinds], "type")
    match kinds:
        case "object":
            return _object(schema, root, way)
        case "array":
            items = schema.get("items", True)
            if isinstance(items, list):
                return _unfit("its items are a tuple")
            return Shape("array", items=_shape(items, root, way))
        case "string":
            return Shape("string", format=str(schema.get("format", "")))
        case "integer" | "number" | "boolean":
            return Shape(kinds)
        case "null":
            return Shape("null", nullable=True)
        case ():
            return _ANYTHING
    return _unfit(f"its type is {kinds!r}")


def _object(schema: dict[str, Any], root: _Root, way: tuple[int, ...]) -> Shape:
    more = schema.get("additionalProperties", True)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ValueError(f"required is {required!r:.200}, expected a list of names")
    return Shape(
        "object",
        properties=tuple((name, _property(part, root, way)) for name, part in properties.items()),
        required=frozenset(required),
        more=None if more is False else _property(more, root, way),
    )


def _property(schema: Any, root: _Root, way: tuple[int, ...]) -> Shape:
    """Return the type of a property; an outermost property that is too large is UNFIT."""
    if root.is_inside:
        return _shape(schema, root, way)
    count, depth = root.part_count, root.depth
    root.is_inside = True
    try:
        return _shape(schema, root, way)
    except _TooManyPartsError as error:
        return _unfit(f"it has {error}")
    finally:
        root.is_inside, root.part_count, root.depth = False, count, depth


def _referred(holder: dict[str, Any], root: _Root, way: tuple[int, ...]) -> Shape:
    target = holder["$ref"]
    try:
        part = root.references.part(target, holder)
    except LookupError:
        is_own = isinstance(target, str) and target.startswith("#")
        where = "what it does not have" if is_own else "another schema"
        return _unfit(f"it refers to {where}, {target!r}")
    if id(part) in way and part is not True and part is not False:
        return _unfit(f"it holds itself ({target!r})")
    return _shape(part, root, (*way, id(part)))


def _choice(parts: Sequence[Shape], word: str) -> Shape:
    others = [part for part in parts if part.kind != "null"]
    if len(others) > 1:
        return _unfit(f"its {word} allows {' and '.join(part.kind for part in others)}")
    if not others:
        return Shape("null", nullable=True)
    nulls = sum(part.nullable for part in parts)
    return replace(others[0], nullable=nulls == 1 or (nulls > 1 and word != "oneOf"))


def _unfit(reason: str) -> Shape:
    return Shape(UNFIT, reason=reason)


def columns_of(shape: Shape) -> pa.Schema:
    """Return the columns that records of a schema become: its properties, in their order.

    Raises:
        OptionError: a property cannot be a column; it is named, with the reason.
    """
    if shape.kind != "object" or not shape.properties:
        raise OptionError(
            f"the JSON Schema describes {_description(shape)}, and columns are made of an object "
            f"with properties: name the columns to read yourself, as schema="
        )
    return pa.schema([(name, _type(part, name)) for name, part in shape.properties])


def _type(shape: Shape, path: str) -> pa.DataType:
    if shape.kind in _PLAIN:
        return _PLAIN[shape.kind]
    if shape.kind == "string":
        return _TEXTS.get(shape.format, pa.string())
    if shape.kind == "array" and shape.items is not None:
        return pa.list_(_type(shape.items, f"{path}[]"))
    if shape.kind == "object" and shape.properties:
        return pa.struct([(n, _type(part, f"{path}.{n}")) for n, part in shape.properties])
    raise OptionError(
        f"property {path!r} of the JSON Schema cannot be a column, it is {_description(shape)}: "
        f"name the columns to read yourself, as schema="
    )


def _description(shape: Shape) -> str:
    if shape.kind == UNFIT:
        return f"not understood: {shape.reason}"
    if shape.kind == "object":
        return "an object without properties"
    return f"of type {shape}"


@dataclass(frozen=True, slots=True)
class JsonSchemaWriter:
    """A `ValueWriter` for JSON in Confluent's wire format.

    Args:
        schema_id: the id that the registry gave the schema.
        text: the schema.
    """

    schema_id: int
    text: str

    def check(self, columns: pa.Schema) -> None:
        """See `ValueWriter.check`."""
        check_schema(columns)
        shape = parse_shape(self.text)
        if shape.kind != "object":
            raise OptionError(f"the JSON Schema is {_description(shape)}, and rows need an object")
        _check_object(shape, list(columns), "")

    def write(self, columns: pa.RecordBatch) -> pa.Array:
        """See `ValueWriter.write`."""
        self.check(columns.schema)
        shapes = dict(parse_shape(self.text).properties)
        for name, column in zip(columns.schema.names, columns.columns, strict=True):
            if name in shapes:
                _check_nulls(shapes[name], column, name)
        return write_json(columns, header=MAGIC + self.schema_id.to_bytes(4, "big"))


def _check_object(shape: Shape, fields: Sequence[pa.Field], path: str) -> None:
    known = dict(shape.properties)
    for field in fields:
        inner = f"{path}.{field.name}" if path else field.name
        part = known.get(field.name, shape.more)
        if part is None:
            raise OptionError(
                f"column {inner!r} cannot be written: the JSON Schema has no such property, only "
                f"{list(known)}, and allows no others. Leave the column out, or add it there"
            )
        _check_type(part, field.type, inner)
    for name in sorted(shape.required - {field.name for field in fields}):
        raise OptionError(
            f"there is no column {f'{path}.{name}' if path else name!r}, and the JSON Schema "
            f"requires it: add the column"
        )


def _check_type(shape: Shape, kind: pa.DataType, path: str) -> None:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if shape.kind == ANY:
        return
    if shape.kind == "object" and pa.types.is_struct(kind):
        _check_object(shape, list(kind), path)
    elif shape.kind == "object" and pa.types.is_map(kind) and shape.more and not shape.properties:
        _check_type(shape.more, kind.item_type, f"{path}[]")
    elif shape.kind == "array" and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        _check_type(shape.items or _ANYTHING, kind.value_type, f"{path}[]")
    elif not (shape.nullable and pa.types.is_null(kind)) and not _fits(shape.kind, kind):
        raise OptionError(
            f"column {path!r} is of type {kind}, and the JSON Schema has it as {shape}"
            f"{f' ({shape.reason})' if shape.reason else ''}: cast it in a map_batches, or change "
            f"the schema"
        )


def _fits(name: str, kind: pa.DataType) -> bool:
    types = pa.types
    match name:
        case "boolean":
            return bool(types.is_boolean(kind))
        case "integer":
            return bool(types.is_integer(kind))
        case "number":
            return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))
        case "string":
            texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
            times = (types.is_date32, types.is_timestamp)
            return any(is_type(kind) for is_type in (*texts, *times))
    return False


def _check_nulls(shape: Shape, column: pa.Array, path: str) -> None:
    """Raise `RecordError` for values that become null in JSON where the schema allows no null."""
    if (shape.kind == ANY and shape.nullable) or pa.types.is_null(column.type):
        return
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not shape.nullable and (column.null_count or _has_no_number(column)):
        raise RecordError(
            f"column {path!r} holds null or a number that JSON has not, and the JSON Schema has it "
            f"as {shape}: filter such rows, fill them in a map_batches, or allow null there"
        )
    present = column.drop_null() if column.null_count else column
    if pa.types.is_struct(column.type):
        parts = dict(shape.properties)
        for field, values in zip(column.type, present.flatten(), strict=True):
            if part := parts.get(field.name, shape.more):
                _check_nulls(part, values, f"{path}.{field.name}")
    elif pa.types.is_map(column.type):
        offsets = present.offsets
        items = present.items.slice(offsets[0].as_py(), offsets[-1].as_py() - offsets[0].as_py())
        _check_nulls(shape.more or _ANYTHING, items, f"{path}[]")
    elif pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        _check_nulls(shape.items or _ANYTHING, present.flatten(), f"{path}[]")


def _has_no_number(column: pa.Array) -> bool:
    if not pa.types.is_floating(column.type):
        return False
    return not pc.all(pc.is_finite(column), skip_nulls=True, min_count=0).as_py()
