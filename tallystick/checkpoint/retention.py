"""Which manifests of a checkpoint are kept, and so which state one can still look at or save.

A restart needs the newest one only. A few more are kept for those who read while the pipeline runs
(a savepoint, `read_state`), and so that damage to the newest leaves something to go back to.
"""

from collections.abc import Iterable

from tallystick.checkpoint.manifest import epoch_of

EPOCHS_RETAINED = 10
"""How many of the newest epochs keep their manifests."""
COLLECT_EVERY = 50
"""Epochs between two collections: a collection lists the folders of the checkpoint."""
EXPIRED_MAX = 500
"""So many manifests are removed at a time: an old checkpoint may have thousands."""


def retained(paths: Iterable[str], committed_epoch: int) -> list[str]:
    """The manifests that are kept: those of the newest epochs, and of later ones under way.

    That of the committed epoch is always among them.
    """
    return [path for path in paths if epoch_of(path) > committed_epoch - EPOCHS_RETAINED]


def expired(paths: Iterable[str], committed_epoch: int) -> list[str]:
    """The manifests to remove now, oldest first; those of failed attempts too."""
    old = [path for path in paths if epoch_of(path) <= committed_epoch - EPOCHS_RETAINED]
    return sorted(old, key=epoch_of)[:EXPIRED_MAX]
