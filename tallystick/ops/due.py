"""Decided output that waits to be published, as manifests and the folders of tables tell it."""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass

from tallystick.epoch.manifest import Manifest
from tallystick.epoch.two_phase import DueOutput, Owner
from tallystick.errors import UNREADABLE, TallystickError
from tallystick.host.stopwatch import now_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class DueSink(DueOutput):
    """The decided output of a sink that waits to be published, and the place of its table.

    Args:
        sink: its uid.
        location: of its table.
        unknown: why nothing is known; "": it is.
    """

    sink: str
    location: str
    unknown: str = ""

    @property
    def waited_ms(self) -> int:
        """The age of the oldest epoch that waits."""
        return max(0, now_ms() - self.since_ms)


def due_sinks(manifests: Iterable[Manifest]) -> tuple[DueSink, ...]:
    """Return the sinks of a pipeline in which epochs wait, or cannot be read.

    Args:
        manifests: they name the tables.
    """
    places = {place: None for manifest in manifests for place in _places(manifest)}
    sinks = (_due(owner, location) for owner, location in places)
    return tuple(sink for sink in sinks if sink.epochs or sink.unknown)


def _places(manifest: Manifest) -> Iterator[tuple[Owner, str]]:
    """Yield the owners of files of tables, each with the location of the table."""
    for committable in manifest.committables:
        with suppress(*UNREADABLE):
            details = json.loads(committable.details)
            if "table" in details:
                owner = Owner(manifest.pipeline, committable.sink, manifest.lineage)
                yield owner, str(details["location"])


def _due(owner: Owner, location: str) -> DueSink:
    from tallystick.files.folder import Folder
    from tallystick.tables.due import due_output_in

    try:
        due = due_output_in(Folder(location), owner)
    except TallystickError as error:
        return DueSink(sink=owner.sink, location=location, unknown=str(error))
    return DueSink(sink=owner.sink, location=location, **asdict(due))
