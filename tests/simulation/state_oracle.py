"""What the keyed step's output and state must be, told without the code that is tested.

Which record has which key may differ between attempts (a function of the user that draws), so the
visible rows themselves say it; what follows from it is checked:
    * A key's counts go on from where the epoch before left them: 1, 2, 3, … over all runs.
    * After each epoch its manifest holds the latest event time of each input partition: that of
      the rows that are visible, whatever other attempts have read.
    * With two inputs an epoch's rows are visible but for those that are late by the watermark of
      the epochs before it: the earliest of the latest event times of all partitions of both.
    * After each epoch the files that its manifest names, put one over the other in their order,
      from nothing, hold exactly the counts that are visible.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import pyarrow as pa

from tallystick.state.catalog import SNAPSHOT, StateFile, StepState
from tallystick.state.changelog import DamagedError, decode, parse_index
from tallystick.values import TopicPartition
from tests.simulation.hosts import LocalCopy
from tests.simulation.keyed_step import GROUP_COUNT, KEY_COUNT, entries_of, without_expiries
from tests.simulation.rows import Row, key_partition, time_of
from tests.simulation.window_oracle import FINAL_MS, Place, WindowOracle

Counts = dict[int, int]
ENTRIES_PER_PANE = 2
"""Its values, and its timer."""


class StateOracle:
    """Counts what is visible, and reads what is committed.

    Args:
        note: told what is wrong.
        output: the output partitions.
        waited_for: the partitions that the watermark waits for; empty: nothing is known of it.
        is_judged: rows may be late for the first step.
        has_windows: there is a second step; see `WindowOracle`.
        others: how many states there are besides those of the steps.
    """

    def __init__(
        self,
        note: Callable[[str], None],
        output: Sequence[TopicPartition],
        waited_for: Collection[TopicPartition],
        *,
        is_judged: bool,
        has_windows: bool,
        others: int = 0,
    ) -> None:
        self.counts: Counts = {}
        self.counts_at: dict[int, Counts] = {-1: {}, 0: {}}  # by epoch; 0: a lineage began
        self.latest: dict[TopicPartition, int] = {}  # event time, by input partition
        self.latest_at: dict[int, dict[TopicPartition, int]] = {-1: {}, 0: {}}
        self.watermark: int | None = None
        self.watermark_at: dict[int, int | None] = {-1: None, 0: None}
        self.starts: dict[str, Counts] = {}  # by lineage, of those that did not begin at nothing
        self._read: dict[str, tuple[bytes, list[pa.RecordBatch]]] = {}  # by path: files are many
        self._note = note
        self._output = output
        self._waited_for = waited_for
        self._is_judged = is_judged
        self._lineage = ""
        self._late: dict[tuple[str, int], list[Place]] = {}
        self.has_windows = has_windows
        self._others = others
        self.windows = WindowOracle(note)
        self.visible: list[Row] = []  # of the epoch that was decided last

    def begin(self, lineage: str, epoch: int) -> None:
        """The pipeline goes on after an epoch that was committed; -1: from nothing."""
        self.counts, self.latest = dict(self.counts_at[epoch]), dict(self.latest_at[epoch])
        self.watermark, self._lineage = self.watermark_at[epoch], lineage
        for at in [place for place in self._late if place[0] == lineage and place[1] > epoch]:
            del self._late[at]  # these were taken back
        self.starts.setdefault(lineage, dict(self.counts))
        if self.has_windows:
            self.windows.begin(lineage, epoch)

    def wanted(self, read: Counter[Place]) -> Counter[Place]:
        """How often each input record is to be visible, once all of the input is read."""
        return self.windows.fired if self.has_windows else read - self.late

    @property
    def late(self) -> Counter[Place]:
        """How often each input record was read, and came too late to count."""
        return Counter(at for late_rows in self._late.values() for at in late_rows)

    def expected(
        self, epoch: int, read: Mapping[TopicPartition, Sequence[Row]], *, is_over: bool = False
    ) -> Mapping[TopicPartition, Sequence[Row]]:
        """The rows that an epoch is to make visible; called once for each, before `on_commit`.

        Args:
            epoch: its number.
            read: all that it read.
            is_over: nothing comes after it.
        """
        before = self.watermark
        in_time = self._in_time(epoch, read)
        if is_over:
            self.watermark = FINAL_MS
        if not self.has_windows:
            return in_time
        rows = [row for rows_there in in_time.values() for row in rows_there]
        # A step hands on the watermark that it went by, not the one that it leaves.
        due = self.windows.pass_on(epoch, rows, self.counts, handed_ms=before)
        return {self._output[0]: [Row(self._lineage, epoch, *at) for at in due]}

    def _in_time(
        self, epoch: int, read: Mapping[TopicPartition, Sequence[Row]]
    ) -> Mapping[TopicPartition, Sequence[Row]]:
        """The rows of an epoch that are not late for the first step."""
        if not self._waited_for:
            return read
        watermark = self.watermark
        late: list[Place] = []
        for row in [row for rows in read.values() for row in rows]:
            time = time_of(row.source, row.offset)
            self.latest[row.source] = max(time, self.latest.get(row.source, time))
            if self._is_judged and watermark is not None and time <= watermark:
                late.append((row.source, row.offset))
        self._late[self._lineage, epoch] = late
        if self.latest.keys() == set(self._waited_for):
            self.watermark = min(self.latest.values()) - 1
        return {
            partition: [row for row in rows if (row.source, row.offset) not in late]
            for partition, rows in read.items()
        }

    def on_commit(
        self,
        epoch: int,
        rows: Mapping[TopicPartition, Sequence[Row]],
        files: Mapping[str, bytes],
        manifest_path: str,
    ) -> None:
        """An epoch became visible.

        Args:
            epoch: its number.
            rows: by output partition, in the order of the log.
            files: of the checkpoint.
            manifest_path: that the token names.
        """
        self.visible = [row for partition_rows in rows.values() for row in partition_rows]
        if self.has_windows:
            self.windows.look_at(epoch, self.visible)
        for partition, partition_rows in rows.items():
            for row in partition_rows:
                if not 0 <= row.key < KEY_COUNT or partition != self._partition_of(row):
                    self._note(f"epoch {epoch}, {partition}: {row} is of no key that goes there")
                if self.has_windows:
                    continue
                if not self._waited_for:
                    self.latest[row.source] = max(row.key, self.latest.get(row.source, row.key))
                count = self.counts[row.key] = self.counts.get(row.key, 0) + 1
                if row.nth != count:
                    self._note(
                        f"epoch {epoch}, {partition}: key {row.key} is counted {row.nth} at "
                        f"{row.source} {row.offset}, expected {count}"
                    )
        self.counts_at[epoch], self.latest_at[epoch] = dict(self.counts), dict(self.latest)
        self.watermark_at[epoch] = self.watermark
        self._check_state(epoch, files, manifest_path)

    def _partition_of(self, row: Row) -> TopicPartition:
        return self._output[key_partition(row.key)]

    def _check_state(self, epoch: int, files: Mapping[str, bytes], manifest_path: str) -> None:
        if manifest_path not in files:
            self._note(f"epoch {epoch}: its manifest {manifest_path} is not there")
            return
        (line, _) = files[manifest_path].split(b"\n", 1)
        state = [StepState.from_json(step) for step in json.loads(line)["state"]]
        if not state and not self.counts:
            return
        if len(state) != 1 + self.has_windows + self._others:
            self._note(f"epoch {epoch}: its manifest has the state of {len(state)} steps")
            return
        if self.has_windows:
            self._check_windows(epoch, state[1], files)
        # Under no topic's name there is the watermark that was in use.
        of_partitions = [time for time in state[0].partition_times if time.topic]
        times = [time for time in of_partitions if time.latest_ms is not None]
        noted = {TopicPartition(*time[:2]): time.latest_ms for time in times}
        if noted != self.latest:
            self._note(f"epoch {epoch}: its event times are {noted}, expected {self.latest}")
        found_ms = state[0].watermark_ms
        if self._waited_for and found_ms != self.watermark:
            self._note(f"epoch {epoch}: its watermark is {found_ms}, expected {self.watermark}")
        try:
            entries = self.entries(state[0], files)
        except (KeyError, DamagedError) as error:
            self._note(f"epoch {epoch}: its state cannot be read: {error!r}")
            return
        ids = {field.name: field.state_id for field in state[0].fields}
        expected = entries_of(self.counts, (ids["count"], ids["odd"]))
        entries = without_expiries(entries)
        if entries != expected:
            self._note(f"epoch {epoch}: its files hold {entries}, expected {expected}")

    def _check_windows(self, epoch: int, step: StepState, files: Mapping[str, bytes]) -> None:
        """Panes are of the ready-made function's own format: how many there are can be said."""
        now = self.windows.now
        if step.watermark_ms != now.watermark_ms:
            self._note(
                f"epoch {epoch}: the windows' watermark is {step.watermark_ms}, "
                f"expected {now.watermark_ms}"
            )
        try:
            entries = self.entries(step, files)
        except (KeyError, DamagedError) as error:
            self._note(f"epoch {epoch}: its windows cannot be read: {error!r}")
            return
        panes = {(row.key % GROUP_COUNT, row.closes_ms) for row in now.waiting.values()}
        if len(entries) != ENTRIES_PER_PANE * len(panes):
            self._note(
                f"epoch {epoch}: its windows have {len(entries)} entries, {len(panes)} panes"
            )

    def entries(self, step: StepState, files: Mapping[str, bytes]) -> dict[bytes, bytes]:
        """Read all files of a step, one over the other; a snapshot clears its key groups first.

        Raises:
            KeyError: a file is missing.
            DamagedError: a file is not what the manifest says.
        """
        whole = LocalCopy()
        for file in step.files:
            data, batches = self._read.get(file.path, (b"", []))
            if data is not files[file.path]:
                data = files[file.path]
                batches = _batches(file, data)
                self._read[file.path] = data, batches
            if file.kind == SNAPSHOT:
                whole.take(file.groups)
            for batch in batches:
                whole.take(batch)
        return whole.entries

    def at_the_end(self, visible: Mapping[TopicPartition, Sequence[Row]]) -> None:
        """What a reader of the whole output finds: per lineage, each key counted without a gap."""
        if self.has_windows:
            self.windows.at_the_end([row for rows_there in visible.values() for row in rows_there])
            return
        counted: dict[tuple[str, int], list[int]] = {}
        for rows_there in visible.values():
            for row in rows_there:
                if not row.foreign:
                    counted.setdefault((row.lineage, row.key), []).append(row.nth)
        for (lineage, key), counts in counted.items():
            start = self.starts.get(lineage, {}).get(key, 0)
            if counts != list(range(start + 1, start + 1 + len(counts))):
                self._note(f"{lineage}, key {key}: counted {counts} after {start}")


def _batches(file: StateFile, data: bytes) -> list[pa.RecordBatch]:
    if len(data) != file.size:
        raise DamagedError(f"{file.path}: {len(data)} bytes, expected {file.size}")
    segments = parse_index(data[file.size - file.index_size :], file.checksum)
    blobs = [data[segment.offset : segment.offset + segment.length] for segment in segments]
    return [
        decode(blob, segment, file.groups) for blob, segment in zip(blobs, segments, strict=True)
    ]
