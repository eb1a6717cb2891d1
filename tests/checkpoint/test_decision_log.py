"""A checkpoint has one decider, whoever starts first; of runs that race for it at most one decides.

The storage is unsure, and late.
"""

import json
import logging
import random
import zlib
from collections.abc import Callable
from itertools import count
from pathlib import Path
from threading import Barrier, Thread

import pytest

from tallystick.checkpoint.decision_log import (
    DECIDER,
    DECISIONS,
    KEPT_SLOTS,
    DecisionLog,
    claim,
    decider_of,
    newest_entry,
    slot_path,
)
from tallystick.epoch.manifest import CHECKPOINT, KAFKA, LOG, DeciderName, Manifest, manifest_path
from tallystick.epoch.savepoint import Savepoint, seed_of
from tallystick.epoch.tokens import Token, decode_token
from tallystick.errors import FencedError, ManifestError, OptionError, StorageError
from tallystick.storage.file_storage import FileStorage, SystemClock
from tallystick.values import Producer

ID = "tallystick-p"


class Names:
    """`ports.Clock`, of which the log needs names only."""

    def __init__(self) -> None:
        self._numbers = count(1)

    def nonce(self) -> str:
        return f"run-{next(self._numbers)}"

    def sleep(self, seconds: float) -> None:
        raise AssertionError("the log never waits")


NAMES = Names()


def token(epoch: int, path: str = "m") -> Token:
    return Token(epoch, "lineage", "checkpoint", path)


def decide(log: DecisionLog, producer: Producer, what: Token) -> Producer:
    return log.decide(producer, what)


# On a real disk, one thing at a time.


@pytest.fixture
def storage(tmp_path) -> FileStorage:
    return FileStorage(str(tmp_path))


def slots(storage: FileStorage) -> list[int]:
    names = (path.rpartition("/")[2] for path in storage.names(DECISIONS))
    return [int(name.removesuffix(".json")) for name in names]


def test_a_new_log_has_decided_nothing(storage):
    log = DecisionLog(storage, NAMES, ID)
    log.fence(None)

    assert log.last_decision() is None
    assert newest_entry(storage).run.startswith("run-")


def test_a_decision_is_what_every_later_run_is_told(storage):
    first = DecisionLog(storage, NAMES, ID)
    producer = decide(first, first.fence(None), token(-1, ""))
    decide(first, producer, token(0))
    second = DecisionLog(storage, NAMES, ID)
    second.fence(None)

    assert second.last_decision() == first.last_decision() == token(0)
    assert slots(storage) == [0, 1, 2, 3], "taking over is a slot too, with the same token"


def test_a_run_that_is_replaced_cannot_decide_and_cannot_come_back(storage):
    first, second = DecisionLog(storage, NAMES, ID), DecisionLog(storage, NAMES, ID)
    producer = first.fence(None)
    current = second.fence(None)

    with pytest.raises(FencedError, match="this run stops"):
        decide(first, producer, token(0))
    with pytest.raises(FencedError, match="run-"):
        first.fence(producer)
    with pytest.raises(FencedError, match="belongs to another run now"):
        first.check_owner(producer)
    second.check_owner(current)
    assert second.last_decision() is None


def test_an_owner_that_fences_itself_leaves_no_room_for_its_own_late_write(storage):
    log = DecisionLog(storage, NAMES, ID)
    producer = log.fence(None)
    following = log.fence(producer)

    assert not storage.put_new(slot_path(producer.producer_epoch + 1), b"late")
    assert decide(log, following, token(0)).producer_epoch == following.producer_epoch + 1


def filled(storage: FileStorage, decisions: int, kept: int) -> tuple[DecisionLog, Producer]:
    log = DecisionLog(storage, NAMES, ID, kept_slots=kept)
    producer = log.fence(None)
    for epoch in range(decisions):
        producer = decide(log, producer, token(epoch))
    return log, producer


def test_old_slots_are_removed_and_the_newest_stay(storage):
    filled(storage, 25, kept=10)

    assert slots(storage) == list(range(11, 26))
    assert newest_entry(storage).token == token(24)
    assert KEPT_SLOTS > 1


def test_a_write_into_a_hole_never_counts(storage):
    paused = DecisionLog(storage, NAMES, ID)
    producer = paused.fence(None)
    filled(storage, 25, kept=10)

    with pytest.raises(FencedError):
        decide(paused, producer, token(0, "of long ago"))

    assert slots(storage)[0] == 1, "it is there, and old"
    assert newest_entry(storage).token == token(24)


def test_a_reader_that_is_overtaken_by_the_removal_reads_the_newest(storage):
    """What else it had listed is older: also what somebody wrote into a hole."""
    filled(storage, 5, kept=100)
    listed = storage.names(DECISIONS)

    class Slow(FileStorage):
        def names(self, folder: str) -> list[str]:
            if not listed:
                return super().names(folder)
            listed_before, listed[:] = list(listed), []
            for path in listed_before[1:]:
                self.delete(path)  # meanwhile; the first one is a late write
            self.put(slot_path(77), data)
            return listed_before

    data = storage.get(listed[-1])
    slow = Slow(storage.location)

    assert newest_entry(slow).slot == 77


def test_a_removal_that_fails_changes_no_decision(storage, caplog):
    class Kept(FileStorage):
        def delete(self, path: str) -> None:
            raise PermissionError(path)

    log, _ = filled(Kept(storage.location), 25, kept=10)

    assert log.last_decision() == token(24)
    assert slots(storage) == list(range(26))
    assert "nothing else depends on it" in caplog.text


@pytest.mark.parametrize("name", ["7.json", "x.json", "0000000000000099.txt", "notes"])
def test_other_files_in_the_folder_are_no_slots(storage, name):
    filled(storage, 2, kept=10)
    storage.put(f"{DECISIONS}/{name}", b"{}")

    assert newest_entry(storage).token == token(1)


def test_a_damaged_slot_is_refused_whichever_byte_it_is(storage):
    """Falling back to an older one would decide an epoch twice."""
    filled(storage, 2, kept=10)
    path = slot_path(2)
    good = storage.get(path)
    for at in range(len(good) - 1):
        bad = good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]
        storage.delete(path)
        storage.put(path, bad)
        with pytest.raises(ManifestError, match=path):
            newest_entry(storage)
    storage.delete(path)
    storage.put(path, b"")
    with pytest.raises(ManifestError, match="0 bytes that fail their checksum"):
        DecisionLog(storage, NAMES, ID).fence(None)


def test_a_newer_slot_names_its_version(storage):
    line = json.dumps({"version": 2}).encode()
    storage.put(slot_path(0), line + b"\n%08x\n" % zlib.crc32(line))

    with pytest.raises(ManifestError, match="version 2, this release reads version 1"):
        newest_entry(storage)


# Over a storage that is unsure, any number of runs in each other's way.

TURNS = ("well", "well", "well", "refused", "no answer", "late", "another first", "dies")


class Died(BaseException):
    """The process is gone; whoever catches errors does not catch this."""


class Unsure:
    """`ports.Storage` of one run: each call goes as its script says, then well."""

    location = "unsure:"

    def __init__(self, race: "Race") -> None:
        self._race = race
        self.script: list[str] = []

    def put_new(self, path: str, data: bytes) -> bool:
        def effect() -> bool:
            if path in self._race.files:
                return False
            self._race.created(path, data)
            return True

        return self._call(effect, is_write=True)

    def get(self, path: str) -> bytes | None:
        return self._call(lambda: self._race.files.get(path))

    def names(self, folder: str) -> list[str]:
        return self._call(lambda: sorted(self._race.files))

    def delete(self, path: str) -> None:
        self._call(lambda: self._race.files.pop(path, None))

    def _call(self, effect: Callable, *, is_write: bool = False):
        turn = self.script.pop(0) if self.script else "well"
        match turn:
            case "refused":
                raise StorageError(turn)
            case "no answer":
                effect()
                raise StorageError(turn)
            case "late" if is_write:
                self._race.late.append(effect)
                raise StorageError(turn)
            case "another first":
                self._race.another(self)
            case "dies":
                raise Died
        return effect()


class Run:
    """A run as the coordinator drives it: fence, ask, decide; after an error fence and ask."""

    def __init__(self, race: "Race") -> None:
        self.storage = Unsure(race)
        self.log = DecisionLog(self.storage, NAMES, ID, kept_slots=race.kept_slots)
        self.producer: Producer | None = None
        self.epoch: int | None = None  # the next to decide; None: it has to be asked
        self.is_over = False
        self._race = race

    def go_on(self) -> None:
        """Do what is next."""
        try:
            if self.epoch is None:
                under_way = self._race.proposed - set(self._race.counted)
                self.producer = self.log.fence(self.producer)
                self._race.given_up |= under_way - set(self._race.counted)
                known = self.log.last_decision()
                self.epoch = 0 if known is None else known.checkpoint_id + 1
                return
            what = token(self.epoch, f"by {self.log._run}, {next(self._race.paths)}")
            self._race.proposed.add(what)
            self.producer = decide(self.log, self.producer, what)
            assert what in self._race.counted, "it was told that this is decided"
            self.epoch += 1
        except StorageError:
            self.epoch = None
        except (FencedError, Died):
            self.is_over = True


class Race:
    """Every slot is watched as it is written: what counts is the newest one."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.files: dict[str, bytes] = {}
        self.late: list[Callable] = []
        self.counted: list[Token] = []
        self.paths = count()
        self.kept_slots = self.dice.choice((1, 2, 5))
        self.runs = [Run(self)]
        self.newest: tuple[str, str, object] = ("", "", None)
        self.proposed: set[Token] = set()
        self.given_up: set[Token] = set()  # whoever fenced relies on it that they never count

    def created(self, path: str, data: bytes) -> None:
        self.files[path] = data
        entry = json.loads(data.splitlines()[0])
        before_path, before_run, before = self.newest
        if path < before_path:
            return  # a hole
        self.newest = (path, entry["run"], entry["token"])
        if entry["run"] != before_run:
            [run] = [run for run in self.runs if run.log._run == entry["run"]]
            assert run.producer is None, "who was replaced does not come back"
        if entry["token"] != before:
            assert entry["run"] == before_run, "only who has the newest slot decides"
            what = decode_token(*entry["token"])
            assert what.checkpoint_id == len(self.counted), "each epoch once, in order"
            assert what not in self.given_up, "a fence takes the slot of what is under way"
            self.counted.append(what)

    def another(self, storage: Unsure) -> None:
        for run in self.living:
            if run.storage is not storage and not run.storage.script:
                run.go_on()

    @property
    def living(self) -> list[Run]:
        return [run for run in self.runs if not run.is_over]

    def step(self) -> None:
        """Somebody does something."""
        dice = self.dice
        if self.late and dice.random() < 0.15:
            self.late.pop(dice.randrange(len(self.late)))()
        elif not self.living or dice.random() < 0.1:
            self.runs.append(Run(self))
        else:
            run = dice.choice(self.living[-3:])
            run.storage.script = dice.choices(TURNS, k=dice.choice((0, 1, 8)))
            run.go_on()
            run.storage.script = []

    def whoever_comes_next_is_told_all_and_decides(self) -> None:
        """Nothing fails any more."""
        run = Run(self)
        self.runs.append(run)
        run.go_on()
        assert run.epoch == len(self.counted)
        run.go_on()
        assert not run.is_over
        assert len(self.counted) == run.epoch


@pytest.mark.parametrize("seed", range(100))
def test_whatever_goes_wrong_each_epoch_is_decided_once(seed, caplog):
    """The seed repeats it; a number of decisions shows that they do not only block each other."""
    caplog.set_level(logging.CRITICAL, "tallystick.checkpoint.decision_log")
    race = Race(seed)
    for _ in range(60):
        race.step()
    race.whoever_comes_next_is_told_all_and_decides()

    assert len(race.counted) > 1


OURS = DeciderName(KAFKA, "tallystick-p", "one")
OTHERS = [LOG, OURS._replace(transactional_id="team-p"), OURS._replace(cluster_id="two")]


def manifest(decided_by: str) -> Manifest:
    producer = Producer("tallystick-p", 1, 1)
    return Manifest(0, "p", "lineage", (), (), producer, decided_by=decided_by)


def files(storage: FileStorage) -> list[str]:
    return sorted(str(path) for path in Path(storage.location).rglob("*") if path.is_file())


@pytest.mark.parametrize("decider", [OURS, LOG])
def test_the_first_start_names_it_and_the_same_may_start_again(
    storage: FileStorage, decider: DeciderName
) -> None:
    for _ in range(2):
        claim(storage, decider)

    assert decider_of(storage) == decider


@pytest.mark.parametrize("other", OTHERS)
def test_another_one_is_refused_with_both_names_and_the_remedies(
    storage: FileStorage, other: DeciderName
) -> None:
    for number, (first, second) in enumerate([(OURS, other), (other, OURS)]):
        here = FileStorage(f"{storage.location}/{number}")
        claim(here, first)
        before = files(here)
        with pytest.raises(OptionError) as refused:
            claim(here, second)

        words = (str(first), str(second), "availableNow", "savepoint", "new checkpoint")
        assert [word for word in words if word not in str(refused.value)] == []
        assert (files(here), decider_of(here)) == (before, first)


def test_of_two_first_starts_one_is_refused(storage: FileStorage) -> None:
    """Neither has left a manifest yet: the file is what keeps them apart."""
    for number in range(20):
        here, gate = FileStorage(f"{storage.location}/{number}"), Barrier(2)
        refused: list[OptionError] = []

        def start(decider: DeciderName) -> None:
            gate.wait()  # noqa: B023
            try:
                claim(here, decider)  # noqa: B023
            except OptionError as error:
                refused.append(error)  # noqa: B023

        starts = [Thread(target=start, args=(log,)) for log in (OURS, LOG)]
        for thread in starts:
            thread.start()
        for thread in starts:
            thread.join()

        assert len(refused) == 1
        assert decider_of(here) in (OURS, LOG)


@pytest.mark.parametrize(
    ("decided_by", "same", "another"),
    [(KAFKA, OURS, OTHERS[1]), (KAFKA, OURS, LOG), (CHECKPOINT, LOG, OURS)],
)
def test_a_checkpoint_without_the_file_is_known_by_its_manifests(
    storage: FileStorage, decided_by: str, same: DeciderName, another: DeciderName
) -> None:
    decided = manifest(decided_by)
    storage.put(manifest_path(decided, "a"), decided.encode())
    before = files(storage)
    with pytest.raises(OptionError):
        claim(storage, another)
    assert files(storage) == before
    claim(storage, same)

    assert decider_of(storage) == same


def test_a_log_of_decisions_names_the_log(storage: FileStorage) -> None:
    DecisionLog(storage, SystemClock(), "tallystick-p").fence(None)

    assert decider_of(storage) == LOG
    with pytest.raises(OptionError):
        claim(storage, OURS)


def test_a_restored_savepoint_may_have_another_decider(storage: FileStorage) -> None:
    taken = Savepoint("one", "now", "/old", "tallystick/0-a.json", manifest(KAFKA))
    seed = seed_of(taken, "/savepoint", "lineage-2")
    storage.put(manifest_path(seed, "seed-1"), seed.encode())

    assert decider_of(storage) is None
    claim(storage, LOG)


def test_a_damaged_file_is_not_passed_over(storage: FileStorage) -> None:
    claim(storage, OURS)
    path = Path(storage.location) / DECIDER
    path.write_bytes(path.read_bytes().replace(b"one", b"two"))

    with pytest.raises(ManifestError, match=r"decider\.json"):
        claim(storage, OURS._replace(cluster_id="two"))
