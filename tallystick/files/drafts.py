"""How drafts, markers and final files are named, and what a committable says of them."""

import hashlib
import json
import re
from typing import NamedTuple, Self
from urllib.parse import quote

from tallystick.errors import ManifestError
from tallystick.sink.two_phase import Committable, Owner, Place

HIDDEN = "_tallystick"
"""Spark, Hive and pyarrow leave out what begins with an underscore."""
DRAFT = ".draft"
"""Behind the final name: DuckDB's `**/*.parquet` does look into hidden folders."""
SEEN = "seen-by-the-driver"
"""A file that a run's driver writes, and tasks on a local disk look for."""
SINK_BYTES = 6
"""Of the hash that stands for a sink in names."""
_TEXT = r"\d{8,}-\d{5,}-[0-9a-f]+(?:-[0-9a-f]+)?"
_NAME = re.compile(_TEXT, re.ASCII)
_FINAL = re.compile(rf"(?:(.+)/)?part-({_TEXT})(?:\.(\d+))?\.parquet", re.ASCII)


class File(NamedTuple):
    """One file of a committable.

    Args:
        folder: of its partition, below the sink's path; "" without partitions.
        number: from 0 on: one task's files of one folder.
        size: in bytes.
    """

    folder: str
    number: int
    size: int


class Drafts(NamedTuple):
    """What one attempt of a task wrote.

    Args:
        location: of the sink, when they were written.
        hidden: the folder of its pipeline, sink and lineage, below the location.
        name: of epoch, task, nonce and sink.
        files: what a commit makes visible; None if that is not known (what a recovery finds).
    """

    location: str
    hidden: str
    name: str
    files: tuple[File, ...] | None = None

    @classmethod
    def of(cls, committable: Committable) -> Self:
        """Read what `details` made.

        Raises:
            ManifestError: it would lead to other files than drafts, markers and what they become.
        """
        try:
            held = json.loads(committable.details)
            files = None if held["files"] is None else tuple(File(*each) for each in held["files"])
            drafts = cls(held["location"], held["hidden"], committable.name, files)
            is_ours = _is_ours(drafts)
        except (KeyError, TypeError, ValueError):
            is_ours = False
        if not is_ours:
            raise ManifestError(
                f"file sink {committable.sink}: epoch {committable.checkpoint_id} names "
                f"{committable.name!r} with {committable.details[:200]!r}, which no release "
                f"writes: the manifest was edited, or made by somebody else. Nothing was changed."
            )
        return drafts

    @property
    def details(self) -> str:
        """What a committable carries."""
        return json.dumps(
            {"location": self.location, "hidden": self.hidden, "files": self.files},
            ensure_ascii=False,
            separators=(",", ":"),
        )

    @property
    def pending(self) -> str:
        """The folder of the drafts."""
        return f"{pending_folder(self.hidden)}/{self.name}"

    @property
    def marker(self) -> str:
        """The file that proves that the commit began, and so that all drafts were there."""
        return f"{marker_folder(self.hidden)}/{self.name}"

    def draft(self, file: File) -> str:
        """Where a file lies until it is committed."""
        return f"{self.pending}/{self.final(file)}{DRAFT}"

    def final(self, file: File) -> str:
        """Where a file lies when it is committed."""
        number = f".{file.number}" if file.number else ""
        name = f"part-{self.name}{number}.parquet"
        return f"{file.folder}/{name}" if file.folder else name


def hidden_folder(owner: Owner) -> str:
    """Where drafts and markers of one sink of one pipeline lie, below the sink's path."""
    parts = (owner.pipeline, owner.sink, owner.lineage)
    return "/".join((HIDDEN, *map(_part, parts)))


def pending_folder(hidden: str) -> str:
    """With a folder for each attempt of a task."""
    return f"{hidden}/pending"


def marker_folder(hidden: str) -> str:
    """With a file for each commit that has begun."""
    return f"{hidden}/committed"


def name_of(place: Place) -> str:
    """Of an attempt's files: no other attempt has it, and no other sink with the same path.

    All sinks of a task share the nonce, so the name says whose file it is: a short hash, where a
    uid may have dashes.
    """
    sink = hashlib.blake2b(place.owner.sink.encode(), digest_size=SINK_BYTES).hexdigest()
    return f"{place.checkpoint_id:08d}-{place.task:05d}-{place.nonce}-{sink}"


def parse_name(name: str) -> tuple[int, int] | None:
    """The epoch and the task of a name; None: it is something else."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    epoch, task, *_ = name.split("-")
    return int(epoch), int(task)


def parse_draft(path: str, size: int) -> File | None:
    """The file that a draft, relative to its pending folder, is for; None: it is something else."""
    found = _FINAL.fullmatch(path.removesuffix(DRAFT)) if path.endswith(DRAFT) else None
    return found and File(found[1] or "", int(found[3] or 0), size)


def _is_ours(drafts: Drafts) -> bool:
    top, *parts = drafts.hidden.split("/")
    folders = {part for file in drafts.files or () for part in file.folder.split("/")}
    numbers = [number for file in drafts.files or () for number in (file.number, file.size)]
    return (
        _NAME.fullmatch(drafts.name) is not None
        and (top, len(parts)) == (HIDDEN, 3)
        and not any("\0" in part or part == ".." for part in (*parts, *folders))
        and all(type(number) is int and number >= 0 for number in numbers)
        and isinstance(drafts.location, str)
    )


def _part(text: str) -> str:
    """Any name as one folder's: no slash, and neither `.` nor `..`."""
    return quote(text, safe=" ") if text.strip(".") else text.replace(".", "%2E")
