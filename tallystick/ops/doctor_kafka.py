"""The checks of `tallystick doctor` that need both the checkpoint and Kafka.

Each asks the code that a start or another command uses for the same: the answers cannot differ.
"""

import time
from collections.abc import Callable, Iterator

from tallystick.epoch.rights import Right, committing, lacking, reading, showing, writing
from tallystick.epoch.transactional_ids import token_group
from tallystick.kafka import cluster
from tallystick.kafka.audit import transaction_state
from tallystick.kafka.client import Client
from tallystick.kafka.config import TRANSACTION_TIMEOUT_MS, KafkaConfig
from tallystick.kafka.output import KafkaOutput
from tallystick.kafka.preflight import check, missing_rights
from tallystick.ops.cli_show import time_text
from tallystick.ops.findings import CheckFinding, Severity, Subject, is_kafkas
from tallystick.ops.transactions import OURS, TransactionStatus, describe

LINGERS_MS = 60_000
"""A transaction that is open for longer was left, or belongs to an epoch worth a look."""
RETENTION_MIN_MINUTES = 24 * 60
"""Kafka's default before 2.0; a pipeline that was down over a weekend needs more."""
CLOCK_SKEW_MAX_MS = 5_000


def now_ms() -> int:
    """Return the time on this machine, in ms since 1970."""
    return time.time_ns() // 1_000_000


def decision(subject: Subject) -> Iterator[CheckFinding]:
    """Look whether the newest decision can be proved."""
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
    has_run = any(each.origin is None for each in subject.manifests)
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
    for each in subject.open_transactions():
        said = describe(each, view)
        if said.standing not in OURS:
            continue
        age_ms = max(0, now_ms() - each.begun_ms)
        is_due = said.standing is TransactionStatus.DUE
        is_old = age_ms >= min(LINGERS_MS, each.timeout_ms // 2 or LINGERS_MS)
        left = f"Kafka aborts it after {time_text(each.timeout_ms)}"
        remedy = (
            f"If the pipeline is dead: tallystick recover MODULE:PIPELINE --checkpoint "
            f"{view.location}"
            if view.is_loops
            else "Start the query."
        )
        yield CheckFinding(
            (Severity.ERROR if is_due else Severity.WARNING) if is_old else Severity.INFO,
            "transactions",
            f"{each.transactional_id} is open for {time_text(age_ms)}: {said.says}",
            f"Readers of committed records wait for it. {left}"
            + (", and rows of a decided epoch are gone from the output then." if is_due else "."),
            remedy if is_old else "",
        )


def settings(subject: Subject) -> Iterator[CheckFinding]:
    """Make the pre-flight check of a start, with the timeout that the last run had."""
    timeout_ms = TRANSACTION_TIMEOUT_MS
    for each in subject.transactional_ids[:1]:
        state = transaction_state(subject.client, each)
        timeout_ms = timeout_ms if state is None else int(state.transaction_timeout_ms)
    config = KafkaConfig.from_options(subject.options, transaction_timeout_ms=timeout_ms)
    output = KafkaOutput(config, None, "", transaction_timeout_ms=timeout_ms)
    facts = cluster.cluster_facts(subject.client)
    found = check(facts, output, trigger_interval_ms=None)
    for problem in found.problems:
        yield CheckFinding(Severity.ERROR, "settings", problem, "The next start is refused.")
    for warning in found.warnings:
        yield CheckFinding(Severity.WARNING, "settings", warning)
    if facts.transaction_version is not None:
        feature = f"the brokers' feature transaction.version is {facts.transaction_version}"
        yield CheckFinding(Severity.INFO, "versions", feature)
    minutes = facts.offsets_retention_minutes
    if subject.transactional_ids and minutes is not None and minutes < RETENTION_MIN_MINUTES:
        yield CheckFinding(
            Severity.WARNING,
            "retention",
            f"the brokers' offsets.retention.minutes is {minutes}",
            "A pipeline that is down for longer has no token any more: its start cannot prove what "
            "was committed last, and asks.",
            f"Set offsets.retention.minutes={RETENTION_MIN_MINUTES} or more in the brokers' "
            f"settings, and restart them one by one.",
        )


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
        named = {each.topic for each in source.positions} - set(source.gone)
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
    for topic in subject.output_topics:
        if topic in there:
            yield from _copies(subject.client, topic)
        else:
            yield CheckFinding(
                Severity.ERROR,
                name,
                f"output topic {topic!r} does not exist",
                "What was written to it is gone, and the next start is refused.",
                f"kafka-topics --bootstrap-server SERVERS --create --topic {topic} --partitions N",
            )


def _topic_lost(found: str) -> CheckFinding:
    return CheckFinding(
        Severity.ERROR,
        "topics",
        found,
        "The records after the checkpoint's positions are gone. What the next epoch does is up to "
        "the source's LossPolicy: by default it stops.",
        "Look who removed it; then choose losses=LossPolicy(...) of the KafkaSource.",
    )


def _copies(client: Client, topic: str) -> Iterator[CheckFinding]:
    """Look whether rows outlive the loss of a broker."""
    found = cluster.replication(client, topic)
    fewest = found.in_sync_min or 1
    if found.in_sync < min(fewest, found.replicas):
        yield CheckFinding(
            Severity.ERROR,
            "topics",
            f"output topic {topic!r}: a partition has {found.in_sync} copies in sync, and "
            f"min.insync.replicas is {fewest}",
            "It takes no rows until more brokers are back: epochs are aborted and run again.",
            f"kafka-topics --bootstrap-server SERVERS --describe --topic {topic}",
        )
    if found.replicas == 1 or (found.in_sync_min == 1):
        is_small = found.brokers == 1
        yield CheckFinding(
            Severity.INFO if is_small else Severity.WARNING,
            "topics",
            f"output topic {topic!r} has replication factor {found.replicas} and "
            f"min.insync.replicas {fewest}, on {found.brokers} broker{'s' * (not is_small)}",
            "Rows that were committed are lost with one broker's disk.",
            ""
            if is_small
            else f"Replication factor 3: kafka-reassign-partitions; then kafka-configs "
            f"--bootstrap-server SERVERS --alter --topic {topic} --add-config "
            f"min.insync.replicas=2",
        )


def authorization(subject: Subject) -> Iterator[CheckFinding]:
    """Ask the brokers which rights of the next start this login lacks, as the start does."""
    client = subject.client
    wanted: list[Right] = [*writing(subject.output_topics)]
    for each in subject.transactional_ids:
        group = token_group(each)
        wanted += committing(each, group, "")[:2]
    for source in subject.sources:
        if source.cluster_id == client.cluster_id:
            named = {each.topic for each in source.positions}
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
    """Compare the clock of this machine with that of the cluster's controller."""
    before = now_ms()
    theirs = cluster.clock_ms(subject.client)
    after = now_ms()
    if theirs is None:
        text = "the cluster does not tell its time (needs DESCRIBE on the cluster, and KRaft)"
        yield CheckFinding(Severity.INFO, "clock", text)
        return
    skew_ms = max(before - theirs, theirs - after, 0)
    if skew_ms > CLOCK_SKEW_MAX_MS:
        where = "behind" if theirs > after else "ahead of"
        yield CheckFinding(
            Severity.WARNING,
            "clock",
            f"this machine's clock is {time_text(skew_ms)} {where} that of Kafka's controller",
            "Timestamps of rows, timers of processing time and the ages of transactions are wrong "
            "by as much; an hour ahead, brokers refuse the rows.",
            "timedatectl status; then have NTP set the clock of this machine, or of the brokers.",
        )


CHECKS: dict[str, Callable[[Subject], Iterator[CheckFinding]]] = {
    "decision": decision,
    "transactions": lingering,
    "settings": settings,
    "topics": topics,
    "rights": authorization,
    "clock": clock,
}
"""Checks that need both the checkpoint and Kafka, in the order in which they are made."""
