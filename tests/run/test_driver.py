"""The driver's shell: what it puts into Kafka reads back, and strangers' writes are refused."""

import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.checkpoint import state_files
from tallystick.epoch import manifest as m
from tallystick.epoch.manifest import COLLECT_EVERY, EPOCHS_RETAINED
from tallystick.epoch.micro_batches import failed_path
from tallystick.epoch.protocol import EpochRan
from tallystick.epoch.tokens import (
    Token,
    decode_token,
    encode_token,
    newest_token,
    takeover_count,
)
from tallystick.errors import DataLossError, ManifestError, StorageError
from tallystick.ports import Storage
from tallystick.run import driver as driver_module
from tallystick.run.driver import Driver
from tallystick.run.transaction_decider import Target, TransactionDecider
from tallystick.state.catalog import CHANGELOG, StateFile, StepState, Version
from tallystick.storage.file_storage import FileStorage, SystemClock
from tallystick.values import Producer, TopicPartition
from tests.simulation.simulation import check_positions
from tests.simulation.storage import SimulatedStorage
from tests.simulation.world import OTHER, OWN, World

words = st.text(max_size=20)
tokens = st.builds(Token, st.integers(-1, 2**62), words, words, words, st.integers(0, 2**31), words)


@given(tokens)
def test_a_token_reads_back_as_it_was(token):
    offset, metadata = encode_token(token)

    assert decode_token(offset, metadata) == token
    assert decode_token(offset, metadata).staged_at == token.staged_at
    assert offset == token.checkpoint_id + 1, "Kafka's offsets name what comes next"


@given(st.integers(0, 2**62), st.text(max_size=30))
def test_what_is_no_token_is_refused(offset, metadata):
    """A consumer or a tool that commits under the pipeline's group must not look like a run."""
    with pytest.raises(DataLossError, match="no token"):
        decode_token(offset, metadata)


TIMED = '{"tallystick":1,"lineage":"","checkpoint":"","manifest":"","at":%s}'
"""A token; the time is missing."""


@pytest.mark.parametrize(
    "metadata",
    [
        *["null", "7", "[]", "{}", '{"tallystick": 1}', '"tallystick"'],
        *(TIMED % time for time in ("0", "null", "true", "[]")),
    ],
)
def test_json_that_is_no_token_is_refused(metadata):
    with pytest.raises(DataLossError, match="another name"):
        decode_token(4, metadata)


def test_a_newer_token_names_its_version():
    with pytest.raises(ManifestError, match="version 2, this release reads 1"):
        decode_token(4, json.dumps({"tallystick": 2}))


def test_a_token_fits_into_kafkas_metadata():
    """Kafka keeps 4096 bytes of metadata per offset by default."""
    token = Token(
        2**40,
        "0" * 36,
        "s3://bucket/" + "folder/" * 40,
        "tallystick/" + "x" * 60,
        takeover_count=2**40,
    )

    assert len(encode_token(token)[1].encode()) < 4096


PLACES = [TopicPartition(topic, 0) for topic in ("first", "second", "third")]


@given(st.data())
def test_the_newest_run_counts_whichever_earlier_places_it_could_not_overwrite(data):
    """Every run sees all tokens, takes over from whoever counts, and writes its own place."""
    tokens: dict[TopicPartition, tuple[int, str]] = {}
    place = PLACES[0]
    for number in range(data.draw(st.integers(1, 30))):
        lineage = data.draw(st.sampled_from(["a", "b", "c", "d"]))
        place = data.draw(st.sampled_from(PLACES))
        counts = newest_token(tokens, place, lineage)
        if counts is not None and counts.lineage == lineage:
            checkpoint_id = counts.checkpoint_id + 1
        else:
            checkpoint_id = data.draw(st.integers(0, 5)) if counts is None else number
        token = Token(checkpoint_id, lineage, "c", "m", takeover_count(tokens, lineage))
        denied = data.draw(st.sets(st.sampled_from(PLACES))) - {place}
        tokens |= dict.fromkeys((tokens.keys() | {place}) - denied, encode_token(token))

        for place_name in ("a", "b", "c", "d"):
            assert newest_token(tokens, place, place_name) == token


def test_positions_on_the_sinks_cluster_are_committed_with_the_rows_and_no_others():
    """Those of another cluster cannot be in the transaction; `spark.group_offsets` shows them."""
    world = World(seed=0, kinds=())
    world.sources = (OWN, OTHER)
    partitions = (*OWN.partitions, *OTHER.partitions)
    world.available = dict.fromkeys(partitions, 5)
    world.checkpoint.base = dict.fromkeys(partitions, 0)
    try:
        world.run_quietly()
    finally:
        world.close()
    check_positions(world)

    assert world.checker.violations == []
    shown = {place: at for place, at in world.sink.offsets.items() if place[0] == OWN.group}
    assert shown == {(OWN.group, partition): (5, "") for partition in OWN.partitions}
    assert OTHER.group not in {group for group, _ in world.sink.offsets}


EPOCHS = COLLECT_EVERY + 1  # it clears up after the first one, and after the last


def file_of(epoch: int, word: str) -> str:
    """A state file that no manifest names, in this world without state."""
    return f"keyed-state/step/{epoch:012d}-0-{word}.changelog"


@pytest.fixture
def world() -> Iterator[World]:
    """A world in which an epoch reads one record, and nothing fails."""
    world = World(seed=0, kinds=())
    world.sources = (OWN,)
    world.available = dict.fromkeys(OWN.partitions, EPOCHS)
    world.checkpoint.base = dict.fromkeys(OWN.partitions, 0)
    world.plan_positions = lambda starts: (
        {at: offset + 1 for at, offset in starts.items()}
        if starts[OWN.partitions[0]] < EPOCHS
        else None
    )
    make_driver = world.make_driver

    def make(process: Any, **options: Any) -> Driver:
        driver = make_driver(process, **options)
        driver.collection.every = COLLECT_EVERY
        return driver

    world.make_driver = make
    yield world
    world.close()


def plant(world: World, files: dict[str, bytes]) -> None:
    """Put files into the checkpoint after its first epoch: before, it would be no new one."""
    plan = world.plan_positions

    def plan_and_plant(starts: Any) -> Any:
        if starts[OWN.partitions[0]] == 1:
            world.checkpoint.files.update(files)
        return plan(starts)

    world.plan_positions = plan_and_plant


def test_a_running_job_keeps_its_newest_manifests_and_clears_up_what_none_names(world):
    files = world.checkpoint.files
    orphan, under_way = file_of(3, "orphan"), file_of(EPOCHS, "later")
    plant(world, dict.fromkeys((orphan, under_way), b"state"))

    world.run_quietly()

    assert world.checker.violations == []
    kept = sorted(m.epoch_of(path) for path in m.manifests(files))
    assert kept == list(range(EPOCHS - EPOCHS_RETAINED, EPOCHS))
    assert orphan not in files
    assert under_way in files


def test_files_are_removed_by_several_threads_where_that_is_asked_for(tmp_path):
    storage = FileStorage(str(tmp_path))
    paths = [file_of(0, f"n{at}") for at in range(20)]
    for path in paths:
        storage.put(path, b"state")
    removed_by = set()

    class OneByOne:
        def delete(self, path: str) -> None:
            removed_by.add(threading.get_ident())
            storage.delete(path)

    state_files.delete_all(cast(Storage, OneByOne()), paths, at_a_time=4)

    assert storage.names("keyed-state/step") == []
    assert threading.get_ident() not in removed_by


def test_no_epoch_fails_because_clearing_up_does(world, monkeypatch, caplog):
    def delete(self: SimulatedStorage, path: str) -> None:
        raise StorageError(f"no right to delete {path}")

    monkeypatch.setattr(SimulatedStorage, "delete", delete)
    with caplog.at_level(logging.WARNING, "tallystick.checkpoint.collection"):
        world.run_quietly()

    assert world.checker.violations == []
    assert world.checker.committed_epoch == EPOCHS - 1
    assert "no right to delete tallystick/" in caplog.text


def test_files_of_state_without_a_manifest_are_not_taken_for_a_new_checkpoint(world):
    world.checkpoint.files[file_of(3, "left")] = b"state"

    world.run_quietly()

    assert world.checker.committed_epoch == -1
    assert "no manifest that names them" in str(world.checker.violations)


def test_a_missing_file_of_state_is_told_with_the_epoch_to_go_back_to(world):
    """Nothing is written; the message says how to save the newest epoch that is whole."""
    files = world.checkpoint.files
    world.run_quietly()
    changelogs = [
        StateFile(file_of(epoch, "held"), CHANGELOG, epoch, 0, 127, 1, 1, 1, 1)
        for epoch in range(EPOCHS)
    ]
    for path in m.manifests(files):
        epoch = m.epoch_of(path)
        trail = (Version(epoch, "t"),)
        state = StepState(
            "step", 128, 1, "[]", 1, files=tuple(changelogs[: epoch + 1]), trail=trail
        )
        files[path] = replace(m.decode(files[path], path), state=(state,)).encode()
    files |= {file.path: b"x" for file in changelogs if file.epoch != EPOCHS - 3}
    driver = world.make_driver(world.start_driver())
    driver._requested_epoch = EPOCHS

    error = driver._with_remedy("state file of somewhere: it is missing.")

    assert f"newest epoch that has all its files is {EPOCHS - 4}:" in str(error)
    assert f"--epoch {EPOCHS - 4}`" in str(error)
    bad = driver._with_remedy(f"state file {changelogs[0].path} is damaged.")
    assert "None of the retained epochs" in str(bad)


class LoneKafka:
    """A cluster with one token group, whose commits are immediate; several checkpoints share it."""

    def __init__(self) -> None:
        self.epoch = 0
        self.offsets: dict[TopicPartition, tuple[int, str]] = {}

    def decider(self, identity: Any) -> TransactionDecider:
        target = Target("id", "group", PLACES[0], "cluster")
        return TransactionDecider(self, target, identity.lineage)  # type: ignore[arg-type]

    def _producer(self) -> Producer:
        self.epoch += 1
        return Producer("id", 7, self.epoch)

    def fence(self, *_: Any) -> Producer:
        return self._producer()

    def commit_transaction(self, _: Producer) -> Producer:
        return self._producer()

    def stage_offsets(self, _: Producer, group: str, offsets: Any, *, best_effort: bool = False):
        self.offsets |= offsets

    def group_offsets(self, *_: Any) -> Any:
        return dict(self.offsets)

    def last_sequences(self, *_: Any) -> Any:
        return {}

    def foreign_rows(self, *_: Any) -> Any:
        return {}


def test_a_users_function_may_leave_out_what_comes_behind_a_base(tmp_path):
    """The checkpoint takes its name back, or is restored; its first micro-batch is left out."""
    kafka, ran = LoneKafka(), []

    def start(name: str, epoch: int, *words: str, may_skip: bool = True) -> None:
        storage = FileStorage(str(tmp_path / name))
        for number in range(epoch + 1):
            storage.put(f"offsets/{number}", f"v1\n{{}}\nends {number}".encode())

        class Engine:
            def run_epoch(self, checkpoint_id: int, *_: Any) -> EpochRan:
                ran.append((name, checkpoint_id))
                return EpochRan(())

        identity = driver_module.Identity("q", name, storage.location, frozenset(words))
        driver = Driver(identity, kafka.decider(identity), storage, SystemClock())
        driver.run_epoch(driver_module.Request(epoch, (f"ends {epoch}",), may_skip), Engine())

    for epoch in range(3):
        start("ours", epoch)
    start("theirs", 0, "new-lineage-after-ours")
    log = tmp_path / "ours/offsets"
    with pytest.raises(ManifestError, match="no manifest of the epoch before"):
        start("ours", 5, "new-lineage-after-theirs", may_skip=False)
    failed = FileStorage(str(tmp_path / "ours"))
    failed.put(failed_path(4), b"")
    with pytest.raises(DataLossError, match="begun, and not committed: 4") as raised:
        start("ours", 5, "new-lineage-after-theirs")
    word = "without-epochs-3-to-4"
    assert f"accept={word!r}" in str(raised.value)
    start("ours", 5, "new-lineage-after-theirs", word)
    start("ours", 6)

    assert ran[-3:] == [("theirs", 0), ("ours", 5), ("ours", 6)]
    assert [(log / str(n)).read_text() for n in range(7)] == [
        f"v1\n{{}}\nends {n}" for n in range(7)
    ], "what was left out stays as Spark has logged it"


def test_a_lineage_does_not_go_on_behind_a_manifest_whose_call_failed(tmp_path):
    """It was not committed, as far as anybody knows, though it is the newest that there is."""
    kafka = LoneKafka()
    storage = FileStorage(str(tmp_path / "ours"))
    manifest = m.Manifest(2, "q", "ours", ("ends 2",), (), Producer("t", 1, 0))
    path = m.manifest_path(manifest, "ab")
    storage.put(path, manifest.encode())
    storage.put(failed_path(2, path), b"")
    identity = driver_module.Identity("q", "ours", storage.location, frozenset())
    driver = Driver(identity, kafka.decider(identity), storage, SystemClock())
    driver._requested_epoch, driver._may_skip = 3, True

    known = driver._read_bases()

    assert known.bases == ()
    assert known.begun == (2,)
