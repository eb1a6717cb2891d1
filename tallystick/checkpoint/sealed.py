"""The form of every small file of a checkpoint that counts by itself.

One line of JSON with its format's version, then the CRC-32 of that line in eight hex digits. A
reader rejects what it cannot prove whole.
"""

import json
import zlib
from collections.abc import Collection, Mapping
from typing import Any

from tallystick.errors import ManifestError


def seal(version: int, held: Mapping[str, Any]) -> bytes:
    """The content of the file; `held` is of JSON's own types."""
    line = json.dumps({"version": version, **held}, sort_keys=True).encode()
    return line + b"\n%08x\n" % zlib.crc32(line)


def unseal(data: bytes, what: str, readable: Collection[int], way_on: str) -> dict[str, Any]:
    """Read back what `seal` was given.

    Args:
        data: of the file.
        what: it is, and its path: for the messages.
        readable: the versions that this release reads.
        way_on: what to do if it is damaged, as sentences.

    Raises:
        ManifestError: the bytes are torn, edited, or of a newer release.
    """
    line, _, checksum = data.rstrip(b"\n").rpartition(b"\n")
    if not line or checksum != b"%08x" % zlib.crc32(line):
        raise ManifestError(
            f"{what}: {len(data)} bytes that fail their checksum, so the file is torn or was "
            f"edited. {way_on}"
        )
    held: dict[str, Any] = json.loads(line)
    version = held.pop("version", None)
    if version not in readable:
        up_to = "up to version" if len(readable) > 1 else "version"
        raise ManifestError(
            f"{what}: format version {version}, this release reads {up_to} {max(readable)}. Run "
            f"the release that wrote it, or a newer one."
        )
    return held
