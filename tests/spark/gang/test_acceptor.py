"""Who calls at a gang's port: members get through, whatever strangers do there."""

import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Thread

import pytest

from tallystick.spark.gang import link
from tallystick.spark.gang.link import Address, Link, accept_calls, listen, stop_listening
from tests.waiting import wait_for

WAIT_S = 30.0

pytestmark = pytest.mark.timeout(120)


class Port:
    """A port of a gang's, whose members are counted."""

    def __init__(self) -> None:
        self.secret = secrets.token_bytes(32)
        self.listener = listen("127.0.0.1")
        self.address: Address = self.listener.getsockname()[:2]
        self.taken: SimpleQueue[Link] = SimpleQueue()
        self.thread = Thread(
            target=accept_calls, args=(self.listener, self.secret, self.taken.put), daemon=True
        )
        self.thread.start()

    def stranger(self) -> socket.socket:
        """Somebody who only connects."""
        return socket.create_connection(self.address, WAIT_S)

    def assert_takes_a_member(self) -> None:
        """One calls, and both sides have each other."""
        calling = Link.call(self.address, self.secret)
        called = self.taken.get(timeout=WAIT_S)
        called.send("hello")
        assert calling.receive() == ("hello",)
        calling.close()
        called.close()


@pytest.fixture
def port() -> Iterator[Port]:
    port = Port()
    yield port
    stop_listening(port.listener)
    port.thread.join(WAIT_S)
    assert not port.thread.is_alive()


@pytest.fixture
def strangers(port: Port) -> Iterator[Callable[[int], list[socket.socket]]]:
    """Connects strangers, who stay until the test ends."""
    there: list[socket.socket] = []

    def call(count: int) -> list[socket.socket]:
        there.extend(port.stranger() for _ in range(count))
        return there

    yield call
    for connection in there:
        connection.close()


def greeters() -> int:
    return sum(thread.name == "tallystick_greet" for thread in threading.enumerate())


def test_strangers_hold_no_more_than_a_number_of_threads_and_members_get_in_between(
    port: Port, strangers: Callable[[int], list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "UNPROVED_MAX", 5)
    monkeypatch.setattr(link, "UNPROVED_S", 0.2)
    strangers(40)
    port.assert_takes_a_member()
    assert greeters() <= 5
    strangers(40)
    port.assert_takes_a_member()


def test_strangers_who_take_all_descriptors_do_not_end_who_listens(
    port: Port, strangers: Callable[[int], list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "UNPROVED_S", 0.2)
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    strangers(20)
    wait_for(greeters, 20, "the number of threads that greet")
    raws = [socket.socket() for _ in range(10)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(raw.fileno() for raw in raws), most))
    try:
        for raw in raws:  # connect to the port without a descriptor left for its side
            raw.connect(port.address)
        with pytest.raises(OSError, match="Too many open files"):
            socket.socket()
        time.sleep(0.5)
        assert port.thread.is_alive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
        for raw in raws:
            raw.close()
    port.assert_takes_a_member()


def test_a_handshake_has_one_deadline_however_its_bytes_come(
    port: Port, strangers: Callable[[int], list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "HANDSHAKE_MAX_S", 0.5)
    there = strangers(3)
    wait_for(greeters, 3, "the number of threads that greet")
    ended = 0
    began_s = time.monotonic()
    while ended < 3:
        assert time.monotonic() - began_s < WAIT_S, "a byte now and then holds the thread"
        ended = 0
        for connection in there:
            try:
                connection.sendall(b"x")
            except OSError:
                ended += 1
        time.sleep(0.2)
    wait_for(greeters, 0, "the number of threads that greet")
    monkeypatch.undo()
    port.assert_takes_a_member()


def test_a_caller_for_whom_there_is_no_thread_is_refused(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(link.Thread, "start", fail)
        stranger = port.stranger()
        assert stranger.recv(1) == b""
        stranger.close()
    port.assert_takes_a_member()
