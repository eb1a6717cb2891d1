"""When `doctor` and the page say that a pipeline stands still, where two clocks differ."""

import json
from typing import Any

import pytest

from tallystick.epoch.manifest import Manifest
from tallystick.host import stopwatch
from tallystick.kafka import cluster
from tallystick.ops.checkpoint_view import CheckpointView
from tallystick.ops.doctor import UNUSUAL_MS, Subject, progress
from tallystick.source.offsets import SourceOffsets
from tallystick.values import Producer, TopicPartition

PARTITION = TopicPartition("in", 0)
NOW_MS = 1_800_000_000_000


class Client:
    """A connection to a cluster of which only the id is known."""

    cluster_id = "c"


@pytest.mark.parametrize(
    ("own_ms", "kafkas_ms", "is_overdue"),
    [
        (2 * UNUSUAL_MS, 2 * UNUSUAL_MS, True),
        (2 * UNUSUAL_MS, None, True),
        (2 * UNUSUAL_MS, 1000, False),  # this machine's clock is ahead
        (1000, 2 * UNUSUAL_MS, False),
    ],
)
def test_a_clock_that_is_ahead_makes_no_pipeline_stand_still(
    monkeypatch: pytest.MonkeyPatch, own_ms: int, kafkas_ms: int | None, is_overdue: bool
) -> None:
    """Decided at `NOW_MS` by the storage's clock; the times of the others are after it."""
    theirs_ms = None if kafkas_ms is None else NOW_MS + kafkas_ms
    monkeypatch.setattr(stopwatch, "now_ms", lambda: NOW_MS + own_ms)
    monkeypatch.setattr(cluster, "clock_ms", lambda _: theirs_ms)
    monkeypatch.setattr(cluster, "list_offsets", lambda *_, **__: {PARTITION: 9})
    monkeypatch.setattr(cluster, "offsets_for_times", lambda *_, **__: {PARTITION: None})
    source = json.dumps(SourceOffsets("c", "g", {PARTITION: 7}).to_json())
    manifest = Manifest(4, "p", "l", (source,), (), Producer("t", 1, 0))
    view = CheckpointView("/c", "p", "l", decided=manifest)
    client: Any = Client()
    subject = Subject({}, client, list, view, (manifest,), None, (NOW_MS,))
    findings = list(progress(subject))
    assert len(findings) == is_overdue
    assert all("of epoch 4, is" in finding.found for finding in findings)
