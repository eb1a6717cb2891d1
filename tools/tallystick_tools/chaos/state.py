"""The state of a checkpoint as texts, for a comparison."""

from tallystick.checkpoint.newest import newest_committed
from tallystick.checkpoint.state_files import chunks_of, contents_of
from tallystick.errors import OptionError
from tallystick.kafka.config import KafkaConfig
from tallystick.ops.checkpoint_view import asking
from tallystick.ops.state_table import KEY_GROUP, table_of
from tallystick.state.key_groups import key_group_range
from tallystick.storage.file_storage import FileStorage


def state_of(checkpoint: str, servers: str) -> dict[str, list[str]]:
    """Return the committed state: for each step, a text for each key, sorted.

    Args:
        checkpoint: The program's checkpoint; absent: the program keeps no state known here.
        servers: Of the cluster to ask for the last decision.

    Raises:
        TallystickError: The checkpoint is damaged.
    """
    storage = FileStorage(checkpoint)
    try:
        manifest = newest_committed(storage, asking(KafkaConfig(servers))).manifest
    except OptionError:  # a query of Structured Streaming, with state of Spark's own
        return {}
    keys_of_step: dict[str, list[str]] = {}
    for step in manifest.state:
        texts = []
        for part in chunks_of(step, key_group_range(step.max_parallelism, 1, 0)):
            entries = contents_of(step, part, storage)
            if entries.num_rows:
                rows = table_of(step, entries).to_pylist()
                texts += [str({k: v for k, v in row.items() if k != KEY_GROUP}) for row in rows]
        keys_of_step[step.uid] = sorted(texts)
    return keys_of_step
