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
from tests.spark.topics import produce, read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark]

KEYS = 7


def totals(flow: Flow, weight: int = 1, *, group_id: str | None = None) -> ts.Pipeline:
    """Running totals by key; another weight is another program."""
    source = flow.source(
        value=ts.Json("k string, n bigint"), max_offsets_per_trigger=60, group_id=group_id
    )
    return (
        ts.Pipeline(flow.name)
        .read(source)
        .select("k", f"n * {weight} AS n")
        .key_by("k", max_parallelism=16)
        .process(ts.aggregate({"total": ts.sum("n")}), parallelism=2, uid="totals")
        .write(flow.sink(key="k", value=ts.Json()))
    )


def feed(flow: Flow, count: int, first: int) -> None:
    numbers = range(first, first + count)
    records = [(f"k{n % KEYS}", json.dumps({"k": f"k{n % KEYS}", "n": n})) for n in numbers]
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
    flow.run(totals(flow, group_id="of-the-original"))
    before = written(flow, flow.topic_out)
    places = {topic: tmp_path / topic for topic in (canary, wrong)}
    for topic, place in places.items():
        topics = f"{flow.topic_out}={topic}"
        made = call(flow, "fork", flow.checkpoint, "--to", place, "--topics", topics)
        assert made.exit_code == 0, made.output
        assert f"tallystick compare {flow.topic_out} {topic}" in made.output
    feed(flow, 140, 140)
    shown = _shown(flow, "of-the-original")

    flow.run(totals(flow, group_id="of-the-original"), checkpoint=places[canary])
    flow.run(totals(flow, weight=2, group_id="of-the-original"), checkpoint=places[wrong])
    assert written(flow, flow.topic_out) == before, "a fork wrote to the output of the original"
    assert _shown(flow, "of-the-original") == shown, "a fork moved the group of the original"
    assert len(written(flow, canary)) > 0

    ahead = call(flow, "compare", flow.topic_out, canary, "--fork", places[canary], "--live")
    assert ahead.exit_code == 1, ahead.output
    assert "neither" in ahead.output, "the original has written nothing since"
    flow.run(totals(flow, group_id="of-the-original"))  # its name was taken by nobody
    for arguments in ((), ("--live",), ("--compare", "final")):
        same = call(flow, "compare", flow.topic_out, canary, "--fork", places[canary], *arguments)
        assert (same.exit_code, same.output[:14]) == (0, "no differences"), same.output
    other = call(flow, "compare", flow.topic_out, wrong, "--fork", places[wrong])
    assert other.exit_code == 1, other.output
    assert "key k3" in other.output
    final = call(flow, "compare", flow.topic_out, wrong, "--compare", "final")
    assert final.exit_code == 1, final.output
    assert f"where {flow.topic_out} has" in final.output
    assert f"{KEYS} differences" in final.output


def test_a_fork_of_a_running_original_starts_at_its_row(flow: Flow, tmp_path: Path) -> None:
    """What the original writes while it is forked belongs to one side of the line."""
    canary = f"{flow.name}-canary"
    feed(flow, 140, 0)
    query = totals(flow).start(flow.spark, checkpoint=str(flow.checkpoint))
    try:
        query.processAllAvailable()
        feed(flow, 1000, 140)
        topics = f"{flow.topic_out}={canary}"
        made = call(flow, "fork", flow.checkpoint, "--to", tmp_path / "new", "--topics", topics)
        assert made.exit_code == 0, made.output
        query.processAllAvailable()
    finally:
        query.stop()
    fork = fork_of(FileStorage(str(tmp_path / "new")))
    assert fork is not None
    assert sum(fork.starts[flow.topic_out]) > 0, "it was not running"

    flow.run(totals(flow), checkpoint=tmp_path / "new")
    same = call(flow, "compare", flow.topic_out, canary, "--fork", tmp_path / "new")
    assert (same.exit_code, same.output[:14]) == (0, "no differences"), same.output


def _shown(flow: Flow, group: str) -> dict[int, int]:
    """Return the positions of the input that a group shows."""
    client = Client(KafkaConfig(flow.kafka.bootstrap_servers))
    try:
        offsets = fetch(client, group, None, stable=False, deadline=client.deadline())
    finally:
        client.close()
    return {where.partition: offset for where, (offset, _) in offsets.items()}
