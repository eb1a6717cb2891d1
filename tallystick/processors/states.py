"""Value, list and map state: PySpark's classes in name and behaviour, our entries behind them.

| state | entries behind `key group | id | key` | value |
| --- | --- | --- |
| value | the one | the tuple |
| list | the one; and per element 8 bytes: its position | the next position; the tuple |
| map | per entry the packed key | the tuple |

They are subclasses so that `isinstance` and annotations in users' code hold. PySpark's own
`__init__`s want the socket to Spark, and are not called.
"""

# ruff: noqa: N802, N803  the names are PySpark's

import struct
from collections.abc import Iterable, Iterator
from typing import Any

from pyspark.sql.streaming.stateful_processor import ListState, MapState, ValueState

from tallystick.errors import StateError
from tallystick.processors.place import Entries, Place
from tallystick.processors.schemas import struct_from_text
from tallystick.processors.values import ValueCodec
from tallystick.state.handles import StateField

VALUE, LIST, MAP = "value", "list", "map"
_POSITION = struct.Struct(">Q")

# Spark gives state back as tuples, but for `MapState.getValue`, which gives a Row.


class OurValueState(ValueState):
    """One tuple per key."""

    def __init__(self, field: StateField, place: Place) -> None:
        self._entries = Entries(field, place)
        self._codec = ValueCodec(f"state {field.name!r}", struct_from_text(field.value_schema))

    def exists(self) -> bool:
        """Whether the key has a value."""
        return self._entries.read(self._entries.key()) is not None

    def get(self) -> tuple[Any, ...] | None:
        """The value; None if there is none."""
        data = self._entries.read(self._entries.key())
        return None if data is None else self._codec.decode(data)

    def update(self, newValue: Any) -> None:
        """Set the value."""
        self._entries.write(None, self._entries.key(), self._codec.encode(newValue))

    def clear(self) -> None:
        """Remove the value."""
        self._entries.remove(None, self._entries.key())


class OurListState(ListState):
    """Tuples per key in the order in which they were appended.

    The entry with the next position makes an append cost the same however long the list is. Where
    elements expire, it does with the youngest of them.
    """

    def __init__(self, field: StateField, place: Place) -> None:
        self._name = field.name
        self._entries = Entries(field, place)
        self._codec = ValueCodec(f"state {field.name!r}", struct_from_text(field.value_schema))

    def exists(self) -> bool:
        """Whether the key has elements."""
        return self._next(self._entries.key()) > 0

    def get(self) -> Iterator[tuple[Any, ...]]:
        """The elements as they are now; writing meanwhile is safe."""
        family = self._entries.key()
        if not self._next(family):
            return iter(())
        found = self._entries.walk(family)
        return iter([self._codec.decode(data) for key, data in found if key != family])

    def put(self, newState: Iterable[Any]) -> None:
        """Replace all elements; an empty list is an error."""
        stored = self._encode(newState)
        self.clear()
        self._extend(stored)

    def appendValue(self, newState: Any) -> None:
        """Append one element."""
        self._extend([self._codec.encode(newState)])

    def appendList(self, newState: Iterable[Any]) -> None:
        """Append elements; an empty list is an error."""
        self._extend(self._encode(newState))

    def clear(self) -> None:
        """Remove all elements."""
        family = self._entries.key()
        if self._next(family):
            for key, _ in self._entries.walk(family):
                self._entries.remove(family, key)

    def _encode(self, values: Iterable[Any]) -> list[bytes]:
        if not isinstance(values, Iterable) or isinstance(values, str | bytes | dict):
            raise StateError(
                f"state {self._name!r} was given {values!r}: expected a list of tuples"
            )
        stored = [self._codec.encode(value) for value in values]
        if not stored:
            raise StateError(f"state {self._name!r} was given an empty list: use clear() for that")
        return stored

    def _extend(self, stored: list[bytes]) -> None:
        family = self._entries.key()
        start = self._next(family)
        for position, data in enumerate(stored, start):
            self._entries.write(family, family + _POSITION.pack(position), data, is_new=True)
        self._entries.write(family, family, _POSITION.pack(start + len(stored)))

    def _next(self, family: bytes) -> int:
        data = self._entries.read(family)
        return 0 if data is None else int(_POSITION.unpack(data)[0])


class OurMapState(MapState):
    """Tuples by tuples, per key; in no order that may be relied on, as in Spark."""

    def __init__(self, field: StateField, place: Place) -> None:
        self._entries = Entries(field, place)
        name = f"state {field.name!r}"
        key_schema = struct_from_text(field.key_schema)
        self._key_codec = ValueCodec(f"{name}, the key", key_schema, is_key=True)
        self._codec = ValueCodec(name, struct_from_text(field.value_schema))

    def exists(self) -> bool:
        """Whether the key has entries."""
        return self._entries.has_any(self._entries.key())

    def getValue(self, key: Any) -> Any:
        """The value of an entry as a Row; None if there is none."""
        data = self._entries.read(self._at(key))
        return None if data is None else self._codec.decode_row(data)

    def containsKey(self, key: Any) -> bool:
        """Whether there is such an entry."""
        return self._entries.read(self._at(key)) is not None

    def updateValue(self, key: Any, value: Any) -> None:
        """Set an entry."""
        data = self._codec.encode(value)
        self._entries.write(self._entries.key(), self._at(key), data)

    def iterator(self) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """The entries as they are now; writing meanwhile is safe."""
        return iter([(self._key_of(key), self._codec.decode(data)) for key, data in self._all()])

    def keys(self) -> Iterator[tuple[Any, ...]]:
        """The keys as they are now."""
        return iter([self._key_of(key) for key, _ in self._all()])

    def values(self) -> Iterator[tuple[Any, ...]]:
        """The values as they are now."""
        return iter([self._codec.decode(data) for _, data in self._all()])

    def removeKey(self, key: Any) -> None:
        """Remove an entry; nothing happens if there is none."""
        self._entries.remove(self._entries.key(), self._at(key))

    def clear(self) -> None:
        """Remove all entries."""
        family = self._entries.key()
        for key, _ in self._all():
            self._entries.remove(family, key)

    def _at(self, key: Any) -> bytes:
        return self._entries.key() + self._key_codec.encode(key)

    def _all(self) -> list[tuple[bytes, bytes]]:
        return self._entries.walk(self._entries.key())

    def _key_of(self, key: bytes) -> tuple[Any, ...]:
        return self._key_codec.decode(key[len(self._entries.key()) :])
