"""Open and prepared transactions: the system, the owner, and the command that settles each.

Nothing is changed here. What is decided is the answer of `checkpoint.newest`; transactions
are settled by the pipeline's driver, in a start or in `tallystick recover`.
"""

import json
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from tallystick.checkpoint.newest import TokenAnswer
from tallystick.epoch.transactional_ids import PooledId, is_batch_name, parse
from tallystick.epoch.two_phase import Committable, Guarantee, Owner, TwoPhaseCommitSink
from tallystick.errors import AuthorizationError, OptionError
from tallystick.host.installed import pip_install
from tallystick.kafka import transactions as kafka_transactions
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.ops.checkpoint_view import CheckpointView, ask_kafka
from tallystick.values import TopicPartition

if TYPE_CHECKING:
    from tallystick.files.folder import Folder

KAFKA, POSTGRES, FILES = "kafka", "postgres", "files"
"""The systems in which transactions linger."""
IN_FOLDERS = FILES, "delta", "iceberg"
"""The kinds of sinks that keep what waits in a folder of their own."""
ONGOING = "Ongoing"
"""Kafka's one state without a decision; Kafka ends those that begin with `Prepare` itself."""
WAITS = "due"
"""The state of an epoch that is decided, and waits for a commit of its table."""
OUR_PREFIX = "tallystick-"
"""The default prefix of ids."""


@dataclass(frozen=True, slots=True)
class LingeringTransaction:
    """An open or prepared transaction, as Kafka, PostgreSQL or the file sink describes it.

    Args:
        system: Kafka, PostgreSQL, or files.
        transactional_id: its id in the system.
        name: the name of its committable, if there is one.
        state: the system's word for its state.
        prepared: the task has written all rows; in Kafka, the transaction has a token.
        begun_ms: in ms since 1970; 0: not known.
        timeout_ms: the system aborts the transaction after this time; 0: never.
        partitions: of a Kafka transaction, those with rows.
        sink: the uid, where the system knows it; "": the id names the sink.
        committable: the committable that the sink found; None: a transaction of Kafka.
    """

    system: str
    transactional_id: str
    name: str
    state: str
    prepared: bool = True
    producer_id: int = -1
    producer_epoch: int = -1
    begun_ms: int = 0
    timeout_ms: int = 0
    partitions: tuple[TopicPartition, ...] = ()
    sink: str = ""
    committable: Committable | None = None

    @property
    def prefix(self) -> str:
        """The pipeline's prefix of ids, which is the whole id of a whole epoch's transaction."""
        pooled = self.pooled
        return self.transactional_id if pooled is None else pooled.prefix

    @property
    def pooled(self) -> PooledId | None:
        """The parsed id of a Kafka task's transaction; None: an id of another kind."""
        return parse(self.transactional_id) if self.system == KAFKA else None


class TransactionStatus(Enum):
    """The state of a transaction, seen from its checkpoint; the words are those of `--json`."""

    DUE = "due"
    UNNAMED = "unnamed"
    WHOLE_EPOCH = "whole_epoch"
    ENDING = "ending"
    UNKNOWN = "unknown"
    FOREIGN = "foreign"


OURS = {TransactionStatus.DUE, TransactionStatus.UNNAMED, TransactionStatus.WHOLE_EPOCH}
"""Settled by a recovery of the pipeline."""


@dataclass(frozen=True, slots=True)
class Description:
    """The description of a transaction.

    Args:
        standing: the status, in a word.
        says: the status, in a sentence.
        named: the committable in a manifest; None: no manifest names the transaction.
        manifest_path: the path of that manifest; "": none.
    """

    standing: TransactionStatus
    says: str
    named: Committable | None = None
    manifest_path: str = ""


def describe(lingering: LingeringTransaction, view: CheckpointView | None) -> Description:
    """Return the owner of a transaction, and the effect of a recovery of the pipeline on it.

    Args:
        lingering: the transaction.
        view: the view of the checkpoint; None: no checkpoint was given.
    """
    if lingering.system == KAFKA and lingering.state != ONGOING:
        what = f"Kafka is ending it ({lingering.state}): wait, it is decided already"
        return Description(TransactionStatus.ENDING, what)
    is_foreign = view is None or not _is_ours(lingering, view)
    if is_foreign and lingering.system == KAFKA and _is_batch(lingering):
        what = "a batch write's: it is at work, or has died, and Kafka ends it at its timeout"
        return Description(TransactionStatus.FOREIGN, what)
    if view is None:
        if lingering.pooled is None and not lingering.prefix.startswith(OUR_PREFIX):
            return Description(TransactionStatus.FOREIGN, "not ours")
        return Description(TransactionStatus.UNKNOWN, "unknown: give --checkpoint")
    if is_foreign:
        theirs = lingering.prefix.startswith(OUR_PREFIX)
        what = "not ours" + ": another pipeline's, by its name" * theirs
        return Description(TransactionStatus.FOREIGN, what)
    if lingering.system == KAFKA and lingering.pooled is None:
        what = "a whole epoch's, not decided: a run is writing it, or a recovery aborts it"
        return Description(TransactionStatus.WHOLE_EPOCH, what)
    if lingering.state == WAITS:
        epoch = int(lingering.transactional_id.rpartition("/")[2])
        what = f"epoch {epoch} is decided and waits for a commit of the table: a run makes it in "
        what += "time, or the next start with this sink"
        return Description(TransactionStatus.DUE, what)
    if view.decided is not None and (due := _named(lingering, view.decided.committables)):
        what = f"named by decided epoch {due.checkpoint_id}: a recovery commits it"
        return Description(TransactionStatus.DUE, what, due, view.decided_path)
    if view.doubt:
        return Description(TransactionStatus.UNKNOWN, f"unknown: {view.doubt}")
    for path, manifest in view.undecided:
        if waiting := _named(lingering, manifest.committables):
            what = (
                f"prepared for epoch {waiting.checkpoint_id}, which is not decided: a run is about "
                f"to, or a recovery aborts it"
            )
            return Description(TransactionStatus.UNNAMED, what, waiting, path)
    what = "named by no decided epoch: a run is writing it, or a recovery aborts it"
    return Description(TransactionStatus.UNNAMED, what)


def recovery(view: CheckpointView) -> str:
    """Return the command for a pipeline whose process is dead; "": a query, which is restarted."""
    if not view.is_loops:
        return ""
    return f"tallystick recover MODULE:PIPELINE --checkpoint {shlex.quote(view.location)}"


def of_prefixes(
    lingering: Iterable[LingeringTransaction],
    view: CheckpointView | None,
    prefixes: Collection[str],
) -> list[LingeringTransaction]:
    """Return the transactions of a pipeline, by its checkpoint, or else by the prefix of the id."""
    if view is not None:
        return [transaction for transaction in lingering if _is_ours(transaction, view)]
    return [
        transaction
        for transaction in lingering
        if transaction.transactional_id in prefixes
        or (transaction.pooled is not None and _begins(transaction.pooled.prefix, prefixes))
    ]


def in_order(
    lingering: Iterable[LingeringTransaction], view: CheckpointView | None
) -> list[LingeringTransaction]:
    """Sort transactions: the pipeline's first, then possible ones, then the others; each by id."""

    def rank(transaction: LingeringTransaction) -> tuple[int, str]:
        if view is not None:
            return (0 if _is_ours(transaction, view) else 1, transaction.transactional_id)
        return (
            int(describe(transaction, None).standing is TransactionStatus.FOREIGN),
            transaction.transactional_id,
        )

    return sorted(lingering, key=rank)


class KafkaCluster:
    """A Kafka cluster whose transactions are listed.

    Args:
        config: how to reach it.
    """

    def __init__(self, config: KafkaConfig) -> None:
        self._client = Client(config)

    def lingering(self) -> tuple[LingeringTransaction, ...]:
        """Return the open transactions of all users, as far as this user may see them.

        Raises:
            BrokerUnavailableError: a broker did not answer, so that something may be missing.
        """
        return tuple(
            LingeringTransaction(
                system=KAFKA,
                transactional_id=transaction.transactional_id,
                name=transaction.name,
                state=transaction.state,
                prepared=transaction.has_offsets,
                producer_id=transaction.producer_id,
                producer_epoch=transaction.producer_epoch,
                begun_ms=transaction.begun_ms,
                timeout_ms=transaction.timeout_ms,
                partitions=transaction.partitions,
            )
            for transaction in kafka_transactions.found_open(self._client)
        )

    def ask(self, transactional_id: str, lineage: str) -> TokenAnswer:
        """See `newest.Ask`: a token that this user may not read is a doubt."""
        try:
            return ask_kafka(self._client, transactional_id, lineage)
        except AuthorizationError as error:
            return TokenAnswer(None, f"what Kafka decided last cannot be read: {error}")

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def lingering_in_postgres(dsn: str, owners: Iterable[Owner]) -> tuple[LingeringTransaction, ...]:
    """Return the prepared and staged transactions in a PostgreSQL database.

    Raises:
        OptionError: psycopg is missing, or the connection is refused.
        RetriableError: there is no answer.
    """
    try:
        from tallystick.postgres import connection, driver, own_tables, schema, transactions
        from tallystick.postgres.outcome import identity
    except ImportError as error:
        if error.name is None or not error.name.startswith("psycopg"):
            raise
        raise OptionError(f"--postgres needs psycopg: {pip_install('postgres')}") from None
    known = tuple(owners)
    session = connection.Session(dsn)
    server, database = session.run("asking who it is", identity)
    details = transactions.Details(
        mode="prepared",
        schema=session.run("looking for its own tables", own_tables.own_schema),
        table="(not known)",
        server=server,
        database=database,
        tokens_id=0,
    )
    table = schema.Table("public", "(not known)", ())
    plan = transactions.PostgresPlan(dsn, table, (), details, Guarantee.EXACTLY_ONCE)

    def state_of(committable: Committable) -> str:
        mode = str(json.loads(committable.details)["mode"])
        return ONGOING if mode == "open" else mode

    sink = driver.PostgresCommitter(session, plan, known[0])
    return _lingering_in(sink, POSTGRES, known, state_of)


def lingering_in_files(path: str, owners: Iterable[Owner]) -> tuple[LingeringTransaction, ...]:
    """Return the hidden drafts in a folder of files, and a table's epochs that are due."""
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
    owners = tuple(owners)
    hidden = _lingering_in(OpenFileSink(plan), FILES, owners, lambda _: "hidden")
    return (*hidden, *_due_in(plan.folder, owners))


def _due_in(folder: "Folder", owners: Iterable[Owner]) -> Iterator[LingeringTransaction]:
    """Yield the due epochs of all lineages: a start of the pipeline publishes them."""
    from tallystick.files.drafts import due_folder, hidden_folder

    for owner in owners:
        siblings = hidden_folder(owner).rpartition("/")[0]
        for lineage in folder.names(siblings):
            due = due_folder(f"{siblings}/{lineage}")
            for name, written_ms in sorted(folder.written_ms(due).items()):
                if name.isdigit():
                    path = f"{due}/{name}"
                    yield LingeringTransaction(
                        FILES, path, "", WAITS, begun_ms=written_ms, sink=owner.sink
                    )


def _lingering_in(
    sink: TwoPhaseCommitSink,
    system: str,
    owners: Iterable[Owner],
    state_of: Callable[[Committable], str],
) -> tuple[LingeringTransaction, ...]:
    try:
        committables = [committable for owner in owners for committable in sink.lingering(owner)]
    finally:
        sink.close()
    return tuple(
        LingeringTransaction(
            system=system,
            transactional_id=committable.name,
            name=committable.name,
            state=state_of(committable),
            prepared=state_of(committable) != ONGOING,
            begun_ms=committable.begun_ms,
            sink=committable.sink,
            committable=committable,
        )
        for committable in committables
    )


def _is_batch(lingering: LingeringTransaction) -> bool:
    name = lingering.transactional_id.removeprefix(OUR_PREFIX)
    return name != lingering.transactional_id and is_batch_name(name)


def _is_ours(lingering: LingeringTransaction, view: CheckpointView) -> bool:
    """True if a Kafka id has the pipeline's prefix; in other systems only its own were listed."""
    return lingering.system != KAFKA or lingering.prefix in view.prefixes


def _begins(prefix: str, prefixes: Collection[str]) -> bool:
    """True if `prefixes` holds the prefix, or the prefix without its part for the checkpoint."""
    return prefix in prefixes or prefix.rpartition("/")[0] in prefixes


def _named(
    lingering: LingeringTransaction, committables: Iterable[Committable]
) -> Committable | None:
    """Return the committable of that name; names in files and tables are unique within a sink."""
    for committable in committables:
        if committable.name == lingering.name and lingering.sink in ("", committable.sink):
            return committable
    return None
