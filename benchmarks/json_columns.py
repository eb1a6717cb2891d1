"""What JSON costs per record on one core: our reader and writer beside the usual ways.

    python benchmarks/json_columns.py [record_count]

Two kinds of records: those of the comparison with the other engines, about 110 bytes, and flights
with nulls, dates and timestamps; then the first kind with what makes reading harder. CPU time,
best of several runs, so that a busy machine disturbs little. `orjson` takes part where it is
installed; both it and `json` make Python objects, which is not yet a column.
"""

import importlib.util
import json
import sys
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from tallystick.codec.json import read as json_reader
from tallystick.codec.json import write as json_writer
from tallystick.codec.json.read import parse_json
from tallystick.codec.json.write import write_json

RECORD_COUNT = 200_000
BATCH_ROWS = 65_536
RUNS = 5


def peer_records(count: int) -> pa.RecordBatch:
    """Six fields, as in the comparison with the other engines."""
    random = np.random.default_rng(1)
    users = random.integers(0, 100_000, count)
    return pa.record_batch(
        {
            "user": pa.array([f"user-{user}" for user in users]),
            "session": pa.array([f"{n:016x}" for n in random.integers(0, 2**60, count)]),
            "country": pa.array(random.choice(["us", "de", "fr", "jp"], count)),
            "amount": pa.array(np.round(random.random(count) * 1000, 2)),
            "seq": pa.array(np.arange(count)),
            "ts": pa.array(1_700_000_000_000 + np.arange(count)),
        }
    )


def flight_records(count: int) -> pa.RecordBatch:
    """Twelve fields of each type that flights have; some delays are null."""
    random = np.random.default_rng(2)
    cancelled = random.random(count) < 0.03
    minutes = pa.array(1_356_998_400 + 60 * np.arange(count)).cast(pa.timestamp("s"))
    return pa.record_batch(
        {
            "carrier": pa.array(random.choice(["UA", "AA", "B6", "DL"], count)),
            "flight": pa.array(random.integers(1, 8500, count).astype(np.int32)),
            "tailnum": pa.array([f"N{n}UA" for n in random.integers(100, 999, count)]),
            "origin": pa.array(random.choice(["EWR", "JFK", "LGA"], count)),
            "dest": pa.array(random.choice(["IAH", "MIA", "BQN", "ATL"], count)),
            "dep_delay": pa.array(random.integers(-20, 300, count).astype(float), mask=cancelled),
            "arr_delay": pa.array(random.integers(-50, 300, count).astype(float), mask=cancelled),
            "air_time": pa.array(random.integers(30, 600, count), mask=cancelled),
            "distance": pa.array(random.integers(90, 5000, count)),
            "late": pa.array(random.random(count) < 0.3),
            "day": minutes.cast(pa.date32()),
            "scheduled": minutes.cast(pa.timestamp("us", "UTC")),
        }
    )


def cpu_seconds(work: Callable[[], object]) -> float:
    """The least CPU time of several runs."""
    times = []
    for _ in range(RUNS):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def batches(columns: pa.RecordBatch) -> list[pa.RecordBatch]:
    """The rows in batches of the size that a fetch brings."""
    return [columns.slice(at, BATCH_ROWS) for at in range(0, columns.num_rows, BATCH_ROWS)]


def readers(columns: pa.RecordBatch) -> dict[str, Callable[[], object]]:
    """The ways to read the records, by name."""
    values = [write_json(batch) for batch in batches(columns)]
    texts = [text for array in values for text in array.to_pylist()]
    ways: dict[str, Callable[[], object]] = {
        "tallystick": lambda: [
            parse_json(array, columns.schema, "failfast", str) for array in values
        ],
        "json.loads": lambda: [json.loads(text) for text in texts],
    }
    if importlib.util.find_spec("orjson"):
        import orjson

        ways["orjson.loads"] = lambda: [orjson.loads(text) for text in texts]
    return ways


def writers(columns: pa.RecordBatch) -> dict[str, Callable[[], object]]:
    """The ways to write the records, by name."""
    rows = columns.to_pylist()
    ways: dict[str, Callable[[], object]] = {
        "tallystick": lambda: [write_json(batch) for batch in batches(columns)],
        "json.dumps": lambda: [json.dumps(row, default=str).encode() for row in rows],
    }
    if importlib.util.find_spec("orjson"):
        import orjson

        ways["orjson.dumps"] = lambda: [orjson.dumps(row) for row in rows]
    return ways


def harder(columns: pa.RecordBatch) -> dict[str, tuple[list[bytes], pa.Schema]]:
    """Records and what they are read as, by what is special about them."""
    schema = columns.schema
    records = write_json(columns).to_pylist()
    escaped = [record.replace(b'"user-', b'"\\u00e9\\n') for record in records]
    in_key = [record.replace(b'"user"', b'"us\\u0065r"') for record in records]
    typed = [record.replace(b'"seq":', b'"seq":"x","s":') for record in records]
    extra = [record[:-1] + b',"tags":["a",{"b":1}]}' for record in records]
    nested = schema.append(pa.field("tags", pa.list_(pa.string())))
    return {
        "1 % cut short": (every(100, records, [record[:-1] for record in records]), schema),
        "1 % with escapes": (every(100, records, escaped), schema),
        "all with escapes": (escaped, schema),
        "1 % left to Arrow": (every(100, records, in_key), schema),
        "all left to Arrow": (in_key, schema),
        "half wrongly typed": (every(2, records, typed)[:4096], schema),
        "a nested field more": (extra, schema),
        "a nested field declared": (records, nested),
    }


def every(step: int, records: list[bytes], others: list[bytes]) -> list[bytes]:
    """The records, but each `step`-th one from the others."""
    return [others[row] if row % step == 0 else record for row, record in enumerate(records)]


def main(record_count: int) -> None:
    """Print records per second of every way, and microseconds per record."""
    json_reader.warm_up()
    json_writer.warm_up()
    for name, columns in (
        ("peers", peer_records(record_count)),
        ("flights", flight_records(record_count)),
    ):
        size = write_json(columns).nbytes / record_count
        print(f"{name}: {columns.num_columns} fields, about {size:.0f} bytes")
        for direction, ways in (("read", readers(columns)), ("write", writers(columns))):
            for way, work in ways.items():
                seconds = cpu_seconds(work)
                rate, each_us = record_count / seconds, seconds / record_count * 1e6
                print(f"  {direction:5}  {way:12}  {rate:>12,.0f} records/s  {each_us:.3f} us each")
    print("peers, in one batch, mode permissive")
    for name, (records, schema) in harder(peer_records(BATCH_ROWS)).items():
        array = pa.array(records, pa.binary())
        seconds = cpu_seconds(lambda a=array, s=schema: parse_json(a, s, "permissive", str))
        print(f"  read   {name:24}  {seconds / len(array) * 1e6:.3f} us each")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else RECORD_COUNT)
