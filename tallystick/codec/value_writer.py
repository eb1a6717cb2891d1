"""Writers that turn columns into values of records: the interface, and the writer of JSON."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tallystick.codec.json_writer import BINARY_BYTES_MAX, check_schema, write_json


class ValueWriter(Protocol):
    """Turns columns into values; a plain value, pickled to tasks."""

    def check(self, columns: pa.Schema) -> None:
        """Refuse columns that the format cannot hold, before any rows come.

        Raises:
            OptionError: a column is of the wrong type, missing, or one that the format cannot hold.
        """
        ...

    def write(self, columns: pa.RecordBatch) -> pa.Array:
        """Write one value per row, of all columns.

        Returns:
            binary, never null; large_binary where it is more than 2 GiB.

        Raises:
            OptionError: `check` would have raised it.
            RecordError: a row holds a value that the format cannot hold.
        """
        ...


@dataclass(frozen=True, slots=True)
class JsonWriter:
    """One JSON object per row; a `ValueWriter`."""

    def check(self, columns: pa.Schema) -> None:
        """See `ValueWriter.check`."""
        check_schema(columns)

    def write(self, columns: pa.RecordBatch) -> pa.Array:
        """See `ValueWriter.write`."""
        return write_json(columns)


def binary_array(data: pa.Buffer, offsets: NDArray[np.int64]) -> pa.Array:
    """Return adjacent values as a binary array; large_binary beyond 2 GiB.

    Args:
        data: the bytes of all values.
        offsets: where each value begins, and the end of the last.
    """
    is_large = offsets[-1] > BINARY_BYTES_MAX
    kind = pa.large_binary() if is_large else pa.binary()
    places = offsets if is_large else offsets.astype(np.int32)
    return pa.Array.from_buffers(kind, len(offsets) - 1, [None, pa.py_buffer(places), data])
