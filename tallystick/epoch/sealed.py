"""The form of every small file of a checkpoint that counts by itself.

One line of JSON with its format's version, then the CRC-32 of that line in eight hex digits. A
reader rejects what it cannot prove whole. That says nothing of who wrote it: the checksum is no
signature, so what is built of the text has to check itself too.
"""

import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tallystick.errors import ManifestError

Built = TypeVar("Built")
SHOWN_MAX = 300
"""So many characters of what is wrong are shown."""
_REFUSALS = (AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Raised by a value that must not exist where somebody tries to build it."""


def seal(version: int, held: Mapping[str, Any]) -> bytes:
    """The content of the file; `held` is of JSON's own types."""
    line = json.dumps({"version": version, **held}, sort_keys=True).encode()
    return line + b"\n%08x\n" % zlib.crc32(line)


def unseal(
    data: bytes,
    what: str,
    version: int,
    way_on: str,
    build: Callable[[dict[str, Any]], Built],
) -> Built:
    """Read back what `seal` was given.

    Args:
        data: of the file.
        what: it is, and its path: for the messages.
        version: the one that this release reads.
        way_on: what to do if it is damaged, as sentences.
        build: makes the value of what was held; whatever it refuses is the file's fault.

    Raises:
        ManifestError: the bytes are torn, edited, or of a newer release.
    """
    line, _, checksum = data.rstrip(b"\n").rpartition(b"\n")
    if not line or checksum != b"%08x" % zlib.crc32(line):
        raise ManifestError(
            f"{what}: {len(data)} bytes that fail their checksum, so the file is torn or was "
            f"edited. {way_on}"
        )
    try:
        held: dict[str, Any] = json.loads(line)
        found = held.pop("version", None)
        if found != version:
            raise ManifestError(
                f"{what}: format version {found}, this release reads version {version}. "
                f"Run the release that wrote it, or a newer one."
            )
        return build(held)
    except _REFUSALS as error:
        raise ManifestError(
            f"{what}: its checksum fits, but no release writes what it says: "
            f"{type(error).__name__}: {str(error)[:SHOWN_MAX]}. It was edited, or made by "
            f"somebody else. {way_on}"
        ) from error
