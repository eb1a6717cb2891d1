"""A savepoint whose state lies in another number of key groups.

Every entry is read, put under its new key group, sorted on this host's disk, and written as
snapshots: the whole state is rewritten, in bounded memory.
"""

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa

from tallystick.checkpoint.local.lmdb_store import open_store
from tallystick.checkpoint.savepoint_folder import NewFolder, filled, name_of
from tallystick.checkpoint.state_files import chunks_of, contents_of, write_snapshot
from tallystick.epoch.savepoint import Savepoint
from tallystick.errors import OptionError
from tallystick.ops import savepoints
from tallystick.ports import Storage
from tallystick.state.catalog import StateFile, StepState, Version
from tallystick.state.entries import regrouped
from tallystick.state.key_groups import KeyGroupRange, check_parallelism
from tallystick.state.keys import HASH_VERSION, KeyCodec
from tallystick.state.overlay import StateView

SNAPSHOT_BYTES = 32 << 20
"""About what one of the new files holds."""


def migrate(
    source: Storage, target: Storage, max_parallelism: Mapping[str, int], scratch: Path
) -> Savepoint:
    """Copy a savepoint, with the state of some steps in other key groups.

    All of it or nothing: what was written before an error is removed again. What a killed process
    has written stays, and another attempt is refused there: it needs another folder.

    Args:
        source: where the savepoint is; it stays as it is.
        target: an empty folder.
        max_parallelism: the new number of key groups, by the step's uid.
        scratch: a folder on a local disk, with room for the largest step's state.

    Returns:
        The new savepoint.

    Raises:
        OptionError: a step is unknown, a number is out of its bounds, or the folder is in use.
        StateFileError: a file of state is missing or damaged.
    """
    savepoint = savepoints.read(source)
    state = savepoint.manifest.state
    uids = [step.uid for step in state]
    for uid, count in max_parallelism.items():
        check_parallelism(1, count)
        if uid not in uids:
            raise OptionError(
                f"savepoint {source.location} has no step {uid!r}: it has {', '.join(uids)}."
            )
    moved: list[StepState] = []
    with filled(target, "savepoint migrate") as new:
        for step in state:
            if step.uid in max_parallelism:
                moved.append(_moved(step, max_parallelism[step.uid], source, new, scratch))
            else:
                new.copy(source, [step])
                moved.append(step)
        manifest = replace(savepoint.manifest, state=tuple(moved))
        migrated = replace(savepoint, name=name_of(target), manifest=manifest)
        new.complete(migrated)
    return migrated


def _moved(
    step: StepState, max_parallelism: int, source: Storage, new: NewFolder, scratch: Path
) -> StepState:
    files: list[StateFile] = []
    trail = step.trail
    if step.version is not None:
        version = Version(step.version.epoch, uuid.uuid4().hex)
        everything = KeyGroupRange(0, max_parallelism - 1)
        with TemporaryDirectory(dir=scratch, prefix="tallystick-migrate-") as folder:
            store = open_store(Path(folder), "migration", step.uid, everything)
            done = store.apply(None, version, _entries(step, max_parallelism, source))
            assert done, "the folder is nobody else's"
            with store.view(version) as view:
                assert view is not None, "just written"
                for file in _written(step, version, max_parallelism, view, new.storage):
                    new.will_have(file.path)
                    files.append(file)
        trail = (version,)
    return replace(
        step,
        max_parallelism=max_parallelism,
        parallelism=min(step.parallelism, max_parallelism),
        hash_version=HASH_VERSION,
        files=tuple(files),
        trail=trail,
    )


def _entries(step: StepState, max_parallelism: int, source: Storage) -> Iterator[pa.RecordBatch]:
    codec = KeyCodec.from_text(step.key_schema)
    for groups in chunks_of(step, KeyGroupRange(0, step.max_parallelism - 1)):
        entries = contents_of(step, groups, source)
        if entries.num_rows:
            yield regrouped(entries, codec, max_parallelism)


def _written(
    step: StepState, version: Version, max_parallelism: int, view: StateView, target: Storage
) -> Iterator[StateFile]:
    size = sum(file.size for file in step.files)
    count = max(1, min(max_parallelism, size // SNAPSHOT_BYTES))
    for index, groups in enumerate(KeyGroupRange(0, max_parallelism - 1).parts(count)):
        nonce = uuid.uuid4().hex[:16]
        yield write_snapshot(
            target,
            step.uid,
            version.epoch,
            index,
            nonce,
            view,
            groups,
            state_ids=[each.state_id for each in step.fields],
        )
