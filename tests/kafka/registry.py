"""A schema registry over real HTTP that takes schemas, and forgets them at its end."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote

NOT_FOUND = (404, {"error_code": 40401, "message": "Subject or schema not found"})


@dataclass
class WritableRegistry:
    """The endpoints that readers and writers use, with faults on demand."""

    schemas: list[tuple[str, str]] = field(default_factory=list)
    """The kind and text of each schema; its id is its place, from 1."""
    subjects: dict[str, list[int]] = field(default_factory=dict)
    faults: list[int] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    url: str = ""
    _is_serialized: bool = False

    references: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """What a schema refers to, by its id."""

    def add(
        self, subject: str, text: str, kind: str = "AVRO", references: Sequence[Any] = ()
    ) -> int:
        """Return the id of a schema, registered under the subject; of Protobuf as a descriptor."""
        if (kind, text) not in self.schemas:
            self.schemas.append((kind, text))
        schema_id = self.schemas.index((kind, text)) + 1
        versions = self.subjects.setdefault(subject, [])
        if schema_id not in versions:
            versions.append(schema_id)
        self.references[schema_id] = list(references)
        return schema_id

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return status and content of the answer to a request."""
        self.requests.append(f"{method} {path}")
        if self.faults:
            return self.faults.pop(0), {"error_code": 1, "message": "a fault"}
        kind, text = body.get("schemaType", "AVRO"), body.get("schema", "")
        path, _, query = path.partition("?")
        self._is_serialized = query == "format=serialized"
        match [unquote(part) for part in path.split("/")[1:]]:
            case ["schemas", "ids", number] if 0 < int(number) <= len(self.schemas):
                return 200, self._shown(int(number))
            case ["subjects", subject, "versions", "1"] if self.subjects.get(subject):
                return 200, self._shown(self.subjects[subject][0])
            case ["subjects", subject, "versions", "latest"] if self.subjects.get(subject):
                return 200, self._shown(self.subjects[subject][-1])
            case ["subjects", subject, "versions"] if method == "POST":
                return 200, {"id": self.add(subject, text, kind)}
            case ["subjects", subject] if method == "POST":
                for schema_id in self.subjects.get(subject, []):
                    known_kind, known = self.schemas[schema_id - 1]
                    if known_kind == kind and _is_same(known, text):
                        return 200, self._shown(schema_id)
        return NOT_FOUND

    def _shown(self, schema_id: int) -> dict[str, Any]:
        kind, text = self.schemas[schema_id - 1]
        named = {} if kind == "AVRO" else {"schemaType": kind}
        if kind == "PROTOBUF" and not self._is_serialized:
            text = 'syntax = "proto3";'  # what a reader would have to parse
        known = self.references.get(schema_id)
        return {
            **named,
            "id": schema_id,
            "schema": text,
            **({"references": known} if known else {}),
        }

    @contextmanager
    def serving(self) -> Iterator[Self]:
        """Answer at `url`."""
        known = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer("GET", {})

            def do_POST(self) -> None:
                assert self.headers["Content-Type"] == "application/vnd.schemaregistry.v1+json"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self._answer("POST", json.loads(body))

            def _answer(self, method: str, body: dict[str, Any]) -> None:
                status, answer = known.answer(method, self.path, body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def _is_same(one: str, other: str) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:  # Protobuf is no JSON
        return one == other
