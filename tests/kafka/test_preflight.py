"""What is refused before anything starts."""

from dataclasses import replace
from typing import Any

import pytest

from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.output import KafkaOutput
from tallystick.kafka.preflight import (
    REQUESTS_NEEDED,
    UNVERIFIED,
    ClusterFacts,
    Findings,
    check,
    check_recovery,
)

FACTS = ClusterFacts(
    transaction_version=2,
    api_versions=dict.fromkeys(REQUESTS_NEEDED, 9),
    transaction_timeout_max_ms=900_000,
    partition_verification=True,
    offsets_retention_minutes=10_080,
    message_bytes_max=1_048_588,
    session_timeout_ms=9_000,
)
OUTPUT = KafkaOutput(
    config=KafkaConfig("host:9092", delivery_timeout_ms=120_000),
    topic="out",
    token_topic="out",
    batch_bytes=900_000,
    transaction_timeout_ms=300_000,
)
LONG_CALL = replace(OUTPUT, config=KafkaConfig("host:9092", delivery_timeout_ms=300_000))


def findings_of(facts: ClusterFacts, output: KafkaOutput = OUTPUT, **run: Any) -> Findings:
    """Return the findings about a run with a trigger interval of a second."""
    return check(facts, output, **{"trigger_interval_ms": 1_000, **run})


def test_a_good_cluster_passes_without_a_word():
    findings = findings_of(FACTS)

    assert findings.problems == ()
    assert findings.warnings == ()


@pytest.mark.parametrize(
    ("facts", "run", "words"),
    [
        (
            {"api_versions": dict.fromkeys(REQUESTS_NEEDED, 9) | {"InitProducerId": 2}},
            {},
            "upgrade them to Kafka 3.6",
        ),
        (
            {"api_versions": dict.fromkeys(REQUESTS_NEEDED - {"DescribeProducers"}, 9)},
            {},
            "do not answer DescribeProducers",
        ),
        ({"partition_verification": False}, {}, "transaction.partition.verification.enable"),
        ({"transaction_timeout_max_ms": 1000}, {}, "the brokers allow 1000"),
        ({}, {"output": LONG_CALL}, "must outlive a single call"),
        ({}, {"speculation": True}, "spark.speculation"),
        ({"offsets_retention_minutes": 1}, {"trigger_interval_ms": 60_000}, "Kafka forgets"),
    ],
)
def test_what_cannot_work_is_a_problem(facts, run, words):
    findings = findings_of(replace(FACTS, **facts), **run)

    assert [words in problem for problem in findings.problems] == [True]


@pytest.mark.parametrize(
    ("facts", "run", "words"),
    [
        (
            {"partition_verification": None, "metadata_version": 12},
            {},
            "do not say whether they verify",
        ),
        (
            {"partition_verification": None},
            {"accepted": frozenset({UNVERIFIED})},
            "do not say whether they verify",
        ),
        ({"transaction_timeout_max_ms": None}, {}, "which transaction timeout they allow"),
        ({}, {"trigger_interval_ms": 400_000}, "longer than transaction_timeout_ms"),
        (
            {"partition_counts": {"out": 1000}, "transaction_record_max": 3000},
            {},
            "a record of about 4211 bytes, of which __transaction_state takes 3000",
        ),
        ({"session_timeout_ms": 115_000}, {}, "the failover of a broker may take 120000 ms"),
    ],
)
def test_what_cannot_be_checked_is_said(facts, run, words):
    findings = findings_of(replace(FACTS, **facts), **run)

    assert findings.problems == ()
    assert [words in warning for warning in findings.warnings] == [True]


@pytest.mark.parametrize("accepted", [frozenset(), frozenset({UNVERIFIED})])
@pytest.mark.parametrize(
    ("verification", "metadata_version"), [(False, 12), (False, None), (None, 11)]
)
def test_brokers_that_are_known_not_to_verify_are_refused_whatever_is_accepted(
    verification, metadata_version, accepted
):
    facts = replace(FACTS, partition_verification=verification, metadata_version=metadata_version)
    (problem,) = findings_of(facts, accepted=accepted).problems

    assert "Turn it on, or upgrade" in problem


def test_what_nobody_knows_is_for_a_person_to_decide():
    facts = replace(FACTS, partition_verification=None, metadata_version=None)

    (problem,) = findings_of(facts).problems
    assert f"accept=['{UNVERIFIED}']" in problem
    assert findings_of(facts).warnings == ()


def test_all_problems_are_told_at_once():
    assert len(findings_of(FACTS, LONG_CALL, speculation=True).problems) == 2


@pytest.mark.parametrize(
    ("interval", "recovery", "fits"),
    [(1_000, 299_000, False), (1_000, 298_999, True), (None, 300_000, False), (1_000, None, True)],
)
def test_a_transaction_must_outlive_the_interval_and_the_recovery(interval, recovery, fits):
    """All numbers are told, so that it is clear which one to change."""
    problems = list(check_recovery(replace(OUTPUT, max_recovery_ms=recovery), interval))

    assert (problems == []) == fits
    for number in () if fits else (300_000, interval or 0, recovery, (interval or 0) + recovery):
        assert str(number) in problems[0]
