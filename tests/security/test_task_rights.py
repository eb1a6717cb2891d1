"""One transaction per task with the least rights, and with each of them missing."""

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from tallystick.epoch.two_phase import Committable, Guarantee, Outcome, Owner, Place, RunFacts
from tallystick.errors import AuthorizationError
from tallystick.kafka import cluster
from tallystick.kafka.audit import transaction_state
from tallystick.kafka.client import Client
from tallystick.kafka.outcome import TaskTransaction
from tallystick.kafka.output import KafkaOutput
from tallystick.kafka.task_sink import KafkaTaskSink
from tallystick.testing import EmbeddedKafka
from tests.security.people import PASSWORDS, TOKENS, TOPIC, config_of

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]


@contextmanager
def sink_of(
    kafka: EmbeddedKafka,
    user: str,
    owner: Owner,
    facts: RunFacts = RunFacts(),  # noqa: B008  a frozen value
    **changes: Any,
) -> Iterator[KafkaTaskSink]:
    id_prefix = changes.pop("id_prefix", f"tallystick-{user}-tasks")
    earlier: frozenset[str] = changes.pop("earlier_prefixes", frozenset())
    values = {"token_topic": TOPIC, "transaction_timeout_ms": 300_000, **changes}
    output = KafkaOutput(config_of(kafka, user), TOPIC, **values)
    sink = KafkaTaskSink(output, owner, facts, id_prefix=id_prefix, earlier_prefixes=earlier)
    try:
        yield sink
    finally:
        sink.close()


def owner_of(user: str) -> Owner:
    return Owner(f"{user}-tasks", f"out-{uuid.uuid4().hex[:6]}", "lineage")


def prepared_by(sink: KafkaTaskSink, owner: Owner, task: int = 0) -> Committable:
    transaction = sink.plan().begin(Place(owner, 0, task, 0, uuid.uuid4().hex))
    try:
        transaction.write(pa.record_batch({"value": pa.array(["a row"])}))
        (committable,) = transaction.prepare()
    except BaseException:
        transaction.abort()
        raise
    return committable


@pytest.mark.parametrize(("user", "token_topic"), [("alice", TOPIC), ("writer", TOKENS)])
def test_four_rights_are_enough(
    user: str, token_topic: str, guarded: EmbeddedKafka, caplog: pytest.LogCaptureFixture
) -> None:
    """Prepare, commit, commit again after a take-over, list, abort. READ is for the token topic."""
    owner = owner_of(user)
    with (
        caplog.at_level(logging.DEBUG),
        sink_of(guarded, user, owner, token_topic=token_topic) as sink,
    ):
        kept, undecided = (prepared_by(sink, owner, task) for task in range(2))
        assert sink.commit(kept) is Outcome.COMMITTED
        (lingering,) = sink.lingering(owner)
        assert lingering.name == undecided.name
        sink.abort(lingering)
        assert sink.commit(undecided) is Outcome.LOST
        following = prepared_by(sink, owner)
        assert sink.commit(kept) is Outcome.COMMITTED
        sink.abort(following)
        assert list(sink.lingering(owner)) == []
        shown = "\n".join(
            [caplog.text, repr(sink.plan()), *map(repr, (kept, undecided, lingering))]
        )
    assert [name for name, password in PASSWORDS.items() if password in shown] == []
    assert "cannot be looked for" not in caplog.text


IDS = "every transactional id that begins with 'tallystick-{0}-tasks/'"
GROUPS = "every group that begins with 'tallystick-{0}-tasks/'"
MISSING = {
    "no-transactional-id": [f"WRITE on {IDS}"],
    "no-topic-write": [f"WRITE on topic '{TOPIC}'"],
    "no-topic-read": [f"READ on topic '{TOPIC}'"],
    "no-group": [f"READ on {GROUPS}"],
    "spectator": [f"READ on {GROUPS}"],
    "nobody": [
        f"READ on {GROUPS}",
        f"READ on topic '{TOPIC}'",
        f"WRITE on topic '{TOPIC}'",
        f"WRITE on {IDS}",
    ],
}


@pytest.mark.parametrize(("user", "rights"), MISSING.items(), ids=MISSING)
def test_what_a_user_lacks_is_told_before_anything_starts_with_how_to_grant_it(
    user: str, rights: list[str], guarded: EmbeddedKafka
) -> None:
    owner = owner_of(user)
    prefix = f"tallystick-{user}-tasks/lineage"
    opening = sink_of(guarded, user, owner, id_prefix=prefix, transaction_timeout_ms=1_000_000)

    with pytest.raises(AuthorizationError) as raised, opening:
        pass

    lacking = f"user {user!r} lacks {', '.join(rights).format(user)}. Grant it with kafka-acls"
    assert lacking in str(raised.value)
    assert f"--allow-principal User:{user}" in str(raised.value)
    options = {
        "WRITE on every tr": f"--operation Write --transactional-id 'tallystick-{user}-tasks/' ",
        "WRITE on topic": f"--operation Write --topic '{TOPIC}'",
        "READ on topic": f"--operation Read --topic '{TOPIC}'",
        "READ on every gr": f"--operation Read --group 'tallystick-{user}-tasks/' ",
    }
    for words, option in options.items():
        assert (option in str(raised.value)) == any(right.startswith(words) for right in rights)
    assert all(password not in str(raised.value) for password in PASSWORDS.values())


@pytest.mark.parametrize("guarantee", [Guarantee.AT_LEAST_ONCE, Guarantee.NONE])
def test_without_transactions_the_right_to_write_is_enough(
    guarantee: Guarantee, guarded: EmbeddedKafka
) -> None:
    for user in ("no-transactional-id", "no-topic-read", "no-group"):
        with sink_of(guarded, user, owner_of(user), guarantee=guarantee):
            pass
    lacking = sink_of(guarded, "no-topic-write", owner_of("x"), guarantee=guarantee)
    with pytest.raises(AuthorizationError, match=f"lacks WRITE on topic '{TOPIC}'"), lacking:
        pass


TOO_LATE = {
    "no-transactional-id": r"'tallystick-no-transactional-id-tasks/.*WRITE on the transactional id",
    "no-topic-write": rf"Produce for {TOPIC}-[01].*WRITE on the topic",
    "no-topic-read": rf"TxnOffsetCommit for {TOPIC}-0.*READ on the topic",
    "no-group": r"group 'tallystick-no-group-tasks/.*READ on the consumer group",
    "spectator": r"TxnOffsetCommit.*READ on the consumer group",
}


@pytest.mark.parametrize(("user", "says"), TOO_LATE.items(), ids=TOO_LATE)
def test_a_right_that_is_taken_away_later_is_named_before_anything_is_prepared(
    user: str, says: str, guarded: EmbeddedKafka
) -> None:
    """And nothing stays open."""
    owner = owner_of(user)
    checked = RunFacts(are_checked=True)
    with (
        sink_of(guarded, user, owner, checked) as sink,
        pytest.raises(AuthorizationError, match=says),
    ):
        prepared_by(sink, owner)
    client = Client(config_of(guarded, "admin"))
    state = transaction_state(client, f"tallystick-{user}-tasks/{owner.sink}/0/0")
    client.close()
    assert state is None or state.transaction_state != "Ongoing"


def test_a_prefix_that_one_may_not_see_is_warned_of_once(
    guarded: EmbeddedKafka, caplog: pytest.LogCaptureFixture
) -> None:
    """Kafka would leave its ids out of the list without a word."""
    owner = owner_of("alice")
    earlier = frozenset({"tallystick-bob"})
    with (
        caplog.at_level(logging.WARNING),
        sink_of(guarded, "alice", owner, earlier_prefixes=earlier) as sink,
    ):
        for _ in range(2):
            assert list(sink.lingering(owner)) == []
    warnings = [message for message in caplog.messages if "cannot be looked for" in message]
    assert len(warnings) == 1
    assert "'tallystick-bob'" in warnings[0]


@pytest.mark.parametrize("topic", [TOKENS, "never-there"])
def test_a_token_topic_that_may_not_be_described_is_not_taken_for_one_that_is_gone(
    topic: str, guarded: EmbeddedKafka
) -> None:
    """Nobody would look for a right that is missing; the output would be given up as unknowable."""
    owner = owner_of("alice")
    with sink_of(guarded, "alice", owner) as sink:
        undecided = prepared_by(sink, owner)
        sink.abort(undecided)
        details = TaskTransaction.from_json(undecided.details)
        hidden = replace(undecided, details=replace(details, token_topic=topic).to_json())
        with pytest.raises(AuthorizationError, match=rf"{topic}.*on the topic"):
            sink.commit(hidden)
        assert sink.commit(undecided) is Outcome.LOST
    client = Client(config_of(guarded, "alice"))
    try:
        with pytest.raises(AuthorizationError, match=rf"'{topic}'.*DESCRIBE"):
            cluster.describe_topics(client, [topic])
    finally:
        client.close()
