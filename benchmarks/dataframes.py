"""The cost of frames in functions of `map_batches`: `python -m benchmarks.dataframes`.

Prints, for batches of 1,000 rows of six columns, the microseconds of processor time that the way
into a frame and back takes beside a function of Arrow batches: the median of 200 batches.
"""

import json
import statistics
import time
from decimal import Decimal

import pyarrow as pa

from tallystick.tasks.dataframes import as_arrow, frame_of

BATCHES = 200
ROWS = 1000


def batch() -> pa.RecordBatch:
    """Return rows as they come from Kafka: numbers, text, a time, a decimal, some nulls."""
    numbers = range(ROWS)
    return pa.record_batch(
        {
            "id": pa.array(numbers, pa.int64()),
            "delay": pa.array([None if n % 9 == 0 else n / 3 for n in numbers], pa.float64()),
            "dest": pa.array([f"D{n % 50}" for n in numbers]),
            "carrier": pa.array([None if n % 7 == 0 else "UA" for n in numbers]),
            "at": pa.array([n * 1_000_000 for n in numbers], pa.timestamp("us", tz="UTC")),
            "price": pa.array([Decimal(n) / 100 for n in numbers], pa.decimal128(10, 2)),
        }
    )


def main() -> None:
    """Measure each library that is installed, and print a line of JSON for each."""
    rows = batch()
    for library in ("polars", "pandas"):
        spent_us = []
        try:
            for _ in range(BATCHES):
                began = time.process_time()
                as_arrow(frame_of(rows, library))
                spent_us.append((time.process_time() - began) * 1e6)
        except ModuleNotFoundError:
            continue
        print(json.dumps({"library": library, "us_per_batch": round(statistics.median(spent_us))}))


if __name__ == "__main__":
    main()
