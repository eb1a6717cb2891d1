"""The manifest: the file that names all of a checkpoint, written before the rows are committed.

Files are never overwritten: the name carries the epoch, the producer epoch that
wrote it and a random part, so that runs which do not know of each other cannot collide.

Like every small file of a checkpoint that counts by itself it is sealed: one line of JSON with its
format's version, then the CRC-32 of that line in eight hex digits. A reader rejects what it cannot
prove whole. The checksum is no signature: it does not prove who wrote the file, so what is built
from the text has to check itself too.

A restart needs the newest manifest only. A few more are kept for savepoints and `read_state`, which
read while the pipeline runs, and so that there is something to go back to if the newest is damaged.
"""

import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, TypeVar

from tallystick.epoch.tokens import Token
from tallystick.epoch.two_phase import Committable
from tallystick.errors import UNREADABLE, ManifestError
from tallystick.state.catalog import StepState
from tallystick.values import ProducedRange, Producer

VERSION = 1
KAFKA = "kafka"
CHECKPOINT = "checkpoint"
SEED = "seed"
"""The random part of a seed's name begins with it; that of other manifests is hexadecimal."""
FOLDER = "tallystick"
"""The folder of manifests, below the checkpoint location that Spark has too."""
EPOCHS_RETAINED = 10
"""The newest epochs that keep their manifests."""
COLLECT_EVERY = 50
"""Epochs between two collections: a collection lists the folders of the checkpoint."""
EXPIRED_MAX = 500
"""At most this many manifests are removed at a time: an old checkpoint may have thousands."""
SHOWN_MAX = 300
"""At most this many characters of an error are shown."""
_NAME = re.compile(r"\d+-\d+-.+\.json", re.ASCII)

Built = TypeVar("Built")


def seal(version: int, fields: Mapping[str, Any]) -> bytes:
    """Return the content of a file; `fields` consist of JSON's own types."""
    line = json.dumps({"version": version, **fields}, sort_keys=True).encode()
    return line + b"\n%08x\n" % zlib.crc32(line)


def unseal(
    data: bytes,
    what: str,
    version: int,
    remedy: str,
    build: Callable[[dict[str, Any]], Built],
) -> Built:
    """Read back what `seal` was given.

    Args:
        data: the file's content.
        what: the file and its path, for the messages.
        version: the one that this release reads.
        remedy: what to do if it is damaged, as sentences.
        build: makes the value from what was held; if it refuses, the file is at fault.

    Raises:
        ManifestError: the bytes are torn, edited, or of a newer release.
    """
    line, _, checksum = data.rstrip(b"\n").rpartition(b"\n")
    if not line or checksum != b"%08x" % zlib.crc32(line):
        raise ManifestError(
            f"{what}: {len(data)} bytes that fail their checksum, so the file is torn or was "
            f"edited. {remedy}"
        )
    try:
        fields: dict[str, Any] = json.loads(line)
        file_version = fields.pop("version", None)
        if file_version != version:
            raise ManifestError(
                f"{what}: format version {file_version}, this release reads version {version}. "
                f"Run the release that wrote it, or a newer one."
            )
        return build(fields)
    except UNREADABLE as error:
        raise ManifestError(
            f"{what}: its checksum fits, but no release writes what it says: "
            f"{type(error).__name__}: {str(error)[:SHOWN_MAX]}. It was edited, or made by "
            f"somebody else, or by a build before release 0.1.0, which no release reads. {remedy}"
        ) from error


class DeciderName(NamedTuple):
    """The decider of a checkpoint's epochs.

    Args:
        decided_by: `KAFKA` or `CHECKPOINT`, as manifests name it.
        transactional_id: whose transactions decide; "" where the checkpoint's log does.
        cluster_id: of their cluster; "" if it is unknown, or if the checkpoint's log decides.
    """

    decided_by: str
    transactional_id: str = ""
    cluster_id: str = ""

    def __str__(self) -> str:
        """Return the decider in words, for a message."""
        if self.decided_by == CHECKPOINT:
            return "the checkpoint's own log (no KafkaSink(transactions='epoch'))"
        where = f" on cluster {self.cluster_id!r}" if self.cluster_id else ""
        return f"Kafka transactions of {self.transactional_id!r}{where}"


LOG = DeciderName(CHECKPOINT)


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a seed: the manifest that was committed, or with which a lineage began.

    A seed is the manifest with which a restored checkpoint begins: it names the state and the
    positions to go on from, and no epoch of this checkpoint wrote it. A savepoint of such a
    checkpoint, taken before an epoch has run in it, holds the seed, and hands on its origin.

    Args:
        pipeline: the name of the pipeline that ran.
        lineage: of its checkpoint.
        checkpoint: the location of that checkpoint.
        manifest_path: the manifest's path in that checkpoint.
        savepoint: the location of the savepoint from which the seed was restored.
    """

    pipeline: str
    lineage: str
    checkpoint: str
    manifest_path: str
    savepoint: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The record of an epoch's output and state, with everything that a restart needs.

    `sources` are the end offsets of the epoch's sources as Spark's offset log has them, a JSON text
    per source. `lineage` is the id of the Spark query: it lives in the checkpoint, so two
    checkpoints never share it, while epoch numbers repeat. `state` names the files of each keyed
    step. `origin`: only a seed has one. `committables` are what the decision for this manifest
    makes visible besides the producer's rows. `decided_by` says where that decision is kept:
    `KAFKA` (the token) or `CHECKPOINT` (the log of decisions). `base_path` is the manifest that the
    epoch went on from, which was decided before this one was written; "": the lineage begins here.
    That of a seed is the seed that its savepoint held, if it held one.
    """

    checkpoint_id: int
    pipeline: str
    lineage: str
    sources: tuple[str, ...]
    produced: tuple[ProducedRange, ...]
    producer: Producer
    state: tuple[StepState, ...] = ()
    origin: Origin | None = None
    committables: tuple[Committable, ...] = ()
    decided_by: str = KAFKA
    base_path: str = ""

    def __post_init__(self) -> None:
        assert self.checkpoint_id >= 0, self
        assert self.pipeline, self
        assert self.lineage, self
        assert self.decided_by in (KAFKA, CHECKPOINT), self

    @property
    def is_of_seed(self) -> bool:
        """True of a seed whose savepoint held a seed itself; `origin` names an earlier pipeline."""
        origin = self.origin
        # Earlier builds kept no base of a seed, and had the seed itself as the origin.
        return origin is not None and (is_seed(self.base_path) or is_seed(origin.manifest_path))

    def to_fields(self) -> dict[str, Any]:
        """Return the fields that `from_fields` reads back, in JSON's own types."""
        return asdict(replace(self, state=(), committables=())) | {
            "state": [step.to_json() for step in self.state],
            "committables": [committable.to_fields() for committable in self.committables],
        }

    def encode(self) -> bytes:
        """Serialise, and prove that it reads back: a bug must show here, not at the restart."""
        data = seal(VERSION, self.to_fields())
        assert decode(data, "the manifest just written") == self
        return data


@dataclass(frozen=True, slots=True)
class Identity:
    """A pipeline's name, and the checkpoint that it goes on from.

    `accepted` are the decisions that a person stated; an error message gives the word to state.
    """

    pipeline: str
    lineage: str
    checkpoint: str
    accepted: frozenset[str] = frozenset()

    def own(self, token: Token | None) -> Token | None:
        """Return the token if it is of this checkpoint's lineage, else None."""
        return token if token is not None and token.lineage == self.lineage else None

    def token(self, checkpoint_id: int, manifest_path: str) -> Token:
        """Return the token that decides an epoch and names its manifest."""
        return Token(checkpoint_id, self.lineage, self.checkpoint, manifest_path)

    def manifest(
        self, checkpoint_id: int, sources: tuple[str, ...], producer: Producer, decided_by: str
    ) -> Manifest:
        """Return an epoch's manifest without output, state or committables."""
        return Manifest(
            checkpoint_id,
            self.pipeline,
            self.lineage,
            sources,
            produced=(),
            producer=producer,
            decided_by=decided_by,
        )


def decode(data: bytes, path: str) -> Manifest:
    """Parse and verify what `Manifest.encode` wrote; `path` is for the messages.

    Raises:
        ManifestError: the bytes are torn, edited, or of a newer release.
    """
    remedy = (
        "Nothing was changed. Restore the file from a backup of the checkpoint, or start the "
        "pipeline from a new checkpoint and state where to read from."
    )
    return unseal(data, f"manifest {path}", VERSION, remedy, from_fields)


def from_fields(fields: dict[str, Any]) -> Manifest:
    """Build a manifest from its JSON fields, as a manifest's file or a savepoint has them.

    Raises:
        ValueError, or another that `unseal` knows: the JSON is not of ours.
    """
    origin = fields["origin"]
    manifest = Manifest(
        checkpoint_id=fields["checkpoint_id"],
        pipeline=fields["pipeline"],
        lineage=fields["lineage"],
        sources=tuple(fields["sources"]),
        produced=tuple(ProducedRange(**produced) for produced in fields["produced"]),
        producer=Producer(**fields["producer"]),
        state=tuple(StepState.from_json(step) for step in fields["state"]),
        origin=None if origin is None else Origin(**origin),
        committables=tuple(map(Committable.from_fields, fields["committables"])),
        decided_by=fields["decided_by"],
        base_path=fields["base_path"],
    )
    for text in (manifest.pipeline, manifest.lineage, manifest.base_path, *manifest.sources):
        if not isinstance(text, str):
            raise TypeError(f"{text!r}: expected a text")
    producer = manifest.producer  # its epoch becomes a part of a file's name
    for number in (manifest.checkpoint_id, producer.producer_id, producer.producer_epoch):
        if type(number) is not int:
            raise TypeError(f"{number!r}: expected a whole number")
        if number < 0:  # a name with it is no manifest's
            raise ValueError(f"{number}: expected a whole number from 0")
    uids = [step.uid for step in manifest.state]
    if len(uids) != len(set(uids)):
        raise ValueError(f"steps {', '.join(uids)}: expected each once")
    return manifest


def manifest_path(manifest: Manifest, nonce: str) -> str:
    """Return the path of a manifest, relative to the checkpoint location; sorts by epoch."""
    epoch, producer_epoch = manifest.checkpoint_id, manifest.producer.producer_epoch
    return f"{FOLDER}/{epoch:012d}-{producer_epoch}-{nonce}.json"


def epoch_of(path: str) -> int:
    """Return the epoch that a manifest's name carries."""
    return int(path.rpartition("/")[2].partition("-")[0])


def attempt_of(path: str) -> tuple[int, int]:
    """Return the epoch and producer epoch of a manifest's name; a later attempt sorts after."""
    epoch, producer_epoch, _ = path.rpartition("/")[2].split("-", 2)
    return int(epoch), int(producer_epoch)


def manifests(paths: Iterable[str]) -> list[str]:
    """Return the manifests among the files of the folder: it may hold files of others."""
    return [path for path in paths if _NAME.fullmatch(path.rpartition("/")[2])]


def is_seed(path: str) -> bool:
    """True if the name is a seed's."""
    return path.rpartition("-")[2].startswith(SEED)


def retained_manifests(paths: Iterable[str], committed_epoch: int) -> list[str]:
    """Return the manifests to keep: those of the newest epochs, and of later ones under way.

    The committed epoch's is always among them. Epochs are counted by their manifests: the function
    of a user's own query may leave out any number of epochs.
    """
    listed = list(paths)
    oldest = _oldest_retained(listed, committed_epoch)
    return [path for path in listed if epoch_of(path) >= oldest]


def expired_manifests(paths: Iterable[str], committed_epoch: int) -> list[str]:
    """Return the manifests to remove now, oldest first; those of failed attempts too."""
    listed = list(paths)
    oldest = _oldest_retained(listed, committed_epoch)
    old = [path for path in listed if epoch_of(path) < oldest]
    return sorted(old, key=epoch_of)[:EXPIRED_MAX]


def _oldest_retained(paths: list[str], committed_epoch: int) -> int:
    epochs = sorted({epoch for epoch in map(epoch_of, paths) if epoch <= committed_epoch})
    return min(epochs[-EPOCHS_RETAINED:], default=0)
