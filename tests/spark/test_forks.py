"""A program tried beside the one that runs: `tallystick fork`, and `tallystick compare`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import tallystick as ts
from tallystick.__main__ import app
from tallystick.checkpoint.forks import fork_of
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.group_offsets import fetch
from tallystick.storage.file_storage import FileStorage
from tests.spark.flow import Flow
from tests.spark.numbering import numbering
from tests.spark.topics import produce, read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark]

KEYS = 7


def numbers(flow: Flow, weight: int = 1, *, group_id: str | None = None) -> ts.Pipeline:
    """Each row with its number in its key, wherever epochs end; another weight, another program."""
    source = flow.source(
        value=ts.Json("k string, n bigint"), max_offsets_per_trigger=60, group_id=group_id
    )
    return (
        ts.Pipeline(flow.name)
        .read(source)
        .select("k", f"n * {weight} AS n")
        .key_by("k", max_parallelism=16)
        .process(
            numbering(), output="k string, n bigint, seen bigint", parallelism=2, uid="numbers"
        )
        .write(flow.sink(key="k", value=ts.Json()))
    )


def feed(flow: Flow, count: int, first: int) -> None:
    rows = [{"k": f"k{n % KEYS}", "n": n} for n in range(first, first + count)]
    records = [(row["k"], json.dumps(row)) for row in rows]
    produce(flow.confluent, flow.topic_in, records)


def call(flow: Flow, *arguments: object) -> Result:
    servers = ("--bootstrap-servers", flow.kafka.bootstrap_servers)
    return CliRunner().invoke(app, [*map(str, arguments), *servers])


def written(flow: Flow, topic: str) -> list[tuple[str | None, str | None]]:
    return [(record.key, record.value) for record in read_committed(flow.confluent, topic)]


def test_a_fork_goes_on_beside_the_original_and_is_compared(flow: Flow, tmp_path: Path) -> None:
    """The same program writes the same, and another one's difference is named.

    The original's output and positions are what they would have been.
    """
    canary, wrong = f"{flow.name}-canary", f"{flow.name}-wrong"
    feed(flow, 140, 0)
    flow.run(numbers(flow, group_id="of-the-original"))
    before = written(flow, flow.topic_out)
    places = {topic: tmp_path / topic for topic in (canary, wrong)}
    for topic, place in places.items():
        topics = f"{flow.topic_out}={topic}"
        made = call(flow, "fork", flow.checkpoint, "--to", place, "--topics", topics)
        assert made.exit_code == 0, made.output
        assert f"tallystick compare {flow.topic_out} {topic}" in made.output
    feed(flow, 140, 140)
    shown = _shown(flow, "of-the-original")

    flow.run(numbers(flow, group_id="of-the-original"), checkpoint=places[canary])
    flow.run(numbers(flow, weight=2, group_id="of-the-original"), checkpoint=places[wrong])
    assert written(flow, flow.topic_out) == before, "a fork wrote to the output of the original"
    assert _shown(flow, "of-the-original") == shown, "a fork moved the group of the original"
    assert len(written(flow, canary)) > 0

    ahead = call(flow, "compare", flow.topic_out, canary, "--fork", places[canary], "--live")
    assert ahead.exit_code == 1, ahead.output
    assert "neither" in ahead.output, "the original has written nothing since"
    flow.run(numbers(flow, group_id="of-the-original"))  # its name was taken by nobody
    for arguments in ((), ("--live",), ("--compare", "final")):
        same = call(flow, "compare", flow.topic_out, canary, "--fork", places[canary], *arguments)
        assert (same.exit_code, same.output[:14]) == (0, "no differences"), same.output
    other = call(flow, "compare", flow.topic_out, wrong, "--fork", places[wrong])
    assert other.exit_code == 1, other.output
    assert "280 differences (140 lost, 140 added)" in other.output
    final = call(flow, "compare", flow.topic_out, wrong, "--compare", "final")
    assert final.exit_code == 1, final.output
    assert f"where {flow.topic_out} has" in final.output
    assert f"{KEYS} differences ({KEYS} other value)" in final.output


def test_a_fork_runs_while_the_original_runs(flow: Flow, tmp_path: Path) -> None:
    """Neither fences the other; where old output ends is exact; a restart is a fork's too."""
    canary, place = f"{flow.name}-canary", tmp_path / "new"
    feed(flow, 140, 0)
    original = numbers(flow).start(flow.spark, checkpoint=str(flow.checkpoint), execution="jobs")
    try:
        original.processAllAvailable()
        feed(flow, 500, 140)
        topics = f"{flow.topic_out}={canary}"
        made = call(flow, "fork", flow.checkpoint, "--to", place, "--topics", topics)
        assert made.exit_code == 0, made.output
        forked = numbers(flow).start(flow.spark, checkpoint=str(place), execution="jobs")
        try:
            feed(flow, 100, 640)
            forked.processAllAvailable()
            original.processAllAvailable()
            live = call(flow, "compare", flow.topic_out, canary, "--fork", place, "--live")
            assert live.exit_code == 0, live.output
            assert (original.isActive, forked.isActive) == (True, True)
        finally:
            forked.stop()
        feed(flow, 100, 740)
        original.processAllAvailable()
    finally:
        original.stop()
    fork = fork_of(FileStorage(str(place)))
    assert fork is not None
    starts = fork.starts[flow.topic_out]
    records = read_committed(flow.confluent, flow.topic_out)
    behind = sum(1 for record in records if record.offset >= starts[record.partition])
    assert sum(starts) > 0, "it was forked before there was any output"
    assert behind > 200, "it was not forked in the middle of the 500"

    flow.run(numbers(flow), checkpoint=place)
    same = call(flow, "compare", flow.topic_out, canary, "--fork", place)
    assert (same.exit_code, same.output[:14]) == (0, "no differences"), same.output


def _shown(flow: Flow, group: str) -> dict[int, int]:
    """Return the positions of the input that a group shows."""
    client = Client(KafkaConfig(flow.kafka.bootstrap_servers))
    try:
        offsets = fetch(client, group, None, stable=False, deadline=client.deadline())
    finally:
        client.close()
    return {where.partition: offset for where, (offset, _) in offsets.items()}
