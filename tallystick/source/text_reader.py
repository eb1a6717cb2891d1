"""Values as text: strictly valid UTF-8, checked for a whole column in one pass.

Spark's own `cast(value as string)` puts U+FFFD where bytes are no text, and nobody hears of it.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.formats import FAILFAST, MODES, PERMISSIVE
from tallystick.source.parsed import Parsed, Where, malformed_error

TEXT_SCHEMA = pa.schema([pa.field("value", pa.string())])


@dataclass(frozen=True)
class TextReader:
    """Values that are UTF-8 text, in one column `value`; a `ValueReader`."""

    schema: ClassVar[pa.Schema] = TEXT_SCHEMA

    def parse(self, values: pa.Array, mode: str, where: Where) -> Parsed:
        """See `ValueReader.parse`."""
        assert mode in MODES, mode
        try:
            return Parsed(_batch(values.cast(pa.string())))
        except pa.ArrowInvalid:
            reasons = _reasons(values)
        if mode == FAILFAST:
            row, reason = next(iter(reasons.items()))
            raise malformed_error(values, row, "UTF-8 text", reason, where(row))
        good = np.ones(len(values), np.bool_)
        good[list(reasons)] = False
        if mode == PERMISSIVE:
            readable = pc.if_else(pa.array(good), values, pa.scalar(None, values.type))
            return Parsed(_batch(readable.cast(pa.string())), None, reasons)
        kept = values.filter(pa.array(good)).cast(pa.string())
        return Parsed(_batch(kept), np.flatnonzero(good), reasons)


def _batch(texts: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([texts], schema=TEXT_SCHEMA)


def _reasons(values: pa.Array) -> dict[int, str]:
    """What is wrong with each row that is no text; one pass over a batch that has such rows."""
    reasons = {}
    for row, value in enumerate(values.to_pylist()):
        try:
            if value is not None:
                value.decode()
        except UnicodeDecodeError as error:
            reasons[row] = f"it is not valid UTF-8: {error.reason} at byte {error.start}"
    assert reasons, "Arrow and Python disagree about what UTF-8 is"
    return reasons
