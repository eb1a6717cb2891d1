"""Readers and drivers with operator state are killed: no row with an old rule, none twice or lost.

Drivers die at all of `ALL_KILLS` with KEYED_KILLS in the environment, and once without.
"""

import json
import os
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pandas as pd
import pytest

import tallystick as ts
from tallystick_tools.demo.flights import load
from tests.spark.driver_process import DriverProcess, Drivers
from tests.spark.flow import Flow
from tests.spark.keyed_flights import PARALLELISMS
from tests.spark.standalone_cluster import Cluster
from tests.spark.test_keyed_kills import EPOCH_RECORDS, EXECUTIONS
from tests.spark.topics import produce, read_committed, wait_until_nothing_is_pending

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.chaos, pytest.mark.timeout(3600)]

JOB = Path(__file__).with_name("table_job.py")
ALL_KILLS = [("TransactionCommitted", 3, 0.0), ("EpochRan", 1, 0.0), ("EpochPlanned", 3, 0.3)]
KILLS = ALL_KILLS if "KEYED_KILLS" in os.environ else ALL_KILLS[:1]
"""The fact after which the driver dies, the how-manieth of its kind, how much later."""


@pytest.fixture(scope="module")
def drivers_with_tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drivers]:
    """Drivers of the job with a table."""
    copies = {"spark.executorEnv.TALLYSTICK_STATE_DIR": str(tmp_path_factory.mktemp("host"))}
    pool = Drivers(tmp_path_factory.mktemp("tables"), config=copies, job=JOB)
    yield pool
    pool.close()


class FlightsWithRules:
    """Flights of a flow, and rules for their destinations, whose versions ascend."""

    def __init__(self, flow: Flow, data: pd.DataFrame) -> None:
        self._flow, self._data = flow, data
        self._fed, self._version = 0, 0
        self._least: list[int] = []
        self.topic = f"{flow.name}-rules"
        flow.kafka.create_topic(self.topic, 3)

    def feed(self, count: int) -> None:
        """Append flights; their rules are those of now or newer."""
        rows = self._data.iloc[self._fed : self._fed + count][["id", "carrier", "dest"]]
        self._fed += count
        self._least += [self._version] * count
        records = [(row["carrier"], json.dumps(row)) for row in rows.to_dict("records")]
        produce(self._flow.confluent, self._flow.topic_in, records)

    def rule(self) -> None:
        """Give each destination a newer rule."""
        self._version += 1
        values = [
            (dest, json.dumps({"dest": dest, "version": self._version}))
            for dest in sorted(set(self._data["dest"]))
        ]
        produce(self._flow.confluent, self.topic, values)

    def spec(self, parallelism: int, **further: object) -> dict[str, object]:
        return self._flow.spec(parallelism=parallelism, rules_topic=self.topic, **further)

    def assert_exact(self) -> None:
        flow = self._flow
        wait_until_nothing_is_pending(flow.confluent, flow.topic_out)
        records = read_committed(flow.confluent, flow.topic_out)
        frame = pd.DataFrame([json.loads(record.value or "") for record in records])
        assert sorted(frame["id"]) == self._data.iloc[: self._fed]["id"].tolist()
        assert (frame["n"] == frame.groupby("dest").cumcount() + 1).all()
        assert (frame["version"] == frame["again"]).all(), "two tasks of an epoch had two tables"
        least = dict(zip(self._data["id"], self._least, strict=False))
        assert (frame["version"] >= frame["id"].map(least)).all(), "a row missed a rule before it"
        by_dest = frame.groupby("dest")["version"].diff().dropna()
        assert (by_dest >= 0).all(), "a rule was taken back"
        assert frame["version"].nunique() > 1
        state = ts.read_state(flow.spark, str(flow.checkpoint), "rules").toPandas()
        assert set(state["version"]) == {self._version}
        assert set(state["dest"]) == set(self._data["dest"])


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_all_tasks_have_one_table_over_kills_and_rescales_and_a_reader_that_dies_with_it(
    flow: Flow, drivers_with_tables: Drivers, tmp_path: Path, execution: str
) -> None:
    flights = FlightsWithRules(flow, load(1000 * (len(KILLS) + 1)))
    parallelisms = cycle(PARALLELISMS)
    for fact, occurrence, later_s in KILLS:
        flights.rule()
        flights.feed(1000)
        driver = drivers_with_tables.take()
        kill = {"kill_at": fact, "occurrence": occurrence, "delay_s": later_s}
        records = EPOCH_RECORDS[execution]
        settings = {"execution": execution, "epoch_records": records}
        driver.run(flights.spec(next(parallelisms), **settings, **kill))
        flights.rule()  # while it runs
        driver.wait_until_killed()
        driver.stop()
    flights.rule()
    flights.feed(1000)
    driver, marker = drivers_with_tables.take(), tmp_path / "died"
    dies = {"dies": "worker", "marker": str(marker), "epoch_records": 400}
    driver.run(flights.spec(next(parallelisms), execution=execution, **dies))
    flights.rule()
    assert driver.wait_for_end() is None
    assert marker.exists()
    assert driver.facts.count("ActionFailed") == 1
    driver.run(flights.spec(next(parallelisms), execution=execution))  # the newest rules
    assert driver.wait_for_end() is None
    drivers_with_tables.give_back(driver)

    flights.assert_exact()


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_executors_and_hosts_come_and_go_with_the_tables_in_their_memory(
    flow: Flow, tmp_path: Path, execution: str
) -> None:
    """No executor has what another one had but from the checkpoint."""
    flights = FlightsWithRules(flow, load(5000))
    with (
        Cluster(tmp_path / "cluster", 2) as cluster,
        DriverProcess(tmp_path / "driver.log", cluster.settings, JOB) as driver,
    ):
        flights.rule()
        flights.feed(3000)
        marker = tmp_path / "executor"
        dies = {"dies": "executor", "marker": str(marker)}
        driver.run(flights.spec(2, epoch_records=600, execution=execution, **dies))
        assert driver.wait_for_end() is None
        assert marker.exists()

        flights.rule()
        flights.feed(2000)
        driver.run(flights.spec(3, epoch_records=400, execution=execution))
        driver.wait_for_fact("ManifestWritten", 1)
        cluster.hosts[1].kill()
        flights.rule()
        assert driver.wait_for_end() is None
        driver.run(flights.spec(3, execution=execution))  # the newest rules
        assert driver.wait_for_end() is None

    flights.assert_exact()


def assert_held_or_out(flow: Flow, data: pd.DataFrame, block: int) -> int:
    """Each flight is out or in a list, once; return how many are held."""
    wait_until_nothing_is_pending(flow.confluent, flow.topic_out)
    records = read_committed(flow.confluent, flow.topic_out)
    out = [json.loads(record.value or "")["id"] for record in records]
    waiting = ts.read_state(flow.spark, str(flow.checkpoint), "held").toPandas()
    assert sorted([*out, *waiting["id"]]) == sorted(data["id"])
    assert len(out) % block == 0
    return len(waiting)


def feed(flow: Flow, part: pd.DataFrame) -> None:
    rows = part[["id", "carrier", "dest"]].to_dict("records")
    records = [(row["carrier"], json.dumps(row)) for row in rows]
    produce(flow.confluent, flow.topic_in, records)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_held_rows_are_neither_lost_nor_put_out_twice_over_kills_and_rescales(
    flow: Flow, drivers_with_tables: Drivers, tmp_path: Path, execution: str
) -> None:
    """At last a reader dies with rows in its list."""
    data, marker = load(1000 * (len(KILLS) + 1)), tmp_path / "died"
    masters = iter([2, 3, 1, 4])  # a driver has begun with two
    settings = {"execution": execution, "epoch_records": EPOCH_RECORDS[execution]}
    for number, (fact, occurrence, later_s) in enumerate(KILLS):
        feed(flow, data.iloc[1000 * number : 1000 * (number + 1)])
        driver = drivers_with_tables.take()
        kill = {"kill_at": fact, "occurrence": occurrence, "delay_s": later_s}
        driver.run(flow.spec(master=f"local[{next(masters)}]", **settings, **kill))
        driver.wait_until_killed()
        driver.stop()
    feed(flow, data.iloc[1000 * len(KILLS) :])
    driver = drivers_with_tables.take()
    settings |= {"epoch_records": 400, "dies": "worker", "marker": str(marker)}
    driver.run(flow.spec(master=f"local[{next(masters)}]", **settings))
    assert driver.wait_for_end() is None
    assert marker.exists()
    assert driver.facts.count("ActionFailed") == 1
    drivers_with_tables.give_back(driver)

    assert assert_held_or_out(flow, data, 7) > 0
