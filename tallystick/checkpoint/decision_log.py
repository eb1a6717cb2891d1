"""The decider of a checkpoint, and the log of decisions, which is the checkpoint's own.

    tallystick/decider.json              {decided_by, transactional_id, cluster_id}
    tallystick/decisions/<slot>.json     {run, token, id}: the owner of the pipeline, and the
                                         newest decision

The log stands in Kafka's place where no transaction spans an epoch.

Invariants:
    * The decider's file is created before the first fence and never changed (`Storage.put_new`): of
      two first starts with different deciders, one is refused before it has fenced or written
      anything. A later start with another decider is refused too. So every run asks, and fences,
      the only place where an epoch of this checkpoint can be decided.
    * A slot is created once and never changed either: of two runs that want the same one, the
      second learns that it is taken.
    * The newest slot counts, and says all: its run owns the pipeline, its token is the newest
      decision. Taking over repeats the token.
    * A run writes a slot only after one of its own. So a run that takes over is certain that
      nothing is decided without its knowledge: the run before finds its next slot taken, and stops.
    * Old slots are removed, which leaves holes. A run that wrote into a hole finds newer slots
      after it when it looks: its slot never counted.

Source: the compare-and-swap log of table formats such as Delta's; Flink leaves the same question to
its high-availability service, which elects one leader.
"""

import logging
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.epoch.manifest import CHECKPOINT, FOLDER, KAFKA, LOG, DeciderName, seal, unseal
from tallystick.epoch.tokens import Token, decode_token, encode_token
from tallystick.errors import FencedError, OptionError, StorageError
from tallystick.ports import Clock, Storage
from tallystick.source.offsets import SourceOffsets
from tallystick.values import ProducedRange, Producer, TopicPartition

logger = logging.getLogger(__name__)

DECIDER = f"{FOLDER}/decider.json"
DECISIONS = f"{FOLDER}/decisions"
KEPT_SLOTS = 100
NO_SLOT = -1
NEWEST_SLOTS = 10
"""The number of slots in which the runs may have left something open."""
VERSION = 1
_NAME = re.compile(r"(\d{16})\.json", re.ASCII)


class Entry(NamedTuple):
    """The content of a slot.

    Args:
        slot: its number.
        run: the owner of the pipeline since.
        token: the newest decision; None: nothing is decided yet.
        transactional_id: the run's; the ids of its sinks begin with it.
    """

    slot: int
    run: str
    token: Token | None
    transactional_id: str


def slot_path(slot: int) -> str:
    """Return the path of a slot."""
    return f"{DECISIONS}/{slot:016d}.json"


def newest_entry(storage: Storage) -> Entry | None:
    """Return the entry of the newest slot; None if the log is empty.

    Raises:
        ManifestError: the slot's file is damaged.
    """
    while slots := _slots(storage):
        data = storage.get(slot_path(slots[-1]))
        if data is not None:
            return _decode(slots[-1], data)
        # It was removed since, so there are newer ones; what else was listed counts no more.
    return None


def transactional_ids(storage: Storage) -> frozenset[str]:
    """Return the ids of the newest runs, also of those that died before their first manifest.

    Raises:
        ManifestError: a slot's file is damaged.
    """
    files = ((slot, storage.get(slot_path(slot))) for slot in _slots(storage)[-NEWEST_SLOTS:])
    entries = (_decode(slot, data) for slot, data in files if data is not None)
    return frozenset(entry.transactional_id for entry in entries)


def decider_of(checkpoint: Storage) -> DeciderName | None:
    """Return the decider of a checkpoint; None if nothing can have been decided there.

    Where the file is missing, the newest manifests or the log of decisions name the decider.

    Raises:
        ManifestError: a file is damaged.
    """
    data = checkpoint.get(DECIDER)
    return _decode_decider(data) if data is not None else _implied_decider(checkpoint)


def claim(checkpoint: Storage, decider: DeciderName) -> None:
    """Make sure that this decider, and no other, decides the epochs of the checkpoint.

    Args:
        checkpoint: its location.
        decider: of the run that starts.

    Raises:
        OptionError: another one decides; nothing was fenced or written.
        StorageError: whether the file is there is unknown: claim again.
        ManifestError: a file is damaged.
    """
    data = checkpoint.get(DECIDER)
    if data is None:
        _refuse_another(checkpoint, _implied_decider(checkpoint), decider)
        if checkpoint.put_new(DECIDER, seal(VERSION, decider._asdict())):
            return
        data = checkpoint.get(DECIDER)
        if data is None:
            raise StorageError(
                f"checkpoint {checkpoint.location}: {DECIDER} exists and cannot be read. "
                f"Start again."
            )
    _refuse_another(checkpoint, _decode_decider(data), decider)


class DecisionLog:
    """`ports.Decider` over the checkpoint: one run's hold of the log.

    Args:
        storage: the checkpoint.
        clock: draws the run's name.
        transactional_id: under which the pipeline runs; the log keeps it for commands that look for
            what its sinks may have left.
        kept_slots: how many old slots stay; what is older is removed now and then.
    """

    def __init__(
        self,
        storage: Storage,
        clock: Clock,
        transactional_id: str,
        *,
        kept_slots: int = KEPT_SLOTS,
    ) -> None:
        assert kept_slots > 0, "the newest slot stays"
        self._kept_slots = kept_slots
        self._storage = storage
        self._transactional_id = transactional_id
        self._run = clock.nonce()

    @property
    def name(self) -> DeciderName:
        """See `ports.Decider.name`."""
        return LOG

    def fence(self, current: Producer | None) -> Producer:
        """Take the log over; with `current`, only as long as no other run did.

        It writes a slot in either case: a write of our own that went unanswered may still arrive,
        and must find its slot taken.

        Raises:
            FencedError: another run owns it.
        """
        while True:
            newest = newest_entry(self._storage)
            if current is not None:
                self._check_run(newest)
            slot = NO_SLOT + 1 if newest is None else newest.slot + 1
            token = None if newest is None else newest.token
            if self._put(Entry(slot, self._run, token, self._transactional_id)):
                return self._producer(slot)

    def check_owner(self, current: Producer) -> None:
        """See `ports.Decider.check_owner`: the newest slot's run is the owner."""
        self._check_run(newest_entry(self._storage))

    def _check_run(self, newest: Entry | None) -> None:
        if newest is None or newest.run != self._run:
            raise _fenced(newest)

    def last_decision(self) -> Token | None:
        """Return the newest decision, of any run."""
        newest = newest_entry(self._storage)
        return None if newest is None else newest.token

    def stage(self, producer: Producer, token: Token, positions: Sequence[SourceOffsets]) -> None:
        """Do nothing: the positions, which are for others to see, are not the log's business."""

    def decide(self, producer: Producer, token: Token) -> Producer:
        """Decide an epoch: write the token into the next slot.

        Raises:
            FencedError: another run has taken over.
            StorageError: whether it is decided is unknown: fence and ask.
        """
        slot = producer.producer_epoch + 1
        if not self._put(Entry(slot, self._run, token, self._transactional_id)):
            raise _fenced(newest_entry(self._storage))
        if slot % self._kept_slots == 0:
            self._remove_old(slot)
        return self._producer(slot)

    def abort(self, producer: Producer) -> None:
        """Do nothing: no transaction is open here."""

    def last_sequences(
        self, producer: Producer, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """Return nothing: no rows are in a transaction of the log's."""
        return {}

    def foreign_rows(
        self, producer: Producer, produced: Iterable[ProducedRange]
    ) -> Mapping[TopicPartition, int]:
        """Return nothing: no rows are in a transaction of the log's."""
        return {}

    def _remove_old(self, newest: int) -> None:
        """Remove old slots, the oldest first so that the newest have no holes. Never fails."""
        try:
            for old in _slots(self._storage):
                if old <= newest - self._kept_slots:
                    self._storage.delete(slot_path(old))
        except Exception as error:
            logger.warning(
                "checkpoint %s: removing old decisions failed: %s. It is tried again later; "
                "nothing else depends on it",
                self._storage.location,
                error,
            )

    def _put(self, entry: Entry) -> bool:
        """Write a slot; False if the slot was taken, or if newer slots exist already."""
        if not self._storage.put_new(slot_path(entry.slot), _encode(entry)):
            return False
        newest = max(_slots(self._storage), default=NO_SLOT)
        return newest == entry.slot

    def _producer(self, slot: int) -> Producer:
        return Producer(self._transactional_id, zlib.crc32(self._run.encode()), slot)


def _implied_decider(checkpoint: Storage) -> DeciderName | None:
    """Return the decider that manifests or the log of decisions imply, if the file is missing."""
    folder = CheckpointFolder(checkpoint)
    for path in reversed(folder.manifest_paths()):
        manifest = folder.manifest(path)
        if manifest is None or manifest.origin is not None:
            continue  # removed since it was listed; or a savepoint's, which others decided
        if manifest.decided_by == CHECKPOINT:
            return LOG
        return DeciderName(KAFKA, manifest.producer.transactional_id)
    return None if newest_entry(checkpoint) is None else LOG


def _refuse_another(checkpoint: Storage, current: DeciderName | None, decider: DeciderName) -> None:
    if current is None or current == decider:
        return
    if current == decider._replace(cluster_id="") and current.decided_by == KAFKA:
        return  # manifests do not name the cluster
    if current.decided_by == KAFKA and current._replace(cluster_id=decider.cluster_id) == decider:
        raise OptionError(
            f"checkpoint {checkpoint.location} belongs to another Kafka cluster: its epochs are "
            f"decided by {current}, and now that would be {decider}. Nothing was fenced or "
            f"written. A new broker for trying out? Remove the checkpoint's folder, and keep the "
            f"next broker's data with `tallystick broker start --directory FOLDER`. Else start "
            f"with the former cluster; or, to move: start once as before with availableNow, take a "
            f"savepoint, and restore that into a new checkpoint."
        )
    raise OptionError(
        f"checkpoint {checkpoint.location}: its epochs are decided by {current}, and with these "
        f"settings they would be decided by {decider}. The decider of a checkpoint does not "
        f"change: which epoch was committed last is not asked elsewhere. Nothing was fenced or "
        f"written. Start as before (transactions=, transactional_id_prefix= and cluster of the "
        f"KafkaSink). Or, to change it: start once as before with availableNow, take a savepoint, "
        f"and restore that into a new checkpoint."
    )


def _decode_decider(data: bytes) -> DeciderName:
    remedy = (
        "Who decides the epochs of this checkpoint is unknown. Nothing was changed. Put back "
        "a whole copy of the checkpoint; or start from a new one, stating where to read from."
    )
    return unseal(data, DECIDER, VERSION, remedy, _decider)


def _decider(fields: dict[str, Any]) -> DeciderName:
    decider = DeciderName(**fields)
    if decider.decided_by not in (KAFKA, CHECKPOINT) or not all(
        isinstance(e, str) for e in decider
    ):
        raise ValueError(f"{tuple(decider)}: expected texts, the first one {KAFKA} or {CHECKPOINT}")
    return decider


def _slots(storage: Storage) -> list[int]:
    matches = (_NAME.fullmatch(path.rpartition("/")[2]) for path in storage.names(DECISIONS))
    return sorted(int(name[1]) for name in matches if name is not None)


def _encode(entry: Entry) -> bytes:
    token = None if entry.token is None else encode_token(entry.token)
    fields: dict[str, Any] = {"run": entry.run, "token": token, "id": entry.transactional_id}
    return seal(VERSION, fields)


def _decode(slot: int, data: bytes) -> Entry:
    def entry(fields: dict[str, Any]) -> Entry:
        token = fields["token"]
        decided = None if token is None else decode_token(*token)
        decoded = Entry(slot, fields["run"], decided, fields["id"])
        if not (isinstance(decoded.run, str) and isinstance(decoded.transactional_id, str)):
            raise TypeError(f"{decoded}: expected texts")
        return decoded

    remedy = (
        "Which epoch is decided last is unknown. Nothing was changed. Put back a whole copy of "
        "the checkpoint; or start from a new one, stating where to read from."
    )
    return unseal(data, slot_path(slot), VERSION, remedy, entry)


def _fenced(newest: Entry | None) -> FencedError:
    owner = "no entry is left" if newest is None else f"run {newest.run}, slot {newest.slot}"
    return FencedError(
        f"the checkpoint's log of decisions belongs to another run now ({owner}): this run stops. "
        f"Two runs must not use one checkpoint; the newer one goes on."
    )
