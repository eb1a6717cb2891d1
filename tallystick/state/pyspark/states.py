"""Value, list and map state, and the handle that `init` gets: PySpark's API on our entries.

| state | entries: `key group | id | key`, then | value |
| --- | --- | --- |
| value | the one | the tuple |
| list | the one; and per element 8 bytes: its position | the next position; the tuple |
| map | per entry the packed key | the tuple |

The classes are subclasses of PySpark's, so that `isinstance` and annotations in users' code hold.
PySpark's own `__init__`s want the socket to Spark, and are not called.
"""

# ruff: noqa: N802, N803  the names are PySpark's

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from pyspark.sql.streaming.stateful_processor import (
    ListState,
    MapState,
    StatefulProcessorHandle,
    ValueState,
)
from pyspark.sql.types import StructType

from tallystick.errors import OptionError, StateError
from tallystick.state.catalog import StateField
from tallystick.state.functions.processing import (
    DELETED,
    LIST,
    MAP,
    NO_TIME,
    PROCESSING_TIME,
    VALUE,
    StateDeclaration,
)
from tallystick.state.pyspark.current_key import CurrentKey, Entries, Timers
from tallystick.state.pyspark.values import (
    ValueCodec,
    struct_from_text,
    struct_of,
)
from tallystick.text import SPAN_MAX_MS

_POSITION = struct.Struct(">Q")

# Spark gives state back as tuples, but for `MapState.getValue`, which gives a Row.


class OurValueState(ValueState):
    """One tuple per key."""

    def __init__(self, field: StateField, current: CurrentKey) -> None:
        self._entries = Entries(field, current)
        self._codec = ValueCodec(f"state {field.name!r}", struct_from_text(field.value_schema))

    def exists(self) -> bool:
        """True if the key has a value."""
        return self._entries.read(self._entries.key()) is not None

    def get(self) -> tuple[Any, ...] | None:
        """Return the value; None if there is none."""
        data = self._entries.read(self._entries.key())
        return None if data is None else self._codec.decode(data)

    def update(self, newValue: Any) -> None:
        """Set the value."""
        self._entries.write(None, self._entries.key(), self._codec.encode(newValue))

    def clear(self) -> None:
        """Remove the value."""
        self._entries.remove(None, self._entries.key())


class OurListState(ListState):
    """A list of tuples per key, in the order of appending.

    The entry with the next position makes an append cost the same however long the list is. Where
    elements expire, this entry expires with the youngest element.
    """

    def __init__(self, field: StateField, current: CurrentKey) -> None:
        self._name = field.name
        self._entries = Entries(field, current)
        self._codec = ValueCodec(f"state {field.name!r}", struct_from_text(field.value_schema))

    def exists(self) -> bool:
        """True if the key has elements."""
        return self._next(self._entries.key()) > 0

    def get(self) -> Iterator[tuple[Any, ...]]:
        """Return the elements as they are now; writing meanwhile is safe."""
        family = self._entries.key()
        if not self._next(family):
            return iter(())
        entries = self._entries.walk(family)
        return iter([self._codec.decode(data) for key, data in entries if key != family])

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
    """A map from tuples to tuples per key; in no order that may be relied on, as in Spark."""

    def __init__(self, field: StateField, current: CurrentKey) -> None:
        self._entries = Entries(field, current)
        name = f"state {field.name!r}"
        key_schema = struct_from_text(field.key_schema)
        self._key_codec = ValueCodec(f"{name}, the key", key_schema, is_key=True)
        self._codec = ValueCodec(name, struct_from_text(field.value_schema))

    def exists(self) -> bool:
        """True if the key has entries."""
        return self._entries.has_any(self._entries.key())

    def getValue(self, key: Any) -> Any:
        """Return the value of an entry as a Row; None if there is none."""
        data = self._entries.read(self._at(key))
        return None if data is None else self._codec.decode_row(data)

    def containsKey(self, key: Any) -> bool:
        """True if the map has an entry of this key."""
        return self._entries.read(self._at(key)) is not None

    def updateValue(self, key: Any, value: Any) -> None:
        """Set an entry."""
        data = self._codec.encode(value)
        self._entries.write(self._entries.key(), self._at(key), data)

    def iterator(self) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """Return the entries as they are now; writing meanwhile is safe."""
        return iter([(self._key_of(key), self._codec.decode(data)) for key, data in self._all()])

    def keys(self) -> Iterator[tuple[Any, ...]]:
        """Return the keys of all present entries."""
        return iter([self._key_of(key) for key, _ in self._all()])

    def values(self) -> Iterator[tuple[Any, ...]]:
        """Return the values of all present entries."""
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


Schema = StructType | str


class Fields(Protocol):
    """The source of the ids of declared states."""

    def field(
        self, name: str, kind: str, key_schema: Schema | None, value_schema: Schema, ttl_ms: int
    ) -> StateField:
        """Return the field of a declared state, with its id."""
        ...

    def drop(self, name: str) -> None:
        """Drop a state."""
        ...


class DeclaredFields:
    """In a task: the states that the driver settled, with schemas that need no JVM."""

    def __init__(self, lookup: Callable[[str], StateField | None]) -> None:
        self._lookup = lookup

    def field(
        self, name: str, kind: str, key_schema: Schema | None, value_schema: Schema, ttl_ms: int
    ) -> StateField:
        """Return the field that the driver settled."""
        field = self._lookup(name)
        if field is None or field.kind != kind or field.ttl_ms != ttl_ms:
            what = f"a {field.kind} state with TTL {field.ttl_ms}" if field else "no such state"
            raise StateError(
                f"init() asks for {kind} state {name!r} with TTL {ttl_ms}, and on the driver it "
                f"declared {what}: it has to declare the same states each time"
            )
        return field

    def drop(self, name: str) -> None:
        """Do nothing: the driver has dropped the state."""


class FieldDeclarations:
    """On the driver: a list of the states that `init` declares."""

    def __init__(self) -> None:
        self.declared: list[StateDeclaration] = []

    def field(
        self, name: str, kind: str, key_schema: Schema | None, value_schema: Schema, ttl_ms: int
    ) -> StateField:
        """Note a declared state; return a field with an id under which nothing is stored."""
        self._check_not_both(name, deleted=True)
        try:
            key_text = "" if key_schema is None else struct_of(key_schema).json()
            value_text = struct_of(value_schema).json()
        except OptionError as error:
            raise OptionError(f"state {name!r}: {error}") from error
        state = StateDeclaration(name, kind, key_text, value_text, ttl_ms)
        self.declared.append(state)
        return StateField(name, 0, kind, key_text, state.value_schema, ttl_ms)

    def drop(self, name: str) -> None:
        """Note that a state is to be dropped."""
        self._check_not_both(name, deleted=False)
        self.declared.append(StateDeclaration(name, DELETED, "", ""))

    def _check_not_both(self, name: str, *, deleted: bool) -> None:
        # Each epoch does what is declared: it would drop what the one before it wrote.
        if any(one.name == name and (one.kind == DELETED) == deleted for one in self.declared):
            raise OptionError(
                f"init() declares state {name!r} and deletes it: do one of both. To begin again "
                f"with it, start once with deleteIfExists({name!r}) alone, or give the new state "
                f"another name"
            )


class Handle(StatefulProcessorHandle):
    """The handle of one run of a processor.

    Args:
        fields: the source of the states' ids.
        current: the key of states and timers.
        timers: None: on the driver.
        time_mode: one of `TIME_MODES`.
    """

    def __init__(
        self, fields: Fields, current: CurrentKey, timers: Timers | None, time_mode: str
    ) -> None:
        self._fields, self._current, self._timers = fields, current, timers
        self._time_mode = time_mode
        self._names: set[str] = set()
        self._in_init = True

    def close_init(self) -> None:
        """End the declaration of states: there are keys from now on."""
        self._in_init = False

    def getValueState(
        self, stateName: str, schema: Schema, ttlDurationMs: int | None = None
    ) -> OurValueState:
        """Declare a value state."""
        return OurValueState(
            self._field(stateName, VALUE, None, schema, ttlDurationMs), self._current
        )

    def getListState(
        self, stateName: str, schema: Schema, ttlDurationMs: int | None = None
    ) -> OurListState:
        """Declare a list state."""
        return OurListState(
            self._field(stateName, LIST, None, schema, ttlDurationMs), self._current
        )

    def getMapState(
        self,
        stateName: str,
        userKeySchema: Schema,
        valueSchema: Schema,
        ttlDurationMs: int | None = None,
    ) -> OurMapState:
        """Declare a map state."""
        field = self._field(stateName, MAP, userKeySchema, valueSchema, ttlDurationMs)
        return OurMapState(field, self._current)

    def deleteIfExists(self, stateName: str) -> None:
        """Declare that a state is to be dropped."""
        self._check_in_init(f"deleteIfExists({stateName!r})")
        self._fields.drop(stateName)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        """Set a timer of the key."""
        self._timers_for("registerTimer").register(expiryTimestampMs)

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        """Remove a timer of the key; nothing happens if there is none."""
        self._timers_for("deleteTimer").delete(expiryTimestampMs)

    def listTimers(self) -> Iterator[int]:
        """Return the key's timers."""
        return iter(self._timers_for("listTimers").of_key())

    def _field(
        self,
        name: str,
        kind: str,
        key_schema: Schema | None,
        value_schema: Schema,
        ttl_ms: int | None,
    ) -> StateField:
        self._check_in_init(f"{kind} state {name!r}")
        if name in self._names:
            raise OptionError(f"init() declares state {name!r} twice: give each its own name")
        if not name or name.startswith("$"):
            raise OptionError(f"a state is called {name!r}: a name is not empty, nor begins with $")
        if ttl_ms is not None and not 0 <= ttl_ms <= SPAN_MAX_MS:
            raise OptionError(
                f"state {name!r} has a TTL of {ttl_ms} ms: expected 1 or more, and at most "
                f"140,000 years"
            )
        if ttl_ms and self._time_mode != PROCESSING_TIME:
            raise OptionError(
                f"state {name!r} has a TTL, which needs time_mode {PROCESSING_TIME!r}: it is "
                f"{self._time_mode!r}"
            )
        self._names.add(name)
        return self._fields.field(name, kind, key_schema, value_schema, int(ttl_ms or 0))

    def _check_in_init(self, what: str) -> None:
        if not self._in_init:
            raise StateError(f"{what}: only init() may declare or delete states, before any key")

    def _timers_for(self, what: str) -> Timers:
        if self._time_mode == NO_TIME:
            raise StateError(
                f"{what}: there are no timers with time_mode {NO_TIME!r}; use 'ProcessingTime' or "
                f"'EventTime'"
            )
        if self._timers is None or self._in_init:
            raise StateError(f"{what}: a timer belongs to a key, and in init() there is none")
        return self._timers
