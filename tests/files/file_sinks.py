"""What tests of the file sink share: an owner, places, and rows with numbers of their own."""

import pyarrow as pa
import pyarrow.dataset as ds

from tallystick.api.file_sink import FileSink
from tallystick.epoch.two_phase import Owner, Place, RunFacts
from tallystick.files.drafts import SEEN, name_of

OWNER = Owner("a/b pipeline", "files-0", "f00d")


def place(checkpoint_id=1, task=0, attempt=0, nonce="ab12", owner=OWNER):
    return Place(owner, checkpoint_id, task, attempt, nonce)


def final(at):
    """The name of the one file of an attempt."""
    return f"part-{name_of(at)}.parquet"


def rows(start, stop):
    numbers = range(start, stop)
    dest = pa.array([("ORD", "a/b", None)[n % 3] for n in numbers], pa.string())
    return pa.record_batch({"n": pa.array(numbers, pa.int64()), "dest": dest})


def opened(path, owner=OWNER, **settings):
    return FileSink(str(path), **settings).open(owner, RunFacts())


def prepared(sink, at, *batches):
    """The committables of one attempt."""
    transaction = sink.plan().begin(at)
    for batch in batches:
        transaction.write(batch)
    return list(transaction.prepare())


def visible(path, filesystem=None):
    """The numbers that an independent reader finds."""
    by = ds.partitioning(pa.schema([("dest", pa.string())]), flavor="hive")
    dataset = ds.dataset(str(path), format="parquet", partitioning=by, filesystem=filesystem)
    return sorted(dataset.to_table(columns=["n"])["n"].to_pylist()) if dataset.files else []


def files_below(path):
    """All but what a driver writes when it starts."""
    files = (file for file in path.rglob("*") if file.is_file() and file.name != SEEN)
    return sorted(str(file.relative_to(path)) for file in files)
