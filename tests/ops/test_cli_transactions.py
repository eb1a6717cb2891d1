"""`tallystick transactions list`, on a real Kafka in which processes have died."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

import tallystick as ts
from tallystick.epoch.manifest import KAFKA
from tallystick.epoch.two_phase import Owner
from tallystick.kafka.broker import KafkaBroker
from tallystick.testing.kafka import EmbeddedKafka
from tallystick.values import TopicPartition
from tests.delta.delta_sinks import opened, place, rows
from tests.delta.delta_sinks import prepared as delta_prepared
from tests.lingering_job import LingeringJob
from tests.ops.scene import LINEAGE, Scene
from tests.ops.test_recover import prepared

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]


@pytest.fixture
def scene(tallystick_kafka: EmbeddedKafka, tmp_path: Path) -> Iterator[Scene]:
    opened_scene = Scene(tallystick_kafka, tmp_path)
    yield opened_scene
    opened_scene.clean_up()


def listed(scene: Scene, *words: object, checkpoint: bool = True) -> dict[str, dict[str, Any]]:
    """What is said of the pipeline's transactions, by id."""
    where = ("--checkpoint", scene.job.folder) if checkpoint else ()
    result = scene.call("--json", "--pipeline", scene.pipeline_name, *where, *words)
    assert result.exit_code == 0, result.output
    return {
        transaction["transaction"]: transaction
        for transaction in json.loads(result.stdout)["transactions"]
    }


def test_what_a_recovery_commits_and_aborts_is_said_and_left_as_it_is(scene: Scene) -> None:
    scene.job.run(1, first=1)
    due = scene.written("one", "two", epoch=2)
    path = scene.job.prepare(2, [due])
    scene.job.decide(2, path)
    waiting = scene.written("next", epoch=3, task=1)
    next_path = scene.job.prepare(3, [waiting])
    scene.written("of an attempt that left no manifest", epoch=3, task=2)

    transactions = [listed(scene)[scene.id.replace("/0/0", f"/{task}/0")] for task in range(3)]

    standings = [transaction["standing"] for transaction in transactions]
    assert standings == ["due", "unnamed", "unnamed"]
    assert [(transaction["epoch"], transaction["manifest"]) for transaction in transactions] == [
        (2, path),
        (3, next_path),
        (None, ""),
    ]
    assert (transactions[0]["records"], transactions[0]["prepared"]) == (2, True)
    assert transactions[0]["says"] == "named by decided epoch 2: a recovery commits it"
    assert "prepared for epoch 3, which is not decided" in transactions[1]["says"]
    assert {(transaction["pipeline"], transaction["lineage"]) for transaction in transactions} == {
        (scene.pipeline_name, LINEAGE)
    }
    assert len(listed(scene)) == 3
    scene.job.decide(3, next_path)


def test_what_to_type_stands_under_the_table(scene: Scene) -> None:
    """And that is what settles it."""
    scene.job.decide(1, scene.job.prepare(1, [scene.written("one")]))

    shown = scene.call("--checkpoint", scene.job.folder).output
    scene.recover()

    assert f"tallystick recover MODULE:PIPELINE --checkpoint {scene.job.folder}" in shown
    assert "FencedError" in shown
    assert listed(scene) == {}
    assert "MODULE" not in scene.call("--checkpoint", scene.job.folder).output


def test_of_a_query_of_structured_streaming_the_start_is_what_settles_it(scene: Scene) -> None:
    scene.job.is_loops = False
    scene.job.plan(0)
    scene.job.decide(0, scene.job.prepare(0, [scene.written("one", epoch=0)]))

    shown = scene.call("--checkpoint", scene.job.folder).output

    assert "start the query" in shown
    assert "MODULE" not in shown


def test_without_a_checkpoint_nobody_guesses(scene: Scene) -> None:
    scene.written("somebody's")

    transaction = listed(scene, checkpoint=False)[scene.id]

    assert transaction["standing"] == "unknown"
    assert transaction["says"] == "unknown: give --checkpoint"


def test_the_transaction_of_a_whole_epoch_is_its_drivers(scene: Scene) -> None:
    name = f"tallystick-{scene.pipeline_name}"
    scene.job.run(1, first=1)
    broker = KafkaBroker(scene.config)
    producer = broker.fence(name, None)
    offsets = {TopicPartition(scene.topic, 0): scene.job.token(2, "tallystick/2-1-aa.json")}
    broker.stage_offsets(producer, f"{name}-token", offsets)
    broker.close()

    transaction = listed(scene)[name]

    assert transaction["standing"] == "whole_epoch"
    assert "a recovery aborts it" in transaction["says"]


def test_another_programs_transactions_come_last_and_are_not_ours(scene: Scene) -> None:
    foreign = f"a-bank-{scene.pipeline_name}"
    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": scene.servers,
            "transactional.id": foreign,
            "transaction.timeout.ms": 600_000,
        }
    )
    producer.init_transactions(20)
    producer.begin_transaction()
    producer.produce(scene.topic, b"money", partition=0)
    assert producer.flush(20) == 0
    scene.written("ours")
    scene.job.run(1, first=1)

    result = scene.call("--json", "--checkpoint", scene.job.folder)
    shown = scene.call("--checkpoint", scene.job.folder)
    producer.abort_transaction(20)

    everything = json.loads(result.stdout)["transactions"]
    ours, *others = everything  # other tests may have left some, too
    assert ours["transaction"] == scene.id
    assert foreign in {other["transaction"] for other in others}
    assert {other["standing"] for other in others} == {"foreign"}
    assert shown.output.index(scene.pipeline_name) < shown.output.index("a-bank")


def test_another_checkpoint_of_the_same_name_knows_nothing_of_it(scene: Scene) -> None:
    scene.written("of lineage 1")
    other = LingeringJob(
        scene.job.folder.parent / "other", scene.pipeline_name, "lineage-2", is_loops=True
    )
    other.run(1, first=1)

    result = scene.call("--json", "--checkpoint", other.folder)

    (transaction,) = [
        entry
        for entry in json.loads(result.stdout)["transactions"]
        if entry["transaction"] == scene.id
    ]
    assert (transaction["standing"], transaction["lineage"]) == ("foreign", "")


def test_where_kafka_decides_its_token_is_asked(scene: Scene) -> None:
    """A second sink's transactions, beside the one transaction that decides."""
    name = f"tallystick-{scene.pipeline_name}"
    decided, undecided = (scene.written(text, task=task) for task, text in enumerate("ab"))
    path = scene.job.prepare(1, [decided], decided_by=KAFKA)
    for slot in scene.job.folder.glob("tallystick/decisions/*"):
        slot.unlink()
    unknown = listed(scene)
    broker = KafkaBroker(scene.config)
    producer = broker.fence(name, None)
    place = TopicPartition(scene.topic, 0)
    broker.stage_offsets(producer, f"{name}-token", {place: scene.job.token(1, path)})
    broker.commit_transaction(producer)
    broker.close()
    deadline = time.monotonic() + 60
    while name in (known := listed(scene)):
        assert known[name]["standing"] == "ending", "Kafka writes markers after its answer"
        assert time.monotonic() < deadline, f"{name} is still among {sorted(known)}"

    assert {transaction["standing"] for transaction in unknown.values()} == {"unknown"}
    assert "--decider" in unknown[scene.id]["says"]
    assert [
        known[committable.name.split(":")[0]]["standing"] for committable in (decided, undecided)
    ] == [
        "due",
        "unnamed",
    ]
    assert not list(scene.job.folder.glob("tallystick/decisions/*")), "nothing is changed"


def test_hidden_files_are_listed_too(scene: Scene, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    decided, undecided = (
        prepared(scene, ts.FileSink(str(folder)), "files-1", task) for task in range(2)
    )
    scene.job.decide(1, scene.job.prepare(1, [decided]))

    transactions = listed(scene, "--files", folder)

    assert {
        name: (transaction["standing"], transaction["system"])
        for name, transaction in transactions.items()
    } == {
        decided.name: ("due", "files"),
        undecided.name: ("unnamed", "files"),
    }


def test_due_epochs_of_a_table_are_listed_too(scene: Scene, tmp_path: Path) -> None:
    """Also of a sink without a uid, which no manifest names any more."""
    owner = Owner(scene.pipeline_name, "delta-1", LINEAGE)
    sink = opened(tmp_path, owner, commit_every="1 hour")
    at = replace(place(3, 0, "a"), owner=owner)
    sink.commit_together(delta_prepared(sink, at, rows(0, 5)))
    scene.job.decide(1, scene.job.prepare(1, []))

    (due,) = listed(scene, "--files", tmp_path).values()

    assert (due["system"], due["state"], due["standing"]) == ("files", "due", "due")
    assert due["transaction"].endswith("/due/00000003")
    assert (due["sink"], due["begun_ms"] > 0, due["age_ms"] < 60_000) == ("delta-1", True, True)
    sink.close()
    assert listed(scene, "--files", tmp_path) == {}


def test_a_database_is_not_left_out_in_silence(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = scene.call("--postgres", "host=/no password=HIDDEN")
    monkeypatch.setenv("TALLYSTICK_POSTGRES_DSN", "host=/no password=HIDDEN")
    always = scene.call("--json")

    assert (result.exit_code, "--postgres needs --checkpoint" in result.output) == (1, True)
    assert always.exit_code == 0, always.output
    assert "PostgreSQL (TALLYSTICK_POSTGRES_DSN) is left out without --checkpoint" in always.stderr
    assert "transactions" in json.loads(always.stdout)
    assert "HIDDEN" not in result.output + always.output


def test_what_cannot_be_is_told_without_a_traceback(scene: Scene, tmp_path: Path) -> None:
    where = ("--checkpoint", scene.job.folder)
    for words, result in (
        ("is no checkpoint", scene.call("--checkpoint", tmp_path)),
        ("--files needs --checkpoint", scene.call("--files", tmp_path)),
        ("--files needs --pipeline", scene.call("--files", tmp_path, *where)),
        ("--kafka-options", scene.call("--kafka-options", tmp_path / "no")),
    ):
        assert result.exit_code == 1
        assert words in result.output
        assert isinstance(result.exception, SystemExit)
    scene.job.run(1, first=1)
    secret = scene.call("--postgres", "host=/nowhere user=u password=HIDDEN", *where)
    assert (secret.exit_code, "PostgreSQL" in secret.output) == (1, True), secret.output
    assert "HIDDEN" not in secret.output
    wrong = scene.call("--pipeline", "another", *where)
    assert (wrong.exit_code, f"pipeline '{scene.pipeline_name}'" in wrong.output) == (1, True)


def test_what_the_sinks_own_recovery_finds_is_what_is_listed(scene: Scene) -> None:
    decided, undecided = scene.written("x"), scene.written("y", task=1)
    scene.job.decide(1, scene.job.prepare(1, [decided]))
    transactions = listed(scene)

    with scene.sink() as sink:
        names = {
            committable.name
            for committable in sink.lingering(Owner(scene.pipeline_name, "out", LINEAGE))
        }

    assert (
        names
        == {transaction["name"] for transaction in transactions.values()}
        == {decided.name, undecided.name}
    )
