"""The words of doctor, page, metrics, alerts and log about each fault: docs/faults.md.

Each fault is caused to a pipeline that works and is fed. The facts of the table must hold again;
RECORD_FAULTS=1 writes the words of the table anew, and `-m tests.generated_pages` the page.
"""

import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from confluent_kafka import OFFSET_END, TopicPartition
from confluent_kafka.admin import AdminClient

from tallystick.testing import EmbeddedKafka
from tallystick.testing.process import free_ports
from tests.faults.scene import START_S, Scene, Seen, as_json, scene_of
from tests.faults.seen import keep, known
from tests.spark.flow import Flow
from tests.spark.prometheus import MARKS
from tests.waiting import wait_until

pytestmark = MARKS
LONG_S = 20.0
"""Long after a healthy pipeline would have decided the next epoch."""
AHEAD_S = 60.0


@dataclass(frozen=True)
class Fault:
    """A fault or a death.

    Args:
        cause: brings it about, and asserts that it hit.
        exit_code: of the doctor.
        checks: that have to find something.
        alert: one that has to fire; "": none has to.
        ahead_s: how far the clock is ahead.
        command: of the job; taken back, the pipeline works as before.
    """

    cause: Callable[[Scene], None]
    exit_code: int
    checks: frozenset[str]
    alert: str = ""
    ahead_s: float = 0.0
    command: str = ""


def killed_driver(scene: Scene) -> None:
    scene.command("hold")
    wait_until(lambda: is_held(scene), "an epoch is open")
    scene.kill()


def is_held(scene: Scene) -> bool:
    """True if an epoch is open for longer than it takes."""
    open_s = scene.samples().get("tallystick_epoch_open_seconds", {})
    return any(seconds > 1.5 for seconds in open_s.values())


def killed_jvm(scene: Scene) -> None:
    os.kill(scene.jvm(), signal.SIGKILL)
    wait_until(lambda: scene.process.poll() is not None, "the driver ends")


def hung_function(scene: Scene) -> None:
    scene.command("hang")
    wait_until(lambda: is_held(scene), "an epoch is open")


def hung_member(scene: Scene) -> None:
    os.kill(scene.member(), signal.SIGSTOP)
    wait_until(lambda: is_held(scene), "an epoch is open")


def paused_broker(scene: Scene) -> None:
    scene.at_end.callback(scene.flow.kafka.resume, 1)
    scene.flow.kafka.pause(1)


def fenced(scene: Scene) -> None:
    metrics_port, ui_port = free_ports(2, "127.0.0.1")
    scene.start(scene.folder / "second.log", metrics_port, ui_port)
    wait_until(lambda: scene.process.poll() is not None, "the first driver ends")


def expired_offsets(scene: Scene) -> None:
    scene.kill()
    scene.flow.feed(50)
    admin = AdminClient(scene.flow.confluent)
    topic, partitions = scene.flow.topic_in, range(scene.flow.partitions)
    places = [TopicPartition(topic, partition, OFFSET_END) for partition in partitions]
    for deleted in admin.delete_records(places).values():
        deleted.result(20)
    scene.process = scene.start(scene.log, scene.metrics_port, scene.ui_port)
    wait_until(
        lambda: scene.process.poll() is not None,
        lambda: f"the next run ends: {scene.log_text()}",
        timeout_s=START_S,
    )


def full_disk(scene: Scene) -> None:
    scene.command("full")
    wait_until(lambda: "No space left" in scene.log_text(), "the disk is full")


def storage_away(scene: Scene) -> None:
    scene.checkpoint.rename(scene.folder / "elsewhere")
    scene.checkpoint.write_text("no folder")
    wait_until(lambda: "Not a directory" in scene.log_text(), "the storage is away")


FAULTS = {
    "driver killed (-9) with an epoch prepared": Fault(
        killed_driver, 1, frozenset({"transactions", "progress"}),
        "TallystickGoneWithOpenTransaction",
    ),
    "JVM killed (-9)": Fault(killed_jvm, 1, frozenset({"progress"})),
    "function hangs": Fault(
        hung_function, 1, frozenset({"progress"}), "TallystickStandsStill", command="hang"
    ),
    "task's process hangs (SIGSTOP)": Fault(
        hung_member, 1, frozenset({"progress"}), "TallystickStandsStill"
    ),
    "broker paused (SIGSTOP)": Fault(
        paused_broker, 2, frozenset({"kafka"}), "TallystickStandsStill"
    ),
    "fenced by a second run": Fault(
        fenced, 0, frozenset(), "TallystickGoneWithOpenTransaction"
    ),
    "offsets expired unread, while it was down": Fault(
        expired_offsets, 2, frozenset({"topics"})
    ),
    "disk full": Fault(full_disk, 1, frozenset({"progress"})),
    "storage away": Fault(storage_away, 2, frozenset({"checkpoint"})),
    "clock a minute ahead": Fault(lambda _: None, 1, frozenset({"clock"}), ahead_s=AHEAD_S),
}  # fmt: skip


SCENES = [
    ("function hangs", "driver killed (-9) with an epoch prepared"),
    ("JVM killed (-9)",),
    *((name,) for name in [*FAULTS][3:]),
]
"""Faults that come one after the other to one pipeline: each start takes seconds of a core."""


@pytest.mark.parametrize("names", SCENES, ids=lambda names: names[0].partition(" (")[0])
def test_each_fault_is_seen(
    tallystick_kafka: EmbeddedKafka, tmp_path: Path, names: tuple[str, ...]
) -> None:
    flow = Flow(tallystick_kafka, None, tmp_path)
    with scene_of(flow, tmp_path, FAULTS[names[0]].ahead_s) as scene:
        for name in names:
            fault = FAULTS[name]
            fault.cause(scene)
            seen = scene.look(LONG_S)
            assert_told(name, seen)
            if name != names[-1]:
                scene.take_back(fault.command)


def test_no_fault_is_left_out() -> None:
    assert Counter(name for names in SCENES for name in names) == Counter([*FAULTS])


def assert_told(name: str, seen: Seen) -> None:
    """The table tells what was seen of a fault."""
    fault = FAULTS[name]
    print(as_json(seen))
    checks = {finding.partition(":")[0] for finding in seen.doctor}
    assert seen.exit_code == fault.exit_code, seen
    assert checks >= fault.checks, seen
    # Which others fire within seconds depends on when Prometheus came by.
    alerts = (fault.alert,) if fault.alert else ()
    assert {*alerts} <= {*seen.alerts}, seen
    seen = replace(seen, alerts=alerts)
    if os.environ.get("RECORD_FAULTS"):
        keep(name, as_json(seen))
    told = known()[name]
    assert told["exit_code"] == seen.exit_code
    assert {finding.partition(":")[0] for finding in told["doctor"]} == checks
    assert told["alerts"] == [*alerts]
    assert set(told["metrics"]) == set(seen.metrics)
    # How soon a warning comes depends on how long earlier epochs took.
    assert told["log"].startswith("ERROR") == seen.log.startswith("ERROR")
