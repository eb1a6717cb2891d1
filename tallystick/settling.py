"""Transactions that linger, as their systems tell; and settling one by hand, as a recovery does it.

Invariants:
    * What lingers is listed first, and the checkpoint is read behind that: an epoch that began one
      of these transactions is planned by then.
    * Where an epoch is under way, a decision for it is made impossible before what it may have
      prepared is aborted, and what is decided is read once more behind that. A run that was at work
      all the same stops, and has lost nothing.
    * What is committed or aborted is the producer epoch that was looked at, and nothing that its
      transactional id is used for since.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from tallystick.checkpoint_says import Stated, deciding_ids, look
from tallystick.decision_log import DecisionLog, newest_entry
from tallystick.errors import AuthorizationError, DataLossError, OptionError
from tallystick.kafka import cluster, outcome
from tallystick.kafka import open_transactions as ot
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.outcome import TaskToken, TaskTransaction
from tallystick.kafka.task_sink import EPOCH_UNKNOWN
from tallystick.newest_epoch import Heard
from tallystick.ops.ask_kafka import NOWHERE, asking
from tallystick.sink.tokens import newest_token
from tallystick.sink.transactional_ids import PooledId, parse, token_group
from tallystick.sink.two_phase import (
    Committable,
    Guarantee,
    Outcome,
    Owner,
    TwoPhaseCommitSink,
)
from tallystick.storage import FileStorage, SystemClock
from tallystick.topic_partition import TopicPartition
from tallystick.transactions import FILES, KAFKA, ONGOING, POSTGRES, Lingering, Told

FENCE_TIMEOUT_MS = 60_000
"""What InitProducerId asks for; the next owner of the id says its own."""


class Door(Protocol):
    """A system in which transactions linger."""

    def lingering(self) -> tuple[Lingering, ...]:
        """Everything that may be of interest."""
        ...

    def details(self, lingering: Lingering, named: Committable | None) -> dict[str, Any]:
        """What else is known of one, of JSON's own types; `named`: as a manifest names it."""
        ...

    def commit(self, lingering: Lingering, due: Committable | None) -> Outcome:
        """Make it visible; `due`: as the decided manifest names it."""
        ...

    def abort(self, lingering: Lingering) -> bool:
        """Give it up; False: it is still there."""
        ...

    def close(self) -> None:
        """Hang up."""
        ...


class KafkaDoor:
    """One cluster.

    Args:
        config: how to reach it.
    """

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._client = Client(config)
        self._committed: dict[str, tuple[str, int] | None] = {}

    def lingering(self) -> tuple[Lingering, ...]:
        """See `Door.lingering`; of everybody, as far as this user may see."""
        found = ot.found_open(self._client)
        rows = ot.rows_of(self._client, found)
        return tuple(self._lingering(each, rows) for each in found)

    def details(self, lingering: Lingering, named: Committable | None) -> dict[str, Any]:
        """See `Door.details`."""
        found = ot.found(self._client, lingering.transactional_id)
        rows = {} if found is None else ot.rows_of(self._client, [found])
        group = token_group(lingering.transactional_id)
        held = ot.offsets_if_allowed(self._client, group)
        shown = ((rows.get((lingering.transactional_id, each)), each)
                 for each in lingering.partitions)  # fmt: skip
        return {
            "cluster_id": cluster.cluster_id(self._client),
            "partitions": [
                {
                    "topic": each.topic,
                    "partition": each.partition,
                    "first_offset": None if told is None else told.first_offset,
                    "written_ms": None if told is None else told.written_ms,
                }
                for told, each in shown
            ],
            "token_group": group,
            "token": _token_fields(lingering, held),
        }

    def commit(self, lingering: Lingering, due: Committable | None) -> Outcome:
        """See `Door.commit`; returns when readers see it."""
        if due is not None:
            return self.commit_named(due)
        age_ms = outcome.age_ms(lingering.begun_ms)
        return self._commit(self._found(lingering), EPOCH_UNKNOWN, age_ms)

    def commit_named(self, due: Committable) -> Outcome:
        """Commit what a decided manifest names, or find that it is, or prove that it is lost.

        Raises:
            BrokerUnavailableError: the outcome is unknown for now.
            DataLossError: it can never be known.
        """
        transaction = TaskTransaction.from_json(due.details)
        return self._commit(transaction, due.checkpoint_id, outcome.age_ms(due.begun_ms))

    def _commit(self, transaction: TaskTransaction, epoch: int, age_ms: int) -> Outcome:
        became = outcome.commit(self._client, transaction, epoch, age_ms)
        ot.await_end(self._client, transaction)
        return became

    def abort(self, lingering: Lingering) -> bool:
        """See `Door.abort`; returns when readers go on."""
        transaction = self._found(lingering)
        ot.give_up(self._client, transaction, lingering.timeout_ms or FENCE_TIMEOUT_MS)
        ot.await_end(self._client, transaction)
        return True

    @property
    def cluster_id(self) -> str:
        """Which cluster it is."""
        return self._client.cluster_id or cluster.cluster_id(self._client)

    def is_here(self, committable: Committable) -> bool:
        """Whether a committable is a transaction of this cluster."""
        try:
            return TaskTransaction.from_json(committable.details).cluster_id == self.cluster_id
        except (ValueError, TypeError, KeyError):  # another kind of sink's
            return False

    def ask(self, transactional_id: str, lineage: str) -> Heard:
        """See `newest_epoch.Ask`: what it decided last, which may change any moment."""
        try:
            state = ot.found(self._client, transactional_id)
            if state is not None and state.state.startswith("Prepare"):
                return Heard(None, f"Kafka is just ending {transactional_id!r}: try again")
            held = ot.offsets_of(self._client, token_group(transactional_id))
            return Heard(newest_token(held, NOWHERE, lineage))
        except (AuthorizationError, DataLossError) as error:
            return Heard(None, f"what Kafka decided last cannot be read: {error}")

    def ask_settled(self, transactional_id: str, lineage: str) -> Heard:
        """The same behind `fence`: nothing can change it any more."""
        return asking(self._config)(transactional_id, lineage)

    def knows_as(self, transactional_id: str, lineage: str) -> bool:
        """Whether the coordinator knows an id, and no other checkpoint decided under it last."""
        if ot.found(self._client, transactional_id) is None:
            return False
        token = self.ask(transactional_id, lineage).token
        return token is None or token.lineage == lineage

    def fence(self, transactional_id: str) -> None:
        """Take an id over, so that whoever had it cannot decide any more."""
        broker = KafkaBroker(self._config, FENCE_TIMEOUT_MS)
        try:
            broker.fence(transactional_id, None)
        finally:
            broker.close()

    def close(self) -> None:
        """See `Door.close`."""
        self._client.close()

    def _lingering(
        self, found: ot.Found, rows: Mapping[tuple[str, TopicPartition], ot.Rows]
    ) -> Lingering:
        written = (rows.get((found.transactional_id, each)) for each in found.partitions)
        pooled = parse(found.transactional_id)
        return Lingering(
            system=KAFKA,
            transactional_id=found.transactional_id,
            name=found.name,
            state=found.state,
            prepared=found.has_offsets,
            producer_id=found.producer_id,
            producer_epoch=found.producer_epoch,
            begun_ms=found.begun_ms,
            written_ms=max((each.written_ms for each in written if each is not None), default=0),
            timeout_ms=found.timeout_ms,
            partitions=found.partitions,
            committed=None if pooled is None else self._committed_at(pooled),
        )

    def _committed_at(self, pooled: PooledId) -> tuple[str, int] | None:
        """Who committed under an id last, and what; where nobody has, under its neighbours."""
        for each in (pooled, pooled._replace(slot=0), pooled._replace(task=0, slot=0)):
            name = str(each)
            if name not in self._committed:
                held = ot.offsets_if_allowed(self._client, token_group(name))
                token = _newest(held or {})
                known = token is not None and token.lineage
                self._committed[name] = (
                    (token.lineage, token.next_checkpoint_id - 1) if token and known else None
                )
            if self._committed[name] is not None:
                return self._committed[name]
        return None

    def _found(self, lingering: Lingering) -> TaskTransaction:
        return TaskTransaction(
            transactional_id=lingering.transactional_id,
            producer_id=lingering.producer_id,
            producer_epoch=lingering.producer_epoch,
            transaction_version=cluster.transaction_version(self._client) or 0,
            cluster_id=cluster.cluster_id(self._client),
        )


class SinkDoor:
    """Another system, by way of its sink.

    Args:
        system: its name.
        sink: that settles.
        owners: whose transactions are looked for.
        state_of: what a committable that was found is called.
    """

    def __init__(
        self,
        system: str,
        sink: TwoPhaseCommitSink,
        owners: Iterable[Owner],
        state_of: Callable[[Committable], str],
    ) -> None:
        self._system, self._sink, self._owners = system, sink, tuple(owners)
        self._state_of = state_of

    def lingering(self) -> tuple[Lingering, ...]:
        """See `Door.lingering`; of this pipeline's sinks only."""
        found = (each for owner in self._owners for each in self._sink.lingering(owner))
        return tuple(
            Lingering(
                system=self._system,
                transactional_id=each.name,
                name=each.name,
                state=self._state_of(each),
                prepared=self._state_of(each) != ONGOING,
                begun_ms=each.begun_ms,
                sink=each.sink,
                found=each,
            )
            for each in found
        )

    def details(self, lingering: Lingering, named: Committable | None) -> dict[str, Any]:
        """See `Door.details`."""
        assert lingering.found is not None, "found by its sink"
        return {"where": self._sink.describe(named or lingering.found)}

    def commit(self, lingering: Lingering, due: Committable | None) -> Outcome:
        """See `Door.commit`."""
        assert lingering.found is not None, "found by its sink"
        return self._sink.commit(due or lingering.found)

    def abort(self, lingering: Lingering) -> bool:
        """See `Door.abort`: a sink leaves alone what it has begun to commit."""
        assert lingering.found is not None, "found by its sink"
        self._sink.abort(lingering.found)
        return all(each.found != lingering.found for each in self.lingering())

    def close(self) -> None:
        """See `Door.close`."""
        self._sink.close()


def postgres_door(dsn: str, owners: Iterable[Owner]) -> SinkDoor:
    """A PostgreSQL database: what is prepared or staged there.

    Raises:
        OptionError: psycopg is missing, or the connection is refused.
        RetriableError: there is no answer.
    """
    try:
        from tallystick.postgres import connection, driver, schema, transactions
        from tallystick.postgres.outcome import identity
    except ImportError as error:
        if error.name is None or not error.name.startswith("psycopg"):
            raise
        raise OptionError("--postgres needs psycopg: pip install 'tallystick[postgres]'") from None
    known = tuple(owners)
    session = connection.Session(dsn)
    server, database = session.run("asking who it is", identity)
    details = transactions.Details(
        mode="prepared",
        schema="public",
        table="(not known)",
        server=server,
        database=database,
        tokens_id=0,
    )
    table = schema.Table("public", "(not known)", ())
    plan = transactions.PostgresPlan(dsn, table, (), details, Guarantee.EXACTLY_ONCE)
    committer = driver.PostgresCommitter(session, plan, known[0])

    def state_of(committable: Committable) -> str:
        mode = str(json.loads(committable.details)["mode"])
        return ONGOING if mode == "open" else mode

    return SinkDoor(POSTGRES, committer, known, state_of)


def files_door(path: str, owners: Iterable[Owner]) -> SinkDoor:
    """A folder of files: the hidden drafts there."""
    from tallystick.files.folder import Folder
    from tallystick.files.sink import OpenFileSink
    from tallystick.files.writing import FilePlan

    plan = FilePlan(
        folder=Folder(path),
        partition_by=(),
        compression="none",
        row_group_rows=1,
        guarantee=Guarantee.EXACTLY_ONCE,
        schema=None,
    )
    return SinkDoor(FILES, OpenFileSink(plan), owners, lambda _: "hidden")


def only_here(told: Told, kafka: KafkaDoor) -> Told:
    """What a checkpoint says of the transactions of one cluster, and of other systems.

    Another cluster's transaction may have the very same name.
    """

    def here(committables: tuple[Committable, ...]) -> tuple[Committable, ...]:
        return tuple(
            each
            for each in committables
            if parse(each.name.rsplit(":", 2)[0]) is None or kafka.is_here(each)
        )

    decided = told.decided
    if decided is not None:
        decided = replace(decided, committables=here(decided.committables))
    undecided = tuple(
        (path, replace(each, committables=here(each.committables))) for path, each in told.undecided
    )
    return replace(told, decided=decided, undecided=undecided)


def forestall(checkpoint: FileStorage, told: Told, kafka: KafkaDoor, stated: Stated) -> Told:
    """Make it impossible that a run decides the epoch under way; what is decided, read anew.

    As every start of a pipeline does: the log of decisions, and the transactional ids that decide,
    get a new owner, whichever of them there are. Where neither the log nor anything else says who
    decides, it is whatever bears the pipeline's name in the cluster that the user says decides.

    Args:
        checkpoint: its location.
        told: what it said.
        kafka: the cluster that decides, if Kafka does.
        stated: what the user says besides.

    Raises:
        OptionError: the checkpoint, or Kafka, may not be written; or which cluster decides is not
            known, or another one than was given.
    """
    entry = newest_entry(checkpoint)
    ids = deciding_ids(checkpoint, entry, told.lineage, kafka.cluster_id)
    if entry is None and not ids:
        if not stated.decider:
            raise OptionError(
                f"checkpoint {checkpoint.location}: an epoch is under way, and nothing says where "
                f"it is decided: expected a log of decisions, a manifest, or a trace of a cluster. "
                f"Give the servers of the cluster that decides, be it the same one (--decider)."
            )
        ids = sorted(each for each in told.prefixes if kafka.knows_as(each, told.lineage))
    if entry is not None or not ids:
        same = "" if entry is None else entry.transactional_id
        DecisionLog(checkpoint, SystemClock()).fence(same, None)
        # Behind the slot: a run that has begun to decide elsewhere since then finds it taken.
        entry = newest_entry(checkpoint)
        ids = deciding_ids(checkpoint, entry, told.lineage, kafka.cluster_id)
    for each in ids:
        kafka.fence(each)
    return look(checkpoint, kafka.ask_settled, stated)


def now_ms() -> int:
    """The wall clock."""
    return time.time_ns() // 1_000_000


def _newest(held: Mapping[TopicPartition, tuple[int, str]]) -> TaskToken | None:
    """Of tokens under several topics; a sink may have changed its own."""
    tokens = [TaskToken.read(*each) for each in held.values()]
    return max(tokens, key=lambda each: (each.producer_id, each.producer_epoch), default=None)


def _token_fields(
    lingering: Lingering, held: Mapping[TopicPartition, tuple[int, str]] | None
) -> dict[str, Any]:
    """What the token group of an id holds, and whether this transaction is to change it."""
    staged = "staged in this transaction" if lingering.prepared else "not staged yet"
    if held is None:
        return {"state": staged, "committed": None, "why": "this user may not read the group"}
    if lingering.pooled is None:
        try:
            token = newest_token(held, NOWHERE, "")
        except DataLossError as error:
            return {"state": staged, "committed": None, "why": str(error)}
        committed = None if token is None else {
            "epoch": token.checkpoint_id,
            "lineage": token.lineage,
            "checkpoint": token.checkpoint,
            "manifest": token.manifest_path,
        }  # fmt: skip
        return {"state": staged, "committed": committed}
    newest = _newest(held)
    committed = None if newest is None else {
        "epoch": newest.next_checkpoint_id - 1,
        "lineage": newest.lineage,
        "producer_id": newest.producer_id,
        "producer_epoch": newest.producer_epoch,
    }  # fmt: skip
    return {"state": staged, "committed": committed}
