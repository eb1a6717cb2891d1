"""The outcome of a task's transaction: the commit, or the proof that it is committed or lost.

Kafka answers EndTxn until another producer has used the transactional id. After that it says
`fenced`, which proves nothing: the other one's InitProducerId may have come before the commit, or
after it. The token is the proof. It is an offset that a group holds if, and only if, the
transaction that carried it was committed.

Invariants:
    * EndTxn(commit) is repeated unchanged until it is answered; no abort ever follows it.
    * The token counts only if it was read after the coordinator had said that the transaction is
      over. Before, its absence means nothing.
    * The token of a producer epoch is of one transaction: each begins with InitProducerId.
    * The producer that EndTxn answers with is ignored. When epochs are used up it has another
      producer id (KIP-890), and a repeated EndTxn is refused once that id is in use: an answer
      like any other refusal (FLINK-40689).
"""

import json
from dataclasses import asdict, dataclass, fields
from enum import Enum, auto
from functools import partial
from typing import Any, Self

from tallystick.epoch.two_phase import Outcome
from tallystick.errors import (
    UNREADABLE,
    BrokerUnavailableError,
    DataLossError,
    FencedError,
    ManifestError,
)
from tallystick.host.stopwatch import now_ms
from tallystick.kafka import cluster, group_offsets, protocol
from tallystick.kafka.audit import transaction_state
from tallystick.kafka.broker import end_transaction_request
from tallystick.kafka.client import Client, Coordinator
from tallystick.kafka.error_policy import ABORT, FENCED, Attempts
from tallystick.values import ProducedRange, Producer, TopicPartition

REFUSED = FENCED | ABORT
"""EndTxn's errors for a producer epoch that is not, or is no longer, the current one."""
CONTESTED_PATIENCE_MS = 2_000
"""The time to wait for a token that another user's open one is about to replace."""
RETENTION_ASSUMED_MINUTES = 24 * 60
"""The time a cluster surely keeps a token if it does not report it: the shortest default
that Kafka ever had."""
CLOCK_SKEW_MAX_MS = 60_000


@dataclass(frozen=True, slots=True)
class TaskTransaction:
    """The data needed to commit a task's transaction, from any process.

    Args:
        transactional_id: of the pool.
        producer_id: of the producer that Kafka admitted under it.
        producer_epoch: with which epoch.
        transaction_version: the one it was written with; it must be ended with the same.
        cluster_id: of the cluster that holds it.
        lineage: of the checkpoint it belongs to; "" if that is not known, as of all the rest
            below (of a transaction that was found open, and that no manifest names).
        nonce: of the attempt.
        token_group: where its token is.
        token_topic: under which topic.
        token_topic_id: and which topic of that name.
        produced: what was written.
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int
    transaction_version: int
    cluster_id: str
    lineage: str = ""
    nonce: str = ""
    token_group: str = ""
    token_topic: str = ""
    token_topic_id: str = ""
    produced: tuple[ProducedRange, ...] = ()

    def __str__(self) -> str:
        return (
            f"transaction {self.transactional_id!r} (producer {self.producer_id}, epoch "
            f"{self.producer_epoch})"
        )

    @property
    def name(self) -> str:
        """The name of the transaction, unique in the cluster."""
        return self.producer.transaction_name

    @property
    def producer(self) -> Producer:
        """The producer that wrote it."""
        return Producer(self.transactional_id, self.producer_id, self.producer_epoch)

    def to_json(self) -> str:
        """Return the transaction as the text of a committable's details."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read back what `to_json` made.

        Raises:
            ManifestError: it is no such text.
        """
        try:
            values = json.loads(text)
            produced = tuple(ProducedRange(**entry) for entry in values.pop("produced"))
            transaction = cls(**values, produced=produced)
            _check_types(transaction, *transaction.produced)
        except UNREADABLE as error:
            raise ManifestError(
                f"Kafka: a manifest describes a task's transaction as {text[:200]!r}, which no "
                f"release writes: it was edited, or made by somebody else. Nothing was changed. "
                f"Put a whole copy of the checkpoint back."
            ) from error
        return transaction

    def token_metadata(self, task: int) -> str:
        """Return the content of the token beside its offset."""
        content = {
            "lineage": self.lineage,
            "task": task,
            "nonce": self.nonce,
            "producer_id": self.producer_id,
            "producer_epoch": self.producer_epoch,
        }
        return json.dumps(content, sort_keys=True)


@dataclass(frozen=True, slots=True)
class TaskToken:
    """The token in a group: the transaction committed last under a transactional id.

    Args:
        next_checkpoint_id: the offset: the epoch after the committed one.
        lineage: of the checkpoint, as the other fields; "" where other software committed it.
    """

    next_checkpoint_id: int
    lineage: str = ""
    nonce: str = ""
    producer_id: int = -1
    producer_epoch: int = -1

    @classmethod
    def read(cls, offset: int, metadata: str) -> Self:
        """Parse what Kafka holds; metadata of other software stands for no token."""
        try:
            values = json.loads(metadata)
            return cls(
                offset,
                str(values["lineage"]),
                str(values["nonce"]),
                int(values["producer_id"]),
                int(values["producer_epoch"]),
            )
        except UNREADABLE:
            return cls(offset)


def _check_types(*values: TaskTransaction | ProducedRange) -> None:
    """Raise TypeError where a text or a number is not what the class says."""
    for value in values:
        for field in fields(value):
            if field.type in (int, str) and type(getattr(value, field.name)) is not field.type:
                raise TypeError(f"{field.name}: expected {field.type}")


class Fate(Enum):
    """The coordinator's account of one producer epoch's transaction."""

    OPEN = auto()
    ENDING = auto()
    """A transaction under this id is being ended by another user: ask again."""
    OVER = auto()
    CONTESTED = auto()
    """Over, and the next user of the id has a transaction open."""
    UNKNOWN = auto()
    """The coordinator has forgotten it, or never knew."""


def fate_of(transaction: TaskTransaction, state: Any) -> Fate:
    """Read a coordinator's answer; None: it knows nothing of the id."""
    if state is None:
        return Fate.UNKNOWN
    same_id = int(state.producer_id) == transaction.producer_id
    epoch = int(state.producer_epoch)
    if same_id and epoch < transaction.producer_epoch:
        return Fate.UNKNOWN  # a coordinator that has lost the end of its log
    if state.transaction_state == "Ongoing":
        ours = same_id and epoch == transaction.producer_epoch
        return Fate.OPEN if ours else Fate.CONTESTED
    if state.transaction_state.startswith("Prepare"):
        return Fate.ENDING
    return Fate.OVER


def commit(
    client: Client, transaction: TaskTransaction, checkpoint_id: int, age_ms: int
) -> Outcome:
    """Commit a prepared transaction, or prove its outcome if another producer has fenced it.

    Args:
        client: of its cluster.
        transaction: which.
        checkpoint_id: the epoch it belongs to.
        age_ms: for how long it has existed.

    Raises:
        BrokerUnavailableError: the outcome is unknown for now.
        DataLossError: it can never be known.
        FencedError: another run has gone on after it.
    """
    attempts = Attempts(client.deadline(), "EndTxn", str(transaction))
    while True:
        refusal = end_transaction(client, transaction, committed=True)
        if refusal is None:
            return Outcome.COMMITTED
        state = transaction_state(client, transaction.transactional_id)
        fate = fate_of(transaction, state)
        if fate in (Fate.OPEN, Fate.ENDING):
            attempts.pause(f"{refusal}, while the coordinator says {state.transaction_state}")
            continue
        if not transaction.nonce:
            raise DataLossError(
                f"{transaction} is over ({refusal}), and no manifest says by which token its "
                f"outcome can be told: it was found open, and ended since by somebody else."
            )
        token = _token_after(client, transaction, fate)
        doubt = "" if token else _doubt(client, transaction, fate, age_ms)
        return judge(transaction, checkpoint_id, token, doubt)


def judge(
    transaction: TaskTransaction, checkpoint_id: int, token: TaskToken | None, doubt: str
) -> Outcome:
    """Return the outcome that a token proves for a finished transaction.

    Args:
        transaction: which.
        checkpoint_id: the epoch it belongs to.
        token: as read after the transaction was over.
        doubt: why a token that is absent may have been there; "" if it cannot.

    Raises:
        DataLossError: neither outcome can be proved.
        FencedError: another run has gone on from the same checkpoint.
    """
    if token is None:
        if doubt:
            raise _unknowable(transaction, doubt)
        return Outcome.LOST
    if token.nonce == transaction.nonce:
        return Outcome.COMMITTED
    if token.lineage == transaction.lineage and token.next_checkpoint_id > checkpoint_id:
        raise FencedError(
            f"{transaction} of epoch {checkpoint_id}: under its transactional id Kafka committed "
            f"epoch {token.next_checkpoint_id - 1} of the same checkpoint, by another attempt: "
            f"another run has gone on from it. This run stops; let only one run use a checkpoint."
        )
    same_id = token.producer_id == transaction.producer_id
    if same_id and token.producer_epoch < transaction.producer_epoch:
        return Outcome.LOST  # Kafka held it before this transaction began, and holds it still
    if token.lineage == transaction.lineage and not same_id:
        return Outcome.LOST  # an earlier epoch's: the tokens of a checkpoint only rise
    raise _unknowable(
        transaction,
        f"Kafka holds a token of epoch {token.next_checkpoint_id - 1} of lineage "
        f"{token.lineage or 'unknown'!r} under the same id, which may have taken the place of its "
        f"token (ours is of epoch {checkpoint_id} of lineage {transaction.lineage!r})",
    )


def check_newest(client: Client, transaction: TaskTransaction, checkpoint_id: int) -> None:
    """Check that the checkpoint committed no later epoch under the id of a transaction.

    Args:
        client: of its cluster.
        transaction: of the newest epoch that the checkpoint knows.
        checkpoint_id: that epoch.

    Raises:
        FencedError: Kafka committed a later epoch of the same checkpoint.
    """
    token = read_token(client, transaction, stable=False)
    if token is None or token.lineage != transaction.lineage:
        return
    if token.next_checkpoint_id > checkpoint_id + 1:
        raise FencedError(
            f"the checkpoint's newest epoch is {checkpoint_id}, and under transactional id "
            f"{transaction.transactional_id!r} Kafka committed epoch "
            f"{token.next_checkpoint_id - 1} of it: another run has gone on from a copy of this "
            f"checkpoint, or this one was set back. Going on would write the epochs between a "
            f"second time. Use the newest copy; or make a savepoint of this one, and restore it "
            f"into a new checkpoint, stating that they are repeated."
        )


def _unknowable(transaction: TaskTransaction, doubt: str) -> DataLossError:
    return DataLossError(
        f"whether {transaction} was committed cannot be known: {doubt}. Compare by hand: read "
        f"{written(transaction)} with isolation.level=read_committed. If those records are there, "
        f"it was committed, and the checkpoint may go on; if they are not, they are lost, and the "
        f"epoch must be run again from an earlier checkpoint."
    )


def written(transaction: TaskTransaction) -> str:
    """Describe what a transaction wrote."""
    if not transaction.produced:
        return "what it wrote (not known)"
    total = sum(rows.record_count for rows in transaction.produced)
    places = ", ".join(
        f"{rows.topic_partition} offsets {rows.first_offset}..{rows.last_offset}"
        for rows in transaction.produced
    )
    return f"{total} records in {places}"


def _token_after(client: Client, transaction: TaskTransaction, fate: Fate) -> TaskToken | None:
    """Return the token, now that the transaction is over.

    Where the next user of the id has staged a token of its own, the stable one is not available
    before that transaction ends, which may be the one that this commit is waited with. Kafka let
    that user in only when all markers of ours were written; so the plain answer, which hides the
    next one's token, is what is asked for. If it is not ours it is asked for again, a while later:
    brokers before 4.0 take a marker's offsets over a moment after they have written it.
    """
    if fate is not Fate.CONTESTED:
        return read_token(client, transaction)
    token = read_token(client, transaction, stable=False)
    if token is not None and token.nonce == transaction.nonce:
        return token
    try:
        return read_token(client, transaction, deadline=client.deadline(CONTESTED_PATIENCE_MS))
    except BrokerUnavailableError:
        return read_token(client, transaction, stable=False)


def _doubt(client: Client, transaction: TaskTransaction, fate: Fate, age_ms: int) -> str:
    """Return the reason why a missing token may have existed."""
    if fate is Fate.UNKNOWN:
        return (
            "the transaction coordinator knows nothing of it, and Kafka holds no token (both are "
            "kept for 7 days by default: transactional.id.expiration.ms, offsets.retention.minutes)"
        )
    configured = cluster.cluster_facts(client).offsets_retention_minutes
    minutes = RETENTION_ASSUMED_MINUTES if configured is None else configured
    if age_ms + CLOCK_SKEW_MAX_MS >= minutes * 60_000:
        return (
            f"Kafka holds no token, and keeps none for longer than {minutes} minutes "
            f"(offsets.retention.minutes); the transaction was begun {age_ms // 60_000} minutes ago"
        )
    topics = cluster.describe_topics(client, [transaction.token_topic])
    topic = topics.get(transaction.token_topic)
    if topic is None or topic.topic_id != transaction.token_topic_id:
        what = "is gone" if topic is None else "was deleted and created again"
        return f"topic {transaction.token_topic!r}, which its token was kept under, {what}"
    return ""


# --- requests -------------------------------------------------------------------------------------


def end_transaction(
    client: Client,
    transaction: TaskTransaction,
    *,
    committed: bool,
    deadline: float | None = None,
) -> str | None:
    """Send EndTxn until it is answered; return the name of Kafka's refusal, or None when done.

    Raises:
        BrokerUnavailableError: no answer; whether Kafka acted is unknown.
        AuthorizationError: WRITE on the transactional id is missing.
    """
    response = client.call(
        partial(
            end_transaction_request,
            transaction.producer,
            transaction.transaction_version,
            committed=committed,
        ),
        Coordinator("transaction", transaction.transactional_id),
        lambda response: [(response.error_code, str(transaction))],
        deadline=deadline,
        accept=REFUSED,
    )
    return protocol.error_name(response.error_code)


def read_token(
    client: Client,
    transaction: TaskTransaction,
    *,
    stable: bool = True,
    deadline: float | None = None,
) -> TaskToken | None:
    """Return the token that Kafka holds in a transaction's token group; None: there is none.

    Args:
        client: of the cluster.
        transaction: whose group and topic are asked for.
        stable: wait for the end of a transaction that has staged another one (KIP-447).
        deadline: as in `Client.call`.
    """
    partition = TopicPartition(transaction.token_topic, 0)
    offsets = group_offsets.fetch(
        client, transaction.token_group, [partition], stable=stable, deadline=deadline
    )
    return TaskToken.read(*offsets[partition]) if partition in offsets else None


def age_ms(begun_ms: int) -> int:
    """Return the age of something that began at a time in ms since 1970."""
    return max(0, now_ms() - begun_ms)
