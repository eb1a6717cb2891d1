"""The state of a pipeline in a manifest: each step's states, and the files with their entries.

The state of a step is the sum of its files, applied in the order of the list: a snapshot holds all
entries of its key groups from before the epoch that wrote it, a changelog the entries that an epoch
changed. So, for each key group: the newest snapshot, then the changelogs after the snapshot.

Invariant: values of `from_json` name state files and nothing else, whoever wrote the JSON. A uid
and a file's name are one plain name each, and a path is `keyed-state/<uid>/<name>`, below the
checkpoint or the savepoint that names it.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

from tallystick.state.key_groups import MAX_PARALLELISM_MAX, KeyGroupRange
from tallystick.state.meaning import Meaning, meaning_from_json

SNAPSHOT = "snapshot"
CHANGELOG = "changelog"
FOLDER = "keyed-state"
"""The folder of state files, below the checkpoint location: it has a folder per step."""

PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""The form of a step's uid and of its files' names: neither `..` nor with a separator in it."""

_PLACE = re.compile(rf"{FOLDER}/{PLAIN_NAME.pattern}/[A-Za-z0-9][A-Za-z0-9._-]{{0,254}}")
_NUMBERS = ("epoch", "first", "last", "size", "index_size", "checksum", "rows")


class Version(NamedTuple):
    """A version of a step's state: an epoch, and the token of the attempt that counted.

    Epoch numbers repeat (an epoch that was aborted runs again, a savepoint is restored); `token` is
    drawn for each attempt of an epoch, so a version means one content.
    """

    epoch: int
    token: str


@dataclass(frozen=True, slots=True)
class StateFile:
    """One file of state.

    Args:
        path: relative to the checkpoint or the savepoint that names it.
        kind: `SNAPSHOT` or `CHANGELOG`.
        epoch: of a changelog, its own epoch; of a snapshot, the last epoch included.
        first, last: the key groups that the file covers, both included.
        size: in bytes.
        index_size: bytes of the index at its end.
        checksum: CRC-32 of the index, which holds the CRC-32 of each segment.
        rows: entries.
        first_epoch: the first epoch of a merged changelog, which holds all changes of its key
            groups from there to `epoch`; None: the file is not merged.
        schema: the schema of its entries: `StepState.schema` when it was written.
    """

    path: str
    kind: str
    epoch: int
    first: int
    last: int
    size: int
    index_size: int
    checksum: int
    rows: int
    first_epoch: int | None = None
    schema: str = ""

    @property
    def groups(self) -> KeyGroupRange:
        """The key groups that the file covers."""
        return KeyGroupRange(self.first, self.last)

    @property
    def epochs(self) -> range:
        """The epochs with changes in the changelog."""
        start = self.epoch if self.first_epoch is None else self.first_epoch
        return range(start, self.epoch + 1)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Decode a state file from a manifest's JSON.

        Raises:
            ValueError, TypeError: the JSON describes no possible file.
        """
        file = cls(**value)
        if not _PLACE.fullmatch(file.path):
            raise ValueError(f"path {file.path!r}: expected {FOLDER}/<step>/<file>")
        if type(file.schema) is not str:
            raise TypeError(f"{file.path}: schema {file.schema!r}: expected a text")
        if file.kind not in (SNAPSHOT, CHANGELOG):
            raise ValueError(f"{file.path}: kind {file.kind!r}: expected {SNAPSHOT} or {CHANGELOG}")
        numbers = [getattr(file, name) for name in _NUMBERS]
        numbers.append(0 if file.first_epoch is None else file.first_epoch)
        if not (all(type(number) is int for number in numbers) and min(numbers) >= 0):
            raise ValueError(f"{file.path}: {numbers}: expected whole numbers from 0")
        if not (file.first <= file.last < MAX_PARALLELISM_MAX and file.index_size <= file.size):
            raise ValueError(
                f"{file.path}: key groups {file.first} to {file.last}, an index of "
                f"{file.index_size} bytes in {file.size}: there is no such file"
            )
        return file


@dataclass(frozen=True, slots=True)
class StateField:
    """One state of a keyed step: name, id and kind, and the schemas of its entries.

    Args:
        name: as the user's code calls it.
        state_id: the byte in the entries' keys; never used again after the state was deleted.
        kind: `value`, `list`, `map`, `columns` (a vectorised function's), `rows` (of a join) or
            `timers`.
        key_schema: of the entries of a map, as JSON; of rows, the function that uses them; ""
            elsewhere.
        value_schema: as JSON.
        ttl_ms: how long an entry lives after its last write, or, of `columns`, until the function
            forgets the key; 0: for ever.
        meaning: the function that keeps the state, and its arguments; empty: not recorded.
    """

    name: str
    state_id: int
    kind: str
    key_schema: str
    value_schema: str
    ttl_ms: int = 0
    meaning: Meaning = ()

    def to_json(self) -> dict[str, Any]:
        """Encode the field as JSON types, an empty meaning left out."""
        meaning = {"meaning": list(map(list, self.meaning))} if self.meaning else {}
        return {**_shallow(self, but="meaning"), **meaning}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Decode a field from the JSON of `to_json`.

        Raises:
            TypeError: a value has the wrong type.
        """
        field = cls(**{**value, "meaning": meaning_from_json(value.get("meaning", []))})
        _check_types(field)
        return field


class TtlChange(NamedTuple):
    """A time to live that a state got, or lost, with a change of the program.

    Args:
        is_added: it got one; else it lost one.
        at_ms: the expiry of all entries from before, which had none; of a lost one, the clock of
            the epoch that took it away: what had expired by then is gone, the rest stays for ever.
    """

    is_added: bool
    at_ms: int


@dataclass(frozen=True, slots=True)
class FormerState:
    """The schema of a state before a change of the program.

    Args:
        state_id: of the state.
        value_schema: before the change, as `StateField.value_schema`.
        renamed: the columns with another name after the change: the new name, and the old one.
        ttl: the change of its time to live; None: it has one as before, or none.
        defaults: the columns that are added with another value than null for what is there: the
            name, and the value as it is stored, in hexadecimal digits.
    """

    state_id: int
    value_schema: str
    renamed: tuple[tuple[str, str], ...] = ()
    ttl: TtlChange | None = None
    defaults: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> list[Any]:
        """Encode the state's schema as JSON types, without what did not change."""
        more: dict[str, Any] = {} if self.ttl is None else {"ttl": list(self.ttl)}
        if self.defaults:
            more["defaults"] = list(map(list, self.defaults))
        renamed = list(map(list, self.renamed))
        return [self.state_id, self.value_schema, renamed, *([more] if more else [])]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Self:
        """Decode a state's former schema from the JSON of `StepState.to_json`.

        Raises:
            ValueError, TypeError: the JSON describes none.
        """
        state_id, value_schema, pairs, *more = value
        renamed = tuple((new, old) for new, old in pairs)
        changes = dict(*more)
        ttl = TtlChange(*changes.pop("ttl")) if "ttl" in changes else None
        defaults = tuple((name, digits) for name, digits in changes.pop("defaults", ()))
        if changes:
            raise ValueError(f"former schema {value!r}: expected ttl or defaults: {[*changes]}")
        texts = [value_schema, *(text for pair in (*renamed, *defaults) for text in pair)]
        if type(state_id) is not int or not all(type(text) is str for text in texts):
            raise TypeError(f"former schema {value!r}: expected an id and texts")
        if ttl is not None and (type(ttl.is_added), type(ttl.at_ms)) != (bool, int):
            raise TypeError(f"former schema {value!r}: {ttl}: expected true or false, and a moment")
        for _, digits in defaults:
            bytes.fromhex(digits)
        return cls(state_id, value_schema, renamed, ttl, defaults)


@dataclass(frozen=True, slots=True)
class FormerSchema:
    """A schema that a step's state had, of which files may still have entries.

    Args:
        schema: its name in files.
        states: the states that the next schema changed, as they were.
    """

    schema: str
    states: tuple[FormerState, ...]

    def to_json(self) -> list[Any]:
        """Encode the schema as JSON types."""
        return [self.schema, [state.to_json() for state in self.states]]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Self:
        """Decode a former schema from the JSON of `to_json`.

        Raises:
            ValueError, TypeError: the JSON describes none.
        """
        schema, states = value
        if type(schema) is not str:
            raise TypeError(f"former schema {schema!r}: expected a text")
        return cls(schema, tuple(map(FormerState.from_json, states)))


class PartitionTime(NamedTuple):
    """The latest event time of a partition, and the clock of the epoch that last read it.

    Args:
        topic, partition: the partition.
        latest_ms: the latest event time that was read, in ms since 1970; None: none was read.
        seen_ms: the clock of the newest epoch that read a row of the partition, else of the epoch
            that found the partition.
    """

    topic: str
    partition: int
    latest_ms: int | None
    seen_ms: int

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Self:
        """Decode a partition's times from the JSON of `StepState.to_json`.

        Raises:
            TypeError: a value has the wrong type.
        """
        times = cls(*value)
        latest_ms = 0 if times.latest_ms is None else times.latest_ms
        numbers = (times.partition, latest_ms, times.seen_ms)
        if not (isinstance(times.topic, str) and all(type(number) is int for number in numbers)):
            raise TypeError(f"partition_times {value!r}: expected a topic and three whole numbers")
        return times


@dataclass(frozen=True, slots=True)
class StepState:
    """The committed state of one keyed step.

    Args:
        uid: names the step across changes of the pipeline.
        max_parallelism: how many key groups; fixed for the life of the state.
        parallelism: how many tasks wrote the newest epoch.
        key_schema: the key's columns and types, as `KeyCodec.schema_text` gives them.
        hash_version: of the function from keys to key groups.
        fields: its states.
        next_id: the next free `state_id`.
        files: in the order of their application.
        trail: the newest versions, oldest first: a local copy at one of them can be brought
            forward, any other has to be made again.
        watermark_ms: no row with an older event time is expected; None: none was seen.
        time_mode: the clock of timers and times to live: one of `TIME_MODES` (processing.py).
        partition_times: of the partitions from which the watermark is computed; empty where it
            follows from the rows alone.
        times_of: the column that these times are of; "": unknown, as in earlier releases.
        schema: the name of the schema that `fields` have: the last epoch before it, and a checksum
            of the changes that led to it; "": nothing has changed since the first epoch.
        former: the schemas before, oldest first, as long as a file has entries of one.
        former_uids: the uids that the step had before, in whose folders it may have files.
    """

    uid: str
    max_parallelism: int
    parallelism: int
    key_schema: str
    hash_version: int
    fields: tuple[StateField, ...] = ()
    next_id: int = 1
    files: tuple[StateFile, ...] = ()
    trail: tuple[Version, ...] = ()
    watermark_ms: int | None = None
    time_mode: str = "None"
    partition_times: tuple[PartitionTime, ...] = ()
    times_of: str = ""
    schema: str = ""
    former: tuple[FormerSchema, ...] = ()
    former_uids: tuple[str, ...] = ()

    @property
    def copy_name(self) -> str:
        """The name of copies of the state on hosts, all entries of which have one schema.

        A program that changes the schema makes copies of its own, and leaves those that the program
        before it goes on with, should the first epoch never be committed.
        """
        return f"{self.uid}@{self.schema}" if self.schema else self.uid

    @property
    def version(self) -> Version | None:
        """The newest version of the state, the sum of all files; None before the first epoch."""
        return self.trail[-1] if self.trail else None

    def to_json(self) -> dict[str, Any]:
        """Encode the state as JSON types; `asdict` would copy each value of thousands of files."""
        optional = {
            "partition_times": list(map(list, self.partition_times)),
            "times_of": self.times_of,
            "schema": self.schema,
            "former": [former.to_json() for former in self.former],
            "former_uids": list(self.former_uids),
        }
        return {
            **_shallow(self, but=optional),
            **{name: value for name, value in optional.items() if value},
            "fields": [field.to_json() for field in self.fields],
            "files": [_shallow(file, but=() if file.schema else _UNCHANGED) for file in self.files],
            "trail": _trail_json(self.trail),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Decode a step's state from the JSON of `to_json`.

        Raises:
            ValueError, TypeError, KeyError: the JSON describes no possible state.
        """
        step = cls(
            **{
                **value,
                "fields": tuple(StateField.from_json(field) for field in value["fields"]),
                "files": tuple(StateFile.from_json(file) for file in value["files"]),
                "trail": _trail_of(value["trail"]),
                "partition_times": tuple(
                    PartitionTime.from_json(entry) for entry in value.get("partition_times", ())
                ),
                "former": tuple(map(FormerSchema.from_json, value.get("former", ()))),
                "former_uids": tuple(value.get("former_uids", ())),
            }
        )
        _check_types(step)
        if not PLAIN_NAME.fullmatch(step.uid):
            raise ValueError(f"uid {step.uid!r}: expected one plain name, as of a folder")
        is_whole = type(step.parallelism) is type(step.max_parallelism) is int
        if not is_whole or not 1 <= step.parallelism <= step.max_parallelism <= MAX_PARALLELISM_MAX:
            raise ValueError(
                f"step {step.uid}: parallelism {step.parallelism} of {step.max_parallelism} key "
                f"groups: expected 1 to {MAX_PARALLELISM_MAX}"
            )
        beyond = [file.path for file in step.files if file.last >= step.max_parallelism]
        if beyond:
            raise ValueError(
                f"step {step.uid}: {beyond[0]} has key groups beyond the {step.max_parallelism} "
                f"that there are"
            )
        if step.files and not step.trail:
            raise ValueError(f"step {step.uid}: {len(step.files)} files, and no version of them")
        uids = {step.uid, *step.former_uids}
        strange = [file.path for file in step.files if file.path.split("/")[1] not in uids]
        if strange:
            raise ValueError(f"step {step.uid}: {strange[0]} is a file of another step")
        known = {step.schema, *(former.schema for former in step.former)}
        unknown = [file for file in step.files if file.schema not in known]
        if unknown:
            raise ValueError(
                f"step {step.uid}: {unknown[0].path} has entries of schema {unknown[0].schema!r}, "
                f"and there is none of that name"
            )
        names = {file.path for file in step.files}
        if len(names) < len(step.files):
            raise ValueError(f"step {step.uid}: {len(step.files)} files with {len(names)} names")
        return step


_UNCHANGED = ("schema",)
"""Left out of files with entries of a step's first schema, which every release reads."""


def _trail_json(trail: Sequence[Version]) -> list[int | str]:
    """Encode a trail as tokens; where the epoch grows by more or less than 1, the growth precedes.

    A manifest has hundreds of tokens: with all epochs they would take half as much again.
    """
    parts: list[int | str] = []
    before = 0
    for epoch, token in trail:
        parts += [token] if epoch == before + 1 else [epoch - before, token]
        before = epoch
    return parts


def _trail_of(parts: Iterable[int | str]) -> tuple[Version, ...]:
    trail: list[Version] = []
    epoch, ahead = 0, 1
    for part in parts:
        if type(part) is int:
            ahead = part
        elif isinstance(part, str):
            if ahead < (1 if trail else 0):
                raise ValueError(
                    f"trail: version {part!r}: expected epochs from 0, each after the one before"
                )
            epoch, ahead = epoch + ahead, 1
            trail.append(Version(epoch, part))
        else:
            raise TypeError(f"trail: {part!r}: expected texts and whole numbers")
    return tuple(trail)


def _check_types(value: StateField | StepState) -> None:
    """Raise TypeError if a field for a number or a text holds another type."""
    for field in fields(value):
        content = getattr(value, field.name)
        if field.type in (int, str) and type(content) is not field.type:
            raise TypeError(f"{field.name} {content!r}: expected {field.type}")
        if field.type == int | None and not (content is None or type(content) is int):
            raise TypeError(f"{field.name} {content!r}: expected a whole number, or none")


def _shallow(
    value: StateFile | StateField | StepState, but: Collection[str] = ()
) -> dict[str, Any]:
    names = (field.name for field in fields(value) if field.name not in but)
    return {name: getattr(value, name) for name in names}
