"""The oracle: what was right to happen, told independently of the code that is tested.

It is told every transaction that Kafka commits, and how every driver ends, and expects:
    * An epoch becomes visible whole: all rows of its input range, each once, in order, and nothing
      else; and whenever a driver has ended, the source's group shows how far that was.
    * Epochs follow each other; none is committed twice.
    * Only the newest owner of the transactional id commits.
    * A row that must not count is in no transaction whose output was counted after the row was
      written; and where one came in later, some driver raised ForeignRowsError for that epoch.
    * A driver ends with an error only for a cause that the world gave it.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from tallystick.epoch.manifest import decode, is_seed
from tallystick.epoch.micro_batches import failures
from tallystick.epoch.tokens import Token
from tallystick.errors import (
    DataLossError,
    FencedError,
    ForeignRowsError,
    OptionError,
    RetriableError,
    SecondCallError,
    StorageError,
)
from tallystick.state.changelog import DamagedError
from tallystick.values import TopicPartition
from tests.simulation.kafka_cluster import Committed
from tests.simulation.operator_state import UIDS, wrong_state
from tests.simulation.rows import OUTPUT, Row
from tests.simulation.scheduler import Crash
from tests.simulation.spark import Checkpoint, ConcurrentRunError, UnreadableLogError
from tests.simulation.state_oracle import StateOracle

ExpectedRows = Callable[[Checkpoint, int], Mapping[TopicPartition, Sequence[Row]]]


DECIDED = ("ForeignRowsError", "lost output", "told of a second call", "told of failed calls")
"""Ends after which a person states the decision that the message asks for."""


class Violation(AssertionError):  # noqa: N818 - it is what a checker finds, not an error of ours
    """A promise was broken. The seed repeats it."""


class Checker:
    """Collects violations; reads the world, never changes it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        expected_rows: ExpectedRows,
        *,
        token_group: str,
        tells: bool,
        is_keyed: bool = False,
        waited_for: Collection[TopicPartition] = (),
        is_judged: bool = False,
        has_windows: bool = False,
        has_operator_state: bool = False,
    ) -> None:
        self.violations: list[str] = []
        self.checkpoint = checkpoint
        self.committed_epoch = -1
        self.foreign_epochs: set[int] = set()
        self.reported_epochs: set[int] = set()
        self.told_partial: set[int] = set()  # of whose second call a refusal told
        self.owner = ""  # the process that took over last
        self.committer = ""  # the process whose commit is being processed
        self.takeover_count = 0
        self._outrun: set[str] = set()  # took over for an epoch that was finished by then
        self.expected_error: type[Exception] | None = None
        self.expected_seen = False
        self._expected_rows = expected_rows
        self._token_group = token_group
        self._tells = tells
        self.on_decision: Callable[[int, str, str], None] = lambda *_: None
        self.is_keyed = is_keyed
        self.stops: Mapping[TopicPartition, int] | None = None  # where reading ends for good
        self.has_operator_state = has_operator_state
        others = len(UIDS) * has_operator_state
        self.state = StateOracle(
            self.note,
            OUTPUT,
            waited_for,
            is_judged=is_judged,
            has_windows=has_windows,
            others=others,
        )
        self.begin(checkpoint, -1)

    def note(self, violation: str) -> None:
        """A promise was broken."""
        self.violations.append(violation)

    # Commits
    def on_commit(self, done: Committed) -> None:
        """Kafka made a transaction visible."""
        if self.committer != self.owner:
            self.note(f"{self.committer} committed, though {self.owner} had taken over")
        rows = [row for _, batch in done.batches for row in batch.rows]
        tokens = [what for (group, _), what in done.offsets.items() if group == self._token_group]
        manifest_path = json.loads(tokens[0][1])["manifest"] if tokens else ""
        if not rows and tokens and (not manifest_path or is_seed(manifest_path)):
            self._record(manifest_path)
            return  # the first token of a lineage
        following = self.committed_epoch + 1
        epoch = tokens[0][0] - 1 if tokens else max((row.epoch for row in rows), default=following)
        self._record(manifest_path)
        self._check_epoch(epoch, done, manifest_path)
        if manifest_path:
            self.on_decision(epoch, manifest_path, self.committer)

    def on_log_decision(self, token: Token, by: str) -> None:
        """The checkpoint's own log decided; what is decided a second time is not judged here."""
        self._record(token.manifest_path)
        if not token.manifest_path or is_seed(token.manifest_path):
            return  # the first token of a lineage
        epoch = token.checkpoint_id
        if epoch not in (self.committed_epoch, self.committed_epoch + 1):
            self.note(f"epoch {epoch} decided after epoch {self.committed_epoch}")
        self.committed_epoch = max(epoch, self.committed_epoch)
        self.on_decision(epoch, token.manifest_path, by)

    def _record(self, manifest_path: str) -> None:
        data = self.checkpoint.files.get(manifest_path)
        if data is not None:
            manifest = decode(data, manifest_path)
            self.checkpoint.record(manifest.checkpoint_id, manifest.sources)

    def _check_epoch(self, epoch: int, done: Committed, manifest_path: str) -> None:
        between = set(range(self.committed_epoch + 1, epoch))
        if epoch <= self.committed_epoch or between - self.checkpoint.left_out.keys():
            self.note(f"epoch {epoch} committed after epoch {self.committed_epoch}")
        if silent := {n for n in self.checkpoint.called_twice if n < epoch} - self.told_partial:
            self.note(f"epoch {epoch} committed, and no run has told of second calls for {silent}")
        self.committed_epoch = max(epoch, self.committed_epoch)
        if epoch not in self.checkpoint.offsets:
            self.note(f"epoch {epoch} committed, of which Spark has no offsets")
            return
        rows_by_partition: dict[TopicPartition, list[Row]] = {}
        for partition, batch in done.batches:
            own = [row for row in batch.rows if not row.foreign]
            rows_by_partition.setdefault(partition, []).extend(own)
            if len(own) < len(batch.rows):
                self._check_foreign(epoch, batch.step, done.counted_at)
        if self.is_keyed:
            self.check_keyed(epoch, rows_by_partition, manifest_path)
            return
        self._check_operator_state(epoch, manifest_path)
        expected = self._expected_rows(self.checkpoint, epoch)
        for partition in sorted({*expected, *rows_by_partition}):
            if by_source(rows_by_partition.get(partition, ())) != by_source(
                expected.get(partition, ())
            ):
                self.note(
                    f"epoch {epoch}, {partition}: committed "
                    f"{rows_by_partition.get(partition, [])}, "
                    f"expected {list(expected.get(partition, ()))}"
                )

    def check_keyed(
        self, epoch: int, visible: Mapping[TopicPartition, Sequence[Row]], manifest_path: str
    ) -> None:
        """An epoch with keyed steps was decided; its rows by the partition where they belong."""
        read = self._expected_rows(self.checkpoint, epoch)
        is_over = self.checkpoint.offsets[epoch] == self.stops
        expected = self.state.expected(epoch, read, is_over=is_over)
        self.state.on_commit(epoch, visible, self.checkpoint.files, manifest_path)
        self._check_operator_state(epoch, manifest_path)
        if _offsets(visible) != _offsets(expected):
            self.note(f"epoch {epoch}: committed {visible}, expected {expected}")

    def _check_operator_state(self, epoch: int, manifest_path: str) -> None:
        files = self.checkpoint.files
        if not self.has_operator_state or manifest_path not in files:
            return
        begins, ends = self.checkpoint.beginning, self.checkpoint.offsets[epoch]
        state = decode(files[manifest_path], manifest_path).state
        try:
            wrong_entries = wrong_state(
                begins, ends, state, lambda step_state: self.state.entries(step_state, files)
            )
            for wrong in wrong_entries:
                self.note(f"epoch {epoch}: {wrong}")
        except (KeyError, DamagedError) as error:
            self.note(f"epoch {epoch}: its operator state cannot be read: {error!r}")

    def _check_foreign(self, epoch: int, step: int, counted_at: int | None) -> None:
        self.foreign_epochs.add(epoch)
        if self._tells and (counted_at is None or step <= counted_at):
            self.note(f"epoch {epoch}: foreign rows were there to be counted, and were committed")

    def begin(self, checkpoint: Checkpoint, epoch: int) -> None:
        """The pipeline goes on with a checkpoint, after an epoch that is committed, or -1."""
        self.checkpoint = checkpoint
        self.committed_epoch = epoch if checkpoint.recorded is None else max(epoch, 0)
        if self.is_keyed:
            self.state.begin(checkpoint.lineage, epoch)

    # Ends of drivers
    def check_positions(self, shown: Mapping[TopicPartition, int]) -> None:
        """No driver runs: the group of the source on the same cluster shows what is committed."""
        if self.committed_epoch >= 0 and self.committed_epoch not in self.checkpoint.offsets:
            self.note(
                f"epoch {self.committed_epoch} is committed, its entry in Spark's log is gone"
            )
            return
        ends = self.checkpoint.start_of(self.committed_epoch + 1)
        wrong = {p: offset for p, offset in shown.items() if offset != ends[p]}
        none_yet = -1 if self.checkpoint.recorded is None else 0
        if wrong or (not shown and self.committed_epoch > none_yet):
            self.note(f"epoch {self.committed_epoch} ends at {ends}, the group shows {shown}")

    def on_end(self, name: str, offered: int, error: BaseException | None) -> str:
        """A driver's process ended, after it was offered an epoch; the word for how."""
        match error:
            case None:
                return "finished"
            case Crash():
                return "died"
            case ForeignRowsError():
                epochs = {int(number) for number in re.findall(r"epoch (\d+) is", str(error))}
                if not epochs <= self.foreign_epochs:
                    self.note(f"{name}: {error}, but there are no foreign rows")
                self.reported_epochs |= epochs
                return "ForeignRowsError"
            case DataLossError():
                return self._refusal(name, offered, error)
            case FencedError():
                if self.takeover_count < 2:
                    self.note(f"{name}: {error}, but nobody has taken over")
                return "fenced"
            case OptionError() if self.expected_error is OptionError:
                self.expected_seen = True
                return "refused"
            case SecondCallError() if offered in self.checkpoint.called_twice:
                return "called twice"
            case RetriableError():
                return "no disk" if isinstance(error, StorageError) else "gave up"
            case ConcurrentRunError() | UnreadableLogError():
                return "Spark's log stands in the way"
            case _:
                self.note(f"{name}: {type(error).__name__}: {error}")
                return "broken"

    def _refusal(self, name: str, offered: int, error: DataLossError) -> str:
        if match := re.search(r"partial-epoch-(\d+)", str(error)):
            self.told_partial.add(int(match[1]))
            if int(match[1]) in self.checkpoint.called_twice:
                return "told of a second call"
        if self.expected_error is not None and isinstance(error, self.expected_error):
            self.expected_seen = True
            return "refused"
        if match := re.search(r"without-epochs-(\d+)-to-(\d+)", str(error)):
            gap = range(int(match[1]), int(match[2]) + 1)
            failed = {
                epoch
                for epoch in gap
                if epoch in self.checkpoint.caught
                # A loss of power took Spark's entry and kept the note; the function then skipped
                # the epoch. A start cannot tell this from a caught error that lost rows.
                or (epoch in self.checkpoint.left_out and failures(self.checkpoint.files, epoch))
            }
            if gap.start > self.committed_epoch and failed:
                return "told of failed calls"
        is_behind = self.owner == name and offered < self.checkpoint.first_epoch()
        if is_behind or name in self._outrun:
            return "asked for an epoch that another query had finished meanwhile"
        self.note(f"{name}: {type(error).__name__} without a cause: {error}")
        return "refused without a cause"

    def asks_to_take_over(self, name: str) -> None:
        """A process that was the owner asks to be it again, whoever is now."""
        if name != self.owner:
            self.note(f"{name} was replaced by {self.owner}, and takes over from it")

    def took_over(self, name: str, offered: int) -> None:
        """A process took the transactional id over from whoever had it, to run an epoch."""
        if offered < self.checkpoint.first_epoch():
            self._outrun.add(name)
        self.owner = name
        self.takeover_count += 1

    # The end
    def at_the_end(
        self, visible: Mapping[TopicPartition, Sequence[Row]], input_: Collection[Row]
    ) -> None:
        """All input is consumed: the visible output is the input, exactly."""
        rows = [row for rows_there in visible.values() for row in rows_there if not row.foreign]
        read = [(row.source, row.offset) for row in rows]
        wanted = self.wanted(input_)
        if lost := sorted(wanted - Counter(read)):
            self.note(f"lost: {lost}")
        if duplicated := sorted(one for one in Counter(read) - wanted if one in wanted):
            self.note(f"duplicated: {duplicated}")
        if foreign := sorted(set(read) - set(wanted)):
            self.note(f"never read: {foreign}")
        for partition, rows_there in visible.items() if not self.state.has_windows else ():
            for (_, source, _), offsets in in_order(rows_there).items():
                if offsets != sorted(offsets):
                    self.note(f"{partition}: rows of {source} are out of order: {offsets}")
        if self.is_keyed:
            self.state.at_the_end(visible)
        self.at_any_end()

    def wanted(self, input_: Collection[Row]) -> Counter[tuple[TopicPartition, int]]:
        """Where the input records were that are to be visible, once all of the input is read."""
        read = Counter((row.source, row.offset) for row in input_)
        return self.state.wanted(read) if self.is_keyed else read

    def at_any_end(self) -> None:
        """What holds also when a person has to decide first."""
        if silent := sorted(self.foreign_epochs - self.reported_epochs):
            self.note(f"foreign rows in epochs {silent} were committed and never reported")


def by_source(rows: Sequence[Row]) -> dict[TopicPartition, list[int]]:
    """The input offsets of rows, in order, per input partition: their order in between is free."""
    return {source: offsets for (_, source, _), offsets in in_order(rows).items()}


def in_order(rows: Sequence[Row]) -> dict[tuple[str, TopicPartition, int], list[int]]:
    """The same per lineage and, after a keyed step, per key: only there the order is kept."""
    offsets_by_key: dict[tuple[str, TopicPartition, int], list[int]] = {}
    for row in rows:
        if not row.foreign:
            offsets_by_key.setdefault((row.lineage, row.source, row.key), []).append(row.offset)
    return offsets_by_key


def _offsets(rows: Mapping[TopicPartition, Sequence[Row]]) -> list[tuple[TopicPartition, int]]:
    """Which input records they are of, wherever they go: a key's row goes to its partition."""
    return sorted(
        (row.source, row.offset) for partition_rows in rows.values() for row in partition_rows
    )


def offered_words(error: object) -> set[str]:
    """What a message tells a person to state, so that the job goes on."""
    return {str(error).partition("accept='")[2].partition("'")[0]} - {""}


def stated_after(end: str, error: object) -> set[str]:
    """What a person states after a driver ended so."""
    return offered_words(error) if end in DECIDED else set()
