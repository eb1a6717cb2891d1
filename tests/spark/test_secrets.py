"""A password is nowhere: not in reprs, plans, progress, errors, logs, checkpoints or tokens."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tallystick.kafka.broker import KafkaBroker
from tallystick.testing import EmbeddedKafka, Security
from tests.spark.driver_process import DriverProcess
from tests.spark.flow import Flow

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(900)]

PASSWORD = "Zebra.42-in-the-attic"


@pytest.fixture(scope="module")
def guarded_kafka() -> Iterator[EmbeddedKafka]:
    """A broker with TLS and passwords."""
    with EmbeddedKafka(security=Security({"admin": PASSWORD})) as kafka:
        yield kafka


def test_a_password_is_in_nothing_that_a_run_shows_or_leaves_behind(
    guarded_kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    """One run that succeeds and one that fails, all said and kept by driver, workers and Spark."""
    flow = Flow(guarded_kafka, None, tmp_path)
    flow.feed(30)
    left = tmp_path / "left"
    left.mkdir()
    settings = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": left.as_uri(),
        "spark.eventLog.compress": "false",
        "log.level": "INFO",
    }
    with DriverProcess(left / "driver.log", settings) as driver:
        driver.run(flow.spec(show=True))
        assert driver.wait_for_end() is None
        flow.feed(30)
        driver.run(flow.spec(show=True, reading_dies=True))
        error = driver.wait_for_end() or ""
    broker = KafkaBroker(flow.sink().output.config)
    token = broker.group_offsets(f"tallystick-{flow.name}-token")
    broker.close()

    assert PASSWORD in str(flow.kafka.kafka_options), "it is in use"
    texts = {
        "error": error,
        "token": str(token),
        "source": repr(flow.source()) + repr(flow.source().config),
        "sink": repr(flow.sink()) + repr(flow.sink().output),
        "pipeline": repr(flow.pipeline()),
    }
    for path in (*left.rglob("*"), *flow.checkpoint.rglob("*")):
        if path.is_file():
            texts[str(path.relative_to(tmp_path))] = path.read_bytes().decode("latin-1")
    assert f"{flow.checkpoint.name}/tallystick/" in " ".join(texts)
    assert "lineage" in texts["token"]
    assert any("SparkListenerSQLExecutionStart" in text for text in texts.values())
    assert "this attempt died while it read" in error
    assert "== Physical Plan ==" in texts["left/driver.log"]
    assert sorted(name for name, text in texts.items() if PASSWORD in text) == []
