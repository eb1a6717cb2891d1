"""Formats of a record's value, as a user declares them; readers and writers carry them out."""

from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias
from urllib.parse import urlsplit

from tallystick.arguments import as_path, checked, not_one_of
from tallystick.codec import ddl
from tallystick.errors import OptionError

FAILFAST = "failfast"
PERMISSIVE = "permissive"
DROPMALFORMED = "dropmalformed"
DEADLETTER = "deadletter"
MODES = (FAILFAST, PERMISSIVE, DROPMALFORMED, DEADLETTER)

Ddl: TypeAlias = Annotated[str, ddl.text_of]
"""Columns as DDL; a schema of Arrow's or Spark's becomes such a text."""
PathText: TypeAlias = Annotated[str, as_path]


@checked
@dataclass(frozen=True, slots=True)
class Json:
    """One JSON object per record, as typed columns.

    Args:
        schema: the fields to read, as Spark DDL text such as `"dest string, dep_delay double"`;
            fields that a record has beyond them are ignored, missing ones are null; a schema of
            Arrow's or Spark's is taken as such a text. A sink needs none: it writes all columns.
        mode: the treatment of malformed records. `"failfast"` stops the query and names the
            record; `"permissive"` makes it a row of nulls with its raw bytes in the column
            `_corrupt_record`; `"dropmalformed"` leaves it out and counts it; `"deadletter"` writes
            it to the sink's `dead_letter_topic`, in the same transaction (in a Pipeline only). A
            record without a value (a tombstone) is a row of nulls in every mode.

    Raises:
        OptionError: the mode is unknown, or the schema is empty text.
    """

    schema: Ddl | None = None
    mode: str = FAILFAST

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise not_one_of("mode", self.mode, MODES, of="Json")
        if self.schema is not None and not self.schema.strip():
            raise OptionError(
                "Json(schema=...) is empty: name the fields to read as Spark DDL, "
                "e.g. 'dest string, dep_delay double'"
            )
        ddl.check_fields("Json(schema)", self.schema)

    def check_for_reading(self) -> None:
        """Raise `OptionError` unless the format names fields to read."""
        if self.schema is None:
            raise OptionError(
                'value=Json(): reading needs a schema, e.g. Json("dest string, n bigint")'
            )


@checked
@dataclass(frozen=True, slots=True)
class Text:
    """UTF-8 text, as column `value`.

    Args:
        mode: the treatment of values that are not UTF-8; see `Json`.

    Raises:
        OptionError: the mode is unknown.
    """

    mode: str = FAILFAST

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise not_one_of("mode", self.mode, MODES, of="Text")

    def check_for_reading(self) -> None:
        """Accept every setting: text is one column, without a schema."""


@checked
@dataclass(frozen=True, slots=True)
class Avro:
    """One Avro record per value, in Confluent's wire format, as typed columns.

    Args:
        schema: in a source the fields to read, as Spark DDL text such as `"dest string, delay
            double"`; fields that the writer's schema has beyond them are skipped, ones that it
            lacks are null. Of a union of records each column is a field of any of them; a struct
            with the name of a record, such as `"Order struct<id: bigint>"`, holds that one's. In a
            sink the schema to write, as Avro's JSON text, which the subject must have; None: the
            subject's newest.
        registry: the URL of the schema registry that knows the writers' schemas; may name user and
            password as `https://user:password@host`.
        schemas: instead of a registry: a JSON file `{"1": <schema>, ...}` of schemas by id, or a
            folder of files `1.avsc`, ...; every worker must be able to read it.
        mode: the treatment of malformed records, as in `Json`.
        user_info: `user:password` for the registry; never shown.
        ca: a file of PEM certificates that sign the registry's; None: the system's trusted ones.
        subject: in a sink: where the registry has the schema; None: `<topic>-value`, or for a key
            `<topic>-key`.
        register: in a sink: whether to register the schema under the subject if it is not there.
        name_column: in a source: a column more, after the fields, for the full name of the record's
            type, such as `"shop.OrderPaid"`, where a topic has records of several types; None:
            no such column.

    Raises:
        OptionError: not one of registry and schemas, an unknown mode, no URL, or empty text.
    """

    schema: Ddl | None = None
    registry: str | None = field(default=None, repr=False)
    schemas: PathText | None = None
    mode: str = FAILFAST
    user_info: str | None = field(default=None, repr=False)
    ca: PathText | None = None
    subject: str | None = None
    register: bool = False
    name_column: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise not_one_of("mode", self.mode, MODES, of="Avro")
        if self.schema is not None and not self.schema.strip():
            raise OptionError(
                "Avro(schema=...) is empty: name the fields to read as Spark DDL, "
                "e.g. 'dest string, delay double'"
            )
        ddl.check_fields("Avro(schema)", self.schema)
        if self.subject is not None and not self.subject.strip():
            raise OptionError("Avro(subject='') is empty: name one, or leave it out")
        if self.name_column is not None and not self.name_column.strip():
            raise OptionError("Avro(name_column='') is empty: name a column, or leave it out")
        if self.register and self.schema is None:
            raise OptionError("Avro(register=True) needs the schema= to register")
        if (self.registry is None) == (self.schemas is None):
            raise OptionError(
                "Avro() needs the writers' schemas from one place: set either registry, e.g. "
                "'http://localhost:8081', or schemas, a file of schemas by id"
            )
        if self.schemas is not None and not self.schemas.strip():
            raise OptionError("Avro(schemas='') is empty: name a file or folder of schemas")
        if self.registry is None and (self.user_info is not None or self.ca is not None):
            raise OptionError("Avro(user_info=..., ca=...) are for a registry: none is set")
        if self.registry is not None:
            check_registry(self.registry, self.user_info)

    def check_for_reading(self) -> None:
        """Raise `OptionError` unless the format names fields to read, and no option for writing."""
        if self.schema is None:
            raise OptionError(
                "Avro(): reading needs a schema, e.g. Avro('dest string, delay double', ...)"
            )
        if self.subject is not None or self.register:
            raise OptionError(
                "Avro(subject=..., register=...) are for a sink: a record that is read names its "
                "schema by id. Leave them out"
            )

    def check_for_writing(self) -> None:
        """Raise `OptionError` without a registry, or with a schema that is no JSON text."""
        if self.name_column is not None:
            raise OptionError("Avro(name_column=...) is for a source: leave it out of a sink")
        if self.registry is None:
            raise OptionError(
                "Avro(schemas=...) is for reading: writing needs a registry=, which gives the "
                "schema its id"
            )
        if self.schema is not None and not self.schema.lstrip().startswith(("{", "[")):
            raise OptionError(
                f"Avro(schema={self.schema[:50]!r}): a sink takes the schema as Avro's JSON text, "
                f'\'{{"type": "record", ...}}\', or none, for the newest of the subject'
            )


@checked
@dataclass(frozen=True, slots=True)
class JsonSchema:
    """One JSON object per value, in Confluent's wire format, with a schema in a registry.

    Args:
        schema: in a source the fields to read, as Spark DDL text; None: the fields of the
            subject's newest schema in the registry. In a sink the schema to write, as JSON Schema,
            which the subject must have; None: the subject's newest.
        registry: the URL of the schema registry; may name user and password as
            `https://user:password@host`. A source with fields to read needs none: JSON names them.
        subject: where the registry has the schema; None: in a sink `<topic>-value`, or for a key
            `<topic>-key`.
        register: in a sink: whether to register the schema under the subject if it is not there.
        mode: the treatment of malformed records, as in `Json`.
        user_info: `user:password` for the registry; never shown.
        ca: a file of PEM certificates that sign the registry's; None: the system's trusted ones.

    Raises:
        OptionError: an unknown mode, no URL, or empty text.
    """

    schema: Ddl | None = None
    registry: str | None = field(default=None, repr=False)
    subject: str | None = None
    register: bool = False
    mode: str = FAILFAST
    user_info: str | None = field(default=None, repr=False)
    ca: PathText | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise not_one_of("mode", self.mode, MODES, of="JsonSchema")
        for name, text in (("schema", self.schema), ("subject", self.subject)):
            if text is not None and not text.strip():
                raise OptionError(f"JsonSchema({name}='') is empty: leave it out, or say which")
        ddl.check_fields("JsonSchema(schema)", self.schema)
        if self.register and self.schema is None:
            raise OptionError("JsonSchema(register=True) needs the schema= to register")
        if self.registry is None and (self.user_info is not None or self.ca is not None):
            raise OptionError("JsonSchema(user_info=..., ca=...) are for a registry: none is set")
        if self.registry is not None:
            check_registry(self.registry, self.user_info)

    def check_for_reading(self) -> None:
        """Raise `OptionError` unless the fields to read come from `schema`, or from a subject."""
        asks = self.registry is not None and self.subject is not None
        if self.register or asks == (self.schema is not None):
            raise OptionError(
                "JsonSchema() in a source needs either schema=, the fields to read as Spark DDL, "
                "or registry= and subject=, whose newest schema says them; and no register="
            )
        if self.schema is not None and (self.registry or self.subject):
            raise OptionError(
                "JsonSchema(schema=...) in a source needs no registry and no subject: JSON names "
                "its fields. Leave them out"
            )

    def check_for_writing(self) -> None:
        """Raise `OptionError` without a registry, or with a schema that is no JSON text."""
        if self.registry is None:
            raise OptionError("JsonSchema() in a sink needs a registry=, which gives it an id")
        if self.schema is not None and not self.schema.lstrip().startswith("{"):
            raise OptionError(
                f"JsonSchema(schema={self.schema[:50]!r}): a sink takes the schema as JSON Schema, "
                f'\'{{"type": "object", ...}}\', or none, for the newest of the subject'
            )


@checked
@dataclass(frozen=True, slots=True)
class Protobuf:
    """One Protobuf message per value, in Confluent's wire format, as typed columns.

    Needs the package protobuf: `pip install 'tallystick[protobuf]'`, on every worker.

    Args:
        schema: in a source the fields to read, as Spark DDL text such as `"dest string, delay
            double"`; fields that the writer's message has beyond them are skipped, ones that it
            lacks are null. In a sink none: the subject's newest schema is written.
        registry: the URL of the schema registry; may name user and password as
            `https://user:password@host`. It must answer `format=serialized`, as Confluent's does.
        message: in a sink: the type of the rows, such as `"Order"`; None: the first of the schema.
        subject: in a sink: where the registry has the schema; None: `<topic>-value`, or for a key
            `<topic>-key`.
        mode: the treatment of malformed records, as in `Json`.
        user_info: `user:password` for the registry; never shown.
        ca: a file of PEM certificates that sign the registry's; None: the system's trusted ones.

    Raises:
        OptionError: no registry, an unknown mode, no URL, or empty text.
    """

    schema: Ddl | None = None
    registry: str | None = field(default=None, repr=False)
    message: str | None = None
    subject: str | None = None
    mode: str = FAILFAST
    user_info: str | None = field(default=None, repr=False)
    ca: PathText | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise not_one_of("mode", self.mode, MODES, of="Protobuf")
        for name in ("schema", "message", "subject"):
            text = getattr(self, name)
            if text is not None and not text.strip():
                raise OptionError(f"Protobuf({name}='') is empty: leave it out, or say which")
        ddl.check_fields("Protobuf(schema)", self.schema)
        if self.registry is None:
            raise OptionError(
                "Protobuf() needs the registry= that has the schemas, e.g. 'http://localhost:8081'"
            )
        check_registry(self.registry, self.user_info)

    def check_for_reading(self) -> None:
        """Raise `OptionError` unless the format names fields to read, and no option for writing."""
        if self.schema is None:
            raise OptionError(
                "Protobuf(): reading needs a schema, e.g. Protobuf('dest string, delay double', …)"
            )
        if self.subject is not None or self.message is not None:
            raise OptionError(
                "Protobuf(subject=..., message=...) are for a sink: a record that is read names "
                "its schema and message itself. Leave them out"
            )

    def check_for_writing(self) -> None:
        """Raise `OptionError` if fields to read are declared."""
        if self.schema is not None:
            raise OptionError(
                "Protobuf(schema=...) is for a source: a sink writes the newest schema that the "
                "registry has under the subject. Leave it out"
            )


Format = Json | Avro | JsonSchema | Protobuf
"""A format with columns of its own."""
ReadFormat: TypeAlias = Annotated[Format | Text, lambda given: _meant_by(given, is_read=True)]
"""The format of values that are read; columns alone are those of Json."""
ReadKeyFormat: TypeAlias = Annotated[Format, lambda given: _meant_by(given, is_read=True)]
WrittenFormat: TypeAlias = Annotated[Format, lambda given: _meant_by(given, is_read=False)]
REGISTERED = (Avro, JsonSchema, Protobuf)
"""Formats whose schemas are in a registry."""


def columns_read(form: Format) -> str | None:
    """Return the columns that a source reads in a format, as DDL; None: a registry has them."""
    if isinstance(form, Avro) and form.schema is not None and form.name_column is not None:
        return f"{form.schema.strip().rstrip(',')}, {ddl.quoted(form.name_column)} string"
    return form.schema


def _meant_by(given: Any, *, is_read: bool) -> Any:
    """Return the format that is meant by the name of one, or by columns."""
    word = given.strip().lower() if isinstance(given, str) else None
    if word == "json" and not is_read:
        return Json()
    if word in ("text", "string") and is_read:
        return Text()
    if is_read and (word is None or " " in word):
        text = ddl.text_of(given)
        return Json(text) if isinstance(text, str) else given
    return given


def check_registry(url: str, user_info: str | None) -> None:
    """Check a registry's URL and credentials, without asking the registry.

    Raises:
        OptionError: one of them is malformed; the message holds no secret.
    """
    try:
        parts = urlsplit(url)
        has_host = parts.scheme in ("http", "https") and bool(parts.hostname)
        has_host = has_host and (parts.port is None or parts.port > 0) and "," not in parts.netloc
        has_host = has_host and not parts.query and not parts.fragment
    except ValueError:  # a port that is no number
        has_host = False
    if not has_host:  # not shown: it may hold a password
        raise OptionError(
            "the registry's URL cannot be used: expected one http(s)://host:port[/path], "
            "such as 'http://localhost:8081'"
        )
    if user_info is not None and ":" not in user_info:
        raise OptionError("the registry's user_info must be user:password; it has no colon")
    if user_info is not None and parts.username is not None:
        raise OptionError(
            "the registry's user is given twice, in the URL and as user_info: keep one"
        )
