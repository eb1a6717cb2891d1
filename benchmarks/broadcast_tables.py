"""The cost of broadcast tables in one process, and of joins with them.

    python benchmarks/broadcast_tables.py

Per size of a table: to make it of its entries, to put a hundred new rows in, to make the index of
its keys, all in CPU ms; and how many rows a second `ts.enrich` joins. CPU time of one thread.
"""

import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from tallystick.checkpoint.state_files import newest_entries
from tallystick.host import kernel_cache
from tallystick.state.keys import bodies
from tallystick.state.operator_state import KeyIndex, TableCodec, TableContent
from tallystick.state.overlay import one_batch
from tallystick.tasks.enrichment import Enrichment

COLUMNS = pa.schema([("id", pa.int64()), ("name", pa.string()), ("rate", pa.float64())])
SIZES = (10_000, 100_000, 1_000_000)
ROW_COUNT = 100_000
ROUNDS = 5


def entries_of(codec: TableCodec, first: int, count: int) -> pa.RecordBatch:
    """Rows of the control topic, as entries sorted by key."""
    ids = np.arange(first, first + count)
    columns = [pa.array(ids), pa.array(ids).cast(pa.string()), pa.array(ids.astype(float))]
    rows = pa.RecordBatch.from_arrays(columns, schema=COLUMNS)
    entries = codec.entries(rows, pa.array(np.zeros(count, np.bool_)))
    return one_batch(newest_entries([entries]), "entries", "")


def spent_ms(do: Callable[[], object]) -> float:
    """The least CPU time of some rounds."""
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        do()
        times.append(time.process_time() - start)
    return min(times) * 1000


def main() -> None:
    """Print a line per size."""
    kernel_cache.warm_up()
    pa.set_cpu_count(1)
    codec = TableCodec(COLUMNS, ["id"])
    join = Enrichment("table", ("key",), "left")
    print(f"{'rows':>10}{'made, ms':>10}{'100 rows in, ms':>17}{'index, ms':>11}{'joined/s':>13}")
    for size in SIZES:
        whole, more = entries_of(codec, 0, size), entries_of(codec, size, 100)
        content = TableContent.empty(codec).changed(whole)
        keys = np.random.default_rng(1).integers(0, size, ROW_COUNT)
        rows = pa.record_batch({"key": keys, "n": np.arange(ROW_COUNT)})
        join.join(rows, content)
        times = (
            spent_ms(lambda whole=whole: TableContent.empty(codec).changed(whole)),
            spent_ms(lambda content=content, more=more: content.changed(more)),
            spent_ms(lambda content=content: KeyIndex(bodies(content.entries))),
            spent_ms(lambda content=content, rows=rows: join.join(rows, content)),
        )
        building, put, index, joined = times
        rate = ROW_COUNT / joined * 1000
        print(f"{size:10,}{building:10.1f}{put:17.1f}{index:11.1f}{rate:13,.0f}")


if __name__ == "__main__":
    main()
