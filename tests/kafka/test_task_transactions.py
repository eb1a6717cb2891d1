"""One transaction per task on a real Kafka, transaction.version 0 to 2; read by librdkafka."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from real_kafka import numbers, read_back
from task_sinks import (
    LINEAGE,
    committed,
    opened,
    place_of,
    rows_of,
    settled,
    state_of,
    taken_over,
    with_output,
    written_by,
    written_in_another_process,
)

from tallystick.epoch.two_phase import Outcome, Owner
from tallystick.errors import (
    BrokerUnavailableError,
    DataLossError,
    EpochAbortedError,
    FencedError,
    OptionError,
)
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.run.participants import OpenSinks
from tallystick.testing.kafka import EmbeddedKafka
from tests.waiting import wait_for

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]
QUICK_TIMEOUTS = {
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
    # a partition without a leader while a commit is on its way loses its marker: KAFKA-20734
    "broker.session.timeout.ms": "30000",
}


@pytest.fixture(scope="module", params=[2, 1, 0], ids=lambda version: f"version-{version}")
def kafka(request: pytest.FixtureRequest) -> Iterator[EmbeddedKafka]:
    with EmbeddedKafka(transaction_version=request.param, properties=QUICK_TIMEOUTS) as running:
        yield running


@pytest.fixture
def pipeline() -> str:
    return f"flights-{next(numbers)}"


def test_epochs_are_visible_once_they_are_committed(
    config: KafkaConfig, client: Client, topic: str, pipeline: str
) -> None:
    """Two tasks and two epochs with the same two ids; nothing is visible before the commit."""
    expected: list[str] = []
    with opened(config, topic, pipeline) as sink:
        names = set()
        for epoch in range(2):
            plan = sink.plan()
            prepared = [
                written_by(plan, place_of(pipeline, epoch, task), f"{epoch}-{task}", partition=task)
                for task in range(2)
            ]
            assert read_back(config, topic) == expected
            assert [committable.record_count for committable in prepared] == [1, 1]

            assert [sink.commit(committable) for committable in prepared] == [Outcome.COMMITTED] * 2

            for committable in prepared:
                settled(client, committable)
            names |= {
                json.loads(committable.details)["transactional_id"] for committable in prepared
            }
            expected += [f"{epoch}-0", f"{epoch}-1"]
            assert read_back(config, topic) == expected
        assert names == {f"tallystick-{pipeline}/out/0/0", f"tallystick-{pipeline}/out/1/0"}


def test_another_process_commits_what_a_killed_one_prepared(
    config: KafkaConfig, client: Client, topic: str, pipeline: str
) -> None:
    """And says COMMITTED again when it is asked again: after the commit, after the next user."""
    with opened(config, topic, pipeline) as sink:
        prepared = written_in_another_process(sink.plan(), place_of(pipeline), "a", "b")
    with opened(config, topic, pipeline) as later:
        assert later.describe(prepared) == (
            f"transaction 'tallystick-{pipeline}/out/0/0' (producer {prepared.name.split(':')[1]}, "
            f"epoch {prepared.name.split(':')[2]}): 2 records in {topic}-0 offsets 0..1"
        )
        assert committed(client, later, prepared) is Outcome.COMMITTED
        assert later.commit(prepared) is Outcome.COMMITTED
        taken_over(config, prepared)
        assert later.commit(prepared) is Outcome.COMMITTED
        later.abort(prepared)
        assert later.commit(prepared) is Outcome.COMMITTED
    assert read_back(config, topic) == ["a", "b"]


def test_a_committed_one_is_known_beside_the_open_one_of_the_next_epoch(
    config: KafkaConfig, client: Client, topic: str, pipeline: str
) -> None:
    """The next epoch's token is staged, and nobody will end it: the answer must not wait for it."""
    with opened(config, topic, pipeline) as sink:
        first = written_by(sink.plan(), place_of(pipeline, 0), "first")
        assert committed(client, sink, first) is Outcome.COMMITTED
        second = written_by(sink.plan(), place_of(pipeline, 1), "second")

        asked_at = time.monotonic()
        assert sink.commit(first) is Outcome.COMMITTED
        assert time.monotonic() - asked_at < 1, "a recovery asks for many such"
        assert state_of(client, second) == "Ongoing"
        assert committed(client, sink, second) is Outcome.COMMITTED
        with pytest.raises(FencedError, match="another run has gone on from it"):
            sink.commit(replace(first, details=first.details.replace(nonce_of(first), "other")))
    assert read_back(config, topic) == ["first", "second"]


def nonce_of(committable: object) -> str:
    return str(json.loads(committable.details)["nonce"])  # type: ignore[attr-defined]


def test_what_timed_out_is_lost(
    config: KafkaConfig, client: Client, topic: str, pipeline: str
) -> None:
    with opened(config, topic, pipeline) as sink:
        before = written_by(sink.plan(), place_of(pipeline, 0), "before")
        assert committed(client, sink, before) is Outcome.COMMITTED
        plan = with_output(sink.plan(), transaction_timeout_ms=300)
        prepared = written_by(plan, place_of(pipeline, 1), "timed out")
        wait_for(lambda: state_of(client, prepared), "CompleteAbort", "the transaction's state")

        assert [sink.commit(prepared) for _ in range(2)] == [Outcome.LOST] * 2

        taken_over(config, prepared)
        assert sink.commit(prepared) is Outcome.LOST
        assert sink.commit(before) is Outcome.COMMITTED
    assert read_back(config, topic) == ["before"]


def test_a_lost_one_is_known_beside_the_open_one_of_the_next_user(
    config: KafkaConfig, client: Client, topic: str, pipeline: str
) -> None:
    with opened(config, topic, pipeline) as sink:
        lost = written_by(sink.plan(), place_of(pipeline, 0), "lost")
        following = written_by(sink.plan(), place_of(pipeline, 0), "following")

        assert sink.commit(lost) is Outcome.LOST
        assert state_of(client, following) == "Ongoing"
        assert committed(client, sink, following) is Outcome.COMMITTED
    assert read_back(config, topic) == ["following"]


def test_what_was_fenced_is_lost_also_where_no_token_ever_was(
    config: KafkaConfig, topic: str, pipeline: str
) -> None:
    with opened(config, topic, pipeline) as sink:
        prepared = written_by(sink.plan(), place_of(pipeline), "fenced")
        taken_over(config, prepared)

        assert sink.commit(prepared) is Outcome.LOST
    assert read_back(config, topic) == []


def test_of_two_attempts_at_once_only_the_committed_one_is_visible(
    config: KafkaConfig, client: Client, topic: str, pipeline: str
) -> None:
    """Speculation does no harm: the other attempt's rows are aborted, whoever is done first."""
    with opened(config, topic, pipeline) as sink:
        plan = sink.plan()
        attempts = [plan.begin(place_of(pipeline, attempt=attempt)) for attempt in range(2)]
        for index, attempt in enumerate(attempts):
            attempt.write(rows_of(f"attempt {index}"))
        (loser,), (winner,) = (attempt.prepare() for attempt in attempts)

        assert committed(client, sink, winner) is Outcome.COMMITTED
        (lingering,) = sink.lingering(place_of(pipeline).owner)
        assert lingering.name == loser.name
        sink.abort(lingering)

        assert sink.commit(loser) is Outcome.LOST
        assert list(sink.lingering(place_of(pipeline).owner)) == []
    assert read_back(config, topic) == ["attempt 1"]


def test_the_next_attempt_aborts_what_was_left_and_the_old_one_writes_no_more(
    config: KafkaConfig, client: Client, topic: str, pipeline: str
) -> None:
    """A run that replaces another uses the same ids; of the old tasks nothing is committed."""
    with opened(config, topic, pipeline) as sink:
        plan = sink.plan()
        zombie = plan.begin(place_of(pipeline))
        zombie.write(rows_of("zombie"))
        fresh = written_by(plan, place_of(pipeline), "fresh")

        zombie.write(rows_of("zombie too late"))
        with pytest.raises(EpochAbortedError):
            zombie.prepare()
        zombie.abort()

        assert committed(client, sink, fresh) is Outcome.COMMITTED
    assert read_back(config, topic) == ["fresh"]


def test_a_failed_attempt_lets_go_at_once(
    config: KafkaConfig, client: Client, topic: str, pipeline: str
) -> None:
    """Readers of the output do not wait for its timeout; what was prepared stays."""
    with opened(config, topic, pipeline) as sink:
        failed = sink.plan().begin(place_of(pipeline, task=0))
        failed.write(rows_of("failed"))
        failed.abort()
        failed.abort()
        done = sink.plan().begin(place_of(pipeline, task=1))
        done.write(rows_of("done"))
        (prepared,) = done.prepare()
        done.abort()

        assert committed(client, sink, prepared) is Outcome.COMMITTED
    assert read_back(config, topic) == ["done"]


def test_what_nobody_can_know_stops_the_pipeline(
    config: KafkaConfig, topic: str, pipeline: str
) -> None:
    """Coordinator and tokens have forgotten it; or a token may have expired since."""
    with opened(config, topic, pipeline) as sink:
        prepared = written_by(sink.plan(), place_of(pipeline), "a", "b")
        fields = json.loads(prepared.details)
        unknown = json.dumps(
            fields | {"transactional_id": "never/used/0/0", "token_group": "never-used"}
        )
        with pytest.raises(DataLossError, match=rf"2 records in {topic}-0 offsets 0\.\.1"):
            sink.commit(replace(prepared, details=unknown))

        taken_over(config, prepared)
        with pytest.raises(DataLossError, match="keeps none for longer than 10080 minutes"):
            sink.commit(replace(prepared, begun_ms=1))
        recreated = json.dumps(fields | {"token_topic_id": "AAAAAAAAAAAAAAAAAAAAAA"})
        with pytest.raises(DataLossError, match="deleted and created again"):
            sink.commit(replace(prepared, details=recreated))
        elsewhere = json.dumps(fields | {"cluster_id": "another-cluster"})
        with pytest.raises(OptionError, match="another-cluster"):
            sink.commit(replace(prepared, details=elsewhere))
        assert sink.commit(prepared) is Outcome.LOST


def test_a_late_attempt_of_the_same_number_is_told_of_also_behind_the_last_check(
    config: KafkaConfig, client: Client, topic: str, pipeline: str
) -> None:
    """Spark counts attempts from 0 in each attempt of a stage, and lets the old ones live on.

    One that begins only now takes the id from the task whose output is about to be committed.
    """
    with opened(config, topic, pipeline) as sink:
        plan = sink.plan()
        decided = written_by(plan, place_of(pipeline, 0), "decided")
        beside = written_by(plan, place_of(pipeline, 0, 1), "beside")
        sink.check_prepared(decided)

        zombie = plan.begin(place_of(pipeline, 0))
        zombie.write(rows_of("late"))

        with pytest.raises(EpochAbortedError, match="a late attempt of its task took its id"):
            sink.check_prepared(decided)
        assert committed(client, sink, decided) is Outcome.LOST
        assert committed(client, sink, beside) is Outcome.COMMITTED
        zombie.abort()
    assert read_back(config, topic) == ["beside"]


def seconds_unanswered(kafka: EmbeddedKafka, call: Callable[[], object]) -> float:
    """How long a call takes to give up while the broker is paused."""
    kafka.pause(1)
    try:
        began = time.monotonic()
        with pytest.raises(BrokerUnavailableError):
            call()
        return time.monotonic() - began
    finally:
        kafka.resume(1)


def test_commits_that_nobody_answers_share_one_deadline(
    kafka: EmbeddedKafka, config: KafkaConfig, topic: str, pipeline: str
) -> None:
    """Each with its own would be a minute here, and hours for a few hundred tasks."""
    tasks, timeout_s = 16, 4
    impatient = replace(config, delivery_timeout_ms=timeout_s * 1000, request_timeout_ms=2_000)
    threads = threading.active_count()
    with opened(impatient, topic, pipeline) as sink:
        sinks = OpenSinks({"out": sink}, {"out": place_of(pipeline).owner})
        plan = with_output(sink.plan(), config=config)
        prepared = tuple(
            written_by(plan, place_of(pipeline, 0, task), f"{task:02}") for task in range(tasks)
        )
        took_s = seconds_unanswered(kafka, lambda: sinks.commit(prepared))
        assert timeout_s <= took_s < tasks * timeout_s / 2

        assert sinks.commit(prepared) == ()
        assert sinks.lingering() == ()
    assert threading.active_count() == threads
    expected = [f"{task:02}" for task in range(tasks)]
    wait_for(lambda: read_back(config, topic), expected, "the rows")  # markers follow the answers


def test_aborts_that_nobody_answers_share_one_deadline(
    kafka: EmbeddedKafka, config: KafkaConfig, topic: str, pipeline: str
) -> None:
    tasks, timeout_s = 8, 3
    impatient = replace(config, delivery_timeout_ms=timeout_s * 1000, request_timeout_ms=2_000)
    with opened(impatient, topic, pipeline) as sink:
        sinks = OpenSinks({"out": sink}, {"out": place_of(pipeline).owner})
        plan = with_output(sink.plan(), config=config)
        prepared = tuple(
            written_by(plan, place_of(pipeline, 0, task), f"{task:02}") for task in range(tasks)
        )
        took_s = seconds_unanswered(kafka, lambda: sinks.abort(prepared))
        assert timeout_s <= took_s < tasks * timeout_s / 2

        sinks.abort(prepared)
        wait_for(sinks.lingering, (), "transactions that linger")
    assert read_back(config, topic) == []


def test_right_before_the_decision_it_is_known_what_is_gone(
    config: KafkaConfig, client: Client, topic: str, pipeline: str
) -> None:
    with opened(config, topic, pipeline) as sink:
        sinks = OpenSinks({"out": sink}, {"out": Owner(pipeline, "out", LINEAGE)})
        prepared = written_by(sink.plan(), place_of(pipeline, 0), "a")
        late = written_by(sink.plan(), place_of(pipeline, 0, 1), "b")
        sinks.check_prepared((prepared,))

        plan = with_output(sink.plan(), transaction_timeout_ms=300)
        timed_out = written_by(plan, place_of(pipeline, 0, 2), "c")
        wait_for(lambda: state_of(client, timed_out), "CompleteAbort", "the transaction's state")
        taken_over(config, late)

        for gone in (timed_out, late):
            with pytest.raises(EpochAbortedError, match="no longer open"):
                sinks.check_prepared((prepared, gone))
        assert committed(client, sink, prepared) is Outcome.COMMITTED


def test_a_checkpoint_that_was_set_back_is_told_by_the_token_of_a_later_epoch(
    config: KafkaConfig, client: Client, topic: str, pipeline: str
) -> None:
    with opened(config, topic, pipeline) as sink:
        sinks = OpenSinks({"out": sink}, {"out": Owner(pipeline, "out", LINEAGE)})
        older = written_by(sink.plan(), place_of(pipeline, 0), "0")
        assert committed(client, sink, older) is Outcome.COMMITTED
        sinks.check_newest((older,))
        newer = written_by(sink.plan(), place_of(pipeline, 1), "1")
        assert committed(client, sink, newer) is Outcome.COMMITTED
        sinks.check_newest((newer,))

        with pytest.raises(FencedError, match=r"newest epoch is 0.*Kafka committed epoch 1 of it"):
            sinks.check_newest((older,))
