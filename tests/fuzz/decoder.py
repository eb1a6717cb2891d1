"""The shape of a decoder under test."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from tallystick.errors import TallystickError
from tests.fuzz.mutations import mutated

Mutate = Callable[[bytes, Random, Sequence[bytes]], bytes]


@dataclass(frozen=True)
class Decoder:
    """Something that reads bytes from outside.

    Args:
        samples: valid bytes.
        read: reads bytes, given the sample they were made of too. Returns False where they were
            refused without an error; an AssertionError says that they were read wrong.
        mutate: damages a sample.
        refusals: the errors that say no to bytes.
    """

    samples: Callable[[], Sequence[bytes]]
    read: Callable[[bytes, bytes], bool]
    mutate: Mutate = mutated
    refusals: tuple[type[Exception], ...] = (TallystickError,)
