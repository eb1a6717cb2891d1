"""What is told of topics while a cluster has not made up its mind: prepared answers."""

import time
import uuid
from typing import Any

import pytest
from fake_broker import CODES, FakeBroker, answer, part

from tallystick.errors import AuthorizationError, OptionError
from tallystick.kafka import cluster, protocol
from tallystick.kafka.client import Client
from tallystick.kafka.protocol import topic_id_from, topic_id_text
from tallystick.source.subscription import LATEST, FoundTopic
from tallystick.values import TopicPartition

pytestmark = pytest.mark.timeout(60)
TOPIC_ID = topic_id_text(uuid.UUID(int=7))


def altered(broker: FakeBroker, **fields: Any) -> None:
    """Have the broker's Metadata answers differ in what they say of each topic."""

    def tell(request: Any) -> Any:
        response = broker.tell_metadata(request)
        for topic in response.topics:
            for name, value in fields.items():
                setattr(topic, name, value)
        return response

    broker.handlers["Metadata"] = tell


def test_a_topic_that_is_known_a_little_later_is_found() -> None:
    with FakeBroker() as broker:

        def tell(request: Any) -> Any:
            created = len(broker.requests_of("Metadata")) > 3
            broker.partitions = {"orders": 2, "new": 5} if created else {"orders": 2}
            return broker.tell_metadata(request)

        broker.handlers["Metadata"] = tell

        topics = cluster.describe_topics(Client(broker.config()), ["orders", "new"])

    assert topics == {"orders": FoundTopic(TOPIC_ID, 2), "new": FoundTopic(TOPIC_ID, 5)}


def test_a_topic_is_absent_only_after_it_was_asked_for_again_and_again() -> None:
    with FakeBroker() as broker:
        topics = cluster.describe_topics(Client(broker.config()), ["orders", "none"])
        times = broker.when("Metadata")

    assert topics == {"orders": FoundTopic(TOPIC_ID, 2)}
    assert times[-1] - times[0] >= cluster.METADATA_LAG_MAX_S
    assert len(times) > 3


def test_what_is_there_is_told_by_one_request() -> None:
    with FakeBroker() as broker:
        cluster.describe_topics(Client(broker.config()), ["orders"])

        assert len(broker.requests_of("Metadata")) == 1
        assert cluster.describe_topics(Client(broker.config()), []) == {}


def test_a_topic_without_leaders_is_there() -> None:
    with FakeBroker() as broker:

        def tell(request: Any) -> Any:
            response = broker.tell_metadata(request)
            for partition in response.topics[0].partitions:
                partition.leader_id = -1
                partition.error_code = CODES["LeaderNotAvailable"]
            return response

        broker.handlers["Metadata"] = tell

        topics = cluster.describe_topics(Client(broker.config()), ["orders"])

    assert topics["orders"].partition_count == 2


def test_a_broker_without_topic_ids_tells_none() -> None:
    with FakeBroker() as broker:
        altered(broker, topic_id=uuid.UUID(int=0))

        assert cluster.describe_topics(Client(broker.config()), ["orders"])["orders"].topic_id == ""


def test_an_impossible_name_is_absent_at_once_and_the_error_says_why() -> None:
    with FakeBroker() as broker:
        altered(broker, error_code=CODES["InvalidTopic"])

        assert cluster.describe_topics(Client(broker.config()), ["a b"]) == {}
        assert len(broker.requests_of("Metadata")) == 1
        with pytest.raises(OptionError, match=r"'a b'.*InvalidTopic"):
            cluster.partition_counts(Client(broker.config()), ["a b"])


def test_a_topic_that_may_not_be_described_is_an_error() -> None:
    with FakeBroker() as broker:
        altered(broker, error_code=CODES["TopicAuthorizationFailed"])

        with pytest.raises(AuthorizationError, match="DESCRIBE"):
            cluster.describe_topics(Client(broker.config()), ["orders"])


def listing(error_names: list[str | None]) -> Any:
    """ListOffsets answers for orders-0: one error after the other, the last for ever."""

    def tell(request: Any) -> Any:
        error_name = error_names.pop(0) if len(error_names) > 1 else error_names[0]
        topic_class = part(request, "ListOffsetsTopicResponse")
        offsets = topic_class.ListOffsetsPartitionResponse(
            partition_index=0,
            error_code=CODES[error_name],
            timestamp=-1,
            offset=-1 if error_name else 12,
            leader_epoch=0,
        )
        return answer(request, topics=[topic_class(name="orders", partitions=[offsets])])

    return tell


@pytest.mark.parametrize("error_name", ["UnknownTopicOrPartition", "UnknownTopicId"])
def test_a_partition_that_stays_unknown_has_no_offset(error_name: str) -> None:
    partition = TopicPartition("orders", 0)
    with FakeBroker({"ListOffsets": listing([error_name])}) as broker:
        client = Client(broker.config())
        offsets = cluster.list_offsets(client, [partition], LATEST, absent_after_s=0.32)
        times = broker.when("ListOffsets")

    assert offsets == {}
    assert times[-1] - times[0] >= 0.3  # each is noted a moment after it was asked


def test_other_obstacles_do_not_make_a_partition_absent() -> None:
    partition = TopicPartition("orders", 0)
    passing: list[str | None] = ["UnknownTopicOrPartition", *["NotLeaderForPartition"] * 6, None]
    with FakeBroker({"ListOffsets": listing(passing)}) as broker:
        client = Client(broker.config())
        began = time.monotonic()
        offsets = cluster.list_offsets(client, [partition], LATEST, absent_after_s=0.1)

    assert offsets == {partition: 12}
    assert time.monotonic() - began > 0.1


def test_answers_that_nobody_waits_for_after_an_error_are_not_kept() -> None:
    refused = listing(["TopicAuthorizationFailed"])
    partitions = [TopicPartition("orders", index) for index in (0, 1)]
    with FakeBroker({"ListOffsets": refused}) as broker, FakeBroker() as other:
        broker.nodes = other.nodes = [broker, other]
        other.handlers["ListOffsets"] = refused

        def tell(request: Any) -> Any:
            response = broker.tell_metadata(request)
            for topic in response.topics:
                topic.partitions[1].leader_id = 1
            return response

        broker.handlers["Metadata"] = other.handlers["Metadata"] = tell
        client = Client(broker.config())
        for _ in range(3):
            with pytest.raises(AuthorizationError):
                cluster.list_offsets(client, partitions, LATEST)
        client.metadata()  # comes after them, whoever is asked
        client.network.ask(1, protocol.MetadataRequest(topics=[]), client.deadline())
        connections = client.network._connections.values()

        assert len(other.requests_of("ListOffsets")) == 3
        assert not any(connection._answers or connection._unwanted for connection in connections)


def test_topic_ids_as_kafka_prints_them() -> None:
    topic_id = uuid.UUID("f8b5b5ff-0000-4000-8000-0123456789ab")

    assert topic_id_from(topic_id_text(topic_id)) == topic_id
    assert topic_id_text(topic_id) == "-LW1_wAAQACAAAEjRWeJqw"
    assert topic_id_text(topic_id_from("")) == ""


class Leader:
    """Answers each Fetch with one of these errors in turn, then with the last one."""

    def __init__(self, *errors: str | None) -> None:
        self.errors = list(errors)

    def fetch(self, request: Any) -> Any:
        name = self.errors.pop(0) if len(self.errors) > 1 else self.errors[0]
        topic_class = part(request, "FetchableTopicResponse")
        topics = [
            topic_class(
                topic=topic.topic,
                topic_id=topic.topic_id,
                partitions=[
                    topic_class.PartitionData(
                        partition_index=partition.partition,
                        error_code=CODES[name],
                        high_watermark=0,
                    )
                    for partition in topic.partitions
                ],
            )
            for topic in request.topics
        ]
        return answer(request, responses=topics)


BOTH = {TopicPartition("orders", index): TOPIC_ID for index in (0, 1)}


@pytest.mark.parametrize("last", [None, "OffsetOutOfRange"])
def test_a_leader_that_has_another_topic_of_the_name_is_asked_until_it_has_this_one(
    last: str | None,
) -> None:
    leader = Leader("InconsistentTopicId", "UnknownTopicId", "InconsistentTopicId", last)
    with FakeBroker({"Fetch": leader.fetch}) as broker:
        assert cluster.confirm_topic_ids(Client(broker.config()), BOTH) == BOTH.keys()
        requests = broker.requests_of("Fetch")
    assert len(requests) == 4
    assert {topic.topic_id for request in requests for topic in request.topics} == {
        uuid.UUID(int=7)
    }


def test_a_leader_that_goes_on_having_another_topic_of_the_name_is_left_out() -> None:
    with FakeBroker({"Fetch": Leader("InconsistentTopicId").fetch}) as broker:
        confirmed = cluster.confirm_topic_ids(Client(broker.config()), BOTH, absent_after_s=0.2)
    assert confirmed == set()


def test_what_has_no_id_and_what_knows_no_fetch_by_id_is_believed() -> None:
    with FakeBroker({"Fetch": Leader(None).fetch}, {"Fetch": (4, 12)}) as broker:
        assert cluster.confirm_topic_ids(Client(broker.config()), BOTH) == BOTH.keys()
        assert [topic.topic for topic in broker.requests_of("Fetch")[0].topics] == ["orders"]
        nameless = dict.fromkeys(BOTH, "")
        assert cluster.confirm_topic_ids(Client(broker.config()), nameless) == BOTH.keys()
        assert len(broker.requests_of("Fetch")) == 1
