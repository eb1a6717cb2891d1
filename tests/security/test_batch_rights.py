"""The transaction of a batch write with the least rights, and with each of them missing."""

import logging

import pyarrow as pa
import pytest

from tallystick.epoch.transactional_ids import batch_id
from tallystick.errors import AuthorizationError
from tallystick.kafka.batch_transaction import BatchTransaction
from tallystick.kafka.output import KafkaOutput
from tallystick.kafka.writer import KafkaProduce
from tallystick.tasks.read import EncodePlan, Route, WritePlan, send
from tallystick.testing import EmbeddedKafka
from tests.security.people import PASSWORDS, TOPIC, config_of
from tests.spark.topics import read_committed, wait_until_nothing_is_pending

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]
ROWS = pa.record_batch({"value": pa.array(["a row"])})


def begin(kafka: EmbeddedKafka, user: str, name: str) -> BatchTransaction:
    output = KafkaOutput(config_of(kafka, user), TOPIC, "", transaction_timeout_ms=300_000)
    return BatchTransaction.begin(output, name, ROWS.schema)


@pytest.mark.parametrize(("user", "may_read"), [("alice", True), ("writer", False)])
def test_two_rights_are_enough(
    user: str, may_read: bool, guarded: EmbeddedKafka, caplog: pytest.LogCaptureFixture
) -> None:
    """READ on the topic is for the count; who has none is warned."""
    before = len(read_committed(guarded.confluent_options(), TOPIC))
    with caplog.at_level(logging.DEBUG):
        batch = begin(guarded, user, batch_id(f"tallystick-{user}", ""))
        produce = KafkaProduce(batch.output.config, batch.transaction_version)
        frames = send(EncodePlan((Route(batch.rows, "lz4", 100_000),), 1), [ROWS], 0)
        report = WritePlan(produce, batch.producer).write(frames, 0)
        assert report.error == ""
        batch.commit(report.produced)

    wait_until_nothing_is_pending(guarded.confluent_options(), TOPIC)
    assert len(read_committed(guarded.confluent_options(), TOPIC)) == before + 1
    assert (f"READ on {TOPIC} is missing" in caplog.text) != may_read
    assert not [
        each for each, password in PASSWORDS.items() if password in caplog.text + str(batch)
    ]


@pytest.mark.parametrize(
    ("user", "name", "grants"),
    [
        (
            "no-transactional-id",
            batch_id("tallystick-no-transactional-id", ""),
            ["--operation Write --transactional-id 'tallystick-no-transactional-id-batch'"],
        ),
        (
            "alice",
            batch_id(None, "0123456789abcdef"),
            ["--transactional-id 'tallystick-batch-' --resource-pattern-type prefixed"],
        ),
        ("no-topic-write", batch_id("tallystick-no-topic-write", ""), [f"Write --topic '{TOPIC}'"]),
    ],
)
def test_what_a_user_lacks_is_told_before_a_task_starts(
    user: str, name: str, grants: list[str], guarded: EmbeddedKafka
) -> None:
    with pytest.raises(AuthorizationError) as told:
        begin(guarded, user, name)

    assert f"user {user!r} lacks WRITE on" in str(told.value)
    assert all(grant in str(told.value) for grant in grants)
    assert str(told.value).count("--operation") == len(grants)
