"""A given Kafka cluster, with topics created for one run and deleted afterwards."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from tallystick.errors import OptionError
from tallystick.testing.process import free_ports
from tallystick_tools.chaos.cluster import Cluster
from tallystick_tools.chaos.proxy import HOST, Proxies

ANSWER_S = 10.0
SETTLED_S = 60.0
"""The longest time for topics to be made, and for offsets of deleted ones to be forgotten."""
POLL_S = 0.2


@contextmanager
def existing(
    servers: str, inputs: Sequence[str], outputs: Sequence[str], partitions: int
) -> Iterator[Cluster]:
    """Yield a given cluster with new topics, behind proxies; delete the topics afterwards.

    Args:
        servers: Its `host:port,…`.
        inputs: Topics of the input.
        outputs: Topics of the output.
        partitions: Of each topic.

    Raises:
        OptionError: No Kafka answers, a topic exists, or one cannot be made.
    """
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    topics = list(dict.fromkeys((*inputs, *outputs)))
    try:
        metadata = admin.list_topics(timeout=ANSWER_S)
    except KafkaException as error:
        raise OptionError(
            f"no Kafka answers at {servers} in plain text: {error.args[0]}. A cluster that wants "
            f"TLS or SASL cannot be used, since proxies have to read the requests"
        ) from error
    if there := [topic for topic in topics if topic in metadata.topics]:
        raise OptionError(
            f"{servers} has {', '.join(there)} already: the topics are made for a run and deleted "
            f"after it, so none of yours is taken"
        )
    brokers = [(broker.host, broker.port) for broker in metadata.brokers.values()]
    proxies = Proxies(free_ports(len(brokers), HOST), brokers, readdress=True)
    created: list[str] = []
    try:
        _make(admin, topics, partitions, created)
        cluster = Cluster(None, proxies, servers, tuple(inputs), tuple(outputs), partitions)
        with contextlib.closing(cluster):
            _wait(lambda: cluster.positions() == {}, "offsets of deleted topics are there")
            yield cluster
    finally:
        proxies.close()
        _delete(admin, created)


def _make(admin: AdminClient, topics: Sequence[str], partitions: int, created: list[str]) -> None:
    """Create topics, and note each created one in `made`."""
    answers = admin.create_topics([NewTopic(topic, partitions) for topic in topics])
    for topic, answer in answers.items():
        try:
            answer.result(ANSWER_S)
        except KafkaException as error:
            raise OptionError(f"the topic {topic!r} cannot be made: {error.args[0]}") from error
        created.append(topic)

    def are_led() -> bool:
        known = admin.list_topics(timeout=ANSWER_S).topics
        return all(
            topic in known
            and len(known[topic].partitions) == partitions
            and all(partition.leader >= 0 for partition in known[topic].partitions.values())
            for topic in topics
        )

    _wait(are_led, f"there is no leader of {', '.join(topics)}")


def _delete(admin: AdminClient, topics: Sequence[str]) -> None:
    if not topics:
        return
    for topic, answer in admin.delete_topics(list(topics)).items():
        try:
            answer.result(ANSWER_S)
        except KafkaException as error:
            raise OptionError(f"the topic {topic!r} cannot be deleted: {error.args[0]}") from error
    _wait(
        lambda: not {*topics} & {*admin.list_topics(timeout=ANSWER_S).topics},
        f"{', '.join(topics)} are not deleted",
    )


def _wait(holds: Callable[[], bool], otherwise: str) -> None:
    end = time.monotonic() + SETTLED_S
    while not holds():
        if time.monotonic() > end:
            raise OptionError(f"{otherwise} after {SETTLED_S:.0f} s")
        time.sleep(POLL_S)
