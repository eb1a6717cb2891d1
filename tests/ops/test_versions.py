"""Versions are judged by what is supported, and by what `make matrix` tries."""

from dataclasses import replace

import pytest

from tallystick.ops import doctor
from tallystick.spark import PYSPARK_VERSION_MIN, streaming
from tallystick.testing.jars import KAFKA_VERSIONS
from tallystick.values import Severity
from tests.kafka.test_preflight import FACTS
from tests.matrix import PYTHONS, SPARKS, UNTRIED


def number(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))


def test_what_is_called_tried_is_what_the_matrix_tries() -> None:
    pythons = [number(version) for version in PYTHONS if version not in UNTRIED]
    assert (pythons[0], pythons[-1]) == doctor.PYTHONS
    assert (number(SPARKS[0]), number(SPARKS[-1])) == doctor.PYSPARKS
    assert doctor.PYSPARKS[0] == PYSPARK_VERSION_MIN
    assert doctor.PYSPARK_FOR_QUERIES == streaming.PYSPARK_VERSION_MIN
    releases = [number(release) for release in doctor.KAFKA_RELEASES.values()]
    assert {number(version) for version in KAFKA_VERSIONS} <= set(releases)
    assert releases == sorted(releases)


@pytest.mark.parametrize(
    ("text", "severity"), [("3.11.7", None), ("3.13.1", None), ("3.14.0", Severity.WARNING)]
)
def test_a_python_that_nobody_has_tried_is_a_warning(text: str, severity: Severity | None) -> None:
    severities = [finding.severity for finding in doctor.judge_python(text)]

    assert severities == ([] if severity is None else [severity])


@pytest.mark.parametrize(
    ("text", "severity", "says"),
    [
        ("", Severity.ERROR, "PySpark is not installed"),
        ("3.4.4", Severity.ERROR, "3.5 is the oldest that works"),
        ("3.5.9", Severity.INFO, "queries of your own need 4.2"),
        ("4.1.1", Severity.INFO, "queries of your own need 4.2"),
        ("4.2.0", None, ""),
        ("4.3.0", None, ""),
        ("4.4.0", Severity.WARNING, "newer than 4.3, the newest that was tried"),
        ("5.0.0.dev1", Severity.WARNING, "newer than 4.3"),
    ],
)
def test_pyspark_is_judged(text: str, severity: Severity | None, says: str) -> None:
    findings = list(doctor.judge_pyspark(text))

    assert [finding.severity for finding in findings] == ([] if severity is None else [severity])
    assert all(says in finding.found for finding in findings)
    assert all(finding.remedy for finding in findings if finding.is_logged)


@pytest.mark.parametrize(
    ("level", "severity", "says"),
    [
        (11, Severity.ERROR, "older than Kafka 3.6"),
        (12, Severity.INFO, "of Kafka 3.6 (metadata.version 12)"),
        (19, Severity.INFO, "of Kafka 3.7 (metadata.version 19)"),
        (25, Severity.INFO, "of Kafka 4.0 (metadata.version 25)"),
        (30, Severity.INFO, "of Kafka 4.3 (metadata.version 30)"),
        (33, Severity.INFO, "of Kafka 4.3 or later (metadata.version 33)"),
        (None, None, ""),
    ],
)
def test_brokers_are_judged(level: int | None, severity: Severity | None, says: str) -> None:
    findings = list(doctor.judge_brokers(replace(FACTS, metadata_version=level)))

    assert [finding.severity for finding in findings] == ([] if severity is None else [severity])
    assert all(says in finding.found for finding in findings)
