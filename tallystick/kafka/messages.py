"""Kafka's messages as objects and bytes, after Kafka's own schemas in `messages.json`.

A class for each request, response and structure within one, named as in the schemas; its fields are
in snake case. A codec is made of a schema once for each version: neighbouring numbers are read and
written by one call of `struct`, since answers about thousands of partitions are mostly numbers.

Invariant: what a broker sends is never trusted. A length beyond the end, or a null where the schema
has none, is a `ValueError`, an `IndexError` or a `struct.error`.

Source: Kafka's protocol guide; KIP-482 (flexible versions, tagged fields); Kafka's message
generator for which values a version may leave out.
"""

import json
import re
import struct
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from operator import attrgetter
from typing import Any, ClassVar, TypeVar
from uuid import UUID

import numpy as np

Data = memoryview
Reader = Callable[[Data, int], tuple[Any, int]]
"""Reads a value at a position; returns it, and the position after it."""
RowsReader = Callable[[Data, int, int], tuple["Rows", int] | None]
"""Reads so many structures at a position."""
Writer = Callable[[list[Any], Any], None]
"""Appends the bytes of a value."""

Kind = TypeVar("Kind", bound="Message")

NEWEST = 1 << 15
NO_ID = UUID(int=0)
"""The id of a topic where a broker, or a message's version, knows none (KIP-516)."""
NUMBERS = {
    "bool": "?",
    "int8": "b",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "int64": "q",
}
"""Kafka's numbers, and their letters in a format of `struct`."""
FEW = 8
"""Lists of fewer numbers, such as replicas, are read without a look at their length."""
HEADER = struct.Struct(">hhi")
"""The head of a request: API, version, correlation id."""


class Message:
    """A message to send, or a structure within one; fields that are not given have defaults."""

    fields: ClassVar[tuple["Field", ...]] = ()
    names: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, **values: Any) -> None:
        if not values.keys() <= self.names:
            unknown = ", ".join(sorted(values.keys() - self.names))
            raise TypeError(f"{type(self).__name__} has no field {unknown}")
        self.__dict__.update(values)


class Request(Message):
    """A request of one API.

    Args:
        version: to send it in, when that is known already.
        min_version: the lowest version that says what the request means.
        max_version: the highest one; None: the newest that the schema has.
        **values: the fields.
    """

    API_KEY: ClassVar[int]
    versions: ClassVar[tuple[int, int]]
    """The lowest and the newest version of the schema."""
    flexible_since: ClassVar[int]
    """The first version with tagged fields (KIP-482)."""
    response: ClassVar[type[Message]]

    def __init__(
        self,
        *,
        version: int | None = None,
        min_version: int | None = None,
        max_version: int | None = None,
        **values: Any,
    ) -> None:
        super().__init__(**values)
        oldest, newest = self.versions
        low, high = max(oldest, min_version or 0), newest if max_version is None else max_version
        self.version = version
        """The version to send it in; None until the broker's are known."""
        self.speaks = (low, min(high, newest)) if version is None else (version, version)
        """The lowest and the highest version that it may be sent in."""


class Field:
    """A field of a structure.

    Args:
        schema: Kafka's.
        owner: the class of the structure; a class of the field's own becomes an attribute of it.
    """

    def __init__(self, schema: dict[str, Any], owner: type[Message]) -> None:
        kind = schema["type"]
        self.name = snake_case(schema["name"])
        self.is_array = kind.startswith("[]")
        self.kind = kind.removeprefix("[]")
        self.versions = _version_range(schema["versions"])
        self.nullable = _version_range(schema.get("nullableVersions", "none"))
        self.tag = int(schema.get("tag", -1))
        self.tagged = _version_range(schema.get("taggedVersions", "none"))
        self.ignorable = bool(schema.get("ignorable", False))
        self.struct: Any = None
        if "fields" in schema:
            self.struct = _structure(self.kind, schema["fields"], Message)
            setattr(owner, self.kind, self.struct)
        self.default = self._default(schema.get("default"))

    def _default(self, text: Any) -> Any:
        if text == "null":
            return None
        if self.is_array:
            return ()
        if self.struct is not None:
            return self.struct()
        if self.kind == "bool":
            return str(text).lower() == "true"
        if self.kind in NUMBERS:
            return int(str(text or 0), 0)
        return {"string": text or "", "uuid": NO_ID}.get(self.kind, b"")

    @property
    def is_number(self) -> bool:
        """True if the field's bytes are one number of a fixed size."""
        return self.kind in NUMBERS and not self.is_array

    def has_default(self, message: Message) -> bool:
        """True if a message has no value here but what a version without the field stands for."""
        value = getattr(message, self.name)
        return bool(value == self.default or (self.is_array and value is not None and not value))

    def is_in(self, version: int) -> bool:
        """True if the version has the field, tagged or not."""
        return version in self.versions

    def is_tagged(self, version: int) -> bool:
        """True if the field is among the version's tagged ones (KIP-482)."""
        return version in self.tagged


def snake_case(name: str) -> str:
    """Return a name of Kafka's schemas as Python writes it: `IsrNodes` is `isr_nodes`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def encode(message: Message, version: int, flexible_since: int) -> list[Any]:
    """Return the bytes of a message without its header, in parts that are copied only once.

    Raises:
        ValueError: it has a value that the version cannot hold, and must not lose.
    """
    parts: list[Any] = []
    kind: Any = type(message)
    _struct_writer(kind, version, version >= flexible_since)(parts, message)
    return parts


def decode(kind: Any, version: int, flexible_since: int, data: Data) -> Any:
    """Return the message at the beginning of `data`, as a named tuple.

    It has the fields of its version, and as attributes of its class the version and the defaults of
    all other fields. Its records are views of `data`.

    Raises:
        ValueError, IndexError, struct.error: the bytes are no such message.
    """
    message, _ = _struct_reader(kind, version, version >= flexible_since)(data, 0)
    return message


def encode_request(request: Request, correlation_id: int, client_id: str) -> bytes:
    """Return the frame of a request that has its version: length, header and message."""
    version, since = request.version, request.flexible_since
    assert version is not None, "set_version comes first"
    name = client_id.encode()
    header = HEADER.pack(request.API_KEY, version, correlation_id)
    header += struct.pack(">h", len(name)) + name + (b"\0" if version >= since else b"")
    parts = [header, *encode(request, version, since)]
    return b"".join([struct.pack(">i", sum(map(len, parts))), *parts])


def response_header_size(request: type[Request], version: int, data: Data) -> int:
    """Return where the message begins in an answer; ApiVersions never has tags there (KIP-511)."""
    is_flexible = version >= request.flexible_since and request.__name__ != "ApiVersionsRequest"
    return _skip_tags(data, 4) if is_flexible else 4


def requests() -> dict[str, type[Request]]:
    """Return the class of each request that the schemas have, by its name."""
    schemas = json.loads(files("tallystick.kafka").joinpath("messages.json").read_bytes())
    del schemas["origin"]
    return {f"{api}Request": _request(api, schema) for api, schema in schemas.items()}


def _request(api: str, schema: dict[str, Any]) -> type[Request]:
    kind = _structure(f"{api}Request", schema["request"], Request)
    kind.API_KEY = schema["key"]
    kind.versions = tuple(schema["versions"])
    kind.flexible_since = _version_range(schema["flexible"]).start
    kind.response = _structure(f"{api}Response", schema["response"], Message)
    return kind


def _structure(name: str, fields: Sequence[dict[str, Any]], base: type[Kind]) -> type[Kind]:
    kind: Any = type(name, (base,), {})
    kind.fields = tuple(Field(schema, kind) for schema in fields)
    kind.names = frozenset(field.name for field in kind.fields)
    for field in kind.fields:
        setattr(kind, field.name, field.default)
    structure: type[Kind] = kind
    return structure


def _version_range(text: str) -> range:
    if text == "none":
        return range(NEWEST, NEWEST)
    low, dash, high = text.removesuffix("+").partition("-")
    last = int(high) if dash else int(low)
    return range(int(low), NEWEST if text.endswith("+") else last + 1)


def _runs(fields: Sequence[Field]) -> Iterator[tuple[Field, ...]]:
    """Yield the fields in order; neighbouring numbers together, others alone."""
    run: tuple[Field, ...] = ()
    for field in fields:
        if field.is_number:
            run += (field,)
            continue
        if run:
            yield run
            run = ()
        yield (field,)
    if run:
        yield run


def _plain_and_tagged(kind: Any, version: int) -> tuple[list[Field], list[Field]]:
    there = [field for field in kind.fields if field.is_in(version)]
    tagged = [field for field in there if field.is_tagged(version)]
    return [field for field in there if field not in tagged], tagged


# Reading ------------------------------------------------------------------------------------------


@cache
def _decoded_class(kind: Any, version: int, names: tuple[str, ...]) -> Any:
    """Return the class of messages that came in a version: named tuples of these fields."""
    rest = {name: value for name, value in vars(kind).items() if name not in names}
    rest |= {"__slots__": (), "version": version}
    for dropped in ("__dict__", "__weakref__"):
        rest.pop(dropped, None)
    return type(kind.__name__, (namedtuple(kind.__name__, names),), rest)


@cache
def _struct_reader(kind: Any, version: int, is_flexible: bool) -> Reader:
    plain, tagged = _plain_and_tagged(kind, version)
    names = tuple(field.name for field in (*plain, *tagged))
    make = _decoded_class(kind, version, names)._make
    steps: list[tuple[Any, int]] = []  # a reader; for numbers, their size
    for run in _runs(plain):
        if run[0].is_number:
            numbers = struct.Struct(">" + "".join(NUMBERS[field.kind] for field in run))
            steps.append((numbers.unpack_from, numbers.size))
        else:
            steps.append((_field_reader(run[0], version, is_flexible), 0))
    by_tag = {
        field.tag: (index, _field_reader(field, version, is_flexible))
        for index, field in enumerate(tagged, len(plain))
    }
    defaults = [field.default for field in tagged]

    def read(data: Data, at: int) -> tuple[Any, int]:
        values: list[Any] = []
        for reader, size in steps:
            if size:
                values += reader(data, at)
                at += size
            else:
                value, at = reader(data, at)
                values.append(value)
        if is_flexible:
            values += defaults
            at = _read_tags(data, at, by_tag, values) if data[at] else at + 1
        return make(values), at

    return read


class Rows(Sequence[Any]):
    """Structures of numbers, kept as received: each becomes an object only when it is read.

    A leader answers DescribeProducers with every producer that wrote to a partition within a day,
    and the request cannot select producers: `where` finds one's structures, and makes no others.

    Args:
        data: their bytes.
        row: the numbers of one structure.
        columns: the same, for numpy.
        make: makes an object of the numbers.
    """

    def __init__(
        self, data: Data, row: struct.Struct, columns: np.dtype[Any], make: Callable[[Any], Any]
    ) -> None:
        self._data, self._row, self._columns, self._make = data, row, columns, make

    def __len__(self) -> int:
        return len(self._data) // self._row.size

    def __iter__(self) -> Iterator[Any]:
        return map(self._make, self._row.iter_unpack(self._data))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        at = range(len(self))[index] * self._row.size
        return self._make(self._row.unpack_from(self._data, at))

    def where(self, name: str, value: int) -> Iterator[Any]:
        """Yield the structures that have a given value in a field."""
        column = np.frombuffer(self._data, self._columns)[name]
        return (self[index] for index in np.flatnonzero(column == value).tolist())


def _rows_reader(kind: Any, version: int, is_flexible: bool) -> RowsReader | None:
    """Return a reader for many structures of a kind; None if the kind has more than numbers.

    The reader itself returns None where a structure in the data has tagged fields.
    """
    plain, tagged = _plain_and_tagged(kind, version)
    if tagged or not plain or not all(field.is_number for field in plain):
        return None
    letters = [(field.name, f">{NUMBERS[field.kind]}") for field in plain]
    pad = "x" if is_flexible else ""
    row = struct.Struct(">" + "".join(letter[1] for _, letter in letters) + pad)
    columns = np.dtype([*letters, ("tag_count", "u1")] if is_flexible else letters)
    make = _decoded_class(kind, version, tuple(name for name, _ in letters))._make

    def read(data: Data, at: int, count: int) -> tuple[Rows, int] | None:
        end = _end(data, at, count * row.size)
        if is_flexible and any(data[at + row.size - 1 : end : row.size].tobytes()):
            return None
        return Rows(data[at:end], row, columns, make), end

    return read


def _read_tags(
    data: Data, at: int, by_tag: dict[int, tuple[int, Reader]], values: list[Any]
) -> int:
    """Read the tagged fields that the schema knows, and skip all others."""
    count, at = _unsigned(data, at)
    for _ in range(count):
        tag, at = _unsigned(data, at)
        size, at = _unsigned(data, at)
        end = _end(data, at, size)
        if tag in by_tag:
            index, reader = by_tag[tag]
            values[index], _ = reader(data[:end], at)
        at = end
    return at


def _skip_tags(data: Data, at: int) -> int:
    return _read_tags(data, at, {}, [])


def _field_reader(field: Field, version: int, is_flexible: bool) -> Reader:
    is_nullable = version in field.nullable
    if field.is_array:
        return _array_reader(field, version, is_flexible, is_nullable=is_nullable)
    if field.struct is not None:
        reader = _struct_reader(field.struct, version, is_flexible)
        return _maybe_struct(reader) if is_nullable else reader
    return _value_reader(field.kind, is_flexible, is_nullable, field.name)


def _maybe_struct(reader: Reader) -> Reader:
    def read(data: Data, at: int) -> tuple[Any, int]:
        is_there = data[at] < 128  # -1 is null, in one byte
        return reader(data, at + 1) if is_there else (None, at + 1)

    return read


@cache
def _value_reader(kind: str, is_flexible: bool, is_nullable: bool, name: str) -> Reader:
    if kind in NUMBERS:
        number = struct.Struct(">" + NUMBERS[kind])
        return lambda data, at: (number.unpack_from(data, at)[0], at + number.size)
    if kind == "uuid":
        return lambda data, at: (UUID(bytes=bytes(data[at : at + 16])), at + 16)
    converters: dict[str, Callable[[Data], Any]] = {"string": _text, "bytes": bytes}
    convert = converters.get(kind, _view)
    width = ">h" if kind == "string" else ">i"
    length_at = _length_reader(struct.Struct(width), is_flexible)

    def read(data: Data, at: int) -> tuple[Any, int]:
        size, at = length_at(data, at)
        if size < 0:
            _check_null(size, is_nullable, name)
            return None, at
        end = _end(data, at, size)
        return convert(data[at:end]), end

    return read


def _array_reader(field: Field, version: int, is_flexible: bool, *, is_nullable: bool) -> Reader:
    name, count_at = field.name, _length_reader(struct.Struct(">i"), is_flexible)
    letter = NUMBERS.get(field.kind, "")
    width = struct.calcsize(f">{letter}") if letter else 1
    few = [struct.Struct(f">{n}{letter}").unpack_from for n in range(FEW) if letter]
    rows = None
    if field.struct is not None:
        reader = _struct_reader(field.struct, version, is_flexible)
        rows = _rows_reader(field.struct, version, is_flexible)
    else:
        reader = _value_reader(field.kind, is_flexible, False, name)

    def read(data: Data, at: int) -> tuple[Any, int]:
        count, at = count_at(data, at)
        if count < 0:
            _check_null(count, is_nullable, name)
            return None, at
        if count < len(few):
            return list(few[count](data, at)), at + count * width
        end = _end(data, at, count * width)  # an item has a byte or more
        if letter:
            return list(struct.unpack_from(f">{count}{letter}", data, at)), end
        if rows is not None and count and (whole := rows(data, at, count)):
            return whole
        items = []
        for _ in range(count):
            item, at = reader(data, at)
            items.append(item)
        return items, at

    return read


def _length_reader(fixed: struct.Struct, is_flexible: bool) -> Reader:
    if not is_flexible:
        return lambda data, at: (fixed.unpack_from(data, at)[0], at + fixed.size)

    def read(data: Data, at: int) -> tuple[int, int]:
        length = data[at]
        if length < 128:
            return length - 1, at + 1
        length, at = _unsigned(data, at)
        return length - 1, at

    return read


def _unsigned(data: Data, at: int) -> tuple[int, int]:
    """Read an unsigned varint of at most five bytes."""
    value = 0
    for shift in range(0, 35, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a varint is longer than five bytes")


def _end(data: Data, at: int, size: int) -> int:
    end = at + size
    if end > len(data):
        raise ValueError(f"{size} bytes announced, {len(data) - at} are there")
    return end


def _check_null(length: int, is_nullable: bool, name: str) -> None:
    if length < -1:
        raise ValueError(f"{name} has the length {length}")
    if not is_nullable:
        raise ValueError(f"{name} is null")


def _text(data: Data) -> str:
    return str(data, "utf-8")


def _view(data: Data) -> Data:
    return data


# Writing ------------------------------------------------------------------------------------------


@cache
def _struct_writer(kind: Any, version: int, is_flexible: bool) -> Writer:
    plain, tagged = _plain_and_tagged(kind, version)
    steps: list[tuple[Any, Writer]] = []
    for run in _runs(plain):
        if run[0].is_number:
            steps.append((None, _numbers_writer(run)))
        else:
            steps.append((run[0].name, _field_writer(run[0], version, is_flexible)))
    tags = [(field, _field_writer(field, version, is_flexible)) for field in tagged]
    tags.sort(key=lambda pair: pair[0].tag)
    lost = [field for field in kind.fields if not (field.is_in(version) or field.ignorable)]

    def write(parts: list[Any], message: Any) -> None:
        for field in lost:
            if not field.has_default(message):
                raise ValueError(f"{kind.__name__} version {version} cannot hold {field.name}")
        for name, writer in steps:
            writer(parts, message if name is None else getattr(message, name))
        if is_flexible:
            _write_tags(parts, message, tags)

    return write


def _numbers_writer(run: Sequence[Field]) -> Writer:
    pack = struct.Struct(">" + "".join(NUMBERS[field.kind] for field in run)).pack
    if len(run) == 1:
        (name,) = (field.name for field in run)
        return lambda parts, message: parts.append(pack(getattr(message, name)))
    numbers_of = attrgetter(*(field.name for field in run))

    def write(parts: list[Any], message: Any) -> None:
        parts.append(pack(*numbers_of(message)))

    return write


def _write_tags(parts: list[Any], message: Any, tags: Sequence[tuple[Field, Writer]]) -> None:
    present = [(field, writer) for field, writer in tags if not field.has_default(message)]
    parts.append(_unsigned_bytes(len(present)))
    for field, writer in present:
        value: list[Any] = []
        writer(value, getattr(message, field.name))
        size = sum(map(len, value))
        parts += [_unsigned_bytes(field.tag), _unsigned_bytes(size), *value]


def _field_writer(field: Field, version: int, is_flexible: bool) -> Writer:
    is_nullable = version in field.nullable
    if field.is_array:
        return _array_writer(field, version, is_flexible, is_nullable=is_nullable)
    if field.struct is not None:
        writer = _struct_writer(field.struct, version, is_flexible)
        return _maybe_struct_writer(writer) if is_nullable else writer
    return _value_writer(field.kind, is_flexible, is_nullable, field.name)


def _maybe_struct_writer(writer: Writer) -> Writer:
    def write(parts: list[Any], value: Any) -> None:
        parts.append(b"\xff" if value is None else b"\x01")
        if value is not None:
            writer(parts, value)

    return write


@cache
def _value_writer(kind: str, is_flexible: bool, is_nullable: bool, name: str) -> Writer:
    if kind in NUMBERS:
        pack = struct.Struct(">" + NUMBERS[kind]).pack
        return lambda parts, value: parts.append(pack(value))
    if kind == "uuid":
        return lambda parts, value: parts.append((value or NO_ID).bytes)
    length = _length_writer(">h" if kind == "string" else ">i", is_flexible)

    def write(parts: list[Any], value: Any) -> None:
        if value is None:
            _check_null(-1, is_nullable, name)
            parts.append(length(-1))
            return
        data = value.encode() if kind == "string" else memoryview(value).cast("B")
        parts += [length(len(data)), data]

    return write


def _array_writer(field: Field, version: int, is_flexible: bool, *, is_nullable: bool) -> Writer:
    name, length, letter = field.name, _length_writer(">i", is_flexible), NUMBERS.get(field.kind)
    writer = (
        _struct_writer(field.struct, version, is_flexible)
        if field.struct is not None
        else _value_writer(field.kind, is_flexible, False, name)
    )

    def write(parts: list[Any], items: Any) -> None:
        if items is None:
            _check_null(-1, is_nullable, name)
            parts.append(length(-1))
            return
        parts.append(length(len(items)))
        if letter:
            parts.append(struct.pack(f">{len(items)}{letter}", *items))
            return
        for item in items:
            writer(parts, item)

    return write


def _length_writer(fixed: str, is_flexible: bool) -> Callable[[int], bytes]:
    if is_flexible:
        return lambda length: _unsigned_bytes(length + 1)
    return struct.Struct(fixed).pack


def _unsigned_bytes(value: int) -> bytes:
    if value < 128:
        return bytes((value,))
    data = bytearray()
    while value >= 128:
        data.append(value & 127 | 128)
        value >>= 7
    data.append(value)
    return bytes(data)
