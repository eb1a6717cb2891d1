"""A writer's Avro schema as a tree, names resolved.

Source: https://avro.apache.org/docs/1.12.0/specification/#schema-declaration
"""

import json
from dataclasses import dataclass, field
from typing import Any

from tallystick.codec.wire_format import SchemaError, SchemaTexts, json_value
from tallystick.errors import UNREADABLE

PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
FIXED_SIZE_MAX = 2**31 - 1
"""No record is larger."""
NAMED = ("record", "error", "enum", "fixed")


@dataclass(slots=True, eq=False)
class Node:
    """A type in a schema; a record that holds itself is a cycle.

    Args:
        kind: a primitive's name, or record, enum, fixed, array, map, union.
        name: full name of a named type.
        logical: the logical type, "" without; ones with a wrong form are ignored, says the spec.
        fields: name and type of a record's fields.
        parts: the type of an array's items or a map's values; a union's branches.
        symbols: of an enum.
        size: of a fixed, bytes.
        precision: of a decimal, digits.
        scale: of a decimal, digits after the point.
    """

    kind: str
    name: str = ""
    logical: str = ""
    fields: list[tuple[str, "Node"]] = field(default_factory=list)
    parts: list["Node"] = field(default_factory=list)
    symbols: list[str] = field(default_factory=list)
    size: int = 0
    precision: int = 0
    scale: int = 0

    def __str__(self) -> str:
        """Return the type as messages name it."""
        if self.kind == "union":
            return "union [" + ", ".join(str(part) for part in self.parts) + "]"
        if self.kind in ("array", "map"):
            return f"{self.kind} of {self.parts[0]}"
        text = f"{self.kind} {self.name}" if self.name else self.kind
        if self.logical == "decimal":
            return f"decimal({self.precision},{self.scale}) as {text}"
        return f"{self.logical} as {text}" if self.logical else text


def parse_schema(texts: SchemaTexts) -> Node:
    """Return the tree of the last text, which may use names that earlier texts define.

    Raises:
        SchemaError: a text is no JSON, or no Avro schema.
    """
    names: dict[str, Node] = {}
    try:
        trees = [_parse(json_value(text), "", names) for text in texts]
    except json.JSONDecodeError as error:
        raise SchemaError(f"it is no JSON text: {error}") from error
    except RecursionError as error:
        raise SchemaError("its JSON text is nested too deep") from error
    except UNREADABLE as error:
        raise SchemaError(f"it is no valid Avro schema: {error!r}") from error
    return trees[-1]


def _parse(schema: Any, namespace: str, names: dict[str, Node]) -> Node:
    if isinstance(schema, str):
        return _named(schema, namespace, names)
    if isinstance(schema, list):
        return Node("union", parts=[_parse(branch, namespace, names) for branch in schema])
    kind = schema["type"]
    if isinstance(kind, dict | list):
        return _parse(kind, namespace, names)
    if kind == "array":
        return Node("array", parts=[_parse(schema["items"], namespace, names)])
    if kind == "map":
        return Node("map", parts=[_parse(schema["values"], namespace, names)])
    if kind in NAMED:
        return _define(kind, schema, namespace, names)
    node = _named(kind, namespace, names)
    return _with_logical_type(node, schema) if kind in PRIMITIVES else node


def _named(name: str, namespace: str, names: dict[str, Node]) -> Node:
    if name in PRIMITIVES:
        return Node(name)
    for full in (_full_name(name, namespace), name):  # the bare name: written by old libraries
        if full in names:
            return names[full]
    raise SchemaError(
        f"it uses the type {name!r}, which neither it nor a schema that it references defines"
    )


def _full_name(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"


def _define(kind: str, schema: dict[str, Any], namespace: str, names: dict[str, Node]) -> Node:
    own_namespace = schema.get("namespace", namespace) or ""
    name = _full_name(schema["name"], own_namespace)
    inner = name.rpartition(".")[0]
    node = names[name] = Node("record" if kind == "error" else kind, name)
    if kind == "enum":
        node.symbols = [str(symbol) for symbol in schema["symbols"]]
    elif kind == "fixed":
        node.size = int(schema["size"])
        if not 0 <= node.size <= FIXED_SIZE_MAX:
            raise SchemaError(f"the size of fixed {name} is {node.size}")
        _with_logical_type(node, schema)
    else:
        for field in schema["fields"]:
            node.fields.append((str(field["name"]), _parse(field["type"], inner, names)))
    return node


_CARRIERS = {
    "date": ("int",),
    "time-millis": ("int",),
    "time-micros": ("long",),
    "timestamp-millis": ("long",),
    "timestamp-micros": ("long",),
    "timestamp-nanos": ("long",),
    "local-timestamp-millis": ("long",),
    "local-timestamp-micros": ("long",),
    "local-timestamp-nanos": ("long",),
    "uuid": ("string", "fixed"),
    "decimal": ("bytes", "fixed"),
}


def _with_logical_type(node: Node, schema: dict[str, Any]) -> Node:
    logical = schema.get("logicalType")
    if not isinstance(logical, str) or node.kind not in _CARRIERS.get(logical, ()):
        return node
    if logical == "decimal":
        precision, scale = schema.get("precision"), schema.get("scale", 0)
        if not (isinstance(precision, int) and isinstance(scale, int)):
            return node
        if not (precision > 0 and 0 <= scale <= precision):
            return node
        node.precision, node.scale = precision, scale
    node.logical = logical
    return node
