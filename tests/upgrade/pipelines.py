"""The two pipelines whose checkpoints are kept of each release, and the rows that they are fed.

`shop` has state of every kind that a single chain of steps can have, and Kafka decides its epochs.
`paid` joins two inputs, and its checkpoint decides. Both write what follows from their input alone,
however epochs are cut and tasks divided; `oracle` works it out without any code of the product.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import tallystick as ts

TOPICS = {"orders": 2, "returns": 1, "prices": 1, "payments": 2, "windows": 2, "windows-fork": 2}
SHOP, PAID, FORK = "kept-shop", "kept-paid", "kept-shop-fork"
KEYED, GROUP_COUNT = ("totals", "habits", "windows"), 16
"""The keyed steps of `shop`, and the number of their key groups."""
LOT = 4
"""Returns are put out by so many."""
WINDOW_MS = 300_000
PAID_WITHIN_MS = 120_000
DELAY_MS = 600_000
"""Longer than the rows of one phase: so no row is late, however epochs are cut."""
CUT_OFF, UPGRADED = 2, 3
START_MS = 1_700_000_100_000
STEP_MS = 10_000
PHASES = (range(0, 48), range(48, 96), range(96, 106), range(106, 210))
"""The rows of each phase: run and saved; run by more tasks; cut off in the middle; after the
upgrade."""
FAR_MS = 4_102_444_800_000
"""The year 2100: a timer that stays."""
LONG_MS, SHORT_MS = 50 * 365 * 86_400_000, 1_000
"""Times to live: one that outlives every release, and one that is over when a test begins."""
ITEMS = ("tea", "oil", "rye")
USERS = ("ann", "bob", "eve", "ida")
ASK = "ask"
"""An order that asks for what has the short time to live."""

ORDER = "user string, item string, amount bigint, at bigint, n bigint"
PRICED = f"{ORDER}, price bigint"
NOTED = "item string, amount bigint, at bigint, user string, note string"
NAMES = ["user", "item", "amount", "at", "n"]

Record = tuple[str, str, str]
"""A topic, a key and a value."""


def records(phase: int) -> list[Record]:
    """Return what is fed in a phase, prices first; phases follow each other in time."""
    records_fed: list[Record] = []
    if phase != CUT_OFF:
        for item in ITEMS[phase % 2 :]:  # others keep the price that they have
            price = {"item": item, "price": 10 * (phase + 1) + len(records_fed)}
            records_fed.append(("prices", item, json.dumps(price)))
    for n in PHASES[phase]:
        at = START_MS + n * STEP_MS
        if n % 5 == 4:
            user = f"r{n % 2}"
            records_fed.append(("returns", user, f"{user};{ITEMS[n % 3]};{n % 7};{at};{n}"))
            continue
        is_asked = phase == UPGRADED and n < PHASES[phase].start + 5
        item = ASK if is_asked else ITEMS[n // 2 % 3]
        order = {"user": USERS[n % 5], "item": item, "amount": n % 11, "at": at, "n": n}
        records_fed.append(("orders", str(order["user"]), json.dumps(order)))
        if n % 3 == 0:  # it is paid, some of them too late
            payment = {"order": n, "on": at + (n % 4) * 50_000}
            records_fed.append(("payments", str(n), json.dumps(payment)))
    return records_fed


def plain(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows.select(NAMES)


def parsed(rows: pa.RecordBatch) -> pa.RecordBatch:
    parts = pc.split_pattern(rows["value"], ";")
    columns = [pc.list_element(parts, at) for at in range(len(NAMES))]
    columns[2:] = [column.cast(pa.int64()) for column in columns[2:]]
    return pa.record_batch(columns, names=NAMES)


def in_lots(rows: pa.RecordBatch, stored: pa.RecordBatch) -> tuple[ts.Rows, pa.Table]:
    """Let all rows pass, and put them aside once more as lots are full."""
    together = pa.Table.from_batches([stored, rows])
    whole = together.num_rows - together.num_rows % LOT
    return ts.Rows(rows, outputs={"lots": together.slice(0, whole)}), together.slice(whole)


class Habits(StatefulProcessor):
    """Notes what is remembered of a user in state of each kind, before and with each row."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.streak = handle.getValueState("streak", "item string, length int")
        self.latest = handle.getListState("latest", "n bigint")
        self.seen = handle.getMapState("seen", "item string", "times int")
        self.visits = handle.getValueState("visits", "visits int", LONG_MS)
        self.fresh = handle.getMapState("fresh", "item string", "n bigint", SHORT_MS)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        item, length = self.streak.get() or (None, 0)
        (visits,) = self.visits.get() or (0,)
        latest = [member[0] for member in self.latest.get()]
        for row in rows:
            length = length + 1 if row.item == item else 1
            item, visits, latest = row.item, visits + 1, [*latest, row.n][-3:]
            times = 1 + (self.seen.getValue((item,))[0] if self.seen.containsKey((item,)) else 0)
            self.seen.updateValue((item,), (times,))
            note = f"{row.n}: {row.orders} of {row.total} at {row.price}, streak {length}, "
            note += f"{times} x {item}, {visits} visits, latest {latest}"
            if item == ASK:
                fresh = self.fresh.keys()  # a map state is no dict
                note += f", fresh {sorted(member[0] for member in fresh)}"
                note += f", timers {list(self.handle.listTimers())}"
            else:
                self.fresh.updateValue((item,), (row.n,))
                if visits == 2:
                    self.handle.registerTimer(FAR_MS + row.n)
            yield Row(item=item, amount=row.amount, at=row.at, user=key[0], note=note)
        self.streak.update((item, length))
        self.visits.update((visits,))
        self.latest.put([(n,) for n in latest])

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
        raise AssertionError("no timer is due in this century")

    def close(self) -> None:
        pass


def _source(servers: str, topic: str, value: Any, bound: int | None = None) -> ts.KafkaSource:
    more = {} if bound is None else {"max_offsets_per_trigger": bound}
    return ts.KafkaSource(servers, topics=[topic], value=value, starting_offsets="earliest", **more)


def shop(
    servers: str, files: Path, parallelism: int, epoch_rows: int, name: str, topic: str
) -> ts.Pipeline:
    """Return the pipeline with state of every kind but a join's.

    Args:
        servers: of the broker.
        files: the folder of the lots.
        parallelism: of the keyed steps.
        epoch_rows: how many orders an epoch has at most; a quarter as many returns, which so come
            in step with them.
        name: of the pipeline.
        topic: of the windows.
    """
    prices = ts.broadcast(
        _source(servers, "prices", ts.Json("item string, price bigint")), key="item", uid="prices"
    )
    orders = ts.stream(_source(servers, "orders", ts.Json(ORDER), epoch_rows), uid="orders")
    returns = ts.stream(_source(servers, "returns", ts.Text(), epoch_rows // 4), uid="returns")
    counts = {"orders": ts.count(), "total": ts.sum("amount")}
    aggregates = {
        "n": ts.count(),
        "highest": ts.maximum("amount"),
        "average": ts.average("amount"),
        "users": ts.approximate_distinct_count("user"),
        "median": ts.quantiles("amount", at=[0.5]),
        "notes": ts.collect("note"),
    }
    tasks = {"parallelism": parallelism}
    return (
        ts.Pipeline(name)
        .read(
            orders.map_batches(plain, schema=ORDER),
            returns.map_batches(parsed, schema=ORDER).map_batches(
                in_lots,
                schema=ORDER,
                outputs={"lots": ORDER},
                state=ts.list_state(ORDER, uid="held"),
            ),
        )
        .map_batches(ts.enrich(prices, on="item", how="left"), schema=PRICED)
        .key_by("user", max_parallelism=GROUP_COUNT)
        .process(
            ts.aggregate(counts, each="record", keep=["item", "amount", "price", "at", "n"]),
            uid="totals",
            **tasks,
        )
        .key_by("user", max_parallelism=GROUP_COUNT)
        .process(Habits(), output=NOTED, time_mode="ProcessingTime", uid="habits", **tasks)
        .key_by("item", max_parallelism=GROUP_COUNT)
        .process(
            ts.windowed(ts.tumbling(WINDOW_MS), aggregates),
            event_time="at",
            watermark_delay=DELAY_MS,
            uid="windows",
            **tasks,
        )
        .write(
            ts.KafkaSink(servers, topic=topic, key="item", value=ts.Json()),
            lots=ts.FileSink(str(files)),
        )
    )


def paid(servers: str, files: Path, parallelism: int, epoch_rows: int) -> ts.Pipeline:
    """Return the pipeline of a join, whose checkpoint decides."""
    return (
        ts.Pipeline(PAID)
        .read(
            orders=_source(servers, "orders", ts.Json(ORDER), epoch_rows),
            payments=_source(servers, "payments", ts.Json("order bigint, on bigint"), epoch_rows),
        )
        .key_by(orders="n", payments="order", max_parallelism=GROUP_COUNT)
        .process(
            ts.interval_join("orders", "payments", lower=0, upper=PAID_WITHIN_MS, how="left"),
            event_time={"orders": "at", "payments": "on"},
            watermark_delay=DELAY_MS,
            uid="paid",
            parallelism=parallelism,
        )
        .write(ts.FileSink(str(files)))
    )
