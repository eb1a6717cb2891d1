"""The doors to schemas, against a registry over real HTTP and real files."""

import base64
import json
import os
import pickle
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tallystick.codec.formats import Avro
from tallystick.errors import AuthorizationError, OptionError, RecordError, RegistryUnavailableError
from tallystick.kafka.registry import SchemaFile, SchemaRegistry, schema_source
from tallystick.testing.process import free_ports
from tallystick.testing.security import Stores, create_stores

PERSON = '{"type": "record", "name": "Person", "fields": [{"name": "home", "type": "Home"}]}'
HOME = '{"type": "record", "name": "Home", "fields": [{"name": "city", "type": "City"}]}'
CITY = '{"type": "enum", "name": "City", "symbols": ["ROME"]}'
NOT_FOUND = {"error_code": 40403, "message": "Schema not found"}


@dataclass
class Registry:
    """A schema registry's two endpoints for readers, with faults on demand."""

    answers: dict[str, Any]
    user_info: str | None = None
    faults: list[int] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def answer(self, path: str, authorization: str | None) -> tuple[int, Any]:
        self.requests.append(path)
        if self.faults:
            return self.faults.pop(0), {"error_code": 50001, "message": "a fault"}
        if self.user_info is not None:
            expected = "Basic " + base64.b64encode(self.user_info.encode()).decode()
            if authorization != expected:
                return 401, {"error_code": 401, "message": "Unauthorized"}
        if path not in self.answers:
            return 404, NOT_FOUND
        return 200, self.answers[path]


@pytest.fixture
def registry() -> Iterator[Registry]:
    known = Registry(
        {
            "/schemas/ids/1": {"schema": CITY},
            "/schemas/ids/2": {
                "schema": PERSON,
                "references": [
                    {"name": "City", "subject": "the/city", "version": 3},
                    {"name": "Home", "subject": "home", "version": 1},
                ],
            },
            "/schemas/ids/3": {"schema": "message M {}", "schemaType": "PROTOBUF"},
            "/schemas/ids/4": {
                "schema": PERSON,
                "references": [{"name": "Home", "subject": "gone", "version": 9}],
            },
            "/schemas/ids/5": {"unexpected": True},
            "/schemas/ids/6": ["unexpected"],
            "/subjects/home/versions/1": {
                "schema": HOME,
                "references": [{"name": "City", "subject": "the/city", "version": 3}],
            },
            "/subjects/the%2Fcity/versions/3": {"schema": CITY},
        }
    )

    with serving(known):
        yield known


@contextmanager
def serving(known: Registry, stores: Stores | None = None) -> Iterator[None]:
    """The registry over HTTP, or with stores over HTTPS."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, answer = known.answer(self.path, self.headers["Authorization"])
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    known.url = f"http://127.0.0.1:{server.server_port}"
    if stores is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(stores.keystore)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        known.url = known.url.replace("http:", "https:")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_schema_is_asked_for_once(registry):
    source = SchemaRegistry(registry.url)
    travelled = pickle.loads(pickle.dumps(source))  # noqa: S301  our own bytes

    assert [source.schema(1), source.schema(1), travelled.schema(1)] == [(CITY,)] * 3
    assert registry.requests == ["/schemas/ids/1"]


def test_a_fork_asks_by_a_connection_of_its_own():
    """On one connection two processes get each other's answers, and keep them for good."""
    ports: dict[str, int] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections stay

        def do_GET(self) -> None:
            ports[self.path.rpartition("/")[2]] = self.client_address[1]
            data = json.dumps({"schema": CITY}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    source = SchemaRegistry(f"http://127.0.0.1:{server.server_port}")
    source.schema(1)
    for number in (2, 3):
        child = os.fork()
        if not child:
            os._exit(source.schema(number) != (CITY,))
        assert os.waitpid(child, 0)[1] == 0
    source.schema(4)
    server.shutdown()
    server.server_close()

    assert ports["4"] == ports["1"]
    assert len({ports["2"], ports["3"], ports["4"]}) == 3


def test_nothing_is_asked_before_a_schema_is(registry):
    pickle.dumps(SchemaRegistry(registry.url + "/"))
    pickle.dumps(SchemaFile("/no/such/file"))

    assert registry.requests == []


def test_an_unknown_id_is_no_outage_and_may_become_known(registry):
    source = SchemaRegistry(registry.url)
    assert source.schema(77) is None

    registry.answers["/schemas/ids/77"] = {"schema": CITY}

    assert source.schema(77) == (CITY,)


def test_what_a_schema_refers_to_comes_before_it(registry):
    assert SchemaRegistry(registry.url).schema(2) == (CITY, HOME, PERSON)


def test_a_reference_to_nothing_is_named(registry):
    with pytest.raises(RecordError, match=r"version 9 of subject 'gone'.*not there"):
        SchemaRegistry(registry.url).schema(4)


def referring(subject: str) -> dict[str, Any]:
    return {"schema": PERSON, "references": [{"name": "a", "subject": subject, "version": 1}]}


def test_references_in_a_circle_are_refused_when_they_close(registry):
    registry.answers |= {
        "/schemas/ids/7": referring("a"),
        "/subjects/a/versions/1": referring("b"),
        "/subjects/b/versions/1": referring("a"),
    }
    with pytest.raises(RecordError, match="version 1 of subject 'a', which refers back to it"):
        SchemaRegistry(registry.url).schema(7)
    assert len(registry.requests) == 3


def test_references_too_deep_to_follow_are_refused(registry):
    registry.answers["/schemas/ids/7"] = referring("0")
    for number in range(1000):
        registry.answers[f"/subjects/{number}/versions/1"] = referring(str(number + 1))
    with pytest.raises(RecordError, match="more than 100 deep"):
        SchemaRegistry(registry.url).schema(7)


@pytest.mark.parametrize("references", [["a"], [{"name": "a"}], 7])
def test_references_of_another_form_are_an_error_that_names_the_registry(registry, references):
    registry.answers["/schemas/ids/7"] = {"schema": PERSON, "references": references}
    with pytest.raises(RegistryUnavailableError, match="is it a schema registry"):
        SchemaRegistry(registry.url).schema(7)


def test_schemas_of_other_formats_are_refused(registry):
    with pytest.raises(RecordError, match=r"schema 3 .*PROTOBUF"):
        SchemaRegistry(registry.url).schema(3)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_fault_that_passes_is_tried_again(registry, status):
    registry.faults = [status, status]

    assert SchemaRegistry(registry.url, backoff_s=0.001).schema(1) == (CITY,)
    assert len(registry.requests) == 3


def test_a_fault_that_stays_is_an_error_with_the_answer(registry):
    registry.faults = [500] * 9
    with pytest.raises(RegistryUnavailableError, match=r"/schemas/ids/1 answers 500: .*a fault"):
        SchemaRegistry(registry.url, retries=2, backoff_s=0.001).schema(1)

    assert len(registry.requests) == 3


@pytest.mark.parametrize("schema_id", [5, 6])
def test_an_answer_that_is_no_schema_is_an_error(registry, schema_id):
    with pytest.raises(RegistryUnavailableError, match="schema registry"):
        SchemaRegistry(registry.url).schema(schema_id)


def test_an_answer_without_end_is_an_error_and_fills_no_memory(registry, monkeypatch):
    monkeypatch.setattr("tallystick.kafka.registry.ANSWER_BYTES_MAX", 10_000)
    registry.answers["/schemas/ids/7"] = {"schema": CITY, "more": "x" * 10_000}
    registry.answers["/schemas/ids/8"] = {"schema": CITY, "more": "x" * 1_000}

    with pytest.raises(RegistryUnavailableError, match="more than 10000 bytes"):
        SchemaRegistry(registry.url).schema(7)
    assert SchemaRegistry(registry.url).schema(8)


@pytest.mark.parametrize(
    "answer", [{"status": 404}, {"error_code": 404, "message": "HTTP 404 Not Found"}, "gone"]
)
def test_a_404_about_the_path_is_not_one_about_the_id(registry, answer):
    """A wrong path, or a proxy: taken for an unknown id, every record would be malformed."""
    registry.answer = lambda *_: (404, answer)
    with pytest.raises(RegistryUnavailableError, match="404"):
        SchemaRegistry(registry.url).schema(1)


def test_a_registry_that_is_not_there_is_named_without_credentials():
    (port,) = free_ports(1, "127.0.0.1")
    source = SchemaRegistry(f"http://me:secret@127.0.0.1:{port}", retries=1, backoff_s=0.001)

    with pytest.raises(RegistryUnavailableError, match=f"127.0.0.1:{port}.*2 tries.*refused") as e:
        source.schema(1)

    assert "secret" not in f"{e.value!r} {e.value.__cause__!r}"


@pytest.mark.parametrize("way", ["user_info", "url"])
def test_the_registry_learns_who_asks(registry, way):
    registry.user_info = "me:p@ss:word"
    in_url = registry.url.replace("//", "//me:p%40ss:word@")
    source = {
        "user_info": SchemaRegistry(registry.url, user_info="me:p@ss:word"),
        "url": SchemaRegistry(in_url),
    }[way]

    assert source.schema(1) == (CITY,)
    assert "ss" not in repr(source).replace("class", "")


def test_refused_credentials_are_not_tried_again(registry):
    registry.user_info = "me:right"
    with pytest.raises(AuthorizationError, match=r"401.*user_info") as e:
        SchemaRegistry(registry.url, user_info="me:wrong").schema(1)

    assert len(registry.requests) == 1
    assert "wrong" not in str(e.value)


def test_a_registry_is_believed_when_the_authority_named_has_signed_it(tmp_path: Path):
    stores = create_stores(tmp_path, "127.0.0.1")
    known = Registry({"/schemas/ids/1": {"schema": CITY}})
    with serving(known, stores):
        signed = SchemaRegistry(known.url, ca=str(stores.truststore))
        strange = SchemaRegistry(known.url, retries=0)

        assert signed.schema(1) == (CITY,)
        with pytest.raises(RegistryUnavailableError, match=r"(?i)certificate"):
            strange.schema(1)


# ---- files ----


def test_a_file_has_schemas_by_id_as_objects_or_as_text(tmp_path: Path):
    path = tmp_path / "schemas.json"
    path.write_text(json.dumps({"1": json.loads(CITY), "2": CITY}))
    for name in (str(path), path.as_uri()):
        source = SchemaFile(name)

        assert [json.loads(text) for i in (1, 2) for text in source.schema(i) or ()] == [
            json.loads(CITY)
        ] * 2
        assert source.schema(3) is None


def test_a_folder_has_one_file_per_schema_and_may_gain_some(tmp_path: Path):
    (tmp_path / "1.avsc").write_text(CITY)
    (tmp_path / "README.md").write_text("not a schema")
    source = SchemaFile(str(tmp_path))
    assert (source.schema(1), source.schema(2)) == ((CITY,), None)

    (tmp_path / "2.avsc").write_text(CITY)

    assert source.schema(2) == (CITY,)


@pytest.mark.parametrize(
    ("text", "what"), [("{", "no JSON"), ("[]", "JSON list"), ('{"x": {}}', "the id 'x'")]
)
def test_a_file_of_another_form_is_an_error_with_its_name(tmp_path: Path, text: str, what: str):
    (tmp_path / "schemas.json").write_text(text)
    with pytest.raises(OptionError, match=rf"schemas\.json.*{what}"):
        SchemaFile(str(tmp_path / "schemas.json")).schema(1)


def test_a_file_that_is_not_there_is_an_error_with_its_name(tmp_path: Path):
    with pytest.raises(RegistryUnavailableError, match=r"gone\.json"):
        SchemaFile(str(tmp_path / "gone.json")).schema(1)


# ---- what a user asks for ----


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"schema": " ", "schemas": "f"}, "schema=.*empty"),
        ({"schema": "a int"}, "one place"),
        ({"schema": "a int", "registry": "http://h", "schemas": "f"}, "one place"),
        ({"schema": "a int", "schemas": ""}, "empty"),
        ({"schema": "a int", "schemas": "f", "mode": "lenient"}, "lenient.*failfast"),
        ({"schema": "a int", "schemas": "f", "ca": "c"}, "for a registry"),
        ({"schema": "a int", "schemas": "f", "name_column": " "}, "name_column=''\\) is empty"),
        ({"schema": "a int", "registry": "h:8081"}, "http"),
        ({"schema": "a int", "registry": "http://h:port"}, "http"),
        ({"schema": "a int", "registry": "http://a,b"}, "one http"),
        ({"schema": "a int", "registry": "http://h", "user_info": "me"}, "colon"),
        ({"schema": "a int", "registry": "http://u:p@h", "user_info": "me:x"}, "twice"),
    ],
)
def test_what_cannot_work_is_refused_at_once(options, what):
    with pytest.raises(OptionError, match=what):
        Avro(**options)


def test_credentials_are_never_shown():
    plain = Avro("a int", registry="http://me:s3cret@h:1", ca="c")
    authorised = Avro("a int", registry="http://h:1", user_info="me:s3cret")
    for avro in (plain, authorised):
        assert "s3cret" not in f"{avro!r} {schema_source(avro)!r}"
    with pytest.raises(OptionError) as refused:
        Avro("a int", registry="http://me:s3cret@h:port")
    assert "s3cret" not in str(refused.value)


def test_the_source_of_schemas_follows_from_the_options():
    assert schema_source(Avro("a int", schemas="f")) == SchemaFile("f")
    assert schema_source(Avro("a int", registry="https://h", user_info="a:b", ca="c")) == (
        SchemaRegistry("https://h", user_info="a:b", ca="c")
    )
