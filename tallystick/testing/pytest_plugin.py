"""Fixtures for your own tests; pytest finds them as soon as Tallystick is installed.

    def test_orders_are_counted(tallystick_kafka, tallystick_topic):
        orders = tallystick_topic("orders", partitions=6)
        produce(tallystick_kafka.bootstrap_servers, orders, ...)

The broker starts when the first test asks for it, serves the whole session, and is gone afterwards.
With pytest-xdist each worker has one of its own. For more brokers, security or faults, write a
fixture around `tallystick.testing.EmbeddedKafka`.

Loaded in every run of pytest: so it imports nothing before a fixture is used.
"""

import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from tallystick.testing import EmbeddedKafka


class NewTopic(Protocol):
    """A function that creates a topic: the fixture `tallystick_topic`."""

    def __call__(
        self,
        prefix: str = "topic",
        *,
        partitions: int | None = 1,
        config: Mapping[str, str] | None = None,
    ) -> str:
        """Create a topic under a name unique to the test, and return the name.

        Args:
            prefix: The beginning of the name, to recognise it by.
            partitions: The number of partitions; None only makes up a name and creates nothing.
            config: Topic settings, such as `retention.ms`.
        """
        ...


@pytest.fixture(scope="session")
def tallystick_kafka() -> Iterator["EmbeddedKafka"]:
    """Yield one real Kafka broker for the whole session, without security."""
    from tallystick.testing import EmbeddedKafka

    with EmbeddedKafka() as kafka:
        yield kafka


@pytest.fixture
def tallystick_topic(tallystick_kafka: "EmbeddedKafka") -> NewTopic:
    """Return a function that creates topics: `tallystick_topic("orders", partitions=6)`."""

    def new_topic(
        prefix: str = "topic",
        *,
        partitions: int | None = 1,
        config: Mapping[str, str] | None = None,
    ) -> str:
        name = f"{prefix}-{uuid.uuid4().hex[:8]}"
        if partitions is not None:
            tallystick_kafka.create_topic(name, partitions, config=config)
        return name

    return new_topic
