"""Writers of values and keys: a format as the user asked for it, its schema found in the registry.

The driver asks the registry, before the first epoch; what it found travels to the tasks, which
never do. It stays for as long as the process lives: a schema that is registered meanwhile changes
nothing under a run.
"""

from functools import lru_cache

from tallystick.codec.avro.schema import parse_schema
from tallystick.codec.avro.writer import AvroWriter
from tallystick.codec.formats import Avro, Json
from tallystick.codec.value_writer import JsonWriter, ValueWriter
from tallystick.errors import OptionError, RecordError
from tallystick.kafka.schema_registry import RegisteredSchema, SchemaRegistry

WRITERS_KEPT_MAX = 64
NO_ID = 0
"""The id of a schema that is not registered yet; no registry gives it."""


@lru_cache(maxsize=WRITERS_KEPT_MAX)
def value_writer(form: Json | Avro, default_subject: str, *, registers: bool) -> ValueWriter:
    """Return what writes in this format.

    Args:
        form: as the user asked for it.
        default_subject: where the registry has the schema, unless the format names a subject.
        registers: False: only to check columns, so nothing is registered, and the id may be none.

    Raises:
        OptionError: the registry does not have the schema, or it is none.
        AuthorizationError: the registry refuses the credentials, or to register.
        RegistryUnavailableError: it does not answer.
    """
    if isinstance(form, Json):
        return JsonWriter()
    assert form.registry is not None, form
    registry = SchemaRegistry(form.registry, user_info=form.user_info, ca=form.ca)
    found = _found(registry, form, form.subject or default_subject, registers)
    return AvroWriter(found.schema_id, found.texts)


def _found(registry: SchemaRegistry, form: Avro, subject: str, registers: bool) -> RegisteredSchema:
    try:
        if form.schema is not None:
            parse_schema((form.schema,))
        if form.schema is None:
            found = registry.latest(subject, "AVRO")
        elif form.register and not registers:
            found = RegisteredSchema(NO_ID, (form.schema,))
        elif form.register:
            found = registry.register(subject, form.schema, "AVRO")
        else:
            found = registry.find(subject, form.schema, "AVRO")
    except RecordError as error:  # here it is no record that is wrong
        raise OptionError(f"subject {subject!r}: {error}") from error
    if found is None:
        what = "that schema" if form.schema is not None else "a schema"
        raise OptionError(
            f"the registry {registry.shown_url} does not have {what} under subject {subject!r}: "
            f"register it there, name another subject=, or set register=True, with the schema= to "
            f"register"
        )
    return found
