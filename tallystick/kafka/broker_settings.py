"""Checks of a cluster for risks: settings that do harm only when something else happens.

A start logs what they find, and `tallystick doctor` shows it. They ask for what the pre-flight
check asks for anyway, and for the time: one more request, on a connection that is there.
"""

import time
from collections.abc import Iterator

from tallystick.errors import TallystickError
from tallystick.host import stopwatch
from tallystick.kafka import cluster
from tallystick.kafka.client import Client
from tallystick.kafka.preflight import ClusterFacts, Replication
from tallystick.values import CheckFinding, Severity

RETENTION_MIN_MINUTES = 24 * 60
"""Kafka's default before 2.0; a pipeline that was down over a weekend needs more."""
CLOCK_SKEW_MAX_MS = 5_000
CLOCK_PATIENCE_S = 1.0
"""The longest wait of a start for the cluster's time: without a controller there is no answer."""


def check_broker_settings(client: Client, facts: ClusterFacts) -> Iterator[CheckFinding]:
    """Make every check of this module.

    Args:
        client: of the cluster.
        facts: of it, with the copies of the output topics.
    """
    yield from retention(facts)
    for topic, replication in facts.replication.items():
        yield from copies(topic, replication)
    yield from clock(client)


def retention(facts: ClusterFacts) -> Iterator[CheckFinding]:
    """Check that tokens outlive a night."""
    minutes = facts.offsets_retention_minutes
    if minutes is not None and minutes < RETENTION_MIN_MINUTES:
        yield CheckFinding(
            Severity.WARNING,
            "retention",
            f"the brokers' offsets.retention.minutes is {minutes}",
            "A pipeline that is down for longer has lost its token: its start cannot prove what "
            "was committed last, and asks.",
            f"Set offsets.retention.minutes={RETENTION_MIN_MINUTES} or more in the brokers' "
            f"settings, and restart them one by one.",
        )


def copies(topic: str, replication: Replication) -> Iterator[CheckFinding]:
    """Check that rows of an output topic outlive the loss of a broker."""
    fewest = replication.in_sync_min or 1
    if replication.in_sync < min(fewest, replication.replicas):
        yield CheckFinding(
            Severity.ERROR,
            "topics",
            f"output topic {topic!r}: a partition has {replication.in_sync} copies in sync, and "
            f"min.insync.replicas is {fewest}",
            "It takes no rows until more brokers are back: epochs are aborted and run again.",
            f"kafka-topics --bootstrap-server SERVERS --describe --topic {topic}",
        )
    if replication.replicas == 1 or replication.in_sync_min == 1:
        is_small = replication.brokers == 1
        yield CheckFinding(
            Severity.INFO if is_small else Severity.WARNING,
            "topics",
            f"output topic {topic!r} has replication factor {replication.replicas} and "
            f"min.insync.replicas {fewest}, on {replication.brokers} broker{'s' * (not is_small)}",
            "Rows that were committed are lost with one broker's disk.",
            ""
            if is_small
            else f"Replication factor 3: kafka-reassign-partitions; then kafka-configs "
            f"--bootstrap-server SERVERS --alter --topic {topic} --add-config "
            f"min.insync.replicas=2",
        )


def earlier_now_ms(client: Client) -> int:
    """Return the time by this machine's clock or the controller's, of which the earlier counts.

    Nothing is old only because this machine's clock is ahead.
    """
    own_ms, theirs_ms = stopwatch.now_ms(), cluster.clock_ms(client)
    return own_ms if theirs_ms is None else min(own_ms, theirs_ms)


def clock(client: Client) -> Iterator[CheckFinding]:
    """Compare the clock of this machine with that of the cluster's controller."""
    try:
        with client.within(time.monotonic() + CLOCK_PATIENCE_S):
            before = stopwatch.now_ms()
            theirs = cluster.clock_ms(client)
            after = stopwatch.now_ms()
    except TallystickError as error:
        yield CheckFinding(Severity.INFO, "clock", f"the cluster does not tell its time: {error}")
        return
    if theirs is None:
        text = "the cluster does not tell its time (needs DESCRIBE on the cluster)"
        yield CheckFinding(Severity.INFO, "clock", text)
        return
    skew_ms = max(before - theirs, theirs - after, 0)
    if skew_ms > CLOCK_SKEW_MAX_MS:
        where = "behind" if theirs > after else "ahead of"
        yield CheckFinding(
            Severity.WARNING,
            "clock",
            f"this machine's clock is {skew_ms // 1000} s {where} that of Kafka's controller",
            "Timestamps of rows, timers of processing time and the ages of transactions are wrong "
            "by as much; an hour ahead, brokers refuse the rows.",
            "timedatectl status; then have NTP set the clock of this machine, or of the brokers.",
        )
