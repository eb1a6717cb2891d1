"""A judgement of the installed versions: refused, tested, or untested."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from tallystick.kafka.preflight import ClusterFacts
from tallystick.values import CheckFinding, Severity

PACKAGES = ("tallystick", "pyspark", "pyarrow", "numpy", "lmdb")
PYTHONS = ((3, 11), (3, 13))
PYSPARKS = ((3, 5), (4, 3))
"""The oldest and the newest that `make matrix` tries."""
PYSPARK_FOR_QUERIES = (4, 2)
KAFKA_RELEASES = {
    12: "3.6", 15: "3.7", 20: "3.8", 21: "3.9", 22: "4.0", 26: "4.1", 28: "4.2", 30: "4.3",
}  # fmt: skip
"""The first `metadata.version` of each release of Kafka that is supported."""
MATRIX = "benchmarks/MATRIX.md has those that were tried"


def versions() -> Iterator[CheckFinding]:
    """Yield the installed versions, and findings about Python and PySpark."""
    installed = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    names = [f"{package} {number}" for package, number in installed.items()]
    python = f"Python {sys.version.split()[0]}"
    yield CheckFinding(Severity.INFO, "versions", ", ".join([python, *names]))
    yield from judge_python(sys.version.split()[0])
    yield from judge_pyspark(installed.get("pyspark", ""))


def judge_python(text: str) -> Iterator[CheckFinding]:
    """Yield a finding if Python is newer than tried; older versions cannot run this code."""
    if _number(text) > PYTHONS[1]:
        yield _untried(f"Python {text}", PYTHONS[1])


def judge_pyspark(text: str) -> Iterator[CheckFinding]:
    """Yield a finding if PySpark is absent (""), too old, or newer than tried."""
    oldest, newest = PYSPARKS
    install = f"pip install 'pyspark>={_text(oldest)},<5'"
    if not text:
        observation, meaning = "PySpark is not installed", "No pipeline can start from here."
        yield CheckFinding(Severity.ERROR, "versions", observation, meaning, install)
    elif _number(text) < oldest:
        observation = f"PySpark {text} is installed, and {_text(oldest)} is the oldest that works"
        yield CheckFinding(
            Severity.ERROR, "versions", observation, "Every start is refused.", install
        )
    elif _number(text) > newest:
        yield _untried(f"PySpark {text}", newest)
    elif _number(text) < PYSPARK_FOR_QUERIES:
        observation = (
            f"PySpark {text} runs pipelines; Structured Streaming queries of your own need "
            f"{_text(PYSPARK_FOR_QUERIES)}"
        )
        yield CheckFinding(Severity.INFO, "versions", observation)


def judge_brokers(facts: ClusterFacts) -> Iterator[CheckFinding]:
    """Yield the release of the brokers, an error if too old; without KRaft none is reported."""
    level = facts.metadata_version
    if level is None:
        return
    release = next((name for least, name in reversed(KAFKA_RELEASES.items()) if level >= least), "")
    if release:
        newest = max(KAFKA_RELEASES)
        later = " or later" if level > newest else ""
        observation = f"the brokers are of Kafka {release}{later} (metadata.version {level})"
        yield CheckFinding(Severity.INFO, "versions", observation)
    else:
        yield CheckFinding(
            Severity.ERROR,
            "versions",
            f"the brokers are older than Kafka 3.6 (metadata.version {level})",
            "They do not verify that a partition belongs to a transaction: a stray write of an "
            "earlier run would be committed with the next epoch, so a start is refused.",
            "Upgrade the brokers to Kafka 3.6 or later.",
        )


def _untried(what: str, newest: tuple[int, int]) -> CheckFinding:
    return CheckFinding(
        Severity.WARNING,
        "versions",
        f"{what} is newer than {_text(newest)}, the newest that was tried",
        "It may work; nobody has looked.",
        f"{MATRIX}: install one of them.",
    )


def _number(text: str) -> tuple[int, int]:
    major, minor, *_ = text.split(".")
    return int(major), int(minor)


def _text(number: tuple[int, int]) -> str:
    return ".".join(map(str, number))
