"""The manifests of a checkpoint that are kept, and so the state one can still look at or save.

A restart needs the newest one only. A few more are kept for those who read while the pipeline runs
(a savepoint, `read_state`), and so that damage to the newest leaves something to go back to.
"""

from collections.abc import Iterable

from tallystick.epoch.manifest import epoch_of

EPOCHS_RETAINED = 10
"""How many of the newest epochs keep their manifests."""
COLLECT_EVERY = 50
"""Epochs between two collections: a collection lists the folders of the checkpoint."""
EXPIRED_MAX = 500
"""So many manifests are removed at a time: an old checkpoint may have thousands."""


def retained(paths: Iterable[str], committed_epoch: int) -> list[str]:
    """Return the manifests to keep: those of the newest epochs, and of later ones under way.

    That of the committed epoch is always among them. Epochs are counted by their manifests: the
    function of a user's own query may leave out any number of epochs.
    """
    listed = list(paths)
    oldest = _oldest_retained(listed, committed_epoch)
    return [path for path in listed if epoch_of(path) >= oldest]


def expired(paths: Iterable[str], committed_epoch: int) -> list[str]:
    """Return the manifests to remove now, oldest first; those of failed attempts too."""
    listed = list(paths)
    oldest = _oldest_retained(listed, committed_epoch)
    old = [path for path in listed if epoch_of(path) < oldest]
    return sorted(old, key=epoch_of)[:EXPIRED_MAX]


def _oldest_retained(paths: list[str], committed_epoch: int) -> int:
    epochs = sorted({epoch for epoch in map(epoch_of, paths) if epoch <= committed_epoch})
    return min(epochs[-EPOCHS_RETAINED:], default=0)
