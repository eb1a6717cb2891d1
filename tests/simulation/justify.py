"""Each kind of fault, and a broken core that goes undetected without it.

A kind is worth having if some mutation is found while it strikes, and survives in worlds that draw
from all other kinds. `python -m tests.simulation --justify` looks for one of each kind, and writes
`justified.txt`: the kind, the seed that finds the mutation, the number of seeds that do not, and
the mutation. The table of a page is made from that file.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.simulation.every_mutation import MUTATIONS
from tests.simulation.faults import Fault
from tests.simulation.mutations import Mutation
from tests.simulation.simulation import Outcome, simulate

FILE = Path(__file__).with_name("justified.txt")
OTHER_SEEDS = 40
"""How many worlds without the kind a mutation has to survive."""
FINDING_SEEDS = 300
"""How many worlds are searched for one that finds it."""


class Reason(NamedTuple):
    """Why a kind is there.

    Args:
        fault: the kind.
        seed: whose world finds the mutation, with only the kinds that it needs.
        survived: in so many worlds without this kind it was not found.
        sentence: the mutation.
    """

    fault: Fault
    seed: int
    survived: int
    sentence: str

    @property
    def line(self) -> str:
        """It as the file has it."""
        return "\t".join((self.fault.name, str(self.seed), str(self.survived), self.sentence))


def read() -> list[Reason]:
    """Return what the file says."""
    found = (line.split("\t") for line in FILE.read_text().splitlines())
    return [Reason(Fault[name], int(seed), int(n), sentence) for name, seed, n, sentence in found]


def finds(mutation: Mutation, seed: int) -> bool:
    """Whether a world finds a mutation, with only the kinds of faults that it needs."""
    with mutation.broken():
        return bool(simulate(seed, mutation.needs, **mutation.pipeline).violations)


def without(mutation: Mutation, fault: Fault, seed: int) -> Outcome:
    """Live through a world of a broken core that draws from all kinds but one."""
    with mutation.broken():
        return simulate(seed, without=(fault,), **mutation.pipeline)


def reason_of(fault: Fault, first: Iterable[int] = ()) -> Reason | None:
    """Return why a kind is there; None: what finds each of its mutations may be another kind."""
    candidates = [each for each in MUTATIONS.items() if fault in each[1].needs]
    for sentence, mutation in sorted(candidates, key=lambda each: len(each[1].needs)):
        if any(without(mutation, fault, seed).violations for seed in range(OTHER_SEEDS)):
            continue
        seeds = (*first, *range(FINDING_SEEDS))
        seed = next((each for each in seeds if finds(mutation, each)), None)
        if seed is not None:
            return Reason(fault, seed, OTHER_SEEDS, sentence)
    return None


def justify() -> int:
    """Write the file, and name the kinds that have no mutation of their own; the exit code."""
    reasons = []
    for fault in Fault:
        reason = reason_of(fault)
        print(f"{fault.name}: {'NONE' if reason is None else reason.line}", flush=True)
        reasons += [] if reason is None else [reason]
    FILE.write_text("".join(f"{each.line}\n" for each in reasons))
    return int(len(reasons) < len(Fault))


def page() -> str:
    """Return the table of kinds, each with its mutation."""
    rows = ["| kind of fault | only it brings to light | seed |", "| --- | --- | --- |"]
    rows += [f"| {each.fault.value} | {each.sentence} | {each.seed} |" for each in read()]
    return "\n".join(rows)
