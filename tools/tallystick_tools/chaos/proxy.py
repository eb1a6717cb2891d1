"""TCP proxies before brokers, with knowledge of the frames and kinds of Kafka requests.

A program is told the addresses of the proxies; the brokers talk with each other directly. Brokers
that advertise the proxies as their own addresses need no more; in answers of other brokers the
addresses are replaced. Before another server a proxy passes bytes on, and can be cut.
"""

import asyncio
import contextlib
import struct
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tallystick_tools.chaos.addresses import FLEXIBLE_SINCE, Address, readdressed

HOST = "127.0.0.1"
LATE_S = 0.5
"""The delay of the second copy of a repeated request."""
CHUNK = 1 << 16
APIS = {
    0: "Produce",
    10: "FindCoordinator",
    22: "InitProducerId",
    24: "AddPartitionsToTxn",
    25: "AddOffsetsToTxn",
    26: "EndTxn",
    28: "TxnOffsetCommit",
}
"""Numbers and names of the requests that write and commit, which are those to lose."""
PRODUCE, END_TXN = 0, 26

Loss = Literal["lose-request", "lose-reply", "repeat"]


@dataclass
class Trap:
    """A request to lose or to repeat: the first of its kind that comes through any proxy.

    Args:
        loss: The fate of the request.
        apis: The numbers of the kinds of requests to wait for.
        commits_only: Pass over an EndTxn that aborts.
        then: Called when the request is caught, before anything else comes through.
    """

    loss: Loss
    apis: Collection[int]
    commits_only: bool = False
    then: Callable[[], None] | None = None
    caught: threading.Event = field(default_factory=threading.Event)
    api: int = -1

    def catches(self, request: bytes) -> bool:
        """Spring the trap at its first matching request; return True for that request alone."""
        (api,) = struct.unpack(">h", request[:2])
        if self.caught.is_set() or api not in self.apis:
            return False
        if api == END_TXN and self.commits_only and not commits(request):
            return False
        self.api = api
        if self.then is not None:
            self.then()
        self.caught.set()
        return True


def commits(end_txn: bytes) -> bool:
    """Return whether an EndTxn request commits; else it aborts."""
    (version,) = struct.unpack(">h", end_txn[2:4])
    has_tags = version >= 3  # one byte, as there are none
    return end_txn[-2 if has_tags else -1] == 1


class _Proxy:
    """One broker's proxy."""

    def __init__(self, port: int, target: Address, proxies: "Proxies") -> None:
        self.port = port
        self.is_cut = False
        self.refused = 0
        self.open: set[asyncio.StreamWriter] = set()
        self.target = target
        self._proxies = proxies

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay a client's connection to the target until either side closes."""
        ends = {writer}
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection(*self.target)
            ends.add(back)
            self.refused += self.is_cut
            if not self.is_cut:
                self.open |= ends
                requested: dict[int, tuple[int, int]] = {}
                requests = asyncio.ensure_future(
                    self._requests(reader, back, requested)
                    if self._proxies.is_kafka
                    else self._bytes(reader, back)
                )
                replies = asyncio.ensure_future(
                    self._readdressed(there, writer, requested)
                    if self._proxies.readdress
                    else self._replies(there, writer)
                )
                await asyncio.wait({requests, replies}, return_when=asyncio.FIRST_COMPLETED)
                requests.cancel()
                replies.cancel()
                await asyncio.gather(requests, replies, return_exceptions=True)
        self.open -= ends
        for end in ends:
            end.close()

    async def _requests(
        self,
        reader: asyncio.StreamReader,
        back: asyncio.StreamWriter,
        requested: dict[int, tuple[int, int]],
    ) -> None:
        while True:
            head, body = await _message(reader)
            api, version, correlation_id = struct.unpack(">hhi", body[:8])
            if self._proxies.readdress and api in FLEXIBLE_SINCE:
                requested[correlation_id] = api, version
            loss = self._proxies.loss_of(body)
            if loss == "lose-request":
                return
            back.write(head + body)
            await back.drain()
            if loss == "lose-reply":
                return  # the broker does what it was asked for, and nobody hears of it
            if loss == "repeat":
                self._proxies.start(self._send_late(head + body))

    async def _bytes(self, reader: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK):
            back.write(data)
            await back.drain()

    async def _replies(self, there: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        while data := await there.read(CHUNK):
            await self._reply(data, client)

    async def _readdressed(
        self,
        there: asyncio.StreamReader,
        client: asyncio.StreamWriter,
        requested: dict[int, tuple[int, int]],
    ) -> None:
        while True:
            head, body = await _message(there)
            (correlation_id,) = struct.unpack(">i", body[:4])
            if correlation_id in requested:
                body = readdressed(*requested.pop(correlation_id), body, self._proxies.addresses)
                head = struct.pack(">i", len(body))
            await self._reply(head + body, client)

    async def _reply(self, data: bytes, client: asyncio.StreamWriter) -> None:
        if self._proxies.delay_s:
            await asyncio.sleep(self._proxies.delay_s)
        self._proxies.replies += 1
        client.write(data)
        await client.drain()

    async def _send_late(self, request: bytes) -> None:
        await asyncio.sleep(LATE_S)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            there, back = await asyncio.open_connection(*self.target)
            back.write(request)
            await back.drain()
            await _message(there)
            back.close()


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Return a request or an answer: its length, and itself."""
    head = await reader.readexactly(4)
    (size,) = struct.unpack(">i", head)
    return head, await reader.readexactly(size)


class Proxies:
    """The proxies of all brokers of a cluster, in a thread of their own.

    Args:
        ports: The ports to listen on, by broker.
        targets: The address of the broker behind each.
        readdress: Whether the brokers name their own addresses, which are to be replaced.
        is_kafka: Whether Kafka's protocol comes through; else bytes are passed on.
    """

    def __init__(
        self,
        ports: Sequence[int],
        targets: Sequence[Address],
        *,
        readdress: bool = False,
        is_kafka: bool = True,
    ) -> None:
        self.readdress, self.is_kafka = readdress, is_kafka
        self.addresses = {target: (HOST, port) for port, target in zip(ports, targets, strict=True)}
        """The address of the proxy before each broker."""
        self.delay_s = 0.0
        """The delay of each part of a reply."""
        self.replies = 0
        """The number of parts of replies that came through."""
        self._trap: Trap | None = None
        self._late: set[asyncio.Future[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._all = [_Proxy(*pair, self) for pair in zip(ports, targets, strict=True)]
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._servers: list[asyncio.Server] = [
            self._call(self._listen(proxy)) for proxy in self._all
        ]

    @property
    def bootstrap_servers(self) -> str:
        """The `host:port,…` of all proxies."""
        return ",".join(f"{HOST}:{proxy.port}" for proxy in self._all)

    def close(self) -> None:
        """Close all connections and end the thread."""
        for index, server in enumerate(self._servers):
            self._loop.call_soon_threadsafe(server.close)
            self.cut(index)
        self._call(self._rest())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def lead_to(self, index: int, target: Address) -> None:
        """Connect new clients of one proxy to another address."""
        self._all[index].target = target

    @property
    def count(self) -> int:
        """The number of proxies."""
        return len(self._all)

    def connections(self, index: int) -> int:
        """Return how many clients are connected to one broker."""
        return len(self._all[index].open) // 2

    def refused(self, index: int) -> int:
        """Return how many connections were not taken while one broker was cut."""
        return self._all[index].refused

    def cut(self, index: int) -> int:
        """Close all connections to a broker and refuse new ones; return how many were open."""
        count: int = self._call(self._cut(self._all[index]))
        return count

    def mend(self, index: int) -> None:
        """Take connections to a broker again."""
        self._all[index].is_cut = False

    def set_trap(
        self,
        loss: Loss,
        apis: Collection[int],
        *,
        commits_only: bool = False,
        then: Callable[[], None] | None = None,
    ) -> Trap:
        """Set a trap to lose or repeat the next request of some kinds; return the trap."""
        self._trap = Trap(loss, apis, commits_only, then)
        return self._trap

    def remove_trap(self) -> None:
        """Remove the trap: no request is lost any more."""
        self._trap = None

    def loss_of(self, request: bytes) -> Loss | None:
        """Return the fate of a request, None for the usual; called in the proxies' thread."""
        trap = self._trap
        return trap.loss if trap is not None and trap.catches(request) else None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a coroutine in the background; called in the proxies' thread."""
        future = asyncio.ensure_future(work)
        self._late.add(future)
        future.add_done_callback(self._late.discard)

    async def _listen(self, proxy: _Proxy) -> asyncio.Server:
        return await asyncio.start_server(proxy.serve, HOST, proxy.port)

    async def _cut(self, proxy: _Proxy) -> int:
        proxy.is_cut = True
        count = self.connections(self._all.index(proxy))
        for writer in list(proxy.open):
            writer.transport.abort()
        return count

    async def _rest(self) -> None:
        """Wait for the ends of cut connections: the loop would warn of tasks that are left."""
        for task in self._late:
            task.cancel()
        remaining = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*remaining, return_exceptions=True)

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
