"""Checks of cluster, rights, topics and settings before an exactly-once pipeline may start.

Every problem is found before anything runs, and all are raised at once. Where a cluster does not
say (no ACL for it), the check is left out and named, so that its absence is known.

`Right` is what a user of Kafka needs, as a plain value, and how to grant it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tallystick.errors import AuthorizationError, OptionError
from tallystick.kafka import protocol
from tallystick.kafka.client import AnyBroker, Client, Coordinator
from tallystick.kafka.config import failover_ms
from tallystick.kafka.error_policy import ABORT, FENCED

if TYPE_CHECKING:  # it loads compiled kernels, for which `tallystick topic` does not wait
    from tallystick.kafka.output import KafkaOutput

TOPIC, GROUP, TRANSACTIONAL_ID = "topic", "group", "transactional-id"
READ, WRITE = "READ", "WRITE"
REQUEST_VERSIONS = {"InitProducerId": 3, "OffsetFetch": 7, "TxnOffsetCommit": 3, "EndTxn": 1}
"""API -> lowest version with what the protocol needs (KIP-360, KIP-447)."""
REQUESTS_NEEDED = frozenset(
    {
        *REQUEST_VERSIONS,
        "Produce",
        "AddPartitionsToTxn",
        "AddOffsetsToTxn",
        "DescribeProducers",
        "DescribeTransactions",
    }
)
"""The APIs of transactions, and those that count an epoch's rows and prove its end."""
UNVERIFIED = "unverified-partitions"
"""The word by which a user accepts brokers of which nothing says that they verify partitions."""
METADATA_VERSION_MIN = 12
"""The first `metadata.version` of Kafka 3.6, which verifies partitions unless it is told not to."""
OPERATION_CODES = {READ: 3, WRITE: 4}
"""Kafka's AclOperation."""
Operations = Collection[int]
EVERYTHING: Operations = frozenset(OPERATION_CODES.values())
"""Also where a broker does not say: its refusal comes with the first request then."""
NOTHING: Operations = frozenset()
NOT_TOLD = -(1 << 31)
NO_PRODUCER = -1
NO_TOPIC = frozenset({"UnknownTopicOrPartition", "InvalidTopic"})
"""Missing topics are reported elsewhere."""
STATE_TOPIC = "__transaction_state"
RECORD_BYTES_FIXED = 200
"""The size of the batch, the record, the transactional id and the producer's numbers, about."""
RECORD_BYTES_OF_TOPIC, RECORD_BYTES_OF_PARTITION = 8, 4


@dataclass(frozen=True, slots=True, order=True)
class Right:
    """One operation on one resource.

    Args:
        resource: TOPIC, GROUP or TRANSACTIONAL_ID, as `kafka-acls` spells them.
        name: of the resource.
        operation: READ or WRITE.
        prefix: what to grant the right on, if all names in use begin with it; "": the name itself.
    """

    resource: str
    name: str
    operation: str
    prefix: str = ""

    def __post_init__(self) -> None:
        assert self.name.startswith(self.prefix), self

    def __str__(self) -> str:
        what = self.resource.replace("-", " ")
        if self.prefix:
            return f"{self.operation} on every {what} that begins with {self.prefix!r}"
        return f"{self.operation} on {what} {self.name!r}"

    @property
    def grant(self) -> str:
        """The arguments with which `kafka-acls --add` grants the right."""
        words = f"--operation {self.operation.capitalize()} --{self.resource} "
        if self.prefix:
            return f"{words}'{self.prefix}' --resource-pattern-type prefixed"
        return f"{words}'{self.name}'"


def rights_to_read(topics: Iterable[str]) -> tuple[Right, ...]:
    """Return the rights to read topics."""
    return tuple(Right(TOPIC, topic, READ) for topic in sorted(topics))


def rights_to_write(topics: Iterable[str]) -> tuple[Right, ...]:
    """Return the rights to write topics."""
    return tuple(Right(TOPIC, topic, WRITE) for topic in sorted(topics))


def rights_to_commit(
    transactional_id: str, token_group: str, token_topic: str, *, prefix: str = ""
) -> tuple[Right, ...]:
    """Return the rights to commit transactions with a token.

    Args:
        transactional_id: its id.
        token_group: of the token.
        token_topic: under which the token is kept.
        prefix: of id and group, where they are one of many; "": they are the only ones.
    """
    return (
        Right(TRANSACTIONAL_ID, transactional_id, WRITE, prefix),
        Right(GROUP, token_group, READ, prefix),
        *rights_to_read([token_topic]),
    )


def rights_to_show(group: str, topics: Iterable[str]) -> tuple[Right, ...]:
    """Return the rights to commit positions to a consumer group."""
    return (Right(GROUP, group, READ), *rights_to_read(topics))


def grants_message(missing: Sequence[Right], user: str) -> str:
    """Return a message with a user's missing rights and the command to grant them.

    Args:
        missing: one at least.
        user: the name of the login; "": it has none.
    """
    wanted = ", ".join(map(str, sorted(missing)))
    grants = "; ".join(right.grant for right in sorted(missing))
    who = f"user {user!r}" if user else "the user of this connection"
    principal = f"User:{user}" if user else "User:<its name>"
    return (
        f"{who} lacks {wanted}. Grant it with kafka-acls --add --allow-principal {principal}, once "
        f"for each of: {grants}"
    )


class Replication(NamedTuple):
    """The copies of a topic's partitions, of the partition that has the fewest.

    Args:
        brokers: how many the cluster has.
        replicas: copies that it should have.
        in_sync: copies that are up to date; 0: the partition has no leader.
        in_sync_min: `min.insync.replicas`; None: not known, without DESCRIBE_CONFIGS.
    """

    brokers: int
    replicas: int
    in_sync: int
    in_sync_min: int | None


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """The settings that a cluster reports; None for each setting not reported.

    Args:
        transaction_version: the finalized feature `transaction.version` (KIP-890); 0 where the
            cluster has features but not this one.
        api_versions: the highest version that brokers speak, for each API that exactly-once needs;
            APIs that are not spoken at all are absent.
        transaction_timeout_max_ms: `transaction.max.timeout.ms`.
        partition_verification: `transaction.partition.verification.enable`; None also for brokers
            that answer without it: Kafka before 3.6, and other brokers.
        offsets_retention_minutes: `offsets.retention.minutes`.
        message_bytes_max: `message.max.bytes`.
        session_timeout_ms: `broker.session.timeout.ms`: after how long a broker counts as dead.
        metadata_version: the highest `metadata.version` that the brokers know, which shows their
            release; None for brokers on ZooKeeper.
        replication: the copies of the topics that were asked about.
        partition_counts: the partitions of the topics that were asked about.
        transaction_record_max: the largest record batch that `__transaction_state` takes.
    """

    transaction_version: int | None
    api_versions: Mapping[str, int]
    transaction_timeout_max_ms: int | None
    partition_verification: bool | None
    offsets_retention_minutes: int | None
    message_bytes_max: int | None
    session_timeout_ms: int | None
    metadata_version: int | None = None
    replication: Mapping[str, Replication] = field(default_factory=dict)
    partition_counts: Mapping[str, int] = field(default_factory=dict)
    transaction_record_max: int | None = None


@dataclass(frozen=True, slots=True)
class Findings:
    """Problems forbid the start; warnings are logged."""

    problems: tuple[str, ...]
    warnings: tuple[str, ...]


def check(
    facts: ClusterFacts,
    output: "KafkaOutput",
    *,
    trigger_interval_ms: int | None,
    speculation: bool = False,
    accepted: frozenset[str] = frozenset(),
) -> Findings:
    """Compare the facts of a cluster with the needs of a sink's settings.

    Args:
        facts: of the cluster.
        output: what the user chose.
        trigger_interval_ms: the time between two epochs; None: they follow each other at once.
        speculation: whether attempts of a task that share a transaction may run side by side.
        accepted: decisions that the user stated.
    """
    interval_ms = trigger_interval_ms or 0
    problems = [*_broker_problems(facts), *_output_problems(facts, output, interval_ms)]
    warnings = [*_warnings(facts, output, interval_ms)]
    if unverified := _unverified(facts):
        is_accepted = UNVERIFIED in accepted or _is_new_enough(facts)
        (warnings if is_accepted else problems).append(unverified)
    if speculation:
        problems.append(
            "spark.speculation is on: two attempts of a writing task would share one transaction, "
            "and Kafka cannot tell them apart. Start Spark with spark.speculation=false"
        )
    return Findings(tuple(problems), tuple(warnings))


def refuse(problems: Iterable[str], missing: Sequence[Right] = (), user: str = "") -> None:
    """Raise all problems and missing rights as one error, if there are any.

    Args:
        problems: in words.
        missing: rights that the user of the connection does not have.
        user: the name of the login; "": it has none.

    Raises:
        OptionError: there are problems.
        AuthorizationError: rights are missing; this comes before other problems.
    """
    text = "; ".join(problems)
    if missing:
        raise AuthorizationError("; ".join(filter(None, (text, grants_message(missing, user)))))
    if text:
        raise OptionError(text)


def check_all(checks: Iterable[Callable[[], None]]) -> None:
    """Make every check, and raise all their refusals as one error.

    Raises:
        AuthorizationError: a check raised one.
        OptionError: another check refuses the start.
    """
    problems: list[OptionError] = []
    for check in checks:
        try:
            check()
        except OptionError as error:
            problems.append(error)
    if not problems:
        return
    if len(problems) == 1:
        raise problems[0]
    is_right = any(isinstance(error, AuthorizationError) for error in problems)
    kind = AuthorizationError if is_right else OptionError
    texts = dict.fromkeys(str(error).rstrip(".") for error in problems)  # two may lack one right
    raise kind("; ".join(texts))


def _broker_problems(facts: ClusterFacts) -> Iterator[str]:
    for api, lowest in REQUEST_VERSIONS.items():
        highest = facts.api_versions.get(api)
        if highest is not None and highest < lowest:
            yield (
                f"the brokers know {api} up to version {highest}, version {lowest} is needed: "
                f"upgrade them to Kafka 3.6 or later"
            )
    if lacking := sorted(REQUESTS_NEEDED - facts.api_versions.keys()):
        yield (
            f"the brokers do not answer {', '.join(lacking)}, without which no epoch can be "
            f"committed exactly once. Use a broker that does (docs/brokers.md), or another "
            f"guarantee: KafkaSink(guarantee='at_least_once', transactions='task')"
        )
    if facts.partition_verification is False or _is_too_old(facts):
        yield (
            "the brokers do not verify that a partition belongs to a transaction "
            "(transaction.partition.verification.enable is false, or they are older than Kafka "
            f"3.6): {STRAYS}. Turn it on, or upgrade"
        )


STRAYS = "a stray write of an earlier run would be committed with the next epoch"


def _is_new_enough(facts: ClusterFacts) -> bool:
    return (facts.metadata_version or 0) >= METADATA_VERSION_MIN


def _is_too_old(facts: ClusterFacts) -> bool:
    return facts.metadata_version is not None and not _is_new_enough(facts)


def _unverified(facts: ClusterFacts) -> str | None:
    """Return the risk of brokers that do not say whether they verify partitions; None: they do."""
    if facts.partition_verification is not None or _is_too_old(facts):
        return None
    unknown = (
        "the brokers do not say whether they verify that a partition belongs to a transaction: "
        "they answer without transaction.partition.verification.enable, or it needs "
        "DESCRIBE_CONFIGS on the cluster"
    )
    if _is_new_enough(facts):
        return f"{unknown}. Kafka 3.6 and later do by default; if it is turned off, {STRAYS}"
    return (
        f"{unknown}; nor do they say that they are Kafka 3.6 or later, which does by default. "
        f"Where they do not, {STRAYS}. docs/brokers.md has what is known of brokers; where you "
        f"take the risk, each start has accept=[{UNVERIFIED!r}]"
    )


def _output_problems(facts: ClusterFacts, output: "KafkaOutput", interval_ms: int) -> Iterator[str]:
    timeout, most = output.transaction_timeout_ms, facts.transaction_timeout_max_ms
    if most is not None and timeout > most:
        yield (
            f"transaction_timeout_ms is {timeout}, the brokers allow {most} "
            f"(transaction.max.timeout.ms): lower the one or raise the other"
        )
    if output.config.delivery_timeout_ms >= timeout:
        yield (
            f"kafka.delivery.timeout.ms is {output.config.delivery_timeout_ms}, "
            f"transaction_timeout_ms {timeout}: a transaction must outlive a single call, so the "
            f"first must be the smaller. Lower it, or leave it out: then it follows from "
            f"transaction_timeout_ms"
        )
    minutes = facts.offsets_retention_minutes
    if minutes is not None and interval_ms >= minutes * 60_000:
        yield (
            f"the trigger interval is {interval_ms} ms, and Kafka forgets which "
            f"epoch was committed after {minutes} minutes (offsets.retention.minutes): use a "
            f"shorter trigger or a longer retention"
        )


def _warnings(facts: ClusterFacts, output: "KafkaOutput", interval_ms: int) -> Iterator[str]:
    if beyond := transaction_record_warning(facts.partition_counts, facts.transaction_record_max):
        yield beyond
    if facts.transaction_timeout_max_ms is None:
        yield (
            "the brokers do not say which transaction timeout they allow (needs DESCRIBE_CONFIGS "
            "on the cluster): it must be at least transaction_timeout_ms"
        )
    session_ms, call_ms = facts.session_timeout_ms, output.config.delivery_timeout_ms
    if session_ms is not None and call_ms <= failover_ms(session_ms):
        yield (
            f"kafka.delivery.timeout.ms is {call_ms}, and the failover of a broker may take "
            f"{failover_ms(session_ms)} ms (broker.session.timeout.ms is {session_ms}): each one "
            f"aborts an epoch, or ends the query. Use a longer transaction_timeout_ms and "
            f"kafka.delivery.timeout.ms"
        )
    if interval_ms > output.transaction_timeout_ms:
        yield (
            f"the trigger interval ({interval_ms} ms) is longer than transaction_timeout_ms "
            f"({output.transaction_timeout_ms}): an epoch that takes as long to write as its "
            f"data took to come is aborted and run again. Trigger more often, or raise "
            f"transaction_timeout_ms"
        )


def check_recovery(output: "KafkaOutput", trigger_interval_ms: int | None) -> Iterator[str]:
    """Return what keeps prepared transactions from outliving a trigger interval and a restart.

    For sinks whose transactions are committed after the checkpoint: one that is aborted in between
    by its timeout takes rows with it that the checkpoint already counts.

    Args:
        output: what the user chose.
        trigger_interval_ms: see `check`.
    """
    if output.max_recovery_ms is None:
        return
    interval, recovery = trigger_interval_ms or 0, output.max_recovery_ms
    if output.transaction_timeout_ms <= interval + recovery:
        yield (
            f"transaction_timeout_ms is {output.transaction_timeout_ms}, the trigger interval "
            f"{interval} ms and max_recovery_ms {recovery} ms: Kafka would abort what "
            f"waits for its commit before a pipeline that was down for so long can commit it. "
            f"transaction_timeout_ms must be more than {interval + recovery}"
        )


def missing_rights(client: Client, wanted: Iterable[Right]) -> tuple[Right, ...]:
    """Return the wanted rights that the user of the connection does not have.

    Topics and groups are described together with the operations that are authorized on them
    (KIP-430). Kafka has no such answer for transactional ids, so the right to write one is tried
    out: with an EndTxn of a producer that cannot exist, which is refused in every case, and changes
    nothing.

    A cluster without access control grants everything.

    Raises:
        BrokerUnavailableError: the deadline passed.
    """
    rights = sorted(set(wanted))
    topics = _topic_operations(client, {right.name for right in rights if right.resource == TOPIC})
    groups = _operations_by_name(client, rights, GROUP, _group_operations)
    ids = _operations_by_name(client, rights, TRANSACTIONAL_ID, _transactional_operations)
    granted = {TOPIC: topics, GROUP: groups, TRANSACTIONAL_ID: ids}
    return tuple(
        right
        for right in rights
        if OPERATION_CODES[right.operation] not in granted[right.resource][right.name]
    )


def _topic_operations(client: Client, topics: Iterable[str]) -> Mapping[str, Operations]:
    names = sorted(topics)
    if not names:
        return {}
    topic_class = protocol.MetadataRequest.MetadataRequestTopic
    denied = frozenset({"TopicAuthorizationFailed"})
    response = client.call(
        lambda: protocol.MetadataRequest(
            topics=[topic_class(name=name) for name in names],
            allow_auto_topic_creation=False,
            include_topic_authorized_operations=True,
            min_version=8,
        ),
        AnyBroker(),
        lambda response: [(topic.error_code, f"topic {topic.name!r}") for topic in response.topics],
        accept=denied | NO_TOPIC,
    )
    return {
        topic.name: (
            NOTHING
            if protocol.error_name(topic.error_code) in denied
            else _operations(topic.topic_authorized_operations)
        )
        for topic in response.topics
    }


def _operations_by_name(
    client: Client, rights: Iterable[Right], resource: str, ask: Callable[[Client, str], Operations]
) -> Mapping[str, Operations]:
    """Ask by name; a user who may not describe a resource is refused by its coordinator."""
    granted: dict[str, Operations] = {}
    for name in (right.name for right in rights if right.resource == resource):
        try:
            granted[name] = ask(client, name)
        except AuthorizationError:
            granted[name] = NOTHING
    return granted


def _group_operations(client: Client, group: str) -> Operations:
    response = client.call(
        lambda: protocol.DescribeGroupsRequest(
            groups=[group],
            include_authorized_operations=True,
            min_version=3,
            max_version=5,  # from 6 on nothing is said of a group that has no offsets yet
        ),
        Coordinator("group", group),
        lambda response: [
            (description.error_code, f"group {group!r}") for description in response.groups
        ],
    )
    return _operations(response.groups[0].authorized_operations)


def _transactional_operations(client: Client, transactional_id: str) -> Operations:
    def make() -> Any:
        return protocol.EndTxnRequest(
            transactional_id=transactional_id,
            producer_id=NO_PRODUCER,
            producer_epoch=NO_PRODUCER,
            committed=False,
            max_version=3,
        )

    client.call(
        make,
        Coordinator("transaction", transactional_id),
        lambda response: [(response.error_code, f"transactional id {transactional_id!r}")],
        accept=FENCED | ABORT | {"TransactionalIdNotFound", "InvalidRequest"},
    )
    return EVERYTHING


def _operations(bits: int) -> Operations:
    """Return the operations of a bit field (KIP-430); a cluster without access control has none."""
    if bits == NOT_TOLD:
        return EVERYTHING
    return frozenset(code for code in OPERATION_CODES.values() if bits >> code & 1)


def transaction_record_bytes(partition_counts: Mapping[str, int]) -> int:
    """Return the size of the record of a transaction, about, by its partitions of each topic.

    The coordinator writes all partitions of a transaction as one record of `__transaction_state`.
    If that is larger than the topic's limit, partitions cannot be added, and the producer is told
    of an unknown error.

    Source: TransactionLogValue.json and TransactionStateManager of Kafka.
    """
    return RECORD_BYTES_FIXED + sum(
        RECORD_BYTES_OF_TOPIC + len(topic) + RECORD_BYTES_OF_PARTITION * count
        for topic, count in partition_counts.items()
    )


def transaction_record_warning(
    partition_counts: Mapping[str, int], limit: int | None
) -> str | None:
    """Return a warning if a transaction over all these partitions would have no place.

    Args:
        partition_counts: of the topics that may be written to.
        limit: the largest record batch that `__transaction_state` takes; None: not known.
    """
    size = transaction_record_bytes(partition_counts)
    if limit is None or size <= limit:
        return None
    return (
        f"the output has {sum(partition_counts.values())} partitions, and one transaction over all "
        f"of them is a record of about {size} bytes, of which {STATE_TOPIC} takes {limit}: an "
        f"epoch that writes to too many of them cannot be written. "
        f"{transaction_record_remedy(size)}"
    )


def transaction_record_remedy(size: int) -> str:
    """Return the remedy for a transaction record that is too large."""
    return (
        f"Raise max.message.bytes of {STATE_TOPIC}, or the brokers' message.max.bytes, to at least "
        f"{2 * size}; or write to fewer partitions in an epoch; or use "
        f"KafkaSink(transactions='task'), where each task has a transaction of its own."
    )
