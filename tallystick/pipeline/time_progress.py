"""The event times of a run's partitions, for plans, progress and log."""

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from tallystick.source.offsets import from_text, of_input
from tallystick.state.catalog import StepState
from tallystick.tasks.epoch_plan import PipelinePlan
from tallystick.tasks.event_times import EventTimesOfEpoch, InputState
from tallystick.values import TopicPartition

logger = logging.getLogger(__name__)

TELL_AGAIN_S = 60.0
"""The time between two lines of the log about partitions that wait."""
NAMED_MAX = 50
"""The most partitions that a progress names of each kind: it is kept for 100 epochs."""


class TimeProgress:
    """The event times of a run's partitions, and the partitions that wait for slower ones.

    A partition is mute if the newest records that were read of it gave no event time: functions
    drop the rows, or the rows have none. How far it is then is not known, and nobody waits for it.

    Args:
        name: of the pipeline.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._newest: EventTimesOfEpoch | None = None
        self._moving: frozenset[TopicPartition] = frozenset()
        self._mute: frozenset[TopicPartition] = frozenset()
        self._waiting: frozenset[TopicPartition] = frozenset()
        self._warned_s: float | None = None

    def planned(self, start: Iterable[str], stops: Iterable[str]) -> frozenset[TopicPartition]:
        """Take in what the next epoch reads; return the partitions that may bring event times.

        Args:
            start: the positions before, as a manifest has them.
            stops: those where it ends.
        """
        known = {offsets.input: offsets.positions for offsets in map(from_text, start)}
        self._moving = frozenset(
            of_input(stop.input, at)
            for stop in map(from_text, stops)
            for at, position in stop.positions.items()
            if position != known.get(stop.input, {}).get(at) or at in stop.starts
        )
        return self._moving - self._mute

    def note(self, times: EventTimesOfEpoch) -> None:
        """Take in what an epoch left; see `PipelinePlan.on_event_times`."""
        self._newest, self._mute = times, (self._mute | self._moving) - times.timed

    def ahead(
        self, keyed: PipelinePlan, state: tuple[StepState, ...], source: InputState
    ) -> frozenset[TopicPartition]:
        """Return the partitions that wait in the next epoch, and warn of them now and then."""
        self._waiting = keyed.ahead(state, self._mute, source)
        if not self._waiting:
            self._warned_s = None
        elif self._warned_s is None or time.monotonic() >= self._warned_s + TELL_AGAIN_S:
            self._warned_s = time.monotonic()
            logger.warning(
                "pipeline %s: %s wait: their event times are more than max_drift (%d ms) ahead of "
                "the slowest partition with unread records",
                self._name,
                ", ".join(_names(self._waiting)[:5])
                + (" and others" if len(self._waiting) > 5 else ""),
                keyed.max_drift_ms,
            )
        return self._waiting

    def describe(self) -> Mapping[str, Any] | None:
        """Return the newest epoch's event times for the progress, or None without event times."""
        newest = self._newest
        if newest is None:
            return None
        kinds = {
            "waitedFor": newest.waited_for,
            "idle": newest.idle,
            "ended": newest.ended,
            "held": self._waiting,
        }
        return {
            "watermark": newest.watermark_ms,
            "slowest": None if newest.slowest is None else str(newest.slowest),
            "counts": {kind: len(partitions) for kind, partitions in kinds.items()},
            **{kind: _names(partitions)[:NAMED_MAX] for kind, partitions in kinds.items()},
        }


def _names(partitions: Iterable[TopicPartition]) -> list[str]:
    return [str(partition) for partition in sorted(partitions)]
