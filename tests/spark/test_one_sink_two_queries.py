"""One `KafkaSink` object after several running queries: each has a driver and cluster of its own.

Spark's and Kafka's sides are fakes, so that one query can be held up while it opens.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, local
from typing import Any
from unittest.mock import Mock

import pytest

import tallystick as ts
from tallystick.epoch.manifest import FOLDER
from tallystick.errors import OptionError, SecondCallError, TallystickError
from tallystick.spark.streaming import foreach_batch

WAIT_S = 20.0


class FakeCoordinator:
    """Knows the manifest of the newest epoch that was committed."""

    newest = -1
    committed_manifest = None

    def manifest_path(self, checkpoint_id: int) -> str:
        """See `Coordinator.manifest_path`."""
        path = f"{FOLDER}/{checkpoint_id:012d}-1-ab.json"
        return path if checkpoint_id == self.newest else ""


@dataclass
class FakeDriver:
    """Notes what is committed through it."""

    pipeline: str
    cluster_id: str = "sink"
    coordinator: FakeCoordinator = field(default_factory=FakeCoordinator)

    def run_epoch(self, request: Any, engine: Any, ends_of: Any) -> None:
        self.coordinator.newest = request.checkpoint_id
        committed.append((self.pipeline, request.sources, engine.engine))
        engine.run_epoch(request.checkpoint_id, None, ())


@dataclass(eq=False)
class FakeSinks:
    """Is called `of` the pipeline that opened it, and stands for its engines, too."""

    queries: "Queries"
    of: str = ""
    is_closed: bool = False

    def close(self) -> None:
        """See `Sinks.close`."""
        self.is_closed = True

    def check(self, *, accepted: frozenset[str]) -> None:
        """The seconds between an open storage and an open driver; `slow` waits in them."""
        self.of = self.queries.thread.run
        self.queries.opened.append(self.of)
        if self.of == "slow":
            self.queries.opening.set()
            assert self.queries.may_open.wait(WAIT_S)

    def make_driver(self, identity: Any, _: Any) -> FakeDriver:
        """The driver of the pipeline."""
        return FakeDriver(identity.pipeline)

    def run_epoch(self, *_: Any) -> None:
        """See `ports.Engine.run_epoch`."""
        if self.of == self.queries.ends_within:
            self.queries.ends.pop(self.of)()
            assert not self.is_closed, "its epoch is under way"


@dataclass
class Queries:
    """Queries that call one sink, on a thread each."""

    folder: Path
    sink: ts.KafkaSink
    active: set[str] = field(default_factory=set)
    opening: Event = field(default_factory=Event)
    may_open: Event = field(default_factory=Event)
    thread: Any = field(default_factory=local)
    ends: dict[str, Callable[[], None]] = field(default_factory=dict)
    ends_within: str = ""
    opened: list[str] = field(default_factory=list)

    def current_run(self, spark: Any) -> foreach_batch.QueryRun:
        """As Spark would say it of the calling thread."""
        name = self.thread.run.rstrip("'")
        return foreach_batch.QueryRun(spark, f"id-{name}", name, str(self.folder / name), None)

    def run(self, run: str, *batch_ids: int) -> None:
        """Micro-batches of a run; a quote after the query's name makes it another run."""
        self.thread.run = run
        self.active.add(run)
        checkpoint = self.folder / run.rstrip("'")
        (checkpoint / "offsets").mkdir(parents=True, exist_ok=True)
        (checkpoint / "metadata").write_text(json.dumps({"id": f"id-{checkpoint.name}"}))
        for batch_id in batch_ids:
            (checkpoint / f"offsets/{batch_id}").write_text(f"v1\n{{}}\n{run}@{batch_id}")
            self.sink(Rows(), batch_id)  # type: ignore[arg-type]


class Rows:
    """A micro-batch's DataFrame."""

    sparkSession = None  # noqa: N815


committed: list[tuple[str, tuple[str, ...], FakeSinks]] = []


@pytest.fixture
def queries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Queries]:
    two_queries = Queries(tmp_path, ts.KafkaSink("nowhere:9092", topic="out"))
    monkeypatch.setattr(foreach_batch, "current_run", two_queries.current_run)
    monkeypatch.setattr(foreach_batch, "current_run_id", lambda _: two_queries.thread.run)
    monkeypatch.setattr(foreach_batch, "check_is_read", lambda *_: None)
    monkeypatch.setattr(foreach_batch, "_sink_of_run", {})
    monkeypatch.setattr(foreach_batch, "active_runs", lambda _: set(two_queries.active))
    monkeypatch.setattr(foreach_batch, "Cluster", Mock())  # the true one starts a Spark
    monkeypatch.setattr(foreach_batch, "Sinks", lambda *_: FakeSinks(two_queries))
    monkeypatch.setattr(foreach_batch, "engine_of", lambda sinks, *_: sinks)
    monkeypatch.setattr(
        foreach_batch, "_at_end", lambda _, run, do: two_queries.ends.update({run: do})
    )
    committed.clear()
    yield two_queries
    two_queries.may_open.set()


def test_a_query_that_is_opening_touches_nothing_of_another_that_runs(queries: Queries) -> None:
    with ThreadPoolExecutor(2) as threads:
        threads.submit(queries.run, "fast", 0).result(WAIT_S)
        slow = threads.submit(queries.run, "slow", 0, 1)
        assert queries.opening.wait(WAIT_S)
        fast = threads.submit(queries.run, "fast", 1, 2)
        fast.result(WAIT_S)
        queries.may_open.set()
        slow.result(WAIT_S)
        threads.submit(queries.run, "fast", 3).result(WAIT_S)

    assert [(pipeline, sources, cluster.of) for pipeline, sources, cluster in committed] == [
        (name, (f"{name}@{batch_id}",), name)
        for name, batch_id in [
            *(("fast", 0), ("fast", 1), ("fast", 2)),
            *(("slow", 0), ("slow", 1)),
            ("fast", 3),
        ]
    ]
    assert len({cluster for _, _, cluster in committed}) == 2, "a run opens once"


def test_a_run_that_has_ended_is_let_go_of_when_the_next_one_comes(queries: Queries) -> None:
    for run in ("one", "two"):
        queries.run(run, 0)
    queries.active -= {"one"}
    queries.run("one'", 1)

    assert set(queries.sink._runner._runners) == {"two", "one'"}
    first, _, again = (cluster for _, _, cluster in committed)
    assert first is not again, "a restarted query opens anew"
    assert [transaction.is_closed for _, _, transaction in committed] == [True, False, False]


def test_a_run_is_closed_at_its_end_and_never_under_an_epoch(queries: Queries) -> None:
    queries.run("one", 0)
    queries.ends.pop("one")()
    queries.ends_within = "two"
    queries.run("two", 0)

    assert [transaction.is_closed for _, _, transaction in committed] == [True, True]
    assert queries.sink._runner._runners == {}


def test_what_cannot_start_is_closed(queries: Queries, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[FakeSinks] = []

    def refused(sinks: FakeSinks, **_: object) -> None:
        opened.append(sinks)
        raise OptionError("no such topic")

    monkeypatch.setattr(FakeSinks, "check", refused)
    with pytest.raises(OptionError, match="no such topic"):
        queries.run("one", 0)
    assert [transaction.is_closed for transaction in opened] == [True]


def test_calls_of_one_function_from_several_threads_take_turns(queries: Queries) -> None:
    """Each would open a driver of its own, and fence the other, or take its epoch for a replay."""
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(queries.run, "slow", 0)
        assert queries.opening.wait(WAIT_S)
        second = threads.submit(queries.run, "slow", 0)
        with pytest.raises(TimeoutError):
            second.result(0.2)
        queries.may_open.set()
        first.result(WAIT_S)
        with pytest.raises(SecondCallError):  # its turn came after the first one's
            second.result(WAIT_S)

    assert queries.opened == ["slow"], "a run opens once"


@pytest.mark.parametrize(
    ("first_batch", "note"),
    [(1, f"partial-{1:012d}-1-ab"), (0, f"failed-{1:012d}")],
    ids=["after it", "before it"],
)
def test_a_second_sink_that_is_refused_and_caught_is_not_forgotten(
    queries: Queries, first_batch: int, note: str
) -> None:
    """Its rows are missing: the first sink goes no further, and the next run knows."""
    queries.run("one", *range(first_batch + 1))
    other = ts.KafkaSink("nowhere:9092", topic="other")
    with pytest.raises(SecondCallError, match="another KafkaSink"):
        other(Rows(), 1)  # type: ignore[arg-type]
    with pytest.raises(TallystickError, match="Do not catch what the sink raises"):
        queries.run("one", 2)

    assert len(committed) == first_batch + 1
    for name in (note, f"failed-{2:012d}"):  # of the call that was refused too
        assert (queries.folder / f"one/{FOLDER}/{name}").exists()
