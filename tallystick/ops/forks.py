"""Forks: a new checkpoint from which the same program goes on beside the original.

Invariants:

* The fork's topics have no records when the fork is made, so that they are nobody's output.
* The note of the fork is there before the checkpoint has an id: no start goes on without it.
* The output of the original begins, for a comparison, at the first row that the fork writes too:
  where the retained manifests name the partition, exactly; else at the end that it had before the
  epoch was chosen.
"""

import uuid
from collections.abc import Iterable, Mapping

from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.checkpoint.forks import FORK, Fork, refuse_fork
from tallystick.checkpoint.newest import Ask, newest_committed
from tallystick.checkpoint.savepoint_folder import NewFolder, SupersededError, filled, whole_uri
from tallystick.epoch.manifest import Manifest, epoch_of
from tallystick.epoch.savepoint import seed_of
from tallystick.errors import OptionError
from tallystick.kafka.client import Client
from tallystick.kafka.cluster import READ_UNCOMMITTED, list_offsets
from tallystick.kafka.topics import create_topic, partitions_of
from tallystick.ops.savepoints import copied, tried
from tallystick.ports import Storage
from tallystick.source.subscription import EARLIEST, LATEST, topic_problem
from tallystick.values import TopicPartition

NAME_LENGTH_MAX = 180
"""The original's at most: a pipeline's name has up to 200 characters, and the fork's is longer."""


def fork(
    checkpoint: Storage, target: Storage, topics: Mapping[str, str], client: Client, ask_kafka: Ask
) -> tuple[Fork, int]:
    """Make a new checkpoint that goes on from another's newest epoch, and writes to other topics.

    Args:
        checkpoint: the original; its pipeline may run meanwhile.
        target: the new checkpoint's location, an empty folder.
        topics: the topic that takes the place of each that the original writes to. Those that do
            not exist are created, with as many partitions.
        client: of the cluster with the topics.
        ask_kafka: see `newest_committed`.

    Returns:
        The note in the new checkpoint, and the epoch after which it goes on.

    Raises:
        OptionError: a topic of the fork has records, or other partitions than the original's; the
            checkpoint is a fork, or Spark's; or the folder is not empty.
        StateFileError: a file of state is missing or damaged, or the pipeline was faster each time.
    """
    refuse_fork(checkpoint, "Nothing was changed. Fork the original once more.")
    _check_names(topics)
    for original, new_topic in topics.items():
        _prepare(client, original, new_topic)
    with filled(target, "fork") as new:
        return tried(checkpoint, lambda: _fork(checkpoint, new, topics, client, ask_kafka))


def _fork(
    checkpoint: Storage, new: NewFolder, topics: Mapping[str, str], client: Client, ask: Ask
) -> tuple[Fork, int]:
    folder = CheckpointFolder(checkpoint)
    partitions = [one for topic in topics for one in partitions_of(client, topic)]
    before = max(map(epoch_of, folder.manifest_paths()), default=-1)
    ends = list_offsets(client, partitions, LATEST)  # before the epoch: see the invariants
    newest = newest_committed(checkpoint, ask)
    manifests = folder.manifests(folder.manifest_paths()).values()  # a long copy outlives them
    if min(manifest.checkpoint_id for manifest in manifests) > before + 1:
        raise SupersededError(
            f"manifests of epochs after {before} are gone, which name the offsets of their output"
        )
    starts = _starts(ends, newest.epoch, manifests)
    savepoint = copied(checkpoint, newest, new)
    if savepoint.spark:
        raise OptionError(
            f"checkpoint {checkpoint.location} is that of a query of Structured Streaming, whose "
            f"function writes where it likes: a fork is for a Pipeline. Nothing was changed. A "
            f"savepoint of it can be restored, for a query with topics of its own."
        )
    new.verify(savepoint.manifest.state)
    lineage = str(uuid.uuid4())
    pipeline = savepoint.manifest.pipeline
    if len(pipeline) > NAME_LENGTH_MAX:
        raise OptionError(
            f"pipeline {pipeline!r} has a name of {len(pipeline)} characters: a fork adds some to "
            f"it, and can have {NAME_LENGTH_MAX} of them. Restore a savepoint instead, and start "
            f"it under a shorter name and with topics of its own."
        )
    note = Fork(
        name=f"{pipeline}-fork-{lineage[:8]}",  # two forks at a time do not fence each other
        topics=dict(topics),
        starts={
            topic: tuple(starts[one] for one in partitions if one.topic == topic)
            for topic in topics
        },
        original=whole_uri(checkpoint.location),
    )
    new.put(FORK, note.encode())
    new.put_seed(seed_of(savepoint, note.original, lineage))
    new.begin(lineage)
    return note, newest.epoch


def _check_names(topics: Mapping[str, str]) -> None:
    if not topics:
        raise OptionError("--topics: expected OLD=NEW for each topic that the pipeline writes to")
    for name in (*topics, *topics.values()):
        if problem := topic_problem(name):
            raise OptionError(f"--topics {name!r}: {problem}")
    if own := sorted(topics.keys() & {*topics.values()}):
        raise OptionError(
            f"--topics: {own[0]!r} is a topic that the original writes to, and a fork must not: "
            f"name another"
        )
    if len({*topics.values()}) < len(topics):
        raise OptionError(
            f"--topics: {', '.join(topics.values())}: expected a topic for each, so that each can "
            f"be compared"
        )


def _prepare(client: Client, original: str, new_topic: str) -> None:
    """Create a topic of the fork unless it is there, empty, and as wide as the original's."""
    wanted = len(partitions_of(client, original))
    create_topic(client, new_topic, wanted)
    partitions = partitions_of(client, new_topic)
    if len(partitions) != wanted:
        raise OptionError(
            f"topic {new_topic!r} has {len(partitions)} partitions, and {original!r} has {wanted}: "
            f"keys would go to others, and nothing could be compared. Name a new topic"
        )
    begins, ends = (
        list_offsets(client, partitions, at, isolation=READ_UNCOMMITTED)
        for at in (EARLIEST, LATEST)
    )
    if begins != ends:
        count = sum(ends[one] - begins[one] for one in partitions)
        raise OptionError(
            f"topic {new_topic!r} has {count} records, so it may be somebody's output: a fork "
            f"writes to an empty topic. Nothing was changed. Name a new topic"
        )


def _starts(
    ends: Mapping[TopicPartition, int], epoch: int, manifests: Iterable[Manifest]
) -> dict[TopicPartition, int]:
    """Return the offset in each partition at which the output after an epoch begins.

    Args:
        ends: those before the epoch was chosen.
        epoch: the epoch after which a fork goes on.
        manifests: all that are retained, of attempts that failed too: what those wrote lies before
            what counts, and no reader sees it.
    """
    before: dict[TopicPartition, int] = {}
    starts = dict(ends)
    for manifest in manifests:
        for produced in manifest.produced:
            where = produced.topic_partition
            if manifest.checkpoint_id <= epoch:
                before[where] = max(before.get(where, 0), produced.last_offset + 1)
            elif where in starts:
                starts[where] = min(starts[where], produced.first_offset)
    return {where: before.get(where, start) for where, start in starts.items()}
