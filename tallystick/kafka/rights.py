"""The rights that the user of a connection lacks, by what the brokers say (KIP-430).

Topics and groups are described together with the operations that are authorized on them. Kafka has
no such answer for transactional ids, so the right to write one is tried out: with an EndTxn of a
producer that cannot exist, which is refused in every case, and changes nothing.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from tallystick.epoch.rights import GROUP, READ, TOPIC, TRANSACTIONAL_ID, WRITE, Right
from tallystick.errors import AuthorizationError
from tallystick.kafka import protocol
from tallystick.kafka.client import AnyBroker, Client, Coordinator
from tallystick.kafka.error_policy import ABORT, FENCED

OPERATION_CODES = {READ: 3, WRITE: 4}
"""Kafka's AclOperation."""
Operations = Collection[int]
EVERYTHING: Operations = frozenset(OPERATION_CODES.values())
"""Also where a broker does not say: its refusal comes with the first request then."""
NOTHING: Operations = frozenset()
NO_PRODUCER = -1
ABSENT = frozenset({"UnknownTopicOrPartition", "InvalidTopic"})
"""Topics that are not there are told of elsewhere."""


def missing(client: Client, wanted: Iterable[Right]) -> tuple[Right, ...]:
    """Return those of the wanted rights that the user of the connection does not have.

    A cluster without access control grants everything.

    Raises:
        BrokerUnavailableError: the deadline passed.
    """
    rights = sorted(set(wanted))
    topics = _topic_operations(client, {each.name for each in rights if each.resource == TOPIC})
    groups = _each(client, rights, GROUP, _group_operations)
    ids = _each(client, rights, TRANSACTIONAL_ID, _transactional_operations)
    held = {TOPIC: topics, GROUP: groups, TRANSACTIONAL_ID: ids}
    return tuple(
        each
        for each in rights
        if OPERATION_CODES[each.operation] not in held[each.resource][each.name]
    )


def _topic_operations(client: Client, topics: Iterable[str]) -> Mapping[str, Operations]:
    names = sorted(topics)
    if not names:
        return {}
    topic_class = protocol.MetadataRequest.MetadataRequestTopic
    denied = frozenset({"TopicAuthorizationFailed"})
    response = client.call(
        lambda: protocol.MetadataRequest(
            topics=[topic_class(name=name) for name in names],
            allow_auto_topic_creation=False,
            include_topic_authorized_operations=True,
            min_version=8,
        ),
        AnyBroker(),
        lambda response: [(topic.error_code, f"topic {topic.name!r}") for topic in response.topics],
        accept=denied | ABSENT,
    )
    return {
        topic.name: (
            NOTHING
            if protocol.error_name(topic.error_code) in denied
            else _told(topic.authorized_operations)
        )
        for topic in response.topics
    }


def _each(
    client: Client, rights: Iterable[Right], resource: str, ask: Callable[[Client, str], Operations]
) -> Mapping[str, Operations]:
    """Ask by name; who may not even describe a resource is refused by its coordinator."""
    held: dict[str, Operations] = {}
    for name in (each.name for each in rights if each.resource == resource):
        try:
            held[name] = ask(client, name)
        except AuthorizationError:
            held[name] = NOTHING
    return held


def _group_operations(client: Client, group: str) -> Operations:
    response = client.call(
        lambda: protocol.DescribeGroupsRequest(
            groups=[group],
            include_authorized_operations=True,
            min_version=3,
            max_version=5,  # from 6 on nothing is said of a group that has no offsets yet
        ),
        Coordinator("group", group),
        lambda response: [(found.error_code, f"group {group!r}") for found in response.groups],
    )
    return _told(response.groups[0].authorized_operations)


def _transactional_operations(client: Client, transactional_id: str) -> Operations:
    def make() -> Any:
        return protocol.EndTxnRequest(
            transactional_id=transactional_id,
            producer_id=NO_PRODUCER,
            producer_epoch=NO_PRODUCER,
            committed=False,
            max_version=3,
        )

    client.call(
        make,
        Coordinator("transaction", transactional_id),
        lambda response: [(response.error_code, f"transactional id {transactional_id!r}")],
        accept=FENCED | ABORT | {"TransactionalIdNotFound", "InvalidRequest"},
    )
    return EVERYTHING


def _told(operations: Operations | None) -> Operations:
    return EVERYTHING if operations is None else operations
