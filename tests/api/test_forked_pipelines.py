"""A pipeline on the checkpoint of a fork: it writes to the fork's topics, or is refused by name."""

import re
from pathlib import Path

import pytest

import tallystick as ts
from tallystick.api.forks import as_forked
from tallystick.checkpoint.forks import FORK, Fork
from tallystick.errors import ManifestError
from tallystick.storage.file_storage import FileStorage

SERVERS = "localhost:9092"


@pytest.fixture
def fork(tmp_path: Path) -> str:
    """The location of a fork of `job`, whose topics are `out` and `bad`."""
    topics = {"out": "canary-out", "bad": "canary-bad"}
    note = Fork("job-fork-1", topics, {"out": (3, 0), "bad": (0, 0)}, "file:///original")
    FileStorage(str(tmp_path)).put(FORK, note.encode())
    return str(tmp_path)


def source(topics: object = ("in",), **settings: object) -> ts.KafkaSource:
    return ts.KafkaSource(SERVERS, topics=topics, value=ts.Json("k string"), **settings)


def job(*sinks: object, reads: ts.KafkaSource | None = None) -> ts.Pipeline:
    written = sinks or (ts.KafkaSink(SERVERS, topic="out", key="k", value=ts.Json()),)
    return ts.Pipeline("job").read(reads or source()).write(*written)


def test_a_checkpoint_that_is_no_fork_changes_nothing(tmp_path):
    pipeline = job()

    assert as_forked(pipeline, str(tmp_path)) is pipeline
    assert as_forked(pipeline, str(tmp_path / "new")) is pipeline
    assert not (tmp_path / "new").exists(), "a look makes no folder"


def test_name_topics_and_groups_are_the_forks_own(fork):
    """The groups of inputs and of tables too, and a token topic that is one of the topics."""
    table = ts.broadcast(source(["prices"], group_id="mine"), key="k", uid="prices")
    sinks = (
        ts.KafkaSink(SERVERS, topic="out", dead_letter_topic="bad", key="k", value=ts.Json()),
        ts.KafkaSink(SERVERS, topic="bad", token_topic="out", key="k", value=ts.Json()),
        ts.KafkaSink(SERVERS, topic="out", transactions="task", key="k", value=ts.Json()),
    )
    pipeline = (
        ts.Pipeline("job")
        .read(ts.stream(source(group_id="of-the-original")).map_batches(lambda rows: rows))
        .map_batches(ts.enrich(table, on="k"))
        .write(*sinks)
    )

    forked = as_forked(pipeline, fork)

    assert forked.name == "job-fork-1"
    written = [(sink.topic, sink.dead_letter_topic, sink.token_topic) for sink in forked.sinks]
    assert written == [
        ("canary-out", "canary-bad", None),
        ("canary-bad", None, "canary-out"),
        ("canary-out", None, None),
    ]
    assert forked.topology.uid == pipeline.topology.uid, "state and sinks go by the same names"
    (declared,) = forked.inputs.declared(forked.name)
    assert declared.options.group == "tallystick-job-fork-1"
    (of_table,) = (step.state.stream.source for step in forked.steps)
    assert of_table.group_id is None
    assert pipeline.name == "job", "the pipeline itself is as it was"


@pytest.mark.parametrize(
    ("sink", "words"),
    [
        (ts.KafkaSink(SERVERS, topic="audit", key="k", value=ts.Json()), "topic='audit'"),
        (
            ts.KafkaSink(
                SERVERS, topic="out", dead_letter_topic="letters", key="k", value=ts.Json()
            ),
            "dead_letter_topic='letters'",
        ),
        (ts.KafkaSink(SERVERS, token_topic="out"), "without topic="),
        (ts.FileSink("/data/rows"), "FileSink"),
        (ts.DeltaSink("/data/table"), "DeltaSink"),
        (ts.PostgresSink("host=db", table="t"), "PostgresSink"),
        (ts.ConsoleSink(), "ConsoleSink"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("step", ["start", "recover", "explain"])
def test_a_sink_that_would_write_elsewhere_is_refused_by_name(fork, sink, words, step):
    """Before anything is started, and where it stands beside one that is led elsewhere."""
    kept = ts.KafkaSink(SERVERS, topic="out", key="k", value=ts.Json(), uid="kept")
    pipeline = ts.Pipeline("job").read(source()).write(kept, sink)

    with pytest.raises(ts.OptionError, match=re.escape(words)) as refused:
        getattr(pipeline, step)(checkpoint=fork)
    assert "is a fork of file:///original" in str(refused.value)


def test_a_side_output_is_refused_too(fork):
    def split(rows):
        return ts.Rows(rows, late=rows)

    late = ts.KafkaSink(SERVERS, topic="late", key="k", value=ts.Json())
    pipeline = (
        ts.Pipeline("job")
        .read(source())
        .map_batches(split, schema="k string", outputs={"late": "k string"})
        .write(ts.KafkaSink(SERVERS, topic="out", key="k", value=ts.Json()), late=late)
    )

    with pytest.raises(ts.OptionError, match="topic='late'"):
        as_forked(pipeline, fork)


@pytest.mark.parametrize(
    "reads",
    [
        source(["in", "canary-out"]),
        source(re.compile("canary-.*")),
        ts.KafkaSource(SERVERS, assignment={"canary-bad": [7]}),
    ],
    ids=["list", "pattern", "assignment"],
)
def test_a_fork_does_not_write_to_what_the_program_reads(fork, reads):
    with pytest.raises(ts.OptionError, match=r"'canary-(out|bad)', which the program reads"):
        as_forked(job(reads=reads), fork)


def test_nor_to_the_topic_of_a_table(fork):
    table = ts.broadcast(source(["canary-out"]), key="k", uid="prices")
    pipeline = (
        ts.Pipeline("job")
        .read(ts.stream(source()).map_batches(ts.enrich(table, on="k")))
        .write(ts.KafkaSink(SERVERS, topic="out", key="k", value=ts.Json()))
    )

    with pytest.raises(ts.OptionError, match="'canary-out', which the program reads"):
        as_forked(pipeline, fork)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: data.replace(b"canary-out", b"out-canary")]
)
def test_a_damaged_note_starts_nothing(fork, damage):
    """Without it the program would write to the output of the original."""
    storage = FileStorage(fork)
    data = storage.get(FORK)
    assert data is not None
    assert damage(data) != data
    storage.put(FORK, damage(data))

    with pytest.raises(ManifestError, match=r"fork\.json of .*fail their checksum"):
        job().start(checkpoint=fork)
