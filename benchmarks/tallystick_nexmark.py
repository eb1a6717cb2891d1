"""Our side of Nexmark: a pipeline per query, as a user writes it; read JSON, write JSON.

Run by `nexmark.py`; alone: `tallystick_nexmark.py BOOTSTRAP PREFIX OUTPUT --query q5 --checkpoint
DIR`, where PREFIX is what the names of the topics begin with; with `--sql`, the pipeline is that of
Flink's text. Prints `FIRST <ms>` when its first
epoch is planned.
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tallystick_stateless
from harness.nexmark_events import AUCTIONS, BIDS, PERSONS
from harness.nexmark_sql import script

import tallystick as ts
from tallystick.checkpoint.local.store import ROOT_VARIABLE
from tallystick.queries.program import program

BID = "auction bigint, bidder bigint, price bigint, dateTime bigint, extra string"
DELAY = "4 seconds"
WINDOW_MS = 10_000
EURO = 0.908
SHARES = {BIDS: 0.92, AUCTIONS: 0.06, PERSONS: 0.02}
"""Shares of all events: inputs that meet are read at the same speed in event time."""


@dataclass(frozen=True, slots=True)
class Topics:
    """The topics and settings of a query.

    Args:
        bootstrap: `host:port` of the broker.
        prefix: of the names of the inputs' topics.
        output: the topic; the name of the pipeline too, as each run has one of its own.
        epoch_records: the most that an epoch reads of all inputs together.
    """

    bootstrap: str
    prefix: str
    output: str
    epoch_records: int

    def source(self, columns: str, *names: str) -> ts.KafkaSource:
        """A source of the first of some inputs that share an epoch; of one alone, if it is."""
        shares = [SHARES[name] for name in names]
        return ts.KafkaSource(
            self.bootstrap,
            topics=[f"{self.prefix}{names[0]}"],
            value=ts.Json(columns),
            starting_offsets="earliest",
            group_id=f"{self.output}-{names[0]}",
            max_offsets_per_trigger=int(self.epoch_records * shares[0] / sum(shares)),
            options={"metadata.columns": "none"},  # the queries look at values only
        )

    def pipeline(self) -> ts.Pipeline:
        """A pipeline that nothing is said of yet."""
        return ts.Pipeline(self.output)

    def sink(self, key: str | None = None) -> ts.KafkaSink:
        """The output."""
        return ts.KafkaSink(
            self.bootstrap, topic=self.output, key=key, value=ts.Json(), compression="none"
        )


def q0(topics: Topics) -> ts.Pipeline:
    """Pass through: each bid as it is."""
    return topics.pipeline().read(topics.source(BID, BIDS)).write(topics.sink())


def in_euro(bids: pa.RecordBatch) -> pa.RecordBatch:
    """The same bids, their prices in another currency."""
    price = pc.multiply(pc.cast(bids["price"], pa.float64()), EURO)
    return bids.set_column(bids.schema.get_field_index("price"), "price", price)


def q1(topics: Topics) -> ts.Pipeline:
    """Currency conversion."""
    return (
        topics.pipeline().read(topics.source(BID, BIDS)).map_batches(in_euro).write(topics.sink())
    )


def chosen(bids: pa.RecordBatch) -> pa.RecordBatch:
    """The bids of some auctions."""
    auction = bids["auction"]
    multiple = pc.multiply(pc.divide(auction, 123), 123)  # Arrow has no remainder
    return bids.filter(pc.equal(auction, multiple))


def q2(topics: Topics) -> ts.Pipeline:
    """Selection of every 123rd auction."""
    bids = topics.source("auction bigint, price bigint", BIDS)
    return topics.pipeline().read(bids).map_batches(chosen).write(topics.sink())


def in_category_10(auctions: pa.RecordBatch) -> pa.RecordBatch:
    """Auctions of that category, without it."""
    rows = auctions.filter(pc.equal(auctions["category"], 10))
    return rows.select(["id", "seller", "dateTime"])


def in_the_north_west(persons: pa.RecordBatch) -> pa.RecordBatch:
    """Keep people in Oregon, Idaho and California."""
    return persons.filter(pc.is_in(persons["state"], pa.array(["OR", "ID", "CA"])))


def q3(topics: Topics) -> ts.Pipeline:
    """Local item suggestion: who sells in category 10, in three states? For all time.

    There is no join without a bound, so its bound is wider than all events.
    """
    persons = ts.stream(
        topics.source(
            "id bigint, name string, city string, state string, dateTime bigint", PERSONS, AUCTIONS
        )
    )
    auctions = ts.stream(
        topics.source(
            "id bigint, seller bigint, category bigint, dateTime bigint", AUCTIONS, PERSONS
        )
    )
    person = "id bigint, name string, city string, state string, dateTime bigint"
    auction = "id bigint, seller bigint, dateTime bigint"
    return (
        topics.pipeline()
        .read(
            auctions=auctions.map_batches(in_category_10, schema=auction),
            persons=persons.map_batches(in_the_north_west, schema=person),
        )
        .key_by(auctions="seller", persons="id")
        .process(
            ts.interval_join("auctions", "persons", lower="-3650 days", upper="3650 days"),
            event_time={"auctions": "dateTime", "persons": "dateTime"},
            uid="join",
        )
        .map_batches(lambda rows: rows.select(["name", "city", "state", "id"]))
        .write(topics.sink())
    )


def in_time(pairs: pa.RecordBatch) -> pa.RecordBatch:
    """The bids that came before their auction's end."""
    rows = pairs.filter(pc.less_equal(pairs["bids_dateTime"], pairs["expires"]))
    return rows.select(["id", "category", "price"])


def better_bid(batch: ts.KeyedBatch) -> ts.Update:
    """By how much the best bid of an auction rises, and whether it is its first one."""
    best = batch.max("price", start=batch.state["best"])
    rise = pc.subtract(best, pc.fill_null(batch.state["best"], 0))
    category = batch.rows["category"].take(pa.array(batch.last_rows()))
    is_first = pc.cast(pc.is_null(batch.state["best"]), pa.int64())
    changes = pa.record_batch({"category": category, "rise": rise, "sold": is_first})
    return ts.Update(changes.filter(pc.greater(rise, 0)), {"best": best})


def averages(totals: pa.RecordBatch) -> pa.RecordBatch:
    """Compute the average over the best bid of each auction that has one."""
    average = pc.divide(pc.cast(totals["total"], pa.float64()), totals["auctions"])
    return pa.record_batch({"category": totals["category"], "average": average})


def q4(topics: Topics) -> ts.Pipeline:
    """Average price of a category: of the best bid of each auction, so far."""
    auctions = topics.source(
        "id bigint, category bigint, dateTime bigint, expires bigint", AUCTIONS, BIDS
    )
    bids = topics.source("auction bigint, price bigint, dateTime bigint", BIDS, AUCTIONS)
    return (
        topics.pipeline()
        .read(auctions=auctions, bids=bids)
        .key_by(auctions="id", bids="auction")
        .process(
            ts.interval_join("auctions", "bids", lower=0, upper="1 second"),  # none lasts longer
            event_time={"auctions": "dateTime", "bids": "dateTime"},
            watermark_delay=DELAY,
            uid="join",
        )
        .map_batches(in_time, schema="id bigint, category bigint, price bigint")
        .key_by("id")
        .process(
            ts.vectorised(better_bid, state="best bigint", reads=["category", "price"]),
            output="category bigint, rise bigint, sold bigint",
            uid="best",
        )
        .key_by("category")
        .process(ts.aggregate({"total": ts.sum("rise"), "auctions": ts.sum("sold")}), uid="average")
        .map_batches(averages)
        .write(topics.sink(key="category"))
    )


def hottest(batch: ts.KeyedBatch) -> ts.Update:
    """The auctions with the most bids of each window: all counts of a window come in one epoch."""
    most = batch.max("num").take(pa.array(batch.codes))
    return ts.Update(batch.rows.filter(pc.equal(batch.rows["num"], most)).select(HOT))


HOT = ["auction", "num", "window_start", "window_end"]


def q5(topics: Topics) -> ts.Pipeline:
    """Hot items: the auctions with the most bids in the last 10 seconds, every 2 seconds."""
    return (
        topics.pipeline()
        .read(topics.source("auction bigint, dateTime bigint", BIDS))
        .key_by("auction")
        .process(
            ts.windowed(ts.hopping("10 seconds", every="2 seconds"), {"num": ts.count()}),
            event_time="dateTime",
            watermark_delay=DELAY,
            uid="counts",
        )
        .key_by("window_end")
        .process(
            ts.vectorised(hottest, state=""),
            output="auction bigint, num bigint, window_start timestamp, window_end timestamp",
            uid="hottest",
        )
        .write(topics.sink())
    )


def highest_of_batch(bids: pa.RecordBatch) -> pa.RecordBatch:
    """The highest bids of each window among these, with the window's end."""
    ends = pc.multiply(pc.add(pc.divide(bids["dateTime"], WINDOW_MS), 1), WINDOW_MS)
    bids = bids.append_column("window", ends)
    highest = pa.table(bids).group_by("window").aggregate([("price", "max")])
    of_row = highest["price_max"].take(pc.index_in(ends, highest["window"]))
    return bids.filter(pc.equal(bids["price"], of_row.combine_chunks()))


def highest_of_window(batch: ts.KeyedBatch) -> ts.Update:
    """Keep each window's highest bid, and put it out at the window's end."""
    highest = batch.max("price", start=batch.state["price"])
    is_highest = pc.equal(batch.rows["price"], highest.take(pa.array(batch.codes)))
    row = np.full(len(batch), -1)
    places = np.flatnonzero(is_highest.to_numpy(zero_copy_only=False))
    row[batch.codes[places]] = places
    row_or_none = pa.array(row, mask=row < 0)
    kept = {
        name: pc.coalesce(batch.rows[name].take(row_or_none), batch.state[name])
        for name in batch.state.schema.names
    }
    if batch.is_due:
        return ts.Update(pa.record_batch(kept), dict.fromkeys(kept, pa.nulls(len(batch))))
    return ts.Update(None, kept, timers=pc.subtract(batch.keys["window"], 1))


def q7(topics: Topics) -> ts.Pipeline:
    """Highest bid of each 10 seconds."""
    with_window = f"{BID}, window bigint"
    return (
        topics.pipeline()
        .read(topics.source(BID, BIDS))
        .map_batches(highest_of_batch, schema=with_window)
        .key_by("window")
        .process(
            ts.vectorised(highest_of_window, state=BID, time_mode="EventTime"),
            output=BID,
            event_time="dateTime",
            watermark_delay=DELAY,
            uid="highest",
        )
        .write(topics.sink())
    )


def sellers_of_batch(auctions: pa.RecordBatch) -> pa.RecordBatch:
    """One of these rows for each seller and window: a second one says nothing new."""
    windows = pc.divide(auctions["dateTime"], WINDOW_MS)
    rows = pa.table([*auctions.columns, windows], names=[*auctions.schema.names, "window"])
    sellers = rows.group_by(["seller", "window"]).aggregate([("dateTime", "min")])
    columns = [sellers[name].combine_chunks() for name in ("seller", "dateTime_min")]
    return pa.record_batch(columns, names=["seller", "dateTime"])


def q8(topics: Topics) -> ts.Pipeline:
    """Monitor new users: those who put something up within the same 10 seconds."""
    auctions = ts.stream(topics.source("seller bigint, dateTime bigint", AUCTIONS, PERSONS))
    return (
        topics.pipeline()
        .read(
            persons=topics.source("id bigint, name string, dateTime bigint", PERSONS, AUCTIONS),
            auctions=auctions.map_batches(
                sellers_of_batch, schema="seller bigint, dateTime bigint"
            ),
        )
        .key_by(persons="id", auctions="seller")
        .process(
            ts.window_join("persons", "auctions", size="10 seconds"),
            event_time={"persons": "dateTime", "auctions": "dateTime"},
            watermark_delay=DELAY,
            uid="join",
        )
        .key_by("id", "window_start")
        .process(ts.deduplicate(), uid="once")
        .map_batches(lambda rows: rows.select(["id", "name", "window_start"]))
        .write(topics.sink())
    )


def q11(topics: Topics) -> ts.Pipeline:
    """User sessions: the number of bids that a bidder makes while being active."""
    return (
        topics.pipeline()
        .read(topics.source("bidder bigint, dateTime bigint", BIDS))
        .key_by("bidder")
        .process(
            ts.windowed(ts.session("10 seconds"), {"bid_count": ts.count()}),
            event_time="dateTime",
            watermark_delay=DELAY,
            uid="sessions",
        )
        .write(topics.sink())
    )


def q12(topics: Topics) -> ts.Pipeline:
    """The number of bids that a bidder makes in 10 seconds of processing time."""
    return (
        topics.pipeline()
        .read(topics.source("bidder bigint", BIDS))
        .key_by("bidder")
        .process(
            ts.windowed(ts.tumbling("10 seconds"), {"bid_count": ts.count()}, time="processing"),
            uid="counts",
        )
        .write(topics.sink())
    )


PIPELINES: dict[str, Callable[[Topics], ts.Pipeline]] = {
    query.__name__: query for query in (q0, q1, q2, q3, q4, q5, q7, q8, q11, q12)
}


def main() -> None:
    """Run a query over all that its inputs hold now, and end."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("bootstrap")
    parser.add_argument("prefix")
    parser.add_argument("output")
    parser.add_argument("--query", choices=PIPELINES, required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--epoch-records", type=int, default=500_000)
    parser.add_argument("--sql", action="store_true")
    arguments = parser.parse_args()

    # The workers' copies of the state, beside the checkpoint: a run leaves nothing elsewhere.
    os.environ.setdefault(ROOT_VARIABLE, f"{arguments.checkpoint}-local")
    os.environ.update(tallystick_stateless.TWO_CORES)
    names = (arguments.bootstrap, arguments.prefix, arguments.output)
    if arguments.sql:
        pipeline = program(script(arguments.query, *names), arguments.output)
    else:
        pipeline = PIPELINES[arguments.query](Topics(*names, arguments.epoch_records))
    query = pipeline.start(
        checkpoint=arguments.checkpoint,
        trigger={"availableNow": True},
        listener=tallystick_stateless.SayFirst(),
    )
    query.awaitTermination()
    print("DONE", time.time_ns() // 1_000_000, flush=True)
    print(query.profile(), flush=True)


if __name__ == "__main__":
    main()
