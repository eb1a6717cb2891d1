"""What is done to a checkpoint, or to Kafka, while no driver runs, and what must come of it."""

import copy
from collections.abc import Callable

from tallystick.checkpoint.decision_log import DECISIONS
from tallystick.epoch import manifest
from tallystick.epoch.manifest import CHECKPOINT, KAFKA
from tallystick.epoch.savepoint import Savepoint, seed_of
from tallystick.epoch.tokens import Token, encode_token
from tallystick.epoch.verdict import FIRST_EPOCH
from tallystick.errors import DataLossError, ManifestError, OptionError, StateFileError
from tallystick.state.changelog import parse_index
from tallystick.state.file_sets import Load, needed
from tallystick.state.key_groups import KeyGroupRange
from tests.simulation.faults import Fault
from tests.simulation.hosts import Host
from tests.simulation.rows import OUTPUT, rows_between
from tests.simulation.spark import Checkpoint
from tests.simulation.world import TOKEN_GROUP, World

TOKEN = (TOKEN_GROUP, OUTPUT[0])
KAFKAS = {
    Fault.TOKEN_EXPIRED,
    Fault.TOKEN_OVERWRITTEN,
    Fault.TOKEN_SET_BACK,
    Fault.OTHER_CHECKPOINT,
    Fault.SITE_SET_BACK,
}
"""What is done to Kafka, or what only Kafka could notice."""
LOGS = {Fault.DECISION_DAMAGED}
"""What is done to the checkpoint's log of decisions."""


def sabotage(world: World, fault: Fault) -> type[Exception] | None:
    """Do it; return what the next driver has to raise, None where it has nothing to notice."""
    if fault in (KAFKAS if world.decided_by == CHECKPOINT else LOGS):
        return None
    expected = ACTS[fault](world)
    if expected is not None:
        world.plan.struck[fault] += 1
        world.tell(f"{fault.value}: {expected.__name__} expected")
    return expected


def _expire_token(world: World) -> type[Exception] | None:
    world.sink.offsets.pop(TOKEN, None)
    named = manifest.manifests(world.checkpoint.files)
    has_manifests = not all(map(manifest.is_seed, named))
    return DataLossError if has_manifests else None


def _overwrite_token(world: World) -> type[Exception]:
    world.sink.offsets[TOKEN] = world.dice.choice(((17, ""), (17, "lag 3"), (17, "[]")))
    return DataLossError


def _set_back_checkpoint(world: World) -> type[Exception] | None:
    newest = world.checker.committed_epoch
    if newest < 2:
        return None
    kept = world.dice.randrange(newest - 1)  # two entries are written again from the manifests
    has_loop = world.checkpoint.recorded is not None
    world.checkpoint.forget_from(kept)
    files = {
        path: data
        for path, data in world.checkpoint.files.items()
        if path < f"{manifest.FOLDER}/{kept:012d}"
    }
    # With no decision and no manifest of an epoch it looks like a beginning to all but Kafka.
    is_begun = not all(map(manifest.is_seed, manifest.manifests(files)))
    may_cut = world.decided_by == KAFKA or is_begun
    if may_cut and (has_loop or world.dice.random() < 0.5):
        world.checkpoint.files = files
        if world.sinks is not None:
            world.sinks.slots_were_changed(are_gone=True)
    elif has_loop:
        return None
    return ManifestError if has_loop and world.decided_by == KAFKA else DataLossError


def _lose_offset_log(world: World) -> type[Exception] | None:
    newest = world.checker.committed_epoch
    if newest < 0 or world.checkpoint.recorded is not None:
        return None
    world.checkpoint.forget_from(newest)
    if world.dice.random() < 0.5:
        # A start that did not look at the manifest has planned it again, with more input.
        world.checkpoint.log_offsets(newest, dict(world.available), world.sources)
    world.plan.struck[Fault.OFFSET_LOG_LOST] += 1
    return None


def _replace_offsets(world: World) -> type[Exception] | None:
    """Another driver's entry takes the place of the one that the newest epoch ran with."""
    newest = world.checker.committed_epoch
    if newest < 0 or world.checkpoint.recorded is not None:
        return None
    was_done = newest in world.checkpoint.commits
    is_longer = world.dice.random() < 0.5
    ends = dict(world.available if is_longer else world.checkpoint.start_of(newest))
    world.checkpoint.forget_from(newest)
    world.checkpoint.log_offsets(newest, ends, world.sources)
    if was_done:
        world.checkpoint.log_commit(newest)
    world.release_input()  # else there may be nothing to plan
    world.plan.struck[Fault.OFFSET_LOG_REPLACED] += 1
    return None


def _set_back_token(world: World) -> type[Exception] | None:
    """Kafka has an older token, as after an unclean election; the rows in between are there."""
    named = manifest.manifests(world.checkpoint.files)
    newest = world.checker.committed_epoch
    # A loop of our own that ended in order has noted its newest epoch.
    known = newest if world.checkpoint.recorded is not None else newest - 1
    old = [path for path in named if manifest.epoch_of(path) < known]
    if not old:
        return None
    path = world.dice.choice(old)
    where = world.checkpoint
    token = Token(manifest.epoch_of(path), where.lineage, where.location, path)
    world.sink.offsets[TOKEN] = encode_token(token)
    return DataLossError


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
    newest_committed, has_loop = world.checker.committed_epoch, old.recorded is not None
    if TOKEN not in world.sink.offsets or newest_committed < (FIRST_EPOCH if has_loop else 0):
        return None  # what has committed nothing may begin anew anywhere
    newest = max(old.offsets)
    ends = old.offsets[newest]
    recorded = None if old.recorded is None else {0: ends}
    world.checkpoint = Checkpoint("lineage-2", "sim:/checkpoint-2", ends, recorded=recorded)
    world.checker.begin(world.checkpoint, -1)
    return DataLossError


def _delete_state_file(world: World) -> type[Exception] | None:
    load = _take_needed_file(world)
    if load is None:
        return None
    del world.checkpoint.files[load.file.path]
    return StateFileError


def _damage_state_file(world: World) -> type[Exception] | None:
    """Cut it short, or change a byte that somebody reads: of its index, or of an entry."""
    load = _take_needed_file(world)
    if load is None:
        return None
    file, files = load.file, world.checkpoint.files
    data = bytearray(files[file.path])
    segments = parse_index(bytes(data[file.size - file.index_size :]), file.checksum)
    spans = [range(file.size - file.index_size, file.size)]
    if load.groups == (file.groups,):
        spans += [range(segment.offset, segment.offset + segment.length) for segment in segments]
    if world.dice.random() < 0.3:
        del data[-1]
    else:
        data[world.dice.choice(world.dice.choice(spans))] ^= 1 << world.dice.randrange(8)
    files[file.path] = bytes(data)
    return StateFileError


def _take_needed_file(world: World) -> Load | None:
    """A file that the next rows will ask for: no host has a copy, and one task has all keys."""
    manifest_ = world.checkpoint.files.get(_named_manifest(world))
    step = next(iter(manifest.decode(manifest_, "").state), None) if manifest_ else None
    if step is None or not step.files:
        return None
    load = world.dice.choice(needed(step.files, KeyGroupRange(0, step.max_parallelism - 1)))
    world.backup = {load.file.path: world.checkpoint.files[load.file.path]}
    world.workers.hosts = [
        Host(host.number, losses=host.losses + 1) for host in world.workers.hosts
    ]
    world.workers.parallelism = 1
    return load


def _restore_savepoint(world: World) -> type[Exception] | None:
    """Take a savepoint, go on, and restore it: that needs a person's word, if any epoch came."""
    old, path = world.checkpoint, _named_manifest(world)
    if path not in old.files:
        return None
    decoded = manifest.decode(old.files[path], path)
    paths = [file.path for step in decoded.state for file in step.files]
    copies = {path: old.files[path] for path in paths}
    taken = Savepoint("one", "now", old.location, path, decoded)
    if world.dice.random() < 0.8:
        world.run_quietly()
        world.release_input()
    seed = seed_of(taken, "sim:/savepoint", "lineage-2")
    epoch, newest = decoded.checkpoint_id, world.checker.committed_epoch
    world.repeated = rows_between(old.offsets[epoch], old.offsets[newest])
    new = Checkpoint(
        "lineage-2",
        "sim:/checkpoint-2",
        old.base,
        {manifest.manifest_path(seed, f"{manifest.SEED}1"): seed.encode(), **copies},
    )
    if old.recorded is not None:
        new.recorded = {number: ends for number, ends in old.recorded.items() if number <= epoch}
    for number, ends in old.offsets.items() if old.recorded is None else ():
        if number <= epoch:
            new.log_offsets(number, ends, world.sources)
    for number in old.commits:
        if number <= epoch:
            new.log_commit(number)
    world.checkpoint = new
    world.checker.begin(new, epoch)
    is_asked = newest > epoch or world.decided_by == CHECKPOINT  # the new log knows nothing
    return DataLossError if is_asked else None


def _damage_decision(world: World) -> type[Exception] | None:
    files = world.checkpoint.files
    newest = max((path for path in files if path.startswith(DECISIONS)), default="")
    if not newest or world.sinks is None:
        return None
    world.sinks.slots_were_changed()
    files[newest] = world.dice.choice((b"", files[newest][:-4], files[newest].replace(b"1", b"2")))
    return ManifestError


def _change_decider(world: World) -> type[Exception] | None:
    """Kafka in the log's place, the log in Kafka's, or another transactional id."""
    if not any(path.startswith(manifest.FOLDER) for path in world.checkpoint.files):
        return None  # nobody has decided anything yet
    world.has_other_decider = True
    return OptionError


def _change_meaning(world: World) -> type[Exception] | None:
    """Start with another function of the same name and type, which finds the first one's state."""
    data = world.checkpoint.files.get(_named_manifest(world)) if world.is_keyed else None
    if data is None or not any(step.fields for step in manifest.decode(data, "").state):
        return None
    world.workers.counted = "what the records say"
    return OptionError


def _set_back_site(world: World) -> type[Exception] | None:
    """Epochs get their numbers a second time, with other rows; then a host comes back from then."""
    if world.sinks is not None:
        return None  # what they show cannot be set back
    kafka, checkpoint = world.sink.image(), copy.deepcopy(world.checkpoint)
    world.run_quietly()
    hosts = copy.deepcopy(world.workers.hosts)
    world.sink.put_back(kafka)
    world.checkpoint = checkpoint
    world.checker.begin(checkpoint, max(checkpoint.offsets, default=-1))
    world.release_input()
    world.run_quietly()
    world.workers.hosts = hosts
    world.release_input()
    world.plan.struck[Fault.SITE_SET_BACK] += 1
    return None


def _named_manifest(world: World) -> str:
    token = world.token()
    return "" if token is None else token.manifest_path


ACTS: dict[Fault, Callable[[World], type[Exception] | None]] = {
    Fault.TOKEN_EXPIRED: _expire_token,
    Fault.TOKEN_OVERWRITTEN: _overwrite_token,
    Fault.CHECKPOINT_SET_BACK: _set_back_checkpoint,
    Fault.OFFSET_LOG_LOST: _lose_offset_log,
    Fault.OFFSET_LOG_REPLACED: _replace_offsets,
    Fault.TOKEN_SET_BACK: _set_back_token,
    Fault.MANIFEST_DELETED: _delete_manifest,
    Fault.MANIFEST_CORRUPTED: _corrupt_manifest,
    Fault.OTHER_CHECKPOINT: _start_elsewhere,
    Fault.STATE_FILE_DELETED: _delete_state_file,
    Fault.STATE_FILE_DAMAGED: _damage_state_file,
    Fault.OLD_SAVEPOINT: _restore_savepoint,
    Fault.SITE_SET_BACK: _set_back_site,
    Fault.DECISION_DAMAGED: _damage_decision,
    Fault.OTHER_DECIDER: _change_decider,
    Fault.OTHER_MEANING: _change_meaning,
}
