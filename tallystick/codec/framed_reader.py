"""JSON values in Confluent's wire format: a zero byte, a schema's id (int32), and the JSON text.

The text names its fields itself, so the id is not looked up: columns are found by name, as in JSON
without a frame.

Source: https://docs.confluent.io/platform/current/schema-registry/fundamentals/serdes-develop/
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tallystick.codec.avro import kernels
from tallystick.codec.avro.columns import text_array
from tallystick.codec.formats import FAILFAST, MODES, PERMISSIVE
from tallystick.codec.json_reader import JsonReader
from tallystick.codec.spans import Spans, spans_of
from tallystick.codec.value_reader import ParsedValues, Where, malformed_error, nulls

BATCH_BYTES_MAX = 1 << 30
"""The bytes that are unwrapped at once: Arrow's offsets have 31 bits."""
EXPECTED = (
    "JSON in Confluent's wire format (byte 0, four bytes of schema id, an object of the schema)"
)


@dataclass(frozen=True, slots=True)
class FramedJsonReader:
    """A `ValueReader` of JSON in Confluent's wire format.

    Args:
        json: the reader of the text.
    """

    json: JsonReader

    @property
    def schema(self) -> pa.Schema:
        """See `ValueReader.schema`."""
        return self.json.schema

    def parse(self, values: pa.Array, mode: str, where: Where) -> ParsedValues:
        """See `ValueReader.parse`."""
        assert mode in MODES, mode
        spans = spans_of(values, "value")
        batches: list[pa.RecordBatch] = []
        reasons: dict[int, str] = {}
        for first, last in spans.runs(BATCH_BYTES_MAX):
            texts, wrong = _unwrapped(spans, first, last)
            parsed = self.json.parse(texts, PERMISSIVE, where)
            batches.append(parsed.columns)
            reasons |= {
                first + row: why for row, why in sorted({**parsed.reasons, **wrong}.items())
            }
        columns = pa.concat_batches(batches) if batches else nulls(self.schema, 0)
        if reasons and mode == FAILFAST:
            row, reason = next(iter(reasons.items()))
            raise malformed_error(values, row, EXPECTED, reason, where(row))
        if not reasons or mode == PERMISSIVE:
            return ParsedValues(columns, None, reasons)
        kept = np.ones(len(values), np.bool_)
        kept[list(reasons)] = False
        return ParsedValues(columns.filter(pa.array(kept)), np.flatnonzero(kept), reasons)


def _unwrapped(spans: Spans, first: int, last: int) -> tuple[pa.Array, dict[int, str]]:
    """Return the JSON texts of a run of rows, null if missing, and the malformed rows' reasons."""
    starts, lengths = spans.starts[first:last], spans.lengths[first:last]
    ids, verdicts = np.zeros(last - first, np.int32), np.zeros(last - first, np.uint8)
    kernels.read_envelopes(spans.address, starts, lengths, ids, verdicts)
    good = verdicts == kernels.GOOD
    sizes = np.where(good, lengths - kernels.ENVELOPE_SIZE, 0)
    at = np.where(good, starts + spans.address + kernels.ENVELOPE_SIZE, 0)
    texts = text_array(pa.binary(), at, sizes, good.astype(np.uint8))
    reasons = {}
    for row in np.flatnonzero(~good & (verdicts != kernels.TOMBSTONE)).tolist():
        if verdicts[row] == kernels.TOO_SHORT:
            reasons[row] = (
                f"it has {lengths[row]} bytes, and the zero byte and the schema id alone take "
                f"{kernels.ENVELOPE_SIZE}"
            )
        else:
            first_byte = spans.data[starts[row]]
            reasons[row] = (
                f"it begins with byte {first_byte:#04x}, not with the zero byte of the format"
            )
    return texts, reasons
