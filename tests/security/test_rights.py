"""The whole epoch protocol with the least rights, and with each of them missing."""

from pathlib import Path

import pytest

from tallystick.errors import AuthorizationError
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.client import Client
from tallystick.sink.preflight import Settings, check
from tallystick.testing import EmbeddedKafka
from tallystick.topic_partition import TopicPartition
from tests.failover.evidence import problems_of, read_committed, replay
from tests.failover.job import Job, readers_group
from tests.failover.known_rows import Shape
from tests.security.people import PASSWORDS, TOKENS, TOPIC, config_of

pytestmark = pytest.mark.broker

EPOCHS = 3
SETTINGS = Settings(
    transaction_timeout_ms=300_000,
    delivery_timeout_ms=120_000,
    batch_bytes=900_000,
    trigger_interval_ms=None,
    speculation=False,
)


def job_of(kafka: EmbeddedKafka, user: str, folder: Path, **how: str) -> Job:
    return Job(Shape(user, TOPIC, (0, 1)), config_of(kafka, user), folder / user, **how)


def problems(job: Job, kafka: EmbeddedKafka) -> list[str]:
    client = Client(config_of(kafka, "admin"))
    seen = read_committed(kafka.confluent_options(), TOPIC, 2)
    parts = replay(client, TOPIC, 2)
    client.close()
    return problems_of(job.shape, job.logged, seen, parts)


def assert_no_secret(*texts: object) -> None:
    shown = "\n".join(f"{text}\n{text!r}" for text in texts)
    assert [user for user, password in PASSWORDS.items() if password in shown] == []


def test_four_rights_are_enough_for_the_whole_protocol(
    guarded: EmbeddedKafka, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of(guarded, "alice", tmp_path)
    with caplog.at_level("DEBUG"):
        job.run_until(EPOCHS - 1)
        job.restart()
        job.run_until(EPOCHS)
    source = TopicPartition(TOPIC, 0)
    shown = job.broker.committed_offsets(readers_group("alice"), [source])
    job.close()

    assert problems(job, guarded) == []
    assert shown == {source: EPOCHS}
    stored = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(stored) == EPOCHS
    assert_no_secret(caplog.text, job.config, job, *stored)


MISSING = {
    "no-transactional-id": r"'tallystick-no-transactional-id'.*WRITE on the transactional id",
    "no-topic-write": rf"Produce for {TOPIC}-[01].*WRITE on the topic",
    "no-topic-read": rf"TxnOffsetCommit for {TOPIC}-0.*READ on the topic",
    "no-group": r"group 'tallystick-no-group-token'.*READ on the consumer group",
    "spectator": r"TxnOffsetCommit.*READ on the consumer group",
    "nobody": r"'tallystick-nobody'.*WRITE on the transactional id",
}


@pytest.mark.parametrize(("user", "says"), MISSING.items(), ids=MISSING)
def test_a_missing_right_is_named_with_its_resource_and_nothing_is_visible(
    user: str,
    says: str,
    guarded: EmbeddedKafka,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = job_of(guarded, user, tmp_path)

    with caplog.at_level("DEBUG"), pytest.raises(AuthorizationError, match=says) as told:
        job.run_next()
    job.close()

    assert_no_secret(told.value, caplog.text)
    assert problems(job, guarded) == []


def test_topics_that_may_not_be_seen_are_named(guarded: EmbeddedKafka) -> None:
    broker = KafkaBroker(config_of(guarded, "nobody"))

    with pytest.raises(AuthorizationError, match=f"'{TOPIC}'.*DESCRIBE"):
        broker.partition_counts([TOPIC])
    assert broker.topics() == []
    broker.close()


def test_who_may_not_read_the_output_can_still_write_it(
    guarded: EmbeddedKafka, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without READ the guards against stray tasks are left out, and that is said: once."""
    job = job_of(guarded, "writer", tmp_path, token_topic=TOKENS)
    with caplog.at_level("WARNING"):
        job.run_until(EPOCHS)
    job.close()

    assert problems(job, guarded) == []
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert f"READ on {TOPIC} is missing" in told[0]


def test_settings_that_may_not_be_seen_are_warned_of_and_do_not_stop_anything(
    guarded: EmbeddedKafka,
) -> None:
    alice, observer = (
        KafkaBroker(config_of(guarded, user)).cluster_facts() for user in ("alice", "observer")
    )

    assert alice.transaction_version == observer.transaction_version == 2
    assert alice.partition_verification is None
    assert alice.transaction_timeout_max_ms is None
    found = check(alice, SETTINGS)
    assert found.problems == ()
    assert len(found.warnings) == 2
    assert all("DESCRIBE_CONFIGS on the cluster" in warning for warning in found.warnings)
    assert observer.partition_verification is True
    assert check(observer, SETTINGS).warnings == ()
