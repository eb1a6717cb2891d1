"""Access to schemas: a schema registry over HTTP, or a file of schemas.

Both are plain values that connect to nothing before the first look-up, so they travel in tasks.
Schemas are kept per process, for good: the schema of an id never changes.

The schema of a subject is asked for by the driver, before the first epoch, and travels to the tasks
in the writer of values and keys: a schema that is registered meanwhile changes nothing under a run.

The HTTP client is urllib3: no dependencies of its own, and its Retry knows what may be tried again.

Source: https://docs.confluent.io/platform/current/schema-registry/develop/api.html
"""

import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, assert_never
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import pyarrow as pa
import pyarrow.fs
import urllib3

from tallystick.codec.avro.schema import parse_schema
from tallystick.codec.avro.writer import AvroWriter
from tallystick.codec.formats import Avro, Format, Json, JsonSchema, Protobuf, check_registry
from tallystick.codec.json.schema import JsonSchemaWriter, columns_of, parse_shape
from tallystick.codec.json.write import JsonWriter
from tallystick.codec.protobuf.writer import ProtobufWriter
from tallystick.codec.values import ValueWriter
from tallystick.codec.wire_format import SchemaTexts, json_value
from tallystick.errors import (
    UNREADABLE,
    AuthorizationError,
    OptionError,
    RecordError,
    RegistryUnavailableError,
)
from tallystick.host.worker_cache import WorkerCache

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 10.0
RETRY_COUNT_MAX = 5
BACKOFF_S = 0.1
"""Before the second try twice this, doubled with each further one: about 6 s in all."""
RETRIED_STATUSES = (429, 500, 502, 503, 504)
NOT_FOUND_CODES = (40401, 40402, 40403)
"""Error codes of a missing subject, version or schema; a plain 404 is about the path."""
REFUSED_STATUSES = (409, 422)
"""The registry does not take a schema: it is incompatible, or none."""
REFERENCES_MAX = 1000
DEPTH_MAX = 100
"""The maximum depth of references from schema to schema."""
SHOWN_CHARACTERS_MAX = 200
ANSWER_BYTES_MAX = 32 << 20
"""The longest answer that is read; a registry's own topic usually takes records of 1 MB."""

_CONTENT_TYPE = "application/vnd.schemaregistry.v1+json"
_ACCEPT = "application/vnd.schemaregistry.v1+json, application/json"

AVRO, JSON, PROTOBUF = "AVRO", "JSON", "PROTOBUF"
"""The types of schemas."""
FOUND_KEPT_MAX = 64
NO_ID = 0
"""The id of a schema that is not registered yet; no registry gives it."""


def schema_source(form: Avro | Protobuf) -> "SchemaRegistry | SchemaFile":
    """Return where the schemas of a format are looked up."""
    if isinstance(form, Avro) and form.schemas is not None:
        return SchemaFile(form.schemas)
    return registry_of(form)


def registry_of(form: Avro | JsonSchema | Protobuf) -> "SchemaRegistry":
    """Return the registry that a format names."""
    assert form.registry is not None, form
    kind = AVRO if isinstance(form, Avro) else JSON if isinstance(form, JsonSchema) else PROTOBUF
    return SchemaRegistry(form.registry, kind, user_info=form.user_info, ca=form.ca)


class RegisteredSchema(NamedTuple):
    """A schema to write: the id, and the text after the texts of all referenced schemas."""

    schema_id: int
    texts: SchemaTexts


@dataclass(frozen=True)
class SchemaRegistry:
    """A schema registry that speaks the API of Confluent's Schema Registry.

    Args:
        url: `http(s)://[user:password@]host[:port][/path]`.
        kind: the type of the schemas that are asked for: AVRO, JSON or PROTOBUF.
        user_info: `user:password`; None: as in the URL, or without.
        ca: a file of PEM certificates that sign the registry's; None: those the system trusts.
        retries: how often a request is tried again after an error that may pass.
        backoff_s: before the second try twice this, doubled with each further one.

    Raises:
        OptionError: the URL is none, or user_info has no colon.
    """

    url: str = field(repr=False)
    kind: str = AVRO
    user_info: str | None = field(default=None, repr=False)
    ca: str | None = None
    retries: int = RETRY_COUNT_MAX
    backoff_s: float = BACKOFF_S

    def __post_init__(self) -> None:
        check_registry(self.url, self.user_info)

    def __repr__(self) -> str:
        """Return a text without credentials."""
        return f"SchemaRegistry({self.shown_url!r})"

    @property
    def shown_url(self) -> str:
        """The URL without credentials."""
        parts = urlsplit(self.url)
        netloc = parts.netloc.rpartition("@")[2]
        return urlunsplit((parts.scheme, netloc, parts.path.rstrip("/"), "", ""))

    def schema(self, schema_id: int) -> SchemaTexts | None:
        """Return the schema of an id, after all referenced schemas; None: the registry has none.

        Raises:
            RegistryUnavailableError: no usable answer, after all retries.
            AuthorizationError: the credentials were refused.
            RecordError: the schema is of another type.
        """
        known = _known.get(self, dict)
        if schema_id in known:
            return known[schema_id]
        answer = self._ask("GET", f"/schemas/ids/{schema_id}{self._form}")
        if answer is None:
            return None
        kind = answer.get("schemaType", AVRO)
        if kind != self.kind:
            raise RecordError(
                f"schema {schema_id} of the registry {self.shown_url} is of type {kind}, not "
                f"{self.kind}: the topic holds values of another format"
            )
        known[schema_id] = self._texts(answer, schema_id)
        return known[schema_id]

    def latest(self, subject: str) -> RegisteredSchema | None:
        """Return the newest schema of a subject; None: the subject has none.

        Raises:
            RecordError: it is of another type, or refers to what is not there.
            RegistryUnavailableError: no usable answer, after all retries.
            AuthorizationError: the credentials were refused.
        """
        path = f"/subjects/{quote(subject, safe='')}/versions/latest{self._form}"
        answer = self._ask("GET", path)
        if answer is None:
            return None
        kind = answer.get("schemaType", AVRO)
        if kind != self.kind:
            raise RecordError(f"its newest schema is of type {kind}, not {self.kind}")
        return RegisteredSchema(self._id(answer), self._texts(answer, path))

    def find(self, subject: str, text: str) -> RegisteredSchema | None:
        """Return a schema with its id, if a version of the subject is equal to it; else None.

        Raises:
            RecordError: the registry says that it is no schema.
            RegistryUnavailableError: no usable answer, after all retries.
            AuthorizationError: the credentials were refused.
        """
        path = f"/subjects/{quote(subject, safe='')}"
        answer = self._ask("POST", path, self._body(text))
        return None if answer is None else RegisteredSchema(self._id(answer), (text,))

    def register(self, subject: str, text: str) -> RegisteredSchema:
        """Add a schema to a subject, unless registered already, and return the schema with its id.

        Raises:
            RecordError: the registry says that the text is no schema, or not a compatible one.
            RegistryUnavailableError: no usable answer, after all retries.
            AuthorizationError: the credentials were refused.
        """
        path = f"/subjects/{quote(subject, safe='')}/versions"
        answer = self._ask("POST", path, self._body(text))
        if answer is None:
            raise RecordError(f"{self.shown_url} answers that there is no such path: {path}")
        return RegisteredSchema(self._id(answer), (text,))

    @property
    def _form(self) -> str:
        """The form of the answer: Protobuf as file descriptors, so that no text is parsed."""
        return "?format=serialized" if self.kind == PROTOBUF else ""

    def _body(self, text: str) -> bytes:
        named = {} if self.kind == AVRO else {"schemaType": self.kind}
        return json.dumps({**named, "schema": text}).encode()

    def _texts(self, answer: dict[str, Any], what: object) -> SchemaTexts:
        texts: dict[str, str] = {}
        self._add_references(answer, texts, ())
        return (*texts.values(), self._named("", self._text(answer, what)))

    def _named(self, name: str, text: str) -> str:
        """Return a schema's text; in Protobuf, after the name under which others refer to it."""
        return f"{name}:{text}" if self.kind == PROTOBUF else text

    def _id(self, answer: dict[str, Any]) -> int:
        schema_id = answer.get("id")
        if not isinstance(schema_id, int) or not 0 <= schema_id < 2**31:
            raise RegistryUnavailableError(
                f"the answer of {self.shown_url} names schema {schema_id!r}, which is no id: is it "
                f"a schema registry?"
            )
        return schema_id

    def _add_references(
        self, answer: dict[str, Any], texts: dict[str, str], way: tuple[str, ...]
    ) -> None:
        """Add the schemas that an answer refers to, each after the schemas it refers to itself.

        Args:
            answer: the registry's answer about the referring schema.
            texts: the texts found so far, by path.
            way: the paths that lead to the referring schema.
        """
        for name, subject, version in self._references(answer):
            path = f"/subjects/{quote(subject, safe='')}/versions/{version}{self._form}"
            if path in texts:
                continue
            if path in way or len(way) == DEPTH_MAX:
                raise RecordError(
                    f"a schema of the registry {self.shown_url} refers to version {version} of "
                    f"subject {subject!r}, which refers back to it, or more than {DEPTH_MAX} deep: "
                    f"correct the references in the registry"
                )
            if len(texts) == REFERENCES_MAX:
                raise RecordError(f"a schema refers to more than {REFERENCES_MAX} others")
            referenced = self._ask("GET", path)
            if referenced is None:
                raise RecordError(
                    f"a schema of the registry {self.shown_url} refers to version {version} of "
                    f"subject {subject!r}, which is not there: restore it in the registry"
                )
            self._add_references(referenced, texts, (*way, path))
            texts[path] = self._named(name, self._text(referenced, path))

    def _references(self, answer: dict[str, Any]) -> list[tuple[str, str, object]]:
        try:
            references = answer.get("references") or ()
            return [
                (
                    str(reference.get("name", "")),
                    str(reference["subject"]),
                    int(reference["version"]),
                )
                for reference in references
            ]
        except UNREADABLE:
            raise RegistryUnavailableError(
                f"the answer of {self.shown_url} has references {answer['references']!r:.200}, and "
                f"not each has a subject and a version: is it a schema registry?"
            ) from None

    def _text(self, answer: dict[str, Any], what: object) -> str:
        text = answer.get("schema")
        if not isinstance(text, str):
            raise RegistryUnavailableError(
                f"the answer of {self.shown_url} about {what} has no field 'schema': is it a "
                f"schema registry?"
            )
        return text

    def _ask(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any] | None:
        """Send a request to the registry, and return the answer; None: not found there."""
        url = self.shown_url + path
        headers = {"Content-Type": _CONTENT_TYPE} if body is not None else {}
        own = _connections.get(self, lambda: _connected(self))
        try:
            response = own.request(
                method, url, body=body, headers={**own.headers, **headers}, preload_content=False
            )
            with response:
                data = response.read(ANSWER_BYTES_MAX + 1)
        except urllib3.exceptions.HTTPError as error:
            raise RegistryUnavailableError(
                f"the schema registry {self.shown_url} cannot be reached, after "
                f"{self.retries + 1} tries: {_reason(error)}. Check the URL, and that this "
                f"machine may connect to it."
            ) from None  # the error's own text may name what the URL held
        if len(data) > ANSWER_BYTES_MAX:
            raise RegistryUnavailableError(
                f"{method} {url} answers with more than {ANSWER_BYTES_MAX} bytes: no schema is so "
                f"long. Check that the URL is that of a schema registry."
            )
        shown = data[:SHOWN_CHARACTERS_MAX].decode(errors="replace")
        if response.status in (401, 403):
            raise AuthorizationError(
                f"the schema registry {self.shown_url} answers {response.status} to {method} "
                f"{path}: {shown!r}. Check user_info, and that the user may {_right(path)} schemas."
            )
        try:
            answer = json_value(data)
        except (ValueError, RecursionError):
            answer = None
        if isinstance(answer, dict):
            if response.status == 200:
                return answer
            if answer.get("error_code") in NOT_FOUND_CODES:
                return None
        if response.status in REFUSED_STATUSES and body is not None:
            raise RecordError(f"the registry {self.shown_url} refuses the schema: {shown}")
        raise RegistryUnavailableError(
            f"{method} {url} answers {response.status}: {shown!r}. Expected a schema, or an "
            f"error_code from 40401 to 40403: check that the URL is that of a schema registry."
        )


def _right(path: str) -> str:
    return "register" if path.endswith("/versions") else "read"


def _reason(error: Exception) -> str:
    """Return the innermost reason that urllib3 gives."""
    inner = getattr(error, "reason", None)
    return _reason(inner) if isinstance(inner, Exception) else str(error)


_known: "WorkerCache[SchemaRegistry, dict[int, SchemaTexts]]" = WorkerCache()
"""The schemas that this process learnt from a registry, by id."""
_connections: "WorkerCache[SchemaRegistry, urllib3.PoolManager]" = WorkerCache(
    lambda pool: pool.clear()
)


def _connected(registry: SchemaRegistry) -> urllib3.PoolManager:
    parts = urlsplit(registry.url)
    user_info = registry.user_info
    if user_info is None and parts.username is not None:
        user_info = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    headers = urllib3.make_headers(basic_auth=user_info) if user_info is not None else {}
    return urllib3.PoolManager(
        headers={**headers, "Accept": _ACCEPT},
        ca_certs=registry.ca,
        timeout=urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S),
        retries=urllib3.Retry(
            total=registry.retries,
            backoff_factor=registry.backoff_s,
            status_forcelist=RETRIED_STATUSES,
            allowed_methods=("GET", "POST"),  # a schema that is registered twice is there once
            raise_on_status=False,
        ),
    )


@dataclass(frozen=True)
class SchemaFile:
    """Schemas by id: a JSON file `{"1": <schema>, ...}`, or a folder of files `1.avsc`, ....

    Args:
        path: a local path, or a URI that pyarrow knows, such as `s3://bucket/schemas.json`.
    """

    path: str

    def schema(self, schema_id: int) -> SchemaTexts | None:
        """Return the schema of an id; None: the file has none.

        Raises:
            RegistryUnavailableError: the file cannot be read.
            OptionError: it is not of the form above.
        """
        known = _known_in_file(self.path)
        if schema_id not in known:  # perhaps it was added meanwhile
            known.update(_read_schemas(self.path))
        return known.get(schema_id)


@lru_cache(maxsize=64)
def _known_in_file(path: str) -> dict[int, SchemaTexts]:
    """Return the schemas that the process has read from a file so far; callers add more."""
    return {}


def _read_schemas(path: str) -> dict[int, SchemaTexts]:
    try:
        if "://" in path:
            files, place = pyarrow.fs.FileSystem.from_uri(path)
        else:
            files, place = pyarrow.fs.LocalFileSystem(), path
        if files.get_file_info(place).type is pyarrow.fs.FileType.Directory:
            entries = files.get_file_info(pyarrow.fs.FileSelector(place))
            texts = {
                info.base_name.removesuffix(".avsc"): _read(files, info.path)
                for info in entries
                if info.base_name.endswith(".avsc")
            }
            return {_id(name, path): (text,) for name, text in texts.items()}
        text = _read(files, place)
    except (OSError, pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise RegistryUnavailableError(
            f"the schemas in {path} cannot be read: {error}. Every worker needs the file."
        ) from error
    try:
        schemas = json.loads(text)
    except ValueError as error:
        raise OptionError(f"the schemas in {path} are no JSON: {error}") from error
    if not isinstance(schemas, dict):
        raise OptionError(
            f"the schemas in {path} are a JSON {type(schemas).__name__}: expected an object of "
            f'schemas by id, as in {{"1": {{"type": "record", ...}}}}'
        )
    # A schema may be written as itself, or, as a registry has it, as text.
    return {
        _id(name, path): (schema if isinstance(schema, str) else json.dumps(schema),)
        for name, schema in schemas.items()
    }


def _read(files: pyarrow.fs.FileSystem, place: str) -> str:
    with files.open_input_stream(place) as stream:
        data: bytes = stream.readall()
    return data.decode()


def _id(name: str, path: str) -> int:
    if not name.isascii() or not name.isdigit():
        raise OptionError(f"the schemas in {path} have the id {name!r}: expected a number")
    return int(name)


@lru_cache(maxsize=FOUND_KEPT_MAX)
def value_writer(form: Format, default_subject: str, *, registers: bool) -> ValueWriter:
    """Return the writer of values in a format; `pipeline.topics._reader` chooses the reader.

    Args:
        form: the format, as the user asked for it.
        default_subject: where the registry has the schema, unless the format names a subject.
        registers: False: only to check columns, so nothing is registered, and the id may be none.

    Raises:
        OptionError: the registry does not have the schema, or it is none.
        AuthorizationError: the registry refuses the credentials, or to register.
        RegistryUnavailableError: it does not answer.
    """
    if isinstance(form, Json):
        return JsonWriter()
    registered = _registered(form, form.subject or default_subject, registers)
    match form:
        case Avro():
            return AvroWriter(registered.schema_id, registered.texts)
        case Protobuf():
            return ProtobufWriter(registered.schema_id, registered.texts, form.message)
        case JsonSchema():
            return JsonSchemaWriter(registered.schema_id, registered.texts[-1])
        case _:
            assert_never(form)


@lru_cache(maxsize=FOUND_KEPT_MAX)
def columns_to_read(form: JsonSchema) -> pa.Schema:
    """Return the columns that the newest schema of a subject describes.

    Raises:
        OptionError: there is none, or one of its properties cannot be a column.
        AuthorizationError: the registry refuses the credentials.
        RegistryUnavailableError: it does not answer.
    """
    assert form.subject is not None, "checked for reading"
    registered = _registered(form, form.subject, registers=False)
    try:
        return columns_of(parse_shape(registered.texts[-1]))
    except OptionError as error:
        raise OptionError(f"subject {form.subject!r}: {error}") from error


def _registered(
    form: Avro | JsonSchema | Protobuf, subject: str, registers: bool
) -> RegisteredSchema:
    registry = registry_of(form)
    try:
        if isinstance(form, Protobuf) or form.schema is None:
            registered = registry.latest(subject)
        else:
            _parse(form, form.schema)
            if form.register and not registers:
                registered = RegisteredSchema(NO_ID, (form.schema,))
            elif form.register:
                registered = registry.register(subject, form.schema)
            else:
                registered = registry.find(subject, form.schema)
    except RecordError as error:  # here it is no record that is wrong
        raise OptionError(f"subject {subject!r}: {error}") from error
    if registered is None:
        what = "that schema" if form.schema is not None else "a schema"
        or_that = (
            ""
            if isinstance(form, Protobuf)
            else (", or set register=True, with the schema= to register")
        )
        raise OptionError(
            f"the registry {registry.shown_url} does not have {what} under subject {subject!r}: "
            f"register it there, or name another subject={or_that}"
        )
    return registered


def _parse(form: Avro | JsonSchema, text: str) -> None:
    """Raise for a text that is no schema, before a registry has it."""
    if isinstance(form, Avro):
        parse_schema((text,))
    else:
        parse_shape(text)
