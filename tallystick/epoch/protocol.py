"""The values of the epoch protocol: the facts, and the orders.

The machine that turns facts into orders is `coordinator`; its phases are in `phases`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tallystick.epoch.facts import CommittedEpoch, Request
from tallystick.epoch.manifest import Manifest
from tallystick.epoch.tokens import Token
from tallystick.epoch.two_phase import Committable, Lost
from tallystick.state.catalog import StepState
from tallystick.values import ProducedRange, Producer, TopicPartition


# Events: facts, in the past tense.
@dataclass(frozen=True, slots=True)
class EpochRequested:
    """The caller has requested an epoch: the next one, or in a new run the newest one once more.

    `logged`: the end offsets that the caller has now of this run's newest committed epoch, if any.
    """

    request: Request
    logged: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class EpochWanted:
    """Our own loop may run its next epoch, which is planned once the committed epoch is known."""


@dataclass(frozen=True, slots=True)
class RecoveryWanted:
    """Commit or abort what earlier runs left, without planning an epoch."""


@dataclass(frozen=True, slots=True)
class EpochPlanned:
    """The plan of the next epoch: it reads up to `sources`; None: there is nothing to do.

    `start`: its start offsets, as given to the planner, or found for a lineage without any epoch.
    `looks_through`: other sinks are looked through again, if there is nothing to do.
    """

    sources: tuple[str, ...] | None
    start: tuple[str, ...] = ()
    looks_through: bool = False


@dataclass(frozen=True, slots=True)
class ProducerFenced:
    """Earlier producers are fenced: none can write or commit from here on."""

    producer: Producer


@dataclass(frozen=True, slots=True)
class CommittedRead:
    """Kafka returned the newest committed token, if any, and its manifest was looked up."""

    committed: CommittedEpoch


@dataclass(frozen=True, slots=True)
class EpochRan:
    """All tasks have flushed and will not write again. Nothing of the epoch counts yet.

    Args:
        produced: the rows in the producer's open transaction.
        state: the state of the keyed steps after the epoch.
        late: how many rows came later than the watermark and were dropped, by the step's uid; only
            steps that had some. For listeners.
        committables: the output that tasks prepared in other sinks.
        has_strays: other attempts may have begun transactions in those sinks, and never reported.
    """

    produced: tuple[ProducedRange, ...]
    state: tuple[StepState, ...] = ()
    late: tuple[tuple[str, int], ...] = ()
    committables: tuple[Committable, ...] = ()
    has_strays: bool = False


@dataclass(frozen=True, slots=True)
class ManifestWritten:
    """The manifest is durable."""

    path: str


@dataclass(frozen=True, slots=True)
class OutputCounted:
    """The last sequence numbers in the open transaction; None where the cluster reports none."""

    last_sequences: Mapping[TopicPartition, int] | None


@dataclass(frozen=True, slots=True)
class TransactionCommitted:
    """The output is visible to read_committed consumers."""

    next_producer: Producer


@dataclass(frozen=True, slots=True)
class ParticipantsRecovered:
    """No transaction of an earlier run is pending in other sinks; `lost` was decided and is gone.

    `producer` is this run's, which may have a new epoch now.
    """

    lost: tuple[Lost, ...]
    producer: Producer


@dataclass(frozen=True, slots=True)
class OutputSettled:
    """The output in other sinks is visible, except for what is lost for good.

    `producer` is this run's, if it has a new epoch now.
    """

    lost: tuple[Lost, ...]
    producer: Producer | None = None


@dataclass(frozen=True, slots=True)
class OutputConfirmed:
    """The log was read between the reported rows and the commit markers."""

    foreign_rows: Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class ActionFailed:
    """The action did not succeed; for a RetriableError, whether it acted is unknown."""

    error: Exception


@dataclass(frozen=True, slots=True)
class TransactionAborted:
    """No transaction is open, or the last one will be aborted by its timeout."""


Beginning = EpochRequested | EpochWanted | RecoveryWanted | EpochPlanned
ParticipantsDone = ParticipantsRecovered | OutputSettled
Event = (
    Beginning
    | ProducerFenced
    | CommittedRead
    | EpochRan
    | ManifestWritten
    | OutputCounted
    | TransactionCommitted
    | ParticipantsDone
    | OutputConfirmed
    | ActionFailed
    | TransactionAborted
)


def ignore(event: Event) -> None:
    """Do nothing: the listener of a run without one."""


# Actions: orders, in the imperative.
@dataclass(frozen=True, slots=True)
class FenceProducer:
    """Take the transactional id over (None), or prove that it is still ours (`current`)."""

    current: Producer | None


@dataclass(frozen=True, slots=True)
class ReadCommitted:
    """Ask Kafka for the newest committed epoch, and read the manifest."""


@dataclass(frozen=True, slots=True)
class PlanEpoch:
    """Plan an epoch that begins at `start`; if `start` is empty, at the very beginning.

    `state` is the committed state that the epoch goes on from.
    """

    checkpoint_id: int
    start: tuple[str, ...]
    state: tuple[StepState, ...] = ()


@dataclass(frozen=True, slots=True)
class RunEpoch:
    """Read, transform and write everything of the epoch into the transaction of `producer`.

    `state` is the committed state that the epoch goes on from. It reads from `start` to `sources`.
    """

    checkpoint_id: int
    producer: Producer
    state: tuple[StepState, ...] = ()
    start: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WriteManifest:
    """Make the manifest durable, at a path that no other run can write.

    `is_seed`: no epoch has run after it; a lineage may begin there.
    """

    manifest: Manifest
    is_seed: bool = False


@dataclass(frozen=True, slots=True)
class CountOutput:
    """Stage the decision, then ask Kafka what the transaction holds: only the commit is missing.

    Other sinks are asked whether all committables are still prepared. `sources` are the positions
    that the decision takes along.
    """

    producer: Producer
    produced: tuple[ProducedRange, ...]
    token: Token
    sources: tuple[str, ...]
    committables: tuple[Committable, ...] = ()


@dataclass(frozen=True, slots=True)
class CommitTransaction:
    """Commit the rows together with what is staged.

    `opens`: a lineage, by its first token, with no rows and nothing staged yet.
    """

    producer: Producer
    token: Token
    opens: bool = False


@dataclass(frozen=True, slots=True)
class RecoverParticipants:
    """Commit a decided manifest's committables in other sinks, and abort all else that lingers.

    `settled` was committed before the epoch was told to be done; its sinks may be gone by now.
    """

    producer: Producer
    committables: tuple[Committable, ...]
    settled: tuple[Committable, ...] = ()


@dataclass(frozen=True, slots=True)
class CommitParticipants:
    """Commit the decided epoch's committables in other sinks; with strays, abort all others there.

    Readers of the output would wait for the strays until these time out.
    """

    committables: tuple[Committable, ...]
    producer: Producer
    has_strays: bool = False


@dataclass(frozen=True, slots=True)
class ConfirmOutput:
    """Look for rows between the reported ones and the commit markers."""

    producer: Producer
    produced: tuple[ProducedRange, ...]


@dataclass(frozen=True, slots=True)
class AbortTransaction:
    """Abort the open transaction, so that readers of the output need not wait for its timeout."""

    producer: Producer


@dataclass(frozen=True, slots=True)
class EndEpoch:
    """The epoch is done, and the sources' groups show how far it read; None: none was due."""

    request: Request | None


@dataclass(frozen=True, slots=True)
class Stop:
    """Raise the error: this run is over."""

    error: Exception


Action = (
    FenceProducer
    | ReadCommitted
    | PlanEpoch
    | RunEpoch
    | WriteManifest
    | CountOutput
    | CommitTransaction
    | RecoverParticipants
    | CommitParticipants
    | ConfirmOutput
    | AbortTransaction
    | EndEpoch
    | Stop
)
