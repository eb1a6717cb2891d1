"""State and output are one: whatever is killed, each key's count goes from 1 to n, each n once.

`KEYED_KILLS=60` makes a long run of the first test, with a kill after every fact, and has the other
tests kill at all of `FEW_KILLS`. Without it the first test kills before a decision and after one,
the others after one: a kill cuts off the same code of the driver, whatever their steps do.
"""

import os
import random
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest

from tallystick_tools.demo.chaos import FATES, Copies
from tallystick_tools.demo.flights import load
from tests.spark.driver_process import Drivers
from tests.spark.flow import Flow
from tests.spark.keyed_flights import PARALLELISMS, Flights, keyed_drivers
from tests.spark.test_crash_points import LOOP_KILLS

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.chaos, pytest.mark.timeout(3600)]

RANDOM = ("EpochPlanned", 2, 0.5)
"""Any time up to half a second after the second plan: before, in or after its tasks."""
EPOCH_RECORDS = {"jobs": 300, "resident": 30}
"""An epoch of resident tasks takes a tenth of the time: neither run is over when it is killed."""
FEW_KILLS = [("EpochRan", 2, 0.0), ("TransactionCommitted", 3, 0.0), RANDOM]
MANY_KILLS = [*((fact, occurrence, 0.0) for fact, occurrence in LOOP_KILLS), *[RANDOM] * 12]
"""The fact after which the driver dies, the how-manieth of its kind, how much later at most."""
KILLS = FEW_KILLS if "KEYED_KILLS" in os.environ else FEW_KILLS[1:2]
"""The kills of the other tests."""
SHORT_FATES = ("set aside", "put back old")
"""The fates of the copies of state after the first kill and the second: gone, and old."""
EXECUTIONS = ("jobs", "resident")


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Copies:
    """Where the drivers' host keeps copies of state."""
    return Copies(tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory, copies: Copies) -> Iterator[Drivers]:
    """Drivers of the keyed job."""
    pool = keyed_drivers(tmp_path_factory.mktemp("keyed"), copies.path)
    yield pool
    pool.close()


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_counts_go_on_over_kills_rescales_and_lost_or_old_copies_of_state(
    flow: Flow, keyed: Drivers, copies: Copies, execution: str
) -> None:
    kill_count = int(os.environ.get("KEYED_KILLS", len(SHORT_FATES)))
    is_long = kill_count > len(SHORT_FATES)
    chance = random.Random(kill_count)
    flights = Flights(flow, load(1000 * (kill_count + 2)))
    parallelisms = cycle(PARALLELISMS)
    kills = cycle(MANY_KILLS if is_long else FEW_KILLS)
    for number in range(kill_count):
        flights.feed(1000)
        fact, occurrence, later_s = next(kills)
        driver = keyed.take()
        run = flights.spec(
            next(parallelisms),
            execution=execution,
            epoch_records=EPOCH_RECORDS[execution],
            kill_at=fact,
            occurrence=occurrence,
            delay_s=chance.uniform(0, later_s),
        )
        driver.run(run)
        driver.wait_until_killed()
        driver.stop()
        if is_long:
            copies.suffer(chance.choice(FATES))
        else:
            assert copies.suffer(SHORT_FATES[number]) == SHORT_FATES[number]
    flights.feed(1000)
    driver = keyed.take()
    driver.run(flights.spec(next(parallelisms), execution=execution, epoch_records=5_000))
    assert driver.wait_for_end() is None
    keyed.give_back(driver)

    flights.assert_exact()


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("kind", ["windowed", "counted"])
def test_windows_are_put_out_once_over_kills_rescales_and_lost_copies_of_state(
    flow: Flow, keyed: Drivers, copies: Copies, execution: str, kind: str
) -> None:
    flights = Flights(flow, load(1000 * (len(KILLS) + 1)))
    parallelisms = cycle(PARALLELISMS)
    settings = {"execution": execution, kind: True}
    for fact, occurrence, later_s in KILLS:
        flights.feed(1000)
        driver = keyed.take()
        kill = {"kill_at": fact, "occurrence": occurrence, "delay_s": later_s}
        records = EPOCH_RECORDS[execution]
        driver.run(flights.spec(next(parallelisms), epoch_records=records, **kill, **settings))
        driver.wait_until_killed()
        driver.stop()
        assert copies.suffer("lost") == "lost" or later_s, "there are no copies to lose"
    flights.feed(1000)
    flights.close_windows()
    driver = keyed.take()
    driver.run(flights.spec(next(parallelisms), epoch_records=5_000, **settings))
    assert driver.wait_for_end() is None
    keyed.give_back(driver)

    if kind == "windowed":
        flights.assert_windowed(size=100, every=50)
    else:
        flights.assert_counted(size=6, every=4)


def test_a_keyed_task_that_dies_half_way_and_an_epoch_that_ends_after_it_count_nothing_twice(
    flow: Flow, keyed: Drivers, tmp_path: Path
) -> None:
    """The worker's task is tried again; the writer's is not, so the epoch is, with new files."""
    flights = Flights(flow, load(5000))
    flights.feed(2000)
    driver = keyed.take()
    mortal = {"master": "local[2,4]", "epoch_records": 600, "execution": "jobs"}
    driver.run(flights.spec(2, dies="worker", marker=str(tmp_path / "worker"), **mortal))
    assert driver.wait_for_end() is None
    assert (tmp_path / "worker").exists()
    assert "ActionFailed" not in driver.facts
    flights.assert_exact()

    flights.feed(2000)
    driver.run(flights.spec(3, writing_dies_once=str(tmp_path / "writer"), **mortal))
    assert driver.wait_for_end() is None
    assert driver.facts.count("ActionFailed") == 1
    flights.assert_exact()

    flights.feed(1000)
    daemon = tmp_path / "daemon"
    settings = {"dies": "daemon", "marker": str(daemon), "execution": "jobs"}
    driver.run(flights.spec(2, epoch_records=600, **settings))
    assert driver.wait_for_end() is None
    assert daemon.exists()
    assert driver.facts.count("ActionFailed") == 1  # Spark may not try again: "local[2]"
    flights.assert_exact()
    keyed.give_back(driver)


def test_a_resident_task_and_a_daemon_that_die_half_way_cost_an_epoch_each(
    flow: Flow, keyed: Drivers, tmp_path: Path
) -> None:
    """The daemon takes all members of its worker with it, and the workers in Spark's pool."""
    flights = Flights(flow, load(4000))
    driver = keyed.take()
    for dies in ("worker", "daemon"):
        flights.feed(2000)
        settings = {"dies": dies, "marker": str(tmp_path / dies), "execution": "resident"}
        driver.run(flights.spec(3, epoch_records=600, **settings))
        assert driver.wait_for_end() is None
        assert (tmp_path / dies).exists()
        assert driver.facts.count("ActionFailed") == 1
        flights.assert_exact()
    keyed.give_back(driver)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_paused_driver_that_wakes_up_after_a_rescale_is_fenced_and_changes_nothing(
    flow: Flow, keyed: Drivers, execution: str
) -> None:
    flights = Flights(flow, load(4000))
    flights.feed(2000)
    zombie, successor = keyed.take(), keyed.take()
    blocked = {"block_at": "OutputCounted", "occurrence": 2, "execution": execution}
    zombie.run(flights.spec(2, epoch_records=300, **blocked))
    zombie.wait_until_blocked()
    zombie.pause()

    flights.feed(1000)
    successor.run(flights.spec(5, execution=execution, epoch_records=800))
    assert successor.wait_for_end() is None
    flights.assert_exact()
    zombie.resume()
    zombie.go_on()

    assert "FencedError: " in (zombie.wait_for_end() or "")
    flights.assert_exact()
    flights.feed(1000)
    successor.run(flights.spec(2, execution=execution))  # with the copies that the zombie had
    assert successor.wait_for_end() is None
    flights.assert_exact()


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_pairs_are_put_out_once_over_kills_rescales_and_lost_copies_of_state(
    flow: Flow, keyed: Drivers, copies: Copies, execution: str
) -> None:
    other = f"{flow.name}-other"
    flow.kafka.create_topic(other, 2)
    flights = Flights(flow, load(500 * (len(KILLS) + 1)), other)
    settings = {"execution": execution, "joined": True, "other_topic": other}
    parallelisms = cycle(PARALLELISMS)
    for fact, occurrence, later_s in KILLS:
        flights.feed(500)
        driver = keyed.take()
        kill = {"kill_at": fact, "occurrence": occurrence, "delay_s": later_s}
        records = EPOCH_RECORDS[execution]
        driver.run(flights.spec(next(parallelisms), epoch_records=records, **kill, **settings))
        driver.wait_until_killed()
        driver.stop()
        assert copies.suffer("lost") == "lost" or later_s, "there are no copies to lose"
    flights.feed(500)
    for is_last in (False, True):  # the watermark of an epoch follows from those before it
        if is_last:
            flights.close_windows()
        driver = keyed.take()
        driver.run(flights.spec(next(parallelisms), epoch_records=5_000, **settings))
        assert driver.wait_for_end() is None
        keyed.give_back(driver)

    flights.assert_joined(reach=300)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_kills_between_the_positions_of_two_inputs(
    flow: Flow, keyed: Drivers, copies: Copies, execution: str
) -> None:
    """Both are in one decision: neither is ever ahead of the counts."""
    other = f"{flow.name}-other"
    flow.kafka.create_topic(other, 2)
    flights = Flights(flow, load(2000), other)
    for parallelism, fact in ((3, "ManifestWritten"), (1, "TransactionCommitted")):
        flights.feed(500)
        driver = keyed.take()
        settings = {"execution": execution, "epoch_records": EPOCH_RECORDS[execution]}
        driver.run(
            flights.spec(parallelism, other_topic=other, kill_at=fact, occurrence=2, **settings)
        )
        driver.wait_until_killed()
        driver.stop()
    flights.feed(500)
    driver = keyed.take()
    driver.run(flights.spec(2, execution=execution, epoch_records=5_000, other_topic=other))
    assert driver.wait_for_end() is None
    keyed.give_back(driver)

    flights.assert_exact()
