"""A real Kafka that answers as another broker would: before it, requests and settings are hidden.

What it does not offer, it does not answer either: a request that was hidden ends the connection, as
brokers end it, and is kept in `refused`.
"""

import socket
import struct
import threading
from collections.abc import Collection
from typing import Any, Self

from tallystick.kafka import messages, protocol
from tallystick.kafka.cluster import FACT_SETTINGS
from tests.kafka.fake_broker import payload_of, read_request

HOST = "127.0.0.1"
REDPANDA: dict[str, Any] = {"without_settings": FACT_SETTINGS, "without_apis": ["DescribeQuorum"]}
"""The setting that Redpanda leaves out; it leaves out its features too."""


class OtherBroker:
    """The only broker of a cluster, as a client sees it.

    Args:
        target: the address of a Kafka of one broker, `host:port`.
        without_apis: requests that it does not offer.
        without_settings: keys that its DescribeConfigs leaves out.
        has_features: whether it tells its features, from which Kafka's release is known.
    """

    def __init__(
        self,
        target: str,
        *,
        without_apis: Collection[str] = (),
        without_settings: Collection[str] = (),
        has_features: bool = False,
    ) -> None:
        host, port = target.rsplit(":", 1)
        self._target = host, int(port)
        self._without_apis = {
            kind.API_KEY
            for kind in protocol.REQUESTS.values()
            if kind.__name__.removesuffix("Request") in without_apis
        }
        self._without_settings = without_settings
        self._has_features = has_features
        self.hidden: set[str] = set()
        """Settings that were asked for, and left out."""
        self.refused: list[str] = []
        self._open: list[socket.socket] = []
        self._server = socket.create_server((HOST, 0))
        self.address = f"{HOST}:{self._server.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        for connection in self._open:
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            self._open += [near, far]
            threading.Thread(target=self._serve, args=(near, far), daemon=True).start()

    def _serve(self, near: socket.socket, far: socket.socket) -> None:
        """Ask and answer one request after the other, as Kafka does on a connection."""
        asked, answered = near.makefile("rb"), far.makefile("rb")
        try:
            while frame := _frame(asked):
                request, correlation_id = read_request(frame)
                if request.API_KEY in self._without_apis:
                    self.refused.append(protocol.api_name(request))
                    break
                far.sendall(struct.pack(">i", len(frame)) + frame)
                if getattr(request, "acks", None) == 0:
                    continue
                payload = self._changed(request, correlation_id, _frame(answered))
                near.sendall(struct.pack(">i", len(payload)) + payload)
        except OSError:
            pass
        finally:
            near.close()
            far.close()

    def _changed(self, request: Any, correlation_id: int, payload: bytes) -> bytes:
        kind = protocol.REQUESTS[f"{protocol.api_name(request)}Request"]
        sent = protocol.SentRequest(correlation_id, kind, request.version)
        change = getattr(self, f"_{messages.snake_case(protocol.api_name(request))}", None)
        if change is None:
            return payload
        response = protocol.decode_response(sent, memoryview(payload))
        return payload_of(request, change(response), correlation_id)

    def _api_versions(self, response: Any) -> Any:
        offered = [api for api in response.api_keys if api.api_key not in self._without_apis]
        response = response._replace(api_keys=offered)
        if self._has_features or response.version < 3:
            return response
        return response._replace(supported_features=[], finalized_features=[])

    def _describe_configs(self, response: Any) -> Any:
        results = []
        for result in response.results:
            shown = [entry for entry in result.configs if entry.name not in self._without_settings]
            self.hidden |= {entry.name for entry in result.configs} - {
                entry.name for entry in shown
            }
            results.append(result._replace(configs=shown))
        return response._replace(results=results)

    def _metadata(self, response: Any) -> Any:
        host, port = self.address.split(":")
        brokers = [broker._replace(host=host, port=int(port)) for broker in response.brokers]
        return response._replace(brokers=brokers)

    def _find_coordinator(self, response: Any) -> Any:
        host, port = self.address.split(":")
        if response.version < 4:
            return response._replace(host=host, port=int(port))
        there = [place._replace(host=host, port=int(port)) for place in response.coordinators]
        return response._replace(coordinators=there)


def _frame(stream: Any) -> bytes:
    """The next frame without its length; empty at the end of the stream."""
    head = stream.read(4)
    data: bytes = stream.read(*struct.unpack(">i", head)) if len(head) == 4 else b""
    return data
