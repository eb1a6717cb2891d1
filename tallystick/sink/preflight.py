"""What must be true of cluster, topics and settings before an exactly-once pipeline may start.

Every problem is found before anything runs, and all are told at once. Where a cluster does not tell
(no ACL for it), the check is left out and named, so that its absence is known.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tallystick.errors import AuthorizationError, OptionError
from tallystick.sink.cluster_facts import ClusterFacts
from tallystick.sink.rights import Right, lacking
from tallystick.sink.timeouts import failover_ms

REQUEST_VERSIONS = {"InitProducerId": 3, "OffsetFetch": 7, "TxnOffsetCommit": 3, "EndTxn": 1}
"""API -> lowest version with what the protocol needs (KIP-360, KIP-447)."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user chose, as far as the cluster or Spark can contradict it. Times in ms."""

    transaction_timeout_ms: int
    delivery_timeout_ms: int
    batch_bytes: int
    trigger_interval_ms: int | None
    speculation: bool


@dataclass(frozen=True, slots=True)
class Findings:
    """Problems forbid the start; warnings are told and passed over."""

    problems: tuple[str, ...]
    warnings: tuple[str, ...]


def check(facts: ClusterFacts, settings: Settings) -> Findings:
    """Compare what the cluster says with what the settings need."""
    return Findings(
        problems=(*_broker_problems(facts), *_setting_problems(facts, settings)),
        warnings=tuple(_warnings(facts, settings)),
    )


def refuse(problems: Iterable[str], missing: Sequence[Right] = (), user: str = "") -> None:
    """Raise all that forbids the start as one error; nothing if there is nothing.

    Args:
        problems: in words.
        missing: rights that the user of the connection does not have.
        user: the name of the login; "": it has none.

    Raises:
        OptionError: there are problems.
        AuthorizationError: rights are missing, whatever else there is.
    """
    told = "; ".join(problems)
    if missing:
        raise AuthorizationError("; ".join(filter(None, (told, lacking(missing, user)))))
    if told:
        raise OptionError(told)


def check_all(checks: Iterable[Callable[[], None]]) -> None:
    """Make every check, and raise what they found as one error.

    Raises:
        AuthorizationError: a check raised one.
        OptionError: another check refuses the start.
    """
    found: list[OptionError] = []
    for each in checks:
        try:
            each()
        except OptionError as error:
            found.append(error)
    if not found:
        return
    if len(found) == 1:
        raise found[0]
    is_right = any(isinstance(error, AuthorizationError) for error in found)
    kind = AuthorizationError if is_right else OptionError
    raise kind("; ".join(str(error).rstrip(".") for error in found))


def _broker_problems(facts: ClusterFacts) -> Iterator[str]:
    for api, lowest in REQUEST_VERSIONS.items():
        highest = facts.api_versions.get(api)
        if highest is not None and highest < lowest:
            yield (
                f"the brokers know {api} up to version {highest}, version {lowest} is needed: "
                f"upgrade them to Kafka 3.6 or later"
            )
    if facts.partition_verification is False:
        yield (
            "the brokers do not verify that a partition belongs to a transaction "
            "(transaction.partition.verification.enable is false, or they are older than Kafka "
            "3.6): a stray write of an earlier run would be committed with the next epoch. Turn it "
            "on, or upgrade"
        )


def _setting_problems(facts: ClusterFacts, settings: Settings) -> Iterator[str]:
    timeout, most = settings.transaction_timeout_ms, facts.transaction_timeout_max_ms
    if most is not None and timeout > most:
        yield (
            f"transaction_timeout_ms is {timeout}, the brokers allow {most} "
            f"(transaction.max.timeout.ms): lower the one or raise the other"
        )
    if settings.delivery_timeout_ms >= timeout:
        yield (
            f"kafka.delivery.timeout.ms is {settings.delivery_timeout_ms}, transaction_timeout_ms "
            f"{timeout}: a transaction must outlive a single call, so the first must be the "
            f"smaller. Lower it, or leave it out: then it follows from transaction_timeout_ms"
        )
    if facts.message_bytes_max is not None and settings.batch_bytes > facts.message_bytes_max:
        yield (
            f"batch_bytes is {settings.batch_bytes}, the brokers take batches up to "
            f"{facts.message_bytes_max} (message.max.bytes): lower the one or raise the other"
        )
    if settings.speculation:
        yield (
            "spark.speculation is on: two attempts of a writing task would share one transaction, "
            "and Kafka cannot tell them apart. Start Spark with spark.speculation=false"
        )
    minutes = facts.offsets_retention_minutes
    if minutes is not None and (settings.trigger_interval_ms or 0) >= minutes * 60_000:
        yield (
            f"the trigger interval is {settings.trigger_interval_ms} ms, and Kafka forgets which "
            f"epoch was committed after {minutes} minutes (offsets.retention.minutes): use a "
            f"shorter trigger or a longer retention"
        )


def _warnings(facts: ClusterFacts, settings: Settings) -> Iterator[str]:
    if facts.partition_verification is None:
        yield (
            "the brokers do not say whether they verify partitions of transactions (needs "
            "DESCRIBE_CONFIGS on the cluster): make sure they are Kafka 3.6 or later"
        )
    if facts.transaction_timeout_max_ms is None:
        yield (
            "the brokers do not say which transaction timeout they allow (needs DESCRIBE_CONFIGS "
            "on the cluster): it must be at least transaction_timeout_ms"
        )
    session_ms, call_ms = facts.session_timeout_ms, settings.delivery_timeout_ms
    if session_ms is not None and call_ms <= failover_ms(session_ms):
        yield (
            f"kafka.delivery.timeout.ms is {call_ms}, and the failover of a broker may take "
            f"{failover_ms(session_ms)} ms (broker.session.timeout.ms is {session_ms}): each one "
            f"aborts an epoch, or ends the query. Use a longer transaction_timeout_ms and "
            f"kafka.delivery.timeout.ms"
        )
    interval = settings.trigger_interval_ms
    if interval is not None and interval > settings.transaction_timeout_ms:
        yield (
            f"the trigger interval ({interval} ms) is longer than transaction_timeout_ms "
            f"({settings.transaction_timeout_ms}): an epoch that takes as long to write as its "
            f"data took to come is aborted and run again"
        )


def check_recovery(settings: Settings, max_recovery_ms: int | None) -> Iterator[str]:
    """What forbids that prepared transactions outlive the time between two epochs and a restart.

    For sinks whose transactions are committed after the checkpoint: one that is aborted in between
    by its timeout takes rows with it that the checkpoint already counts.

    Args:
        settings: what the user chose.
        max_recovery_ms: how long the pipeline may be down; None: not said, and not checked.
    """
    if max_recovery_ms is None:
        return
    interval, timeout = settings.trigger_interval_ms or 0, settings.transaction_timeout_ms
    if timeout <= interval + max_recovery_ms:
        yield (
            f"transaction_timeout_ms is {timeout}, the trigger interval {interval} ms and "
            f"max_recovery_time {max_recovery_ms} ms: Kafka would abort what waits for its commit "
            f"before a pipeline that was down for so long can commit it. transaction_timeout_ms "
            f"must be more than {interval + max_recovery_ms}"
        )
