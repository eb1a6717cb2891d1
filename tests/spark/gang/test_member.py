"""Gangs as plain processes: what members do to each other, and what becomes of them."""

import contextlib
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from tallystick.errors import TallystickError
from tallystick.spark.gang import gang as gangs
from tallystick.spark.gang import link as links
from tallystick.spark.gang import member
from tallystick.spark.gang.gang import Gang, GangLostError, Size
from tallystick.spark.gang.inbox import CUT
from tallystick.spark.gang.link import Link, LinkBrokenError, listen
from tallystick.spark.gang.member import Spec, serve
from tallystick.spark.tasks import Parcel
from tallystick.tasks.frames import Frame
from tallystick.tasks.read import Report
from tests.spark.gang.forked import (
    WAIT_S,
    Numbers,
    Processing,
    Reading,
    WriteStep,
    end,
    forked,
    gang_of,
    numbers_of,
    order,
    wait_until_gone,
)
from tests.spark.mischief import is_gone
from tests.waiting import wait_until

SIZES = [Size(1), Size(1, 3), Size(3), Size(2, 2)]
SHARES = tuple(tuple(range(at, 200, 7)) for at in range(7))
"""Of more tasks than members."""

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def running() -> Iterator[Callable[..., Gang]]:
    """Starts gangs, and ends what is left of them."""
    began: list[Gang] = []

    def start(*given: Any, **further: Any) -> Gang:
        began.append(gang_of(*given, **further))
        return began[-1]

    yield start
    for gang in began:
        gang.give_up()
        end(list(gang.pids.values()))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_epochs_pass_through_all_stages_and_the_members_leave_nothing(
    running: Callable[..., Gang], size: Size
) -> None:
    """Each task of Spark's ends with one thread and no connection: it may get other work."""
    gang = running(size)
    assert len(set(gang.pids.values())) == size.members
    steps = (Processing(5, Numbers(4)), Processing(4, Numbers(3)))
    for run in (1, 2, 3):
        assert numbers_of(gang.run(order(2 * run, SHARES))) == list(range(200))
        numbers = numbers_of(gang.run(order(2 * run + 1, SHARES, steps=steps)))
        assert numbers == list(range(2_000_000, 2_000_200))
    gang.leave()
    assert gang._job_ended.is_set()
    assert gang._job_error is None
    wait_until_gone(list(gang.pids.values()))


def test_more_than_memory_holds_passes_through_files(
    running: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 MB for each member; the pipes are full, and still nobody waits for each other."""
    monkeypatch.setattr(gangs, "HELD_BYTES_MAX", 100_000)
    gang = running(Size(2, 2))
    reports = gang.run(order(1, SHARES, size=160_000))
    assert numbers_of(reports) == list(range(200))


@pytest.mark.parametrize("size", [Size(1, 3), Size(3)], ids=str)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("place", ["read", "process", "write"])
def test_a_member_killed_in_an_epoch_ends_the_gang_and_all_its_processes(
    running: Callable[..., Gang], size: Size, victim: int, place: str
) -> None:
    gang = running(size)
    mortal = gang.pids[victim]

    def die(_: int) -> None:
        if os.getpid() == mortal:
            os.kill(mortal, signal.SIGKILL)

    steps = (Processing(3, Numbers(3), act=die if place == "process" else ignore),)
    deadly = order(
        1,
        SHARES,
        reading=Reading(die if place == "read" else ignore),
        steps=steps,
        writing=WriteStep(die if place == "write" else ignore),
    )
    with pytest.raises(GangLostError, match="'numbers' is gone"):
        gang.run(deadly)
    assert gang.is_lost
    wait_until_gone(list(gang.pids.values()))


def test_a_member_killed_between_epochs_is_missed_before_the_next(
    running: Callable[..., Gang],
) -> None:
    gang = running(Size(1, 3))
    gang.run(order(1, SHARES))
    os.kill(gang.pids[2], signal.SIGKILL)
    wait_until(lambda: gang.is_lost, "nobody misses the member that was killed")
    with pytest.raises(GangLostError):
        gang.run(order(2, SHARES))
    wait_until_gone(list(gang.pids.values()))


def test_a_cut_between_two_members_ends_the_epoch_although_the_driver_reaches_both(
    running: Callable[..., Gang],
) -> None:
    gang = running(Size(1, 3))
    mine, port = gang.pids[1], gang._port

    def cut(number: int) -> None:
        if os.getpid() == mine and number > 50:
            for link in list(links._links):
                if link._raw.getpeername()[1] != port:
                    link._raw.shutdown(socket.SHUT_RDWR)
                    return

    with pytest.raises(GangLostError, match="gone"):
        gang.run(order(1, SHARES, reading=Reading(cut)))
    wait_until_gone(list(gang.pids.values()))


def test_a_member_that_hangs_longer_than_an_epoch_may_take_is_ended(
    running: Callable[..., Gang],
) -> None:
    for victim, size in ((0, Size(1, 3)), (2, Size(1, 3)), (1, Size(3))):
        gang = running(size, epoch_max_s=1.0)
        zombie = gang.pids[victim]

        def stop(_: int, zombie: int = zombie) -> None:
            if os.getpid() == zombie:
                os.kill(zombie, signal.SIGSTOP)

        began_s = time.monotonic()
        with pytest.raises(GangLostError, match=r"longer than the 1 s that its transaction may"):
            gang.run(order(1, SHARES, reading=Reading(stop)))
        assert time.monotonic() - began_s >= 1
        wait_until_gone(list(gang.pids.values()))


def test_a_member_that_is_only_paused_does_its_work_when_it_goes_on(
    running: Callable[..., Gang], tmp_path: Path
) -> None:
    gang = running(Size(1, 2))
    paused, marker = gang.pids[1], str(tmp_path / "paused")

    def pause(_: int) -> None:
        if os.getpid() == paused and not os.path.exists(marker):
            Path(marker).touch()
            os.kill(paused, signal.SIGSTOP)

    def wake_up() -> None:
        while not os.path.exists(marker):
            time.sleep(0.01)
        time.sleep(1.5)
        os.kill(paused, signal.SIGCONT)

    Thread(target=wake_up, daemon=True).start()
    assert numbers_of(gang.run(order(1, SHARES, reading=Reading(pause)))) == list(range(200))
    assert os.path.exists(marker)


def busy(_: int) -> None:
    while True:
        sum(range(1000))


def sleep(_: int) -> None:
    time.sleep(1000)


def block(_: int) -> None:
    os.read(os.pipe()[0], 1)


def wait_for_frames(number: int) -> None:
    if number % 7 == 0:  # the first member's; the others wait for what it does not send
        time.sleep(1000)


@pytest.mark.parametrize("does", [busy, sleep, block, wait_for_frames])
@pytest.mark.parametrize("size", [Size(1, 3), Size(3)], ids=str)
def test_members_are_gone_at_once_when_the_driver_is_killed_whatever_they_do(
    size: Size, does: Callable[[int], None]
) -> None:
    """The driver is a process of its own; a fork that it has made does not hold its place."""
    read_end, write_end = os.pipe()

    def drive() -> None:
        gang = gang_of(size)
        fork = forked(lambda: time.sleep(60))
        os.write(write_end, " ".join(map(str, (fork, *gang.pids.values()))).encode())
        gang.run(order(1, SHARES, reading=Reading(does)))

    driver = forked(drive)
    os.close(write_end)
    fork, *pids = map(int, os.read(read_end, 1000).split())
    try:
        time.sleep(0.5)
        assert not any(map(is_gone, (fork, *pids)))
        os.kill(driver, signal.SIGKILL)
        os.waitpid(driver, 0)
        wait_until_gone(pids)
        assert not is_gone(fork)
    finally:
        end([driver, fork, *pids])


def test_strangers_who_call_a_member_and_say_nothing_hold_nobody_up() -> None:
    """They hold their connections for longer than a member may take to start."""
    secret, listener = secrets.token_bytes(32), listen("127.0.0.1")
    known: Any = Parcel(tuple)
    spec = Spec(listener.getsockname(), secret, 2, known, 1000)
    child = forked(lambda: serve(spec, (0, 1)))
    members = [Link.accept(listener.accept()[0], secret) for _ in range(2)]
    hellos = sorted((link.receive(), at) for at, link in enumerate(members))
    addresses = [address for (_, address, _), _ in hellos]
    strangers = [socket.create_connection(a) for a in addresses for _ in range(3)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n" + b"x" * 100)
    began_s = time.monotonic()
    for link in members:
        link.send(*addresses)
    assert {link.receive()[0] for link in members} == {"ready"}
    assert time.monotonic() - began_s < links.HANDSHAKE_MAX_S
    for link in members:
        link.close()
    os.waitpid(child, 0)
    for connection in (listener, *strangers):
        connection.close()


@pytest.fixture
def unpacks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Has members do something where they unpack what the user gave."""

    def given(unpack: Callable[[], Any]) -> None:
        monkeypatch.setattr(gangs.BroadcastPlans, "pack", lambda *_: Parcel(unpack))

    return given


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_each_member_unpacks_what_the_user_gave_for_itself(
    running: Callable[..., Gang],
    unpacks: Callable[[Callable[[], Any]], None],
    tmp_path: Path,
    size: Size,
) -> None:
    """In its own process, which drew other numbers than its parent and its siblings will."""
    np.random.seed(1)

    def unpack() -> tuple[()]:
        drawn = np.random.random()
        (tmp_path / f"{os.getpid()} {drawn}").touch()
        return ()

    unpacks(unpack)
    gang = running(size)
    names = [path.name.split() for path in tmp_path.iterdir()]
    assert sorted(int(pid) for pid, _ in names) == sorted(gang.pids.values())
    assert len({drawn for _, drawn in names}) == size.members


@pytest.mark.parametrize("size", [Size(1, 3), Size(3)], ids=str)
def test_an_error_at_the_unpacking_is_raised_where_the_gang_is_started(
    running: Callable[..., Gang], unpacks: Callable[[Callable[[], Any]], None], size: Size
) -> None:
    def unpack() -> Any:
        raise OwnError("no such module")

    unpacks(unpack)
    with pytest.raises(OwnError, match="no such module") as caught:
        running(size)
    assert "in unpack" in caught.value.__notes__[0]


@pytest.mark.parametrize("code", [0, 3])
def test_a_function_that_ends_its_process_is_named_and_not_the_member_that_missed_it(
    code: int, tmp_path: Path
) -> None:
    """Both have ended when the worker looks."""
    secret, listener, says = secrets.token_bytes(32), listen("127.0.0.1"), tmp_path / "says"

    def unpack() -> tuple[()]:
        try:
            (tmp_path / "first").touch(exist_ok=False)
        except FileExistsError:
            return ()
        while not (tmp_path / "go").exists():
            time.sleep(0.01)
        os._exit(code)

    spec = Spec(listener.getsockname(), secret, 2, Parcel(unpack), 1000)
    worker = forked(lambda: says.write_text("; ".join(serve(spec, (0, 1)))))
    members = [Link.accept(listener.accept()[0], secret) for _ in range(2)]
    hellos = [link.receive() for link in members]
    for link in members:
        link.send(*(address for _, address, _ in sorted(hellos)))
    while not (tmp_path / "first").exists():
        time.sleep(0.01)
    os.kill(worker, signal.SIGSTOP)
    (tmp_path / "go").touch()
    for link in members:
        with contextlib.suppress(LinkBrokenError):
            while link.receive()[0] != CUT:
                pass
        link.close()
    wait_until_gone([pid for _, _, pid in hellos])
    os.kill(worker, signal.SIGCONT)
    os.waitpid(worker, 0)
    listener.close()
    assert re.fullmatch(rf"member [01] ended with exit code {code}, as .*", says.read_text())


def test_members_that_take_long_to_unpack_are_waited_for_together(
    running: Callable[..., Gang],
    unpacks: Callable[[Callable[[], Any]], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """By one deadline, which is none of the driver's for an answer; those missing are counted."""
    monkeypatch.setattr(gangs, "STOP_MAX_S", 0.3)
    monkeypatch.setattr(gangs, "WARN_EVERY_S", 0.5)
    first = tmp_path / "first"

    def unpack() -> tuple[()]:
        try:
            first.touch(exist_ok=False)
        except FileExistsError:
            time.sleep(2)
        return ()

    unpacks(unpack)
    running(Size(1, 3))
    assert "2 of its 3 resident tasks import its functions" in caplog.text


def test_a_member_that_hangs_at_the_unpacking_is_given_up(
    running: Callable[..., Gang],
    unpacks: Callable[[Callable[[], Any]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gangs, "STEP_MAX_S", 1.0)
    unpacks(lambda: time.sleep(1000))
    with pytest.raises(GangLostError, match=r"\[0, 1\] .*did not import its functions in 1 s"):
        running(Size(1, 2))


def test_a_hung_member_is_given_up_where_no_transaction_limits_the_epoch(
    running: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that gets on is not, however long its epoch takes."""
    monkeypatch.setattr(gangs, "STEP_MAX_S", 2.0)
    monkeypatch.setattr(member, "SIGN_EVERY_S", 0.1)
    gang = running(Size(1, 2))
    hanging = gang.pids[1]
    began_s = time.monotonic()
    slow = Reading(lambda _: time.sleep(0.05))
    assert numbers_of(gang.run(order(1, SHARES, reading=slow))) == list(range(200))
    assert time.monotonic() - began_s > 2 * gangs.STEP_MAX_S

    def hang(_: int) -> None:
        while os.getpid() == hanging:
            time.sleep(0.01)

    with pytest.raises(GangLostError, match="no member got on with the epoch for 2 s"):
        gang.run(order(2, SHARES, reading=Reading(hang)))
    wait_until_gone(list(gang.pids.values()))


class OwnError(ValueError):
    """Of a user's."""


class StubbornError(Exception):
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("not this one")


class OneWayError(Exception):
    """Can be pickled, and not be read."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class SilentError(Exception):
    """Cannot even be shown."""

    def __reduce__(self) -> Any:
        raise TypeError("nor this one")

    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        (OwnError("a mistake"), OwnError, "^OwnError: a mistake"),
        (MemoryError("too much"), MemoryError, "^MemoryError: too much"),
        (TallystickError("ours"), TallystickError, "^ours"),
        (StubbornError("in the way"), TallystickError, "StubbornError: in the way"),
        (OneWayError(1, 2), TallystickError, "OneWayError: 1 and 2"),
        (SilentError(), TallystickError, "SilentError"),
        (SystemExit(3), TallystickError, "SystemExit: 3"),
        (KeyboardInterrupt(), TallystickError, "KeyboardInterrupt"),
        (StopIteration("in a function"), RuntimeError, "StopIteration"),
    ],
    ids=lambda parameter: type(parameter).__name__ if isinstance(parameter, BaseException) else "",
)
def test_what_a_function_raises_arrives_and_the_gang_goes_on(
    running: Callable[..., Gang], raised: BaseException, kind: type[Exception], text: str
) -> None:
    gang = running(Size(1, 3))
    who = gang.pids[1]

    def fail(_: int) -> None:
        if os.getpid() == who:
            raise again()

    fields = (type(raised), raised.args)  # not the error itself: it would have to be pickled

    def again() -> BaseException:
        kind, given = fields
        return OneWayError(1, 2) if kind is OneWayError else kind(*given)

    with pytest.raises(kind, match=text) as met:
        gang.run(order(1, SHARES, reading=Reading(fail)))
    assert "in fail" in "".join(met.value.__notes__), "the line that raised it"
    assert not gang.is_lost
    assert numbers_of(gang.run(order(2, SHARES))) == list(range(200))


def test_a_task_that_is_cancelled_has_let_go_of_everything_when_the_driver_hears_of_it(
    running: Callable[..., Gang], tmp_path: Path
) -> None:
    """One member fails while the others stand in the middle of their tasks."""
    gang = running(Size(1, 3))
    failing, folder = gang.pids[0], str(tmp_path)

    def fail(number: int) -> None:
        if os.getpid() == failing and number > 100:
            time.sleep(0.3)
            raise OwnError("a mistake")

    def note_end() -> None:
        Path(folder, str(os.getpid())).touch()

    step = Processing(3, Numbers(3), at_end=note_end)
    with pytest.raises(OwnError):
        gang.run(order(1, SHARES, reading=Reading(fail), steps=(step,)))
    expected = {str(pid) for pid in gang.pids.values() if pid != failing}
    assert {path.name for path in tmp_path.iterdir()} == expected
    assert numbers_of(gang.run(order(2, SHARES))) == list(range(200))


def test_what_is_made_is_written_while_more_is_made(
    running: Callable[..., Gang], tmp_path: Path
) -> None:
    """Each member reads its last number only when another one of its own was seen written."""
    gang = running(Size(1, 3))
    folder = str(tmp_path)
    last = {share[-1] for share in SHARES[-3:]}  # of the last task of each member

    def wait_for_own(number: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while number in last and not Path(folder, str(os.getpid())).exists():
            assert time.monotonic() < deadline, "nobody writes"
            time.sleep(0.01)

    @dataclass(frozen=True)
    class Noting(WriteStep):
        def write(self, frames: Iterator[Frame], attempt_number: int) -> Report:
            def noted() -> Iterator[Frame]:
                for frame in frames:
                    Path(folder, str(os.getpid())).touch()
                    yield frame

            return super().write(noted(), attempt_number)

    order_waiting = order(1, SHARES, reading=Reading(wait_for_own), writing=Noting())
    assert numbers_of(gang.run(order_waiting)) == list(range(200))


def test_who_fails_while_it_writes_has_stopped_writing_when_the_driver_hears_of_it(
    running: Callable[..., Gang], tmp_path: Path
) -> None:
    gang = running(Size(1))
    begun, ended = str(tmp_path / "begun"), str(tmp_path / "ended")

    def fail(number: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while number > 100 and time.monotonic() < deadline:
            if Path(begun).exists():
                raise OwnError("a mistake")
            time.sleep(0.01)

    @dataclass(frozen=True)
    class Slow(WriteStep):
        def write(self, frames: Iterator[Frame], attempt_number: int) -> Report:
            try:
                next(frames)
                Path(begun).touch()
                time.sleep(0.5)
                return super().write(frames, attempt_number)
            finally:
                Path(ended).touch()

    with pytest.raises(OwnError):
        gang.run(order(1, SHARES, reading=Reading(fail), writing=Slow()))
    assert Path(ended).exists()
    assert numbers_of(gang.run(order(2, SHARES))) == list(range(200))


def test_frames_of_a_cancelled_epoch_are_in_no_later_one(running: Callable[..., Gang]) -> None:
    gang = running(Size(1, 3))
    for run in range(1, 6):

        def fail(number: int) -> None:
            if number > 150:
                raise OwnError(str(number))

        with pytest.raises(OwnError):
            gang.run(order(2 * run, SHARES, reading=Reading(fail), size=20_000))
        assert numbers_of(gang.run(order(2 * run + 1, SHARES))) == list(range(200))


def test_a_task_that_does_not_stop_when_another_failed_is_ended(
    running: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is still the function's, not that of the gang."""
    monkeypatch.setattr(gangs, "STOP_MAX_S", 1.0)
    gang = running(Size(1, 2))
    failing = gang.pids[0]

    def fail_or_stay(_: int) -> None:
        if os.getpid() == failing:
            raise OwnError("a mistake")
        time.sleep(1000)

    with pytest.raises(OwnError, match="a mistake"):
        gang.run(order(1, SHARES, reading=Reading(fail_or_stay)))
    assert gang.is_lost
    wait_until_gone(list(gang.pids.values()))


def test_an_inbox_without_room_on_the_disk_fails_the_epoch(
    running: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gangs, "HELD_BYTES_MAX", 10)
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "/nowhere")
    gang = running(Size(1, 2))
    with pytest.raises(OSError, match="/nowhere"):
        gang.run(order(1, SHARES))


def ignore(_: int) -> None:
    return
