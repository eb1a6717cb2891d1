"""The driver's side of the sink for Parquet files that are visible with their epoch."""

from collections.abc import Iterable

from tallystick.epoch.two_phase import Committable, Outcome, Owner, Timeout
from tallystick.files.drafts import Commits, Drafts, hidden_folder
from tallystick.files.writing import FilePlan

COMPRESSIONS = ("none", "snappy", "gzip", "brotli", "zstd", "lz4")


class OpenFileSink:
    """The driver's side of the sink, for one run. See `epoch.two_phase.TwoPhaseCommitSink`."""

    def __init__(self, plan: FilePlan) -> None:
        self._plan = plan
        self._commits = Commits(plan.folder)

    @property
    def timeout(self) -> Timeout | None:
        """None: drafts wait without end."""
        return None

    def plan(self) -> FilePlan:
        """See `TwoPhaseCommitSink.plan`."""
        return self._plan

    def commit(self, committable: Committable) -> Outcome:
        """See `TwoPhaseCommitSink.commit`; may be called by several threads at once."""
        return self._commits.commit(committable)

    def abort(self, committable: Committable) -> None:
        """See `TwoPhaseCommitSink.abort`."""
        self._commits.abort(committable)

    def lingering(self, owner: Owner) -> Iterable[Committable]:
        """See `TwoPhaseCommitSink.lingering`: of the owner's lineage, below the sink's path."""
        return self._commits.lingering(owner.sink, hidden_folder(owner))

    def describe(self, committable: Committable) -> str:
        """See `TwoPhaseCommitSink.describe`."""
        drafts = Drafts.of(committable)
        where = f"{drafts.location}/{drafts.pending}"
        if drafts.files is None:
            return f"drafts in {where}"
        size = sum(file.size for file in drafts.files)
        return (
            f"{len(drafts.files)} files part-{drafts.name}… with {committable.record_count} rows, "
            f"{size} bytes, of epoch {committable.checkpoint_id}, task {committable.task}; drafts "
            f"in {where}"
        )

    def close(self) -> None:
        """Do nothing: nothing is open between calls."""
