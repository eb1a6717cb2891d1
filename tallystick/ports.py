"""Ports: interfaces to Kafka, Spark and storage.

The errors that a port raises are part of its contract:
    RetriableError        the same call may succeed later; whether it acted is unknown
    EpochAbortedError     the open transaction is lost, the epoch must run again
    FencedError           another run owns the transactional id
    anything else         final
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, runtime_checkable

import pyarrow as pa

from tallystick.codec.records.encoder import EncodedBatch
from tallystick.epoch.manifest import DeciderName
from tallystick.epoch.protocol import EpochRan
from tallystick.epoch.tokens import Token
from tallystick.epoch.two_phase import Committable, Lost
from tallystick.source.offsets import SourceOffsets
from tallystick.source.subscription import LossPolicy
from tallystick.state.catalog import StepState, Version
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.overlay import StateView
from tallystick.values import ProducedRange, Producer, SplitRange, TopicPartition


class Decider(Protocol):
    """Decides an epoch: a Kafka transaction, or the checkpoint's own log of decisions.

    A decision is one durable fact, a token. The run that fences as the newest owner, and only that
    run, can decide from then on; so no earlier run decides once this run has asked for the last
    decision.
    """

    @property
    def name(self) -> DeciderName:
        """The decider's name; a checkpoint has the same name from its first start on."""
        ...

    def fence(self, current: Producer | None) -> Producer:
        """Take over, abort earlier owners' open transactions, and return the producer from now on.

        With `current` it succeeds only as long as no other run took over since: another owner is a
        FencedError. Without (`None`) it takes over from any owner.
        """
        ...

    def check_owner(self, current: Producer) -> None:
        """Find out without a change if this run, whose producer is `current`, is the owner still.

        Raises:
            FencedError: another run has taken over.
            RetriableError: there was no answer, or only a fence with `current` would tell.
        """
        ...

    def last_decision(self) -> Token | None:
        """Return the token of the last decision, perhaps of another lineage; None: there is none.

        Raises:
            DataLossError: something else stands where the decision should be.
        """
        ...

    def stage(self, producer: Producer, token: Token, positions: Sequence[SourceOffsets]) -> None:
        """Add the token and the positions to the deciding transaction, if there is one.

        Comes before the last count of the transaction's rows, so that only the commit follows it.

        Args:
            producer: the owner.
            token: the decision.
            positions: the end of the epoch in each source, for consumer groups to show. They become
                visible with the decision where it can carry them: a transaction carries those on
                its own cluster.
        """
        ...

    def decide(self, producer: Producer, token: Token) -> Producer:
        """Decide an epoch, with the staged token, and return the producer of the next epoch.

        A RetriableError means that the outcome is unknown: fence with `current` and ask, never
        guess and never abort.
        """
        ...

    def abort(self, producer: Producer) -> None:
        """Abort the open transaction, if any, so that readers need not wait for its timeout."""
        ...

    def last_sequences(
        self, producer: Producer, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, int] | None:
        """Return `Broker.last_sequences` before the decision; nothing if no rows wait for it."""
        ...

    def foreign_rows(
        self, producer: Producer, produced: Iterable[ProducedRange]
    ) -> Mapping[TopicPartition, int]:
        """Return `Broker.foreign_rows` after the decision; nothing if no rows waited for it."""
        ...


class Broker(Protocol):
    """The requests to Kafka that `run.transaction_decider` makes."""

    def fence(self, transactional_id: str, current: Producer | None) -> Producer:
        """Abort the id's open transaction, fence the id's writers, and return a fresh producer.

        With `current` (InitProducerId with its id and epoch, KIP-360) it succeeds only as long as
        no other run took over since: its own timeout or a lost reply is fine, another owner is a
        FencedError. Without (`None`) it takes over from any owner.
        """
        ...

    def newest_producer(self, transactional_id: str) -> Producer | None:
        """Return the producer that Kafka admitted last; None: Kafka does not know the id.

        Asks by DescribeTransactions (KIP-664), which changes nothing.
        """
        ...

    def group_offsets(
        self, group: str, place: TopicPartition | None = None
    ) -> Mapping[TopicPartition, tuple[int, str]]:
        """Return all stable committed (offset, metadata) of a group, by partition.

        Waits for the outcome of pending transactions (OffsetFetch with require_stable, KIP-447);
        for the first offset of a partition only if that is the `place` that is asked about.
        """
        ...

    def stage_offsets(
        self,
        producer: Producer,
        group: str,
        offsets: Mapping[TopicPartition, tuple[int, str]],
        *,
        best_effort: bool = False,
    ) -> None:
        """Put (offset, metadata) per partition into the open transaction (TxnOffsetCommit).

        With `best_effort`, offsets of topics that are gone are left out: no restart needs them.
        """
        ...

    def last_sequences(
        self, producer: Producer, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, int] | None:
        """Return the producer epoch's last sequence number in each partition.

        Asks by DescribeProducers. Covers the given partitions and every other one that the open
        transaction touched: a stray attempt may have written where none reported. Partitions
        without a record of the epoch are absent.

        None: the cluster does not say (no READ on a topic), so the check cannot be made.
        """
        ...

    def commit_transaction(self, producer: Producer) -> Producer:
        """Commit (EndTxn), and return the producer of the next transaction.

        A RetriableError means that the outcome is unknown: fence with `current` and ask, never
        guess and never abort.
        """
        ...

    def abort_transaction(self, producer: Producer) -> None:
        """Abort the open transaction, if any, so that readers need not wait for its timeout."""
        ...

    def foreign_rows(
        self, producer: Producer, produced: Iterable[ProducedRange]
    ) -> Mapping[TopicPartition, int]:
        """Return how many rows Kafka committed beyond the reported ranges, by partition.

        Reads the producer epoch's rows from each range's last offset to the transaction's marker;
        partitions without foreign rows are absent.
        """
        ...


class Fetch(Protocol):
    """A reading task's access to records; a value that is pickled for the task's process."""

    def read(
        self, splits: Iterable[SplitRange], *, headers: bool, policy: LossPolicy
    ) -> Iterator[tuple[SplitRange, pa.RecordBatch]]:
        """Yield the visible records of all splits, in order within each split, each record once.

        Args:
            splits: the ranges to read; their ends are no later than the last stable offsets.
            headers: add a column of headers.
            policy: what to do about records that Kafka no longer has.

        Yields:
            Batches with the columns of `codec.records.decoder.RECORD_SCHEMA`, none of them empty.

        Raises:
            DataLossError: records are gone before they were read, and the policy does not accept
                it.
        """
        ...


class Writer(Protocol):
    """The writer of a task attempt's rows, with a single producer and in a single process.

    Kafka cannot distinguish two attempts with one producer: they share its id and epoch. The guards
    against that are the task's (`run.task.WritePlan`); this port returns what they check.
    """

    def last_sequences(
        self, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, int] | None:
        """Return the producer epoch's last sequence number in each partition.

        Any attempt may have written it; partitions without one are absent. None: not known (no
        READ on a topic).
        """
        ...

    def write(self, batches: Sequence[tuple[TopicPartition, EncodedBatch]]) -> None:
        """Write finished record batches, and return when all of them are acknowledged.

        Each batch gets the producer's id and epoch, and the next sequence number of its partition,
        from 0 on.

        Args:
            batches: in order per partition.

        Raises:
            EpochAbortedError: the transaction is lost, or another attempt writes to a partition.
            BrokenInvariantError: after `close`.
        """
        ...

    def close(self) -> tuple[ProducedRange, ...]:
        """End the writing, and return the acknowledged rows of each partition."""
        ...


class Produce(Protocol):
    """A writing task's access to the open transaction; a value that is pickled, as `Fetch` is."""

    def writer(self, producer: Producer) -> Writer:
        """Return a fresh writer with the given producer."""
        ...


class Participants(Protocol):
    """The sinks of a pipeline that prepare before the decision and commit after it."""

    def commit(self, committables: tuple[Committable, ...]) -> tuple[Lost, ...]:
        """Commit decided committables; try all before raising the first error.

        Returns:
            The committables that are lost for good. A RetriableError means that some outcome is
            unknown: call again.
        """
        ...

    def check_prepared(self, committables: tuple[Committable, ...]) -> None:
        """Check, right before the decision, that all can be committed, as far as is known.

        An EpochAbortedError means that some cannot: nothing is decided, the epoch runs again.
        """
        ...

    def lingering(self) -> tuple[Committable, ...]:
        """Return all open and prepared committables of the pipeline, of any run."""
        ...

    def abort(self, committables: tuple[Committable, ...]) -> None:
        """Abort committables that no decided manifest names; try all before raising an error."""
        ...

    def check_newest(self, settled: tuple[Committable, ...]) -> None:
        """Check, where a sink's system can, that no run has gone on after the last commit.

        A copy of a checkpoint has a copy of its log of decisions too, which cannot show that.

        Raises:
            FencedError: another run has gone on.
        """
        ...


class Storage(Protocol):
    """The checkpoint location: a write is durable, and whole, once `put` returns.

    A path is relative to the location, and leads nowhere else.
    """

    @property
    def location(self) -> str:
        """The URI that paths are relative to, without credentials."""
        ...

    def put(self, path: str, data: bytes) -> None:
        """Write a new file, atomically and durably."""
        ...

    def put_new(self, path: str, data: bytes) -> bool:
        """Write a new file, atomically and durably; the first of several writers wins.

        Returns False, and changes nothing, if a file of that name exists. That may be the caller's
        own, of an earlier call whose outcome stayed unknown: a caller that must know reads it.
        """
        ...

    def get(self, path: str) -> bytes | None:
        """Read a whole file; None if there is none."""
        ...

    def get_range(self, path: str, offset: int, length: int) -> bytes | None:
        """Read `length` bytes from `offset` on, fewer where the file ends; None if there is none.

        A negative offset counts from the end of the file.
        """
        ...

    def names(self, folder: str) -> list[str]:
        """Return the paths of the files in a folder, sorted; empty if there is no such folder."""
        ...

    def delete(self, path: str) -> None:
        """Remove a file; nothing happens if there is none."""
        ...

    def sync(self, path: str) -> None:
        """Make a file durable that another process wrote without waiting for the disk."""
        ...


@runtime_checkable
class DeletesMany(Protocol):
    """A storage that removes many files at once."""

    def delete_many(self, paths: Sequence[str]) -> bool:
        """Remove files; return False where the caller has to remove them, or the rest, singly.

        Missing files are no error.
        """
        ...


class StateStore(Protocol):
    """A copy of the state of one key-group range, on the worker's host: committed epochs only.

    Nothing in it is needed: missing state comes from the checkpoint's files.
    """

    def version(self) -> Version | None:
        """Return the store's version; None: the store is empty, or a change was cut short."""
        ...

    def apply(
        self,
        expected: Version | None,
        version: Version,
        steps: Iterable["KeyGroupRange | pa.RecordBatch"],
    ) -> bool:
        """Bring the store to another version: a range clears, a (key, value | null) batch sets.

        Either all steps count or the store has no version. Returns False, and changes nothing, if
        the store is not at `expected`: another process was faster.
        """
        ...

    def view(self, version: Version | None) -> AbstractContextManager[StateView | None]:
        """Open the store's content at a version; None if the store is no longer at that version."""
        ...


class Engine(Protocol):
    """The runner of an epoch's data part, in Spark's tasks."""

    def run_epoch(
        self, checkpoint_id: int, producer: Producer, state: tuple[StepState, ...]
    ) -> EpochRan:
        """Read, transform and write all of the epoch into the producer's open transaction.

        Goes on from the committed `state`. Returns after every task has reported, and so has
        stopped writing.
        """
        ...


class PlannedEpoch(NamedTuple):
    """The plan of an epoch: a JSON text per source; `sources` is None if there is nothing to do.

    `looks_through`: there has been nothing to do for a while, and a run that was replaced may have
    left something in other sinks meanwhile.
    """

    start: tuple[str, ...]
    sources: tuple[str, ...] | None
    looks_through: bool = False


@runtime_checkable
class EpochSource(Protocol):
    """Plans a pipeline's epochs, and runs their tasks."""

    def plan(
        self, checkpoint_id: int, start: tuple[str, ...], state: tuple[StepState, ...]
    ) -> PlannedEpoch:
        """Plan an epoch that begins at `start`; where it is empty, at the very beginning.

        Raises:
            OptionError: the pipeline does not fit the committed `state`.
        """
        ...

    def engine(
        self, checkpoint_id: int, start: tuple[str, ...], sources: tuple[str, ...]
    ) -> Engine:
        """Return the engine of an epoch that this run or an earlier run planned."""
        ...


class Clock(Protocol):
    """Time and chance."""

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...

    def nonce(self) -> str:
        """Return a name that no other run will draw."""
        ...
