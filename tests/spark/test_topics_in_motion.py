"""A query over a pattern while topics are created, filled, grown, deleted and made anew at random.

After Spark's KafkaSourceStressForDontFailOnDataLossSuite, checked by content: no record is read
twice, none comes from nowhere, and of the topics that live on, all are read. `make stress` runs it
for a minute.

What is in these topics is read from Kafka. Acknowledgements do not tell: a broker that has not
heard of an exchange yet takes records into the topic that is gone, behind the answer to the
creation of the new one (docs/decisions/0049).
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
from tests.spark.test_changing_topics import World, where_it_is
from tests.spark.topics import TRY_S, WAIT_S, Record, read_committed
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.chaos]

SECONDS = float(os.environ.get("STRESS_SECONDS", "12"))
STEPS_MIN = 60
"""On a busy machine a step takes seconds, and too few prove nothing."""
SEED = int(os.environ.get("STRESS_SEED", "1"))


class Topics:
    """The topics that live, and what was written to them; their names are of this try only."""

    def __init__(self, kafka: EmbeddedKafka, chance: random.Random) -> None:
        self.prefix = f"motion-{uuid.uuid4().hex[:8]}-"
        self.names = [self.prefix + letter for letter in "abcde"]
        self.admin = AdminClient(kafka.confluent_options())
        self.producer = Producer({**kafka.confluent_options(), "message.timeout.ms": 5000})
        self.kafka, self.chance = kafka, chance
        self.partitions: dict[str, int] = {}
        """Of the topics that live."""
        self.written: set[str] = set()
        self.count = 0
        self.began = time.monotonic()
        self.history: list[str] = []
        """What was done and when, for a failure."""

    def step(self) -> None:
        """One random change."""
        name = self.chance.choice(self.names)
        if name not in self.partitions:
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
        self.partitions[name] = wanted
        self._note(f"{name} with {wanted} partitions")

    def delete(self, name: str) -> None:
        self._ask(
            lambda: self.admin.delete_topics([name], request_timeout=TRY_S),
            KafkaError.UNKNOWN_TOPIC_OR_PART,
        )
        del self.partitions[name]
        self._note(f"{name} deleted")

    def grow(self, name: str) -> None:
        self.partitions[name] += 1
        wanted = NewPartitions(name, self.partitions[name])
        self._ask(
            lambda: self.admin.create_partitions([wanted], request_timeout=TRY_S),
            KafkaError.INVALID_PARTITIONS,
        )
        self._note(f"{name} grown to {self.partitions[name]} partitions")

    def records(self) -> dict[str, Record]:
        """What is in the topics that live, by value; {} while a broker shows older ones."""
        options = self.kafka.confluent_options()
        shown = self.admin.list_topics(timeout=WAIT_S).topics
        for name, count in self.partitions.items():
            if name not in shown or len(shown[name].partitions) != count:
                return {}
        return {
            str(record.value): record
            for name in self.partitions
            for record in read_committed(options, name)
        }

    def _note(self, what: str) -> None:
        self.history.append(f"{time.monotonic() - self.began:.2f} s: {what}")

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
            self.producer.produce(name, value=value)
        except KafkaException as error:
            if error.args[0].code() != KafkaError._UNKNOWN_TOPIC:
                raise
            self.producer.poll(0.1)
            return False
        return True

    def fill(self, name: str) -> None:
        """Some records."""
        values = [f"{name} {self.count + i}" for i in range(self.chance.randint(1, 200))]
        self.count += len(values)
        self.written |= set(values)
        for value in values:
            wait_until(
                partial(self._is_taken, name, value), f"the producer does not know the topic {name}"
            )
        self.producer.flush(WAIT_S)
        self._note(f"{name} got {values[0]} to {values[-1]}")


def test_no_record_is_read_twice_and_none_is_missed_of_topics_that_live(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    world = World(spark, kafka, tmp_path)
    topics = Topics(kafka, random.Random(SEED))
    until = time.monotonic() + SECONDS

    with world.running(subscribePattern=f"{topics.prefix}.*", failOnDataLoss="false") as query:
        while time.monotonic() < until or len(topics.history) < STEPS_MIN:
            topics.step()
            assert query.exception() is None, f"seed {SEED}: {query.exception()}"
        missing: dict[str, Record] = {}

        def are_read() -> bool:
            assert query.exception() is None, f"seed {SEED}: {query.exception()}"
            records, read = topics.records(), set(world.values)
            last[:] = records
            missing.clear()
            missing.update({value: records[value] for value in records if value not in read})
            return bool(records) and not missing

        last: list[str] = []
        wait_until(
            are_read,
            lambda: (
                f"seed {SEED}: of {len(last)} records {len(missing)} are not read, "
                f"{list(missing.values())[:5]} and others; {where_it_is(query)}; "
                f"what was done: {topics.history[-60:]}"
            ),
            timeout_s=2 * WAIT_S,
            poll_s=1.0,
        )

    twice = [value for value, count in Counter(world.values).items() if count > 1]
    assert twice == [], f"seed {SEED}"
    assert set(world.values) <= topics.written, f"seed {SEED}"
    assert len(last) > 100, f"seed {SEED}: too little happened to prove anything"
