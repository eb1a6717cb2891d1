"""The expected output of each query of Nexmark, computed from its events with pandas.

Rows are compared as multisets, by a hash of each. `complete_until` is the event time up to which
a job that ends with its input has seen the watermark: windows that end later may be missing, as
Flink's last watermark closes them all and ours waits for later events.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from .nexmark_events import AUCTIONS, BIDS, PERSONS

Events = Mapping[str, pd.DataFrame]
WINDOW_MS, HOP_MS, GAP_MS = 10_000, 2_000, 10_000
EURO = 0.908
BID = ["auction", "bidder", "price", "dateTime", "extra"]
END = "end"
"""A column of truths that outputs do not have: when a row's window ends."""


@dataclass(frozen=True, slots=True)
class Query:
    """A query: what it reads, what it puts out, and how outputs are compared.

    Args:
        inputs: their topics.
        columns: of the output.
        truth: from the events to the rows that have to come out, with a column `END` for windows;
            None: which rows come depends on the clock.
        last_by: rows are updates, of which the last of each value of this column counts.
    """

    inputs: tuple[str, ...]
    columns: tuple[str, ...]
    truth: Callable[[Events], pd.DataFrame] | None
    last_by: str | None = None


def faults(
    query: Query, events: Events, output: pd.DataFrame, complete_until: int
) -> dict[str, int]:
    """Return how many rows of an output are wrong, by what is wrong with them.

    Args:
        query: that put the output out.
        events: that it read, by input.
        output: its rows, in the order of their partition; times are in ms.
        complete_until: windows that end after this time in ms may be missing.
    """
    if query.truth is None:
        return _clocked_faults(events[BIDS], output)
    expected = query.truth(events)
    if query.last_by is not None:
        output = output.drop_duplicates(query.last_by, keep="last")
    due = expected[expected[END] <= complete_until] if END in expected else expected
    actual, may, must = (_counts(rows[list(query.columns)]) for rows in (output, expected, due))
    return {"wrong_rows": _surplus(actual, may), "missing_rows": _surplus(must, actual)}


def _clocked_faults(bids: pd.DataFrame, output: pd.DataFrame) -> dict[str, int]:
    """Check windows of processing time: none twice, and no bidder with more bids than exist."""
    counted = output.groupby("bidder")["bid_count"].sum()
    bid_counts = bids.groupby("bidder").size().reindex(counted.index, fill_value=0)
    return {
        "repeated_windows": int(output.duplicated(["bidder", "window_end"]).sum()),
        "bidders_with_too_many_bids": int((counted > bid_counts).sum()),
    }


Counts = tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]


def _counts(rows: pd.DataFrame) -> Counts:
    hashes = np.zeros(0, np.uint64)
    if len(rows):
        hashes = pd.util.hash_pandas_object(rows, index=False).to_numpy(np.uint64)
    values, counts = np.unique(hashes, return_counts=True)
    return values, counts


def _surplus(some: Counts, others: Counts) -> int:
    """How many rows of the first are not among the second, one by one."""
    values, counts = some
    there = pd.Series(others[1], index=others[0]).reindex(values, fill_value=0).to_numpy()
    return int(np.maximum(counts - there, 0).sum())


def _window_end(times: "pd.Series[int]", size_ms: int = WINDOW_MS) -> "pd.Series[int]":
    return times // size_ms * size_ms + size_ms


def _q1(events: Events) -> pd.DataFrame:
    bids = events[BIDS]
    return bids[BID].assign(price=bids["price"] * EURO)


def _q2(events: Events) -> pd.DataFrame:
    bids = events[BIDS]
    return bids.loc[bids["auction"] % 123 == 0, ["auction", "price"]]


def _q3(events: Events) -> pd.DataFrame:
    auctions, persons = events[AUCTIONS], events[PERSONS]
    persons = persons.loc[
        persons["state"].isin(["OR", "ID", "CA"]), ["id", "name", "city", "state"]
    ]
    auctions = auctions.loc[auctions["category"] == 10, ["id", "seller"]]
    sellers = persons.rename(columns={"id": "seller"})
    return auctions.merge(sellers, on="seller")[["name", "city", "state", "id"]]


def _q4(events: Events) -> pd.DataFrame:
    auctions = events[AUCTIONS][["id", "category", "dateTime", "expires"]]
    bids = events[BIDS][["auction", "price", "dateTime"]].rename(columns={"dateTime": "at"})
    pairs = bids.merge(auctions, left_on="auction", right_on="id")
    pairs = pairs[(pairs["at"] >= pairs["dateTime"]) & (pairs["at"] <= pairs["expires"])]
    best = pairs.groupby(["id", "category"])["price"].max().reset_index()
    return best.groupby("category")["price"].mean().rename("average").reset_index()


def _q5(events: Events) -> pd.DataFrame:
    bids = events[BIDS]
    panes = bids.groupby(["auction", bids["dateTime"] // HOP_MS * HOP_MS]).size()
    parts = panes.rename("num").reset_index().rename(columns={"dateTime": "pane"})
    windows = [
        parts.assign(window_start=parts["pane"] - back) for back in range(0, WINDOW_MS, HOP_MS)
    ]
    counted = pd.concat(windows).groupby(["window_start", "auction"])["num"].sum().reset_index()
    most = counted.groupby("window_start")["num"].transform("max")
    hot = counted[counted["num"] == most]
    ends = hot["window_start"] + WINDOW_MS
    return hot.assign(window_end=ends, **{END: ends})


def _q7(events: Events) -> pd.DataFrame:
    bids = events[BIDS]
    ends = _window_end(bids["dateTime"])
    highest = bids[bids["price"] == bids.groupby(ends)["price"].transform("max")]
    winners = highest[BID].assign(**{END: _window_end(highest["dateTime"])})
    assert winners[END].is_unique, "two highest bids in a window: take another seed"
    return winners


def _q8(events: Events) -> pd.DataFrame:
    persons = events[PERSONS][["id", "name", "dateTime"]]
    persons = persons.assign(window_start=_window_end(persons["dateTime"]) - WINDOW_MS)
    auctions = events[AUCTIONS]
    sellers = pd.DataFrame(
        {
            "id": auctions["seller"],
            "window_start": _window_end(auctions["dateTime"]) - WINDOW_MS,
        }
    ).drop_duplicates()
    joined = persons.merge(sellers, on=["id", "window_start"])
    return joined[["id", "name", "window_start"]].assign(
        **{END: joined["window_start"] + WINDOW_MS}
    )


def _q11(events: Events) -> pd.DataFrame:
    bids = events[BIDS][["bidder", "dateTime"]].sort_values(["bidder", "dateTime"])
    is_same = bids["bidder"].eq(bids["bidder"].shift())
    session = (~is_same | (bids["dateTime"].diff() > GAP_MS)).cumsum()
    sessions = bids.groupby(session).agg(
        bidder=("bidder", "first"),
        bid_count=("bidder", "size"),
        window_start=("dateTime", "min"),
        window_end=("dateTime", "max"),
    )
    sessions["window_end"] += GAP_MS
    return sessions.assign(**{END: sessions["window_end"]})


_SESSION = ("bidder", "bid_count", "window_start", "window_end")
QUERIES = {
    "q0": Query((BIDS,), tuple(BID), lambda events: events[BIDS][BID]),
    "q1": Query((BIDS,), tuple(BID), _q1),
    "q2": Query((BIDS,), ("auction", "price"), _q2),
    "q3": Query((AUCTIONS, PERSONS), ("name", "city", "state", "id"), _q3),
    "q4": Query((AUCTIONS, BIDS), ("category", "average"), _q4, last_by="category"),
    "q5": Query((BIDS,), ("auction", "num", "window_start", "window_end"), _q5),
    "q7": Query((BIDS,), tuple(BID), _q7),
    "q8": Query((AUCTIONS, PERSONS), ("id", "name", "window_start"), _q8),
    "q11": Query((BIDS,), _SESSION, _q11),
    "q12": Query((BIDS,), _SESSION, None),
}
