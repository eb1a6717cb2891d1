"""The driver's shell: feed events to the coordinator, perform its actions through the ports.

Between epochs it clears up what no retained manifest needs. Only what is certainly of the past is
removed: nothing of epochs behind the one that Kafka committed, which another run may be writing.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import assert_never

from tallystick.checkpoint import coordinator as c
from tallystick.checkpoint import manifest as m
from tallystick.checkpoint import retention, savepoint
from tallystick.checkpoint.manifest import Manifest
from tallystick.checkpoint.verdict import Base, Committed, Identity, Request
from tallystick.errors import (
    DataLossError,
    ManifestError,
    RetriableError,
    StateFileError,
    StorageError,
)
from tallystick.ports import Broker, Clock, Engine, Storage
from tallystick.sink.transaction import Token
from tallystick.source.offsets import SourceOffsets, parse_source
from tallystick.source.shown import requests, shown
from tallystick.state_files import COLLECTED_MAX, collect, delete_all
from tallystick.topic_partition import TopicPartition
from tallystick.wholeness import Wholeness

logger = logging.getLogger(__name__)

Listener = Callable[[c.Event], None]
"""Told each fact as soon as it is one; for metrics, and for tests that kill at a given point."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where one pipeline keeps its decision in Kafka."""

    transactional_id: str
    token_group: str
    token_partition: TopicPartition
    cluster_id: str


RETRY_PAUSE_S = 0.5
"""Each call has its own deadline already; this only keeps a quick failure from spinning."""


def _ignore(_: c.Event) -> None:
    return


class Driver:
    """Runs the epochs of one query run, one at a time, in the order that Spark asks for them.

    Positions of sources on the target's cluster are committed in the epoch's transaction; showing
    those of other clusters is not the driver's business (`spark.group_offsets`).

    Args:
        identity: the pipeline and its checkpoint.
        target: the transactional id, and where the token goes.
        broker: the cluster that is written to.
        storage: the checkpoint location.
        clock: for names and pauses.
        listener: told every event.
        collect_every: how many epochs between two collections of what nothing needs; 0: none.
        deletes_at_a_time: threads that a collection has; 1: none.
    """

    def __init__(
        self,
        identity: Identity,
        target: Target,
        broker: Broker,
        storage: Storage,
        clock: Clock,
        *,
        listener: Listener = _ignore,
        collect_every: int = retention.COLLECT_EVERY,
        deletes_at_a_time: int = 1,
    ) -> None:
        if not __debug__:
            raise RuntimeError("Tallystick does not run under python -O: its checks are asserts")
        self.coordinator = c.Coordinator(identity)
        self._identity = identity
        self._target = target
        self._broker = broker
        self._storage = storage
        self._clock = clock
        self._listener = listener
        self._asked_for = 0
        self._collect_every = collect_every
        self._deletes_at_a_time = deletes_at_a_time
        self._collect_at = 0  # the epoch behind which to clear up next

    @property
    def cluster_id(self) -> str:
        """The cluster whose transactions commit the epochs, and the positions of sources there."""
        return self._target.cluster_id

    def run_epoch(self, request: Request, engine: Engine) -> None:
        """Run one epoch to its end, or find that it is committed already.

        Raises:
            FencedError: another run owns the pipeline.
            DataLossError: going on needs a person's decision.
            TallystickError, or what the user's function raised: the epoch was aborted.
        """
        self._asked_for = request.checkpoint_id
        event: c.Event = c.EpochRequested(request)
        while True:
            self._listener(event)
            action = self.coordinator.step(event)
            if isinstance(event, c.OutputCounted) and isinstance(action, c.FenceProducer):
                logger.warning(
                    "epoch %d: Kafka holds %s, which is not what the tasks reported: another "
                    "attempt wrote too. The epoch is aborted and runs again",
                    request.checkpoint_id,
                    dict(event.last_sequences or {}),
                )
            match action:
                case c.EndEpoch():
                    self._clear_up(request.checkpoint_id)
                    return
                case c.Stop(error):
                    raise error
            event = self._attempt(action, engine)
            if isinstance(event, c.ActionFailed) and isinstance(event.error, RetriableError):
                self._collect_at = request.checkpoint_id  # the attempt left what nobody names
                self._clock.sleep(RETRY_PAUSE_S)

    def _attempt(self, action: c.Action, engine: Engine) -> c.Event:
        try:
            return self._perform(action, engine)
        except Exception as error:
            logger.warning("%s failed: %s", type(action).__name__, error)
            is_state = isinstance(error, StateFileError)
            return c.ActionFailed(self._with_way_on(str(error)) if is_state else error)

    def _with_way_on(self, message: str) -> StateFileError:
        """A file of state is missing or damaged: say which epoch one can go back to."""
        files = Wholeness(self._storage, known_bad=message)
        try:
            epoch = files.newest_whole(self._asked_for - 1)
        except StorageError:
            return StateFileError(message)
        way_on = (
            "None of the retained epochs has all its files."
            if epoch is None
            else f"The newest epoch that has all its files is {epoch}: save it with `tallystick "
            f"savepoint create --epoch {epoch}`, and restore that into a new checkpoint."
        )
        return StateFileError(f"{message} {way_on}")

    def _perform(self, action: c.Action, engine: Engine) -> c.Event:
        """Do one action and report the fact that follows from it."""
        match action:
            case c.FenceProducer(current):
                return c.ProducerFenced(self._broker.fence(self._target.transactional_id, current))
            case c.ReadCommitted():
                return c.CommittedRead(self._read_committed())
            case c.RunEpoch(checkpoint_id, producer, state):
                return c.EpochRan(*engine.run_epoch(checkpoint_id, producer, state))
            case c.WriteManifest(manifest):
                path = m.manifest_path(manifest, self._clock.nonce())
                self._storage.put(path, manifest.encode())
                return c.ManifestWritten(path)
            case c.CountOutput(producer, produced):
                partitions = [written.topic_partition for written in produced]
                return c.OutputCounted(self._broker.last_sequences(producer, partitions))
            case c.CommitTransaction():
                return self._commit(action)
            case c.ConfirmOutput(producer, produced):
                return c.OutputConfirmed(self._broker.foreign_rows(producer, produced))
            case c.AbortTransaction(producer):
                self._broker.abort_transaction(producer)
                return c.TransactionAborted()
            case c.EndEpoch() | c.Stop():
                raise AssertionError(f"{action} ends the loop")
            case _:
                assert_never(action)

    def _clear_up(self, epoch: int) -> None:
        """Remove old manifests, and files of state that none needs; no epoch fails for it."""
        committed = self.coordinator.committed_manifest
        if committed is None or committed.checkpoint_id != epoch or epoch < self._collect_at:
            return
        if self._collect_every == 0:
            return
        self._collect_at = epoch + self._collect_every
        try:
            paths = m.manifests(self._storage.names(m.FOLDER))
            delete_all(self._storage, retention.expired(paths, epoch), self._deletes_at_a_time)
            kept = self._manifests(retention.retained(paths, epoch))
            kept += self._claimed(committed)
            gone = collect(self._storage, committed, kept, at_a_time=self._deletes_at_a_time)
            if len(gone) == COLLECTED_MAX:
                self._collect_at = epoch + 1  # the rest
        except Exception as error:
            logger.warning(
                "checkpoint %s: removing what is not needed any more failed: %s. It is tried again "
                "later; nothing else depends on it",
                self._storage.location,
                error,
            )

    def _manifests(self, paths: list[str]) -> list[Manifest]:
        found = ((path, self._storage.get(path)) for path in paths)
        return [m.decode(data, path) for path, data in found if data is not None]

    def _claimed(self, committed: Manifest) -> list[Manifest]:
        """What savepoints elsewhere hold of this checkpoint, as if it were in manifests."""
        found = ((path, self._storage.get(path)) for path in self._storage.names(savepoint.CLAIMS))
        claims = [savepoint.decode_claim(data, path) for path, data in found if data is not None]
        return [replace(committed, state=claim.state) for claim in claims]

    def _commit(self, action: c.CommitTransaction) -> c.Event:
        """Stage the token and the sources' offsets, then commit: all of it or nothing."""
        token = {self._target.token_partition: encode_token(action.token)}
        self._broker.stage_offsets(action.producer, self._target.token_group, token)
        for source in _sources(action.sources):
            if source.cluster_id == self._target.cluster_id:
                for positions in requests(shown(source)):
                    self._broker.stage_offsets(
                        action.producer, source.group, positions, for_show=True
                    )
        return c.TransactionCommitted(self._broker.commit_transaction(action.producer))

    def _read_committed(self) -> Committed:
        found = self._broker.committed_offset(
            self._target.token_group, self._target.token_partition
        )
        token = None if found is None else decode_token(*found)
        if token is None or token.lineage != self._identity.lineage:
            return self._read_bases(token)
        data = self._storage.get(token.manifest_path) if token.manifest_path else None
        manifest = None if data is None else m.decode(data, token.manifest_path)
        return Committed(token, manifest, manifest_exists=manifest is not None)

    def _read_bases(self, token: Token | None) -> Committed:
        """Kafka does not say what this lineage goes on from: look what the checkpoint has."""
        paths = m.manifests(self._storage.names(m.FOLDER))
        bases = []
        for path in paths:
            data = self._storage.get(path) if m.epoch_of(path) == self._asked_for - 1 else None
            if data is not None:
                bases.append(Base(path, m.decode(data, path)))
        return Committed(
            token,
            None,
            manifest_exists=not all(m.is_seed(path) for path in paths),
            is_seeded=any(m.is_seed(path) for path in paths),
            bases=tuple(bases),
            has_state=not paths and bool(Wholeness(self._storage).names()),
        )


def _sources(texts: tuple[str, ...]) -> list[SourceOffsets]:
    parsed = [parse_source(text) for text in texts]
    return [source for source in parsed if source is not None and source.group]


TOKEN_VERSION = 1


def encode_token(token: Token) -> tuple[int, str]:
    """A token as Kafka stores it: (offset, metadata)."""
    fields = {
        "tallystick": TOKEN_VERSION,
        "lineage": token.lineage,
        "checkpoint": token.checkpoint,
        "manifest": token.manifest_path,
    }
    return token.checkpoint_id + 1, json.dumps(fields, separators=(",", ":"))


def decode_token(offset: int, metadata: str) -> Token:
    """Read back what `encode_token` made.

    Raises:
        DataLossError: something else committed offsets under the pipeline's token group.
    """
    try:
        fields = json.loads(metadata)
        if fields["tallystick"] != TOKEN_VERSION:
            raise ManifestError(
                f"token of version {fields['tallystick']}, this release reads {TOKEN_VERSION}: "
                f"run the release that wrote it, or a newer one."
            )
        return Token(offset - 1, fields["lineage"], fields["checkpoint"], fields["manifest"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataLossError(
            f"the pipeline's token group holds offset {offset} with metadata {metadata[:200]!r}, "
            f"which is no token: a consumer or a tool has used the group. Which epoch is committed "
            f"last cannot be told. Find the tool; then start from a new checkpoint, or give the "
            f"pipeline another name."
        ) from error
