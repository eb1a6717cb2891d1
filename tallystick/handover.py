"""Where decisions are kept may change between two runs: another mode, prefix, or sink.

    KafkaSink(transactions="epoch") ◄──► the checkpoint's log ◄──► another transactional id prefix

Invariants:
    * Whatever may have decided an epoch of this checkpoint is fenced before it is asked, so that a
      run of the old kind cannot decide any more.
    * Of what they answer, the newest epoch of this lineage counts.
    * The present place is written with the first decision; from then on it alone is asked.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tallystick.ports import Broker
from tallystick.sink.tokens import encode_token, newest_token
from tallystick.sink.transaction import ProducedRange, Producer
from tallystick.topic_partition import TopicPartition


class Earlier(NamedTuple):
    """A place where decisions were kept before."""

    broker: Broker
    transactional_id: str
    token_group: str


class Handover:
    """`ports.Broker` in which the present place of decisions goes on from earlier ones.

    Args:
        current: where decisions are kept from now on.
        earlier: where they were.
        place: of the token, in the present one.
        lineage: of the checkpoint.
    """

    def __init__(
        self,
        current: Broker,
        earlier: tuple[Earlier, ...],
        place: TopicPartition,
        lineage: str,
    ) -> None:
        self._current = current
        self._earlier = earlier
        self._place = place
        self._lineage = lineage

    def fence(self, transactional_id: str, current: Producer | None) -> Producer:
        """See `ports.Broker.fence`; at the start, earlier runs of every kind are fenced."""
        if current is None:
            for each in self._earlier:
                each.broker.fence(each.transactional_id, None)
        return self._current.fence(transactional_id, current)

    def group_offsets(self, group: str) -> Mapping[TopicPartition, tuple[int, str]]:
        """See `ports.Broker.group_offsets`; with the newest token of this lineage."""
        found = dict(self._current.group_offsets(group))
        present = newest_token(found, self._place, self._lineage)
        newest = present
        for each in self._earlier:
            held = each.broker.group_offsets(each.token_group)
            token = newest_token(held, self._place, self._lineage)
            if token is None or token.lineage != self._lineage:
                continue
            is_own = newest is not None and newest.lineage == self._lineage
            if newest is None or not is_own or token.checkpoint_id > newest.checkpoint_id:
                newest = token
        if newest is not None and newest is not present:
            found[self._place] = encode_token(newest)
        return found

    def stage_offsets(
        self,
        producer: Producer,
        group: str,
        offsets: Mapping[TopicPartition, tuple[int, str]],
        *,
        for_show: bool = False,
    ) -> None:
        """See `ports.Broker.stage_offsets`."""
        self._current.stage_offsets(producer, group, offsets, for_show=for_show)

    def last_sequences(
        self, producer: Producer, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, int] | None:
        """See `ports.Broker.last_sequences`."""
        return self._current.last_sequences(producer, partitions)

    def commit_transaction(self, producer: Producer) -> Producer:
        """See `ports.Broker.commit_transaction`."""
        following = self._current.commit_transaction(producer)
        self._earlier = ()
        return following

    def abort_transaction(self, producer: Producer) -> None:
        """See `ports.Broker.abort_transaction`."""
        self._current.abort_transaction(producer)

    def foreign_rows(
        self, producer: Producer, produced: Iterable[ProducedRange]
    ) -> Mapping[TopicPartition, int]:
        """See `ports.Broker.foreign_rows`."""
        return self._current.foreign_rows(producer, produced)
