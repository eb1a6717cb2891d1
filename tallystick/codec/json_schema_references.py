"""The parts of a JSON Schema that its references name: `$ref` as pointer, anchor or `$id`.

Only the schema's own text is looked at. A part where no schema can stand (in an `enum`, in a word
that JSON Schema does not know) has no `$id` and no anchor, but a pointer may lead there.

Source: https://json-schema.org/draft/2020-12/json-schema-core#section-8.2 and its drafts from 4 on;
https://www.rfc-editor.org/rfc/rfc6901; JSON-Schema-Test-Suite's ref, anchor and id.
"""

from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

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
