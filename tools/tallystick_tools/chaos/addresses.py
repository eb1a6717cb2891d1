"""Answers of brokers with other addresses in them, so that clients come back through proxies.

Source: Kafka's message schemas of Metadata, FindCoordinator and DescribeCluster. The bytes after
the last address in an answer stay as they are.

Not changed are the addresses that answers to Produce and Fetch carry where a leader has moved
(KIP-951): such a connection goes past the proxy until the client asks for metadata again.
"""

import struct
from collections.abc import Mapping

METADATA, FIND_COORDINATOR, DESCRIBE_CLUSTER = 3, 10, 60
FLEXIBLE_SINCE = {METADATA: 9, FIND_COORDINATOR: 3, DESCRIBE_CLUSTER: 0}
"""The requests whose answers have addresses, and the first version with compact texts and tags."""

Address = tuple[str, int]


def readdressed(api: int, version: int, answer: bytes, known: Mapping[Address, Address]) -> bytes:
    """Return an answer with each known address replaced.

    Args:
        api: The number of the request, one of `FLEXIBLE_SINCE`.
        version: Of the request.
        answer: From its correlation id on.
        known: The replacement of each address.
    """
    copy = _Copy(answer, version >= FLEXIBLE_SINCE[api], known)
    copy.take(4)  # correlation id
    copy.tags()
    if api == METADATA:
        copy.take(4 if version >= 3 else 0)
        for _ in range(copy.count()):
            copy.take(4)
            copy.address()
            if version >= 1:
                copy.text()
            copy.tags()
    elif api == FIND_COORDINATOR and version >= 4:
        copy.take(4)
        for _ in range(copy.count()):
            copy.text()
            copy.take(4)
            copy.address()
            copy.take(2)
            copy.text()
            copy.tags()
    elif api == FIND_COORDINATOR:
        copy.take(6 if version >= 1 else 2)
        if version >= 1:
            copy.text()
        copy.take(4)
        copy.address()
    else:
        copy.take(6)
        copy.text()
        copy.take(1 if version >= 1 else 0)
        copy.text()
        copy.take(4)
        for _ in range(copy.count()):
            copy.take(4)
            copy.address()
            copy.text()
            copy.take(1 if version >= 2 else 0)
            copy.tags()
    return copy.whole()


class _Copy:
    """A copy of an answer, written from its beginning on."""

    def __init__(self, answer: bytes, flexible: bool, known: Mapping[Address, Address]) -> None:
        self._answer, self._flexible, self._known = answer, flexible, known
        self._at = 0
        self._out = bytearray()

    def whole(self) -> bytes:
        return bytes(self._out) + self._answer[self._at :]

    def take(self, size: int) -> bytes:
        data = self._read(size)
        self._out += data
        return data

    def count(self) -> int:
        if self._flexible:
            return self._take_varint() - 1
        (number,) = struct.unpack(">i", self.take(4))
        return int(number)

    def text(self) -> None:
        if self._flexible:
            self.take(max(0, self._take_varint() - 1))
        else:
            self.take(max(0, *struct.unpack(">h", self.take(2))))

    def tags(self) -> None:
        if self._flexible:
            for _ in range(self._take_varint()):
                self._take_varint()
                self.take(self._take_varint())

    def address(self) -> None:
        if self._flexible:
            length = self._varint() - 1
        else:
            (length,) = struct.unpack(">h", self._read(2))
        host = self._read(length).decode()
        (port,) = struct.unpack(">i", self._read(4))
        host, port = self._known.get((host, port), (host, port))
        text = host.encode()
        self._out += _varint_of(len(text) + 1) if self._flexible else struct.pack(">h", len(text))
        self._out += text + struct.pack(">i", port)

    def _read(self, size: int) -> bytes:
        self._at += size
        return self._answer[self._at - size : self._at]

    def _varint(self) -> int:
        number, shift = 0, 0
        while True:
            (byte,) = self._read(1)
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number

    def _take_varint(self) -> int:
        number = self._varint()
        self._out += _varint_of(number)
        return number


def _varint_of(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))
