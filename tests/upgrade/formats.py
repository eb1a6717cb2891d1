"""The formats of what a checkpoint, a savepoint and Kafka hold, read from the bytes themselves.

Nothing here shares code with the library: a version is what stands in the file, and the shape of a
file is the list of the keys that its JSON has, at any depth.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Formats = dict[str, dict[str, Any]]
"""By kind of file: its versions, and the keys of its JSON."""

SEALED = {
    "manifest": "*/tallystick/[0-9]*.json",
    "decider": "*/tallystick/decider.json",
    "decision": "*/tallystick/decisions/*.json",
    "savepoint": "*/savepoint.json",
}
PLACES = {"checkpoint": ("shop", "paid"), "savepoint": ("savepoint",), "files": ("*-files",)}
IDS_IN_NAMES = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b[0-9]+\b|s?[0-9a-f]{12,}"
    r"|(?<=keyed-state/)[^/]+|(?<=_tallystick/)[^/]+/[^/]+"
)
"""Ids, numbers, nonces, and the names of pipelines, steps and sinks."""
MAGIC_SIZE = 8
BY_NAME = {"topics", "starts", "stops", "ids", "gone", "skipped"}
"""Objects of a source's offsets whose keys are names of topics."""


def formats_of(folder: Path, tokens: Iterable[str], *, but: Iterable[Path] = ()) -> Formats:
    """Return the formats of all files below a folder.

    Args:
        folder: has checkpoints and savepoints.
        tokens: as Kafka holds them.
        but: files that are not looked at.
    """
    formats: Formats = {}
    passed_over = set(but)
    for kind, pattern in SEALED.items():
        for path in sorted(set(folder.glob(pattern)) - passed_over):
            _add(formats, kind, json.loads(path.read_bytes().splitlines()[0]), "version")
    for path in sorted(set(folder.glob("*/metadata")) - passed_over):
        _add(formats, "metadata", json.loads(path.read_bytes()), "")
    for token in tokens:
        _add(formats, "token", json.loads(token), "tallystick")
    for path in sorted(set(folder.glob("*/keyed-state/*/*")) - passed_over):
        versions = formats.setdefault("state file", {"versions": [], "keys": []})["versions"]
        _include(versions, [path.read_bytes()[-MAGIC_SIZE:].decode()])
    names = formats.setdefault("path", {"versions": [], "keys": []})["keys"]
    for place, patterns in PLACES.items():
        for root in (root for pattern in patterns for root in folder.glob(pattern)):
            paths = {path for path in root.rglob("*") if path.is_file()} - passed_over
            below = (path.relative_to(root).as_posix() for path in paths)
            _include(names, {IDS_IN_NAMES.sub("#", f"{place}/{name}") for name in below})
    return formats


def _add(formats: Formats, kind: str, fields: dict[str, Any], version: str) -> None:
    entry = formats.setdefault(kind, {"versions": [], "keys": []})
    if version:
        _include(entry["versions"], [fields[version]])
    _include(entry["keys"], _keys(fields, ""))
    manifest = fields.get("manifest") if kind == "savepoint" else fields
    if kind in ("manifest", "savepoint"):
        assert isinstance(manifest, dict), kind
        for text in manifest["sources"]:
            _add(formats, "offsets", json.loads(text), "tallystick")
        for step in manifest["state"]:
            hashes = formats.setdefault("key groups", {"versions": [], "keys": []})["versions"]
            _include(hashes, [step["hash_version"]])
            for field in step["fields"]:
                kinds = formats.setdefault("kind of state", {"versions": [], "keys": []})["keys"]
                _include(kinds, [field["kind"]])


def _include(values: list[Any], more: Iterable[Any]) -> None:
    values[:] = sorted({*values, *more})


def _keys(value: Any, path: str) -> Iterator[str]:
    """Yield the path of each key; a text that is JSON is read too."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        value = json.loads(value)
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{path}{key}"
            if key not in BY_NAME and key != "sources":
                yield from _keys(inner, f"{path}{key}.")
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner, path)
