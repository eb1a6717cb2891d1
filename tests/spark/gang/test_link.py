"""Connections between the processes of a gang: who may talk, what arrives, and how one ends."""

import hmac
import os
import pickle
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tallystick.spark.gang import link as links
from tallystick.spark.gang.link import (
    CALLED,
    CALLER,
    Link,
    LinkBrokenError,
    listen,
    stop_listening,
)
from tests.spark.gang.forked import forked

SECRET = b"s" * 32
LINUX_ONLY = pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux's options")
WAIT_S = 30.0


def in_thread(do: Callable[..., Any], *given: object) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(do, *given)
    pool.shutdown(wait=False)
    return future


@pytest.fixture
def raws() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A TCP connection, the side that called first."""
    listener = listen("127.0.0.1")
    calling = socket.create_connection(listener.getsockname())
    called, _ = listener.accept()
    listener.close()
    for raw in (calling, called):
        raw.settimeout(WAIT_S)
    yield calling, called
    for raw in (calling, called):
        raw.close()


@pytest.fixture
def pair(raws: tuple[socket.socket, socket.socket]) -> Iterator[tuple[Link, Link]]:
    calling, called = raws
    other = in_thread(Link.accept, called, SECRET)
    mine = Link(calling, SECRET, CALLER, CALLED)
    yield mine, other.result(WAIT_S)
    mine.close()
    other.result().close()


def test_a_caller_with_another_secret_is_refused_and_so_is_who_answers_with_one(
    raws: tuple[socket.socket, socket.socket],
) -> None:
    calling, called = raws
    taken = in_thread(Link.accept, called, SECRET)
    with pytest.raises(LinkBrokenError):
        Link(calling, b"another", CALLER, CALLED)
    with pytest.raises(LinkBrokenError):
        taken.result(WAIT_S)
    with pytest.raises(OSError, match=r"Bad file descriptor|not connected"):
        called.getpeername()


@pytest.mark.parametrize("side", [CALLER, CALLED])
def test_only_who_knows_the_secret_is_believed_on_either_side(
    raws: tuple[socket.socket, socket.socket], side: bytes
) -> None:
    """The other side does all that it can do without it: 32 bytes of its own."""
    mine, stranger = raws
    words = (CALLER, CALLED) if side == CALLER else (CALLED, CALLER)
    future = in_thread(Link, mine, SECRET, *words)
    stranger.sendall(secrets.token_bytes(16))
    read(stranger, 16 + 32)
    stranger.sendall(secrets.token_bytes(32))
    with pytest.raises(LinkBrokenError, match="does not know the secret"):
        future.result(WAIT_S)


def test_a_proof_cannot_be_sent_back(raws: tuple[socket.socket, socket.socket]) -> None:
    """A stranger sends the nonce back that it got, and then the proof made of it."""
    called, stranger = raws
    future = in_thread(Link.accept, called, SECRET)
    nonce = read(stranger, 16)
    stranger.sendall(nonce)
    proof = read(stranger, 32)
    assert proof == hmac.digest(SECRET, CALLED + nonce, "sha256")
    stranger.sendall(proof)
    with pytest.raises(LinkBrokenError, match="does not know the secret"):
        future.result(WAIT_S)


class Trace:
    """Leaves a trace where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_nothing_of_a_strangers_is_unpickled(
    raws: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    called, stranger = raws
    data = pickle.dumps(Trace(tmp_path / "trace"))
    message = struct.pack("!Q", len(data)) + data

    def take() -> Any:
        return Link.accept(called, SECRET).receive()

    future = in_thread(take)
    stranger.sendall(secrets.token_bytes(16 + 32) + message)
    with pytest.raises(LinkBrokenError):
        future.result(WAIT_S)
    assert not (tmp_path / "trace").exists()
    pickle.loads(data)  # noqa: S301  our own
    assert (tmp_path / "trace").exists(), "it would have left one"


def test_a_stranger_that_says_nothing_is_not_waited_for_for_ever(
    raws: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "HANDSHAKE_MAX_S", 0.2)
    with pytest.raises(LinkBrokenError, match="timed out"):
        Link.accept(raws[1], SECRET)


def test_many_large_parts_arrive_whole_and_in_order(pair: tuple[Link, Link]) -> None:
    """More of them than one call may send, together more than the buffers of both sides."""
    one, other = pair
    parts = [bytes([n % 251]) * (n * 7 % 40_000) for n in range(1500)]
    parts += [b"", memoryview(b"x" * (8 << 20)), b"end"]
    whole = b"".join(parts)
    assert len(parts) > links.VIEWS_MAX
    sent = in_thread(one.send_buffers, parts)
    time.sleep(0.1)
    assert not sent.done(), "it has to wait for the reader"
    assert other.read(len(whole)) == whole
    sent.result(WAIT_S)


def test_messages_of_several_threads_do_not_mix(pair: tuple[Link, Link]) -> None:
    one, other = pair
    data = b"y" * (1 << 20)
    for sender in range(4):
        in_thread(lambda me: [one.send(me, number, data) for number in range(5)], sender)
    messages = [other.receive() for _ in range(20)]
    assert all(content == data for _, _, content in messages)
    for sender in range(4):
        assert [number for who, number, _ in messages if who == sender] == [0, 1, 2, 3, 4]


@LINUX_ONLY
def test_the_kernel_notices_a_silent_host_within_the_promised_time(pair: tuple[Link, Link]) -> None:
    def option(link: Link, name: str) -> int:
        return link._raw.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))

    for link in pair:
        assert link._raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, every = option(link, "TCP_KEEPIDLE"), option(link, "TCP_KEEPINTVL")
        assert idle + every * option(link, "TCP_KEEPCNT") == links.SILENCE_MAX_S
        # A reader that is busy for longer must not be taken for a lost host.
        assert option(link, "TCP_USER_TIMEOUT") == 0
    pair[0].expect_prompt_reading()
    assert option(pair[0], "TCP_USER_TIMEOUT") == 1000 * links.SILENCE_MAX_S


@LINUX_ONLY
def test_a_reader_that_is_busy_for_longer_than_a_host_may_be_silent_is_waited_for(
    raws: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "SILENCE_MAX_S", 6)
    calling, called = raws
    for raw in raws:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    taken = in_thread(Link.accept, called, SECRET)
    one = Link(calling, SECRET, CALLER, CALLED)
    sent = in_thread(one.send_buffers, [b"z" * (1 << 20)])
    time.sleep(10)
    assert not sent.done()
    assert taken.result().read(1 << 20) == b"z" * (1 << 20)
    sent.result(WAIT_S)


@pytest.mark.parametrize("closes", [0, 1])
def test_a_side_that_hangs_up_wakes_who_waits_on_both(pair: tuple[Link, Link], closes: int) -> None:
    waiting = [in_thread(link.receive) for link in pair]
    time.sleep(0.1)
    assert not any(future.done() for future in waiting)
    pair[closes].close()
    for future in waiting:
        with pytest.raises(LinkBrokenError):
            future.result(WAIT_S)


def test_a_sender_that_waits_is_woken_by_the_end_of_the_reader(pair: tuple[Link, Link]) -> None:
    sent = in_thread(pair[0].send_buffers, [b"w" * (32 << 20)])
    time.sleep(0.1)
    assert not sent.done()
    pair[1].close()
    with pytest.raises(LinkBrokenError):
        sent.result(WAIT_S)
    with pytest.raises(LinkBrokenError):
        pair[0].send("more")


def test_half_a_message_is_no_message(pair: tuple[Link, Link]) -> None:
    pair[0].send_buffers([struct.pack("!Q", 100), b"half of it"])
    pair[0].close()
    with pytest.raises(LinkBrokenError, match="gone"):
        pair[1].receive()


def test_a_process_that_is_forked_does_not_keep_a_connection_open(pair: tuple[Link, Link]) -> None:
    """A user's function may fork; the end of the process that had the connection is seen."""
    read_end, write_end = os.pipe()

    def stay() -> None:
        os.close(write_end)
        os.read(read_end, 1)  # until the test ends

    child = forked(stay)
    try:
        descriptor = pair[0]._raw.fileno()
        os.close(os.dup(descriptor))  # it is open here
        waiting = in_thread(pair[1].receive)
        os.close(pair[0]._raw.detach())  # as the kernel does it for a process that is killed
        pair[0]._file.close()
        with pytest.raises(LinkBrokenError):
            waiting.result(WAIT_S)
    finally:
        os.close(write_end)
        os.waitpid(child, 0)


def test_who_waits_for_calls_is_woken_when_nobody_listens_any_more() -> None:
    listener = listen("127.0.0.1")
    waiting = in_thread(listener.accept)
    time.sleep(0.1)
    stop_listening(listener)
    with pytest.raises(OSError, match=r"Invalid argument|Bad file descriptor|aborted"):
        waiting.result(WAIT_S)


def test_a_host_may_have_an_address_of_version_6() -> None:
    try:
        listener = listen("::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    taken = in_thread(lambda: Link.accept(listener.accept()[0], SECRET))
    calling = Link.call(listener.getsockname()[:2], SECRET)
    assert calling.host == taken.result(WAIT_S).host == "::1"
    calling.close()
    taken.result().close()
    stop_listening(listener)


def test_nobody_there_is_said_with_the_address() -> None:
    listener = listen("127.0.0.1")
    address = listener.getsockname()
    stop_listening(listener)
    with pytest.raises(LinkBrokenError, match=f"{address[1]} cannot be reached"):
        Link.call(address, SECRET)


def read(raw: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += raw.recv(size - len(data))
    return data
