"""The checkpoint's own log of decisions, in Kafka's place where no transaction spans an epoch.

    tallystick/decisions/<slot>.json     {run, token, id}: who owns the pipeline, and the
                                         newest decision

Invariants:
    * A slot is created once and never changed (`Storage.put_new`): of two runs that want the same
      one, the second is told.
    * The newest slot counts, and says all: its run owns the pipeline, its token is the newest
      decision. Taking over repeats the token.
    * A run writes a slot only after one of its own. So whoever takes over is certain that nothing
      is decided without its knowledge: the run before finds its next slot taken, and stops.
    * Old slots are removed, which leaves holes. Whoever wrote into a hole finds newer slots after
      it when it looks, and never counted.

Source: the compare-and-swap log of table formats such as Delta's; Flink leaves the same question to
its high-availability service, which elects one leader.
"""

import logging
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tallystick.epoch.manifest import FOLDER, LOG, DeciderName
from tallystick.epoch.sealed import seal, unseal
from tallystick.epoch.tokens import Token, decode_token, encode_token
from tallystick.errors import FencedError
from tallystick.ports import Clock, Storage
from tallystick.source.offsets import SourceOffsets
from tallystick.values import ProducedRange, Producer, TopicPartition

logger = logging.getLogger(__name__)

DECISIONS = f"{FOLDER}/decisions"
KEPT_SLOTS = 100
NO_SLOT = -1
NEWEST_SLOTS = 10
"""The number of slots in which the runs may have left something open."""
VERSION = 1
_NAME = re.compile(r"(\d{16})\.json", re.ASCII)


class Hold(NamedTuple):
    """A run's hold of the log, as it may travel to another process of the same run.

    Args:
        run: the run's name.
        slot: the newest one, which it wrote.
    """

    run: str
    slot: int


class Entry(NamedTuple):
    """The content of a slot.

    Args:
        slot: its number.
        run: who owns the pipeline since.
        token: what is decided last; None: nothing yet.
        transactional_id: under which it runs, and before which its sinks' ids begin.
    """

    slot: int
    run: str
    token: Token | None
    transactional_id: str


def slot_path(slot: int) -> str:
    """Return the path of a slot."""
    return f"{DECISIONS}/{slot:016d}.json"


def newest_entry(storage: Storage) -> Entry | None:
    """The entry that counts; None if there is none.

    Raises:
        ManifestError: its file is damaged.
    """
    while slots := _slots(storage):
        data = storage.get(slot_path(slots[-1]))
        if data is not None:
            return _decode(slots[-1], data)
        # It was removed since, so there are newer ones; what else was listed counts no more.
    return None


def transactional_ids(storage: Storage) -> frozenset[str]:
    """Under which ids the newest runs ran, also those that died before their first manifest.

    Raises:
        ManifestError: a slot's file is damaged.
    """
    found = ((slot, storage.get(slot_path(slot))) for slot in _slots(storage)[-NEWEST_SLOTS:])
    entries = (_decode(slot, data) for slot, data in found if data is not None)
    return frozenset(each.transactional_id for each in entries)


class DecisionLog:
    """`ports.Decider` over the checkpoint: one run's hold of the log.

    Args:
        storage: the checkpoint.
        clock: draws the run's name.
        transactional_id: under which the pipeline runs; the log keeps it for those who look for
            what its sinks may have left.
        hold: go on with this hold, and take over from nobody; None: a new run.
        kept_slots: how many old slots stay; what is older is removed now and then.
    """

    def __init__(
        self,
        storage: Storage,
        clock: Clock,
        transactional_id: str,
        hold: Hold | None = None,
        *,
        kept_slots: int = KEPT_SLOTS,
    ) -> None:
        assert kept_slots > 0, "the newest slot stays"
        self._kept_slots = kept_slots
        self._storage = storage
        self._transactional_id = transactional_id
        self._run = clock.nonce() if hold is None else hold.run
        self._hold = hold

    @property
    def name(self) -> DeciderName:
        """See `ports.Decider.name`."""
        return LOG

    def fence(self, current: Producer | None) -> Producer:
        """Take the log over; with `current`, only as long as nobody else did.

        It writes a slot in either case: a write of our own that went unanswered may still arrive,
        and must find its slot taken.

        Raises:
            FencedError: another run owns it.
        """
        if current is None and self._hold is not None:
            return self._go_on(self._hold)
        while True:
            newest = newest_entry(self._storage)
            if current is not None and (newest is None or newest.run != self._run):
                raise _fenced(newest)
            slot = NO_SLOT + 1 if newest is None else newest.slot + 1
            token = None if newest is None else newest.token
            if self._put(Entry(slot, self._run, token, self._transactional_id)):
                return self._producer(slot)

    def hold_of(self, producer: Producer) -> Hold:
        """Return what another process of this run needs, to decide under this producer."""
        return Hold(self._run, producer.producer_epoch)

    def _go_on(self, hold: Hold) -> Producer:
        """Write nothing: either the slot after this hold's is free still, or it is not."""
        newest = newest_entry(self._storage)
        if newest is None or Hold(newest.run, newest.slot) != hold:
            raise _fenced(newest)
        return self._producer(hold.slot)

    def last_decision(self) -> Token | None:
        """Return the newest decision, of whichever run."""
        newest = newest_entry(self._storage)
        return None if newest is None else newest.token

    def decide(
        self, producer: Producer, token: Token, positions: Sequence[SourceOffsets]
    ) -> Producer:
        """Decide; the positions, which are for others to see, are not the log's business.

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
        """Oldest first, so that the newest ones have no holes; it is decided whatever fails."""
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
        """Write a slot; False if it was taken, or if newer ones are there already."""
        if not self._storage.put_new(slot_path(entry.slot), _encode(entry)):
            return False
        newest = max(_slots(self._storage), default=NO_SLOT)
        return newest == entry.slot

    def _producer(self, slot: int) -> Producer:
        return Producer(self._transactional_id, zlib.crc32(self._run.encode()), slot)


def _slots(storage: Storage) -> list[int]:
    found = (_NAME.fullmatch(path.rpartition("/")[2]) for path in storage.names(DECISIONS))
    return sorted(int(name[1]) for name in found if name is not None)


def _encode(entry: Entry) -> bytes:
    token = None if entry.token is None else encode_token(entry.token)
    held: dict[str, Any] = {"run": entry.run, "token": token, "id": entry.transactional_id}
    return seal(VERSION, held)


def _decode(slot: int, data: bytes) -> Entry:
    def entry(held: dict[str, Any]) -> Entry:
        token = held["token"]
        decided = None if token is None else decode_token(*token)
        return Entry(slot, held["run"], decided, held["id"])

    remedy = (
        "Which epoch is decided last cannot be told. Nothing was changed. Put back a whole copy of "
        "the checkpoint; or start from a new one, stating where to read from."
    )
    return unseal(data, slot_path(slot), VERSION, remedy, entry)


def _fenced(newest: Entry | None) -> FencedError:
    found = "no entry is left" if newest is None else f"run {newest.run}, slot {newest.slot}"
    return FencedError(
        f"the checkpoint's log of decisions belongs to another run now ({found}): this run stops. "
        f"Two runs must not use one checkpoint; the newer one goes on."
    )
