"""The whole epoch protocol with the least rights, and with each of them missing."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tallystick.epoch.tokens import decode_token
from tallystick.epoch.two_phase import RunFacts
from tallystick.errors import AuthorizationError, DataLossError
from tallystick.kafka import cluster
from tallystick.kafka.audit import transaction_state
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.output import KafkaOutput
from tallystick.kafka.preflight import (
    GROUP,
    READ,
    TRANSACTIONAL_ID,
    WRITE,
    Right,
    check,
    missing_rights,
    rights_to_commit,
    rights_to_write,
)
from tallystick.kafka.preflight import TOPIC as TOPIC_OF
from tallystick.pipeline.sinks import SinkCluster, preflight
from tallystick.tasks.outputs import OF_MAIN, Selection
from tallystick.testing import EmbeddedKafka
from tallystick.values import TopicPartition
from tests.failover.evidence import problems_of, read_committed, replay
from tests.failover.job import Job, readers_group, token_group
from tests.failover.known_rows import Shape
from tests.security.people import PASSWORDS, TOKENS, TOPIC, config_of

pytestmark = pytest.mark.broker

EPOCHS = 3


def job_of(kafka: EmbeddedKafka, user: str, folder: Path, **how: Any) -> Job:
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
    assert len(stored) == EPOCHS + 1, "the manifests, and the name of the decider"
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

    with caplog.at_level("DEBUG"), pytest.raises(AuthorizationError, match=says) as raised:
        job.run_next()
    job.close()

    assert_no_secret(raised.value, caplog.text)
    assert problems(job, guarded) == []


def test_topics_that_may_not_be_seen_are_named(guarded: EmbeddedKafka) -> None:
    broker = KafkaBroker(config_of(guarded, "nobody"))

    with pytest.raises(AuthorizationError, match=f"'{TOPIC}'.*DESCRIBE"):
        cluster.partition_counts(broker.client, [TOPIC])
    assert cluster.topics(broker.client) == []
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
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert f"READ on {TOPIC} is missing" in messages[0]


LACKING = {
    "alice": [],
    "writer": [Right(TOPIC_OF, TOPIC, READ)],
    "no-transactional-id": [Right(TRANSACTIONAL_ID, "tallystick-no-transactional-id", WRITE)],
    "no-topic-write": [Right(TOPIC_OF, TOPIC, WRITE)],
    "no-topic-read": [Right(TOPIC_OF, TOPIC, READ)],
    "no-group": [Right(GROUP, "tallystick-no-group-token", READ)],
    "spectator": [Right(GROUP, "tallystick-spectator-token", READ)],
    "nobody": [
        Right(GROUP, "tallystick-nobody-token", READ),
        Right(TOPIC_OF, TOPIC, READ),
        Right(TOPIC_OF, TOPIC, WRITE),
        Right(TRANSACTIONAL_ID, "tallystick-nobody", WRITE),
    ],
}


@pytest.mark.parametrize(("user", "lacking"), LACKING.items(), ids=LACKING)
def test_what_a_user_lacks_is_found_without_doing_anything(
    user: str, lacking: list[Right], guarded: EmbeddedKafka
) -> None:
    """Also a transaction that is open under the id goes on as if nobody had asked."""
    admin, asking = (Client(config_of(guarded, login)) for login in ("admin", user))
    transactional_id, group = f"tallystick-{user}", f"tallystick-{user}-token"
    wanted = (*rights_to_commit(transactional_id, group, TOPIC), *rights_to_write([TOPIC]))
    owner = KafkaBroker(config_of(guarded, "admin"))
    producer = owner.fence(transactional_id, None)
    owner.stage_offsets(producer, group, {TopicPartition(TOPIC, 0): (1, "open")})
    before = transaction_state(admin, transactional_id)

    missing = missing_rights(asking, wanted)

    assert list(missing) == lacking
    after = transaction_state(admin, transactional_id)
    assert (before.transaction_state, before.producer_epoch) == ("Ongoing", producer.producer_epoch)
    assert after == before
    owner.abort_transaction(producer)
    for client in (admin, asking, owner):
        client.close()


def test_topics_of_sinks_that_share_a_transaction_are_asked_for_too(
    guarded: EmbeddedKafka,
) -> None:
    config = config_of(guarded, "alice")
    main = KafkaOutput(config, TOPIC, TOPIC)
    for topic, message in (("guarded-out", ""), (TOKENS, f"lacks WRITE on topic '{TOKENS}'")):
        side = KafkaOutput(config, topic, topic)
        sinks = SinkCluster(main, ((main, OF_MAIN), (side, Selection("alerts"))))
        try:
            with pytest.raises(AuthorizationError, match=message) if message else nullcontext():
                preflight(sinks, "alice", {}, RunFacts())
        finally:
            sinks.broker.close()


def test_topics_that_are_not_there_and_clusters_without_access_control_lack_no_right(
    guarded: EmbeddedKafka, tallystick_kafka: EmbeddedKafka
) -> None:
    wanted = (
        *rights_to_commit("tallystick-x", "tallystick-x-token", "not-there"),
        *rights_to_write(["nor-it"]),
    )
    servers = tallystick_kafka.bootstrap_servers
    for config in (config_of(guarded, "admin"), KafkaConfig(servers)):
        client = Client(config)
        assert missing_rights(client, wanted) == ()
        assert cluster.describe_topics(client, ["not-there"]) == {}
        client.close()


def test_a_checkpoint_that_was_replaced_stays_so_where_its_token_could_not_be_overwritten(
    guarded: EmbeddedKafka, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own old token, under the sink's earlier topic, does not tell that nobody took over."""
    shape = Shape("writer-replaced", TOPIC, (0, 1))
    old = Job(shape, config_of(guarded, "admin"), tmp_path / "old", lineage="old")
    old.run_until(1)
    old.restart()
    old.token_topic = TOKENS
    old.run_until(2)
    old.close()
    new = Job(
        shape,
        config_of(guarded, "writer"),
        tmp_path / "new",
        token_topic=TOKENS,
        lineage="new",
        accepted=frozenset({"new-lineage-after-old"}),
    )
    new.run_until(1)
    new.close()
    assert "the token is not kept under earlier topics of the sink" in caplog.text
    kept = KafkaBroker(old.config)
    offsets = kept.group_offsets(token_group(shape.pipeline))
    kept.close()
    lineages = {place.topic: decode_token(*entry).lineage for place, entry in offsets.items()}
    assert lineages == {TOPIC: "old", TOKENS: "new"}, "the fault has hit"

    for token_topic in (TOKENS, TOPIC):
        old.token_topic = token_topic
        with pytest.raises(DataLossError, match=r"lineage new.*accept='new-lineage-after-new'"):
            old.run_next()
        old.close()

    new.accepted = frozenset()
    new.run_until(3)
    new.close()


def test_settings_that_may_not_be_seen_are_warned_of_and_do_not_stop_anything(
    guarded: EmbeddedKafka,
) -> None:
    alice, observer = (
        cluster.cluster_facts(KafkaBroker(config_of(guarded, user)).client)
        for user in ("alice", "observer")
    )

    assert alice.transaction_version == observer.transaction_version == 2
    assert alice.partition_verification is None
    assert alice.transaction_timeout_max_ms is None
    output = KafkaOutput(config_of(guarded, "alice"), TOPIC, TOPIC, transaction_timeout_ms=300_000)
    findings = check(alice, output, trigger_interval_ms=None)
    assert findings.problems == ()
    assert len(findings.warnings) == 2
    assert all("DESCRIBE_CONFIGS on the cluster" in warning for warning in findings.warnings)
    assert observer.partition_verification is True
    assert check(observer, output, trigger_interval_ms=None).warnings == ()
