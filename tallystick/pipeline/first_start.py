"""The look at Kafka before the first start of a pipeline, which is quicker than Spark."""

from collections.abc import Iterable

from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.reach import check_reachable
from tallystick.storage.file_storage import FileStorage


def check_first_start(checkpoint: str, configs: Iterable[KafkaConfig]) -> None:
    """Refuse the first start of a pipeline whose Kafka cannot be reached.

    A pipeline that ran before has had the right settings: it waits for Kafka.

    Args:
        checkpoint: its location.
        configs: of the clusters that it reads and writes.

    Raises:
        OptionError: no server of a cluster can be reached, for a reason that waiting rarely mends.
    """
    if CheckpointFolder(FileStorage(checkpoint)).manifest_paths():
        return
    for config in dict.fromkeys(configs):
        check_reachable(config)
