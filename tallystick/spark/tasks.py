"""The port that both engines are: what runs the tasks of an epoch, from splits on."""

from dataclasses import dataclass
from typing import Protocol

from tallystick.run.keyed_epoch import KeyedEpoch
from tallystick.run.sink_task import CollectPlan
from tallystick.run.task import ReadPlan, Report, WritePlan
from tallystick.source.splits import cut_splits, share_out, share_pieces
from tallystick.values import SplitRange, TopicPartition

Shares = tuple[tuple[SplitRange, ...], ...]
"""The splits of each reader."""


def share(parallelism: int, splits: tuple[SplitRange, ...], split_count_min: int | None) -> Shares:
    """Divide the splits among readers.

    Args:
        parallelism: how many tasks run at a time; there are no more readers.
        splits: one per partition.
        split_count_min: partitions are cut until there are about so many pieces; None: they stay
            whole, and the reader of each is the one that Flink gives it.
    """
    pieces = cut_splits(splits, split_count_min)
    reader_count = max(1, min(parallelism, len(pieces)))
    if len(pieces) > len(splits):
        return share_pieces(pieces, reader_count)
    return share_out(pieces, reader_count)


@dataclass(frozen=True)
class Unread:
    """The splits of an epoch by reader, and how they are read."""

    shares: Shares
    plan: ReadPlan

    @property
    def is_cut(self) -> bool:
        """Whether several readers have parts of one partition: their order is that of the rows."""
        held = [{split.topic_partition for split in share} for share in self.shares]
        return sum(map(len, held)) > len(set[TopicPartition]().union(*held))


class TaskRunner(Protocol):
    """Runs the tasks of epochs that begin with splits."""

    def run(
        self, unread: Unread, epoch: KeyedEpoch, write: WritePlan | CollectPlan
    ) -> list[Report]:
        """Run all tasks of an epoch; each has stopped writing when this returns, or raises.

        Raises:
            EpochAbortedError: a task is lost, and with it what it did.
            what a function of the user's raised.
        """
        ...
