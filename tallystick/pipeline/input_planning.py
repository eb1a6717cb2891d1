"""The plan of an epoch over all inputs of a pipeline: where each begins, and where it ends.

Inputs are matched by id, not by order: a manifest's positions go to the input of the same id. The
offsets that an epoch may span are divided among the inputs that have something to read, so that a
backlog of one does not hold up another.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tallystick.errors import OptionError
from tallystick.source.offsets import SourceOffsets, from_text, of_input, unmoved
from tallystick.source.splits import fair_shares, plan_splits
from tallystick.tasks.event_times import InputState
from tallystick.values import TopicPartition

Positions = tuple[SourceOffsets, ...]
"""The positions of each input, in the order of the pipeline."""
Ahead = Callable[[InputState], frozenset[TopicPartition]]
"""The partitions that are to wait for others, as `of_input` names them."""


def by_input(
    texts: Sequence[str], previous_uids: Mapping[str, str] | None = None
) -> dict[str, SourceOffsets]:
    """Return the positions of a manifest, by the input's id.

    Args:
        texts: the positions.
        previous_uids: the ids that inputs may have there, by those they have now.
    """
    known = {offsets.input: offsets for offsets in map(from_text, texts)}
    for uid, previous in (previous_uids or {}).items():
        if previous in known and uid not in known:
            known[uid] = replace(known.pop(previous), input=uid)
    return known


def dropped_word(uid: str) -> str:
    """Return the word by which a user accepts that an input's positions are forgotten."""
    return f"dropped-input-{uid}"


def check_none_gone(
    known: Mapping[str, SourceOffsets],
    uids: Sequence[str],
    accepted: frozenset[str] = frozenset(),
) -> None:
    """Refuse to forget the positions of an input.

    Args:
        known: the positions of a manifest, by input.
        uids: of the pipeline's inputs.
        accepted: decisions that the user stated.

    Raises:
        OptionError: the pipeline no longer has one of them, and that is not accepted.
    """
    for uid in sorted(known.keys() - set(uids)):
        if dropped_word(uid) not in accepted:
            topics = ", ".join(sorted({partition.topic for partition in known[uid].positions}))
            raise OptionError(
                f"the checkpoint has positions of input {uid!r} (topics {topics}), and the "
                f"pipeline reads only {', '.join(map(repr, uids))}: they would be forgotten. If it "
                f"has another name now, give it its id: ts.stream(source, uid={uid!r}). If it is "
                f"to go, start once with accept=[{dropped_word(uid)!r}]"
            )


class Planner(Protocol):
    """Plans one input; see `streaming.planning.StreamPlanner`."""

    waiting: int

    def stop_at_what_is_there(self) -> None:
        """Make the next look the last one."""
        ...

    def first(self) -> SourceOffsets:
        """Return where a new pipeline starts."""
        ...

    def look(self, start: SourceOffsets) -> None:
        """Look at topics and ends, and set `waiting`."""
        ...

    def hold(self, partitions: frozenset[TopicPartition]) -> None:
        """Read nothing of these in the next plan, and set `waiting` again."""
        ...

    def plan(self, start: SourceOffsets, offset_count_max: int | None) -> SourceOffsets:
        """Return the next offsets by the newest look; `start` itself where there are none."""
        ...

    def next(self, start: SourceOffsets, offset_count_max: int | None) -> SourceOffsets:
        """Look and plan."""
        ...

    def latest(self) -> SourceOffsets | None:
        """Return the ends of logs as last seen."""
        ...


@dataclass(frozen=True)
class InputPlanner:
    """The planner of one input, with the user's bound on the offsets of an epoch.

    Args:
        uid: of the input.
        planner: asks its cluster.
        offset_count_max: the most that an epoch may span; None: the user sets none.
        takes_all: it reads all there is in one epoch.
        waits: the watermark waits for its partitions; not for those of a broadcast table, or of an
            input whose rows have no event times.
        previous_uid: the id under which a manifest may have its positions; None: the same.
    """

    uid: str
    planner: Planner
    offset_count_max: int | None = None
    takes_all: bool = False
    waits: bool = True
    previous_uid: str | None = None

    @property
    def wanted(self) -> int:
        """The number of offsets that the next epoch may span, as far as the input goes."""
        waiting = self.planner.waiting
        return waiting if self.offset_count_max is None else min(waiting, self.offset_count_max)


class InputPlanners:
    """The planners of all inputs of one run.

    Args:
        inputs: in the order of the pipeline.
        accepted: decisions that the user stated.
    """

    def __init__(
        self, inputs: Sequence[InputPlanner], accepted: frozenset[str] = frozenset()
    ) -> None:
        self._inputs = tuple(inputs)
        self._accepted = accepted

    def stop_at_what_is_there(self) -> None:
        """Plan no further than what can be read now."""
        for source in self._inputs:
            source.planner.stop_at_what_is_there()

    def positions(self, start: tuple[str, ...]) -> Positions:
        """Return where each input goes on, or begins.

        Args:
            start: of the manifest before; empty: there is none.

        Raises:
            OptionError: an input is gone, and that is not accepted.
        """
        known = self._known(start)
        check_none_gone(known, [source.uid for source in self._inputs], self._accepted)
        return tuple(
            known.get(source.uid) or replace(source.planner.first(), input=source.uid)
            for source in self._inputs
        )

    def has_dropped(self, start: tuple[str, ...]) -> bool:
        """True if a manifest has positions of an input that is gone."""
        return bool(self._known(start).keys() - {source.uid for source in self._inputs})

    def _known(self, start: tuple[str, ...]) -> dict[str, SourceOffsets]:
        pairs = ((source.uid, source.previous_uid) for source in self._inputs)
        return by_input(start, {uid: previous for uid, previous in pairs if previous})

    def next(
        self, start: Positions, offset_count_max: int | None, ahead: Ahead | None = None
    ) -> Positions:
        """Return where an epoch ends; `start` itself when there is none to run.

        Args:
            start: where each input goes on.
            offset_count_max: the most offsets that the epoch may span; None: no limit.
            ahead: returns the partitions that are to wait for others; None: no partition waits.
        """
        if len(self._inputs) == 1 and ahead is None:
            stop = self._inputs[0].planner.next(start[0], offset_count_max)
            return start if stop is start[0] else (stop,)
        for source, position in zip(self._inputs, start, strict=True):
            source.planner.look(position)
        if ahead is not None and (waiting := ahead(self.state(start))):
            for source, position in zip(self._inputs, start, strict=True):
                paused = {at for at in position.positions if of_input(source.uid, at) in waiting}
                source.planner.hold(frozenset(paused))
        stops = [
            source.planner.plan(position, count)
            for source, position, count in zip(
                self._inputs, start, self._counts(offset_count_max), strict=True
            )
        ]
        pairs = list(zip(stops, start, strict=True))
        if all(stop is position for stop, position in pairs):
            return start
        return tuple(unmoved(stop) if stop is position else stop for stop, position in pairs)

    def _counts(self, offset_count_max: int | None) -> list[int | None]:
        """Return how many offsets each input may add to the next epoch; None: no limit."""
        if offset_count_max is None:
            return [source.offset_count_max for source in self._inputs]
        wanted = [0 if source.takes_all else source.wanted for source in self._inputs]
        shares = fair_shares(wanted, offset_count_max)
        return [
            None if source.takes_all else max(1, count)
            for source, count in zip(self._inputs, shares, strict=True)
        ]

    @property
    def waiting(self) -> int:
        """The number of offsets readable at the newest plan, those beyond its limit too."""
        return sum(source.planner.waiting for source in self._inputs)

    def is_held_back(self, start: Positions, stops: Positions) -> bool:
        """True if an epoch leaves something only because users' bounds of inputs say so."""
        for source, before, after in zip(self._inputs, start, stops, strict=True):
            count = count_of([before], [after])
            is_at_bound = source.offset_count_max is not None and count >= source.offset_count_max
            if count < source.planner.waiting and not is_at_bound:
                return False
        return True

    def latest(self) -> dict[str, SourceOffsets | None]:
        """Return the ends of logs as last seen, by input."""
        ends_by_uid = {source.uid: source.planner.latest() for source in self._inputs}
        return {
            uid: None if ends is None else replace(ends, input=uid)
            for uid, ends in ends_by_uid.items()
        }

    def state(self, stops: Positions, clock_ms: int | None = None) -> InputState:
        """Return the state of the input for an epoch up to `stops`, by the newest look at it.

        Args:
            stops: where the epoch ends.
            clock_ms: see `InputState`.
        """
        all_ends = self.latest()
        without = {source.uid for source in self._inputs if not source.waits}
        partitions: set[TopicPartition] = set()
        unfinished: set[TopicPartition] = set()
        begun: set[TopicPartition] = set()
        ended: set[TopicPartition] = set()
        for stop in (offsets for offsets in stops if offsets.input not in without):
            ends, last = all_ends.get(stop.input), stop.stops or {}
            for at, position in stop.positions.items():
                name = of_input(stop.input, at)
                partitions.add(name)
                if _is_at_end(stop, at):
                    ended.add(name)
                end = None if ends is None else ends.positions.get(at, position)
                # Not looked yet: an epoch of an earlier run runs again.
                if end is None or min(end, last.get(at, end)) > position:
                    unfinished.add(name)
            begun |= {of_input(stop.input, at) for at in stop.starts}
        return InputState(
            frozenset(partitions),
            frozenset(unfinished),
            frozenset(begun),
            frozenset(ended),
            is_over=self._are_over(stops, without),
            clock_ms=clock_ms,
        )

    @staticmethod
    def _are_over(stops: Positions, without: Collection[str]) -> bool:
        """True if nothing can come any more that has an event time, or goes by an end of its own.

        Args:
            stops: where an epoch ends.
            without: inputs whose rows have no event times: they are waited for if they have an end.
        """
        waited_for = [stop for stop in stops if stop.stops is not None or stop.input not in without]
        return any(stop.input not in without for stop in waited_for) and all(
            not stop.initial and all(_is_at_end(stop, at) for at in stop.positions)
            for stop in waited_for
        )


def _is_at_end(offsets: SourceOffsets, partition: TopicPartition) -> bool:
    """True if a partition is read to where reading ends for good."""
    stop = None if offsets.stops is None else offsets.stops.get(partition)
    return stop is not None and offsets.positions[partition] >= stop


def count_of(start: Sequence[SourceOffsets], stops: Sequence[SourceOffsets]) -> int:
    """Return how many offsets lie between two positions of the same inputs."""
    pairs = zip(start, stops, strict=True)
    return sum(split.offset_count for pair in pairs for split in plan_splits(*pair))


def text_of(offsets: SourceOffsets) -> str:
    """Return positions as a manifest has them."""
    return json.dumps(offsets.to_json(), separators=(",", ":"))
