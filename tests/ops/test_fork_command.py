"""`tallystick fork` and `tallystick compare` on a broker, without Spark."""

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer as ConfluentProducer
from typer.testing import CliRunner, Result

from tallystick.__main__ import app
from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.checkpoint.forks import FORK, fork_of
from tallystick.checkpoint.newest import ask_nobody
from tallystick.checkpoint.savepoint_folder import NewFolder
from tallystick.epoch.manifest import Manifest, epoch_of, is_seed
from tallystick.epoch.micro_batches import settled_path
from tallystick.errors import OptionError
from tallystick.kafka.client import Client
from tallystick.kafka.cluster import list_offsets
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.topics import partitions_of
from tallystick.ops import forks, savepoints
from tallystick.storage.file_storage import FileStorage
from tallystick.testing import EmbeddedKafka
from tallystick.values import ProducedRange, Producer, TopicPartition
from tests.checkpoint_on_disk import ALL, Job, entries_of, folder
from tests.spark.topics import produce

pytestmark = pytest.mark.broker

_numbers = count()


class Place:
    """A checkpoint whose pipeline has written to a topic, and an unused topic."""

    def __init__(self, kafka: EmbeddedKafka, path: Path) -> None:
        self.kafka, self.path = kafka, path
        self.out, self.canary = (f"{name}-{next(_numbers)}" for name in ("out", "canary"))
        kafka.create_topic(self.out, 2)
        self.job = Job(path / "checkpoint")
        self.job.run(3)
        for epoch in range(3):  # as a loop of our own leaves it
            self.job.storage.delete(f"offsets/{epoch}")
            self.job.storage.delete(f"commits/{epoch}")
        self.settle()
        self.client = Client(KafkaConfig(kafka.bootstrap_servers))

    def settle(self) -> None:
        """Note the newest epoch as settled."""
        newest = CheckpointFolder(self.job.storage).manifest_paths()[-1]
        self.job.storage.put(settled_path(newest), b"")

    def new(self, name: str = "new") -> FileStorage:
        """Return a place for a fork."""
        return folder(self.path / name)

    def fork(self, name: str = "new", **topics: str) -> forks.Fork:
        """Fork the checkpoint."""
        named = topics or {self.out: self.canary}
        note, epoch = forks.fork(self.job.storage, self.new(name), named, self.client, ask_nobody)
        assert epoch == self.job.epoch
        return note

    def call(self, *arguments: object) -> Result:
        """Run a command."""
        servers = ("--bootstrap-servers", self.kafka.bootstrap_servers)
        return CliRunner().invoke(app, [*map(str, arguments), *servers])

    def write(self, topic: str, *records: tuple[str, str], partition: int = 0) -> None:
        """Append records."""
        produce(self.kafka.confluent_options(), topic, records, partition=partition)


@pytest.fixture
def place(tallystick_kafka: EmbeddedKafka, tmp_path: Path) -> Iterator[Place]:
    place = Place(tallystick_kafka, tmp_path)
    yield place
    place.client.close()


def test_a_fork_is_the_newest_epoch_under_another_name(place: Place) -> None:
    """State, positions and origin are those of the epoch; the original is as it was."""
    before = {path: place.job.storage.get(path) for path in place.job.storage.names("tallystick")}
    place.write(place.out, ("a", "1"), ("b", "2"), partition=1)

    made = place.call(
        *("fork", place.job.folder, "--to", place.path / "new"),
        *("--topics", f"{place.out}={place.canary}"),
    )

    assert made.exit_code == 0, made.output
    assert "goes on after epoch 2, under the name 'job-fork-" in made.output
    note, here = fork_of(place.new()), CheckpointFolder(place.new())
    assert note is not None
    assert (note.topics, note.starts) == ({place.out: place.canary}, {place.out: (0, 2)})
    (path,) = here.manifest_paths()
    seed = here.read_manifest(path)
    assert is_seed(path)
    assert (seed.lineage, seed.produced) == (here.lineage(), ())
    assert seed.sources == place.job.manifest().sources
    assert entries_of(seed.state[0], ALL, place.new()) == place.job.entries()
    assert note.name == f"job-fork-{seed.lineage[:8]}"
    assert len(partitions_of(place.client, place.canary)) == 2, "it was created, as wide"
    assert before == {path: place.job.storage.get(path) for path in before}
    assert place.fork("again", **{place.out: f"{place.canary}-2"}).name != note.name


@pytest.mark.parametrize(
    ("produced", "starts"),
    [
        ({1: (10, 12), 2: (14, 15)}, 16),  # the newest that the fork does not write
        ({1: (10, 12), 3: (14, 15)}, 13),
        ({3: (14, 15), 4: (16, 17)}, 14),  # the first that it does, if the end was beyond it
        ({3: (90, 95)}, 40),  # it began after the look at the end
        ({}, 40),
    ],
)
def test_where_the_output_of_a_fork_begins(produced, starts) -> None:
    """The offset after epoch 2, where the partition's end was 40 just before epoch 2 was chosen."""
    one = TopicPartition("out", 0)
    manifests = [
        Manifest(
            epoch, "job", "lineage", (), (ProducedRange("out", 0, 2, *ends),), Producer("t", 1, 1)
        )
        for epoch, ends in produced.items()
    ]

    assert forks._starts({one: 40}, 2, manifests) == {one: starts}


def test_offsets_that_no_manifest_names_any_more_are_asked_for_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline that is faster than Kafka's answer may have removed what it wrote meanwhile."""
    asked: list[int] = []

    def ends(client: Client, partitions: Any, at: int, **settings: Any) -> Any:
        if not settings and not asked:
            place.job.run(60)
            place.job.clear_up()
            for epoch in range(place.job.epoch + 1):
                place.job.storage.delete(f"offsets/{epoch}")
                place.job.storage.delete(f"commits/{epoch}")
            place.settle()
        if not settings:
            asked.append(at)
        return list_offsets(client, partitions, at, **settings)

    monkeypatch.setattr(forks, "list_offsets", ends)

    place.fork()

    first, *_ = CheckpointFolder(place.job.storage).manifest_paths()
    assert epoch_of(first) > 3, "nothing was removed"
    assert len(asked) == 2


def test_a_topic_with_records_is_nobodys_to_fork_into(place: Place) -> None:
    """Records of open and of aborted transactions count as well."""
    place.kafka.create_topic(place.canary, 2)
    producer = ConfluentProducer(
        {**place.kafka.confluent_options(), "transactional.id": place.canary}
    )
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce(place.canary, b"1", partition=1)
    producer.flush()

    for is_open in (True, False):
        if not is_open:
            producer.abort_transaction()
        with pytest.raises(OptionError, match=rf"{place.canary}' has \d records"):
            place.fork()
    assert CheckpointFolder(place.new()).lineage() is None


def test_what_cannot_be_forked_is_refused_by_name(place: Place) -> None:
    other = f"{place.canary}-wide"
    place.kafka.create_topic(other, 3)
    for topics, words in (
        ({place.out: other}, "has 3 partitions"),
        ({place.out: place.out}, "is a topic that the original writes to"),
        ({place.out: "no name"}, "expected a topic's name"),
        ({place.out: "both", other: "both"}, "expected a topic for each"),
        ({f"{place.out}x": other}, "does not exist"),
    ):
        with pytest.raises(OptionError, match=words):
            place.fork(**topics)
    for text, words in (("out", "expected OLD=NEW"), ("a=b,a=c", "named twice")):
        called = place.call("fork", place.job.folder, "--to", place.path / "x", "--topics", text)
        assert (called.exit_code, words in called.output) == (1, True), called.output
    for epoch in range(3):
        place.job.storage.put(f"offsets/{epoch}", b"v1\n{}\n{}")
        place.job.storage.put(f"commits/{epoch}", b"v1\n{}")
    with pytest.raises(OptionError, match="a query of Structured Streaming"):
        place.fork()
    files = [path for path in (place.path / "new").rglob("*") if path.is_file()]
    assert files == [], "something is left"


def test_a_fork_is_neither_saved_nor_forked(place: Place) -> None:
    """Restored, the savepoint of a fork would lead its state into the output of the original."""
    place.fork()

    with pytest.raises(OptionError, match=r"is a fork of .*take one of the original"):
        savepoints.create(place.new(), place.new("saved"))
    with pytest.raises(OptionError, match=r"is a fork of .*Fork the original once more"):
        forks.fork(place.new(), place.new("b"), {place.out: "c"}, place.client, ask_nobody)


@pytest.mark.parametrize("cut", [FORK, "metadata", "tallystick/0000", "keyed-state"])
def test_a_fork_that_is_cut_off_is_no_checkpoint(place: Place, monkeypatch, cut) -> None:
    """A killed command leaves a folder without an id, and no start goes on from that."""
    written: list[str] = []

    def put(self: NewFolder, path: str, data: bytes) -> None:
        written.append(path)
        if path.startswith(cut):
            os._exit(0)
        self.storage.put(path, data)

    monkeypatch.setattr(NewFolder, "put", put)
    child = os.fork()
    if child == 0:
        place.fork()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "it was cut off"
    monkeypatch.undo()

    here = CheckpointFolder(place.new())
    assert here.lineage() is None
    assert fork_of(place.new()) is not None or not here.manifest_paths()
    with pytest.raises(OptionError, match=r"is being filled by fork|is not empty"):
        place.fork()


class TestCompare:
    def test_keys_and_values_count_and_the_place_does_not(self, place: Place) -> None:
        place.kafka.create_topic(place.canary, 2)
        for topic in (place.canary, place.out):
            place.write(topic, ("a", "1"), ("b", "2"), ("a", "3"))
        place.write(place.out, ("c", "4"), partition=1)

        more = place.call("compare", place.out, place.canary)
        assert more.exit_code == 1, more.output
        assert f"{place.canary}, key c: lost 4" in more.output
        assert "1 difference (1 lost): 4 records" in more.output
        so_far = place.call("compare", place.out, place.canary, "--live")
        assert so_far.exit_code == 0, so_far.output
        assert "1 that only one of them has so far" in so_far.output

    @pytest.mark.parametrize(
        ("comparison", "is_same"), [("sequence", False), ("rows", True), ("final", False)]
    )
    def test_the_comparison_is_that_of_chaos(self, place, comparison, is_same) -> None:
        place.kafka.create_topic(place.canary, 2)
        place.write(place.out, ("a", "1"), ("a", "2"))
        place.write(place.canary, ("a", "2"), ("a", "1"))

        called = place.call("compare", place.out, place.canary, "--compare", comparison)

        assert called.exit_code == (0 if is_same else 1), called.output

    def test_a_lost_row_shows_in_what_both_have(self, place: Place) -> None:
        """`--live` leaves out ends, not rows in between."""
        place.kafka.create_topic(place.canary, 2)
        place.write(place.out, ("a", "1"), ("a", "2"), ("a", "3"))
        place.write(place.canary, ("a", "1"), ("a", "3"))

        called = place.call("compare", place.out, place.canary, "--live")

        assert called.exit_code == 1, called.output
        assert "key a: lost 2" in called.output

    def test_a_fork_says_where_to_begin(self, place: Place) -> None:
        place.write(place.out, ("a", "1"), partition=1)
        place.fork()
        for topic in (place.out, place.canary):
            place.write(topic, ("a", "2"), partition=1)

        fork = ("--fork", place.path / "new")
        without = place.call("compare", place.out, place.canary)
        same = place.call("compare", place.out, place.canary, *fork)
        assert (without.exit_code, same.exit_code) == (1, 0), same.output
        strange = place.call("compare", place.canary, place.out, *fork)
        assert f"expected of its topics {place.out} {place.canary}" in strange.output
        none = place.call("compare", place.out, place.canary, "--fork", place.job.folder)
        assert "expected a checkpoint that `tallystick fork` made" in none.output

    def test_mistakes_are_named(self, place: Place) -> None:
        for arguments, words in (
            ((place.out, f"{place.out}x"), "Check its name"),
            ((place.out, place.out), "neither"),
            ((place.out, place.out, "--compare", "keys"), "expected one of sequence"),
            ((place.out, place.out, "--compare", "rows", "--live"), "is for --compare sequence"),
        ):
            called = place.call("compare", *arguments)
            assert (called.exit_code, words in called.output) == (1, True), called.output
