"""A given cluster: answers lead clients back to the proxies; only topics of a run are touched."""

import struct
from functools import partial

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from kafka.protocol.admin import DescribeClusterResponse
from kafka.protocol.metadata import (
    FindCoordinatorResponse,
    MetadataResponse,
)

from tallystick.errors import OptionError
from tallystick_tools.chaos.addresses import (
    DESCRIBE_CLUSTER,
    FIND_COORDINATOR,
    FLEXIBLE_SINCE,
    METADATA,
    readdressed,
)
from tallystick_tools.chaos.cluster import read_all
from tallystick_tools.chaos.existing_cluster import existing
from tallystick_tools.chaos.proxy import APIS, PRODUCE
from tallystick_tools.chaos.schedule import KINDS, kinds_for
from tallystick_tools.chaos.verify import question_of
from tests.waiting import wait_until

OLD, NEW, STRANGE = ("broker-1.example", 9092), ("127.0.0.1", 31007), ("elsewhere", 9092)
CLASSES = {
    METADATA: MetadataResponse,
    FIND_COORDINATOR: FindCoordinatorResponse,
    DESCRIBE_CLUSTER: DescribeClusterResponse,
}
VERSIONS = [
    (api, version)
    for api, its_class in CLASSES.items()
    for version in range(its_class.min_version, its_class.max_version + 1)
]


def answer_with(api: int, *addresses: tuple[str, int]):
    """An answer of Kafka's, as kafka-python has its schema."""
    its_class = CLASSES[api]
    if api == FIND_COORDINATOR:
        (host, port), *_ = addresses
        coordinators = [
            its_class.Coordinator(
                key="k" * 200, node_id=n, host=h, port=p, error_code=0, error_message=None
            )
            for n, (h, p) in enumerate(addresses)
        ]
        return its_class(
            throttle_time_ms=7, error_code=0, error_message="none", node_id=5, host=host, port=port,
            coordinators=coordinators,
        )  # fmt: skip
    broker_class = (
        its_class.MetadataResponseBroker if api == METADATA else its_class.DescribeClusterBroker
    )
    name = "node_id" if api == METADATA else "broker_id"
    brokers = [
        broker_class(**{name: n}, host=h, port=p, rack="r" if n else None)
        for n, (h, p) in enumerate(addresses)
    ]
    rest = {"topics": []} if api == METADATA else {"error_message": None, "error_code": 0}
    return its_class(
        throttle_time_ms=7, brokers=brokers, cluster_id="cluster", controller_id=1, **rest
    )


def as_bytes(api: int, version: int, *addresses: tuple[str, int]) -> bytes:
    head = struct.pack(">i", 77) + b"\x00" * (version >= FLEXIBLE_SINCE[api])
    return head + bytes(answer_with(api, *addresses).encode(version=version))


@pytest.mark.parametrize(("api", "version"), VERSIONS)
def test_addresses_that_are_known_are_replaced_in_every_version(api, version):
    old, new = (as_bytes(api, version, addresses, STRANGE) for addresses in (OLD, NEW))
    assert old != new
    assert readdressed(api, version, old, {OLD: NEW}) == new
    assert readdressed(api, version, old, {}) == old


IN, OUT, MINE = "chaos-in", "chaos-out", "chaos-mine"
"""The topics of these tests: no others have them."""


@pytest.fixture
def kafka(tallystick_kafka):
    return tallystick_kafka


def names(kafka) -> set[str]:
    return {*AdminClient(kafka.confluent_options()).list_topics(timeout=20).topics}


@pytest.mark.broker
def test_clients_come_through_the_proxies_and_topics_are_gone_afterwards(kafka):
    for _ in range(2):  # the same names again
        with existing(kafka.bootstrap_servers, [IN], [OUT], 2) as cluster:
            options = {"bootstrap.servers": cluster.proxies.bootstrap_servers, "log_level": 0}
            assert options["bootstrap.servers"] != kafka.bootstrap_servers
            trap = cluster.proxies.set_trap("lose-reply", [PRODUCE])
            producer = Producer({**options, "enable.idempotence": True, "retry.backoff.ms": 50})
            for number in range(2):
                producer.produce(IN, str(number), partition=0)
                producer.produce(OUT, str(number), partition=number)
            assert producer.flush(30) == 0
            assert trap.caught.is_set()
            assert APIS[trap.api] == "Produce"  # sent to an address that an answer named
            assert [record.value for record in read_all(cluster)] == [b"0", b"1"]
            assert cluster.ends([IN], committed=True) == {(IN, 0): 2, (IN, 1): 0}
            before = cluster.positions()
            consumer = Consumer({**options, "group.id": "chaos"})
            consumer.commit(offsets=[TopicPartition(IN, 0, 2)], asynchronous=False)
            consumer.close()
            assert (before, cluster.positions()) == ({}, {(IN, 0): 2})
            assert {IN, OUT} <= names(kafka)
        assert not {IN, OUT} & names(kafka)


@pytest.mark.broker
def test_a_topic_that_exists_is_refused_and_left_alone(kafka):
    kafka.create_topic(MINE)
    with pytest.raises(OptionError, match=f"has {MINE} already"):
        existing(kafka.bootstrap_servers, [IN], [MINE], 2).__enter__()
    assert MINE in names(kafka)
    assert IN not in names(kafka)


@pytest.mark.broker
def test_a_topic_that_cannot_be_made_leaves_none_behind(kafka):
    with pytest.raises(OptionError, match="'no name' cannot be made"):
        existing(kafka.bootstrap_servers, [IN], ["no name"], 2).__enter__()
    wait_until(lambda: IN not in names(kafka), "the topic of the input is still there")


def test_a_cluster_that_does_not_answer_in_plain_text_is_named(monkeypatch):
    monkeypatch.setattr("tallystick_tools.chaos.existing_cluster.ANSWER_S", 1.0)
    with pytest.raises(OptionError, match=r"127\.0\.0\.1:1 in plain text.*TLS"):
        existing("127.0.0.1:1", ["in"], ["out"], 2).__enter__()


def test_brokers_of_a_given_cluster_are_cut_off_but_not_killed():
    assert {*KINDS} - {*kinds_for(0, (), True, has_clock=True)} == {
        "broker",
        "broker-pause",
        "executor",
        "object-store",
    }
    with pytest.raises(OptionError, match="given cluster"):
        kinds_for(0, ["broker-pause"], False)
    pose = partial(question_of, ["late"], inputs={}, outputs=["out"], bootstrap_servers="here:1")
    assert (pose().job.servers, pose().job.brokers) == ("here:1", 0)
    for its_own in ({"brokers": 3}, {"transaction_version": 2}):
        with pytest.raises(OptionError, match="its own"):
            pose(**its_own)
