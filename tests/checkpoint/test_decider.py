"""A checkpoint has one decider, whoever starts first, and whatever a later start would like."""

from pathlib import Path
from threading import Barrier, Thread

import pytest

from tallystick.checkpoint.decider import PATH, claim, decider_of
from tallystick.checkpoint.decision_log import DecisionLog
from tallystick.epoch.manifest import CHECKPOINT, KAFKA, LOG, DeciderName, Manifest, manifest_path
from tallystick.epoch.savepoint import Savepoint, seed_of
from tallystick.errors import ManifestError, OptionError
from tallystick.storage.file_storage import FileStorage, SystemClock
from tallystick.values import Producer

OURS = DeciderName(KAFKA, "tallystick-p", "one")
OTHERS = [LOG, OURS._replace(transactional_id="team-p"), OURS._replace(cluster_id="two")]


@pytest.fixture
def storage(tmp_path: Path) -> FileStorage:
    return FileStorage(str(tmp_path))


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

        starts = [Thread(target=start, args=(each,)) for each in (OURS, LOG)]
        for each in starts:
            each.start()
        for each in starts:
            each.join()

        assert len(refused) == 1
        assert decider_of(here) in (OURS, LOG)


@pytest.mark.parametrize(
    ("decided_by", "same", "another"),
    [(KAFKA, OURS, OTHERS[1]), (KAFKA, OURS, LOG), (CHECKPOINT, LOG, OURS)],
)
def test_a_checkpoint_without_the_file_is_known_by_its_manifests(
    storage: FileStorage, decided_by: str, same: DeciderName, another: DeciderName
) -> None:
    found = manifest(decided_by)
    storage.put(manifest_path(found, "a"), found.encode())
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
    path = Path(storage.location) / PATH
    path.write_bytes(path.read_bytes().replace(b"one", b"two"))

    with pytest.raises(ManifestError, match=r"decider\.json"):
        claim(storage, OURS._replace(cluster_id="two"))
