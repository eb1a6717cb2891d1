"""JSON as the format of a record's value: what a user asks for; the reader and writer do it."""

from dataclasses import dataclass

from tallystick.errors import OptionError

FAILFAST = "failfast"
PERMISSIVE = "permissive"
DROPMALFORMED = "dropmalformed"
DEADLETTER = "deadletter"
MODES = (FAILFAST, PERMISSIVE, DROPMALFORMED, DEADLETTER)


@dataclass(frozen=True, slots=True)
class Json:
    """One JSON object per record, as typed columns.

    Args:
        schema: the fields to read, as Spark DDL text such as `"dest string, dep_delay double"`;
            fields that a record has beyond them are ignored, missing ones are null. A sink needs
            none: it writes all columns.
        mode: what a malformed record does. `"failfast"` stops the query and names the record;
            `"permissive"` makes it a row of nulls with its raw bytes in the column
            `_corrupt_record`; `"dropmalformed"` leaves it out and counts it; `"deadletter"` writes
            it to the sink's `dead_letter_topic`, in the same transaction (in a Pipeline only). A
            record without a value (a tombstone) is a row of nulls in every mode.

    Raises:
        OptionError: the mode is none of the four, or the schema is empty text.
    """

    schema: str | None = None
    mode: str = FAILFAST

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise OptionError(f"Json(mode={self.mode!r}): choose one of {', '.join(MODES)}")
        if self.schema is not None and not self.schema.strip():
            raise OptionError(
                "Json(schema=...) is empty: name the fields to read as Spark DDL, "
                "e.g. 'dest string, dep_delay double'"
            )
