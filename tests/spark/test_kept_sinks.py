"""Which connected sinks a helper process of Spark keeps from one micro-batch to the next."""

from typing import Any

import pytest

from tallystick.epoch.two_phase import Owner, RunFacts
from tallystick.host.worker_cache import WorkerCache
from tallystick.options.sink import WriteOptions, parse_write_options
from tallystick.spark.streaming import stream_writer

NONE: frozenset[str] = frozenset()


class FakeSink:
    """Notes what it was made of, and that it was closed."""

    made: list["FakeSink"]

    def __init__(self, output: Any, owner: Owner, facts: RunFacts, **_: Any) -> None:
        self.warns = not facts.are_checked
        self.is_closed = False
        self.made.append(self)

    def close(self) -> None:
        """See `TwoPhaseCommitSink.close`."""
        self.is_closed = True


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeSink]:
    """All sinks, in the order in which they were made."""
    monkeypatch.setattr(stream_writer, "KafkaTaskSink", FakeSink)
    kept: Any = WorkerCache(lambda connected: connected.sink.close())
    monkeypatch.setattr(stream_writer, "_sinks", kept)
    FakeSink.made = []
    return FakeSink.made


def options(topic: str = "out") -> WriteOptions:
    checkpoint = {"checkpointLocation": "/checkpoints/x", "kafka.bootstrap.servers": "host:9092"}
    return parse_write_options({**checkpoint, "topic": topic})


def test_an_owner_has_the_newest_sink_only_and_warnings_are_given_once(
    made: list[FakeSink],
) -> None:
    """A recovery also looks for what an earlier prefix left: its sink is done with then."""
    one, other = (Owner(name, "kafka", "L") for name in ("one", "other"))
    recovering = stream_writer.open_sink(options(), one, "p", frozenset({"earlier"}))
    beside = stream_writer.open_sink(options(), other, "q", NONE)
    running = stream_writer.open_sink(options(), one, "p", NONE)
    assert running is stream_writer.open_sink(options(), one, "p", NONE)
    changed = stream_writer.open_sink(options("elsewhere"), one, "p", NONE)

    assert made == [recovering, beside, running, changed]
    assert [each.is_closed for each in made] == [True, False, True, False]
    assert [each.warns for each in made] == [True, True, False, False]


def test_no_more_than_a_few_queries_find_theirs_again(made: list[FakeSink]) -> None:
    for number in range(stream_writer.SINKS_MAX + 2):
        stream_writer.open_sink(options(), Owner(f"query-{number}", "kafka", "L"), "p", NONE)

    assert [each.is_closed for each in made] == [True] * 2 + [False] * stream_writer.SINKS_MAX
