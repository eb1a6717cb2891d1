"""Read splits from Kafka as Arrow batches: each from its first offset exactly to its last.

Invariants:
    * Every visible record of a split is yielded once, in order, or an error is raised.
    * A position moves past control batches and aborted records too: they are not waited for.
    * What Kafka no longer has is a DataLossError, or is given up with a warning where the policy
      says so; the other splits do not notice.
    * Splits take turns. While one answer is decoded, each leader has at most one request under
      way; only one answer at a time is in memory.

A split waits for its leader to be looked up, then for its turn at that leader, then for an answer;
with one it joins the end of the leader's line again, so all take turns. Whatever goes wrong with it
sends it back to the look-up after a pause of its own: the others do not wait for it.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

import pyarrow as pa

from tallystick.errors import DataLossError
from tallystick.host.stopwatch import READ_BYTES, count
from tallystick.kafka import cluster
from tallystick.kafka.client import Client, client_for
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.error_policy import ABSENT, AGAIN, STALE, Attempts, describe, refusal
from tallystick.kafka.fetch_request import (
    Cursor,
    Isolation,
    Part,
    SplitRequest,
    accept_loss,
    fetch_request,
    log_truncated,
    part_of,
    partition_removed,
    parts_by_cursor,
    records_expired,
    skip_expired,
    skip_unreadable,
    take_turn,
    topic_recreated,
)
from tallystick.kafka.messages import NO_ID
from tallystick.source.subscription import EARLIEST, LATEST, LossPolicy
from tallystick.values import SplitRange, TopicPartition

FETCH_BYTES_MAX = 8 << 20
"""The maximum size of one answer; a larger record comes all the same (KIP-74)."""
STRICT = LossPolicy()
NOTICEABLE_S = 0.01
"""A shorter absence of the reader is not worth a correction of deadlines."""
CERTAIN_AFTER_S = 5.0
"""The time for which all answers must show a loss before it is believed: a broker that lags behind
shows a topic as gone, or as an older one, and a leader that was deposed a log that is too short."""
REMOVED = "removed"
RECREATED = "recreated"
SHORT = "short"
"""Errors of a split: its topic is gone, or another one; its log ends too early."""


@dataclass(frozen=True)
class KafkaFetch:
    """A reading task's access to a cluster; see `ports.Fetch`.

    Args:
        config: how the cluster is reached; a process keeps its connections from task to task.
    """

    config: KafkaConfig

    def read(
        self, splits: Iterable[SplitRange], *, headers: bool, policy: LossPolicy
    ) -> Iterator[tuple[SplitRange, pa.RecordBatch]]:
        """See `ports.Fetch.read`, and `fetch_all`."""
        return fetch_all(client_for(self.config), splits, headers=headers, policy=policy)


def fetch(
    client: Client,
    split: SplitRange,
    *,
    headers: bool = False,
    max_bytes: int = FETCH_BYTES_MAX,
    isolation: Isolation = "read_committed",
) -> Iterator[pa.RecordBatch]:
    """Read one split; see `fetch_all`."""
    batches = fetch_all(client, [split], headers=headers, max_bytes=max_bytes, isolation=isolation)
    for _, batch in batches:
        yield batch


def fetch_all(
    client: Client,
    splits: Iterable[SplitRange],
    *,
    headers: bool = False,
    policy: LossPolicy = STRICT,
    max_bytes: int = FETCH_BYTES_MAX,
    isolation: Isolation = "read_committed",
) -> Iterator[tuple[SplitRange, pa.RecordBatch]]:
    """Read many splits, in turns, keeping the order within each.

    Args:
        client: of the cluster.
        splits: what to read; their ends must be no later than the last stable offsets.
        headers: whether the batches have a column of headers.
        policy: what to do about records that Kafka no longer has.
        max_bytes: how much to ask a leader for at once.
        isolation: whether records of open and aborted transactions are left out.

    Yields:
        Batches with the columns of `records.decode_pieces`, none of them empty, and whose they are.

    Raises:
        RecordsExpiredError: records were deleted unread.
        PartitionRemovedError: a topic, or a partition, does not exist.
        TopicRecreatedError: a topic is not the one that the split means.
        LogTruncatedError: a log ends before the split.
        CorruptRecordError: bytes in the log are damaged.
        AuthorizationError: READ on a topic is missing.
        BrokerUnavailableError: nothing new came for a split within delivery.timeout.ms; time in
            which the caller does other things does not count.
    """
    turns = Turns(client, splits, policy, max_bytes, isolation)
    waiting: deque[Part] = deque()
    try:
        while waiting or turns.receive(waiting):
            while waiting:
                part = waiting.popleft()
                for batch in _decoded(part, headers, isolation, policy):
                    yielded_at = time.monotonic()
                    yield part.cursor.split, batch
                    away_s = time.monotonic() - yielded_at
                    if away_s > NOTICEABLE_S:
                        turns.forgive(away_s)
    finally:
        turns.close()


def _decoded(
    part: Part, headers: bool, isolation: Isolation, policy: LossPolicy
) -> Iterator[pa.RecordBatch]:
    """Yield the records of a part, piece by piece."""
    # It loads compiled kernels, which `topic_reading` does without.
    from tallystick.codec.records.decoder import decode_pieces

    split = part.cursor.split
    count(READ_BYTES, len(part.records))
    pieces = decode_pieces(
        part.records,
        topic_partition=split.topic_partition,
        start_offset=part.start,
        stop_offset=split.stop_offset,
        aborted=part.aborted if isolation == "read_committed" else None,
        headers=headers,
        give_up=partial(skip_unreadable, part.cursor, policy),
    )
    for piece in pieces:
        if piece.batch.num_rows:
            yield piece.batch
    assert piece.next_offset == part.stop, (split, part.start, part.stop, piece.next_offset)


class Turns:
    """The splits of one reader.

    Args:
        client: of the cluster.
        splits: what to read.
        policy: what to do about losses.
        max_bytes: how much to ask a leader for at once.
        isolation: whether records of open and aborted transactions are left out.
    """

    def __init__(
        self,
        client: Client,
        splits: Iterable[SplitRange],
        policy: LossPolicy,
        max_bytes: int,
        isolation: Isolation,
    ) -> None:
        self._client = client
        self._policy = policy
        self._max_bytes = max_bytes
        self._isolation: Isolation = isolation
        self._homeless = [Cursor(split) for split in splits if split.offset_count]
        self._lines: dict[int, deque[Cursor]] = {}
        self._under_way: dict[int, SplitRequest] = {}

    def receive(self, parts: deque[Part]) -> bool:
        """Wait for an answer, ask for more, and hand over what came; False when all is read."""
        if not self._under_way:
            self._ask()
        if self._under_way:
            parts.extend(self._next_answer())
            self._ask()  # before any decoding
        elif self._homeless:
            time.sleep(max(0.0, min(cursor.due for cursor in self._homeless) - time.monotonic()))
        return bool(parts or self._under_way or self._homeless or any(self._lines.values()))

    def forgive(self, seconds: float) -> None:
        """Subtract time in which the caller did other things."""
        cursors = list(self._homeless)
        cursors += [cursor for line in self._lines.values() for cursor in line]
        cursors += [cursor for request in self._under_way.values() for cursor in request.cursors]
        for cursor in cursors:
            cursor.forgive(seconds)

    def close(self) -> None:
        """Discard the answers that are under way."""
        for request in self._under_way.values():
            self._client.network.discard(request.posted)
        self._under_way.clear()

    # --- ask ----------------------------------------------------------------------------------

    def _ask(self) -> None:
        now = time.monotonic()
        due = [cursor for cursor in self._homeless if cursor.due <= now]
        if due:
            self._homeless = [cursor for cursor in self._homeless if cursor.due > now]
            self._look_up(due)
        for node, line in self._lines.items():
            if line and node not in self._under_way:
                self._post(node, take_turn(line))

    def _look_up(self, due: list[Cursor]) -> None:
        client = self._client
        led = client.by_leader({cursor.partition for cursor in due}, self._deadline(due))
        nodes = {partition: node for node, led_by in led.items() for partition in led_by}
        for cursor in due:
            topic_id = client.topic_ids.get(cursor.split.topic)
            obstacle = client.leader_obstacle(cursor.partition)
            if not cursor.belongs_to(topic_id):
                loss = topic_recreated(cursor, topic_id)
                self._suspect(cursor, RECREATED, loss, "another topic id")
            elif cursor.partition in nodes:
                cursor.take_back(REMOVED, RECREATED)
                self._lines.setdefault(nodes[cursor.partition], deque()).append(cursor)
            elif obstacle in ABSENT:
                servers = client.config.bootstrap_servers
                loss_of_all = partition_removed(cursor, servers, self._policy)
                self._suspect(cursor, REMOVED, loss_of_all, obstacle)
            else:
                self._pause(cursor, obstacle)

    def _post(self, node: int, chosen: list[Cursor]) -> None:
        topic_ids = self._named_by(chosen)
        cursors = [
            cursor
            for cursor in chosen
            if topic_ids[cursor.split.topic] is not None
            and cursor.belongs_to(topic_ids[cursor.split.topic])
        ]
        for cursor in chosen:
            if cursor not in cursors:  # another split's look-up has shown another topic, or none
                self._client.forget_leaders([cursor.partition])
                self._homeless.append(cursor)
        if not cursors:
            return
        epochs = self._client.leader_epochs
        request = fetch_request(cursors, topic_ids, epochs, self._max_bytes, self._isolation)
        until = self._client.try_until(self._deadline(cursors))
        try:
            posted = self._client.network.post(node, request, until)
        except OSError as error:
            self._strand(node, cursors, error)
        else:
            self._under_way[node] = SplitRequest(posted, until, request.version, cursors, topic_ids)

    def _named_by(self, cursors: Iterable[Cursor]) -> dict[str, UUID | None]:
        """Return, by topic, the id to ask with: the shown one (NO_ID: none), else a split's own."""
        shown = self._client.topic_ids
        topic_ids: dict[str, UUID | None] = {}
        for cursor in cursors:
            topic = cursor.split.topic
            if topic_ids.get(topic) is None:
                own = None if cursor.topic_id == NO_ID else cursor.topic_id
                topic_ids[topic] = (shown[topic] or NO_ID) if topic in shown else own
        return topic_ids

    def _deadline(self, cursors: Iterable[Cursor]) -> float:
        own = (cursor.attempts.deadline for cursor in cursors if cursor.attempts is not None)
        return min(own, default=self._client.deadline())

    # --- answers ------------------------------------------------------------------------------

    def _next_answer(self) -> list[Part]:
        network = self._client.network
        oldest = min(self._under_way.values(), key=lambda request: request.until)
        posted = [request.posted for request in self._under_way.values()]
        answered = network.answered(posted, oldest.until)
        overdue = not answered or oldest.until <= time.monotonic()
        if overdue and oldest.posted not in answered:
            answered = [oldest.posted]  # a silent one, which must not be hidden by the others
            until = oldest.until
        else:  # however late: its answer may be there, not yet looked for
            until = self._client.deadline(self._client.config.request_timeout_ms)
        request = self._under_way.pop(answered[0].node)
        try:
            response = network.wait(request.posted, until)
        except OSError as error:
            self._strand(request.posted.node, request.cursors, error)
            return []
        return self._sort(request, response)

    def _sort(self, request: SplitRequest, response: Any) -> list[Part]:
        """Sort the splits of an answer by those with records, without, and in trouble."""
        parts: list[Part] = []
        empty: list[tuple[Part, Any]] = []
        out_of_range: list[Cursor] = []
        for cursor, error_name, answer in parts_by_cursor(request, response):
            if error_name == "OffsetOutOfRange":
                out_of_range.append(cursor)
            elif error_name is not None:
                self._overcome(cursor, error_name)
            else:
                part = part_of(cursor, answer)
                if part.stop > part.start:
                    cursor.advance(part.stop, request.topic_ids[cursor.split.topic])
                    parts.append(part)
                else:
                    empty.append((part, answer))
        line = self._lines[request.posted.node]
        line.extend(part.cursor for part in parts if not part.cursor.is_done)
        for part, answer in reversed(empty):
            if parts and part.cursor is not request.cursors[0]:
                line.appendleft(part.cursor)  # the answer was full; the first one always gets some
            else:
                self._wait_for_records(part, answer)
        if out_of_range:
            self._find_again(out_of_range)
        return parts

    def _overcome(self, cursor: Cursor, error_name: str) -> None:
        """Pause a split after an error that may pass; raise any other error."""
        if error_name.isalnum() and error_name not in AGAIN:
            raise refusal(error_name, "Fetch", str(cursor.split))
        if error_name in STALE:
            self._client.forget_leaders([cursor.partition])
        self._client.obstacles[f"Fetch: {error_name}"] += 1
        self._pause(cursor, error_name)

    def _strand(self, node: int, cursors: Iterable[Cursor], error: OSError) -> None:
        """Look up new leaders for all splits that wait for an unavailable broker."""
        obstacle = describe(error)
        self._client.obstacles[f"Fetch: {obstacle}"] += 1
        line = self._lines[node]
        self._homeless += line
        self._client.forget_leaders(cursor.partition for cursor in [*cursors, *line])
        line.clear()
        for cursor in cursors:
            self._pause(cursor, obstacle)

    def _pause(self, cursor: Cursor, obstacle: str, doubt: str = "") -> None:
        """Ask for a split again later; `doubt` is the loss that the obstacle hints at, if any."""
        cursor.doubt(doubt)
        if cursor.attempts is None:
            cursor.attempts = Attempts(self._client.deadline(), "Fetch", str(cursor.split))
        cursor.due = time.monotonic() + cursor.attempts.delay(obstacle)
        self._homeless.append(cursor)

    # --- losses -------------------------------------------------------------------------------

    def _is_certain(self, cursor: Cursor, doubt: str) -> bool:
        """Note one more sign of a loss; return True if the signs have lasted long enough."""
        most_s = self._client.config.delivery_timeout_ms / 1000 / 2  # with time left to settle it
        return cursor.doubt(doubt) >= min(CERTAIN_AFTER_S, most_s)

    def _suspect(self, cursor: Cursor, doubt: str, loss: DataLossError, obstacle: str) -> None:
        """Look again for a while, until the metadata are certain."""
        self._client.forget_leaders([cursor.partition])
        if self._is_certain(cursor, doubt):
            accept_loss(cursor, loss, self._policy)
        else:
            self._pause(cursor, obstacle, doubt)

    def _find_again(self, cursors: list[Cursor]) -> None:
        """Handle positions outside their logs: before what is left, or after the end."""
        partitions = [cursor.partition for cursor in cursors]
        earliest = cluster.list_offsets(self._client, partitions, EARLIEST, absent_after_s=0)
        end = self._ends(partitions)
        for cursor in cursors:
            first, last = earliest.get(cursor.partition), end.get(cursor.partition)
            if first is None or last is None or first <= cursor.position <= last:
                self._client.forget_leaders([cursor.partition])
                self._pause(cursor, "OffsetOutOfRange")
            elif cursor.position < first:
                loss = records_expired(cursor, first)
                skip_expired(cursor, first, loss, self._policy)
                if not cursor.is_done:
                    self._homeless.append(cursor)
            elif self._is_certain(cursor, SHORT):
                accept_loss(cursor, log_truncated(cursor, last), self._policy)
            else:  # said by a leader that may be deposed without knowing it
                self._client.forget_leaders([cursor.partition])
                self._pause(cursor, "OffsetOutOfRange", SHORT)

    def _wait_for_records(self, part: Part, answer: Any) -> None:
        """Handle an empty answer: the leader lags behind, or the log has become too short."""
        cursor = part.cursor
        stop = cursor.split.stop_offset
        if len(part.records):  # not one whole batch: raises when it is because of damage
            from tallystick.codec.records.decoder import decode

            decode(part.records, topic_partition=cursor.partition, start_offset=part.start,
                   stop_offset=stop, aborted=None, headers=False)  # fmt: skip
        doubt = SHORT if answer.high_watermark < stop else ""
        if doubt and self._is_certain(cursor, doubt):
            end = self._ends([cursor.partition]).get(cursor.partition, stop)
            if end < stop:
                accept_loss(cursor, log_truncated(cursor, end), self._policy)
                return
        if doubt:
            self._client.forget_leaders([cursor.partition])
        self._pause(
            cursor,
            f"an empty answer at offset {cursor.position}, where the last stable offset is "
            f"{answer.last_stable_offset} and the end of the log {answer.high_watermark}",
            doubt,
        )

    def _ends(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return where the logs end; a new leader answers only when it is sure (KIP-207)."""
        return cluster.list_offsets(
            self._client,
            partitions,
            LATEST,
            isolation=cluster.READ_UNCOMMITTED,
            absent_after_s=0,
        )
