"""Savepoints on Spark and a real broker: taken, restored, forked, rewritten, and looked into."""

import json
from dataclasses import replace
from pathlib import Path

import polars
import pytest
from pyspark.sql.functions import col
from typer.testing import CliRunner

import tallystick as ts
from tallystick.__main__ import app
from tallystick.epoch import manifest as m
from tallystick.epoch.micro_batches import settled_path
from tallystick.ops import savepoints
from tallystick.ops.inspection import inspect
from tallystick.storage.file_storage import FileStorage
from tests.spark.flow import Flow
from tests.spark.numbering import numbering, picked
from tests.spark.topics import produce, read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark]

KEYS = 7


class Counting:
    """A pipeline that numbers the rows of each key, and what it was fed."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.fed = 0

    def feed(self, count: int) -> None:
        """Append records with ascending numbers."""
        numbers = range(self.fed, self.fed + count)
        records = [(f"k{n % KEYS}", json.dumps({"k": f"k{n % KEYS}", "n": n})) for n in numbers]
        produce(self.flow.confluent, self.flow.topic_in, records)
        self.fed += count

    def pipeline(
        self, name: str = "", topic: str = "", *, parallelism: int = 2, groups: int | None = 16
    ) -> ts.Pipeline:
        """Under a name of its own, into a topic of its own, if wanted."""
        flow = self.flow
        source = flow.source(
            value=ts.Json("k string, n bigint", mode="failfast"), max_offsets_per_trigger=60
        )
        return (
            ts.Pipeline(name or flow.name)
            .read(source)
            .map_batches(picked(), schema="k string, n bigint")
            .key_by("k", max_parallelism=groups)
            .process(
                numbering(),
                output="k string, n bigint, seen bigint",
                parallelism=parallelism,
                uid="numbers",
            )
            .write(flow.sink(topic=topic or flow.topic_out, key="k", value=ts.Json()))
        )

    def output(self, topic: str = "") -> list[tuple[int, int]]:
        """(n, its number), sorted."""
        records = read_committed(self.flow.confluent, topic or self.flow.topic_out)
        rows = [json.loads(record.value or "") for record in records]
        return sorted((row["n"], row["seen"]) for row in rows)

    def expected(self, start: int, stop: int) -> list[tuple[int, int]]:
        """What the records of these numbers become: keys take turns."""
        return [(n, n // KEYS + 1) for n in range(start, stop)]


@pytest.fixture
def counting(flow: Flow) -> Counting:
    counting = Counting(flow)
    counting.feed(140)
    flow.run(counting.pipeline())
    return counting


def leave_a_failed_attempt(checkpoint: FileStorage) -> None:
    """A manifest of the newest epoch that Kafka does not name, and without the state.

    Nor is there a note which of the two counts, as after a run that died.
    """
    newest = m.manifests(checkpoint.names(m.FOLDER))[-1]
    checkpoint.delete(settled_path(newest))
    manifest = m.decode(checkpoint.get(newest) or b"", newest)
    path = m.manifest_path(manifest, "a-failed-attempt")
    checkpoint.put(path, replace(manifest, state=()).encode())


def folder(path: Path) -> FileStorage:
    return FileStorage(str(path))


def test_a_savepoint_goes_on_exactly_where_kafka_stands_and_else_only_if_told(
    counting: Counting, tmp_path: Path
) -> None:
    flow, old, new = counting.flow, tmp_path / "old", tmp_path / "new"
    savepoints.create(folder(flow.checkpoint), folder(old))
    counting.feed(70)
    flow.run(counting.pipeline())
    savepoints.create(folder(flow.checkpoint), folder(new))

    # The newest one: exactly, with another parallelism, though the checkpoint is a new one.
    savepoints.restore(folder(new), folder(tmp_path / "from-new"))
    counting.feed(70)
    flow.run(counting.pipeline(parallelism=3), checkpoint=tmp_path / "from-new")
    assert counting.output() == counting.expected(0, 280)

    # The older one: refused, until a person has stated what the message asks for.
    savepoints.restore(folder(old), folder(tmp_path / "from-old"))
    for _ in range(2):
        with pytest.raises(ts.DataLossError, match="is written a second time") as refused:
            flow.run(counting.pipeline(), checkpoint=tmp_path / "from-old")
    assert counting.output() == counting.expected(0, 280), "nothing was written"
    word = str(refused.value).split("accept='")[1].split("'")[0]
    flow.run(counting.pipeline(), checkpoint=tmp_path / "from-old", accept=[word])
    assert counting.output() == sorted(counting.expected(0, 280) + counting.expected(140, 280))

    # From there on it is exact again, and needs no word; the others have lost the name.
    counting.feed(70)
    flow.run(counting.pipeline(), checkpoint=tmp_path / "from-old")
    assert counting.output() == sorted(counting.expected(0, 350) + counting.expected(140, 280))
    with pytest.raises(ts.DataLossError, match="new-lineage-after-"):
        flow.run(counting.pipeline(), checkpoint=tmp_path / "from-new")


def test_a_savepoint_of_a_restored_one_that_has_not_run_goes_on_exactly(
    counting: Counting, tmp_path: Path
) -> None:
    """Kafka stands at the epoch of the original: a program was killed behind its restore."""
    flow, last = counting.flow, counting.flow.checkpoint
    for number in range(3):
        savepoints.create(folder(last), folder(tmp_path / f"saved-{number}"))
        last = tmp_path / f"restored-{number}"
        savepoints.restore(folder(tmp_path / f"saved-{number}"), folder(last))
        counting.pipeline().recover(checkpoint=str(last))
    counting.feed(70)
    flow.kafka.create_topic(topic := f"{flow.name}-fork", 2)

    savepoints.restore(folder(tmp_path / "saved-2"), folder(tmp_path / "fork"))
    with pytest.raises(ts.DataLossError, match="had not run yet, perhaps this one"):
        flow.run(counting.pipeline("fork-of-it", topic), checkpoint=tmp_path / "fork")
    flow.run(counting.pipeline(), checkpoint=last)

    assert counting.output() == counting.expected(0, 210)
    with pytest.raises(ts.DataLossError, match="new-lineage-after-"):
        flow.run(counting.pipeline(), checkpoint=tmp_path / "restored-1")
    assert counting.output() == counting.expected(0, 210), "nothing was written"


def test_a_fork_has_the_state_of_the_savepoint_in_other_key_groups(
    counting: Counting, tmp_path: Path
) -> None:
    flow = counting.flow
    assert flow.spark is not None
    leave_a_failed_attempt(folder(flow.checkpoint))
    command = ["savepoint", "create", str(flow.checkpoint), str(tmp_path / "saved")]
    assert "only Kafka knows" in CliRunner().invoke(app, command).output
    servers = flow.kafka.kafka_options["kafka.bootstrap.servers"]
    command += ["--bootstrap-servers", servers]
    assert CliRunner().invoke(app, command).exit_code == 0
    savepoints.migrate(
        folder(tmp_path / "saved"), folder(tmp_path / "more"), {"numbers": 50}, tmp_path
    )
    savepoints.restore(folder(tmp_path / "more"), folder(tmp_path / "fork"))
    counting.feed(70)
    topic = f"{flow.name}-fork"
    flow.kafka.create_topic(topic, 2)

    with pytest.raises(ts.TallystickError, match="max_parallelism=16"):
        flow.run(counting.pipeline("fork-of-it", topic), checkpoint=tmp_path / "fork")
    fork = counting.pipeline("fork-of-it", topic, parallelism=5, groups=None)
    flow.run(fork, checkpoint=tmp_path / "fork")
    flow.run(counting.pipeline())

    assert counting.output(topic) == counting.expected(140, 210)
    assert counting.output() == counting.expected(0, 210)
    for checkpoint, groups in ((tmp_path / "fork", 50), (flow.checkpoint, 16)):
        rows = ts.read_state(flow.spark, str(checkpoint)).collect()
        assert {row["k"]: row["seen"] for row in rows} == {f"k{key}": 30 for key in range(KEYS)}
        assert len({row["k"] for row in rows}) == len(rows)
        assert all(0 <= row["key_group"] < groups for row in rows)
        assert inspect(folder(checkpoint), verify=True).is_whole
    saved = ts.read_state(flow.spark, str(tmp_path / "more"), "numbers").collect()
    assert {row["seen"] for row in saved} == {20}


def test_a_pipeline_goes_on_from_state_that_was_written_from_a_table(
    counting: Counting, tmp_path: Path
) -> None:
    """Some keys have other numbers, one has none any more; a frame of Spark's and one of Polars."""
    flow, saved = counting.flow, tmp_path / "saved"
    assert flow.spark is not None
    savepoints.create(folder(flow.checkpoint), folder(saved))
    state = ts.read_state(flow.spark, str(saved), "numbers")
    changed = state.where("k <> 'k3'").withColumn("seen", col("seen") + 1000)

    ts.write_state(changed, saved, "numbers", to=tmp_path / "by-spark")
    frame = polars.from_arrow(changed.toArrow())
    ts.write_state(frame, tmp_path / "by-spark", "numbers", to=tmp_path / "written")
    savepoints.restore(folder(tmp_path / "written"), folder(tmp_path / "restored"))
    counting.feed(70)
    flow.run(counting.pipeline(parallelism=3), checkpoint=tmp_path / "restored")

    before = counting.expected(0, 140)
    after = [
        (n, n // KEYS + 1 - 140 // KEYS if n % KEYS == 3 else n // KEYS + 1 + 1000)
        for n in range(140, 210)
    ]
    assert counting.output() == sorted(before + after)
