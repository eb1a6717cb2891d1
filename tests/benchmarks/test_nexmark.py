"""Nexmark: its events are the same each time, and our queries put out what plain Python says."""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession

from tallystick.testing import EmbeddedKafka

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import tallystick_nexmark
from harness.nexmark_events import AUCTIONS, BIDS, PERSONS, count_of, events, json_of
from harness.nexmark_topics import SEED, load, read_output
from harness.nexmark_truth import BID, QUERIES, faults

# Spark's workers do not find the folder `benchmarks`: the queries' functions go to them whole.
cloudpickle.register_pickle_by_value(tallystick_nexmark)

EVENT_COUNT = 300_000
EPOCH_RECORDS = 50_000
OPEN_MS = 16_000
"""Two epochs, and what the watermark is behind."""
KINDS = (BIDS, AUCTIONS, PERSONS)
Rows = list[dict[str, Any]]
Inputs = dict[str, Rows]
Found = Counter[tuple[Any, ...]]


@pytest.fixture(scope="module")
def frames() -> dict[str, pd.DataFrame]:
    return {kind: events(kind, 0, EVENT_COUNT, SEED).to_pandas() for kind in KINDS}


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return {kind: events(kind, 0, EVENT_COUNT, SEED).to_pylist() for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_events_follow_from_the_seed_however_they_are_cut(kind: str) -> None:
    whole = events(kind, 0, 5000, seed=1)

    assert len(whole) == count_of(kind, 5000)
    assert whole.slice(len(events(kind, 0, 1234, seed=1))).equals(events(kind, 1234, 5000, seed=1))
    assert not whole.equals(events(kind, 0, 5000, seed=2))
    assert [json.loads(text) for text in json_of(whole).to_pylist()] == whole.to_pylist()


def by_key(rows: Rows, key: str) -> dict[int, Rows]:
    rows_by_key: dict[int, Rows] = defaultdict(list)
    for row in rows:
        rows_by_key[row[key]].append(row)
    return rows_by_key


def q0(of: Inputs) -> Iterator[tuple[Any, ...]]:
    yield from (tuple(bid[name] for name in BID) for bid in of[BIDS])


def q1(of: Inputs) -> Iterator[tuple[Any, ...]]:
    for bid in of[BIDS]:
        yield bid["auction"], bid["bidder"], 0.908 * bid["price"], bid["dateTime"], bid["extra"]


def q2(of: Inputs) -> Iterator[tuple[Any, ...]]:
    yield from ((b["auction"], b["price"]) for b in of[BIDS] if b["auction"] % 123 == 0)


def q3(of: Inputs) -> Iterator[tuple[Any, ...]]:
    persons = {person["id"]: person for person in of[PERSONS]}
    for auction in of[AUCTIONS]:
        person = persons.get(auction["seller"], {"state": ""})
        if auction["category"] == 10 and person["state"] in ("OR", "ID", "CA"):
            yield person["name"], person["city"], person["state"], auction["id"]


def q4(of: Inputs) -> Iterator[tuple[Any, ...]]:
    bids, best = by_key(of[BIDS], "auction"), defaultdict(list)
    for auction in of[AUCTIONS]:
        prices = [
            bid["price"]
            for bid in bids[auction["id"]]
            if auction["dateTime"] <= bid["dateTime"] <= auction["expires"]
        ]
        if prices:
            best[auction["category"]].append(max(prices))
    yield from (
        (category, sum(category_prices) / len(category_prices))
        for category, category_prices in best.items()
    )


def q5(of: Inputs) -> Iterator[tuple[Any, ...]]:
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for bid in of[BIDS]:
        latest = bid["dateTime"] // 2000 * 2000
        for start in range(latest - 8000, latest + 1, 2000):
            counts[start][bid["auction"]] += 1
    for start, window in counts.items():
        most = max(window.values())
        yield from ((a, n, start, start + 10_000) for a, n in window.items() if n == most)


def q7(of: Inputs) -> Iterator[tuple[Any, ...]]:
    windows = defaultdict(list)
    for bid in of[BIDS]:
        windows[bid["dateTime"] // 10_000].append(bid)
    for bids in windows.values():
        highest = max(bids, key=lambda bid: bid["price"])
        yield tuple(highest[name] for name in BID)


def q8(of: Inputs) -> Iterator[tuple[Any, ...]]:
    sold = {(auction["seller"], auction["dateTime"] // 10_000) for auction in of[AUCTIONS]}
    for person in of[PERSONS]:
        window = person["dateTime"] // 10_000
        if (person["id"], window) in sold:
            yield person["id"], person["name"], window * 10_000


def q11(of: Inputs) -> Iterator[tuple[Any, ...]]:
    for bidder, bids in by_key(of[BIDS], "bidder").items():
        session: list[int] = []
        for bid in bids:
            if session and bid["dateTime"] > session[-1] + 10_000:
                yield bidder, len(session), session[0], session[-1] + 10_000
                session = []
            session.append(bid["dateTime"])
        yield bidder, len(session), session[0], session[-1] + 10_000


NAIVE: dict[str, Callable[[Inputs], Iterator[tuple[Any, ...]]]] = {
    query.__name__: query for query in (q0, q1, q2, q3, q4, q5, q7, q8, q11)
}


def naive(query: str, inputs: Inputs) -> pd.DataFrame:
    return pd.DataFrame(NAIVE[query](inputs), columns=list(QUERIES[query].columns))


@pytest.mark.parametrize("query", NAIVE)
def test_the_truth_is_what_plain_python_finds(
    query: str, inputs: Inputs, frames: dict[str, pd.DataFrame]
) -> None:
    rows = naive(query, inputs)

    assert len(rows) > 0
    assert not any(faults(QUERIES[query], frames, rows, 1 << 62).values())


@pytest.mark.parametrize("query", NAIVE)
def test_what_is_wrong_is_found(
    query: str, inputs: Inputs, frames: dict[str, pd.DataFrame]
) -> None:
    rows = naive(query, inputs)

    def wrong(changed: pd.DataFrame) -> dict[str, int]:
        return faults(QUERIES[query], frames, changed, 1 << 62)

    assert wrong(rows.iloc[1:])["missing_rows"] == 1
    if QUERIES[query].last_by is None:
        assert wrong(pd.concat([rows, rows.iloc[:1]]))["wrong_rows"] == 1


@pytest.fixture(scope="module")
def loaded(tallystick_kafka: EmbeddedKafka) -> str:
    for kind in KINDS:
        tallystick_kafka.create_topic(f"nexmark-{kind}", 8)
        load(tallystick_kafka.bootstrap_servers, "nexmark-", kind, EVENT_COUNT)
    return tallystick_kafka.bootstrap_servers


@pytest.mark.broker
@pytest.mark.spark
@pytest.mark.parametrize("query", tallystick_nexmark.PIPELINES)
def test_ours_puts_out_what_the_query_asks_for(
    query: str,
    loaded: str,
    tallystick_kafka: EmbeddedKafka,
    shared_spark: SparkSession,
    tmp_path: Path,
    frames: dict[str, pd.DataFrame],
) -> None:
    tallystick_kafka.create_topic(query, 8)
    topics = tallystick_nexmark.Topics(loaded, "nexmark-", query, EPOCH_RECORDS)
    run = tallystick_nexmark.PIPELINES[query](topics).start(
        shared_spark, checkpoint=str(tmp_path), trigger={"availableNow": True}
    )
    run.awaitTermination()

    rows = read_output(loaded, query, query)
    latest = int(frames[BIDS]["dateTime"].iloc[-1])
    assert not any(faults(QUERIES[query], frames, rows, latest - OPEN_MS).values())
    assert query == "q12" or len(rows) > 0  # whose windows end by the clock
