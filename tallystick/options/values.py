"""Options of what a record's value and key become: formats, schemas, registries."""

from tallystick.codec.formats import FAILFAST, MODES, Avro, Format, Json, JsonSchema, Protobuf
from tallystick.errors import OptionError
from tallystick.options.table import Option, ParsedOptions, one_of, text_of

VALUES = "What a record becomes"
"""The heading of the docs that these options stand under."""
WITH_SCHEMA = ("json", "avro", "json_schema", "protobuf")
_OF_REGISTRY = ("avro", "json_schema", "protobuf")
KEY_PREFIX = "key_"
_NOT_SET = "not set"


def _registry_options(part: str) -> tuple[Option, ...]:
    """Return the options of where the schemas of values or keys are."""
    also = ", and `json_schema` with `value.registry.subject`" if part == "value" else ""
    return (
        Option(f"{part}.registry.url", text_of("URL"), None, f"For `{part}.format=avro` or `protobuf`{also}: a schema registry with Confluent's interface; user and password may stand in the URL.", "http://registry:8081", VALUES, _NOT_SET),
        Option(f"{part}.registry.user.info", text_of("`user:password`"), None, "Credentials for the registry, if they do not stand in its URL.", "reader:secret", VALUES, _NOT_SET),
        Option(f"{part}.registry.ca", text_of("path"), None, "PEM certificates that the registry's is signed with.", "/etc/ssl/registry.pem", VALUES, "the system's"),
        Option(f"{part}.registry.file", text_of("path"), None, f"For `{part}.format=avro`: instead of a registry, a JSON file `{{\"1\": <schema>, …}}` of schemas by id, or a folder of files `1.avsc`, …. Every worker reads it.", "schemas.json", VALUES, _NOT_SET),
    )  # fmt: skip


VALUE_OPTIONS = (
    Option("value.format", one_of("raw", "string", *WITH_SCHEMA), "raw",
           "`raw`: the value stays binary; `string`: UTF-8 text; `json`, `avro`, `json_schema`, `protobuf`: the fields of `value.schema` become columns (the last three in Confluent's wire format).", "json", VALUES, field="value_format"),
    Option("value.schema", text_of("Spark DDL"), None, "The fields to read; `json`, `avro` and `protobuf` need it; with `json_schema` the newest schema of `value.registry.subject` may say them instead. What a record has beyond them is ignored, what it lacks is null.",
           "dest string, dep_delay double", VALUES, "none", "value_schema"),
    Option("value.mode", one_of(*MODES), FAILFAST,
           "What a malformed value or key does. `failfast`: stop, and name the record; `permissive`: a row of nulls with the bytes in `_corrupt_record`, those of a key in `_corrupt_key`; `dropmalformed`: leave it out, counted in the log; `deadletter`: write it to the sink's dead-letter topic in the same transaction (pipelines only).",
           "permissive", VALUES, field="value_mode"),
    *_registry_options("value"),
    Option("value.registry.subject", text_of("subject"), None, "For `value.format=json_schema`, instead of `value.schema`: the subject whose newest schema says the fields, looked up when the query starts.", "orders-value", VALUES, _NOT_SET),
    Option("key.format", one_of("raw", *WITH_SCHEMA), "raw",
           "`raw`: the key stays binary; else the fields of `key.schema` become columns in the place of `key`.", "json", VALUES),
    Option("key.schema", text_of("Spark DDL"), None, "The fields of the key; every format but `raw` needs it.", "user string, day date", VALUES, "none", "key_schema"),
    Option("key.prefix", text_of("text"), KEY_PREFIX, "Put before the names of the key's columns; the value often has fields of the same names.", "k_", VALUES, f"`{KEY_PREFIX}`", "key_prefix"),
    *_registry_options("key"),
)  # fmt: skip


def check_values(parsed: ParsedOptions) -> None:
    """Refuse options of values and keys that contradict each other.

    Raises:
        OptionError: the way out is named.
    """
    value_format = parsed["value.format"]
    _check_part(parsed, "value", "dest string")
    _check_part(parsed, "key", "user string")
    if value_format == parsed["key.format"] == "raw" and "value.mode" in parsed:
        raise OptionError("value.mode is for a value.format: raw takes any bytes; remove it")
    if value_format not in WITH_SCHEMA and parsed["metadata.prefix"]:
        raise OptionError(
            f"metadata.prefix is for values that become several columns, and "
            f"value.format={value_format} becomes one: remove it"
        )
    if parsed["key.format"] == "raw":
        if "key.prefix" in parsed:
            raise OptionError("key.prefix is for a key.format: raw is one column, key; remove it")
    elif "key" not in parsed["metadata.columns"]:
        raise OptionError(
            f"key.format={parsed['key.format']} reads the key, which metadata.columns leaves out: "
            f"name key there, or remove key.format"
        )


def _check_part(parsed: ParsedOptions, part: str, example: str) -> None:
    form = parsed[f"{part}.format"]
    has_schema = f"{part}.schema" in parsed or (
        "value.registry.subject" in parsed and part == "value"
    )
    if (form in WITH_SCHEMA) != has_schema:
        raise OptionError(
            f"{part}.format=json, avro or protobuf needs {part}.schema, and {part}.schema needs "
            f"{part}.format=json, avro or protobuf: "
            f'give both, e.g. .option("{part}.format", "json").option("{part}.schema", "{example}")'
        )
    registry = [name for name in parsed.given if name.startswith(f"{part}.registry.")]
    if registry and form not in _OF_REGISTRY:
        raise OptionError(
            f"{', '.join(registry)}: {part}.format={form} needs no registry: set it to avro, or "
            f"remove that"
        )


def format_of(parsed: ParsedOptions, part: str) -> Format | None:
    """Return the format that gives the value or the key columns of its own, or None.

    Args:
        parsed: checked by `check_values`.
        part: "value" or "key".
    """
    mode, schema = parsed["value.mode"], parsed[f"{part}.schema"]
    if parsed[f"{part}.format"] == "json":
        return Json(schema, mode)
    if parsed[f"{part}.format"] == "json_schema":
        form = JsonSchema(
            schema,
            parsed[f"{part}.registry.url"],
            parsed["value.registry.subject"] if part == "value" else None,
            mode=mode,
            user_info=parsed[f"{part}.registry.user.info"],
            ca=parsed[f"{part}.registry.ca"],
        )
        form.check_for_reading()
        return form
    if parsed[f"{part}.format"] == "protobuf":
        return Protobuf(
            schema,
            parsed[f"{part}.registry.url"],
            mode=mode,
            user_info=parsed[f"{part}.registry.user.info"],
            ca=parsed[f"{part}.registry.ca"],
        )
    if parsed[f"{part}.format"] != "avro":
        return None
    return Avro(
        schema,
        registry=parsed[f"{part}.registry.url"],
        schemas=parsed[f"{part}.registry.file"],
        mode=mode,
        user_info=parsed[f"{part}.registry.user.info"],
        ca=parsed[f"{part}.registry.ca"],
    )
