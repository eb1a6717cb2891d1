"""The embedded Kafka against clients that know nothing of it, and against sudden death."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from tallystick.errors import BrokerUnavailableError, OptionError
from tallystick.host.user_cache import cache_directory
from tallystick.kafka import cluster
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.config import KafkaConfig
from tallystick.testing import EmbeddedKafka, Security, jars
from tallystick.testing.node import META, cluster_id_of, copy_format, lay_out
from tallystick.testing.pytest_plugin import NewTopic
from tests.waiting import wait_until

DEADLINE_S = 60.0
PARENT = """
import sys, time
from tallystick.testing import EmbeddedKafka
kafka = EmbeddedKafka(directory=sys.argv[1])
kafka.start()
print(kafka.pid(1), flush=True)
time.sleep(600)
"""


def produce(options: dict[str, str], topic: str, *values: bytes) -> None:
    refused: list[Any] = []
    producer = Producer({**options, "message.timeout.ms": 30_000})
    for value in values:
        producer.produce(topic, value, on_delivery=lambda error, _: error and refused.append(error))
    assert producer.flush(DEADLINE_S) == 0
    if refused:
        raise KafkaException(refused[0])


def consume(options: dict[str, str], topic: str, count: int) -> list[bytes]:
    consumer = Consumer({**options, "group.id": "any", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition(topic, 0, 0)])
    messages = consumer.consume(count, timeout=DEADLINE_S)
    consumer.close()
    return [message.value() for message in messages if message.error() is None]


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kafka")


@pytest.fixture(scope="module")
def orphan(directory: Path) -> tuple[int, str]:
    """The process id and the properties of a broker that has ended with its killed parent."""
    command = [sys.executable, "-c", PARENT, str(directory)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_alive(pid)

    parent.kill()
    parent.wait()
    parent.stdout.close()

    wait_until(lambda: not is_alive(pid), f"the broker's process {pid} lives on")
    return pid, (directory / "node-1/data/meta.properties").read_text()


@pytest.fixture(scope="module")
def kafka(directory: Path, orphan: tuple[int, str]) -> Iterator[EmbeddedKafka]:
    """A broker that these tests may kill, with the data of one that was.

    Started offline: nobody serves the address to fetch from, so to ask it would be an error.
    """
    kafka = EmbeddedKafka(directory=directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TALLYSTICK_MAVEN_URL", "http://127.0.0.1:9/")
        kafka.start()
    yield kafka
    kafka.stop()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own with the jars in it, and no way to fetch others."""
    jars.kafka_classpath("4.3.0")
    copy = tmp_path / "cache"
    for folder in cache_directory().glob("kafka-4.3.0-*/"):
        shutil.copytree(folder, copy / folder.name)
    monkeypatch.setenv("TALLYSTICK_CACHE", str(copy))
    monkeypatch.setenv("TALLYSTICK_MAVEN_URL", "http://127.0.0.1:9/")
    return copy


@pytest.mark.broker
def test_records_survive_a_killed_broker(kafka):
    topic = kafka.create_topic("survives")
    produce(kafka.confluent_options(), topic, b"before")

    kafka.kill(1)
    assert not kafka.is_running(1)
    kafka.restart(1)
    kafka.wait_until_ready()
    produce(kafka.confluent_options(), topic, b"after")

    assert consume(kafka.confluent_options(), topic, 2) == [b"before", b"after"]


@pytest.mark.broker
def test_a_paused_broker_answers_nothing_until_it_is_resumed(kafka):
    topic = kafka.create_topic("paused")
    options = kafka.confluent_options()

    kafka.pause(1)
    impatient = Producer({**options, "message.timeout.ms": 500})
    impatient.produce(topic, b"lost")
    impatient.flush(DEADLINE_S)
    kafka.resume(1)
    kafka.wait_until_ready()
    produce(options, topic, b"later")

    assert consume(options, topic, 1) == [b"later"]


@pytest.mark.broker
def test_the_fixtures_give_a_broker_and_topics_of_ones_own(
    tallystick_kafka: EmbeddedKafka, tallystick_topic: NewTopic
):
    one, other = tallystick_topic("orders", partitions=3), tallystick_topic("orders")
    options = tallystick_kafka.confluent_options()
    known = Consumer({**options, "group.id": "any"}).list_topics(timeout=DEADLINE_S).topics

    assert one != other
    assert tallystick_topic(partitions=None) not in known
    assert (len(known[one].partitions), len(known[other].partitions)) == (3, 1)


@pytest.mark.broker
def test_three_brokers_know_each_other_and_replicate():
    with EmbeddedKafka(brokers=3) as kafka:
        topic = kafka.create_topic("replicated", partitions=2)
        options = kafka.confluent_options()
        metadata = Consumer({**options, "group.id": "any"}).list_topics(topic, timeout=DEADLINE_S)
        produce(options, topic, b"once")

        kafka.kill(metadata.topics[topic].partitions[0].leader)

        assert set(metadata.brokers) == {1, 2, 3}
        assert all(len(part.isrs) == 3 for part in metadata.topics[topic].partitions.values())
        produce(options, topic, *[b"more"] * 20)


def test_a_new_node_has_what_kafka_formatted_under_ids_of_its_own(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "bootstrap.checkpoint").write_bytes(b"features")
    lines = ["#", "node.id=1", "directory.id=ueN7", "version=1", "cluster.id=98lu"]
    (model / META).write_text("\n".join(lines) + "\n")
    nodes = lay_out(tmp_path, [1, 2], [3, 4])
    for node in nodes:
        assert not node.is_formatted
        copy_format(model, node, "of-the-cluster")

    assert [cluster_id_of(node) for node in nodes] == ["of-the-cluster"] * 2
    copies = [(node.data_path / META).read_text().splitlines() for node in nodes]
    assert [copy[1] for copy in copies] == ["node.id=1", "node.id=2"]
    assert len({copy[2] for copy in copies} | {lines[2]}) == 3
    assert {copy[3] for copy in copies} == {"version=1"}
    assert {(n.data_path / "bootstrap.checkpoint").read_bytes() for n in nodes} == {b"features"}


@pytest.mark.broker
@pytest.mark.parametrize("version", [0, 1])
def test_an_older_transaction_protocol_can_be_chosen(version):
    with EmbeddedKafka(transaction_version=version) as kafka:
        assert _transaction_version(kafka) == version


@pytest.mark.broker
def test_the_current_transaction_protocol_is_the_default(kafka):
    assert _transaction_version(kafka) == 2


@pytest.mark.broker
def test_the_kafka_that_was_chosen_is_what_runs(kafka, directory):
    """Its log says so, that of log4j 1 too; `make matrix` chooses older ones."""
    version = jars.chosen_version(None)
    topic = kafka.create_topic("chosen")
    produce(kafka.confluent_options(), topic, b"once")

    assert consume(kafka.confluent_options(), topic, 1) == [b"once"]
    assert _transaction_version(kafka) == kafka.transaction_version
    assert f"Kafka version: {version}" in (directory / "node-1/server.log").read_text()


def test_the_environment_chooses_a_kafka_for_who_does_not(monkeypatch):
    monkeypatch.setenv("TALLYSTICK_KAFKA_VERSION", "3.9.1")
    assert EmbeddedKafka().version == "3.9.1"
    assert EmbeddedKafka(version="4.0.0").version == "4.0.0"

    monkeypatch.setenv("TALLYSTICK_KAFKA_VERSION", "3.9")
    with pytest.raises(OptionError, match=r"VERSION=3\.9: expected one of 3\.7\.2, 3\.9\.1, 4\."):
        EmbeddedKafka()
    with pytest.raises(OptionError, match=r"transaction_version=.*2; expected 0 to 0 with Kafka 3"):
        EmbeddedKafka(version="3.7.2", transaction_version=2)


def _transaction_version(kafka: EmbeddedKafka) -> int | None:
    options = {name.removeprefix("kafka."): value for name, value in kafka.kafka_options.items()}
    broker = KafkaBroker(KafkaConfig.from_options(options))
    try:
        return cluster.cluster_facts(broker.client).transaction_version
    finally:
        broker.close()


@pytest.mark.broker
def test_no_broker_outlives_a_killed_parent_and_its_data_is_taken_up_offline(
    kafka, orphan, directory
):
    pid, cluster_before = orphan
    assert kafka.pid(1) != pid
    assert (directory / "node-1/data/meta.properties").read_text() == cluster_before


@pytest.mark.broker
def test_the_command_runs_until_it_is_told_to_stop(tmp_path):
    command = [sys.executable, "-m", "tallystick", "broker", "start", "--port", "20999"]
    ran = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert ran.stdout is not None
    servers = ran.stdout.readline().strip()
    ran.send_signal(signal.SIGINT)
    _, errors = ran.communicate(timeout=DEADLINE_S)

    assert servers == "127.0.0.1:20999"
    assert ran.returncode == 0, errors
    assert "Stopped." in errors


@pytest.mark.broker
def test_a_node_that_dies_at_start_tells_why():
    kafka = EmbeddedKafka(properties={"log.retention.ms": "for ever"})

    with pytest.raises(BrokerUnavailableError, match=r"(?s)node 1 .* ended .*log\.retention\.ms"):
        kafka.start()


def test_a_damaged_jar_is_never_run(cache):
    """It would be fetched again, but here nobody answers: refuse, and say how to go on."""
    victim = next(cache.glob("kafka-4.3.0-*/kafka-clients-*.jar"))
    with open(victim, "r+b") as file:
        file.seek(1000)
        file.write(b"tampered")

    with pytest.raises(OptionError, match=r"(?s)kafka-clients.*SHA-256.*Connect to the network"):
        jars.kafka_classpath("4.3.0")


def test_a_damaged_jar_is_replaced_by_a_good_one(cache, monkeypatch, tmp_path):
    folder = next(cache.glob("kafka-4.3.0-*/"))
    good = tmp_path / "served"
    shutil.copytree(folder, good)
    (folder / "kafka-clients-4.3.0.jar").write_bytes(b"")
    monkeypatch.setattr(jars, "_fetch", lambda work, target, *_: str(shutil.copytree(good, target)))

    classpath = jars.kafka_classpath("4.3.0")

    assert jars.damaged_jars(folder, "4.3.0") == []
    assert all(os.path.isfile(jar) for jar in classpath.split(os.pathsep))
    assert [path.name for path in cache.glob(".fetch-*")] == []


@pytest.mark.parametrize(
    ("option", "value"),
    [("brokers", 4), ("brokers", 0), ("port", 70_000), ("transaction_version", 3), ("heap_mb", 1)],
)
def test_a_value_that_cannot_work_is_refused_before_anything_starts(option, value):
    with pytest.raises(OptionError, match=rf"{option}=.*{value}"):
        EmbeddedKafka(**{option: value})


def test_security_refuses_what_the_brokers_could_not_log_in_with():
    with pytest.raises(OptionError, match="'admin' is missing"):
        Security({"alice": "secret"})
    with pytest.raises(OptionError, match="'admin' has other characters") as caught:
        Security({"admin": 'se"cret'})
    assert "cret" not in str(caught.value)
