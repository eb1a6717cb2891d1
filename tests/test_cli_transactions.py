"""The commands around lingering transactions, on a real Kafka in which processes have died."""

import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pyarrow as pa
import pytest
from typer.testing import CliRunner, Result

from tallystick import settling
from tallystick.checkpoint.manifest import KAFKA
from tallystick.cli import app
from tallystick.decision_log import KafkaPlace, leave_trace
from tallystick.errors import EpochAbortedError, FencedError
from tallystick.files.drafts import Drafts
from tallystick.files.folder import Folder
from tallystick.files.sink import FileSink
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.task_sink import KafkaTaskSink
from tallystick.sink.transaction import Producer
from tallystick.sink.two_phase import Committable, Outcome, Owner, Place, RunFacts
from tallystick.testing.kafka import EmbeddedKafka
from tallystick.topic_partition import TopicPartition
from tests.kafka.task_sinks import opened, place_of, written_by, written_in_another_process
from tests.lingering_job import LingeringJob

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]

numbers = itertools.count()
LINEAGE = "lineage-1"


class Scene:
    """One pipeline with a topic of its own, whose tasks die."""

    def __init__(self, kafka: EmbeddedKafka, folder: Path) -> None:
        number = next(numbers)
        self.pipeline, self.topic = f"settled-{number}", f"by-hand-{number}"
        kafka.create_topic(self.topic, 1)
        options = {name.removeprefix("kafka."): it for name, it in kafka.kafka_options.items()}
        self.config = KafkaConfig.from_options({**options, "delivery.timeout.ms": "20000"})
        self.servers = options["bootstrap.servers"]
        self.job = LingeringJob(folder / f"checkpoint-{number}", self.pipeline, LINEAGE)
        self.id = f"tallystick-{self.pipeline}/out/0/0"

    def call(self, command: str, *arguments: object, checkpoint: bool = True) -> Result:
        words = ["transactions", command, *arguments, "--bootstrap-servers", self.servers]
        if checkpoint:
            words += ["--checkpoint", self.job.folder]
        return CliRunner().invoke(app, [str(word) for word in words])

    def listed(self, *arguments: object, checkpoint: bool = True) -> dict[str, Any]:
        """What `list` says of the pipeline's, by id."""
        only = ("--pipeline", self.pipeline, "--json")
        result = self.call("list", *only, *arguments, checkpoint=checkpoint)
        assert result.exit_code == 0, result.output
        return {each["transaction"]: each for each in json.loads(result.stdout)["transactions"]}

    def sink(self) -> Any:
        return opened(self.config, self.topic, self.pipeline, LINEAGE)

    def written(self, *texts: str, epoch: int = 0, task: int = 0) -> Committable:
        """By a task in this process."""
        with self.sink() as sink:
            place = place_of(self.pipeline, epoch, task, lineage=LINEAGE)
            return written_by(sink.plan(), place, *texts)

    def read(self, until: Callable[[list[str]], bool]) -> list[str]:
        """What an independent reader of committed records gets to see."""
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self.servers,
                "group.id": f"witness-{next(numbers)}",
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
            }
        )
        consumer.assign([confluent_kafka.TopicPartition(self.topic, 0, 0)])
        texts: list[str] = []
        deadline = time.monotonic() + 20
        while not until(texts) and time.monotonic() < deadline:
            message = consumer.poll(0.2)
            if message is not None and message.error() is None:
                texts.append(message.value().decode())
        consumer.close()
        return texts

    def write_plainly(self, text: str) -> None:
        """A record of another program, behind whatever is open."""
        producer = confluent_kafka.Producer({"bootstrap.servers": self.servers})
        producer.produce(self.topic, text.encode(), partition=0)
        assert producer.flush(20) == 0


@pytest.fixture
def scene(tallystick_kafka: EmbeddedKafka, tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tallystick_kafka, tmp_path)
    yield made
    for each in made.listed(checkpoint=False):
        made.call("abort", each, "--force", checkpoint=False)


def test_what_a_completed_checkpoint_names_is_committed_and_never_aborted(scene: Scene) -> None:
    """The whole life of it: its task is killed, its driver decides, and dies."""
    with scene.sink() as sink:
        place = place_of(scene.pipeline, 0, lineage=LINEAGE)
        due = written_in_another_process(sink.plan(), place, "one", "two")
    scene.job.plan(0)
    scene.job.decide(0, scene.job.prepare(0, [due]))

    (told,) = scene.listed().values()
    refused = scene.call("abort", scene.id, "--quiet-for", 0)
    done = scene.call("commit", scene.id)
    again = scene.call("commit", scene.id)

    assert (told["standing"], told["epoch"], told["records"]) == ("due", 0, 2)
    assert told["says"] == "named by decided epoch 0: commit is due"
    assert (told["commit"], told["abort"], told["prepared"]) == (True, False, True)
    assert refused.exit_code == 3
    assert "2 records are lost" in refused.output
    assert (done.exit_code, again.exit_code) == (0, 0), done.output
    assert "Committed" in again.output
    assert scene.read(lambda texts: len(texts) == 2) == ["one", "two"]
    assert scene.listed() == {}


def test_what_none_names_is_aborted_and_readers_go_on(scene: Scene) -> None:
    """And a driver that was at work all the same cannot decide it any more."""
    scene.job.run(2)
    with scene.sink() as sink:
        place = place_of(scene.pipeline, 2, lineage=LINEAGE)
        left = written_in_another_process(sink.plan(), place, "never decided")
    scene.job.plan(2)
    path = scene.job.prepare(2, [left])
    scene.write_plainly("of another program")

    running = scene.call("abort", scene.id)
    commit = scene.call("commit", scene.id)
    quiet = scene.listed("--quiet-for", 0)[scene.id]
    done = scene.call("abort", scene.id, "--quiet-for", 0)

    assert (running.exit_code, commit.exit_code, done.exit_code) == (3, 3, 0), done.output
    assert "of a running epoch" in running.output
    assert "--quiet-for" in running.output
    assert "writes it a second time" in commit.output
    assert quiet["standing"] == "unnamed"
    assert "abort is safe (prepared for epoch 2, which was never decided)" in quiet["says"]
    assert quiet["manifest"] == path
    assert scene.read(lambda texts: len(texts) == 1) == ["of another program"]
    with pytest.raises(FencedError):
        scene.job.decide(2, path)


def test_what_is_left_of_earlier_epochs_is_aborted_without_disturbing_the_pipeline(
    scene: Scene,
) -> None:
    """No epoch is under way, so nothing can name it any more; the run goes on."""
    scene.written("of a failed attempt", task=5)
    scene.job.run(1)

    done = scene.call("abort", f"tallystick-{scene.pipeline}/out/5/0")

    assert done.exit_code == 0, done.output
    scene.job.run(1, first=1)


def test_what_is_decided_while_one_looks_stays(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = scene.written("decided late")
    scene.job.plan(0)
    path = scene.job.prepare(0, [left])
    forestall = settling.forestall

    def too_late(*arguments: Any) -> Any:
        scene.job.decide(0, path)
        return forestall(*arguments)

    monkeypatch.setattr(settling, "forestall", too_late)
    refused = scene.call("abort", scene.id, "--quiet-for", 0)

    assert refused.exit_code == 3
    assert "meanwhile it is named by decided epoch 0" in refused.output
    assert scene.call("commit", scene.id).exit_code == 0


def test_without_a_checkpoint_nothing_is_done_unless_forced(scene: Scene) -> None:
    scene.written("somebody's")

    told = scene.listed(checkpoint=False)[scene.id]
    refused = [scene.call(each, scene.id, checkpoint=False) for each in ("commit", "abort")]
    forced = scene.call("abort", scene.id, "--force", checkpoint=False)

    assert (told["standing"], told["says"]) == ("unknown", "unknown: give --checkpoint")
    assert [each.exit_code for each in refused] == [3, 3]
    assert "its rows are lost" in refused[1].output
    assert forced.exit_code == 0
    assert "--force, although unknown" in forced.output
    assert "its rows are lost" in forced.output
    assert scene.listed(checkpoint=False) == {}


def test_what_can_never_be_committed_any_more_is_told(scene: Scene) -> None:
    due = scene.written("lost")
    scene.job.plan(0)
    scene.job.decide(0, scene.job.prepare(0, [due]))
    assert scene.call("abort", scene.id, "--force").exit_code == 0

    lost = scene.call("commit", scene.id)

    assert lost.exit_code == 1
    assert "is lost: it was aborted" in lost.output


def test_the_transaction_of_a_whole_epoch_is_its_drivers(scene: Scene) -> None:
    """Never committed by hand, with --force neither; aborted if no driver is at work."""
    name = f"tallystick-{scene.pipeline}"
    scene.job.run(1)
    broker = KafkaBroker(scene.config)
    producer = broker.fence(name, None)
    offsets = {TopicPartition(scene.topic, 0): scene.job.token(1, "tallystick/1-1-aa.json")}
    broker.stage_offsets(producer, f"{name}-token", offsets)
    broker.close()

    told = scene.listed("--quiet-for", 0)[name]
    commits = [scene.call("commit", name, *more) for more in ((), ("--force",))]
    running = scene.call("abort", name)
    done = scene.call("abort", name, "--quiet-for", 0)

    assert told["standing"] == "whole_epoch"
    assert [each.exit_code for each in commits] == [3, 3]
    assert all("only its driver can commit it" in each.output for each in commits)
    assert (running.exit_code, done.exit_code) == (3, 0), done.output
    assert scene.listed() == {}


def test_another_programs_transactions_come_last_and_are_not_ours(scene: Scene) -> None:
    foreign = f"a-bank-{scene.pipeline}"
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": scene.servers, "transactional.id": foreign}
    )
    producer.init_transactions(20)
    producer.begin_transaction()
    producer.produce(scene.topic, b"money", partition=0)
    assert producer.flush(20) == 0
    scene.written("ours")
    scene.job.run(1)

    everything = json.loads(scene.call("list", "--json").stdout)["transactions"]
    refused = scene.call("abort", foreign)
    shown = scene.call("list")
    forced = scene.call("abort", foreign, "--force")

    assert everything[0]["transaction"] == scene.id
    assert everything[-1]["transaction"] == foreign
    assert everything[-1]["standing"] == "foreign"
    assert refused.exit_code == 3
    assert "not ours" in refused.output
    assert shown.output.index(scene.pipeline) < shown.output.index("a-bank")
    assert forced.exit_code == 0
    with pytest.raises(confluent_kafka.KafkaException):
        producer.commit_transaction(20)
    del producer


def test_another_checkpoint_of_the_same_name_knows_nothing_of_it(scene: Scene) -> None:
    """The old checkpoint of a pipeline that was begun anew must not abort the new one's."""
    first = scene.written("of lineage 1")
    scene.job.plan(0)
    scene.job.decide(0, scene.job.prepare(0, [first]))
    assert scene.call("commit", scene.id).exit_code == 0
    scene.written("of lineage 1 too", epoch=1)
    other = LingeringJob(scene.job.folder.parent / "other", scene.pipeline, "lineage-2")
    other.run(1)
    scene.job = other

    told = scene.listed("--quiet-for", 0)[scene.id]

    assert told["standing"] == "unknown"
    assert "lineage lineage-1 committed last; this checkpoint is lineage-2" in told["says"]
    assert scene.call("abort", scene.id, "--quiet-for", 0).exit_code == 3


def test_an_old_copy_of_a_checkpoint_knows_nothing_of_it(scene: Scene) -> None:
    """Which epochs were decided behind it, Kafka's tokens tell."""
    scene.job.run(1)
    for epoch in (1, 2):
        due = scene.written(f"of epoch {epoch}", epoch=epoch)
        scene.job.plan(epoch)
        if epoch == 2:
            copy = scene.job.folder.parent / "copy"
            shutil.copytree(scene.job.folder, copy)
        scene.job.decide(epoch, scene.job.prepare(epoch, [due]))
        assert scene.call("commit", scene.id).exit_code == 0
        scene.job.finish(epoch)
    scene.written("of epoch 3", epoch=3)
    scene.job.folder = copy

    told = scene.listed("--quiet-for", 0)[scene.id]

    assert told["standing"] == "unknown"
    assert "knows of none behind epoch 1: it is an old copy" in told["says"]


def test_where_kafka_decides_its_token_is_asked(scene: Scene) -> None:
    """A second sink's transactions, beside the one transaction that decides."""
    name = f"tallystick-{scene.pipeline}"
    decided, undecided = (scene.written(text, task=task) for task, text in enumerate("ab"))
    scene.job.plan(0)
    path = scene.job.prepare(0, [decided], decided_by=KAFKA)
    for slot in scene.job.folder.glob("tallystick/decisions/*"):
        slot.unlink()
    unknown = scene.listed("--quiet-for", 0)
    broker = KafkaBroker(scene.config)
    producer = broker.fence(name, None)
    place = TopicPartition(scene.topic, 0)
    broker.stage_offsets(producer, f"{name}-token", {place: scene.job.token(0, path)})
    following = broker.commit_transaction(producer)
    known = scene.listed("--quiet-for", 0)

    aborted = scene.call("abort", undecided.name, "--quiet-for", 0)

    assert {each["standing"] for each in unknown.values()} == {"unknown"}
    assert "--decider" in unknown[scene.id]["says"]
    assert [known[each.name.split(":")[0]]["standing"] for each in (decided, undecided)] == [
        "due",
        "unnamed",
    ]
    assert aborted.exit_code == 0, aborted.output
    assert not list(scene.job.folder.glob("tallystick/decisions/*")), "Kafka decides here"
    with pytest.raises(EpochAbortedError):
        broker.stage_offsets(following, f"{name}-token", {place: scene.job.token(1, path)})
    broker.close()
    assert scene.call("commit", scene.id).exit_code == 0


def test_describe_says_all(scene: Scene) -> None:
    first = scene.written("before")
    scene.job.plan(0)
    scene.job.decide(0, scene.job.prepare(0, [first]))
    assert scene.call("commit", scene.id).exit_code == 0
    scene.job.finish(0)
    due = scene.written("one", "two", epoch=1)
    scene.job.plan(1)
    path = scene.job.prepare(1, [due])
    scene.job.decide(1, path)

    fields = json.loads(scene.call("describe", scene.id, "--json").stdout)
    shown = scene.call("describe", scene.id).output

    details = fields.pop("details")
    assert (fields["manifest"], fields["epoch"], fields["task"]) == (path, 1, 0)
    assert (fields["pipeline"], fields["lineage"]) == (scene.pipeline, LINEAGE)
    (part,) = details["partitions"]
    assert (part["topic"], part["partition"], part["first_offset"]) == (scene.topic, 0, 2)
    assert abs(part["written_ms"] - time.time() * 1000) < 60_000
    assert details["token"]["state"] == "staged in this transaction"
    assert details["token"]["committed"]["epoch"] == 0
    for words in (path, "epoch 0 of lineage lineage-1", "may be committed", "first open offset"):
        assert words in shown
    gone = scene.call("describe", "no-such-id")
    assert gone.exit_code == 1
    assert "no transaction 'no-such-id' is open" in gone.output


def test_before_kafkas_transaction_version_2_the_writer_is_shut_out_too(tmp_path: Path) -> None:
    """EndTxn alone would let it go on under the same producer epoch."""
    with EmbeddedKafka(transaction_version=1) as kafka:
        scene = Scene(kafka, tmp_path)
        due, left = scene.written("due"), scene.written("left", task=1)
        scene.job.plan(0)
        scene.job.decide(0, scene.job.prepare(0, [due]))
        name, producer_id, producer_epoch = left.name.rsplit(":", 2)

        done = scene.call("abort", name, "--quiet-for", 0), scene.call("commit", scene.id)

        assert [each.exit_code for each in done] == [0, 0], [each.output for each in done]
        assert scene.read(lambda texts: len(texts) == 1) == ["due"]
        broker = KafkaBroker(scene.config)
        assert broker.transaction_version == 1
        writer = Producer(name, int(producer_id), int(producer_epoch))
        with pytest.raises(EpochAbortedError):
            broker.stage_offsets(writer, "any", {TopicPartition(scene.topic, 0): (1, "")})
        broker.close()


def test_hidden_files_are_listed_and_settled_too(scene: Scene, tmp_path: Path) -> None:
    owner = Owner(scene.pipeline, "files-1", LINEAGE)
    folder = tmp_path / "files"
    sink = FileSink(str(folder)).open(owner, RunFacts())

    def prepared(task: int) -> Committable:
        transaction = sink.plan().begin(Place(owner, 0, task, 0, f"ab{task}"))
        transaction.write(pa.record_batch({"n": pa.array([task])}))
        (committable,) = transaction.prepare()
        return committable

    decided, left = prepared(0), prepared(1)
    scene.job.plan(0)
    scene.job.decide(0, scene.job.prepare(0, [decided]))
    asked = ("--files", folder, "--quiet-for", 0)

    told = scene.listed(*asked)
    assert {name: each["standing"] for name, each in told.items()} == {
        decided.name: "due",
        left.name: "unnamed",
    }
    assert scene.call("commit", left.name, *asked).exit_code == 3
    assert scene.call("commit", decided.name, *asked).exit_code == 0
    assert scene.call("abort", left.name, *asked).exit_code == 0
    assert scene.listed(*asked) == {}
    assert [each.name for each in folder.glob("*.parquet")] == [f"part-{decided.name}.parquet"]


def test_files_whose_commit_has_begun_are_not_said_to_be_aborted(
    scene: Scene, tmp_path: Path
) -> None:
    """Of a second sink, too, of a run that died before its first manifest."""
    owner = Owner(scene.pipeline, "files-2", LINEAGE)
    folder = tmp_path / "files"
    sink = FileSink(str(folder)).open(owner, RunFacts())
    transaction = sink.plan().begin(Place(owner, 0, 0, 0, "ab"))
    transaction.write(pa.record_batch({"n": pa.array([0])}))
    (begun,) = transaction.prepare()
    drafts = Drafts.of(begun)
    Folder(str(folder)).put(drafts.marker, b"")
    scene.job.plan(0)
    asked = ("--files", folder, "--quiet-for", 0, "--pipeline", scene.pipeline)

    unnamed = scene.call("list", "--files", folder)
    refused = scene.call("abort", begun.name, *asked)

    assert (unnamed.exit_code, "--files needs --pipeline" in unnamed.output) == (1, True)
    assert refused.exit_code == 3, refused.output
    assert "it is committed already" in refused.output
    assert "Aborted" not in refused.output
    assert sink.commit(begun) is Outcome.COMMITTED
    assert len(list(folder.glob("*.parquet"))) == 1


def test_another_checkpoint_of_the_same_name_is_not_taken_over(scene: Scene) -> None:
    """A decides in Kafka under the pipeline's name; B, in its own log, has an epoch under way."""
    name = f"tallystick-{scene.pipeline}"
    broker = KafkaBroker(scene.config)
    of_a = broker.fence(name, None)
    left = scene.written("of B's failed attempt")
    scene.job.plan(0)

    done = scene.call("abort", left.name, "--quiet-for", 0, "--pipeline", scene.pipeline)

    assert done.exit_code == 0, done.output
    place = TopicPartition(scene.topic, 0)
    broker.stage_offsets(of_a, f"{name}-token", {place: scene.job.token(0, "tallystick/0-a.json")})
    broker.commit_transaction(of_a)
    broker.close()
    with pytest.raises(FencedError):
        scene.job.decide(0, scene.job.prepare(0))


def test_who_decides_has_to_be_known_before_an_abort(scene: Scene) -> None:
    """An epoch under way, and neither a log nor a manifest: it may be any cluster's to decide."""
    name = f"tallystick-{scene.pipeline}"
    lefts = [scene.written("x", task=task) for task in range(2)]
    scene.job.plan(0)
    for slot in scene.job.folder.glob("tallystick/decisions/*"):
        slot.unlink()
    only = ("--quiet-for", 0, "--pipeline", scene.pipeline)
    broker = KafkaBroker(scene.config)
    offsets = {TopicPartition(scene.topic, 0): scene.job.token(0, "tallystick/0-a.json")}
    running = broker.fence(name, None)

    unknown = scene.call("abort", lefts[0].name, *only)
    leave_trace(scene.job.storage, KafkaPlace(name, "another-cluster"))
    elsewhere = scene.call("abort", lefts[0].name, *only)
    (trace,) = scene.job.folder.glob("tallystick/deciders/*")
    trace.unlink()
    stated = scene.call("abort", lefts[0].name, *only, "--decider", scene.servers)
    with pytest.raises(EpochAbortedError):
        broker.stage_offsets(running, f"{name}-token", offsets)
    again = broker.fence(name, None)
    door = settling.KafkaDoor(scene.config)
    leave_trace(scene.job.storage, KafkaPlace(name, door.cluster_id))
    door.close()
    traced = scene.call("abort", lefts[1].name, *only)

    assert (unknown.exit_code, "nothing says where it is decided" in unknown.output) == (1, True)
    assert (elsewhere.exit_code, "cluster another-cluster may" in elsewhere.output) == (1, True)
    assert (stated.exit_code, traced.exit_code) == (0, 0), (stated.output, traced.output)
    with pytest.raises(EpochAbortedError):
        broker.stage_offsets(again, f"{name}-token", offsets)
    broker.close()


def test_a_database_is_not_left_out_in_silence(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = scene.call("list", "--postgres", "host=/no password=HIDDEN", checkpoint=False)
    monkeypatch.setenv("TALLYSTICK_POSTGRES_DSN", "host=/no password=HIDDEN")
    always = scene.call("list", "--json", checkpoint=False)

    assert (asked.exit_code, "--postgres needs --checkpoint" in asked.output) == (1, True)
    assert always.exit_code == 0, always.output
    assert "PostgreSQL (TALLYSTICK_POSTGRES_DSN) is left out without --checkpoint" in always.stderr
    assert "transactions" in json.loads(always.stdout)
    assert "HIDDEN" not in asked.output + always.output


def test_what_cannot_be_is_told_without_a_traceback(scene: Scene, tmp_path: Path) -> None:
    for words, result in (
        ("is no checkpoint", scene.call("list", "--checkpoint", tmp_path, checkpoint=False)),
        ("--files needs", scene.call("list", "--files", tmp_path, checkpoint=False)),
        ("--kafka-options", scene.call("list", "--kafka-options", tmp_path / "no")),
    ):
        assert result.exit_code == 1
        assert words in result.output
        assert isinstance(result.exception, SystemExit)
    scene.job.run(1)
    secret = scene.call("list", "--postgres", "host=/nowhere user=u password=HIDDEN")
    assert (secret.exit_code, "PostgreSQL" in secret.output) == (1, True), secret.output
    assert "HIDDEN" not in secret.output
    wrong = scene.call("list", "--pipeline", "another")
    assert (wrong.exit_code, f"pipeline '{scene.pipeline}'" in wrong.output) == (1, True)


def test_what_the_sinks_own_recovery_would_do_is_what_is_said(scene: Scene) -> None:
    """The same transactions, judged here and settled by the driver's side of the sink."""
    decided, left = scene.written("x"), scene.written("y", task=1)
    scene.job.plan(0)
    scene.job.decide(0, scene.job.prepare(0, [decided]))
    told = scene.listed("--quiet-for", 0)
    with scene.sink() as sink:
        assert isinstance(sink, KafkaTaskSink)
        found = {each.name for each in sink.lingering(Owner(scene.pipeline, "out", LINEAGE))}

    assert found == {each["name"] for each in told.values()} == {decided.name, left.name}
