"""Nexmark in Flink's SQL: the benchmark's texts as they are, on rows of its generator."""

import sys
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest

from tallystick.errors import OptionError
from tallystick.queries.program import program
from tallystick.testing import Driver

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from harness.nexmark_events import AUCTIONS, BIDS, PERSONS, events, json_of
from harness.nexmark_sql import script
from harness.nexmark_truth import QUERIES, faults

SEED = 7
EVENT_COUNT, EPOCH_EVENTS = 400_000, 100_000
OPEN_MS = 2 * EPOCH_EVENTS // 10 + 10_000
"""Two epochs, a session and the delay: what ends later may be missing."""
REFUSED = {
    "q3": r"join of A and P: nothing bounds how far their times .* a watermark for A and P\.",
    "q4": r"join of A and B: nothing bounds .* BETWEEN A\.`?dateTime`? AND A\.expires is no bound",
}
"""By query the reason; `docs/sql.md` has the same."""


def text_of(query: str) -> str:
    """Return the script of the benchmark, its input without an end: a test feeds epochs."""
    text = script(query, "localhost:9092", "", "results")
    assert "'scan.bounded.mode' = 'latest-offset'" in text
    return text.replace(
        "'scan.bounded.mode' = 'latest-offset'", "'scan.bounded.mode' = 'unbounded'"
    )


def output_of(query: str) -> pd.DataFrame:
    driver = Driver(program(text_of(query), query))
    for first in range(0, EVENT_COUNT, EPOCH_EVENTS):
        for kind in QUERIES[query].inputs:
            texts = json_of(events(kind, first, first + EPOCH_EVENTS, SEED)).to_pylist()
            driver.feed(kind, [{"value": text.encode()} for text in texts])
        driver.epoch()
        driver.advance_clock("15 seconds")
    driver.drain()
    rows = driver.output()
    for number, field in enumerate(rows.schema):
        if pa.types.is_timestamp(field.type):
            moments = rows.column(number).cast(pa.timestamp("ms", "UTC")).cast(pa.int64())
            rows = rows.set_column(number, field.name, moments)
    return rows.to_pandas()


@pytest.fixture(scope="module")
def frames() -> dict[str, pd.DataFrame]:
    kinds = (BIDS, AUCTIONS, PERSONS)
    return {kind: events(kind, 0, EVENT_COUNT, SEED).to_pandas() for kind in kinds}


@pytest.mark.parametrize("query", [query for query in QUERIES if query not in REFUSED])
def test_a_text_of_flink_gives_what_the_query_asks_for(
    query: str, frames: dict[str, pd.DataFrame]
) -> None:
    rows = output_of(query)

    latest = int(frames[BIDS]["dateTime"].iloc[-1])
    assert len(rows) > 0
    assert not any(faults(QUERIES[query], frames, rows, latest - OPEN_MS).values())


@pytest.mark.parametrize("query", REFUSED)
def test_a_text_without_a_bound_on_its_state_is_refused(query: str) -> None:
    with pytest.raises(OptionError, match=REFUSED[query]):
        program(text_of(query), query)
