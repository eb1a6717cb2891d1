"""What was right to happen in other systems, told independently of the code that is tested.

It is told every decision, every commit and every abort, and expects:
    * An epoch is decided once; a second time only when all that the first decision named is lost.
    * A decision names every row of its epoch once per sink, with the number that it has in the
      whole input, prepared by the run that decides.
    * Nothing is decided before all that was decided earlier is settled.
    * Committed is only what a decision names, that was not replaced by another.
    * Aborted is nothing that a decision names, and nothing of a run that took over later.
    * What a decision names and a timeout took is told by a DataLossError that names all of it, if
      some of the epoch is visible; and only then.
    * At the end all that is decided is visible, but for what was told; nothing waits any more.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from tallystick.epoch.manifest import CHECKPOINT, Manifest, decode
from tallystick.epoch.two_phase import Committable
from tallystick.values import TopicPartition
from tests.simulation.other_systems import PENDING, Fate, Held, OtherSystem
from tests.simulation.rows import Row
from tests.simulation.spark import Checkpoint

Place = tuple[TopicPartition, int]
Numbered = Callable[[Checkpoint, int], Sequence[Row]]


@dataclass(slots=True)
class Decision:
    """What was decided of one epoch."""

    lineage: str
    epoch: int
    manifest: Manifest
    rows: Sequence[Row]
    expected: Mapping[str, Sequence[Row]]  # by sink

    @property
    def committables(self) -> tuple[Committable, ...]:
        """What it names."""
        return self.manifest.committables


class SinkOracle:
    """Collects violations; reads the world, never changes it.

    Args:
        note: takes a violation.
        systems: by uid.
        numbered: the rows of an epoch, in order, with their numbers.
    """

    def __init__(
        self, note: Callable[[str], None], systems: Mapping[str, OtherSystem], numbered: Numbered
    ) -> None:
        self._note = note
        self._systems = systems
        self._numbered = numbered
        self._decisions: dict[tuple[str, int], Decision] = {}
        self._newest: Decision | None = None
        self._replaced: set[str] = set()  # names, of decisions that were taken a second time
        self._told: set[str] = set()  # names, of what a person knows to be lost
        self._requested: set[tuple[str, str]] = set()  # (process, name)
        self._ranks: dict[str, int] = {}  # of runs: the later it took over the higher
        self._takeovers = 0
        self._named: set[str] = set()
        self.replays = 0
        self.has_loop = False  # each run asks for the sinks of the newest epoch
        self.logged_early: set[int] = set()  # epochs that Spark has for done, settled or not
        self.by = ""  # whose request is being processed
        for system in systems.values():
            system.on_commit = self.on_commit
            system.on_abort = self.on_abort

    def has_decided(self, lineage: str, epoch: int) -> bool:
        """Whether an epoch was decided before."""
        return (lineage, epoch) in self._decisions

    def rows_named(self, manifest: bytes, uid: str) -> list[Row]:
        """The rows that a manifest names in one sink, task by task."""
        named = decode(manifest, "").committables
        return [
            row
            for committable in named
            if committable.sink == uid
            for row in self._transaction(committable).rows
        ]

    # Facts
    def took_over(self, run: str) -> None:
        """A run owns the pipeline from now on."""
        self._takeovers += 1
        self._ranks[run] = self._takeovers

    def on_request(self, run: str, name: str) -> None:
        """A run asks for a commit, whatever comes of it."""
        self._requested.add((run, name))

    def on_decision(
        self, checkpoint: Checkpoint, epoch: int, path: str, present: Collection[str]
    ) -> None:
        """An epoch is decided, by a run that has the sinks that are present."""
        if path not in checkpoint.files:
            self._note(f"epoch {epoch} was decided without its manifest {path}")
            return
        manifest = decode(checkpoint.files[path], path)
        rows = self._numbered(checkpoint, epoch)
        decision = Decision(
            checkpoint.lineage,
            epoch,
            manifest,
            rows,
            {uid: rows if uid in present else () for uid in self._systems},
        )
        key = (checkpoint.lineage, epoch)
        if key in self._decisions:
            self._replace(self._decisions[key])
        elif self._newest is not None and (unsettled := self._unsettled(self._newest)):
            self._note(f"epoch {epoch} was decided while {_names(unsettled)} wait")
        self._decisions[key] = self._newest = decision
        self._named |= {committable.name for committable in manifest.committables}
        self._check_decision(decision)

    def _replace(self, before: Decision) -> None:
        kept = [
            committable for committable in before.committables if not self._is_lost(committable)
        ]
        if kept or before.manifest.produced or not before.committables:
            self._note(f"epoch {before.epoch} was decided twice, not all was lost: {_names(kept)}")
        self._replaced |= {committable.name for committable in before.committables}
        self.replays += 1

    def _check_decision(self, decision: Decision) -> None:
        rows_by_sink: dict[str, list[Row]] = {uid: [] for uid in self._systems}
        for committable in decision.committables:
            transaction = self._transaction(committable)
            rows_by_sink[committable.sink] += transaction.rows
            if transaction.fate is not Fate.PREPARED and not transaction.timed_out:
                self._note(
                    f"epoch {decision.epoch}: {committable.name} was "
                    f"{transaction.fate.name} when decided"
                )
            if transaction.run != self.by:
                self._note(
                    f"epoch {decision.epoch}: {self.by} decided {committable.name} of "
                    f"{transaction.run}"
                )
        for uid, rows in decision.expected.items():
            if sorted(rows_by_sink[uid]) != sorted(rows):
                self._note(
                    f"epoch {decision.epoch}, {uid}: decided {rows_by_sink[uid]}, "
                    f"expected {list(rows)}"
                )

    def on_commit(self, transaction: Held) -> None:
        """A prepared transaction becomes visible."""
        name = transaction.committable.name
        if name not in self._named or name in self._replaced:
            self._note(f"{self.by} commits {name}, which no decision names")

    def on_abort(self, transaction: Held) -> None:
        """What was open or prepared is given up."""
        name = transaction.committable.name
        if name in self._named:
            self._note(f"{self.by} aborts {name}, which is decided")
        if self._ranks.get(transaction.run, -1) > self._ranks.get(self.by, -1):
            self._note(f"{self.by} aborts {name} of {transaction.run}, which took over from it")

    # Ends of drivers
    def on_gave_up(self, run: str, present: Collection[str]) -> None:
        """A driver ends, because of an error that may pass: it has tried all that was decided."""
        if self._newest is None:
            return
        names = {
            committable.name
            for committable in self._newest.committables
            if committable.sink in present
        }
        tried = {name for name in names if (run, name) in self._requested}
        if tried and (untried := names - tried):
            self._note(f"{run} gave up, and never tried to commit {sorted(untried)}")

    def misses_a_sink(self, error: Exception, offered: int, present: Collection[str]) -> bool:
        """Whether it is right to ask for sinks that are gone: for those of the epoch offered."""
        newest = self._newest
        if newest is None:
            return False
        is_newest = self.has_loop or newest.epoch in self.logged_early
        epoch = newest.epoch if is_newest else offered
        if (decision := self._decisions.get((newest.lineage, epoch))) is None:
            return False
        gone = {
            committable.sink
            for committable in decision.committables
            if committable.sink not in present
        }
        return any(repr(uid) in str(error) or f" {uid}" in str(error) for uid in gone)

    def on_lost(self, run: str, owner: str, error: Exception) -> bool:
        """A driver says that output is lost; whether it is so, and all is named."""
        epoch = int(re.findall(r"lost-output-of-epoch-(\d+)", str(error))[0])
        named = {
            name: transaction
            for system in self._systems.values()
            for name, transaction in system.transactions.items()
            if name in str(error)
        }
        if not named or not all(transaction.timed_out for transaction in named.values()):
            return False
        self._told |= named.keys()
        decision = self._newest
        if run != owner or decision is None or decision.epoch != epoch:
            return run != owner  # it was replaced meanwhile, and the epoch perhaps run again
        lost = {
            committable.name for committable in decision.committables if self._is_lost(committable)
        }
        if lost != named.keys():
            self._note(f"{run}: lost are {sorted(lost)}, told are {sorted(named)}")
        is_invisible = not decision.manifest.produced and len(lost) == len(decision.committables)
        is_offered = epoch not in self.logged_early
        if is_invisible and is_offered and decision.manifest.decided_by == CHECKPOINT:
            self._note(f"{run}: nothing of epoch {epoch} is visible, it could have been run again")
        return True

    # The end
    def at_the_end(self, wanted: Counter[Place], lineage: str, is_last: bool) -> None:
        """All input is consumed: every sink shows what was decided, and that is all of it.

        Args:
            wanted: the input records that are to be there, by where they were.
            lineage: of the checkpoint.
            is_last: nothing may wait any more.
        """
        for system in self._systems.values():
            visible, expected = Counter(map(_place, system.visible())), Counter[object]()
            for decision in self._decisions.values():
                rows = Counter(map(_place, decision.expected[system.uid]))
                expected += rows
            for committable in self._lost_of(system.uid):
                expected -= Counter(map(_place, self._transaction(committable).rows))
            if lost := expected - visible:
                self._note(f"{system.uid}: lost: {sorted(map(str, lost))}")
            if twice := visible - expected:
                self._note(f"{system.uid}: duplicated: {sorted(map(str, twice))}")
            if is_last and (pending := system.pending(lineage)):
                names = [transaction.committable.name for transaction in pending]
                self._note(f"{system.uid}: {names} linger")
        decided = Counter(
            (row.source, row.offset)
            for decision in self._decisions.values()
            for row in decision.rows
        )
        if decided != wanted:
            self._note(f"decided: {sorted(decided)}, read: {sorted(wanted)}"[:1000])

    def _lost_of(self, uid: str) -> list[Committable]:
        """What was told to be lost, of a decision that counts."""
        return [
            committable
            for decision in self._decisions.values()
            for committable in decision.committables
            if committable.sink == uid
            and committable.name in self._told
            and self._is_lost(committable)
        ]

    def _unsettled(self, decision: Decision) -> list[Committable]:
        return [
            committable
            for committable in decision.committables
            if self._transaction(committable).fate in PENDING
            or (self._is_lost(committable) and committable.name not in self._told)
        ]

    def _is_lost(self, committable: Committable) -> bool:
        return self._transaction(committable).fate is Fate.ABORTED

    def _transaction(self, committable: Committable) -> Held:
        return self._systems[committable.sink].transactions[committable.name]


def _place(row: Row) -> object:
    return row.lineage, row.epoch, row.source, row.offset, row.nth


def _names(committables: Collection[Committable]) -> list[str]:
    return [committable.name for committable in committables]
