"""The driver's side of a sink for tables, whatever kind of table it is."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import pyarrow as pa

from tallystick.arguments import not_one_of
from tallystick.epoch.two_phase import Committable, DueOutput, Outcome, Owner, Timeout
from tallystick.errors import OptionError
from tallystick.files.drafts import due_folder, hidden_folder, parse_name, pending_folder, show_disk
from tallystick.files.folder import HIDDEN
from tallystick.files.sink import COMPRESSIONS
from tallystick.tables import background
from tallystick.tables.port import Table
from tallystick.tables.publishing import Pace, Publisher
from tallystick.tables.writing import TablePlan
from tallystick.text import duration_ms

PROBE = "may-the-driver-write"


def wrong_settings(
    *,
    commit_every: str | int,
    target_file_size: int,
    compression: str,
    create: bool = False,
    schema: pa.Schema | None = None,
) -> Iterator[str]:
    """Yield the settings of a sink for tables or folders that are wrong by themselves."""
    if compression not in COMPRESSIONS:
        yield str(not_one_of("compression", compression, COMPRESSIONS))
    if create and schema is None:
        yield "create=True needs schema=, the columns of the table"
    if target_file_size < 1:
        yield f"target_file_size={target_file_size}: expected at least 1, in bytes"
    try:
        duration_ms("commit_every", commit_every)
    except OptionError as error:
        yield str(error)


class OpenTableSink:
    """The driver's side of the sink, for one run. See `epoch.two_phase.TwoPhaseCommitSink`."""

    def __init__(self, plan: TablePlan, publisher: Publisher) -> None:
        self._plan, self._publisher = plan, publisher

    @property
    def timeout(self) -> Timeout | None:
        """None: files wait without end, as long as no VACUUM removes them."""
        return None

    def plan(self) -> TablePlan:
        """See `TwoPhaseCommitSink.plan`; with the share of each task in compacting."""
        return replace(self._plan, shares=self._publisher.shares())

    def commit(self, committable: Committable) -> Outcome:
        """See `TwoPhaseCommitSink.commit`; for an epoch with this committable alone."""
        return self.commit_together((committable,))

    def commit_together(self, committables: Sequence[Committable]) -> Outcome:
        """See `run.participants.CommitsTogether`."""
        return self._publisher.take(committables)

    def check_newest(self, committable: Committable) -> None:
        """See `run.participants.KnowsNewest`."""
        self._publisher.check_newest(committable.checkpoint_id)

    def abort(self, committable: Committable) -> None:
        """See `TwoPhaseCommitSink.abort`."""
        self._publisher.abort(committable.name, committable.checkpoint_id)

    def lingering(self, owner: Owner) -> Iterable[Committable]:
        """See `TwoPhaseCommitSink.lingering`: a committable for each intent.

        What this run's tasks compact beside its epochs is no stray.
        """
        names = self._publisher.names
        for name in self._plan.folder.names(pending_folder(hidden_folder(owner))):
            place = parse_name(name)
            if place is not None and name not in names:
                yield Committable(owner.sink, *place, name, 0, 0)

    def describe(self, committable: Committable) -> str:
        """See `TwoPhaseCommitSink.describe`."""
        return (
            f"files part-{committable.name}… with {committable.record_count} rows, of epoch "
            f"{committable.checkpoint_id}, task {committable.task}, in {self._plan.folder.location}"
        )

    def due_output(self) -> DueOutput:
        """See `run.participants.KeepsDue`."""
        return self._publisher.due_output()

    def close(self) -> None:
        """Publish what is decided and waits."""
        background.end(self._plan, self._publisher.hidden)
        self._publisher.close()


def open_sink(
    plan: TablePlan, owner: Owner, table_of: Callable[[str], Table], pace: Pace
) -> OpenTableSink:
    """Return the open sink of a run, once all is published that killed runs have left due.

    Args:
        plan: of the tasks.
        owner: without a lineage: of a first check, which looks whether the driver may write.
        table_of: returns the table as the sink commits to it under an id of its own.
        pace: see `Publisher`.

    Raises:
        StorageError: the table, or its folder, cannot be reached now.
        DataLossError: the table was replaced, and files are due for the one before.
    """
    folder = plan.folder

    def publisher_of(hidden: str) -> Publisher:
        table = table_of(hidden.partition("/")[2])
        return Publisher(table, folder, hidden, plan.layout.folder, pace)

    own = hidden_folder(replace(owner, lineage=owner.lineage or "-"))  # a path has no gap
    if owner.lineage:
        show_disk(folder, owner)
        siblings = own.rpartition("/")[0]
        for lineage in folder.names(siblings):
            if folder.names(due_folder(f"{siblings}/{lineage}")):
                publisher_of(f"{siblings}/{lineage}").publish()
    else:
        folder.put(f"{HIDDEN}/{PROBE}", b"")
        folder.remove_file(f"{HIDDEN}/{PROBE}")
    return OpenTableSink(plan, publisher_of(own))
