"""What the windows of the second keyed step must put out, told without the code that is tested.

* A record waits in its window until an epoch begins behind the watermark that passed its end.
* The watermark is the one that the first step went by in the epoch, less a delay, unless it is the
  final one; that is left by the epoch which reads all inputs to their ends, and by no other.
* A record whose window had closed when it came is late, and never visible.
* Each shows a count of its key that its own epoch gave out, and no other record shows it.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from tallystick.values import TopicPartition
from tests.simulation.keyed_step import WINDOW_DELAY_MS, WINDOW_MS
from tests.simulation.rows import Row, key_of, time_of

Place = tuple[TopicPartition, int]
Counts = dict[int, int]
FINAL_MS = (1 << 62) // 1000
"""The watermark at the end of all inputs."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A record in a window.

    Args:
        key: its own.
        closes_ms: the watermark that closes the window.
        counts: of its key, that its epoch gave out.
    """

    key: int
    closes_ms: int
    counts: range


@dataclass(frozen=True)
class Moment:
    """What the step has after an epoch."""

    waiting: dict[Place, Waiting] = field(default_factory=dict)
    watermark_ms: int | None = None

    def is_closed(self, closes_ms: int) -> bool:
        """Whether the watermark has passed the end of a window."""
        return self.watermark_ms is not None and closes_ms <= self.watermark_ms


class WindowOracle:
    """Follows the records of all epochs through their windows."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.now = Moment()
        self._note = note
        self._at = {-1: self.now, 0: self.now}  # by epoch; 0: a lineage began
        self._due: dict[Place, Waiting] = {}
        self._fired: dict[tuple[str, int], Collection[Place]] = {}  # by lineage and epoch
        self._lineage = ""
        self.late = 0

    def begin(self, lineage: str, epoch: int) -> None:
        """The pipeline goes on after an epoch that was committed; -1: from nothing."""
        self.now, self._lineage = self._at[epoch], lineage
        for at in [place for place in self._fired if place[0] == lineage and place[1] > epoch]:
            del self._fired[at]  # these were taken back

    @property
    def fired(self) -> Counter[Place]:
        """How often each input record is to be visible."""
        return Counter(at for fired in self._fired.values() for at in fired)

    def pass_on(
        self, epoch: int, rows: Iterable[Row], counts: Counts, handed_ms: int | None
    ) -> list[Place]:
        """Take in what an epoch read; return whose windows it put out.

        Args:
            epoch: its number.
            rows: that the first step was given.
            counts: of each key so far; these rows are added.
            handed_ms: the watermark that the first step went by; None: it had none yet.
        """
        before = self.now
        self._due = {
            at: row for at, row in before.waiting.items() if before.is_closed(row.closes_ms)
        }
        waiting = {at: row for at, row in before.waiting.items() if at not in self._due}
        rows = list(rows)
        added = Counter(key_of(row.source, row.offset) for row in rows)
        ranges = {
            key: range(counts.get(key, 0) + 1, counts.get(key, 0) + count + 1)
            for key, count in added.items()
        }
        for row in rows:
            time, key = time_of(row.source, row.offset), key_of(row.source, row.offset)
            closes_ms = time // WINDOW_MS * WINDOW_MS + WINDOW_MS - 1
            if before.is_closed(closes_ms):
                self.late += 1
            else:
                waiting[row.source, row.offset] = Waiting(key, closes_ms, ranges[key])
        for key, count in added.items():
            counts[key] = counts.get(key, 0) + count
        watermark_ms = handed_ms
        if handed_ms is not None and handed_ms != FINAL_MS:
            watermark_ms = handed_ms - WINDOW_DELAY_MS
        self.now = self._at[epoch] = Moment(waiting, watermark_ms)
        self._fired[self._lineage, epoch] = list(self._due)
        return list(self._due)

    def look_at(self, epoch: int, rows: Iterable[Row]) -> None:
        """Compare the rows of an epoch with what its windows held; which they are is not judged."""
        for row in rows:
            due = self._due.get((row.source, row.offset))
            if due is not None and (row.key != due.key or row.nth not in due.counts):
                self._note(
                    f"epoch {epoch}: {row.source} {row.offset} shows key {row.key} counted "
                    f"{row.nth}, expected key {due.key}, one of {due.counts}"
                )

    def at_the_end(self, rows: Sequence[Row]) -> None:
        """No two records of a lineage show the same count of a key."""
        counted = Counter((row.lineage, row.key, row.nth) for row in rows if not row.foreign)
        if twice := [place for place, count in counted.items() if count > 1]:
            self._note(f"counted twice: {sorted(twice)}")
