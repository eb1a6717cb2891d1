"""The actions of the page: what `tallystick stop`, `savepoint create` and `rescale` do."""

from collections.abc import Mapping
from typing import Any

from tallystick.errors import OptionError
from tallystick.kafka.config import KafkaConfig
from tallystick.ops import requests, savepoints
from tallystick.ops.checkpoint_view import asking
from tallystick.ops.cli_savepoint import PATIENCE
from tallystick.storage.file_storage import FileStorage, shown
from tallystick.storage.places import resolved


class Actions:
    """The actions on the run of a checkpoint, by name.

    Args:
        checkpoint: its location.
        options: of the connection to the cluster that decides, with Kafka's names; None: Kafka is
            not asked.
    """

    def __init__(self, checkpoint: str, options: Mapping[str, str] | None) -> None:
        self._checkpoint = checkpoint
        self._options = options

    def __call__(self, action: str, fields: Mapping[str, Any]) -> str:
        """Do what a visitor asks for; return the result in words.

        Raises:
            OptionError: there is no such action, or a field is not what it should be.
            TallystickError: it could not be done.
        """
        place = str(fields.get("place") or "")
        match action:
            case "stop":
                drain = bool(fields.get("drain"))
                return requests.stop(self._checkpoint, drain=drain, savepoint=place)
            case "rescale":
                number = str(fields.get("parallelism"))
                if not number.isdecimal() or int(number) < 1:
                    raise OptionError(f"parallelism {number}: expected a number of 1 or more")
                return requests.rescale(self._checkpoint, int(number))
            case "savepoint" if place:
                return self._save(resolved(place, "savepoint"))
        raise OptionError(f"{action}: expected stop, rescale, or savepoint with a place")

    def _save(self, place: str) -> str:
        options = None if self._options is None else {**self._options, **PATIENCE}
        ask = None if options is None else asking(KafkaConfig.from_options(options))
        source, target = FileStorage(self._checkpoint), FileStorage(place)
        saved = savepoints.create(source, target, ask_kafka=ask)
        return f"saved epoch {saved.manifest.checkpoint_id} to {shown(place)}"
