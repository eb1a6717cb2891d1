"""Where the files of savepoints and restored checkpoints lie, and how they get there."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tallystick.checkpoint import savepoint as s
from tallystick.errors import OptionError, StateFileError
from tallystick.ports import Storage
from tallystick.savepoint_target import Written
from tallystick.state.changelog import DamagedError, parse_index
from tallystick.state.damage import damage_of
from tallystick.state.handles import FOLDER as STATE_FOLDER
from tallystick.state.handles import StateFile, StepState, is_whole_uri
from tallystick.state_files import at_home
from tallystick.wholeness import named

COPIES_AT_A_TIME = 4
"""Each holds one file in memory."""
CHECKS_AT_A_TIME = 16


class SupersededError(Exception):
    """What was to be saved is not there any more, since the pipeline runs: take the next epoch."""


def refuse_savepoint(checkpoint: Storage) -> None:
    """Refuse a query whose checkpoint would be the folder of a savepoint.

    No manifest of its own names the savepoint's files, so it would collect them.

    Raises:
        OptionError: a savepoint lies there.
    """
    if checkpoint.get(s.FILE) is not None:
        raise OptionError(
            f"checkpoint {checkpoint.location} is the folder of a savepoint ({s.FILE}): a query "
            f"would remove its files as those that no epoch needs. None was touched. Restore it "
            f"(`tallystick savepoint restore {checkpoint.location} <new folder>`), and start the "
            f"query on the new folder; what Spark has put here already (metadata, offsets) can go. "
            f"If queries have run here before and the savepoint is of no use any more, remove "
            f"{s.FILE} instead."
        )


def copy_files(
    source: Storage,
    target: Storage,
    before: tuple[StepState, ...],
    after: tuple[StepState, ...],
    written: Written,
) -> None:
    """Copy each file of state from where it was to where it is to be, and prove it whole.

    Args:
        source: what the paths before are relative to.
        target: what those after are relative to.
        before: the state where it is.
        after: the same state; a file that is a URI there stays where it is.
        written: where the copies are listed.

    Raises:
        StateFileError: a file is damaged.
    """
    pairs = [
        (old, new.path)
        for one, other in zip(before, after, strict=True)
        for old, new in zip(one.files, other.files, strict=True)
        if is_own(new)
    ]

    def copy(pair: tuple[StateFile, str]) -> None:
        file, path = pair
        home, at = at_home(source, file)
        data = home.get(at)
        if data is None:
            raise SupersededError(f"{named(file, source.location)} is missing")
        if damage := damage_of(file, data):
            raise StateFileError(f"{named(file, source.location)} is damaged: {damage}")
        written.append((target, path))
        target.put(path, data)

    with ThreadPoolExecutor(COPIES_AT_A_TIME) as threads:
        list(threads.map(copy, pairs))


def check_files(source: Storage, files: Iterable[StateFile]) -> None:
    """Look whether files that are only named are there, in their whole length.

    Raises:
        StateFileError: one is damaged.
        SupersededError: one is missing.
    """

    def check(file: StateFile) -> None:
        start = file.size - file.index_size
        home, path = at_home(source, file)
        tail = home.get_range(path, start, file.index_size + 1)  # no byte may follow
        if tail is None:
            raise SupersededError(f"{named(file, source.location)} is missing")
        try:
            if len(tail) != file.index_size:
                raise DamagedError(f"it has not the {file.size} bytes that were written")
            parse_index(tail, file.checksum)
        except DamagedError as error:
            raise StateFileError(f"{named(file, source.location)} is damaged: {error}") from None

    with ThreadPoolExecutor(CHECKS_AT_A_TIME) as threads:
        list(threads.map(check, files))


def copy_step(source: Storage, target: Storage, step: StepState, written: Written) -> StepState:
    """Copy all files of a step; the state with its files where they are now. See `copy_files`.

    Raises:
        StateFileError: a file is missing or damaged.
    """
    copied = s.with_files((step,), place)
    try:
        copy_files(source, target, (step,), copied, written)
    except SupersededError as error:
        raise StateFileError(str(error)) from None
    return copied[0]


def files_of(
    state: Iterable[StepState], which: Callable[[StateFile], bool] = lambda _: True
) -> list[StateFile]:
    """All files that a state has, or some of them."""
    return [file for step in state for file in step.files if which(file)]


def place(step: StepState, file: StateFile) -> str:
    """Where a copy of a file of state goes, in a savepoint as in a checkpoint."""
    return f"{STATE_FOLDER}/{step.uid}/{file.path.rpartition('/')[2]}"


def is_own(file: StateFile) -> bool:
    """Whether a file lies in the folder that names it."""
    return not file.home


def uri_in(home: str, file: StateFile) -> str:
    """Where a file that a folder names lies, for those outside of it."""
    return f"{file.home or home}/{file.inner_path}"


def whole_uri(location: str) -> str:
    """A location that means the same wherever it is read: a URI, without a slash at its end."""
    is_hadoops = location.startswith("file:") and not location.startswith("file://")
    if "://" in location and not is_hadoops:
        return location.rstrip("/")
    path = Path(location.removeprefix("file:")).absolute()
    return (path.resolve() if ".." in path.parts else path).as_uri()


def referable(folder: Storage) -> str:
    """Return the whole URI of a folder that claims or savepoints are to name.

    Raises:
        OptionError: they cannot.
    """
    uri = whole_uri(folder.location)
    if not is_whole_uri(uri):
        raise OptionError(
            f"{folder.location}: a savepoint cannot be in, or refer to, a folder with '..', a "
            f"backslash or a control character in its name. Nothing was changed. Name another one."
        )
    return uri


def name_of(folder: Storage) -> str:
    """What the savepoint in this folder is called."""
    return whole_uri(folder.location).rpartition("/")[2]


def total_size(state: Iterable[StepState]) -> int:
    """How many bytes of files a state has."""
    return sum(file.size for file in files_of(state))
