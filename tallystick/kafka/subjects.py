"""Schemas that a registry has under a subject: writers of values and keys, and columns to read.

The driver asks the registry, before the first epoch; the schemas travel to the tasks, which never
ask. They stay for as long as the process lives: a schema that is registered meanwhile changes
nothing under a run.
"""

from functools import lru_cache

import pyarrow as pa

from tallystick.codec.avro.schema import parse_schema
from tallystick.codec.avro.writer import AvroWriter
from tallystick.codec.formats import Avro, Format, Json, JsonSchema, Protobuf
from tallystick.codec.json.schema import JsonSchemaWriter, columns_of, parse_shape
from tallystick.codec.json.write import JsonWriter
from tallystick.codec.protobuf.writer import ProtobufWriter
from tallystick.codec.values import ValueWriter
from tallystick.errors import OptionError, RecordError
from tallystick.kafka.schema_registry import RegisteredSchema, registry_of

FOUND_KEPT_MAX = 64
NO_ID = 0
"""The id of a schema that is not registered yet; no registry gives it."""


@lru_cache(maxsize=FOUND_KEPT_MAX)
def value_writer(form: Format, default_subject: str, *, registers: bool) -> ValueWriter:
    """Return the writer of values in a format.

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
    if isinstance(form, Avro):
        return AvroWriter(registered.schema_id, registered.texts)
    if isinstance(form, Protobuf):
        return ProtobufWriter(registered.schema_id, registered.texts, form.message)
    return JsonSchemaWriter(registered.schema_id, registered.texts[-1])


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
