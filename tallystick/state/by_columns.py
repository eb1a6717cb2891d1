"""A function that cannot be made before the columns of its rows are known."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from tallystick.errors import BrokenInvariantError
from tallystick.state.key_bytes import KeyCodec
from tallystick.state.processing import NO_TIME, Declared, Work
from tallystick.state.vectorised import Vectorised


@dataclass(frozen=True)
class ByColumns:
    """Types that the user did not say are those of the columns.

    Args:
        make: from the columns of the rows to the function.
        reads: as `Processor.reads`.
    """

    make: Callable[[pa.Schema], Vectorised]
    reads: frozenset[str]
    time_mode: str = NO_TIME
    has_timers: bool = False

    def declared(self, key: KeyCodec) -> tuple[Declared, ...]:
        """Not known yet."""
        raise BrokenInvariantError("a function by columns was not made before it was asked")

    def output(self, key: pa.Schema, rows: pa.Schema) -> pa.Schema | None:
        """See `Processor.output`."""
        return self.make(rows).output(key, rows)

    def run(self, work: Work) -> Iterator[pa.RecordBatch]:
        """See `Processor.run`."""
        return self.make(work.rows.schema).run(work)
