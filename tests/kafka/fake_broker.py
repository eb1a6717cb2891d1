"""A broker on a real socket that says what a test tells it to."""

import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Self

from tallystick.kafka import messages, protocol
from tallystick.kafka.config import KafkaConfig

REQUESTS = {kind.API_KEY: kind for kind in protocol.REQUESTS.values()}
CLOSE = "close"
"""Hang up in place of an answer."""
SILENCE = "silence"
"""Never answer, and keep the connection open."""
TOPIC_ID = uuid.UUID(int=7)
CODES = {protocol.error_name(code): code for code in range(-1, 130)} | {None: 0}

Handler = Callable[[Any], Any]


def answer(request: Any, **fields: Any) -> Any:
    """An answer of the class and version that belong to the request."""
    return request.response(**fields)


def part(request: Any, name: str) -> Any:
    """A nested class of the answer."""
    return getattr(request.response, name)


def read_request(frame: bytes) -> tuple[Any, int]:
    """The request in a frame without its length, and its correlation id."""
    api, version, correlation_id, size = struct.unpack(">hhih", frame[:10])
    kind, start = REQUESTS[api], 10 + max(size, 0)
    start += version >= kind.flexible_since  # no tagged fields
    request = messages.decode(kind, version, kind.flexible_since, memoryview(frame)[start:])
    return request, correlation_id


def payload_of(request: Any, response: Any, correlation_id: int) -> bytes:
    """The answer to a request as bytes, without a length."""
    since = request.flexible_since
    version = getattr(response, "version", request.version)
    is_flexible = version >= since and protocol.api_name(request) != "ApiVersions"
    header = struct.pack(">i", correlation_id) + b"\0" * is_flexible
    return header + b"".join(messages.encode(response, version, since))


class FakeBroker:
    """Node 0 of a cluster of its own; leader and coordinator of everything.

    Args:
        handlers: by API; each takes a request and returns an answer, CLOSE or SILENCE.
        versions: the (lowest, highest) version of an API, where it is not all that we know.
    """

    def __init__(
        self, handlers: dict[str, Handler] | None = None, versions: dict[str, Any] | None = None
    ) -> None:
        self.handlers = {
            "ApiVersions": self.tell_versions,
            "Metadata": self.tell_metadata,
            "FindCoordinator": self.tell_coordinator,
        } | (handlers or {})
        self.versions = versions or {}
        self.partitions = {"orders": 2}
        self.topic_id = TOPIC_ID
        self.nodes: list[FakeBroker] = [self]
        self.received: list[tuple[float, str, Any]] = []
        self.connection_count = 0
        self.failures: list[Exception] = []
        self._open: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        for connection in self._open:
            connection.close()
        assert not self.failures, self.failures

    def config(self, **options: str) -> KafkaConfig:
        """To reach it, with timeouts that suit a test."""
        named = {name.replace("_", "."): value for name, value in options.items()}
        short = {"request.timeout.ms": "400", "delivery.timeout.ms": "3000"}
        return KafkaConfig.from_options(
            {"bootstrap.servers": f"127.0.0.1:{self.port}"} | short | named
        )

    def requests_of(self, api: str) -> list[Any]:
        """The requests of one API, in order."""
        return [request for _, name, request in self.received if name == api]

    def when(self, api: str) -> list[float]:
        """When they came."""
        return [at for at, name, _ in self.received if name == api]

    def tell_versions(self, request: Any) -> Any:
        key = part(request, "ApiVersion")
        ranges = {
            cls.API_KEY: self.versions.get(
                cls.__name__.removesuffix("Request"), (0, cls.versions[1])
            )
            for cls in REQUESTS.values()
        }
        return answer(
            request,
            error_code=0,
            api_keys=[
                key(api_key=api, min_version=low, max_version=high)
                for api, (low, high) in ranges.items()
            ],
        )

    def tell_metadata(self, request: Any) -> Any:
        topic_class = part(request, "MetadataResponseTopic")
        part_class = topic_class.MetadataResponsePartition
        names = [topic.name for topic in request.topics or []]
        return answer(
            request,
            cluster_id="fake",
            brokers=[
                part(request, "MetadataResponseBroker")(
                    node_id=index, host="127.0.0.1", port=node.port, rack=None
                )
                for index, node in enumerate(self.nodes)
            ],
            topics=[
                topic_class(
                    error_code=0 if name in self.partitions else 3,
                    name=name,
                    topic_id=self.topic_id,
                    partitions=[
                        part_class(
                            error_code=0,
                            partition_index=index,
                            leader_id=0,
                            replica_nodes=[0],
                            isr_nodes=[0],
                            offline_replicas=[],
                        )
                        for index in range(self.partitions.get(name, 0))
                    ],
                )
                for name in names
            ],
        )

    def tell_coordinator(self, request: Any, node: int = 0) -> Any:
        coordinator = part(request, "Coordinator")(
            key=request.coordinator_keys[0],
            node_id=node,
            host="127.0.0.1",
            port=self.port,
            error_code=0,
            error_message=None,
        )
        return answer(request, coordinators=[coordinator])

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self.connection_count += 1
            self._open.append(connection)
            threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        stream = connection.makefile("rb")
        try:
            while head := stream.read(4):
                frame = stream.read(*struct.unpack(">i", head))
                request, correlation_id = read_request(frame)
                name = protocol.api_name(request)
                self.received.append((time.monotonic(), name, request))
                response = self.handlers[name](request)
                if response is CLOSE:
                    break
                if response is SILENCE:
                    continue
                payload = payload_of(request, response, correlation_id)
                connection.sendall(struct.pack(">i", len(payload)) + payload)
        except OSError:
            pass
        except Exception as error:
            self.failures.append(error)
            raise
        finally:
            stream.close()
            connection.close()
