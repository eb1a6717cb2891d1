"""The core broken on purpose, one way at a time, and the kind of fault that must bring it to light.

Each mutation replaces one thing, in process, while `broken()` is entered. `needs` are the kinds of
faults that have to strike for it to matter: with only those, some seed must fail; without any of
them, none may (else it would say nothing about the fault). Where there are none, nothing has to go
wrong for it to be found.
"""

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from tallystick.checkpoint.spark_log import SparkLog
from tallystick.codec import output_records
from tallystick.codec.records.encoder import EncodedBatch
from tallystick.epoch import manifest as m
from tallystick.epoch import micro_batches, verdict
from tallystick.epoch import protocol as c
from tallystick.epoch.coordinator import Coordinator
from tallystick.epoch.facts import CommittedEpoch
from tallystick.epoch.phases import CommittingPhase, FencingPhase, RunningPhase
from tallystick.epoch.tokens import Token, encode_token
from tallystick.errors import (
    DataLossError,
    ManifestError,
    RetriableError,
    StorageError,
)
from tallystick.run import driver as driver_module
from tallystick.run.driver import Driver
from tallystick.run.transaction_decider import TransactionDecider
from tallystick.source.offsets import shown
from tallystick.spark.streaming import micro_batch
from tallystick.tasks.frames import Frame
from tallystick.tasks.read import Report, WritePlan
from tallystick.values import Producer
from tests.simulation.faults import Fault
from tests.simulation.kafka_cluster import KafkaCluster

Replacement = Callable[[], Any]


@dataclass(frozen=True)
class Mutation:
    """One way to break it: `where.name` becomes what `make` makes of the original.

    `decided_by`: who decides for other sinks, as manifests name it; empty: there are none.
    """

    needs: frozenset[Fault]
    where: Any
    name: str
    make: Callable[[Any], Any]
    is_keyed: bool = False
    decided_by: str = ""
    has_loop: bool = False
    has_gang: bool = False
    has_two_inputs: bool = False
    has_windows: bool = False
    has_operator_state: bool = False
    has_end: bool = False

    @property
    def pipeline(self) -> dict[str, Any]:
        """The pipeline that has what it breaks; see `pipelines.pipeline_of`."""
        names = (
            "is_keyed",
            "decided_by",
            "has_loop",
            "has_gang",
            "has_two_inputs",
            "has_windows",
            "has_operator_state",
            "has_end",
        )
        return {name: getattr(self, name) for name in names}

    @contextmanager
    def broken(self) -> Iterator[None]:
        """Be broken for a while."""
        original = getattr(self.where, self.name)
        with patch.object(self.where, self.name, self.make(original)):
            yield


MUTATIONS: dict[str, Mutation] = {}


def mutation(
    sentence: str, where: Any, name: str, *needs: Fault, **pipeline: Any
) -> Callable[[Any], Any]:
    """Enter the decorated function, from the original to the broken one, in the table.

    Args:
        sentence: what is broken.
        where: the module or class of what is replaced.
        name: of it there.
        needs: see `Mutation`.
        pipeline: see `Mutation`.
    """

    def enter(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        MUTATIONS[sentence] = Mutation(frozenset(needs), where, name, make, **pipeline)
        return make

    return enter


@mutation("a start with another decider goes on", driver_module, "claim", Fault.OTHER_DECIDER)
def _(_: Any) -> Any:
    return lambda checkpoint, decider: None


# What is done in which order.


@mutation("the manifest is written after the commit", Driver, "_perform", Fault.CRASH_BEFORE)
def _(original: Any) -> Any:
    def perform(self: Any, action: c.Action, running: Any) -> c.Event:
        if isinstance(action, c.WriteManifest):
            self.late_manifest = action.manifest
            return c.ManifestWritten(m.manifest_path(action.manifest, "late"))
        event = original(self, action, running)
        if isinstance(action, c.CommitTransaction) and action.token.manifest_path:
            self._folder.storage.put(action.token.manifest_path, self.late_manifest.encode())
        return event

    return perform


@mutation("Kafka is asked before earlier runs are fenced", Driver, "_perform", Fault.TAKEOVER)
def _(original: Any) -> Any:
    def perform(self: Any, action: c.Action, running: Any) -> c.Event:
        if isinstance(action, c.FenceProducer):
            with contextlib.suppress(RetriableError):
                self.stale = self._read_committed()
        stale = self.__dict__.pop("stale", None) if isinstance(action, c.ReadCommitted) else None
        if stale is not None and stale.token is not None:
            return c.CommittedRead(stale)
        return original(self, action, running)

    return perform


def _answers_unstable(original: Any) -> Any:
    """The token as it is now, whatever is pending; asked for before fencing."""

    def perform(self: Any, action: c.Action, running: Any) -> c.Event:
        cluster = self._decider._broker._cluster
        if isinstance(action, c.FenceProducer):
            staged, cluster._staged = cluster._staged, {}
            try:
                self.stale = self._read_committed()
            finally:
                cluster._staged = staged
        stale = self.__dict__.pop("stale", None) if isinstance(action, c.ReadCommitted) else None
        if stale is not None and stale.token is not None:
            return c.CommittedRead(stale)
        return original(self, action, running)

    return perform


for fault in (Fault.LATE_EFFECT, Fault.CRASH_LATE):
    MUTATIONS[f"Kafka is asked before fencing, for unstable offsets ({fault.name.lower()})"] = (
        Mutation(frozenset({fault}), Driver, "_perform", _answers_unstable)
    )


def _positions(decider: TransactionDecider, sources: Any) -> Iterator[tuple[str, Any]]:
    """The groups whose positions travel with the transaction, and those."""
    for source in sources:
        if source.cluster_id == decider.name.cluster_id:
            yield source.group, {place: (offset, "") for place, offset in shown(source).items()}


@mutation("the token is committed after the rows", TransactionDecider, "stage", Fault.CRASH_AFTER)
def _(original: Any) -> Any:
    def stage(self: Any, producer: Producer, token: Token, sources: Any) -> None:
        if not token.manifest_path:
            return original(self, producer, token, sources)
        for group, positions in _positions(self, sources):
            self._broker.stage_offsets(producer, group, positions)
        offsets = {self._target.token_partition: encode_token(token)}
        _after_commit(self, lambda: self._broker.commit_offsets(self._target.token_group, offsets))

    return stage


@mutation("the token is committed before the rows", TransactionDecider, "stage", Fault.REFUSED)
def _(original: Any) -> Any:
    def stage(self: Any, producer: Producer, token: Token, sources: Any) -> None:
        offsets = {self._target.token_partition: encode_token(token)}
        self._broker.commit_offsets(self._target.token_group, offsets)
        original(self, producer, token, sources)

    return stage


@mutation("positions are committed after the rows", TransactionDecider, "stage", Fault.CRASH_AFTER)
def _(original: Any) -> Any:
    def stage(self: Any, producer: Producer, token: Token, sources: Any) -> None:
        original(self, producer, token, ())
        staged = list(_positions(self, sources))

        def commit() -> None:
            for group, positions in staged:
                self._broker.commit_offsets(group, positions)

        _after_commit(self, commit)

    return stage


def _after_commit(decider: Any, commit: Callable[[], None]) -> None:
    """Have the next commit of a decider followed by another one."""

    def decide(producer: Producer, token: Token) -> Producer:
        del decider.decide
        following = type(decider).decide(decider, producer, token)
        commit()
        return following

    decider.decide = decide


def _when_commit_fails(do: Callable[[Any, Exception], c.Action]) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def broken(self: Any, error: Exception) -> c.Action:
            if isinstance(self._state, CommittingPhase) and isinstance(error, RetriableError):
                return do(self, error)
            return original(self, error)

        return broken

    return make


def _run_again(self: Any, _: Exception) -> c.Action:
    """The next answer to what is committed is the one from before the commit."""
    self.deaf_in = self._state
    self._state = FencingPhase(self._state.goal)
    return c.FenceProducer(self._owner)


def _deaf_step(original: Any) -> Any:
    broken = _when_commit_fails(_run_again)(Coordinator._broken)

    def step(self: Any, event: c.Event) -> c.Action:
        match event:
            case c.ActionFailed(error) if isinstance(self._state, CommittingPhase):
                return broken(self, error)
            case c.CommittedRead(_) if getattr(self, "deaf_in", None):
                undecided, self.deaf_in = self.deaf_in, None
                self._state = RunningPhase(undecided.goal, undecided.manifest.base_path)
                return c.RunEpoch(undecided.manifest.checkpoint_id, self._producer)
        return original(self, event)

    return step


MUTATIONS["an unanswered commit is aborted, and the epoch run again"] = Mutation(
    frozenset({Fault.LOST_REPLY}), Coordinator, "step", _deaf_step
)
MUTATIONS["an unanswered commit counts as done"] = Mutation(
    frozenset({Fault.TRANSACTION_TIMEOUT}),
    Coordinator,
    "_broken",
    _when_commit_fails(lambda self, _: self._after_commit(self._producer)),
)


# What is retried, and by whom.


@mutation("a live driver takes over", Coordinator, "_fence_again", Fault.TAKEOVER)
def _(original: Any) -> Any:
    def fence_again(self: Any, goal: Any, error: Exception) -> c.Action:
        action = original(self, goal, error)
        return c.FenceProducer(None) if isinstance(action, c.FenceProducer) else action

    return fence_again


@mutation("a replaced driver blames the checkpoint", Coordinator, "_refuse", Fault.TAKEOVER)
def _(_: Any) -> Any:
    return lambda self, goal, error: self._stop(error)


@mutation("an epoch is tried for ever", Coordinator, "_broken", Fault.OUTAGE)
def _(original: Any) -> Any:
    def broken(self: Any, error: Exception) -> c.Action:
        if goal := getattr(self._state, "goal", None):
            endless = replace(goal, tries=replace(goal.tries, attempt=0))
            self._state = replace(self._state, goal=endless)
        return original(self, error)

    return broken


@mutation("a failed manifest write is ignored", Driver, "_attempt", Fault.DISK_FULL)
def _(original: Any) -> Any:
    def attempt(self: Any, action: c.Action, running: Any) -> c.Event:
        event = original(self, action, running)
        match action, event:
            case c.WriteManifest(manifest), c.ActionFailed(StorageError()):
                return c.ManifestWritten(m.manifest_path(manifest, "lost"))
        return event

    return attempt


@mutation("a failed task is ignored", WritePlan, "write", Fault.TASK_KILLED)
def _(original: Any) -> Any:
    return lambda *arguments: replace(original(*arguments), failure=None)


# What is found at a start.


def _newest_manifest_decides(original: Any) -> Any:
    def read(self: Any) -> CommittedEpoch:
        committed = original(self)
        names = list(m.manifests(self._folder.storage.names(m.FOLDER)))
        if committed.token is None or not names:
            return committed
        data = self._folder.storage.get(names[-1])
        manifest = m.decode(data, names[-1])
        token = replace(
            committed.token, checkpoint_id=manifest.checkpoint_id, manifest_path=names[-1]
        )
        return CommittedEpoch(token, manifest, manifest_exists=True)

    return read


for fault in (Fault.LOST_PUT, Fault.LATE_PUT):
    MUTATIONS[f"the newest manifest decides ({fault.name.lower()})"] = Mutation(
        frozenset({fault, Fault.CRASH_BEFORE}), Driver, "_read_committed", _newest_manifest_decides
    )


def _judge(change: Callable[..., Any]) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def judge(request: Any, committed: CommittedEpoch, identity: Any) -> verdict.Verdict:
            changed = change(request, committed, identity)
            return original(request, committed, identity) if changed is None else changed

        return judge

    return make


def _no_first_token(request: Any, committed: CommittedEpoch, _: Any) -> verdict.Verdict | None:
    if committed.token is None and not committed.manifest_exists:
        return verdict.Run()
    return None


def _none_is_first(_: Any, committed: CommittedEpoch, __: Any) -> verdict.Verdict | None:
    return verdict.Open() if committed.token is None else None


def _any_epoch(request: Any, committed: CommittedEpoch, _: Any) -> verdict.Verdict | None:
    token = committed.token
    ahead = token is not None and token.checkpoint_id > request.checkpoint_id
    return verdict.Run() if ahead else None


def _any_lineage(request: Any, committed: CommittedEpoch, identity: Any) -> verdict.Verdict | None:
    token = committed.token
    if token is not None and token.lineage != identity.lineage:
        return verdict.Open()
    return None


def _any_sources(request: Any, committed: CommittedEpoch, _: Any) -> verdict.Verdict | None:
    token, manifest = committed.token, committed.manifest
    if token is not None and manifest is not None:
        return (
            verdict.AlreadyCommitted(manifest)
            if token.checkpoint_id == request.checkpoint_id
            else None
        )
    return None


def _any_sources_before(request: Any, committed: CommittedEpoch, _: Any) -> verdict.Verdict | None:
    token = committed.token
    if token is not None and token.checkpoint_id == request.checkpoint_id - 1:
        return verdict.Run() if committed.manifest is not None else None
    return None


def _no_manifest_needed(request: Any, committed: CommittedEpoch, _: Any) -> verdict.Verdict | None:
    token = committed.token
    if token is not None and token.checkpoint_id == request.checkpoint_id - 1:
        return verdict.Run()
    return None


for sentence, change, fault_found_by in (
    ("a lineage begins without a token", _no_first_token, Fault.CRASH_BEFORE),
    ("no token means first run", _none_is_first, Fault.TOKEN_EXPIRED),
    ("an older epoch is run again", _any_epoch, Fault.CHECKPOINT_SET_BACK),
    ("another checkpoint's token is ignored", _any_lineage, Fault.OTHER_CHECKPOINT),
    ("offsets are not compared when done", _any_sources, Fault.OFFSET_LOG_LOST),
    (
        "the end of the epoch before is not compared",
        _any_sources_before,
        Fault.OFFSET_LOG_REPLACED,
    ),
    ("a missing manifest is ignored", _no_manifest_needed, Fault.MANIFEST_DELETED),
):
    MUTATIONS[sentence] = Mutation(frozenset({fault_found_by}), verdict, "judge", _judge(change))


# Spark's log, and the user's function that stands between Spark and the driver.


FAILS = (Fault.CAUGHT, Fault.OUTAGE)
TWICE = (Fault.CAUGHT, Fault.CALLED_TWICE, Fault.LOST_REPLY, Fault.OUTAGE)
TWICE_OVER = (Fault.CAUGHT, Fault.CALLED_TWICE, Fault.CRASH_AFTER, Fault.OUTAGE)
CUT = (Fault.CRASH_AFTER, Fault.POWER_CUT)


@mutation("Spark's log is not synced before the decision", SparkLog, "sync", *CUT)
def _(_: Any) -> Any:
    return lambda self, batch_id: None


@mutation("what a power cut has torn is left in Spark's log", SparkLog, "mend", *CUT)
def _(_: Any) -> Any:
    return lambda self: None


@mutation("Spark's log is not put right", SparkLog, "put_right", Fault.OFFSET_LOG_REPLACED)
def _(_: Any) -> Any:
    return lambda self, *_: None


@mutation(
    "what was planned after a wrong end stays", SparkLog, "_remove", Fault.OFFSET_LOG_REPLACED
)
def _(_: Any) -> Any:
    return lambda self, folder, batch_id: None


@mutation("a micro-batch cannot be left out", verdict, "_follows", Fault.LEFT_OUT)
def _(_: Any) -> Any:
    return lambda request, token, *_: token.checkpoint_id == request.checkpoint_id - 1


@mutation("any gap is of micro-batches left out", verdict, "_follows", Fault.TOKEN_SET_BACK)
def _(_: Any) -> Any:
    return lambda request, token, *_: token.checkpoint_id < request.checkpoint_id


@mutation("a second call is taken for a replay", micro_batch, "run_micro_batch", Fault.CALLED_TWICE)
def _(original: Any) -> Any:
    def run_micro_batch(driver: Driver, folder: Any, request: Any, engine: Any) -> None:
        newest = driver.coordinator.committed_manifest
        if newest is None or newest.checkpoint_id != request.checkpoint_id:
            original(driver, folder, request, engine)

    return run_micro_batch


@mutation("a second call is not noted", micro_batch, "_note_second_call", Fault.CALLED_TWICE)
def _(_: Any) -> Any:
    return lambda driver, folder, batch_id: micro_batch.second_call(driver.pipeline, batch_id)


@mutation(
    "a second call that knows no manifest is any call", micro_batches, "failure_paths", *TWICE_OVER
)
def _(original: Any) -> Any:
    return lambda paths, epoch, manifest_path, *, is_second: original(
        paths, epoch, manifest_path, is_second=is_second and bool(manifest_path)
    )


@mutation("a call that failed leaves no trace", micro_batches, "traces_between", *FAILS)
def _(_: Any) -> Any:
    return lambda paths, first, stop: ()


@mutation("a lineage opens after calls that failed", Driver, "_read_bases", *FAILS)
def _(original: Any) -> Any:
    return lambda self: replace(original(self), begun=())


@mutation("a second call after one that failed is forgotten", Driver, "_read_committed", *TWICE)
def _(original: Any) -> Any:
    return lambda self: replace(original(self), is_partial=False)


@mutation("the checksum is not verified", m, "decode", Fault.MANIFEST_CORRUPTED)
def _(original: Any) -> Any:
    def decode(data: bytes, path: str) -> m.Manifest:
        try:
            return original(data, path)
        except ManifestError:
            line = data.splitlines()[0]
            return original(line + b"\n%08x\n" % zlib.crc32(line), path)

    return decode


@mutation("a damaged token is taken for none", Driver, "_read_committed", Fault.TOKEN_OVERWRITTEN)
def _(original: Any) -> Any:
    def read(self: Any) -> CommittedEpoch:
        try:
            return original(self)
        except ManifestError:
            raise
        except DataLossError:
            return CommittedEpoch(None, None, manifest_exists=False)

    return read


# What is looked at before and after the commit.


@mutation("the output is not counted", Coordinator, "_check_count", Fault.RACING_ATTEMPT)
def _(original: Any) -> Any:
    return lambda self, _: original(self, None)


@mutation(
    "only partitions with reports are counted",
    Coordinator,
    "_check_count",
    Fault.STRAY_ELSEWHERE,
)
def _(original: Any) -> Any:
    def check_count(self: Any, last_sequences: Mapping[Any, int] | None) -> c.Action:
        known = {written.topic_partition for written in self._state.manifest.produced}
        kept = {p: last for p, last in (last_sequences or {}).items() if p in known}
        return original(self, None if last_sequences is None else kept)

    return check_count


@mutation(
    "the output is not confirmed",
    Coordinator,
    "_finish",
    Fault.RACING_ATTEMPT,
    Fault.COUNT_HIDDEN,
)
def _(original: Any) -> Any:
    return lambda self, _: original(self, {})


# What Kafka refuses as too large, and is cut.


def _cut(change: Callable[[list[EncodedBatch]], list[EncodedBatch]]) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        return lambda *batch: change(original(*batch))

    return make


for sentence, change_pieces in (
    ("a batch that is cut loses its last part", lambda pieces: pieces[:-1]),
    ("the last part of a batch that is cut goes out twice", lambda pieces: [*pieces, pieces[-1]]),
    ("the parts of a batch that is cut go out backwards", lambda pieces: pieces[::-1]),
):
    MUTATIONS[sentence] = Mutation(
        frozenset({Fault.BATCH_REFUSED}), output_records, "divided", _cut(change_pieces)
    )


# The guards of the tasks.


@mutation("a later attempt writes", WritePlan, "write", Fault.TASK_KILLED, Fault.COUNT_HIDDEN)
def _(original: Any) -> Any:
    return lambda self, frames, attempt_number: original(self, frames, 0)


@mutation(
    "a task does not look before it writes", WritePlan, "_check_untouched", Fault.EXECUTOR_LOST
)
def _(_: Any) -> Any:
    return lambda *_: None


def writes_on(original: Any) -> Any:
    """The last batch is sent once more, when the report is on its way: it is not the last one."""

    def write(self: Any, frames: Iterator[Frame], attempt_number: int) -> Report:
        opened, seen = [], []

        class Kept:
            def writer(_, producer: Any) -> Any:  # noqa: N805 - `self` is the plan
                opened.append(self.produce.writer(producer))
                return opened[0]

        def noted() -> Iterator[Frame]:
            for frame in frames:
                seen.extend([frame] if frame.record_count else [])
                yield frame

        report = original(replace(self, produce=Kept()), noted(), attempt_number)
        if report.produced:
            (writer,), last = opened, seen[-1]
            batch = last.topic_partition, EncodedBatch(last.record_count, last.data)
            self.produce.later(lambda: writer.write_on(batch))
        return report

    return write


MUTATIONS["a writer writes on after its report"] = Mutation(
    frozenset(), WritePlan, "write", writes_on
)


# Kafka itself: what the protocol leans on.


@mutation("Kafka does not fence writers", KafkaCluster, "_check_current", Fault.CRASH_BEFORE)
def _(_: Any) -> Any:
    return lambda self, producer: None


@mutation("fencing does not abort", KafkaCluster, "_abort_open", Fault.CRASH_AFTER)
def _(_: Any) -> Any:
    return lambda self: None
