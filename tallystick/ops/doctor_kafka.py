"""The checks of `tallystick doctor` that need both the checkpoint and Kafka.

Each asks the code that a start or another command uses for the same: the answers cannot differ.
"""

from collections.abc import Callable, Iterator

from tallystick.epoch.findings import CheckFinding, Severity
from tallystick.epoch.rights import Right, committing, lacking, reading, showing, writing
from tallystick.epoch.transactional_ids import token_group
from tallystick.kafka import broker_settings, cluster
from tallystick.kafka.audit import transaction_state
from tallystick.kafka.config import TRANSACTION_TIMEOUT_MS, KafkaConfig
from tallystick.kafka.output import KafkaOutput
from tallystick.kafka.preflight import check, missing_rights
from tallystick.ops.cli_show import time_text
from tallystick.ops.doctor_subject import Subject, is_kafkas
from tallystick.ops.transactions import OURS, TransactionStatus, describe, recovery
from tallystick.ops.versions import judge_brokers

LINGERS_MS = 60_000
"""A transaction that is open for longer was left, or belongs to an epoch worth a look."""


def decision(subject: Subject) -> Iterator[CheckFinding]:
    """Check that the newest decision can be proved."""
    name, view, decider = "decision", subject.view, subject.decider
    if decider is None:
        yield CheckFinding(Severity.INFO, name, "nothing was decided in this checkpoint yet")
        return
    here = subject.client.cluster_id
    if decider.cluster_id not in ("", here):
        yield CheckFinding(
            Severity.ERROR,
            name,
            f"the checkpoint's epochs are decided by {decider}, and these servers are cluster "
            f"{here!r}",
            "What was found in Kafka is not about this pipeline; a start with these servers is "
            "refused.",
            "Give the servers of that cluster as --bootstrap-servers.",
        )
        return
    has_run = any(manifest.origin is None for manifest in subject.manifests)
    if has_run and (view.doubt or (is_kafkas(decider) and view.decided is None)):
        yield CheckFinding(
            Severity.ERROR,
            name,
            view.doubt or f"Kafka holds no token of {decider.transactional_id!r}",
            "Which epoch was committed last cannot be proved: the next start stops with a "
            "DataLossError and asks for a decision (accept=), or clears it up by itself.",
            "Start the pipeline and read what it says; do not reset offsets of its token group, "
            f"{token_group(decider.transactional_id)!r}."
            if decider.transactional_id
            else "Start the pipeline and read what it says.",
        )


def lingering(subject: Subject) -> Iterator[CheckFinding]:
    """Look for transactions of the pipeline that are open for long."""
    view = subject.view
    for transaction in subject.open_transactions():
        description = describe(transaction, view)
        if description.standing not in OURS:
            continue
        age_ms = max(0, broker_settings.now_ms() - transaction.begun_ms)
        is_due = description.standing is TransactionStatus.DUE
        is_old = age_ms >= min(LINGERS_MS, transaction.timeout_ms // 2 or LINGERS_MS)
        consequence = f"Kafka aborts it after {time_text(transaction.timeout_ms)}"
        command = recovery(view)
        remedy = f"If the pipeline is dead: {command}" if command else "Start the query."
        yield CheckFinding(
            (Severity.ERROR if is_due else Severity.WARNING) if is_old else Severity.INFO,
            "transactions",
            f"{transaction.transactional_id} is open for {time_text(age_ms)}: {description.says}",
            f"Readers of committed records wait for it. {consequence}"
            + (", and rows of a decided epoch are gone from the output then." if is_due else "."),
            remedy if is_old else "",
        )


def settings(subject: Subject) -> Iterator[CheckFinding]:
    """Make the pre-flight check of a start, with the timeout that the last run had."""
    timeout_ms = TRANSACTION_TIMEOUT_MS
    for transactional_id in subject.transactional_ids[:1]:
        state = transaction_state(subject.client, transactional_id)
        timeout_ms = timeout_ms if state is None else int(state.transaction_timeout_ms)
    config = KafkaConfig.from_options(subject.options, transaction_timeout_ms=timeout_ms)
    output = KafkaOutput(config, None, "", transaction_timeout_ms=timeout_ms)
    facts = cluster.cluster_facts(subject.client)
    preflight = check(facts, output, trigger_interval_ms=subject.trigger_interval_ms)
    for problem in preflight.problems:
        yield CheckFinding(Severity.ERROR, "settings", problem, "The next start is refused.")
    for warning in preflight.warnings:
        yield CheckFinding(Severity.WARNING, "settings", warning)
    yield from judge_brokers(facts)
    if facts.transaction_version is not None:
        feature = f"the brokers' feature transaction.version is {facts.transaction_version}"
        yield CheckFinding(Severity.INFO, "versions", feature)
    if subject.transactional_ids:
        yield from broker_settings.retention(facts)


def topics(subject: Subject) -> Iterator[CheckFinding]:
    """Compare the topics of sources and outputs with what the checkpoint knows of them."""
    here, name = subject.client.cluster_id, "topics"
    for source in subject.sources:
        if source.cluster_id != here:
            yield CheckFinding(
                Severity.INFO,
                name,
                f"a source reads cluster {source.cluster_id!r}; its topics were not looked at",
            )
            continue
        named = {partition.topic for partition in source.positions} - set(source.gone)
        there = cluster.describe_topics(subject.client, named)
        for topic in sorted(named):
            expected = source.topic_ids.get(topic, "")
            if topic not in there:
                yield _topic_lost(f"source topic {topic!r} does not exist")
            elif expected not in ("", there[topic].topic_id):
                yield _topic_lost(
                    f"source topic {topic!r} has id {there[topic].topic_id}, and the checkpoint's "
                    f"positions are of id {expected}: it was deleted and created again"
                )
    there = cluster.describe_topics(subject.client, subject.output_topics)
    for topic, replication in cluster.cluster_facts(subject.client, there).replication.items():
        yield from broker_settings.copies(topic, replication)
    for topic in subject.output_topics:
        if topic not in there:
            yield CheckFinding(
                Severity.ERROR,
                name,
                f"output topic {topic!r} does not exist",
                "What was written to it is gone, and the next start is refused.",
                f"kafka-topics --bootstrap-server SERVERS --create --topic {topic} --partitions N",
            )


def _topic_lost(observation: str) -> CheckFinding:
    return CheckFinding(
        Severity.ERROR,
        "topics",
        observation,
        "The records after the checkpoint's positions are gone. What the next epoch does is up to "
        "the source's LossPolicy: by default it stops.",
        "Look who removed it; then choose losses=LossPolicy(...) of the KafkaSource.",
    )


def authorization(subject: Subject) -> Iterator[CheckFinding]:
    """Ask the brokers which rights of the next start this login lacks, as the start does."""
    client = subject.client
    wanted: list[Right] = [*writing(subject.output_topics)]
    for transactional_id in subject.transactional_ids:
        group = token_group(transactional_id)
        wanted += committing(transactional_id, group, "")[:2]
    for source in subject.sources:
        if source.cluster_id == client.cluster_id:
            named = {partition.topic for partition in source.positions}
            wanted += showing(source.group, named) if source.group else reading(named)
    missing = missing_rights(client, wanted)
    if missing:
        yield CheckFinding(
            Severity.ERROR,
            "rights",
            lacking(missing, client.config.sasl_username),
            "The next start with this login is refused, if it is the one of both source and sink.",
            "Each of the kafka-acls arguments above, with --bootstrap-server SERVERS.",
        )


def clock(subject: Subject) -> Iterator[CheckFinding]:
    """Compare the clock of this machine with the clock of the cluster's controller."""
    return broker_settings.clock(subject.client)


CHECKS: dict[str, Callable[[Subject], Iterator[CheckFinding]]] = {
    "decision": decision,
    "transactions": lingering,
    "settings": settings,
    "topics": topics,
    "rights": authorization,
    "clock": clock,
}
"""Checks that need both the checkpoint and Kafka, in the order in which they are made."""
