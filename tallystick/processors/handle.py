"""What `init` gets: PySpark's handle, on our states."""

# ruff: noqa: N802, N803  the names are PySpark's

from collections.abc import Callable, Iterator
from typing import Protocol

from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle
from pyspark.sql.types import StructType

from tallystick.errors import OptionError, StateError
from tallystick.processors.place import Place
from tallystick.processors.schemas import struct_of
from tallystick.processors.states import (
    LIST,
    MAP,
    VALUE,
    OurListState,
    OurMapState,
    OurValueState,
)
from tallystick.processors.timers import Timers
from tallystick.state.handles import StateField
from tallystick.state.processing import DELETED, NO_TIME, PROCESSING_TIME, Declared

Schema = StructType | str


class Fields(Protocol):
    """Gives a declared state its id."""

    def field(
        self, name: str, kind: str, key_schema: Schema | None, value_schema: Schema, ttl_ms: int
    ) -> StateField:
        """The state as it is stored."""
        ...

    def drop(self, name: str) -> None:
        """The state is not to be held any more."""
        ...


class Found:
    """In a task: what the driver settled; schemas are read from there, without a JVM."""

    def __init__(self, lookup: Callable[[str], StateField | None]) -> None:
        self._lookup = lookup

    def field(
        self, name: str, kind: str, key_schema: Schema | None, value_schema: Schema, ttl_ms: int
    ) -> StateField:
        """The state as the driver knows it."""
        found = self._lookup(name)
        if found is None or found.kind != kind or found.ttl_ms != ttl_ms:
            what = f"a {found.kind} state with TTL {found.ttl_ms}" if found else "no such state"
            raise StateError(
                f"init() asks for {kind} state {name!r} with TTL {ttl_ms}, and on the driver it "
                f"declared {what}: it has to declare the same states each time"
            )
        return found

    def drop(self, name: str) -> None:
        """Nothing: the driver did."""


class Declaring:
    """On the driver: notes what `init` declares."""

    def __init__(self) -> None:
        self.declared: list[Declared] = []

    def field(
        self, name: str, kind: str, key_schema: Schema | None, value_schema: Schema, ttl_ms: int
    ) -> StateField:
        """The state, with an id that nothing is stored under."""
        self._check_not_both(name, deleted=True)
        try:
            key_text = "" if key_schema is None else struct_of(key_schema).json()
            value_text = struct_of(value_schema).json()
        except OptionError as error:
            raise OptionError(f"state {name!r}: {error}") from error
        state = Declared(name, kind, key_text, value_text, ttl_ms)
        self.declared.append(state)
        return StateField(name, 0, kind, key_text, state.value_schema, ttl_ms)

    def drop(self, name: str) -> None:
        """A note to drop it."""
        self._check_not_both(name, deleted=False)
        self.declared.append(Declared(name, DELETED, "", ""))

    def _check_not_both(self, name: str, *, deleted: bool) -> None:
        # Each epoch does what is declared: it would drop what the one before it wrote.
        if any(one.name == name and (one.kind == DELETED) == deleted for one in self.declared):
            raise OptionError(
                f"init() declares state {name!r} and deletes it: do one of both. To begin anew "
                f"with it, start once with deleteIfExists({name!r}) alone, or give the new state "
                f"another name"
            )


class Handle(StatefulProcessorHandle):
    """The handle of one run of a processor.

    Args:
        fields: where states get their ids.
        place: whose key states and timers are about.
        timers: None: on the driver.
        time_mode: one of `TIME_MODES`.
    """

    def __init__(self, fields: Fields, place: Place, timers: Timers | None, time_mode: str) -> None:
        self._fields, self._place, self._timers = fields, place, timers
        self._time_mode = time_mode
        self._names: set[str] = set()
        self._in_init = True

    def close_init(self) -> None:
        """From now on there are keys, and no new states."""
        self._in_init = False

    def getValueState(
        self, stateName: str, schema: Schema, ttlDurationMs: int | None = None
    ) -> OurValueState:
        """Declare a value state."""
        return OurValueState(
            self._field(stateName, VALUE, None, schema, ttlDurationMs), self._place
        )

    def getListState(
        self, stateName: str, schema: Schema, ttlDurationMs: int | None = None
    ) -> OurListState:
        """Declare a list state."""
        return OurListState(self._field(stateName, LIST, None, schema, ttlDurationMs), self._place)

    def getMapState(
        self,
        stateName: str,
        userKeySchema: Schema,
        valueSchema: Schema,
        ttlDurationMs: int | None = None,
    ) -> OurMapState:
        """Declare a map state."""
        field = self._field(stateName, MAP, userKeySchema, valueSchema, ttlDurationMs)
        return OurMapState(field, self._place)

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
        """The key's timers."""
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
        if ttl_ms is not None and ttl_ms < 0:
            raise OptionError(f"state {name!r} has a TTL of {ttl_ms} ms: expected 1 or more")
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
