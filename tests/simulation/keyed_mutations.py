"""Keyed state broken on purpose, one way at a time; entered in the table of `mutations`."""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa

from tallystick.checkpoint import collection, state_files
from tallystick.epoch import verdict
from tallystick.errors import StateFileError
from tallystick.state import compatibility, evolution, file_sets
from tallystick.state.catalog import CHANGELOG, SNAPSHOT, StateFile, StepState, Version
from tallystick.state.file_sets import Load, epoch_of
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.overlay import EmptyView
from tallystick.tasks import epoch_plan, event_times, keyed, read_plan
from tallystick.tasks.epoch_plan import EpochPlan, PipelinePlan
from tallystick.tasks.frames import Note
from tallystick.tasks.keyed import ProcessPlan
from tests.simulation.faults import Fault
from tests.simulation.hosts import SimulatedStore
from tests.simulation.mutations import MUTATIONS, Mutation
from tests.simulation.mutations import mutation as entered

NONCE_LENGTH = 16
"""What follows it in a name is not drawn: it says what the file is."""


def mutation(sentence: str, where: Any, name: str, *needs: Fault) -> Callable[[Any], Any]:
    """Enter the decorated function, from the original to the broken one, in the table."""
    return entered(sentence, where, name, *needs, is_keyed=True)


# What an epoch starts from, and what it leaves.


@mutation("an epoch without rows drops the state", PipelinePlan, "carried", Fault.EMPTY_EPOCH)
def _(_: Any) -> Any:
    return lambda self, state: ()


@mutation(
    "attempts are not compared",
    epoch_plan,
    "check_same_attempts",
    Fault.TASK_AGAIN,
    Fault.WHIM,
)
def _(_: Any) -> Any:
    return lambda sources: None


@mutation(
    "the state is of an attempt whose rows were not used",
    EpochPlan,
    "_check_complete",
    Fault.TASK_AGAIN,
    Fault.WHIM,
)
def _(_: Any) -> Any:
    """The first file of the task and epoch that lies in the folder, whoever wrote it."""

    def check_heard(self: Any, reports: Any, notes: list[Any]) -> None:
        storage = self.plans[0].worker_host.storage()
        step = self.plans[0].base
        for at, note in enumerate(notes):
            prefix = f"{state_files.FOLDER}/{step.uid}/{self.version.epoch:012d}-{note.index}-"
            names = storage.names(f"{state_files.FOLDER}/{step.uid}")
            names_found = [
                name
                for name in names
                if name.startswith(prefix) and name.endswith(CHANGELOG) and "-merged" not in name
            ]
            files = [_described(name, storage.get(name)) for name in names_found[:1]]
            kept = [file for file in note.files if file.epoch != self.version.epoch]
            notes[at] = replace(note, files=(*kept, *files))

    return check_heard


def _described(path: str, data: bytes) -> StateFile:
    """What the manifest would say of a changelog."""
    index_size = int.from_bytes(data[-12:-8], "little")
    checksum = zlib.crc32(data[-index_size:])
    segments = state_files.parse_index(data[-index_size:], checksum)
    return StateFile(
        path=path,
        kind=CHANGELOG,
        epoch=epoch_of(path) or 0,
        first=segments[0].first,
        last=segments[-1].last,
        size=len(data),
        index_size=index_size,
        checksum=checksum,
        rows=sum(segment.rows for segment in segments),
    )


@mutation("a partition that an epoch does not read loses its times", event_times, "_times_after")
def _(original: Any) -> Any:
    return lambda base, *read, **settings: original(
        replace(base, partition_times=()), *read, **settings
    )


@mutation(
    "the event times of all attempts of a reader count",
    read_plan,
    "send",
    Fault.TASK_AGAIN,
    Fault.WHIM,
)
def _(original: Any) -> Any:
    """Not only those that came with the rows that are used."""
    notes_of_outlet: dict[tuple[int, int], tuple[Any, list[Note]]] = {}

    def send(outlet: Any, batches: Any, source: int, notes: Any, *attempt: int) -> Any:
        def notes_of_all() -> list[Note]:
            _, notes_known = notes_of_outlet.setdefault((id(outlet), source), (outlet, []))
            notes_known += notes()
            return notes_known

        return original(outlet, batches, source, notes_of_all, *attempt)

    return send


@mutation("attempts of a task write the same file", state_files, "_path", Fault.LOST_PUT)
def _(original: Any) -> Any:
    return lambda uid, epoch, index, nonce, kind: original(
        uid, epoch, index, "same" + nonce[NONCE_LENGTH:], kind
    )


@mutation(
    "changes go into the local copy before they are committed",
    ProcessPlan,
    "_processed",
    Fault.DISK_FULL,
)
def _(original: Any) -> Any:
    def processed(
        self: Any, slices: Any, view: Any, changes: list[Any], context: Any
    ) -> Iterator[Any]:
        parts = list(slices)
        yield from original(self, parts, view, changes, context)
        version = self.base.version
        if version is not None:
            groups = KeyGroupRange(parts[0][0].first, parts[-1][0].last)
            store = self.worker_host.store(self.base.uid, groups)
            for changed in changes:
                store.apply(version, version, changed.to_batches())

    return processed


@mutation(
    "a snapshot goes after the changes that follow it", ProcessPlan, "_rewritten", Fault.REWRITTEN
)
def _(original: Any) -> Any:
    """It is told as the epoch's own: a snapshot after the changes of that epoch."""

    def rewritten(self: Any, *arguments: Any) -> Iterator[StateFile]:
        for file in original(self, *arguments):
            yield replace(file, epoch=self.checkpoint_id, first_epoch=None)

    return rewritten


# What a copy needs to become what is committed.


@mutation("a stale copy is taken for the current one", keyed, "bring_forward")
def _(original: Any) -> Any:
    def bring_forward(store: Any, step: StepState, groups: Any, storage: Any) -> Any:
        have = store.version()
        if have is not None and have != step.version:
            store.apply(have, step.version, ())
        return original(store, step, groups, storage)

    return bring_forward


@mutation("versions are epoch numbers", epoch_plan, "Version", Fault.SITE_SET_BACK)
def _(_: Any) -> Any:
    return lambda epoch, token: Version(epoch, "")


def _steps(change: Callable[[list[Any], Any], list[Any]]) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def steps_from(step: StepState, have: Any, groups: KeyGroupRange) -> list[Any]:
            is_known = have in step.trail
            return change(original(step, have, groups), is_known)

        return steps_from

    return make


def _unordered(steps: list[Any], _: bool) -> list[Any]:
    """Changelogs first, then what they stand over."""
    loads = [step for step in steps if isinstance(step, Load)]
    clears = [step for step in steps if not isinstance(step, Load)]
    return clears + sorted(loads, key=lambda load: load.file.kind == SNAPSHOT)


def _laid_over(steps: list[Any], is_known: bool) -> list[Any]:
    return [step for step in steps if isinstance(step, Load)] if is_known else steps


def _without_snapshots(steps: list[Any], _: bool) -> list[Any]:
    return [step for step in steps if not (isinstance(step, Load) and step.file.kind == SNAPSHOT)]


for sentence, change, needs in (
    ("a changelog is applied before its snapshot", _unordered, (Fault.REWRITTEN, Fault.TASK_MOVED)),
    ("a snapshot is laid over an old copy", _laid_over, (Fault.REWRITTEN, Fault.TASK_MOVED)),
    ("snapshots are not read", _without_snapshots, (Fault.REWRITTEN, Fault.TASK_MOVED)),
):
    MUTATIONS[sentence] = Mutation(
        frozenset(needs), state_files, "steps_from", _steps(change), is_keyed=True
    )


@mutation("a file of several tasks' ranges is forgotten", state_files, "steps_from", Fault.RESCALED)
def _(original: Any) -> Any:
    def steps_from(step: StepState, have: Any, groups: KeyGroupRange) -> list[Any]:
        whole = [file for file in step.files if file.groups.intersection(groups) == file.groups]
        return original(replace(step, files=tuple(whole)), have, groups)

    return steps_from


@mutation("a merged file lacks one that it stands for", keyed, "write_merged", Fault.REWRITTEN)
def _(original: Any) -> Any:
    def write_merged(*arguments: Any, **further: Any) -> StateFile:
        *name, loads = arguments
        return original(*name, (loads[0], *loads[2:]), **further)

    return write_merged


@mutation("a snapshot has only half of its entries", keyed, "write_snapshot", Fault.REWRITTEN)
def _(original: Any) -> Any:
    class Half:
        """Every second entry."""

        def __init__(self, view: Any) -> None:
            self._view = view

        def batches(self, groups: KeyGroupRange) -> Iterator[pa.RecordBatch]:
            for batch in self._view.batches(groups):
                yield batch.take(list(range(0, batch.num_rows, 2)))

    def write_snapshot(*arguments: Any, **further: Any) -> StateFile:
        *name, view, groups = arguments
        return original(*name, Half(view), groups, **further)

    return write_snapshot


# The copies on the hosts: what the shell leans on.


@mutation("a copy that was lost meanwhile counts as empty", ProcessPlan, "_view", Fault.COPY_LOST)
def _(original: Any) -> Any:
    def view(self: Any, stack: Any, groups: KeyGroupRange, storage: Any) -> Any:
        if self.base.version is None:
            return EmptyView()
        store = self.worker_host.store(self.base.uid, groups)
        state_files.bring_forward(store, self.base, groups, storage)
        return stack.enter_context(store.view(self.base.version)) or EmptyView()

    return view


@mutation(
    "a copy has its new version before it is whole",
    SimulatedStore,
    "begin",
    Fault.TASK_KILLED,
    Fault.TASK_MOVED,
)
def _(_: Any) -> Any:
    def begin(self: Any, copy: Any, version: Version) -> None:
        copy.version = version

    return begin


@mutation(
    "a copy does not check what a change starts from",
    SimulatedStore,
    "may_begin",
    Fault.TAKEOVER,
)
def _(_: Any) -> Any:
    return lambda self, copy, expected: True


@mutation(
    "a change of a copy goes on though another one began",
    SimulatedStore,
    "is_at_work",
    Fault.TAKEOVER,
)
def _(_: Any) -> Any:
    return lambda self, copy, change: True


# What is removed, and what is missing.


@mutation("a file that is needed is removed", collection, "collectable", Fault.COLLECTED)
def _(_: Any) -> Any:
    return lambda names, epoch, retained: [name for name in names if (epoch_of(name) or 0) < epoch]


@mutation(
    "the files of a racing successor are removed",
    collection,
    "collectable",
    Fault.COLLECTED,
    Fault.TAKEOVER,
)
def _(original: Any) -> Any:
    return lambda names, epoch, retained: original(names, 1 << 40, retained)


def _left_out(what: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def read(self: Any, load: Load) -> Iterator[pa.RecordBatch]:
            try:
                yield from original(self, load)
            except StateFileError as error:
                if what not in str(error):
                    raise

        return read

    return make


for sentence, what, needed in (
    ("a missing file of state is left out", "missing", Fault.STATE_FILE_DELETED),
    ("a damaged file of state is left out", "damaged", Fault.STATE_FILE_DAMAGED),
):
    MUTATIONS[sentence] = Mutation(
        frozenset({needed}), state_files._Reader, "read", _left_out(what), is_keyed=True
    )


# What a state means.


@mutation(
    "what a state means is not compared at a start", compatibility, "changes", Fault.OTHER_MEANING
)
def _(_: Any) -> Any:
    return lambda before, now: iter(())


@mutation("a manifest does not hold what a state means", epoch_plan, "settle", Fault.OTHER_MEANING)
def _(original: Any) -> Any:
    def settle(*arguments: Any, **named: Any) -> Any:
        fields, next_id = original(*arguments, **named)
        return tuple(replace(field, meaning=()) for field in fields), next_id

    return settle


# A program that changes.


@mutation("a copy of the program before is taken", StepState, "copy_name", Fault.PROGRAM_CHANGED)
def _(_: Any) -> Any:
    return property(lambda step: step.uid)


@mutation("files do not name their schema", epoch_plan, "extend", Fault.PROGRAM_CHANGED)
def _(original: Any) -> Any:
    def extend(base: StepState, *rest: Any) -> StepState:
        after = original(replace(base, schema="", former=()), *rest)
        return replace(after, schema=base.schema, former=base.former)

    return extend


@mutation("entries stay in their schema", state_files, "converted", Fault.PROGRAM_CHANGED)
def _(_: Any) -> Any:
    return lambda entries, step, schema: entries


@mutation("an expiry has no place in the index", evolution, "with_expiries", Fault.PROGRAM_CHANGED)
def _(_: Any) -> Any:
    return lambda entries, *rest: entries


@mutation("the index has an expiry that no value has", evolution, "with_ttl", Fault.PROGRAM_CHANGED)
def _(_: Any) -> Any:
    return lambda values, *rest: values


@mutation("a former schema is forgotten too early", file_sets, "_former_of", Fault.PROGRAM_CHANGED)
def _(_: Any) -> Any:
    return lambda base, files: base.former[-1:]


# Savepoints.


@mutation(
    "an old savepoint goes on without being asked",
    verdict,
    "_goes_on_exactly",
    Fault.OLD_SAVEPOINT,
)
def _(_: Any) -> Any:
    return lambda token, seed: seed is not None


@mutation("a restored savepoint begins without its state", verdict, "_open", Fault.OLD_SAVEPOINT)
def _(original: Any) -> Any:
    def open_(*arguments: Any) -> verdict.Verdict:
        judged = original(*arguments)
        return verdict.Open() if isinstance(judged, verdict.Open) else judged

    return open_
