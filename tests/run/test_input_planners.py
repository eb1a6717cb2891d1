"""Plans over several inputs, without Kafka: whose positions are whose, and what each may read."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.errors import OptionError
from tallystick.pipeline.input_planning import InputPlanner, InputPlanners, text_of
from tallystick.source.offsets import ONLY_INPUT, SourceOffsets, of_input
from tallystick.source.splits import fair_shares, limit_offsets
from tallystick.state.catalog import PartitionTime
from tallystick.tasks.event_times import InputState, ahead
from tallystick.values import TopicPartition

P, Q = TopicPartition("in", 0), TopicPartition("in", 1)


@dataclass
class Planner:
    """Logs with ends."""

    ends: dict[TopicPartition, int]
    waiting: int = 0
    withheld: frozenset[TopicPartition] = frozenset()

    def first(self) -> SourceOffsets:
        return SourceOffsets("cluster", "", dict.fromkeys(self.ends, 0), initial=True)

    def look(self, start: SourceOffsets) -> None:
        self.withheld = frozenset()
        self.waiting = sum(end - start.positions[at] for at, end in self.ends.items())

    def plan(self, start: SourceOffsets, offset_count_max: int | None) -> SourceOffsets:
        if not self.waiting and not start.initial:
            return start
        starts = start.positions if start.initial else {}
        ends = {
            at: start.positions[at] if at in self.withheld else end for at, end in self.ends.items()
        }
        stop = limit_offsets(start.positions, ends, offset_count_max)
        return replace(start, positions=stop, starts=starts, initial=False)

    def hold(self, partitions: frozenset[TopicPartition]) -> None:
        self.withheld = partitions

    def next(self, start: SourceOffsets, offset_count_max: int | None) -> SourceOffsets:
        self.look(start)
        return self.plan(start, offset_count_max)

    def latest(self) -> SourceOffsets:
        return SourceOffsets("cluster", "", self.ends)


def planners(accepted: frozenset[str] = frozenset(), **ends: int) -> InputPlanners:
    planner_list = [InputPlanner(uid, Planner({P: end})) for uid, end in ends.items()]
    return InputPlanners(planner_list, accepted)


def at(uid: str, position: int, **further) -> str:
    return text_of(SourceOffsets("cluster", "", {P: position}, input=uid, **further))


def test_positions_are_found_by_id_whatever_the_order():
    positions = planners(a=10, b=20).positions((at("b", 7), at("a", 3)))
    assert [(entry.input, entry.positions[P]) for entry in positions] == [("a", 3), ("b", 7)]


def test_a_checkpoint_from_before_is_that_of_the_only_input():
    text = at(ONLY_INPUT, 5)
    assert '"input"' not in text
    (position,) = planners(**{ONLY_INPUT: 9}).positions((text,))
    assert position.positions == {P: 5}


def test_an_input_that_joins_begins_and_is_in_the_manifest_at_once():
    """Where it began is known from then on, even where nothing was there to be read."""
    inputs = planners(a=3, b=0)
    start = inputs.positions((at("a", 3),))
    assert start[1].initial
    assert start[1].input == "b"
    stops = inputs.next(start, 100)
    assert stops is not start
    assert not stops[1].initial
    assert inputs.next(stops, 100) is stops


def test_positions_that_would_be_forgotten_are_refused_or_accepted():
    start = (at("a", 3), at("gone", 9))
    with pytest.raises(OptionError, match=r"input 'gone' \(topics in\).*dropped-input-gone"):
        planners(a=9).positions(start)
    inputs = planners(frozenset({"dropped-input-gone"}), a=9)
    assert [position.input for position in inputs.positions(start)] == ["a"]
    assert inputs.has_dropped(start)
    assert not inputs.has_dropped(start[:1])


def test_what_reads_nothing_is_carried_without_its_old_starts():
    """Else the next epoch would read again from where an earlier one began."""
    inputs = planners(a=10, b=5)
    start = inputs.positions((at("a", 3), at("b", 5, starts={P: 0}, skipped={Q: (1, 2)})))
    stops = inputs.next(start, None)
    assert stops[0].positions == {P: 10}
    assert (stops[1].positions, stops[1].starts, stops[1].skipped) == ({P: 5}, {}, {})


def test_a_backlog_leaves_the_others_their_share():
    inputs = planners(a=1_000_000, b=30, c=0)
    stops = inputs.next(inputs.positions((at("a", 0), at("b", 0), at("c", 0))), 100)
    assert [stop.positions[P] for stop in stops] == [70, 30, 0]


def test_a_users_bound_of_one_input_holds_for_it_alone():
    own = InputPlanner("a", Planner({P: 1000}), offset_count_max=10)
    every = InputPlanner("b", Planner({P: 1000}), takes_all=True)
    rest = InputPlanner("c", Planner({P: 1000}))
    inputs = InputPlanners([own, every, rest])
    start = inputs.positions((at("a", 0), at("b", 0), at("c", 0)))
    stops = inputs.next(start, 300)
    assert [stop.positions[P] for stop in stops] == [10, 1000, 290]
    assert not inputs.is_held_back(start, stops)
    stops = inputs.next(start, 5000)
    assert [stop.positions[P] for stop in stops] == [10, 1000, 1000]
    assert inputs.is_held_back(start, stops), "only its user's bound leaves something"
    assert inputs.waiting == 3000


def test_the_state_of_the_input_tells_topics_of_one_name_apart():
    inputs = planners(**{ONLY_INPUT: 10, "b": 5})
    stops = inputs.next(inputs.positions((at(ONLY_INPUT, 0), at("b", 5))), 4)
    assert inputs.state(stops) == InputState(
        frozenset({P, of_input("b", P)}), frozenset({P}), frozenset()
    )


def test_what_is_ahead_waits_and_the_others_are_read():
    inputs = planners(a=10, b=20, c=30)
    start = inputs.positions((at("a", 0), at("b", 20), at("c", 0)))
    times = [PartitionTime(*of_input(uid, P), ms, 0) for uid, ms in (("a", 500), ("b", 0))]
    times.append(PartitionTime(*of_input("c", P), 800, 0))

    def stops(drift_ms: int) -> list[int]:
        next_stops = inputs.next(start, 100, lambda source: ahead(times, source, drift_ms))
        return [stop.positions[P] for stop in next_stops]

    assert stops(299) == [10, 20, 0], "b is read to its end: it holds nobody up"
    assert stops(300) == [10, 20, 30]


def test_who_waits_is_a_matter_of_unread_records_and_known_times():
    times = [PartitionTime(*P, 100, 0), PartitionTime(*Q, None, 0), PartitionTime("x", 0, 900, 0)]
    x, y = TopicPartition("x", 0), TopicPartition("y", 0)
    every = frozenset({P, Q, x, y})
    assert ahead(times, InputState(every, every), 799) == {x}
    assert ahead(times, InputState(every, every), 800) == frozenset()
    assert ahead(times, InputState(every, every - {P}), 1) == frozenset()
    assert ahead((), InputState(every, every), 1) == frozenset()


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=6), st.integers(1, 2000))
def test_shares_are_fair(waiting: list[int], most: int):
    shares = fair_shares(waiting, most)
    assert all(0 <= got <= wanted for got, wanted in zip(shares, waiting, strict=True))
    assert all(got for got, wanted in zip(shares, waiting, strict=True) if wanted)
    assert sum(shares) <= max(most, sum(map(bool, waiting)))
    if sum(waiting) <= most:
        assert shares == waiting
    cut = [got for got, wanted in zip(shares, waiting, strict=True) if got < wanted]
    if cut:
        assert max(shares) <= min(cut) + 1, "nobody has more than who wanted more"
        assert sum(shares) >= min(most, sum(waiting)), "all of it is used"
