"""What a value format makes of a column of bytes, the same for every format."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Where = Callable[[int], str]
"""Names the topic, partition and offset of an input row."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """Typed rows, and which records were malformed.

    Args:
        columns: exactly the asked-for schema; one row per kept record.
        rows: the indices of the kept input rows; None: all were kept.
        reasons: what is wrong with each malformed input row, by its index.
    """

    columns: pa.RecordBatch
    rows: NDArray[np.int64] | None = None
    reasons: Mapping[int, str] = field(default_factory=dict)


class ValueReader(Protocol):
    """Turns values into columns; a plain value, pickled to tasks."""

    @property
    def schema(self) -> pa.Schema:
        """The columns that `parse` returns."""
        ...

    def parse(self, values: pa.Array, mode: str, where: Where) -> Parsed:
        """Parse one value per record.

        Args:
            values: binary; a null (tombstone) is a row of nulls in every mode, never malformed.
            mode: one of `json_format.MODES`: failfast raises at the first malformed record;
                permissive keeps it as a row of nulls; dropmalformed and deadletter leave it out.
                All but failfast say why in `Parsed.reasons`.
            where: for messages.

        Raises:
            RecordError: a record is malformed, in mode failfast; the first one is named.
        """
        ...
