"""Policies for records that were lost before they were read, and for unreadable records.

Each policy other than `fail` gives something up, so a person chooses it; the log says what is given
up, with the partition and from which offset to which.
"""

from dataclasses import dataclass

FAIL = "fail"
SKIP = "skip"
KEEP = "keep"
DROP = "drop"
RESTART = "restart"
RESUME = "resume"

ON_EXPIRED = (FAIL, SKIP)
ON_REMOVED = (FAIL, KEEP, DROP)
ON_RECREATED = (FAIL, RESTART)
ON_TRUNCATED = (FAIL, RESUME)
ON_UNREADABLE = (FAIL, SKIP)

KEEP_MS = 3_600_000
"""The time for which `keep` holds the position of a partition that is gone."""


@dataclass(frozen=True, slots=True)
class LossPolicy:
    """One choice per way in which records can be lost; the default is to stop.

    Args:
        expired: `fail`, or `skip`: go on at the first record that is left.
        removed: `fail`; `keep`: hold the position between epochs for `keep_ms`, then drop it (an
            epoch that was planned before fails); `drop`: at once.
        recreated: `fail`, or `restart`: give up what was unread in the old topic, and read the new
            one from its beginning.
        truncated: `fail`, or `resume`: go on at the new end of the log.
        keep_ms: see `removed`.
        unreadable: `fail`, or `skip`: go on after a record batch whose checksum is right and that
            cannot be read, since a faulty producer wrote it so.
    """

    expired: str = FAIL
    removed: str = FAIL
    recreated: str = FAIL
    truncated: str = FAIL
    keep_ms: int = KEEP_MS
    unreadable: str = FAIL

    def __post_init__(self) -> None:
        assert self.expired in ON_EXPIRED, self
        assert self.removed in ON_REMOVED, self
        assert self.recreated in ON_RECREATED, self
        assert self.truncated in ON_TRUNCATED, self
        assert self.unreadable in ON_UNREADABLE, self
        assert self.keep_ms >= 0, self


LENIENT = LossPolicy(expired=SKIP, removed=DROP, recreated=RESTART, truncated=RESUME)
"""The meaning of Spark's `failOnDataLoss=false`."""
