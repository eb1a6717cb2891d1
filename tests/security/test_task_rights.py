"""Tasks, a batch and the doctor with the least rights, and with each of them missing.

One broker for all three: their transactional ids and groups have names of their own.
"""

import json
import logging
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from tallystick.__main__ import app
from tallystick.epoch.transactional_ids import batch_name
from tallystick.epoch.two_phase import Committable, Guarantee, Outcome, Owner, Place, RunFacts
from tallystick.errors import AuthorizationError
from tallystick.kafka import cluster
from tallystick.kafka.audit import transaction_state
from tallystick.kafka.client import Client
from tallystick.kafka.outcome import TaskTransaction
from tallystick.kafka.output import KafkaOutput
from tallystick.kafka.task_sink import KafkaTaskSink
from tallystick.pipeline.sinks import SinkCluster, preflight
from tallystick.testing import EmbeddedKafka
from tests.failover.job import Job
from tests.failover.known_rows import Shape
from tests.security.people import PASSWORDS, TOKENS, TOPIC, config_of, options_of
from tests.security.test_rights import LACKING, assert_no_secret

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]


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


# --- a batch write: each has an id of its own -----------------------------------------------------

NAME = batch_name("0123456789abcdef")


def check_batch(kafka: EmbeddedKafka, user: str, id_prefix: str) -> None:
    """Check what a write checks before it begins."""
    output = KafkaOutput(config_of(kafka, user), TOPIC, TOPIC, id_prefix=id_prefix)
    sinks = SinkCluster(output)
    try:
        preflight(sinks, NAME, {}, RunFacts())
    finally:
        sinks.broker.close()


def test_a_prefix_of_the_users_own_is_enough(guarded: EmbeddedKafka) -> None:
    check_batch(guarded, "alice", "tallystick-alice-")


def test_the_right_to_be_granted_is_that_of_all_batch_writes(guarded: EmbeddedKafka) -> None:
    with pytest.raises(AuthorizationError) as refused:
        check_batch(guarded, "alice", "tallystick-")

    message = str(refused.value)
    for kind in ("--transactional-id", "--group"):
        assert f"{kind} 'tallystick-batch-' --resource-pattern-type prefixed" in message
    assert message.count("--operation") == 2
    assert NAME not in message.partition("--operation")[2]


# --- `tallystick doctor` --------------------------------------------------------------------------

USERS = {**LACKING, "observer": []}


@pytest.mark.parametrize(("user", "lacking"), USERS.items(), ids=USERS)
def test_what_a_login_lacks_is_found_with_the_acl_to_add(
    user: str, lacking: list, guarded: EmbeddedKafka, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "metadata").write_text('{"id": "doctors"}')
    shape = Shape(user, TOPIC, (0, 1))
    job = Job(
        shape, config_of(guarded, "admin"), folder, lineage="doctors", has_loop=True,
        accepted=frozenset({"new-lineage-after-" + user}),
    )  # fmt: skip
    job.run_until(1)
    job.close()
    options = options_of(guarded, user)
    servers = options.pop("bootstrap.servers")
    login = tmp_path / "login.properties"
    login.write_text("".join(f"{name}={value}\n" for name, value in options.items()))
    words = ["doctor", str(folder), "--bootstrap-servers", servers, "--kafka-options", str(login)]

    result = CliRunner().invoke(app, [*words, "--json"])

    report = json.loads(result.stdout)
    findings = [finding for finding in report["findings"] if finding["check"] == "rights"]
    assert [finding["severity"] for finding in findings] == ["error"] * bool(lacking)
    for right in lacking:
        assert f"user {user!r} lacks" in findings[0]["found"]
        assert str(right) in findings[0]["found"]
        assert right.grant in findings[0]["found"]
    wrong = {finding["check"] for finding in report["findings"] if finding["severity"] != "info"}
    if user == "alice":
        assert (result.exit_code, wrong) == (1, {"settings"}), "she may not see settings"
    elif user == "observer":
        assert (result.exit_code, wrong) == (0, set())
    else:
        assert result.exit_code == 2
    assert user in PASSWORDS
    assert_no_secret(result.output)


@pytest.mark.parametrize(
    ("user", "says"),
    [
        ("alice", ""),
        ("no-topic-write", f"WRITE on topic '{TOPIC}-out'"),
        ("no-topic-read", f"READ on topic '{TOPIC}-in'"),
        ("no-group", "READ on group 'tallystick-no-group-token'"),
        ("no-transactional-id", "WRITE on transactional id 'tallystick-no-transactional-id'"),
    ],
)
@pytest.mark.parametrize("transactions", ["epoch", "task"])
def test_a_pipelines_own_login_is_looked_at_before_it_has_run(
    user: str,
    says: str,
    transactions: str,
    guarded: EmbeddedKafka,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    options = guarded.kafka_options_for(user)
    servers = options.pop("kafka.bootstrap.servers")
    module = f"login_{transactions}_{user.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(
        "import tallystick as ts\n"
        f"source = ts.KafkaSource({servers!r}, topics=['{TOPIC}-in'], options={options!r})\n"
        f"sink = ts.KafkaSink({servers!r}, topic='{TOPIC}-out', options={options!r}, "
        f"transactions={transactions!r})\n"
        f"pipeline = ts.Pipeline({user!r}).read(source).write(sink)\n"
    )
    words = ["doctor", str(tmp_path / "new"), "--pipeline", f"{module}:pipeline", "--json"]

    result = CliRunner().invoke(app, words)

    findings = json.loads(result.stdout)["findings"]
    errors = [finding for finding in findings if finding["severity"] == "error"]
    assert result.exit_code == (2 if says else 1), "she may not see settings"
    assert {error["check"] for error in errors} == ({"rights"} if says else set())
    if transactions == "epoch" or user not in ("no-group", "no-transactional-id"):
        assert any(says in error["found"] for error in errors) or not says
    assert_no_secret(result.output)
