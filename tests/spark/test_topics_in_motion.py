"""A query over a pattern while topics are created, filled, grown, deleted and made anew at random.

After Spark's KafkaSourceStressForDontFailOnDataLossSuite, checked by content: no record is read
twice, none comes from nowhere, and of the topics that live on, all are read. `make stress` runs it
for a minute.
"""

import os
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic
from pyspark.sql import SparkSession

from tallystick.testing import EmbeddedKafka
from tests.spark.test_changing_topics import World, wait_until
from tests.spark.topics import TRY_S, WAIT_S

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.chaos]

SECONDS = float(os.environ.get("STRESS_SECONDS", "12"))
SEED = int(os.environ.get("STRESS_SEED", "1"))


class Topics:
    """The topics that live, and what was written to them; their names are of this try only."""

    def __init__(self, kafka: EmbeddedKafka, chance: random.Random) -> None:
        self.prefix = f"motion-{uuid.uuid4().hex[:8]}-"
        self.names = [self.prefix + letter for letter in "abcde"]
        self.admin = AdminClient(kafka.confluent_options())
        self.producer = Producer({**kafka.confluent_options(), "message.timeout.ms": 5000})
        self.chance = chance
        self.partitions: dict[str, int] = {}
        self.living: dict[str, set[str]] = {}
        self.written: set[str] = set()
        self.count = 0

    def step(self) -> None:
        """One random change."""
        name = self.chance.choice(self.names)
        if name not in self.living:
            self.create(name)
        elif self.chance.random() < 0.08:
            self.delete(name)
            if self.chance.random() < 0.5:
                self.create(name)
        elif self.chance.random() < 0.1:
            self.grow(name)
        else:
            self.fill(name)

    def create(self, name: str) -> None:
        wanted = self.chance.randint(1, 3)
        new = NewTopic(name, wanted, 1)
        self._ask(
            lambda: self.admin.create_topics([new], request_timeout=TRY_S),
            KafkaError.TOPIC_ALREADY_EXISTS,
        )
        self.partitions[name], self.living[name] = wanted, set()

    def delete(self, name: str) -> None:
        self._ask(
            lambda: self.admin.delete_topics([name], request_timeout=TRY_S),
            KafkaError.UNKNOWN_TOPIC_OR_PART,
        )
        del self.partitions[name], self.living[name]

    def grow(self, name: str) -> None:
        self.partitions[name] += 1
        wanted = NewPartitions(name, self.partitions[name])
        self._ask(
            lambda: self.admin.create_partitions([wanted], request_timeout=TRY_S),
            KafkaError.INVALID_PARTITIONS,
        )

    def _ask(self, ask: Callable[[], dict[str, Future[None]]], done: int) -> None:
        """Ask until it is answered; `done` is the answer to a repetition of what was done.

        librdkafka repeats a request too, and does not say so. Nobody else changes these topics.
        """
        deadline, is_first = time.monotonic() + WAIT_S, True
        while True:
            (answer,) = ask().values()
            try:
                answer.result(WAIT_S)
                return
            except KafkaException as failure:
                error = failure.args[0]
            if error.code() == done and not is_first:
                return
            assert time.monotonic() < deadline, f"asked again and again, the last time: {error}"
            is_first = False
            time.sleep(0.1)

    def _is_taken(self, name: str, value: str) -> bool:
        """Hand a record over; the client may not know a new topic for a moment."""
        try:
            self.producer.produce(name, value=value, on_delivery=self._acknowledged)
        except KafkaException as error:
            if error.args[0].code() != KafkaError._UNKNOWN_TOPIC:
                raise
            self.producer.poll(0.1)
            return False
        return True

    def fill(self, name: str) -> None:
        """Some records; those that were acknowledged while the topic lives have to be read."""
        values = [f"{name} {self.count + i}" for i in range(self.chance.randint(1, 200))]
        self.count += len(values)
        self.written |= set(values)
        for value in values:
            wait_until(partial(self._is_taken, name, value))
        self.producer.flush(WAIT_S)

    def _acknowledged(self, error: object, message: object) -> None:
        if error is None:
            self.living[message.topic()].add(message.value().decode())


def test_no_record_is_read_twice_and_none_is_missed_of_topics_that_live(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    world = World(spark, kafka, tmp_path)
    topics = Topics(kafka, random.Random(SEED))
    until = time.monotonic() + SECONDS

    with world.running(subscribePattern=f"{topics.prefix}.*", failOnDataLoss="false") as query:
        while time.monotonic() < until:
            topics.step()
            assert query.exception() is None, f"seed {SEED}: {query.exception()}"
        last = set().union(*topics.living.values())
        world.wait_for(query, *last)

    twice = [value for value, count in Counter(world.values).items() if count > 1]
    assert twice == [], f"seed {SEED}"
    assert set(world.values) <= topics.written, f"seed {SEED}"
    assert len(last) > 100, f"seed {SEED}: too little happened to prove anything"
