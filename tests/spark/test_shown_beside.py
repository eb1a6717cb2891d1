"""Positions are shown beside the epochs: a source's cluster that hangs holds up none of them."""

import time
from collections.abc import Iterable, Iterator
from threading import Event, get_ident
from typing import Any

import pytest

from tallystick.pipeline.group_offsets import GroupOffsetsBeside
from tallystick.source.offsets import SourceOffsets
from tallystick.values import TopicPartition
from tests.waiting import wait_for, wait_until

pytestmark = pytest.mark.timeout(60)
PATIENCE_S = 20.0
Shown = tuple[int, bool]


class Groups:
    """`GroupOffsets` of a cluster that answers when the test lets it."""

    def __init__(self) -> None:
        self.answers, self.called = Event(), Event()
        self.answers.set()
        self.shown: list[Shown] = []
        self.threads: set[int] = set()
        self.is_closed = False
        self.succeeds = True

    def show(self, sources: Iterable[SourceOffsets], *, forward_only: bool = False) -> bool:
        (source,) = sources
        self.threads.add(get_ident())
        self.called.set()
        assert self.answers.wait(PATIENCE_S)
        if self.succeeds:
            self.shown.append((next(iter(source.positions.values())), forward_only))
        return self.succeeds

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def groups() -> Groups:
    return Groups()


@pytest.fixture
def beside(groups: Groups) -> Iterator[GroupOffsetsBeside]:
    any_groups: Any = groups
    beside = GroupOffsetsBeside(any_groups)
    yield beside
    groups.answers.set()
    beside.close()


def at(position: int) -> SourceOffsets:
    return SourceOffsets("elsewhere", "group", {TopicPartition("orders", 0): position})


def test_a_cluster_that_hangs_is_asked_once_and_then_for_the_newest(
    groups: Groups, beside: GroupOffsetsBeside
) -> None:
    groups.answers.clear()
    beside.show(at(1))
    assert groups.called.wait(PATIENCE_S), "it hangs in the first call now"

    for position in range(2, 100):
        beside.show(at(position))
    assert groups.shown == []
    assert not beside.is_due, "somebody is about to"
    groups.answers.set()

    wait_for(lambda: len(groups.shown), 2, "the number of positions that are shown")
    assert groups.shown == [(1, False), (99, False)]
    assert len(groups.threads) == 1
    assert get_ident() not in groups.threads


def test_what_was_not_shown_is_due_again(groups: Groups, beside: GroupOffsetsBeside) -> None:
    assert beside.is_due, "of an earlier run nothing is known"
    groups.succeeds = False
    beside.show(at(1))
    wait_until(
        lambda: beside.is_due and groups.called.is_set(),
        lambda: f"due: {beside.is_due}, asked: {groups.called.is_set()}",
    )

    groups.succeeds = True
    beside.show(at(1), forward_only=True)

    wait_until(lambda: bool(groups.shown), "no position is shown")
    assert groups.shown == [(1, True)]
    wait_until(lambda: not beside.is_due, "it is still due")


def test_the_end_of_a_run_shows_what_was_given_last(
    groups: Groups, beside: GroupOffsetsBeside
) -> None:
    for position in range(10):
        beside.show(at(position))

    beside.close()

    assert groups.shown[-1] == (9, False)
    assert groups.is_closed


def test_the_end_of_a_run_tries_once_more_what_was_refused(
    groups: Groups, beside: GroupOffsetsBeside
) -> None:
    groups.succeeds = False
    beside.show(at(1))
    wait_until(
        lambda: beside.is_due and groups.called.is_set(),
        lambda: f"due: {beside.is_due}, asked: {groups.called.is_set()}",
    )

    groups.succeeds = True
    beside.close()

    assert groups.shown == [(1, True)]


def test_the_end_of_a_run_waits_for_a_cluster_that_hangs_only_so_long(
    groups: Groups, beside: GroupOffsetsBeside, caplog: pytest.LogCaptureFixture
) -> None:
    groups.answers.clear()
    beside.show(at(1))
    assert groups.called.wait(PATIENCE_S)
    began = time.monotonic()

    beside.close(patience_s=0.05)

    assert time.monotonic() - began < PATIENCE_S / 2
    assert "could not be shown" in caplog.text


@pytest.mark.parametrize("succeeds", [True, False])
def test_who_was_given_up_overwrites_nothing_of_the_next_run(
    groups: Groups, beside: GroupOffsetsBeside, *, succeeds: bool
) -> None:
    groups.answers.clear()
    beside.show(at(1))
    assert groups.called.wait(PATIENCE_S)
    if succeeds:
        beside.show(at(2))
    beside.close(patience_s=0.05)

    groups.succeeds = succeeds
    groups.called.clear()
    groups.answers.set()

    wait_until(lambda: groups.is_closed, "the groups' client is open")
    assert not groups.called.is_set(), "the call that hung was the last one"


def test_a_run_that_showed_nothing_closes_its_connections(
    groups: Groups, beside: GroupOffsetsBeside
) -> None:
    beside.close()

    assert groups.is_closed
