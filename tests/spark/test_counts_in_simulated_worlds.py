"""The counts for metrics add up, whatever breaks: each driver of a simulated world has its own."""

import logging
from typing import Any

import pytest

from tallystick.epoch.manifest import CHECKPOINT, KAFKA
from tallystick.epoch.protocol import (
    EpochRan,
    Event,
    ManifestWritten,
    OutputSettled,
    ParticipantsRecovered,
    TransactionCommitted,
)
from tallystick.pipeline.listeners import PIPELINES, EpochCounts, EpochOutcomes
from tallystick.run.driver import Driver
from tallystick.run.participants import OpenSinks
from tests.simulation.simulation import check, simulate
from tests.simulation.world import World


class Counted:
    """What one driver did, by its events alone."""

    def __init__(self, name: str) -> None:
        self.counts = EpochCounts(name, self.hear)
        self.open_now = PIPELINES[name].transactions
        self.pipeline = PIPELINES[name]
        self.outcomes = EpochOutcomes()
        self.committed = 0
        self.most_open = 0
        self.names: set[str] = set()

    def hear(self, event: Event) -> None:
        """Compare what is open with what tasks reported, where that is known."""
        outcome = self.outcomes.of(event)
        self.committed += outcome is not None and outcome.error is None
        open_count = sum(map(len, self.open_now.begun_ms().values()))
        match event:
            case EpochRan(committables=prepared):
                self.names = {committable.name for committable in prepared}
            case ManifestWritten() | TransactionCommitted():
                assert open_count >= len(self.names)
                self.most_open = max(self.most_open, open_count)
            case OutputSettled(lost=()) | ParticipantsRecovered(lost=()):
                assert open_count == 0, "all of it is settled"
                self.names = set()


@pytest.mark.parametrize("decided_by", ["", KAFKA, CHECKPOINT])
def test_each_epoch_that_is_started_is_committed_aborted_or_in_flight(
    decided_by: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    drivers: list[Counted] = []
    make_driver = World.make_driver

    def counted(self: World, process: Any, **options: Any) -> Driver:
        driver_counted = Counted(f"simulated-{decided_by}-{len(drivers)}")
        drivers.append(driver_counted)
        driver = make_driver(self, process, **options, listener=driver_counted.counts)
        if isinstance(sinks := driver._participants, OpenSinks):
            sinks._note, sinks._on_lingering = (
                driver_counted.open_now.note,
                driver_counted.open_now.replace_all,
            )
        return driver

    monkeypatch.setattr(World, "make_driver", counted)
    for seed in range(20):
        check(simulate(seed, is_keyed=False, decided_by=decided_by, has_loop=True))

    in_flight = [
        entry.pipeline.epochs_started - entry.committed - entry.pipeline.aborted.total()
        for entry in drivers
    ]
    assert set(in_flight) == {0, 1}, "1: the driver died in the middle of it"
    assert sum(entry.pipeline.aborted.total() for entry in drivers) > 10
    assert (max(entry.most_open for entry in drivers) > 1) is bool(decided_by)
    for number in range(len(drivers)):
        PIPELINES.pop(f"simulated-{decided_by}-{number}")
