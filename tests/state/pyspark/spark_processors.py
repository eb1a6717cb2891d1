"""Ordinary processors of PySpark: the same objects run under Spark and under us.

They answer in text, so that types count too. Only what Spark promises no order for is sorted.
"""

from typing import Any

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor


def line(key: Any, what: str, *values: Any) -> Row:
    """One answer."""
    return Row(k=repr(key), what=what, val=" ".join(map(repr, values)))


class Count(StatefulProcessor):
    """A running count, the order of a key's rows, a generator."""

    def init(self, handle):
        self.count = handle.getValueState("count", "n bigint, last string")

    def handleInputRows(self, key, rows, timerValues):
        existed, before = self.count.exists(), self.count.get()
        seen = [row.v for row in rows]
        self.count.update(((before[0] if before else 0) + len(seen), seen[-1]))
        yield line(key, "seen", existed, before, seen)
        yield line(key, "now", self.count.get(), timerValues.getCurrentProcessingTimeInMs())
        if seen[-1] == "clear":
            self.count.clear()


class PandasCount(StatefulProcessor):
    """The same on frames, with their columns and types."""

    def init(self, handle):
        self.count = handle.getValueState("count", "n bigint, last string")

    def handleInputRows(self, key, rows, timerValues):
        for frame in rows:
            before = self.count.get() if self.count.exists() else (0, "")
            self.count.update((before[0] + len(frame), str(frame["v"].iloc[-1])))
            kinds = [str(kind) for kind in frame.dtypes]
            text = f"{self.count.get()} {list(frame.columns)} {kinds} {list(frame['ts'])}"
            yield pd.DataFrame({"k": [repr(key)], "what": ["frame"], "val": [text]})


class Recent(StatefulProcessor):
    """A list: appended, replaced, cleared, read while it grows."""

    def init(self, handle):
        self.recent = handle.getListState("recent", "v string, n int")

    def handleInputRows(self, key, rows, timerValues):
        values = [(row.v, len(row.v)) for row in rows]
        before = (self.recent.exists(), list(self.recent.get()))
        self.recent.appendList(values)
        self.recent.appendValue(("|", None))
        for element in self.recent.get():
            if element[0] == "|":
                self.recent.appendValue(("after |", 1))
        grown = list(self.recent.get())
        if len(grown) > 6:
            self.recent.put(values)
        yield line(key, "list", before, grown, list(self.recent.get()))
        if values[-1][0] == "clear":
            self.recent.clear()
            yield line(key, "cleared", self.recent.exists(), list(self.recent.get()))


class Seen(StatefulProcessor):
    """A map: set, counted, removed, iterated."""

    def init(self, handle):
        self.seen = handle.getMapState("seen", "v string, i int", "n bigint, x double")

    def handleInputRows(self, key, rows, timerValues):
        before = self.seen.exists()
        for row in rows:
            old = self.seen.getValue((row.v, len(row.v)))
            self.seen.updateValue((row.v, len(row.v)), ((old.n if old else 0) + 1, row.x))
        self.seen.removeKey(("gone", 4))
        self.seen.removeKey(("a2", 2))
        lookups = self.seen.containsKey(("a1", 2)), self.seen.getValue(("a1", 2))
        items = sorted(self.seen.iterator(), key=repr)
        keys, values = sorted(self.seen.keys(), key=repr), sorted(self.seen.values(), key=repr)
        returned = [line(key, "map", before, items, keys, values), line(key, "has", *lookups)]
        if ("clear", 5) in keys:
            self.seen.clear()
            returned.append(line(key, "cleared", self.seen.exists(), list(self.seen.keys())))
        return iter(returned)


class EventTimers(StatefulProcessor):
    """Timers relative to rows; a fired one sets another, which may be due already."""

    def init(self, handle):
        self.handle, self.count = handle, handle.getValueState("n", "n int")

    def handleInputRows(self, key, rows, timerValues):
        values = []
        for row in rows:
            values.append(row.v)
            for after in (1000, 1000, 2000, 9000):
                self.handle.registerTimer(row.ms + after)
            self.handle.deleteTimer(row.ms + 2000)
        self.handle.deleteTimer(123)
        self.count.update(((self.count.get() or (0,))[0] + len(values),))
        watermark = timerValues.getCurrentWatermarkInMs()
        yield line(key, "rows", watermark, values, sorted(self.handle.listTimers()))

    def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
        at, watermark = expiredTimerInfo.getExpiryTimeInMs(), timerValues.getCurrentWatermarkInMs()
        timers = sorted(self.handle.listTimers())
        yield line(key, "fired", at, watermark, self.count.get(), timers)
        if at % 1000 == 0 and at < 20000:
            self.handle.registerTimer(watermark + 3001)


class DueWhileFiring(StatefulProcessor):
    """A fired timer sets itself and a due one again, and deletes a due one."""

    def init(self, handle):
        self.handle = handle

    def handleInputRows(self, key, rows, timerValues):
        seen = [row.v for row in rows]
        for at in (1, 5, 9, -7, timerValues.getCurrentProcessingTimeInMs() + 300):
            self.handle.registerTimer(at)
        return [line(key, "rows", seen, timerValues.getCurrentWatermarkInMs())]

    def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
        at = expiredTimerInfo.getExpiryTimeInMs()
        if at == 1:
            self.handle.registerTimer(3)
            self.handle.registerTimer(1)
            self.handle.deleteTimer(5)
        yield line(key, "fired", at, sorted(self.handle.listTimers()))


class WithInitialState(Count):
    """A count that starts with what it is given."""

    def handleInitialState(self, key, initialState, timerValues):
        before = self.count.get() or (0, "")
        self.count.update((before[0] + initialState.start, f"{tuple(initialState)} {key}"))


class ValueThatExpires(StatefulProcessor):
    """A value with a time to live, written at times."""

    def init(self, handle):
        self.value = handle.getValueState("value", "s string", 900)
        self.kept = handle.getValueState("kept", "s string", 0)

    def handleInputRows(self, key, rows, timerValues):
        values = [row.v for row in rows]
        before = self.value.exists(), self.value.get(), self.kept.get()
        if not before[0]:
            self.value.update((values[0],))
            self.kept.update((values[0],))
        yield line(key, "value", before, self.value.get())


class ListThatExpires(StatefulProcessor):
    """Each element has its own time to live."""

    def init(self, handle):
        self.items = handle.getListState("items", "s string", 900)

    def handleInputRows(self, key, rows, timerValues):
        before = self.items.exists(), list(self.items.get())
        for row in rows:
            self.items.appendValue((row.v,))
        yield line(key, "list", before, list(self.items.get()))


class MapThatExpires(StatefulProcessor):
    """Each entry has its own time to live."""

    def init(self, handle):
        self.pairs = handle.getMapState("pairs", "k string", "s string", 900)

    def handleInputRows(self, key, rows, timerValues):
        before = self.pairs.exists(), sorted(self.pairs.iterator()), self.pairs.getValue(("x",))
        for row in rows:
            self.pairs.updateValue((row.v,), (row.v,))
        if not before[0]:
            self.pairs.updateValue(("x",), ("x",))
        yield line(key, "map", before, sorted(self.pairs.keys()), self.pairs.containsKey(("x",)))


class Nested(StatefulProcessor):
    """What a row has and what state gives back, of each type."""

    def init(self, handle):
        schema = (
            "tags array<string>, counts map<string, int>, at struct<x: int, y: string>, "
            "days array<date>, amount decimal(10,2), moment timestamp, raw binary, small float, "
            "flag boolean, short smallint, local timestamp_ntz, deep array<struct<a: bigint>>"
        )
        self.value = handle.getValueState("value", schema)
        self.list = handle.getListState("list", schema)
        self.map = handle.getMapState("map", "day date, amount decimal(10,2)", schema)

    def handleInputRows(self, key, rows, timerValues):
        for row in rows:
            yield line(key, "row", row, [type(part).__name__ for part in row])
            local = row.ts.replace(tzinfo=None)
            value = (row.tags, {row.v: len(row.v)}, (1, row.v), [row.day, None], row.amount, row.ts)
            value += (row.v.encode(), row.x, row.x > 1, 7, local, [(1,), None, Row(a=2)])
            self.value.update(value)
            self.list.appendValue(value)
            self.map.updateValue((row.day, row.amount), value)
        kinds = [type(part).__name__ for part in self.value.get()]
        yield line(key, "value", self.value.get(), kinds, list(self.list.get())[-1])
        struct = self.map.getValue((row.day, row.amount))
        yield line(key, "map", struct.tags, struct, sorted(self.map.keys()), struct.at.y)
        self.value.update((None,) * 12)
        yield line(key, "nulls", self.value.exists(), self.value.get())


class Old(StatefulProcessor):
    """Before: two states."""

    def init(self, handle):
        self.old = handle.getValueState("old", "n bigint")
        self.kept = handle.getListState("kept", "v string")

    def handleInputRows(self, key, rows, timerValues):
        seen = [row.v for row in rows]
        before = self.old.get(), list(self.kept.get())
        self.old.update(((before[0] or (0,))[0] + len(seen),))
        self.kept.appendList([(v,) for v in seen])
        yield line(key, "both", before, self.old.get(), list(self.kept.get()))


class WithoutOld(StatefulProcessor):
    """Between: one of them is deleted, one is new."""

    def init(self, handle):
        handle.deleteIfExists("old")
        handle.deleteIfExists("never there")
        self.fresh = handle.getValueState("fresh", "n bigint")
        self.kept = handle.getListState("kept", "v string")

    def handleInputRows(self, key, rows, timerValues):
        before = self.fresh.get()
        self.fresh.update((len(list(rows)),))
        yield line(key, "without", before, list(self.kept.get()))


class Sessions(StatefulProcessor):
    """Several states and a timer that closes what was idle."""

    def init(self, handle):
        self.handle = handle
        self.bounds = handle.getValueState("bounds", "first bigint, last bigint")
        self.events = handle.getListState("events", "v string, ms bigint")
        self.kinds = handle.getMapState("kinds", "v string", "n int")

    def handleInputRows(self, key, rows, timerValues):
        first, last = self.bounds.get() or (1 << 60, -1)
        for row in rows:
            if last >= 0:
                self.handle.deleteTimer(last + 5000)
            first, last = min(first, row.ms), max(last, row.ms)
            self.handle.registerTimer(last + 5000)
            self.events.appendValue((row.v, row.ms))
            before = self.kinds.getValue((row.v,))
            self.kinds.updateValue((row.v,), ((before[0] if before else 0) + 1,))
        self.bounds.update((first, last))
        return iter([])

    def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
        kinds = dict(sorted(self.kinds.iterator()))
        yield line(key, "session", self.bounds.get(), list(self.events.get()), kinds)
        for state in (self.bounds, self.events, self.kinds):
            state.clear()


class FirstOfTwoKeys(StatefulProcessor):
    """A key of two columns; reads one row and leaves the rest."""

    def init(self, handle):
        self.first = handle.getValueState("first", "v string, d date")

    def handleInputRows(self, key, rows, timerValues):
        row = next(rows)
        self.first.update((row.v, row.day))
        return (line(key, what, row.v, row.k, self.first.get()) for what in ("one", "two"))


class PandasTimers(StatefulProcessor):
    """Timers on frames."""

    def init(self, handle):
        self.handle, self.count = handle, handle.getValueState("n", "n int")

    def handleInputRows(self, key, rows, timerValues):
        for frame in rows:
            self.count.update(((self.count.get() or (0,))[0] + len(frame),))
            self.handle.registerTimer(int(frame["ms"].max()) + 1500)
        yield pd.DataFrame({"k": [repr(key)], "what": ["n"], "val": [str(self.count.get())]})

    def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
        at = expiredTimerInfo.getExpiryTimeInMs()
        yield pd.DataFrame(
            {"k": [repr(key)], "what": ["fired"], "val": [f"{at} {self.count.get()}"]}
        )
