"""What a user writes, checked as it is written; nothing is started."""

import copy

import pytest
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import tallystick as ts

KEYED = ts.Pipeline("p").key_by("user")


def test_a_column_of_an_aggregate_is_no_function():
    with pytest.raises(ts.OptionError) as refused:
        KEYED.process(ts.count(), output="user string, n bigint")

    assert 'Wrap it: ts.aggregate({"n": ts.count()})' in str(refused.value)
    assert "lambda" not in str(refused.value)


def test_a_stateful_processor_needs_its_output_told():
    class Mine(StatefulProcessor):
        def init(self, handle): ...
        def handleInputRows(self, key, rows, timerValues): ...
        def close(self): ...

    with pytest.raises(ts.OptionError, match=r"process\(Mine\(\)\): .* needs output="):
        KEYED.process(Mine())


@pytest.mark.parametrize("name", ["watermark_delay", "idle_after"])
@pytest.mark.parametrize(
    "given", [-1, 1.5, True, "ten seconds", "10 fortnights", "10", "-1 second"]
)
def test_a_time_is_whole_ms_or_a_number_and_its_unit(name, given):
    with pytest.raises(ts.OptionError, match=f"{name}=.*expected whole ms from 0, or a text such"):
        KEYED.process(ts.deduplicate(), **{name: given})
    (step,) = KEYED.process(ts.deduplicate(), **{name: "2 minutes"}).steps
    assert getattr(step, f"{name}_ms") == 120_000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"idle_advance": True}, "idle_advance=True needs idle_after="),
        ({"watermark_column": "n", "watermark_delay": 5}, "leave watermark_delay= out"),
    ],
)
def test_ways_to_a_watermark_that_do_not_go_together(settings, message):
    with pytest.raises(ts.OptionError, match=message):
        KEYED.process(ts.deduplicate(), event_time="n", **settings)


def test_a_column_is_in_a_key_once():
    with pytest.raises(
        ts.OptionError, match=r"key_by\('a', 'b', 'a'\): 'a' is there more than once"
    ):
        ts.Pipeline("p").key_by("a", "b", "a")


def test_what_a_second_call_would_replace_in_silence_is_refused():
    source, sink = ts.KafkaSource("k:1", topics=["t"]), ts.KafkaSink("k:1", topic="out")
    pipeline = ts.Pipeline("p").read(source).write(sink)
    with pytest.raises(ts.OptionError, match=r"write\(\) was called before.*gets all sinks"):
        pipeline.write(ts.FileSink("files"))
    with pytest.raises(ts.OptionError, match=r"read\(\) was called before.*gets all sources"):
        pipeline.read(source)


def test_process_asks_for_a_key():
    with pytest.raises(ts.OptionError, match=r"'p': process\(\) needs key_by\(\) before it"):
        ts.Pipeline("p").process(ts.deduplicate())


@pytest.mark.parametrize(
    "name", ["read", "map_batches", "filter", "transform", "key_by", "write", "start"]
)
def test_a_key_asks_for_its_process(name):
    with pytest.raises(ts.OptionError, match=rf"{name}\(\) stands right after key_by.*'user'"):
        getattr(KEYED, name)(None)


@pytest.mark.parametrize("pipeline", [ts.Pipeline("p"), KEYED])
def test_other_attributes_are_missing_as_python_has_it(pipeline):
    with pytest.raises(
        AttributeError, match=r"has no attribute 'proces'.*mean 'process'"
    ) as refused:
        pipeline.proces()

    assert not isinstance(refused.value, ts.OptionError)
    assert not hasattr(KEYED, "write")
    assert copy.deepcopy(pipeline) == pipeline


@pytest.mark.parametrize("setting", [{"name": "other"}, {"accept": ["lost-output-of-epoch-3"]}])
def test_what_is_for_foreach_batch_is_refused_in_a_pipeline(setting):
    """It would have no effect, and nobody would say so."""
    sink = ts.KafkaSink("nowhere:9092", topic="out", **setting)
    pipeline = ts.Pipeline("p").read(ts.KafkaSource("nowhere:9092", topics=["in"])).write(sink)
    with pytest.raises(ts.OptionError, match="is for foreachBatch"):
        pipeline.start(None, checkpoint="unused")


@pytest.mark.parametrize(
    ("name", "group", "prefix"),
    [("orders-token", None, "tallystick-"), ("orders", "acme-orders-token", "acme-")],
)
def test_a_group_that_keeps_a_token_is_no_sources(name, group, prefix):
    """Positions among its tokens stop a pipeline at every start: this one, or another."""
    source = ts.KafkaSource("nowhere:9092", topics=["in"], group_id=group)
    sink = ts.KafkaSink("nowhere:9092", topic="out", transactional_id_prefix=prefix)
    with pytest.raises(ts.OptionError, match=r"pipeline 'orders' keeps its token.* another"):
        ts.Pipeline(name).read(source).write(sink).start(None, checkpoint="unused")


def test_the_name_of_a_query_is_no_part_of_anothers_transactional_id():
    with pytest.raises(ts.OptionError, match=r"'orders/kafka-1/0/0'.*expected none with '/'"):
        ts.KafkaSink("nowhere:9092", topic="out", name="orders/kafka-1/0/0")


@pytest.mark.parametrize("guarantee", ["at_least_once", "none"])
def test_a_recovery_time_without_transactions_is_refused(guarantee):
    settings = {"transactions": "task", "guarantee": guarantee, "max_recovery_ms": 1000}
    with pytest.raises(ts.OptionError, match="is for guarantee='exactly_once'"):
        ts.KafkaSink("nowhere:9092", topic="out", **settings)
