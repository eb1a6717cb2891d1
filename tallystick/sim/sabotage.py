"""What is done to a checkpoint, or to Kafka, while no driver runs, and what must come of it."""

from collections.abc import Callable

from tallystick.checkpoint import manifest
from tallystick.errors import DataLossError, ManifestError
from tallystick.job import decode_token
from tallystick.sim.faults import Fault
from tallystick.sim.spark import Checkpoint
from tallystick.sim.world import OUTPUT, TOKEN_GROUP, World

TOKEN = (TOKEN_GROUP, OUTPUT[0])


def sabotage(world: World, fault: Fault) -> type[Exception] | None:
    """Do it; return what the next driver has to raise, None where it has nothing to notice."""
    expected = ACTS[fault](world)
    if expected is not None:
        world.plan.struck[fault] += 1
        world.tell(f"{fault.value}: {expected.__name__} expected")
    return expected


def _expire_token(world: World) -> type[Exception] | None:
    world.sink.offsets.pop(TOKEN, None)
    has_manifests = any(path.startswith(manifest.FOLDER) for path in world.checkpoint.files)
    return DataLossError if has_manifests else None


def _overwrite_token(world: World) -> type[Exception]:
    world.sink.offsets[TOKEN] = world.dice.choice(((17, ""), (17, "lag 3"), (17, "[]")))
    return DataLossError


def _set_back_checkpoint(world: World) -> type[Exception] | None:
    newest = world.checker.committed_epoch
    if newest < 1:
        return None
    kept = world.dice.randrange(newest)
    world.checkpoint.forget_from(kept)
    if world.dice.random() < 0.5:
        world.checkpoint.files = {
            path: data
            for path, data in world.checkpoint.files.items()
            if path < f"{manifest.FOLDER}/{kept:012d}"
        }
    return DataLossError


def _lose_offset_log(world: World) -> type[Exception] | None:
    newest = world.checker.committed_epoch
    if newest < 0:
        return None
    world.checkpoint.forget_from(newest)
    world.checkpoint.log_offsets(newest, dict(world.available))  # planned anew, with more input
    return ManifestError


def _delete_manifest(world: World) -> type[Exception] | None:
    path = _named_manifest(world)
    return None if world.checkpoint.files.pop(path, None) is None else ManifestError


def _corrupt_manifest(world: World) -> type[Exception] | None:
    path = _named_manifest(world)
    if path not in world.checkpoint.files:
        return None
    data = world.checkpoint.files[path]
    world.checkpoint.files[path] = data.replace(b'"sim"', b'"sin"')
    return ManifestError


def _start_elsewhere(world: World) -> type[Exception] | None:
    """Another checkpoint that states to read from where the first one has come to."""
    old = world.checkpoint
    if TOKEN not in world.sink.offsets:
        return None
    newest = max(old.offsets)
    world.checkpoint = Checkpoint("lineage-2", "sim:/checkpoint-2", old.offsets[newest])
    world.checker.checkpoint = world.checkpoint
    world.checker.committed_epoch = -1
    return DataLossError


def _named_manifest(world: World) -> str:
    found = world.sink.offsets.get(TOKEN)
    return decode_token(*found).manifest_path if found else ""


ACTS: dict[Fault, Callable[[World], type[Exception] | None]] = {
    Fault.TOKEN_EXPIRED: _expire_token,
    Fault.TOKEN_OVERWRITTEN: _overwrite_token,
    Fault.CHECKPOINT_SET_BACK: _set_back_checkpoint,
    Fault.OFFSET_LOG_LOST: _lose_offset_log,
    Fault.MANIFEST_DELETED: _delete_manifest,
    Fault.MANIFEST_CORRUPTED: _corrupt_manifest,
    Fault.OTHER_CHECKPOINT: _start_elsewhere,
}
