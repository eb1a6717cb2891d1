"""A process that applies epoch after epoch to a store, until it is killed.

python lmdb_applier.py ROOT
"""

import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from tallystick.checkpoint.local import store as store_module
from tallystick.state.catalog import Version
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.overlay import ENTRIES

GROUPS = KeyGroupRange(0, 7)


def changes(epoch: int) -> Iterator[pa.RecordBatch]:
    """What an epoch changes, from its number alone: a batch per key group."""
    draw = random.Random(epoch)
    rows = {
        draw.randrange(8).to_bytes(2, "big") + b"\x01%05d" % draw.randrange(2000): (
            None if draw.random() < 0.2 else b"%d" % epoch * draw.randrange(9)
        )
        for _ in range(300)
    }
    for group in range(8):
        part = sorted((key, value) for key, value in rows.items() if key[1] == group)
        columns = [pa.array(column, pa.binary()) for column in zip(*part, strict=True)]
        yield pa.RecordBatch.from_arrays(columns, schema=ENTRIES)


def content_after(epoch: int) -> dict[bytes, bytes]:
    """What a store holds after epochs 1 to this one."""
    rows: dict[bytes, bytes | None] = {}
    for number in range(1, epoch + 1):
        for part in changes(number):
            rows.update(zip(*(column.to_pylist() for column in part.columns), strict=True))
    return {key: value for key, value in rows.items() if value is not None}


def work(root: Path) -> None:
    """Go on from whatever the store holds, for ever; from nothing by ten epochs at once."""
    store_module.CHUNK_ROWS = 200
    store = store_module.open_store(root, "lineage", "counts", GROUPS)
    for rounds in itertools.count():
        if rounds == 1:
            print("at work", flush=True)
        have = store.version()
        if have is None:
            steps = [change for epoch in range(1, 11) for change in changes(epoch)]
            store.apply(None, Version(10, "x"), [GROUPS, *steps])
        else:
            following = Version(have.epoch + 1, "x")
            store.apply(have, following, list(changes(following.epoch)))


if __name__ == "__main__":
    work(Path(sys.argv[1]))
