"""A pipeline is started again with other settings while something is pending.

Either what is pending is resolved, or the start is refused and names it: nothing is ever written a
second time, or lost.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count, permutations
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

import tallystick as ts
from tallystick.epoch import protocol as c
from tallystick.errors import DataLossError, FencedError, OptionError
from tallystick.testing import EmbeddedKafka
from tests.failover.sink_job import (
    PARTITIONS,
    Held,
    SinkJob,
    assert_nothing_more_is_held,
    flat,
    kafka_sink,
    open_ids,
    read_files,
    read_topic,
    sink_jobs,
)
from tests.postgres.real_postgres import PostgresServer
from tests.spark.topics import read_group_offsets
from tests.waiting import wait_for, wait_until

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

UNDECIDED, DECIDED = c.OutputCounted, c.TransactionCommitted
WAYS = {
    "task": {"transactions": "task"},
    "at_least_once": {"guarantee": "at_least_once"},
    "none": {"guarantee": "none"},
}
"""Every way of one Kafka sink to write that leaves the decision to the checkpoint."""
names = (f"changed-{number}" for number in count())
MakeJob = Callable[..., SinkJob]


@pytest.fixture
def kafka(tallystick_kafka: EmbeddedKafka) -> EmbeddedKafka:
    return tallystick_kafka


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture
def new_topic(kafka: EmbeddedKafka) -> Callable[[], str]:
    return lambda: kafka.create_topic(next(names), PARTITIONS)


@pytest.fixture
def make_job(kafka: EmbeddedKafka, tmp_path: Path) -> Iterator[MakeJob]:
    """Makes pipelines; of their runs this process holds nothing in the end."""
    resources = Held.now()
    with sink_jobs(tmp_path, names) as make:
        yield make
    assert_nothing_more_is_held(resources)


def assert_nothing_open(kafka: EmbeddedKafka, job: SinkJob) -> None:
    assert not [name for name in open_ids(kafka) if job.name in name]


def test_the_guarantee_changes(
    kafka: EmbeddedKafka, make_job: MakeJob, new_topic: Callable[[], str]
) -> None:
    """FlinkKafkaProducerITCase.testMigrateFromAtLeastOnceToExactlyOnce and back: all six ways.

    Rows that a run without transactions has written are visible, so what was not decided is there
    twice; nothing else is.
    """
    topic = new_topic()
    job = make_job(kafka_sink(kafka, topic))
    twice: Counter[str] = Counter()
    for number, (before, after) in enumerate(permutations(WAYS, 2)):
        job.restart(kafka_sink(kafka, topic, **WAYS[before]))
        job.run_until(job.logged + 1)
        event = (UNDECIDED, DECIDED)[number % 2]
        job.die_at(event)
        if event is UNDECIDED and "guarantee" in WAYS[before]:
            twice += flat(job.expected([job.logged]))
        job.restart(kafka_sink(kafka, topic, **WAYS[after]))
        job.run_until(job.logged + 1)
        wanted = flat(job.expected()) + twice
        wait_for(
            lambda: flat(read_topic(kafka, topic)),
            wanted,
            f"the rows of {topic}",
        )
        assert_nothing_open(kafka, job)


EPOCH, TASK = {"transactions": "epoch"}, {"transactions": "task"}
TEAM = {"transactional_id_prefix": "team-"}
OTHER_DECIDERS = {
    "mode": (EPOCH, TASK),
    "mode, back": (TASK, EPOCH),
    "guarantee": (EPOCH, {"guarantee": "at_least_once"}),
    "guarantee, back": ({"guarantee": "none"}, EPOCH),
    "prefix": (EPOCH, EPOCH | TEAM),
    "mode and prefix": (TASK, EPOCH | TEAM),
}


@pytest.mark.parametrize("event", [c.EpochRan, UNDECIDED, DECIDED], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("change", OTHER_DECIDERS)
def test_another_decider_is_refused_and_nothing_is_changed(
    kafka: EmbeddedKafka,
    make_job: MakeJob,
    new_topic: Callable[[], str],
    change: str,
    event: type,
) -> None:
    """Whatever is pending stays so, and the job goes on as soon as it is started as before.

    Also if the run before died in its first epoch, without a manifest. Rows that were visible
    before the decision are there twice, as their guarantee says.
    """
    topic = new_topic()
    before, after = OTHER_DECIDERS[change]
    is_pending = "guarantee" not in before and (event is not DECIDED or before is TASK)
    twice: Counter[str] = Counter()
    job = make_job(kafka_sink(kafka, topic, **before))
    for epochs in (0, 2):
        job.run_until(epochs)
        opens = epochs == 0 and event is DECIDED  # the lineage, by a commit before the epoch's
        job.die_at(event, occurrence=1 + opens)
        if "guarantee" in before and event is not DECIDED:
            twice += flat(job.expected([job.logged]))
        files, is_open = checkpoint_files(job), open_ids(kafka)
        assert any(job.name in name for name in is_open) == is_pending
        job.restart(kafka_sink(kafka, topic, **after))
        with pytest.raises(OptionError, match=r"are decided by .*as before with availableNow"):
            job.run_next()
        assert (checkpoint_files(job), open_ids(kafka)) == (files, is_open)

        job.restart(kafka_sink(kafka, topic, **before))
        job.run_until(job.logged + 1)
        if "guarantee" in before:
            wanted = flat(job.expected()) + twice
            wait_for(lambda: flat(read_topic(kafka, topic)), wanted, f"the rows of {topic}")
        else:
            # Kafka writes the markers of a transaction after it has answered.
            wait_for(lambda: read_topic(kafka, topic), job.expected(), f"the rows of {topic}")
            assert_nothing_open(kafka, job)


def checkpoint_files(job: SinkJob) -> dict[str, bytes]:
    paths = (path for path in Path(job.folder).rglob("*") if path.is_file())
    return {str(path): path.read_bytes() for path in paths if "tallystick" in path.parts}


@pytest.mark.parametrize("event", [UNDECIDED, DECIDED], ids=["undecided", "decided"])
def test_the_other_decider_comes_while_a_run_lives(
    kafka: EmbeddedKafka, make_job: MakeJob, new_topic: Callable[[], str], event: type
) -> None:
    """It fences nobody: the run that lives goes on."""
    topic, refused = new_topic(), list[OptionError]()

    def intrude(fact: c.Event) -> None:
        if isinstance(fact, event) and job.logged == 2 and not refused:
            other = job.leave()
            other.sinks = [kafka_sink(kafka, topic, transactions="task")]
            with pytest.raises(OptionError) as error:
                other.run_next()
            refused.append(error.value)
            other.close()

    job = make_job(kafka_sink(kafka, topic, transactions="epoch"), on_event=intrude)
    job.run_until(4)

    assert len(refused) == 1
    assert read_topic(kafka, topic) == job.expected()
    assert_nothing_open(kafka, job)


def test_the_prefix_of_tasks_changes(
    kafka: EmbeddedKafka, make_job: MakeJob, new_topic: Callable[[], str]
) -> None:
    """Several times, and back to the first one in the end: the checkpoint decides all along."""
    topic = new_topic()
    job = make_job(kafka_sink(kafka, topic, transactions="task"))
    for number, event in enumerate([UNDECIDED, DECIDED, c.EpochRan, UNDECIDED]):
        job.run_until(job.logged + 1)
        job.die_at(event)
        prefix = f"team-{number}-" if number < 3 else "tallystick-"
        job.restart(kafka_sink(kafka, topic, transactions="task", transactional_id_prefix=prefix))
        job.run_until(job.logged + 1)

        assert read_topic(kafka, topic) == job.expected()
        assert_nothing_open(kafka, job)


@pytest.mark.parametrize("event", [c.EpochRan, UNDECIDED], ids=lambda event: event.__name__)
def test_a_run_under_the_old_prefix_that_wakes_up_is_fenced(
    kafka: EmbeddedKafka, make_job: MakeJob, new_topic: Callable[[], str], event: type
) -> None:
    topic = new_topic()
    new: list[SinkJob] = []

    def overtake(fact: c.Event) -> None:
        if isinstance(fact, event) and old.logged == 2 and not new:
            new.append(old.leave())
            prefixed = kafka_sink(
                kafka, topic, transactions="task", transactional_id_prefix="other-"
            )
            new[0].sinks = [prefixed]
            new[0].run_until(4)

    old = make_job(kafka_sink(kafka, topic, transactions="task"), on_event=overtake)
    with pytest.raises(FencedError):
        old.run_until(4)
    new[0].run_until(5)

    assert read_topic(kafka, topic) == new[0].expected()
    new[0].close()


def test_the_prefix_of_a_sink_that_does_not_decide_changes(
    kafka: EmbeddedKafka, make_job: MakeJob, new_topic: Callable[[], str]
) -> None:
    """What it left open is given up at once: the ids that manifests name tell the prefix."""
    first, second = new_topic(), new_topic()

    def sinks(prefix: str) -> list[ts.KafkaSink]:
        beside = kafka_sink(kafka, second, uid="beside", transactional_id_prefix=prefix)
        return [kafka_sink(kafka, first, transactions="epoch", uid="decides"), beside]

    job = make_job(*sinks("before-"))
    job.run_until(2)
    job.die_at(UNDECIDED)
    job.restart(*sinks("after-"))
    job.run_until(4)

    assert read_topic(kafka, first) == job.expected()
    assert read_topic(kafka, second) == job.expected()
    assert_nothing_open(kafka, job)


@pytest.mark.parametrize("mode", ["epoch", "task"])
@pytest.mark.parametrize("event", [UNDECIDED, DECIDED], ids=["undecided", "decided"])
def test_the_topic_changes_and_the_old_one_is_deleted_later(
    kafka: EmbeddedKafka,
    make_job: MakeJob,
    new_topic: Callable[[], str],
    mode: str,
    event: type,
) -> None:
    """Token and pending rows lie under the old one until an epoch is through with the new one."""
    first, second = new_topic(), new_topic()
    job = make_job(kafka_sink(kafka, first, transactions=mode))
    job.run_until(2)
    job.die_at(event)
    job.restart(kafka_sink(kafka, second, transactions=mode))
    job.run_until(4)
    moved = 3 if event is DECIDED else 2

    assert read_topic(kafka, first) == job.expected(range(moved))
    assert read_topic(kafka, second) == job.expected(range(moved, 4))

    delete(kafka, first)
    job.die_at(event)
    job.restart()
    job.run_until(6)
    assert read_topic(kafka, second) == job.expected(range(moved, 6))


HASTY = {"kafka.delivery.timeout.ms": "3000", "kafka.request.timeout.ms": "1500"}


def test_the_old_topic_and_its_token_are_gone_before_the_new_one_has_one(
    kafka: EmbeddedKafka, make_job: MakeJob, new_topic: Callable[[], str]
) -> None:
    """Kafka forgets the token with the topic: which epoch was committed cannot be told any more."""
    first, second = new_topic(), new_topic()
    job = make_job(kafka_sink(kafka, first, transactions="epoch"))
    job.run_until(2)
    job.die_at(DECIDED)
    assert topics_of_tokens(kafka, job) == {first}
    delete(kafka, first)
    wait_for(lambda: topics_of_tokens(kafka, job), set(), "topics of tokens")
    job.restart(kafka_sink(kafka, second, transactions="epoch", options=HASTY))
    with pytest.raises(DataLossError, match="the topic under whose name they are kept was deleted"):
        job.run_next()

    assert job.logged == 2
    assert flat(read_topic(kafka, second)) == Counter()


def test_the_old_topic_is_deleted_when_its_token_was_read(
    kafka: EmbeddedKafka, make_job: MakeJob, new_topic: Callable[[], str]
) -> None:
    """The new run goes on: the rows that were asked to be deleted are not missed."""
    first, second = new_topic(), new_topic()
    job = make_job(kafka_sink(kafka, first, transactions="epoch"))
    job.run_until(2)
    job.die_at(DECIDED)
    deleted: list[str] = []

    def delete_first(fact: c.Event) -> None:
        if isinstance(fact, c.CommittedRead) and not deleted:
            delete(kafka, first)
            deleted.append(first)

    job.restart(
        kafka_sink(kafka, second, transactions="epoch", options=HASTY), on_event=delete_first
    )
    job.run_until(4)

    assert deleted == [first]
    assert job.errors == []
    assert read_topic(kafka, second) == job.expected([3])


def topics_of_tokens(kafka: EmbeddedKafka, job: SinkJob) -> set[str]:
    """The topics under whose names Kafka keeps what the pipeline committed last."""
    admin = AdminClient(kafka.confluent_options())
    groups = admin.list_consumer_groups().result().valid
    (group,) = [group.group_id for group in groups if job.name in group.group_id]
    return {topic for topic, _ in read_group_offsets(kafka.confluent_options(), group)}


@pytest.mark.parametrize("event", [UNDECIDED, DECIDED], ids=["undecided", "decided"])
def test_the_old_topic_of_tasks_transactions_is_deleted_with_something_pending(
    kafka: EmbeddedKafka, make_job: MakeJob, new_topic: Callable[[], str], event: type
) -> None:
    """The decision is in the checkpoint; what was pending went with the topic, as was asked for."""
    first, second = new_topic(), new_topic()
    job = make_job(kafka_sink(kafka, first))
    job.run_until(2)
    job.die_at(event)
    delete(kafka, first)
    job.restart(kafka_sink(kafka, second))
    job.run_until(5)

    behind = 3 if event is DECIDED else 2
    assert read_topic(kafka, second) == job.expected(range(behind, 5))


def delete(kafka: EmbeddedKafka, topic: str) -> None:
    admin = AdminClient(kafka.confluent_options())
    admin.delete_topics([topic])[topic].result(30)
    wait_until(
        lambda: topic not in admin.list_topics(timeout=10).topics,
        f"the deleted topic {topic} is still listed",
    )


@pytest.mark.parametrize("mode", ["epoch", "task"])
@pytest.mark.parametrize("beside", ["files", "postgres"])
def test_a_sink_is_taken_out(
    kafka: EmbeddedKafka,
    make_job: MakeJob,
    new_topic: Callable[[], str],
    postgres: PostgresServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    mode: str,
    beside: str,
) -> None:
    """Refused while it has decided transactions; told where it may have left undecided ones."""
    topic, table = new_topic(), f"{beside}_{mode}"
    postgres.query(f"CREATE TABLE {table} (value text, partition int)")
    other = (
        ts.FileSink(str(tmp_path / "files"))
        if beside == "files"
        else ts.PostgresSink(postgres.dsn, table=table)
    )

    def seen() -> Counter[str]:
        if beside == "files":
            return read_files(tmp_path / "files")
        return Counter(value for (value,) in postgres.query(f"SELECT value FROM {table}"))

    sink = kafka_sink(kafka, topic, transactions=mode)
    job = make_job(sink, other)
    job.run_until(2)
    job.die_at(DECIDED)
    job.restart(sink)
    with pytest.raises(OptionError, match=f"{beside}-1.*Add the sink"):
        job.run_next()
    job.restart(sink, other)
    job.run_until(3)  # settled, and logged
    assert seen() == flat(job.expected())
    job.die_at(UNDECIDED)
    caplog.clear()
    job.restart(sink)
    job.run_until(4)
    assert f"sinks that it no longer has: {beside}-1." in caplog.text
    assert read_topic(kafka, topic) == job.expected()
    assert seen() == flat(job.expected(range(3)))

    job.restart(sink, other)  # and is back: what it left is given up, and it goes on from here
    job.run_until(5)
    assert read_topic(kafka, topic) == job.expected()
    assert seen() == flat(job.expected([0, 1, 2, 4]))
    assert postgres.query("SELECT gid FROM pg_prepared_xacts") == []


@pytest.mark.parametrize("event", [UNDECIDED, DECIDED], ids=["undecided", "decided"])
def test_a_sink_is_added(
    kafka: EmbeddedKafka,
    make_job: MakeJob,
    new_topic: Callable[[], str],
    tmp_path: Path,
    event: type,
) -> None:
    """It begins with the first epoch that runs; before the others, or behind them."""
    first, second = new_topic(), new_topic()
    job = make_job(kafka_sink(kafka, first, uid="first"))
    job.run_until(2)
    job.die_at(event)
    files = ts.FileSink(str(tmp_path / "files"))
    job.restart(
        kafka_sink(kafka, second, uid="second"), kafka_sink(kafka, first, uid="first"), files
    )
    job.run_until(5)

    begun = 3 if event is DECIDED else 2
    assert read_topic(kafka, first) == job.expected()
    assert read_topic(kafka, second) == job.expected(range(begun, 5))
    assert read_files(tmp_path / "files") == flat(job.expected(range(begun, 5)))


def test_the_uid_changes(
    kafka: EmbeddedKafka,
    make_job: MakeJob,
    new_topic: Callable[[], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As if it were another sink: refused with something decided, told with something undecided."""
    topic = new_topic()
    job = make_job(kafka_sink(kafka, topic, uid="old"))
    job.run_until(2)
    job.die_at(DECIDED)
    job.restart(kafka_sink(kafka, topic, uid="new"))
    with pytest.raises(OptionError, match=r"'old'.*Add the sink again, with this uid"):
        job.run_next()
    job.restart(kafka_sink(kafka, topic, uid="old"))
    job.run_until(3)
    job.die_at(UNDECIDED)
    caplog.clear()
    job.restart(kafka_sink(kafka, topic, uid="new"))
    job.run_until(4)
    assert "sinks that it no longer has: old." in caplog.text
    job.restart(kafka_sink(kafka, topic, uid="old"))  # for one start, as the warning says
    job.run_until(5)

    assert read_topic(kafka, topic) == job.expected()
    assert_nothing_open(kafka, job)


def test_without_a_uid_a_sink_before_it_takes_its_place(
    kafka: EmbeddedKafka, make_job: MakeJob, new_topic: Callable[[], str]
) -> None:
    """What is pending says itself where it belongs, whichever sink of the cluster settles it."""
    first, second = new_topic(), new_topic()
    job = make_job(kafka_sink(kafka, first))
    for event in (DECIDED, UNDECIDED):
        job.die_at(event)
        job.restart(kafka_sink(kafka, second), kafka_sink(kafka, first))
        job.run_until(job.logged + 1)
        job.restart(kafka_sink(kafka, first))
    job.run_until(4)

    assert read_topic(kafka, first) == job.expected()
    assert_nothing_open(kafka, job)


@pytest.mark.parametrize("event", [UNDECIDED, DECIDED], ids=["undecided", "decided"])
def test_two_sinks_change_places(
    kafka: EmbeddedKafka, make_job: MakeJob, new_topic: Callable[[], str], event: type
) -> None:
    """The one that decided waits for the other one now, and back."""
    topics = new_topic(), new_topic()

    def sinks(decider: int) -> list[ts.KafkaSink]:
        modes = ("epoch", "task") if decider == 0 else ("task", "epoch")
        return [
            kafka_sink(kafka, topic, transactions=mode, uid=f"sink-{number}")
            for number, (topic, mode) in enumerate(zip(topics, modes, strict=True))
        ]

    job = make_job(*sinks(0))
    for decider in (1, 0, 1):
        job.run_until(job.logged + 1)
        job.die_at(event)
        job.restart(*sinks(decider))
    job.run_until(job.logged + 2)

    for topic in topics:
        assert read_topic(kafka, topic) == job.expected()
    assert_nothing_open(kafka, job)
