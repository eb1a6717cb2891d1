"""The space that is left for a checkpoint on a local disk, and for copies of state on this host."""

import shutil
from collections.abc import Iterator

from tallystick.checkpoint.local.local_state import ROOT_VARIABLE, state_folder
from tallystick.epoch.findings import CheckFinding, Severity
from tallystick.storage.places import local_path

FREE_MIN_BYTES = 1 << 30
FREE_MIN_SHARE = 0.05


def disk_space(checkpoint: str) -> Iterator[CheckFinding]:
    """Check whether disks are nearly full; object stores are not asked.

    Args:
        checkpoint: its location.
    """
    places = {"copies of state": state_folder(), "the checkpoint": local_path(checkpoint)}
    for what, place in places.items():
        while place is not None and not place.exists():
            place = place.parent
        if place is None:
            continue
        usage = shutil.disk_usage(place)
        if usage.free < max(FREE_MIN_BYTES, FREE_MIN_SHARE * usage.total):
            yield CheckFinding(
                Severity.WARNING,
                "disk",
                f"{usage.free / 2**30:.1f} GiB of {usage.total / 2**30:.1f} GiB are free on the "
                f"disk of {what} ({place})",
                "When it is full, epochs are aborted and run again until there is space; nothing "
                "is lost.",
                f"df -h {place}; then make space, or move it: the checkpoint to a larger disk "
                f"while the pipeline is stopped, copies of state by {ROOT_VARIABLE}.",
            )
