"""The report of a run to its console: start, progress, waiting, outages, end.

A thread looks twice a second. It asks nobody: positions and ends are those of the newest epoch.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from threading import Event, Thread
from typing import Any

from tallystick.epoch.two_phase import Sink
from tallystick.errors import TallystickError
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.cluster import describe_topics, list_offsets
from tallystick.kafka.outages import OUTAGES
from tallystick.pipeline.input_planning import Positions
from tallystick.pipeline.inputs import PipelineInput
from tallystick.pipeline.listeners import PIPELINES, source_progress
from tallystick.pipeline.topology import OutputTopology
from tallystick.run.console import Console
from tallystick.run.part_times import WHOLE
from tallystick.source.subscription import EARLIEST, LATEST, AtOffsets
from tallystick.values import TopicPartition

logger = logging.getLogger(__name__)

LOOK_S = 0.5
TOLD_AFTER_S = 3.0
"""A shorter wait is not reported."""
REPORT_S = 30.0
"""The time between two lines about progress, or about one outage."""
OVERDUE_S = 15.0
"""An epoch that is open for less is not warned about, however short those before it were."""


class RunWatch:
    """Reports a run to its console.

    Args:
        name: of the pipeline.
        clusters: bootstrap servers of the clusters that it needs.
        console: gets the lines.
    """

    def __init__(self, name: str, clusters: Collection[str], console: Console) -> None:
        self._name = name
        self._clusters = frozenset(clusters)
        self._console = console
        self._closed = Event()
        self._thread = Thread(target=self._look_on, name=f"tallystick {name} report", daemon=True)
        self._idle_since_s: Callable[[], float | None] = lambda: None
        self._began_s = self._reported_s = time.monotonic()
        self._is_waiting_told, self._waiting_told_s = False, -REPORT_S
        self._outage_s: float | None = None
        self._outage_told_s = 0.0
        self._epochs = self._records = self._records_drawn = 0
        self._drawn_s = self._began_s
        self._reported = (0, 0, 0)
        self._rows_before = PIPELINES[name].rows_written
        self._lag: int | None = None
        self._committed = ""
        self._hint = ""
        self._state = "starting"
        self._longest_s = 0.0
        self._overdue_ms = 0

    def begin(self) -> None:
        """Begin to look."""
        self._console.open()
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()
        self._console.close()

    def started(self, idle_since_s: Callable[[], float | None], text: str, hint: str) -> None:
        """Report the start of the loop.

        Args:
            idle_since_s: returns since when the loop finds no records; None: it finds some.
            text: what is read, and where it goes.
            hint: why there may be nothing to read; "": no reason is known.
        """
        self._idle_since_s, self._hint, self._state = idle_since_s, hint, "running"
        self._console.info(text)

    def note(self, progress: Mapping[str, Any]) -> None:
        """Take in the progress of an epoch."""
        self._epochs += 1
        self._records += progress["numInputRows"]
        if self._epochs > 1:  # the first waits for Spark and compiles
            self._longest_s = max(self._longest_s, progress["durationMs"][WHOLE] / 1000)
        lags = [source.lag_total for source in source_progress(progress)]
        known = [lag for lag in lags if lag is not None]
        self._lag = sum(known) if known else None
        self._hint = "" if self._records else self._hint
        self._committed = f"{datetime.now(UTC).astimezone():%H:%M:%S} (epoch {progress['batchId']})"

    def ended(self, error: BaseException | None) -> None:
        """Report the end of the run."""
        took_s = time.monotonic() - self._began_s
        outcome = "ended" if error is None else f"ended with {type(error).__name__}"
        self._console.info(
            f"{outcome} after {took_s:.0f} s: {self._epochs} epochs, {self._records} records read, "
            f"{self._rows} rows written, last commit {self._committed or 'none'}"
        )
        self.close()

    @property
    def _rows(self) -> int:
        return PIPELINES[self._name].rows_written - self._rows_before

    def _look_on(self) -> None:
        while not self._closed.wait(LOOK_S):
            try:
                self.look(time.monotonic())
            except Exception:  # a report must not end, nor disturb, what it is about
                logger.exception("pipeline %s: its report failed", self._name)

    def look(self, now_s: float) -> None:
        """Report what has come about until now."""
        self._look_for_outages(now_s)
        waits_s = self._look_for_waiting(now_s)
        self._look_for_overdue_epoch()
        if now_s - self._reported_s >= REPORT_S:
            self._report(now_s)
        if now_s - self._drawn_s >= 2 * LOOK_S:
            rate = (self._records - self._records_drawn) / (now_s - self._drawn_s)
            self._records_drawn, self._drawn_s = self._records, now_s
            self._console.draw(self._line(rate, waits_s))

    def _line(self, rate: float, waits_s: float | None) -> str:
        state = self._state
        if self._outage_s is not None:
            state = f"Kafka does not answer ({time.monotonic() - self._outage_s:.0f} s)"
        elif waits_s is not None:
            state = f"waiting for records ({waits_s:.0f} s)"
        return f"{rate:.0f} records/s, {self._standing}, {state}"

    @property
    def _standing(self) -> str:
        lag = "not known" if self._lag is None else self._lag
        return f"lag {lag}, last commit {self._committed or 'none'}"

    def _look_for_outages(self, now_s: float) -> None:
        away = OUTAGES.lasting(self._clusters, TOLD_AFTER_S)
        if not away:
            if self._outage_s is not None:
                self._console.info(f"Kafka answers again, after {now_s - self._outage_s:.0f} s")
            self._outage_s = None
            return
        if self._outage_s is None:
            self._outage_s, self._outage_told_s = now_s - TOLD_AFTER_S, 0.0
        if now_s - self._outage_told_s >= REPORT_S:
            self._outage_told_s = now_s
            reasons = "; ".join(f"{server}: {reason}" for server, reason in sorted(away.items()))
            self._console.warning(
                f"Kafka does not answer for {now_s - self._outage_s:.0f} s, and is asked again: "
                f"{reasons}"
            )

    def _look_for_waiting(self, now_s: float) -> float | None:
        """Report once that records are waited for; return since how long."""
        since_s = self._idle_since_s()
        if since_s is None or self._outage_s is not None:
            self._is_waiting_told = self._is_waiting_told and since_s is not None
            return None
        waits_s = now_s - since_s
        is_due = not self._is_waiting_told and now_s - self._waiting_told_s >= REPORT_S
        if waits_s >= TOLD_AFTER_S and is_due:
            self._is_waiting_told, self._waiting_told_s = True, now_s
            self._console.info(f"waits for records: there is none to read{self._hint}")
        return waits_s

    def _look_for_overdue_epoch(self) -> None:
        """Warn once of an epoch that takes much longer than all epochs before it."""
        since_ms = PIPELINES[self._name].open_since_ms
        open_s = time.time() - since_ms / 1000
        if since_ms in (0, self._overdue_ms) or open_s < max(OVERDUE_S, 3 * self._longest_s):
            return
        self._overdue_ms = since_ms
        before = f", and none took longer than {self._longest_s:.1f} s" if self._longest_s else ""
        self._console.warning(
            f"an epoch is under way for {open_s:.0f} s{before}: a function hangs, or a task or a "
            f"server does not answer. Nothing is lost"
        )

    def _report(self, now_s: float) -> None:
        counts = (self._records, self._rows, self._epochs)
        records, rows, epochs = (
            now - before for now, before in zip(counts, self._reported, strict=True)
        )
        took_s = now_s - self._reported_s
        self._reported, self._reported_s = counts, now_s
        open_ms = PIPELINES[self._name].open_since_ms
        age_s = time.time() - open_ms / 1000
        under_way = f", an epoch under way for {age_s:.0f} s" if open_ms and age_s > LOOK_S else ""
        self._console.info(
            f"in {took_s:.0f} s {records} records ({records / took_s:.0f}/s), {rows} rows, "
            f"{epochs} epochs; {self._standing}{under_way}"
        )


def start_text(
    inputs: Collection[PipelineInput],
    brokers: Mapping[str, KafkaBroker],
    topology: OutputTopology,
    begins: Positions,
    goes_on_after: int | None,
    checkpoint: str,
) -> tuple[str, str]:
    """Describe a start in a line, with the reason why there may be nothing to read.

    Args:
        inputs: of the pipeline.
        brokers: that can be asked, by the uid of the input.
        topology: of the outputs.
        begins: where each input begins.
        goes_on_after: the newest committed epoch; None: there is none.
        checkpoint: its location.

    Returns:
        The line; and a hint, to be put after what is waited for.
    """
    by_uid = {offsets.input: offsets for offsets in begins}
    reads, hints = [], []
    for source in inputs:
        offsets = by_uid.get(source.uid)
        topics = ", ".join(sorted(source.topics))
        count = "" if offsets is None else f" ({_counted(len(offsets.positions), 'partition')})"
        where = ""
        if goes_on_after is None:
            where, hint = _beginning(source, brokers[source.uid])
            hints += [hint] if hint else []
        reads.append(f"{topics}{count}{where} at {source.config.bootstrap_servers}")
    writes = ", ".join(_sink_text(uid, sink) for uid, sink in topology.by_uid)
    epoch = "new" if goes_on_after is None else f"goes on after epoch {goes_on_after}"
    line = f"reads {'; '.join(reads)}; writes {writes}; checkpoint {checkpoint}, {epoch}"
    return line, "".join(f": {hint}" for hint in hints)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _sink_text(uid: str, sink: Sink) -> str:
    topic = getattr(sink, "topic", None)
    return f"topic {topic}" if isinstance(topic, str) else f"{type(sink).__name__} {uid}"


def _beginning(source: PipelineInput, broker: KafkaBroker) -> tuple[str, str]:
    """Return where a new pipeline begins to read an input, and a hint if nothing is there."""
    start = source.options.start
    if not isinstance(start, AtOffsets) or start.partitions:
        return " from its starting offsets or time", ""
    if start.default == EARLIEST:
        return " from the beginning", ""
    count = 0 if start.default != LATEST else _records_there(source, broker)
    if not count:
        return " from the end", ""
    remedy = f"starting_offsets='earliest' reads the {count} records that are there"
    return f" from the end ({remedy})", f"the run began at the end; {remedy}"


def _records_there(source: PipelineInput, broker: KafkaBroker) -> int:
    client = broker.client
    try:
        partitions = [
            TopicPartition(topic, index)
            for topic, existing in describe_topics(client, source.topics).items()
            for index in range(existing.partition_count)
        ]
        begins = list_offsets(client, partitions, EARLIEST)
        ends = list_offsets(client, partitions, LATEST)
    except (OSError, TallystickError):
        return 0
    return sum(ends[at] - begins[at] for at in ends.keys() & begins.keys())
