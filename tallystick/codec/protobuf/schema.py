"""Protobuf schemas as the registry gives them: files, and their types of messages.

A text is a file's name, a colon, and its FileDescriptorProto in base64, as the registry answers
with `format=serialized`; the last text, the schema itself, has no name. No `.proto` text is parsed.

Source: https://protobuf.dev/reference/protobuf/google.protobuf/ and
https://docs.confluent.io/platform/current/schema-registry/fundamentals/serdes-develop/
"""

import base64
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from tallystick.codec.protobuf.known_files import KNOWN_FILES
from tallystick.codec.wire_format import SchemaError, SchemaTexts
from tallystick.errors import OptionError
from tallystick.host.installed import pip_install

SCHEMAS_KEPT_MAX = 64
OWN_NAME = "schema.proto"
"""The schema itself has no name in a registry."""

Message = Any
"""`google.protobuf.descriptor.Descriptor`; the package has no types of its own."""


@lru_cache(maxsize=SCHEMAS_KEPT_MAX)
def messages_of(texts: SchemaTexts) -> tuple[Message, ...]:
    """Return the types of messages that the last text defines at its top, in their order.

    Raises:
        SchemaError: a text is no file descriptor, or refers to a missing file or type.
        OptionError: the package protobuf is not installed.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message
    except ImportError as error:
        raise OptionError(
            f"Protobuf values need the package protobuf, in the driver and every worker: "
            f"{pip_install('protobuf')}"
        ) from error
    files = dict[str, Any]()
    name = OWN_NAME
    for text in texts:
        name, _, data = text.rpartition(":")
        file = descriptor_pb2.FileDescriptorProto()
        try:
            file.ParseFromString(base64.b64decode(data, validate=True))
        except (ValueError, message.DecodeError) as error:  # base64's errors are ValueErrors
            raise SchemaError(
                f"it is no FileDescriptorProto in base64, but {data[:50]!r}: does the registry "
                f"know format=serialized?"
            ) from error
        file.name = name = name or OWN_NAME
        if files.setdefault(name, file) != file and name not in _known_files():
            raise SchemaError(f"its files do not fit together: {name!r} is there twice, differing")
    pool = descriptor_pool.DescriptorPool()
    try:
        _add_file(name, files, pool, {})
        file_type = pool.FindFileByName(name)
    except (TypeError, KeyError, RecursionError) as error:  # a reference is missing, or deep
        raise SchemaError(f"its files do not fit together: {error}") from error
    by_name = file_type.message_types_by_name
    return tuple(by_name[message.name] for message in files[name].message_type)


def _add_file(name: str, files: dict[str, Any], pool: Any, begun: dict[str, bool]) -> None:
    """Add a file to a pool, after its imports; take the registry's file rather than a known one.

    Args:
        name: of the file.
        files: the registry's files, by name.
        pool: gets the files.
        begun: the names of files that were begun, and whether each is done.
    """
    if name in begun:
        if not begun[name]:
            raise TypeError(f"{name!r} imports itself")
        return
    if name not in files and name not in _known_files():
        return  # the file that imports it says so
    begun[name] = False
    file = files.get(name)
    if file is None:
        file = _known_file(name)
    for imported in file.dependency:
        _add_file(imported, files, pool, begun)
    pool.AddSerializedFile(file.SerializeToString())
    begun[name] = True


@cache
def _known_files() -> dict[str, Any]:
    """Return the files that no registry has, by name: Protobuf's modules, and others in base64.

    A registry leaves them out of a schema's references (skip.known.types of Confluent's clients).
    """
    from google.protobuf import (
        any_pb2,
        api_pb2,
        descriptor_pb2,
        duration_pb2,
        empty_pb2,
        field_mask_pb2,
        source_context_pb2,
        struct_pb2,
        timestamp_pb2,
        type_pb2,
        wrappers_pb2,
    )
    from google.protobuf.compiler import plugin_pb2

    modules = (
        *(any_pb2, api_pb2, descriptor_pb2, duration_pb2, empty_pb2, field_mask_pb2, plugin_pb2),
        *(source_context_pb2, struct_pb2, timestamp_pb2, type_pb2, wrappers_pb2),
    )
    others: dict[str, Any] = dict(KNOWN_FILES)
    return others | {module.DESCRIPTOR.name: module.DESCRIPTOR for module in modules}


def _known_file(name: str) -> Any:
    from google.protobuf import descriptor_pb2

    known = _known_files()[name]
    data = base64.b64decode(known) if isinstance(known, str) else known.serialized_pb
    return descriptor_pb2.FileDescriptorProto.FromString(data)


def message_at(texts: SchemaTexts, path: Sequence[int]) -> Message | None:
    """Return the type that a record's message indexes name; None: the file has no such type.

    Args:
        texts: the schema.
        path: the index among the types of the file, then among the types inside that type, ….

    Raises:
        SchemaError: the entries of maps are types inside a type too; clients differ in whether
            they count them, and here it matters.
    """
    messages: Sequence[Message] = messages_of(texts)
    message = None
    for index in path:
        if not 0 <= index < len(messages):
            return None
        message = messages[index]
        if any(sibling.GetOptions().map_entry for sibling in messages[: index + 1]):
            raise SchemaError(
                f"message {message.full_name} stands behind a map inside its outer message, and "
                f"clients number such messages differently: declare it before the map, or at the "
                f"top of the file"
            )
        messages = message.nested_types
    return message


def path_of(texts: SchemaTexts, name: str | None) -> tuple[int, ...]:
    """Return the message indexes of a type; without a name, of the file's first type.

    Args:
        texts: the schema.
        name: the type's full name, or as it is named in its package, such as `Order.Line`.

    Raises:
        SchemaError: the schema has no such type.
    """
    messages = messages_of(texts)
    if name is None and messages:
        return (0,)
    names = dict[str, tuple[int, ...]]()
    _add_names(messages, (), names)
    package = messages[0].file.package if messages else ""
    for full in (name, f"{package}.{name}"):
        if full in names:
            message_at(texts, names[full])
            return names[full]
    raise SchemaError(f"it has no message {name!r}, only {sorted(names)}")


def _add_names(
    messages: Sequence[Message], way: tuple[int, ...], names: dict[str, tuple[int, ...]]
) -> None:
    for index, message in enumerate(messages):
        names[message.full_name] = (*way, index)
        _add_names(message.nested_types, (*way, index), names)


def indexes_as_bytes(path: Sequence[int]) -> bytes:
    """Return message indexes as bytes before a message: their number, then each, in zigzag.

    The first type of a file, by far the most usual, is a single zero.
    """
    if tuple(path) == (0,):
        return b"\0"
    encoded = bytearray()
    for number in (len(path), *path):
        remaining = number << 1
        while remaining >= 0x80:
            encoded.append(remaining & 0x7F | 0x80)
            remaining >>= 7
        encoded.append(remaining)
    return bytes(encoded)
