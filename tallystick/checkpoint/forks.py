"""The note that makes a checkpoint a fork: another name and other topics for the same program.

    tallystick/fork.json      {name, topics, starts, original}, sealed as a manifest is

`tallystick fork` writes the note before the checkpoint has an id, and nothing removes it. Every
start on the checkpoint applies it, so that no program writes from here to the output of the
original.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tallystick.epoch.manifest import FOLDER, seal, unseal
from tallystick.errors import OptionError
from tallystick.ports import Storage

FORK = f"{FOLDER}/fork.json"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Fork:
    """The content of the note.

    Args:
        name: the name under which the program runs.
        topics: the topic that takes the place of each of the program's.
        starts: by topic of the original, the offsets at which output begins that the fork writes
            too, one per partition.
        original: the location of the checkpoint that was forked.
    """

    name: str
    topics: Mapping[str, str]
    starts: Mapping[str, tuple[int, ...]]
    original: str

    def encode(self) -> bytes:
        """Return the content of the file."""
        return seal(VERSION, asdict(self))


def fork_of(checkpoint: Storage) -> Fork | None:
    """Return the note of a fork; None: the checkpoint is none.

    Raises:
        ManifestError: the note is damaged.
    """
    data = checkpoint.get(FORK)
    if data is None:
        return None
    remedy = "Nothing was started. Put back a whole copy of it, or fork the original once more."
    return unseal(data, f"{FORK} of {checkpoint.location}", VERSION, remedy, _fork)


def _fork(content: dict[str, Any]) -> Fork:
    starts = {topic: tuple(offsets) for topic, offsets in content["starts"].items()}
    fork = Fork(**content | {"starts": starts})
    texts = (fork.name, fork.original, *fork.topics, *fork.topics.values())
    if not all(isinstance(text, str) and text for text in texts):
        raise TypeError("expected texts for name, original and topics")
    if not all(type(offset) is int for offsets in starts.values() for offset in offsets):
        raise TypeError("expected whole numbers for offsets")
    return fork


def refuse_fork(checkpoint: Storage, what: str) -> None:
    """Raise OptionError if a checkpoint is a fork.

    Args:
        checkpoint: the location.
        what: that which cannot be done with a fork, and why, as a sentence.
    """
    fork = fork_of(checkpoint)
    if fork is not None:
        raise OptionError(
            f"checkpoint {checkpoint.location} is a fork of {fork.original} ({FORK}). {what}"
        )
