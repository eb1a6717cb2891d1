"""How far one split was asked for, and what stands in the way of its next records."""

import time
from uuid import UUID

from tallystick.kafka.error_policy import Attempts
from tallystick.kafka.protocol import NO_ID, topic_id_from
from tallystick.values import SplitRange

SILENCE_S = 5.0
"""Signs of a loss that are further apart say nothing about the time between them."""


class Cursor:
    """The position of one split: the next offset to ask for.

    Args:
        split: what to read.
    """

    def __init__(self, split: SplitRange) -> None:
        self.split = split
        self.partition = split.topic_partition
        self.position = split.start_offset
        self.topic_id = topic_id_from(split.topic_id)
        self.due = 0.0
        """`time.monotonic` before which it is not to be asked again."""
        self.attempts: Attempts | None = None
        """The failures since the last progress; None without any."""
        self._doubt = ""
        self._doubt_since = 0.0
        self._doubted_at = 0.0

    @property
    def is_done(self) -> bool:
        """True if all of it was read."""
        return self.position >= self.split.stop_offset

    def belongs_to(self, topic_id: UUID | None) -> bool:
        """True if the topic that is shown now can be the one that the split means."""
        known = topic_id is not None and topic_id != NO_ID and self.topic_id != NO_ID
        return not known or topic_id == self.topic_id

    def advance(self, next_offset: int, topic_id: UUID | None) -> None:
        """Take over how far an answer went, and from which topic it was."""
        assert next_offset > self.position, (self.split, self.position, next_offset)
        self.position = next_offset
        if topic_id is not None and topic_id != NO_ID:
            self.topic_id = topic_id
        self.attempts = None
        self._doubt = ""

    def doubt(self, what: str) -> float:
        """Note what an answer is a sign of; for how many seconds all of them have said the same.

        Args:
            what: the kind of loss; empty when the answer speaks against any.
        """
        now = time.monotonic()
        if self._doubt != what or now - self._doubted_at > SILENCE_S:
            self._doubt, self._doubt_since = what, now
        self._doubted_at = now
        return now - self._doubt_since

    def take_back(self, *doubts: str) -> None:
        """An answer speaks against these losses, and says nothing about others."""
        if self._doubt in doubts:
            self._doubt = ""

    def forgive(self, seconds: float) -> None:
        """Do not count time in which nobody was asking."""
        self._doubt_since += seconds
        self._doubted_at += seconds
        if self.attempts is not None:
            self.attempts.deadline += seconds
