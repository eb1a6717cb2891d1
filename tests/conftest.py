"""What all tests share: one Spark session, and the embedded broker of `tallystick.testing`.

The broker's fixture is not imported here: pytest finds it through the package's entry point, as it
does for users.
"""

import gc
import re
import socket
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from hypothesis import settings
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.spark import PYSPARK_VERSION, streaming
from tallystick.testing import EmbeddedKafka
from tests.examples import share_of
from tests.spark import jvm, loaded_daemon

# A failure in what tests share says what differed.
pytest.register_assert_rewrite(
    "tests.failover.evidence", "tests.spark.keyed_flights", "tests.spark.sunk", "tests.spark.topics"
)
# Speed is shown in benchmarks.
settings.register_profile("untimed", deadline=None, max_examples=share_of(100))
settings.load_profile("untimed")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Have what a process of pytest-xdist tells pytest-rerunfailures leave at once.

    Before each test it sends two small messages, of which the second would wait for the
    acknowledgement of the first, which Linux delays: 40 ms per test.
    """
    told_to = getattr(config, "failures_db", None)
    if isinstance(connection := getattr(told_to, "sock", None), socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `long.txt` names, and have the longest files begin first.

    A name there that no test has is an error of a whole run. pytest-xdist deals out files in this
    order: what is left at the end takes seconds, and no process has to wait minutes for another.
    """
    lines = (Path(__file__).parent / "long.txt").read_text().splitlines()
    by_file: dict[str, dict[str, pytest.Item]] = {}
    for item in items:
        name = item.nodeid
        by_file.setdefault(name.partition("::")[0], {})[name] = item
    for name in (re.split(r" {2,}", line)[0] for line in lines if line.startswith("tests/")):
        parameters = "" if "[" in name else r"(\[.*)?"
        pattern = re.compile(re.escape(name).replace(r"\*", ".*") + parameters)
        file = name.partition("::")[0]
        any_file = re.compile(re.escape(file).replace(r"\*", ".*"))
        chosen = [
            item
            for path in (filter(any_file.fullmatch, by_file) if "*" in file else [file])
            for nodeid, item in by_file.get(path, {}).items()
            if pattern.fullmatch(nodeid)
        ]
        for item in chosen:
            item.add_marker(pytest.mark.long)
        if not chosen and config.args == config.getini("testpaths"):
            raise pytest.UsageError(f"tests/long.txt: no test is called {name}")
    weights: dict[Path, int] = {}
    for item in items:
        markers = {marker.name for marker in item.iter_markers()}
        if "long" not in markers:
            # By what it starts, roughly.
            weight = 2 * ("spark" in markers) + ("broker" in markers)
            weights[item.path] = max(weights.get(item.path, 0), weight)
    order = order_of_files(weights)
    items.sort(key=lambda item: order.get(item.path, (0, 0.0)))


def order_of_files(weights: dict[Path, int]) -> dict[Path, tuple[int, float]]:
    """Return the place of each file: those of Spark, then brokers' and others' in turn.

    The ones wait much of their time, and the others never.
    """
    order = {}
    for weight in set(weights.values()):
        paths = [path for path in weights if weights[path] == weight]
        for place, path in enumerate(paths):
            order[path] = (-weight, 0.0) if weight > 1 else (0, place / len(paths))
    return order


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among modules and tests, which stay, while they come and later.

    It would be a tenth of what a run takes, and a sixth of its start.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start what the daemons of Spark's workers are forked from, with the first test of Spark."""
    if any(item.iter_markers("spark")):
        loaded_daemon.start_template()


RERUNS_MAX = 3
"""More tests that failed at first are no accident of the machine's."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what each test found that failed and was run again (`--reruns`)."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"UNSTABLE: {report.nodeid} failed first")
        terminalreporter.write_line(report.longreprtext)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run in which too many tests needed a second time."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and len(reporter.stats.get("rerun", [])) > RERUNS_MAX:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def tidied_kafka(tallystick_kafka: EmbeddedKafka) -> Iterator[EmbeddedKafka]:
    """The shared broker, for programs with names of their own for topics and pipelines.

    Topics, and groups, which say what a pipeline has committed, are gone afterwards.
    """
    admin = AdminClient(tallystick_kafka.confluent_options())

    def names() -> tuple[set[str], set[str]]:
        topics = {name for name in admin.list_topics(timeout=20).topics if name[:2] != "__"}
        groups = admin.list_consumer_groups(request_timeout=20).result().valid
        return topics, {group.group_id for group in groups}

    topics_before, groups_before = names()
    yield tallystick_kafka
    topics, groups = names()
    new_topics, new_groups = [*(topics - topics_before)], [*(groups - groups_before)]
    deletions = {
        **(admin.delete_topics(new_topics) if new_topics else {}),
        **(admin.delete_consumer_groups(new_groups) if new_groups else {}),
    }
    for deleted in deletions.values():
        deleted.result(20)


@pytest.fixture(scope="session")
def shared_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The one Spark of this process, whichever tests run in it; nobody else may stop it."""
    config = {
        "spark.ui.enabled": "false",
        "spark.driver.extraJavaOptions": jvm.options(),
        **loaded_daemon.SETTINGS,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.local.dir": str(tmp_path_factory.mktemp("spark")),
        "spark.executorEnv.TALLYSTICK_STATE_DIR": str(tmp_path_factory.mktemp("state")),
    }
    with loaded_daemon.stand_ins():
        session = ts.spark_session("tests", master="local[2]", config=config)
    session.sparkContext.setLogLevel("ERROR")
    if PYSPARK_VERSION >= streaming.PYSPARK_VERSION_MIN:
        ts.register(session)
    yield session
    session.stop()
