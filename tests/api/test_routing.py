"""`write` with several outputs: who gets which rows, and what is refused before anything starts."""

import threading
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import tallystick as ts
from tallystick.api.kafka_sink import topology_of
from tests.api.test_explain import NOWHERE, facts, source, without_spark  # noqa: F401

ALERTS = "user string, why string"


def sink(topic: str = "out", **settings: Any) -> ts.KafkaSink:
    return ts.KafkaSink(NOWHERE, topic=topic, key="user", value=ts.Json(), **settings)


def judge(batch: ts.KeyedBatch) -> ts.Update:
    return ts.Update()


def split(rows: pa.RecordBatch) -> ts.Rows:
    return ts.Rows(rows, {"alerts": rows})


def first(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows.slice(0, 1)


def worded(rows: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch({"user": rows["why"], "why": rows["why"]})


def is_large(rows: pa.RecordBatch) -> pa.BooleanArray:
    return pc.greater(rows["n"], 7)


def judging(**outputs: Any) -> ts.Pipeline:
    """One keyed step, with these outputs."""
    return (
        ts.Pipeline("judging")
        .read(source())
        .key_by("user")
        .process(ts.vectorised(judge, state="", outputs=outputs), output="user string, n bigint")
    )


def test_it_is_explained_who_gets_which_rows_and_how() -> None:
    pipeline = judging(alerts=ALERTS, audit="n bigint").write(
        ts.when(sink(), is_large),
        ts.FileSink("/files"),
        alerts=[sink("alerts"), ts.when(sink("more", transactions="task"), is_large)],
        audit=[],
    )
    text = pipeline.explain()
    lines = facts(text)

    assert lines["step 1"][2:5] == [
        "puts out: user string, n bigint",
        f"output alerts: {ALERTS}",
        "output audit: n bigint",
    ]
    assert lines["sink kafka-1"][0].startswith("main output when is_large, to topic out")
    assert lines["sink kafka-1"][0].endswith("one transaction per epoch")
    (alerts,) = [line for line in text.splitlines() if line.startswith("sink alerts-kafka-1 ")]
    assert "output alerts, to topic alerts" in alerts
    assert alerts.endswith("in the transaction of kafka-1")
    assert lines["dropped"] == ["output audit: no sink gets it, as write(audit=[]) says"]
    uids = [uid for uid, _ in pipeline.topology.by_uid]
    assert uids == ["kafka-1", "alerts-kafka-1", "files-1", "alerts-kafka-2"]
    assert [output.topic for output, _ in pipeline.topology.written] == ["out", "alerts"]
    selections = {uid: pipeline.topology.selection(uid) for uid in uids}
    assert [selection.output for selection in selections.values()] == ["", "alerts", "", "alerts"]
    assert [uid for uid in uids if selections[uid].when] == ["kafka-1", "alerts-kafka-2"]


def test_functions_before_sinks_are_explained_and_their_columns_are_the_sinks_own() -> None:
    pipeline = judging(alerts="why string").write(
        ts.when(ts.mapped(sink(), split), is_large),
        alerts=ts.mapped(ts.mapped(sink("alerts"), worded), first),  # which has no column user
    )
    text = pipeline.explain()
    assert "main output when is_large through split, to topic out" in text
    assert "output alerts through first, worded, to topic alerts" in text
    with pytest.raises(ts.OptionError, match="user"):
        judging(alerts="why string").write(sink(), alerts=sink("alerts")).explain()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ts.mapped(sink(), None), r"mapped\(function=None\): expected a function"),
        (lambda: ts.mapped("out", worded), r"mapped\(sink='out'\): expected ts\.KafkaSink"),
        (lambda: ts.mapped(ts.when(sink(), is_large), worded), "rows are chosen before they are"),
        (lambda: ts.when(ts.when(sink(), is_large), is_large), "give one predicate"),
    ],
)
def test_functions_before_sinks_that_cannot_be(build: Any, message: str) -> None:
    with pytest.raises(ts.OptionError, match=message):
        build()


def test_a_function_before_a_sink_that_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()

    def locked(rows: pa.RecordBatch) -> pa.RecordBatch:
        with lock:
            return rows

    with pytest.raises(ts.OptionError, match=r"mapped\(\): the function locked cannot be sent"):
        judging().write(ts.mapped(sink(), locked)).explain()


def test_functions_of_batches_have_outputs_too_and_one_output_may_come_from_several_steps() -> None:
    mapped = (
        ts.Pipeline("mapped")
        .read(source())
        .map_batches(split, outputs={"alerts": ALERTS})
        .map_batches(split, outputs={"alerts": ALERTS})
    )
    pipeline = mapped.write(sink(), alerts=sink("alerts"))
    assert facts(pipeline.explain())["step 2"] == ["map_batches split", f"output alerts: {ALERTS}"]
    other = {"alerts": "user string, why bigint"}
    clash = mapped.map_batches(split, outputs=other).write(sink(), alerts=sink("alerts"))
    with pytest.raises(
        ts.OptionError, match="both have an output 'alerts', with different columns"
    ):
        clash.explain()


@pytest.mark.parametrize(
    ("outputs", "write", "message"),
    [
        ({"alerts": ALERTS}, {}, r"no sink gets the output 'alerts'.*write\(\.\.\., alerts=\[\]\)"),
        ({}, {"alerts": []}, "no step has an output 'alerts': the pipeline has none"),
        (
            {"alerts": ALERTS},
            {"alerts": sink("a"), "alarms": sink("b")},
            r"Did you mean 'alerts'\?",
        ),
        ({"main": ALERTS}, {}, "step process-1: 'main' would be read as the main output"),
        ({"a b": ALERTS}, {}, "step process-1: the name 'a b'"),
        ({"alerts": "no such type"}, {"alerts": sink("a")}, "output 'alerts'"),
        (
            {"alerts": "why string"},
            {"alerts": sink("a")},
            "'user': there is no column",
        ),
    ],
)
def test_outputs_and_sinks_that_do_not_match_are_refused(outputs, write, message) -> None:
    with pytest.raises(ts.OptionError, match=message):
        judging(**outputs).write(sink(), **write).explain()


def test_a_predicate_that_cannot_be_sent_is_refused() -> None:
    lock = threading.Lock()

    def guarded(rows: pa.RecordBatch) -> pa.BooleanArray:
        with lock:
            return is_large(rows)

    pipeline = judging().write(ts.when(sink(), guarded))
    with pytest.raises(ts.OptionError, match="predicate guarded cannot be sent"):
        pipeline.explain()


def test_a_function_with_outputs_before_a_transform_is_refused() -> None:
    pipeline = (
        ts.Pipeline("framed")
        .read(source())
        .map_batches(split, schema="user string", outputs={"alerts": ALERTS})
        .transform(lambda rows: rows)
        .write(sink(), alerts=sink("alerts"))
    )
    with pytest.raises(
        ts.OptionError, match=r"map_batches before transform has outputs \(alerts\)"
    ):
        pipeline.explain()


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda p: p.write(alerts=sink()), r"no sink gets the main output.*write\(sink, alerts="),
        (lambda p: p.write("topic"), r"write\(sinks='topic'\): expected ts\.KafkaSink"),
        (lambda p: p.write(sink(), alerts="topic"), r"write\(alerts='topic'\): expected ts\.Kaf"),
        (lambda p: p.write(sink(), main=sink()), "'main' would be read as the main output"),
        (lambda p: ts.when(ts.when(sink(), is_large), is_large), "give one predicate"),
        (lambda p: ts.when(sink(), True), r"when\(predicate=True\): expected a function"),
        (lambda p: ts.when(is_large, sink()), r"when\(sink=.*expected ts\.KafkaSink"),
        (lambda p: ts.when(is_large, is_large), r"when\(sink=.*expected ts\.KafkaSink"),
    ],
)
def test_what_write_cannot_mean_is_refused_at_once(write, message) -> None:
    with pytest.raises(ts.OptionError, match=message):
        write(judging(alerts=ALERTS))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transaction_timeout_ms": 120_000}, "their transaction_timeout_ms differ"),
        ({"transactional_id_prefix": "x-"}, "their transactional_id_prefix differ"),
        ({"options": {"kafka.sasl.password": "secret"}}, "their options differ: make"),
        ({"token_topic": "elsewhere"}, "kept under topic 'out'.*in 'kafka-2'"),
        ({"topic": None, "token_topic": "elsewhere"}, "kept under topic 'out'"),
    ],
)
def test_sinks_that_share_a_transaction_agree_on_it(settings, message) -> None:
    with pytest.raises(ts.OptionError, match=message) as refused:
        topology_of([sink(), sink(**{"topic": "more", **settings})])
    assert "secret" not in str(refused.value)


def test_another_cluster_is_told_to_have_transactions_of_tasks() -> None:
    other = ts.KafkaSink("elsewhere:9092", topic="out", key="user", value=ts.Json())
    with pytest.raises(ts.OptionError, match=r"bootstrap_servers differ.*transactions='task' in"):
        topology_of([sink(), other])
    shared = topology_of([sink(), sink("rows", token_topic="out"), sink("letters")])
    assert [partner.uid for partner in shared.sharing] == ["kafka-2", "kafka-3"]
    assert shared.others == ()


def test_malformed_records_go_with_any_sink_of_the_transaction_but_to_none_of_their_topics() -> (
    None
):
    value = ts.Json("user string", mode="deadletter")
    read = ts.Pipeline("letters").read(ts.KafkaSource(NOWHERE, topics=["in"], value=value))
    read.write(sink(), sink("more", dead_letter_topic="dead")).explain()
    for topic in ("out", "more"):
        with pytest.raises(ts.OptionError, match="is the output topic itself"):
            read.write(sink(), sink("more", dead_letter_topic=topic)).explain()
    with pytest.raises(ts.OptionError, match="that has transactions='epoch'"):
        read.write(sink(), sink("b", transactions="task", dead_letter_topic="dead")).explain()
