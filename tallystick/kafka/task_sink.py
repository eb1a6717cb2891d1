"""Kafka with one transaction per task: the driver's side, `epoch.two_phase.TwoPhaseCommitSink`.

Each attempt of a task writes into a transaction of its own and leaves it open; the driver commits
it when the checkpoint is decided, from the committable alone. So no rows travel between tasks, and
retries and speculation do no harm. The price: part of an epoch is visible for a moment, and Kafka
aborts what is not committed within the transaction timeout.

Rights that the user of the connection needs, prefixed on `id_prefix`:
    TransactionalId WRITE       all of it; DESCRIBE, which listing asks for, is implied
    Group READ                  the tokens: their groups are named after the ids
    Topic WRITE, Topic READ     the output; READ on the token topic is for staging tokens
    Cluster DESCRIBE_CONFIGS    optional: the checks at the start
    TransactionalId WRITE       on earlier prefixes too, for as long as anything may be open there

Source: the behaviours of Flink's KafkaSink, KafkaCommitter and FLIP-511.
"""

import logging
from collections.abc import Iterable, Mapping

from tallystick.codec.rows import RowLayout
from tallystick.epoch.transactional_ids import (
    SEPARATOR,
    PooledId,
    token_group,
    transactional_id,
)
from tallystick.epoch.two_phase import (
    Committable,
    Guarantee,
    Outcome,
    Owner,
    RunFacts,
    Timeout,
)
from tallystick.errors import EpochAbortedError, OptionError
from tallystick.kafka import cluster, outcome
from tallystick.kafka.audit import transaction_state
from tallystick.kafka.broker_settings import check_broker_settings
from tallystick.kafka.client import Client
from tallystick.kafka.outcome import TaskTransaction, written
from tallystick.kafka.output import KafkaOutput
from tallystick.kafka.preflight import (
    Right,
    check,
    check_recovery,
    missing_rights,
    refuse,
    rights_to_commit,
    rights_to_write,
)
from tallystick.kafka.protocol import topic_id_text
from tallystick.kafka.task_transaction import TaskPlan, close_idle
from tallystick.kafka.transactions import Finder, TransactionDescription, give_up

logger = logging.getLogger(__name__)

COMMITS_AT_ONCE = 8
"""Each has connections of its own: an epoch of 200 tasks must not wait for one coordinator."""
EPOCH_UNKNOWN = -1
"""The `checkpoint_id` of what is found open: Kafka does not show a token before its commit."""


class KafkaTaskSink:
    """The driver's side of a Kafka sink with one transaction per task, for one run.

    Whatever its guarantee is now, it settles what an earlier run left under another guarantee.

    Args:
        output: what the user chose.
        owner: which sink of which pipeline.
        facts: of the run.
        id_prefix: of the transactional ids, without the sink's uid.
        earlier_prefixes: those that the pipeline had before: what is open there is aborted.

    Raises:
        OptionError: something cannot work; all problems are named.
    """

    def __init__(
        self,
        output: KafkaOutput,
        owner: Owner,
        facts: RunFacts,
        *,
        id_prefix: str,
        earlier_prefixes: frozenset[str] = frozenset(),
    ) -> None:
        self._output = output
        self._owner = owner
        self._id_prefix = id_prefix
        self._client = Client(output.config)
        self._limits = cluster.BatchLimits(self._client)
        self._clients = [self._client]  # all that there are, and those that no commit uses
        self._idle = [self._client]
        self._finder = Finder(self._client, earlier_prefixes | {id_prefix}, owner.sink)
        try:
            self._check(facts)
        except BaseException:
            self.close()
            raise

    @property
    def timeout(self) -> Timeout | None:
        """See `TwoPhaseCommitSink.timeout`."""
        if self._output.guarantee is not Guarantee.EXACTLY_ONCE:
            return None
        return self._output.timeout

    def plan(self) -> TaskPlan:
        """See `TwoPhaseCommitSink.plan`; the partitions are those that the topics have now.

        Each task asks for the cluster's transaction.version itself when it begins.
        """
        output = self._output
        counts = self._partition_counts()
        dead_letters = None
        if (topic := output.dead_letter_topic) is not None:
            own = cluster.partition_counts(self._client, [topic])
            dead_letters = RowLayout(own, topic, batch_limits=self._limits.of(own))
        cluster.partition_counts(self._client, [output.token_topic])
        return TaskPlan(
            output=output,
            cluster_id=self._client.cluster_id,
            id_prefix=self._id_prefix,
            rows=output.rows(counts, self._limits.of(counts)),
            dead_letters=dead_letters,
            token_topic_id=topic_id_text(self._client.topic_ids.get(output.token_topic)),
        )

    def commit(self, committable: Committable) -> Outcome:
        """See `TwoPhaseCommitSink.commit`.

        Raises:
            OptionError: it is a transaction of another cluster.
            BrokerUnavailableError: the outcome is unknown for now.
            DataLossError: the outcome can never be known.
            FencedError: another run has gone on from the same checkpoint.
        """
        return self._commit(self._client, committable)

    @property
    def commits_at_once(self) -> int:
        """See `participants.CommitsBeside`."""
        return COMMITS_AT_ONCE

    @property
    def commit_patience_s(self) -> float:
        """See `participants.CommitsBeside`."""
        return self._output.config.delivery_timeout_ms / 1000

    def commit_by(self, committable: Committable, until: float) -> Outcome:
        """See `participants.CommitsBeside`: a coordinator that hangs holds up its own ids only."""
        try:
            client = self._idle.pop()
        except IndexError:
            client = Client(self._output.config)
            self._clients.append(client)
        try:
            with client.within(until):
                return self._commit(client, committable)
        finally:
            self._idle.append(client)

    def _commit(self, client: Client, committable: Committable) -> Outcome:
        transaction = self._here(committable, client)
        age_ms = outcome.age_ms(committable.begun_ms)
        return outcome.commit(client, transaction, committable.checkpoint_id, age_ms)

    def abort(self, committable: Committable) -> None:
        """See `TwoPhaseCommitSink.abort`; the producer epoch's successors are left alone."""
        transaction = self._here(committable)
        give_up(self._client, transaction, self._output.transaction_timeout_ms)

    def abort_by(self, committable: Committable, until: float) -> None:
        """See `participants.AbortsBy`."""
        with self._client.within(until):
            self.abort(committable)

    def check_prepared(self, committable: Committable) -> None:
        """See `participants.KnowsPrepared`: its transaction is open still.

        Raises:
            EpochAbortedError: it timed out, or a late attempt of its task aborted it.
        """
        transaction = TaskTransaction.from_json(committable.details)
        state = transaction_state(self._client, transaction.transactional_id)
        if outcome.fate_of(transaction, state) is not outcome.Fate.OPEN:
            raise EpochAbortedError(
                f"{transaction} of epoch {committable.checkpoint_id} is no longer open before "
                f"the epoch is decided: it timed out, or a late attempt of its task took its id. "
                f"Nothing is lost; the epoch runs again"
            )

    def check_newest(self, committable: Committable) -> None:
        """See `participants.KnowsNewest`: the token under its id must not be of a later epoch.

        Raises:
            FencedError: a copy of the checkpoint has gone on, or this one was set back.
            BrokerUnavailableError: the deadline passed.
        """
        transaction = TaskTransaction.from_json(committable.details)
        if transaction.cluster_id == (self._client.cluster_id or cluster.cluster_id(self._client)):
            outcome.check_newest(self._client, transaction, committable.checkpoint_id)

    def lingering(self, owner: Owner) -> Iterable[Committable]:
        """See `TwoPhaseCommitSink.lingering`; transactions that are ending already are left out."""
        assert owner.sink == self._owner.sink, (owner, self._owner)
        self._limits.forget()  # an epoch may have failed
        open_transactions = self._finder.open_transactions()
        if not open_transactions:
            return ()
        version = cluster.transaction_version(self._client) or 0
        cluster_id = cluster.cluster_id(self._client)
        return tuple(
            _open_committable(*entry, version, cluster_id) for entry in open_transactions.items()
        )

    def describe(self, committable: Committable) -> str:
        """See `TwoPhaseCommitSink.describe`."""
        transaction = TaskTransaction.from_json(committable.details)
        return f"{transaction}: {written(transaction)}"

    def close(self) -> None:
        """See `TwoPhaseCommitSink.close`; what is open in Kafka stays open."""
        for client in self._clients:
            client.close()
        close_idle(self._output.config)

    def _here(self, committable: Committable, client: Client | None = None) -> TaskTransaction:
        transaction = TaskTransaction.from_json(committable.details)
        client = client or self._client
        here = client.cluster_id or cluster.cluster_id(client)
        if transaction.cluster_id != here:
            raise OptionError(
                f"{transaction} of sink {committable.sink!r} is one of cluster "
                f"{transaction.cluster_id!r}, and bootstrap.servers "
                f"{self._output.config.bootstrap_servers} is cluster {here!r}, which cannot tell "
                f"what became of it. Start once with the servers of the former, so that it is "
                f"settled, and change them then."
            )
        return transaction

    def _partition_counts(self) -> Mapping[str, int]:
        topic = self._output.topic
        topics = cluster.topics(self._client) if topic is None else [topic]
        return cluster.partition_counts(self._client, topics)

    def _check(self, facts: RunFacts) -> None:
        output = self._output
        wanted = rights_of(output, self._owner, self._id_prefix)
        missing = () if facts.are_checked else missing_rights(self._client, wanted)
        if not missing:
            cluster.partition_counts(self._client, output.topics | {output.token_topic})
        problems: list[str] = []
        if output.guarantee is Guarantee.EXACTLY_ONCE:
            # Speculation does no harm: each attempt has a transaction of its own.
            interval_ms = facts.trigger_interval_ms
            topics = () if missing or facts.are_checked else output.topics
            cluster_facts = cluster.cluster_facts(self._client, topics)
            findings = check(
                cluster_facts, output, trigger_interval_ms=interval_ms, accepted=facts.accepted
            )
            if not facts.are_checked:
                concerns = (
                    finding
                    for finding in check_broker_settings(self._client, cluster_facts)
                    if finding.is_logged
                )
                for warning in (*findings.warnings, *concerns):
                    logger.warning("%s", warning)
            problems = [*findings.problems, *check_recovery(output, interval_ms)]
        refuse(problems, missing, output.config.sasl_username)


def rights_of(output: KafkaOutput, owner: Owner, id_prefix: str) -> tuple[Right, ...]:
    """Return the rights that writing with transactions of tasks takes.

    Those of the first task's id: all ids have one prefix, and so the same rights.

    Args:
        output: what the user chose.
        owner: whose transactions they are.
        id_prefix: of the checkpoint's transactional ids.
    """
    wanted = rights_to_write(output.topics)
    if output.guarantee is not Guarantee.EXACTLY_ONCE:
        return wanted
    first = transactional_id(id_prefix, owner.sink, task=0, slot=0)
    of_pipeline, separator, _ = id_prefix.rpartition(SEPARATOR)  # of any checkpoint
    prefix = f"{of_pipeline}{separator}" or id_prefix
    return (
        *wanted,
        *rights_to_commit(first, token_group(first), output.token_topic, prefix=prefix),
    )


def _open_committable(
    pooled_id: PooledId,
    description: TransactionDescription,
    transaction_version: int,
    cluster_id: str,
) -> Committable:
    """Return the committable of a transaction that was found open."""
    transaction = TaskTransaction(
        transactional_id=description.transactional_id,
        producer_id=description.producer_id,
        producer_epoch=description.producer_epoch,
        transaction_version=transaction_version,
        cluster_id=cluster_id,
    )
    return Committable(
        sink=pooled_id.sink,
        checkpoint_id=EPOCH_UNKNOWN,
        task=pooled_id.task,
        name=transaction.name,
        record_count=0,
        begun_ms=description.begun_ms,
        details=transaction.to_json(),
    )
