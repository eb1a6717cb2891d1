"""Schedules of faults: planned from a seed, shortened, written down and read back."""

import json
import random
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tallystick.errors import OptionError

KINDS = {
    "driver": "kill -9 of the program's own process; what it started is left to find out",
    "host": "kill -9 of the program and of all that it started, at once",
    "worker": "kill -9 of one Python worker",
    "executor": "kill -9 of one executor; needs a master with executors of their own",
    "pause": "the program stands still (SIGSTOP) for some seconds, then goes on",
    "zombie": "the program stands still, a second one takes over, then the first wakes up",
    "state": "kill -9, and all local copies of state are gone at the next start",
    "parallelism": "kill -9, and the next start has another {parallelism}",
    "clock": "the program's wall clock jumps, by up to a day in either direction, until it has "
    "committed something more; needs a C compiler",
    "disk": "no process of the program can make a file longer, for a second; Linux only",
    "broker": "kill -9 of one broker, which comes back; needs --brokers 3",
    "broker-pause": "one broker stands still for some seconds",
    "isolate": "no client reaches one broker for some seconds",
    "object-store": "nobody reaches the store of the checkpoint for some seconds; needs "
    "--checkpoint",
    "slow": "each answer of the brokers comes late for some seconds",
    "lose-request": "one request of a producer or of a commit is lost",
    "lose-reply": "the reply to one is lost",
    "repeat": "a Produce request comes a second time, late, over another connection",
}
"""Every kind of fault, and what happens in it."""
NEEDS_THREE_BROKERS = {"broker"}
"""With one broker and no replicas, Kafka 4.3.0 itself can hide a committed transaction
(KAFKA-20734)."""
NEEDS_OWN_BROKERS = NEEDS_THREE_BROKERS | {"broker-pause"}
NEEDS_OBJECT_STORE = {"object-store"}
NEEDS_CLOCK = {"clock"}
NOT_CHOSEN_BY_ITSELF = {"executor", "parallelism"}
"""Kinds that need a program made for them."""

DELAYS_S = (0.0, 2.0)
LENGTHS_S = (0.5, 6.0)
SHARE_AT_ONCE = 0.25
"""The share of faults that follow without a wait for the program to recover."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned fault.

    Args:
        kind: The kind, of `KINDS`.
        delay_s: How long after the records of its part of the input began to be written.
        length_s: How long a fault with a length lasts.
        pick: 0 to 1, chooses among the possible processes, brokers or requests.
        at_once: Whether the fault comes without a wait for the program's recovery.
    """

    kind: str
    delay_s: float
    length_s: float
    pick: float
    at_once: bool = False

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind
        assert self.delay_s >= 0, self
        assert self.length_s >= 0, self
        assert 0 <= self.pick < 1, self


def plan(count: int, seed: int, kinds: Sequence[str]) -> tuple[Fault, ...]:
    """Return a schedule: each kind about as often as any other, in an order by the seed.

    Args:
        count: The number of faults.
        seed: The same seed gives the same schedule.
        kinds: The kinds to choose from.
    """
    chance = random.Random(seed)
    chosen: list[str] = []
    while len(chosen) < count:
        chosen += chance.sample(kinds, len(kinds))
    return tuple(
        Fault(
            kind,
            round(chance.uniform(*DELAYS_S), 3),
            round(chance.uniform(*LENGTHS_S), 3),
            round(chance.random(), 6) % 1,
            index > 0 and chance.random() < SHARE_AT_ONCE,
        )
        for index, kind in enumerate(chosen[:count])
    )


def kinds_for(
    brokers: int,
    named_kinds: Collection[str],
    uses_parallelism: bool,
    has_object_store: bool = False,
    has_clock: bool = False,
) -> tuple[str, ...]:
    """Return the kinds of faults to choose from.

    Args:
        brokers: The number of brokers; 0: a given cluster.
        named_kinds: The kinds that the user named; none: all that fit.
        uses_parallelism: Whether the command line names {parallelism}.
        has_object_store: Whether the checkpoint is in an object store.
        has_clock: Whether the program can have a clock of its own: see `clock.find_compiler`.

    Raises:
        OptionError: There is no such kind, or it cannot happen here.
    """
    for kind in named_kinds:
        if kind not in KINDS:
            raise OptionError(f"there is no fault {kind!r}; expected {', '.join(KINDS)}")
        if kind in NEEDS_OWN_BROKERS and not brokers:
            raise OptionError(f"the fault {kind!r} is not done to the brokers of a given cluster")
        if kind in NEEDS_THREE_BROKERS and brokers < 3:
            raise OptionError(f"the fault {kind!r} needs --brokers 3, and there is {brokers}")
        if kind == "parallelism" and not uses_parallelism:
            raise OptionError(
                "the fault 'parallelism' needs {parallelism} in the arguments of your program"
            )
        if kind in NEEDS_OBJECT_STORE and not has_object_store:
            raise OptionError(f"the fault {kind!r} needs a --checkpoint in an object store")
        if kind in NEEDS_CLOCK and not has_clock:
            raise OptionError(
                f"the fault {kind!r} needs a C compiler: apt-get install gcc libc6-dev"
            )
    if named_kinds:
        return tuple(kind for kind in KINDS if kind in named_kinds)
    without = NOT_CHOSEN_BY_ITSELF - ({"parallelism"} if uses_parallelism else set())
    without |= NEEDS_THREE_BROKERS if brokers < 3 else set()
    without |= set() if has_object_store else NEEDS_OBJECT_STORE
    without |= NEEDS_OWN_BROKERS if not brokers else set()
    without |= set() if has_clock else NEEDS_CLOCK
    return tuple(kind for kind in KINDS if kind not in without)


def as_json(faults: Sequence[Fault]) -> str:
    """Return a schedule as text."""
    return json.dumps([asdict(fault) for fault in faults], indent=1)


def read_schedule(path: Path) -> tuple[Fault, ...]:
    """Return the schedule in a file with the text of `as_json`.

    Raises:
        OptionError: The file cannot be read, or is no schedule with at least one fault.
    """
    try:
        faults = tuple(Fault(**fields) for fields in json.loads(path.read_text()))
        assert faults, "it is empty"
    except (OSError, ValueError, TypeError, AssertionError) as error:
        raise OptionError(f"{path} is no schedule of faults: {error!r}") from error
    return faults
