"""Requests of operators to a run: sent, taken in order, answered; without Spark and Kafka."""

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tallystick.__main__ import app
from tallystick.checkpoint import requests as files
from tallystick.checkpoint.newest_run import note_run
from tallystick.checkpoint.requests import (
    DONE,
    RESCALE,
    STOP,
    TAKEN,
    WITHDRAWN,
    Inbox,
    Request,
    answer_to,
    send,
    withdraw,
)
from tallystick.errors import BrokerUnavailableError, OptionError, StorageError, TallystickError
from tallystick.ops import requests
from tallystick.run import query as query_module
from tallystick.run import requests as served
from tallystick.run.console import Console
from tallystick.run.epoch_loop import EpochLoop, Trigger
from tallystick.run.query import Query
from tallystick.storage.file_storage import FileStorage
from tests.waiting import wait_until

SOON_S = 0.02


class CountingStorage(FileStorage):
    """A storage that notes its reads and listings, and fails where it is told to."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.calls: list[str] = []
        self.failures = 0

    def get(self, path: str) -> bytes | None:
        self.calls.append(f"get {path}")
        return super().get(path)

    def names(self, folder: str) -> list[str]:
        self.calls.append(f"names {folder}")
        return super().names(folder)

    def put(self, path: str, data: bytes) -> None:
        if self.failures:
            self.failures -= 1
            raise StorageError("the storage is away")
        super().put(path, data)


class Driver:
    """Runs epochs that end when the test lets them, and are cut off by a cancel."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.cancelled = threading.Event()
        self.error: Exception | None = None
        self.epochs = 0
        self.log: list[str] = []

    def run_next(self, _: object) -> bool:
        self.begun.set()
        while not self.may_end.wait(SOON_S):
            if self.cancelled.is_set():
                raise RuntimeError("cancelled")
        if self.error is not None:
            raise self.error
        self.epochs += 1
        self.log.append(f"epoch {self.epochs}")
        return True

    def end(self) -> None: ...

    def abort_strays(self) -> None: ...


class Source:
    is_behind = False


class Run:
    """A run of a checkpoint, whose epochs a test lets end."""

    def __init__(self, checkpoint: Path, name: str = "run-1", trigger_ms: int = 0) -> None:
        self.checkpoint = str(checkpoint)
        self.driver = Driver()
        driver: Any = self.driver
        source: Any = Source()
        self.storage = CountingStorage(self.checkpoint)
        note_run(self.storage, name)
        self.saved: list[str] = []
        self.query = Query(
            *("orders", "query", name),
            loop=lambda note: EpochLoop(
                driver, source, Trigger(trigger_ms), lambda ended: note(ended) and None
            ),
            prepare=lambda: None,
            cancel=driver.cancelled.set,
            close=lambda: driver.log.append("closed"),
            describe=lambda _: {"batchId": driver.epochs, "sources": []},
            rescale=self._rescale,
            save=self._save,
            inbox=Inbox(self.storage, name),
        )
        assert self.query._requests is not None
        self.query._requests._look_s = SOON_S

    def _rescale(self, parallelism: int) -> None:
        if parallelism > 8:
            raise OptionError(f"parallelism={parallelism}: step count has 8 key groups")
        self.driver.log.append(f"parallelism {parallelism}")

    def _save(self, place: str) -> None:
        assert "closed" in self.driver.log, "a savepoint is of the last epoch"
        self.saved.append(place)

    def in_an_epoch(self) -> "Run":
        self.query.begin()
        assert self.driver.begun.wait(20)
        return self


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "checkpoint")
    yield run
    run.driver.cancelled.set()
    run.driver.may_end.set()
    run.query._loop.stop()


@pytest.fixture
def later() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def taken(run: Run, count: int = 1) -> Callable[[], bool]:
    """True once the run works on so many requests."""
    watch = run.query._requests
    assert watch is not None
    return lambda: len(watch._beats) == count


def call(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(word) for word in words])
    return done.exit_code, done.output.strip()


# --- the files ------------------------------------------------------------------------------


def test_without_a_request_a_look_reads_one_file(tmp_path: Path) -> None:
    storage = CountingStorage(str(tmp_path))
    inbox = Inbox(storage, "run-1")
    for _ in range(2):
        assert list(inbox.new()) == []
    assert storage.calls == [f"get {files.BELL}"] * 2
    send(storage, Request("run-1", STOP))
    assert len(list(inbox.new())) == 1
    storage.calls.clear()
    assert list(inbox.new()) == []
    assert storage.calls == [f"get {files.BELL}"], "the same is not listed again"


def test_requests_come_in_their_order_and_only_to_the_run_that_they_are_for(tmp_path: Path) -> None:
    storage = FileStorage(str(tmp_path))
    first = send(storage, Request("run-1", RESCALE, parallelism=2))
    send(storage, Request("run-0", STOP))  # to the run before: it is dead
    storage.put(f"{files.REQUESTS}/00000000000000000000-damaged.json", b'{"run": "run-1"')
    storage.put(f"{files.REQUESTS}/1-strange.json", b'{"run": "run-1", "kind": "stop", "drain": 3}')
    second = send(storage, Request("run-1", STOP))
    inbox = Inbox(storage, "run-1")
    assert [path for path, _ in inbox.new()] == [first, second]
    third = send(storage, Request("run-1", STOP))
    assert [path for path, _ in inbox.new()] == [third]


class Steps(FileStorage):
    """A storage in which two actors take turns, call by call, as a schedule says."""

    def __init__(self, uri: str, schedule: tuple[str, ...]) -> None:
        super().__init__(uri)
        self._left = list(schedule)
        self._turn = threading.Condition()

    @contextmanager
    def step(self) -> Iterator[None]:
        me = threading.current_thread().name
        with self._turn:
            assert self._turn.wait_for(lambda: not self._left or self._left[0] == me, 20)
            yield
            if self._left:
                self._left.pop(0)
            self._turn.notify_all()

    def get(self, path: str) -> bytes | None:
        with self.step():
            return super().get(path)

    def put(self, path: str, data: bytes) -> None:
        with self.step():
            super().put(path, data)

    def delete(self, path: str) -> None:
        with self.step():
            super().delete(path)


def test_a_request_is_taken_or_withdrawn_and_both_sides_know_in_every_order(tmp_path: Path) -> None:
    """A run writes and reads, a command removes and reads: no order lets both of them win."""
    outcomes = set()
    schedules = sorted(set(itertools.permutations(["run", "run", "command", "command"])))
    for number, schedule in enumerate(schedules):
        plain = FileStorage(str(tmp_path / str(number)))
        path = send(plain, Request("run-1", STOP))
        storage = Steps(str(tmp_path / str(number)), schedule)
        results: dict[str, Any] = {}

        def act(name: str, do: Callable[[], Any], results: dict[str, Any] = results) -> None:
            results[name] = do()

        actors = [
            threading.Thread(target=act, args=(name, do), name=name)
            for name, do in (
                ("run", partial(Inbox(storage, "run-1").take, path)),
                ("command", partial(withdraw, storage, path)),
            )
        ]
        for actor in actors:
            actor.start()
        for actor in actors:
            actor.join(20)
        final = answer_to(plain, path)
        assert final is not None
        if results["run"]:
            assert results["command"] is not None, f"{schedule}: it is served, and called dead"
            assert final.state == TAKEN
        else:
            assert final.state == WITHDRAWN, schedule
        outcomes.add((results["run"], results["command"] is not None))
    assert (True, True) in outcomes
    assert (False, False) in outcomes


def test_a_request_at_which_the_storage_fails_is_served_at_the_next_look(tmp_path: Path) -> None:
    storage = CountingStorage(str(tmp_path))
    begun: list[Request] = []

    def begin(request: Request) -> Callable[[], str]:
        begun.append(request)
        return lambda: "done"

    watch = served.RequestWatch(Console("orders"), Inbox(storage, "run-1"), begin, SOON_S)
    paths = [send(storage, Request("run-1", STOP)), send(storage, Request("run-1", STOP))]
    storage.failures = 1
    watch.look()
    assert (begun, storage.failures) == ([], 0)
    watch.look()
    assert len(begun) == 2
    wait_until(
        lambda: all((answer_to(storage, at) or files.Answer(TAKEN)).state == DONE for at in paths),
        "not answered",
    )
    watch.look()
    assert len(begun) == 2, "each is begun once"


def test_a_run_has_not_ended_before_its_savepoint_is_written_and_answered(
    run: Run, later: ThreadPoolExecutor
) -> None:
    """A program that waits for its end would end too, and Python then starts no thread any more."""
    saves, may_save = threading.Event(), threading.Event()

    def save(_: str) -> None:
        saves.set()
        assert may_save.wait(20)

    run.query._save = save
    run.query.begin()
    run.driver.may_end.set()
    asked = later.submit(requests.stop, run.checkpoint, savepoint=f"{run.checkpoint}-saved")
    assert saves.wait(20)
    stopped = later.submit(run.query.stop)  # as the program itself may do
    assert run.query.awaitTermination(0.3) is False
    assert not stopped.done()
    may_save.set()
    assert run.query.awaitTermination(20)
    paths = [path for path in run.storage.names(files.REQUESTS) if path.endswith(".answer")]
    assert all(b'"done"' in (run.storage.get(path) or b'"done"') for path in paths)
    assert "was the last one" in asked.result(20)
    stopped.result(20)


# --- a run ----------------------------------------------------------------------------------


def test_a_stop_with_a_savepoint_while_an_epoch_runs(
    run: Run, tmp_path: Path, later: ThreadPoolExecutor
) -> None:
    run.in_an_epoch()
    place = tmp_path / "saved"
    answer = later.submit(call, "stop", run.checkpoint, "--savepoint", place)
    wait_until(taken(run), "not taken")
    assert not answer.done()
    assert run.saved == []
    run.driver.may_end.set()

    assert answer.result(20) == (
        0,
        f"stopped in order; epoch 1 was the last one, and is committed\nIts savepoint is {place}.",
    )
    assert run.driver.log == ["epoch 1", "closed"], "no further epoch was begun"
    assert run.saved == [str(place)]
    requests_there = FileStorage(run.checkpoint).names(files.REQUESTS)
    assert requests_there == [files.BELL], "nothing is left but the bell"


def test_a_stop_without_drain_aborts_the_epoch(run: Run) -> None:
    run.in_an_epoch()
    code, text = call("stop", run.checkpoint)
    assert (code, run.driver.log) == (0, ["closed"])
    assert text.startswith("stopped; an epoch that was running is aborted")


def test_two_requests_in_a_row_are_served_in_their_order(
    run: Run, later: ThreadPoolExecutor
) -> None:
    run.in_an_epoch()
    first = later.submit(requests.rescale, run.checkpoint, 4)
    wait_until(taken(run), "not taken")
    second = later.submit(requests.stop, run.checkpoint, drain=True)
    wait_until(taken(run, 2), "not taken")  # neither waits for the other one's answer
    run.driver.may_end.set()

    assert first.result(20) == "goes on with parallelism 4"
    assert "epoch 1 was the last one" in second.result(20)
    assert run.driver.log == ["epoch 1", "parallelism 4", "closed"]


def test_a_rescale_after_a_stop_is_refused(run: Run, later: ThreadPoolExecutor) -> None:
    run.in_an_epoch()
    stop = later.submit(requests.stop, run.checkpoint, drain=True)
    wait_until(taken(run), "not taken")
    with pytest.raises(TallystickError, match="is being stopped"):
        requests.rescale(run.checkpoint, 4)
    run.driver.may_end.set()
    assert "epoch 1 was the last one" in stop.result(20)


def test_two_operators_stop_one_run(run: Run, tmp_path: Path, later: ThreadPoolExecutor) -> None:
    """Both are answered; each has the savepoint of the last epoch."""
    run.in_an_epoch()
    places = [str(tmp_path / "a"), str(tmp_path / "b")]
    stops = [later.submit(requests.stop, run.checkpoint, savepoint=place) for place in places]
    wait_until(taken(run, 2), "not taken")
    run.driver.may_end.set()
    for stop in stops:
        assert "epoch 1 was the last one" in stop.result(20)
    assert sorted(run.saved) == places


def test_a_request_in_an_outage_is_taken_at_once_and_answered_when_it_ends(
    run: Run, later: ThreadPoolExecutor
) -> None:
    run.in_an_epoch()
    run.driver.error = BrokerUnavailableError("Kafka does not answer")
    stop = later.submit(requests.stop, run.checkpoint, drain=True)
    wait_until(taken(run), "not taken")
    run.driver.may_end.set()
    with pytest.raises(TallystickError, match="Kafka does not answer"):
        stop.result(20)


def test_an_epoch_that_does_not_end_in_time_is_aborted_and_the_answer_says_so(run: Run) -> None:
    run.in_an_epoch()
    code, text = call("stop", run.checkpoint, "--drain", "--timeout", 0.1)
    assert code == 1
    assert "did not end within 0.1 s" in text
    assert "was aborted. Nothing is lost" in text
    assert run.driver.log == ["closed"]


def test_a_rescale_that_cannot_be_says_why_and_the_run_goes_on(run: Run) -> None:
    run.driver.may_end.set()
    run.query.begin()
    assert call("rescale", run.checkpoint, "--parallelism", 9) == (
        1,
        "parallelism=9: step count has 8 key groups",
    )
    assert run.query.isActive
    assert call("rescale", run.checkpoint, "--parallelism", 3)[0] == 0
    assert "parallelism 3" in run.driver.log


def test_a_kind_that_a_run_does_not_know_is_answered(run: Run) -> None:
    run.in_an_epoch()
    path = send(run.storage, Request("run-1", "dance"))
    wait_until(
        lambda: (answer_to(run.storage, path) or files.Answer(TAKEN)).state != TAKEN, "not answered"
    )
    answer = answer_to(run.storage, path)
    assert answer is not None
    assert answer.text == "'dance' is no request that this version knows"
    assert run.query.isActive


def test_a_value_in_an_error_is_not_in_the_answer(run: Run, later: ThreadPoolExecutor) -> None:
    run.in_an_epoch()
    run.driver.error = ValueError("row S3CR3T is strange")
    stop = later.submit(call, "stop", run.checkpoint, "--drain")
    wait_until(taken(run), "not taken")
    run.driver.may_end.set()
    code, text = stop.result(20)
    assert (code, "S3CR3T" in text) == (1, False)
    assert text.startswith("ValueError: The message is in the driver's log.")


# --- no run ---------------------------------------------------------------------------------


def test_a_dead_run_is_named_and_the_request_is_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "PATIENCE_S", 0.3)
    dead = Run(tmp_path)  # which never looks
    (tmp_path / "tallystick" / "000000000007-1-abc.json").write_text("{}")
    with pytest.raises(
        TallystickError,
        match=r"no run of .* is alive; last seen at .*, with epoch 7: process \d+ on host",
    ) as caught:
        requests.stop(dead.checkpoint, patience_s=0.3)
    assert "the request is withdrawn" in str(caught.value)
    assert FileStorage(dead.checkpoint).names(files.REQUESTS) == [files.BELL]

    dead.query.begin()  # as after a long pause of the whole machine
    looks = dead.query._requests
    assert looks is not None
    wait_until(lambda: looks._inbox._bell is not None, "no look")
    assert dead.query.isActive, "what was withdrawn is not served"
    dead.driver.cancelled.set()


def test_a_request_to_the_run_before_is_ignored(run: Run) -> None:
    path = send(run.storage, Request("run-0", STOP))
    run.in_an_epoch()
    watch = run.query._requests
    assert watch is not None
    wait_until(lambda: watch._inbox._bell is not None, "no look")
    assert answer_to(run.storage, path) is None
    assert run.query.isActive


def test_a_run_that_dies_at_work_on_a_request_is_not_waited_for(
    run: Run, later: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.in_an_epoch()
    watch = run.query._requests
    assert watch is not None
    stop = later.submit(requests.stop, run.checkpoint, drain=True, patience_s=1)
    wait_until(taken(run), "not taken")
    monkeypatch.setattr(watch, "_beat", lambda: None)  # as a killed process
    with pytest.raises(TallystickError, match="took the request, and fell silent"):
        stop.result(20)


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda folder: None, "no pipeline has begun there yet"),
        (lambda folder: note_run(FileStorage(str(folder))), "a recovery, or a run of an older"),
    ],
)
def test_where_no_run_takes_requests_the_answer_is_immediate(
    tmp_path: Path, prepare: Callable[[Path], None], words: str
) -> None:
    prepare(tmp_path)
    code, text = call("stop", tmp_path)
    assert code == 1
    assert words in text


def test_a_savepoint_that_cannot_be_is_refused_before_the_run_stops(
    run: Run, tmp_path: Path
) -> None:
    run.in_an_epoch()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("")
    code, text = call("stop", run.checkpoint, "--savepoint", tmp_path / "used")
    assert (code, run.query.isActive) == (1, True)
    assert "is not empty, it has file" in text
    code, text = call("stop", run.checkpoint, "--savepoint", "s3://key:secret@bucket/x")
    assert (code, run.query.isActive, "secret" in text) == (1, True, False)
    assert "has a login in it" in text


def test_the_interval_of_looks_leaves_a_run_time_to_answer() -> None:
    assert requests.PATIENCE_S >= 4 * served.LOOK_S
    assert requests.DRAIN_S == query_module.DRAIN_S
