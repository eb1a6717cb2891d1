"""What is to be said of a transaction that lingers: whose it is, and what may be done about it.

A pipeline settles its transactions itself, whenever it starts. This is for a person who cannot
start it, or wants to know what its readers wait for.

Invariants:
    * Committed is only what the newest decided manifest names, by its whole name: transactional id,
      producer id and producer epoch.
    * Aborted is only what no decided manifest names, and what none can name any more: where an
      epoch is under way its decision is forestalled first, as a new run of the pipeline does.
    * The one transaction of an epoch is never committed by hand: it is the decision itself, and
      without the driver's last words in it nobody would know that it was taken.
    * What cannot be known is said so. It is never taken for "no".
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from tallystick.checkpoint.manifest import Manifest
from tallystick.sink.transactional_ids import PooledId, parse
from tallystick.sink.two_phase import Committable
from tallystick.topic_partition import TopicPartition

KAFKA, POSTGRES, FILES = "kafka", "postgres", "files"
"""The systems in which transactions linger."""
ONGOING = "Ongoing"
"""Kafka's one state in which nobody has decided; those that begin with `Prepare` end by Kafka."""
OUR_PREFIX = "tallystick-"
"""How ids begin where a user chose no other prefix."""
QUIET_S = 60
"""For so long nothing must have happened, else a pipeline counts as running."""


@dataclass(frozen=True, slots=True)
class Lingering:
    """A transaction that is open or prepared, as its system tells.

    Args:
        system: Kafka, PostgreSQL, or files.
        transactional_id: under which it is known there.
        name: the name that its committable has, if it has one.
        state: the system's word for where it stands.
        prepared: its task has written all of it: a token is in it.
        begun_ms: in ms since 1970; 0: not known.
        written_ms: when the last rows came, as far as that is known; 0: not known.
        timeout_ms: after which the system aborts it; 0: never.
        partitions: of a Kafka transaction, those with rows.
        committed: what was committed last under this id, or else under its neighbours: the lineage
            of its checkpoint, and the epoch; None: nothing that is known.
        sink: where the system knows it; "": the id tells.
        found: as its sink found it; None: of Kafka.
    """

    system: str
    transactional_id: str
    name: str
    state: str
    prepared: bool = True
    producer_id: int = -1
    producer_epoch: int = -1
    begun_ms: int = 0
    written_ms: int = 0
    timeout_ms: int = 0
    partitions: tuple[TopicPartition, ...] = ()
    committed: tuple[str, int] | None = None
    sink: str = ""
    found: Committable | None = None

    @property
    def prefix(self) -> str:
        """How the ids of its pipeline begin; the id of a whole epoch's transaction is that."""
        pooled = self.pooled
        return self.transactional_id if pooled is None else pooled.prefix

    @property
    def pooled(self) -> PooledId | None:
        """A Kafka task's id, taken apart; None: it is none of those."""
        return parse(self.transactional_id) if self.system == KAFKA else None


@dataclass(frozen=True, slots=True)
class Told:
    """What a checkpoint tells, with what Kafka knows of it.

    Args:
        pipeline: its name; "": no epoch has left a manifest.
        lineage: of the checkpoint.
        prefixes: the ids and prefixes of ids that are this pipeline's.
        decided_path: the newest decided manifest; "": none is.
        decided: the same.
        doubt: why it cannot be told what is decided last; "": it can.
        undecided: manifests behind it, by path: of attempts that failed, or wait for the decision.
        under_way: the epoch that may be running, as nothing says that it is done; None: none is.
        done: the newest epoch that is certainly settled; -1: none.
        planned_ms: when the newest epoch was planned; 0: not known.
    """

    pipeline: str
    lineage: str
    prefixes: frozenset[str] = frozenset()
    decided_path: str = ""
    decided: Manifest | None = None
    doubt: str = ""
    undecided: tuple[tuple[str, Manifest], ...] = ()
    under_way: int | None = None
    done: int = -1
    planned_ms: int = 0

    @property
    def last_epoch(self) -> int:
        """Up to which epoch it knows of decisions; -1: of none."""
        decided = -1 if self.decided is None else self.decided.checkpoint_id
        return max(decided, self.done)

    def owns(self, lingering: Lingering) -> bool:
        """Whether a transaction is one of this pipeline's, by its name alone."""
        if lingering.system != KAFKA:
            return True  # its sink looked for this pipeline's only
        return lingering.prefix in self.prefixes

    def due(self, lingering: Lingering) -> Committable | None:
        """The committable of the newest decided manifest that it is."""
        named = () if self.decided is None else self.decided.committables
        return _named(lingering, named)

    def waiting(self, lingering: Lingering) -> tuple[str, Committable] | None:
        """The undecided manifest that names it, and as what."""
        for path, manifest in self.undecided:
            committable = _named(lingering, manifest.committables)
            if committable is not None:
                return path, committable
        return None


def of_prefixes(
    found: Iterable[Lingering], told: Told | None, prefixes: Collection[str]
) -> list[Lingering]:
    """Those of a pipeline, by its checkpoint, or else by how its ids begin."""
    if told is not None:
        return [each for each in found if told.owns(each)]
    return [
        each
        for each in found
        if each.transactional_id in prefixes
        or (each.pooled is not None and _begins(each.pooled.prefix, prefixes))
    ]


def _begins(prefix: str, prefixes: Collection[str]) -> bool:
    """Whether a prefix is one of these, or that of a checkpoint of one of these."""
    return prefix in prefixes or prefix.rpartition("/")[0] in prefixes


def named_as(lingering: Lingering, told: Told | None) -> Committable | None:
    """The committable that a transaction is, of a decided manifest or of one that is not."""
    if told is None:
        return None
    waiting = told.waiting(lingering)
    return told.due(lingering) or (None if waiting is None else waiting[1])


class Standing(Enum):
    """Where a transaction stands; the words are those of `--json`."""

    DUE = "due"
    UNNAMED = "unnamed"
    WHOLE_EPOCH = "whole_epoch"
    RUNNING = "running"
    ENDING = "ending"
    UNKNOWN = "unknown"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class Judged:
    """What is said of a transaction.

    Args:
        standing: in a word.
        says: in a sentence.
        may_commit: as far as can be proved, nothing is lost or repeated by it.
        may_abort: the same.
        risk_of_commit: what it would risk all the same; "": no force makes it possible.
        risk_of_abort: the same.
        forestall: before it is aborted, the decision that is under way must be made impossible.
        epoch: it belongs to; None: not known.
        manifest_path: which names it; "": none.
    """

    standing: Standing
    says: str
    may_commit: bool = False
    may_abort: bool = False
    risk_of_commit: str = ""
    risk_of_abort: str = ""
    forestall: bool = False
    epoch: int | None = None
    manifest_path: str = ""


_TWICE = (
    "its rows become visible although no completed checkpoint names them: the pipeline reads that "
    "part of its input again, and writes it a second time; or it finds the token that was in it, "
    "and refuses to start"
)
_LOST = (
    "if a completed checkpoint names it, its rows are lost: the pipeline goes on behind them, or "
    "stops with a DataLossError"
)
_NOT_OURS = (
    "it is another program's: what that thinks it has written, or not written, will not be so"
)
NEVER_BY_HAND = (
    "this is the one transaction of a whole epoch, with rows, positions and the decision itself; "
    "only its driver can commit it, which checks the rows and names the manifest in it. Start the "
    "pipeline: it finds what Kafka holds, and runs the epoch again. Or abort it: nothing is lost"
)


def judge(lingering: Lingering, told: Told | None, running: str) -> Judged:
    """Say what a transaction is, and what may be done about it.

    The first line that fits counts:

        the transaction is          the checkpoint                        standing     commit abort
        being ended by Kafka        -                                     ENDING       -      -
        of nobody we know           -                                     FOREIGN      -      -
        of ours, by its name        is not given                          UNKNOWN      -      -
        an epoch's only one         knows a sign of a run                 RUNNING      never  -
        an epoch's only one         knows none                            WHOLE_EPOCH  never  yes
        a task's                    names it in the decided manifest      DUE          yes    -
        a task's                    cannot tell what is decided last      UNKNOWN      -      -
        a task's                    is not the one that commits there     UNKNOWN      -      -
        a task's                    has no epoch under way                UNNAMED      -      yes
        a task's                    has one, and knows a sign of a run    RUNNING      -      -
        a task's                    has one, and knows none               UNNAMED      -      yes,
                                                                                   forestalled

    A commit that is due is not refused while the pipeline runs: it is what the run does itself, and
    whoever comes second finds it done.

    Args:
        lingering: the transaction.
        told: what its checkpoint says; None: none was given.
        running: the sign that a run of the pipeline is at work, in words; "": there is none.
    """
    if lingering.system == KAFKA and lingering.state != ONGOING:
        what = f"Kafka is ending it ({lingering.state}): wait; there is nothing to decide any more"
        return Judged(Standing.ENDING, what)
    if told is None:
        return _without_checkpoint(lingering)
    if not told.owns(lingering):
        return _foreign(lingering)
    if lingering.transactional_id in told.prefixes and lingering.system == KAFKA:
        return _whole_epoch(running)
    committable = told.due(lingering)
    if committable is not None:
        epoch = committable.checkpoint_id
        return Judged(
            Standing.DUE,
            f"named by decided epoch {epoch}: commit is due",
            may_commit=True,
            risk_of_abort=f"epoch {epoch} is decided: {committable.record_count} records are lost",
            epoch=epoch,
            manifest_path=told.decided_path,
        )
    return _unnamed(lingering, told, running)


def _without_checkpoint(lingering: Lingering) -> Judged:
    is_one = lingering.pooled is None and lingering.system == KAFKA
    if is_one and not lingering.prefix.startswith(OUR_PREFIX):
        return _foreign(lingering)
    return Judged(
        Standing.UNKNOWN,
        "unknown: give --checkpoint",
        risk_of_commit="" if is_one else f"{_TWICE}, unless one does",
        risk_of_abort="a run that is at work has to do its epoch again" if is_one else _LOST,
    )


def _foreign(lingering: Lingering) -> Judged:
    if not lingering.prefix.startswith(OUR_PREFIX):
        what = "not ours"
        return Judged(Standing.FOREIGN, what, risk_of_commit=_NOT_OURS, risk_of_abort=_NOT_OURS)
    return Judged(
        Standing.FOREIGN,
        "not ours: another pipeline's, by its name",
        risk_of_commit="" if lingering.pooled is None else _TWICE,
        risk_of_abort=_LOST,
    )


def _whole_epoch(running: str) -> Judged:
    risk = "the run that is at work has to do its epoch again"
    if running:
        what = f"of a running epoch: {running}"
        return Judged(Standing.RUNNING, what, risk_of_abort=risk)
    what = "a whole epoch's, which its driver decides: abort is safe if none runs, commit never is"
    return Judged(Standing.WHOLE_EPOCH, what, may_abort=True, risk_of_abort=risk)


def _unnamed(lingering: Lingering, told: Told, running: str) -> Judged:
    doubt = told.doubt or _someone_else(lingering, told)
    if doubt:
        return Judged(
            Standing.UNKNOWN,
            f"unknown: {doubt}",
            risk_of_commit=f"{_TWICE}, unless one does",
            risk_of_abort=_LOST,
        )
    waits = told.waiting(lingering)
    path, epoch = ("", None) if waits is None else (waits[0], waits[1].checkpoint_id)
    if told.under_way is not None and running:
        return Judged(
            Standing.RUNNING,
            f"of a running epoch: {running}",
            risk_of_commit=_TWICE,
            risk_of_abort="the run that is at work is stopped; started again, it does it anew",
            forestall=True,
            epoch=epoch,
            manifest_path=path,
        )
    prepared = "" if epoch is None else f" (prepared for epoch {epoch}, which was never decided)"
    return Judged(
        Standing.UNNAMED,
        f"named by no completed checkpoint: abort is safe{prepared}",
        may_abort=True,
        risk_of_commit=_TWICE,
        forestall=told.under_way is not None,
        epoch=epoch,
        manifest_path=path,
    )


def _someone_else(lingering: Lingering, told: Told) -> str:
    """Why the checkpoint that was given may not be the one that knows; "": it is."""
    if lingering.committed is None:
        return ""
    lineage, epoch = lingering.committed
    where = "under its transactional id, or its neighbour's, "
    if lineage != told.lineage:
        return f"{where}lineage {lineage} committed last; this checkpoint is {told.lineage}"
    last = told.last_epoch
    if epoch > last:
        return (
            f"{where}Kafka committed epoch {epoch} of this checkpoint, which knows of none behind "
            f"epoch {last}: it is an old copy"
        )
    return ""


def sign_of_a_run(
    told: Told | None, lingering: Iterable[Lingering], now_ms: int, quiet_ms: int
) -> str:
    """What shows that a run of a pipeline may be at work; "": nothing does.

    Nobody can see a driver from here. What it leaves is looked at: when the newest epoch was
    planned, when transactions of the pipeline were begun, and when rows were last written to them.

    Args:
        told: what the checkpoint says.
        lingering: transactions, of whomever.
        now_ms: the wall clock.
        quiet_ms: for how long nothing must have happened.
    """
    if told is None:
        return ""
    signs = [("an epoch was planned", told.planned_ms)]
    for each in lingering:
        if told.owns(each):
            signs.append((f"{each.transactional_id} was begun", each.begun_ms))
            signs.append((f"{each.transactional_id} was written to", each.written_ms))
    what, at_ms = max(signs, key=lambda sign: sign[1])
    ago_ms = now_ms - at_ms
    if at_ms <= 0 or ago_ms >= quiet_ms:
        return ""
    return (
        f"{what} {max(0, ago_ms) // 1000} s ago (a pipeline counts as stopped when nothing has "
        f"happened for {quiet_ms // 1000} s, --quiet-for)"
    )


def in_order(found: Iterable[Lingering], told: Told | None) -> list[Lingering]:
    """Ours first, then what may be ours, then the others; each by name."""

    def rank(each: Lingering) -> tuple[int, str]:
        standing = judge(each, told, "").standing
        is_foreign = standing is Standing.FOREIGN or (told is not None and not told.owns(each))
        return (2 if is_foreign else 0 if told is not None else 1, each.transactional_id)

    return sorted(found, key=rank)


def _named(lingering: Lingering, committables: Iterable[Committable]) -> Committable | None:
    """By the whole name; in files and tables it is one of its sink's only."""
    for each in committables:
        if each.name == lingering.name and lingering.sink in ("", each.sink):
            return each
    return None
