"""The proxies before brokers, with an independent client and a real broker behind them."""

import json
import socket
import time
from contextlib import ExitStack

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource

from tallystick.testing import EmbeddedKafka
from tallystick.testing.process import free_ports
from tallystick_tools.chaos import cluster as chaos_cluster
from tallystick_tools.chaos.cluster import Feed, InputRecord, Witness, read_all, running
from tallystick_tools.chaos.proxy import APIS, END_TXN, HOST, PRODUCE
from tallystick_tools.chaos.run import Job, read_input

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def bound():
    """The port that the proxy held when the only broker started."""
    return []


@pytest.fixture(scope="module")
def cluster(bound):
    """A job's own cluster of one broker; its proxy's port is tried while that starts."""
    start, drawn = EmbeddedKafka.start, []

    def draw(count, host):
        drawn.extend(free_ports(count, host))
        return drawn

    def look_and_start(kafka):
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind((HOST, drawn[0]))
        bound.append(drawn[0])
        start(kafka)

    with ExitStack() as opened:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chaos_cluster, "free_ports", draw)
            patch.setattr(EmbeddedKafka, "start", look_and_start)
            job = Job((), {"in": (), "keys": ()}, ("out",), partitions=2)
            started = opened.enter_context(job.cluster())
        yield started


@pytest.fixture
def write(cluster):
    """A function that writes a value through the proxies, and returns how many retries it took."""
    errors = []
    producer = Producer(
        {
            "bootstrap.servers": cluster.proxies.bootstrap_servers,
            "enable.idempotence": True,
            "error_cb": errors.append,
            "retry.backoff.ms": 50,
            "reconnect.backoff.max.ms": 200,
            "log_level": 0,
        }
    )

    def write_one(value: str, wait_s: float = 20.0) -> int:
        producer.produce("out", value, "key", 0)
        assert producer.flush(wait_s) == 0
        return len(errors)

    return write_one


def dead_after_ms(cluster):
    """Return how long a broker of a cluster may be silent before another takes its place."""
    admin = AdminClient({"bootstrap.servers": cluster.direct})
    (description,) = admin.describe_configs([ConfigResource("BROKER", "1")]).values()
    return int(description.result(30)["broker.session.timeout.ms"].value)


def test_a_broker_that_is_paused_counts_as_dead_where_another_can_take_its_place():
    with running(3, ["in"], ["out"], partitions=1) as cluster:
        assert dead_after_ms(cluster) == 3_000


def test_the_proxies_hold_their_ports_before_the_only_broker_starts(cluster, bound):
    """Another run on the same machine would find them free for seconds, and end this one.

    Nor does a broker count as dead where no other can take its place: Kafka would leave out markers
    of what it has committed, and rows stay invisible.
    """
    assert cluster.ends(["in"], committed=True) == {("in", 0): 0, ("in", 1): 0}
    assert cluster.proxies.bootstrap_servers == f"{HOST}:{bound[0]}"
    assert dead_after_ms(cluster) == 15_000


def values(cluster):
    return [record.value.decode() for record in read_all(cluster) if record.partition == 0]


def test_a_lost_reply_to_produce_makes_the_client_write_again_and_once(cluster, write):
    write("first")
    trap = cluster.proxies.set_trap("lose-reply", [PRODUCE])
    write("lost reply")
    assert trap.caught.is_set()
    assert APIS[trap.api] == "Produce"
    assert values(cluster).count("lost reply") == 1  # the broker knows the second one


def test_a_lost_request_is_sent_again(cluster, write):
    write("before")
    trap = cluster.proxies.set_trap("lose-request", [PRODUCE])
    write("lost request")
    assert trap.caught.is_set()
    assert values(cluster).count("lost request") == 1


def test_a_trap_for_commits_lets_an_abort_through(cluster):
    servers = cluster.proxies.bootstrap_servers
    producer = Producer({"bootstrap.servers": servers, "transactional.id": "trapped"})
    producer.init_transactions(20)
    called = []
    trap = cluster.proxies.set_trap(
        "lose-reply", [END_TXN], commits_only=True, then=lambda: called.append(trap)
    )
    producer.begin_transaction()
    producer.produce("out", "aborted", "key", 0)
    producer.flush(20)
    producer.abort_transaction(20)
    assert not trap.caught.is_set()
    producer.begin_transaction()
    producer.produce("out", "committed", "key", 0)
    producer.commit_transaction(20)
    assert trap.caught.is_set()
    assert called == [trap]
    assert "committed" in values(cluster)
    assert "aborted" not in values(cluster)


def test_a_repeated_request_reaches_the_broker_a_second_time(cluster):
    """Without idempotence a repeated request is a second row: so it does arrive."""
    producer = Producer({"bootstrap.servers": cluster.proxies.bootstrap_servers, "acks": 1})
    trap = cluster.proxies.set_trap("repeat", [PRODUCE])
    producer.produce("out", "repeated", "key", 0)
    assert producer.flush(20) == 0
    assert trap.caught.is_set()
    end = time.monotonic() + 20
    while values(cluster).count("repeated") < 2:
        assert time.monotonic() < end, "the second copy never came"
    assert values(cluster).count("repeated") == 2


def test_a_broker_that_is_cut_off_takes_nothing_until_it_is_mended(cluster, write):
    write("connected")
    assert cluster.proxies.connections(0) > 0
    assert cluster.proxies.cut(0) > 0
    failures = []
    producer = Producer(
        {
            "bootstrap.servers": cluster.proxies.bootstrap_servers,
            "message.timeout.ms": 1500,
            "log_level": 0,
        }
    )
    producer.produce("out", "cut off", "key", 0, on_delivery=lambda e, _: failures.append(e))
    producer.flush(10)
    assert [error is not None for error in failures] == [True]
    cluster.proxies.mend(0)
    write("mended")
    assert "cut off" not in values(cluster)
    assert "mended" in values(cluster)


def test_late_answers_are_late(cluster, write):
    write("quick")
    before = cluster.proxies.replies
    cluster.proxies.delay_s = 0.5
    began = time.monotonic()
    write("slow")
    took, cluster.proxies.delay_s = time.monotonic() - began, 0.0
    assert cluster.proxies.replies > before
    assert took >= 0.5


def test_input_is_written_in_parts_with_its_partitions_and_timestamps(cluster):
    records = [InputRecord(n % 2, str(n).encode(), b"{}", 1_000 + n) for n in range(10)]
    feed = Feed(cluster, {"in": records}, parts=3, seconds=0.1)
    ends = []
    for part in range(3):
        feed.begin(part)
        feed.wait()
        ends.append(sum(cluster.ends(["in"], committed=True).values()))
    assert ends == [3, 6, 10]


def test_keys_of_an_input_fall_where_javas_default_partitioner_puts_them(cluster, tmp_path):
    keys = [f"key-{number}" for number in range(50)]
    path = tmp_path / "in.ndjson"
    path.write_text("".join(json.dumps({"k": key}) + "\n" for key in keys))
    records = read_input(path, 2, "k", 1_000)
    put: dict[bytes, int] = {}
    options = {"bootstrap.servers": cluster.direct, "partitioner": "murmur2_random"}
    producer = Producer(options)
    for key in keys:
        producer.produce(
            "keys", b"", key, on_delivery=lambda _, m: put.update({m.key(): m.partition()})
        )
    assert producer.flush(20) == 0
    assert {record.key: record.partition for record in records} == put
    assert {*put.values()} == {0, 1}
    assert [record.timestamp_ms for record in records] == [*range(1_000, 1_050)]


def test_a_witness_sees_what_is_written_while_it_reads(cluster, write):
    witness = Witness(cluster)
    try:
        write("witnessed")
        end = time.monotonic() + 20
        while not any(record.value == b"witnessed" for record in witness.seen.values()):
            assert time.monotonic() < end, "it never saw the row"
            time.sleep(0.1)
    finally:
        witness.close()
    assert witness.problems == []
    assert witness.seen.keys() == witness.seen_at.keys()


def test_it_says_for_whom_readers_of_the_output_wait(cluster):
    producer = Producer({"bootstrap.servers": cluster.direct, "transactional.id": "left-open"})
    producer.init_transactions(20)
    before = cluster.waited_for()
    producer.begin_transaction()
    producer.produce("out", "open", "key", 1)
    producer.flush(20)
    end = cluster.ends(["out"], committed=True)["out", 1]
    while_open = cluster.waited_for()
    producer.abort_transaction(20)

    assert before == ""
    assert while_open.startswith(f"readers of out-1 wait at offset {end} for a transaction of pr")
    deadline = time.monotonic() + 20
    while cluster.waited_for():  # Kafka answers an abort before its markers are written
        assert time.monotonic() < deadline, "nothing is open any more"
        time.sleep(0.1)


def test_positions_are_known_again_after_the_coordinator_was_killed(cluster):
    consumer = Consumer({"bootstrap.servers": cluster.direct, "group.id": "g", "log_level": 0})
    consumer.commit(offsets=[TopicPartition("in", 0, 2)], asynchronous=False)
    consumer.close()
    assert cluster.positions() == {("in", 0): 2}
    cluster.kafka.kill(1)
    assert cluster.positions() is None
    cluster.kafka.restart(1)
    end = time.monotonic() + 60
    while not (positions := cluster.positions()):
        assert time.monotonic() < end, "the group was never found again"
    assert positions == {("in", 0): 2}
