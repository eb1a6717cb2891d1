"""Each kind of fault, and a broken core that goes undetected without it.

A kind earns its place alone if some mutation is found while it strikes, and survives in worlds that
draw from all other kinds. Where others find each of its mutations too, it earns it beside them: one
survives with all that it needs but this kind. `python -m tests.simulation --justify` looks for one
of each kind, and writes `justified.txt`, from which the table of a page is made.
"""

from pathlib import Path
from typing import NamedTuple

from tests.simulation.every_mutation import MUTATIONS
from tests.simulation.faults import Fault
from tests.simulation.mutations import Mutation
from tests.simulation.simulation import simulate

FILE = Path(__file__).with_name("justified.txt")
OTHER_SEEDS = 40
"""How many worlds without the kind a mutation has to survive."""
ALL, NEEDED = "all", "needed"
FINDING_SEEDS = 600
"""How many worlds are searched for one that finds it."""


class Reason(NamedTuple):
    """Why a kind is there.

    Args:
        fault: the kind.
        seed: whose world finds the mutation, with only the kinds that it needs.
        others: in the worlds where it survived all other kinds were drawn from; else only those
            that it needs besides.
        sentence: the mutation.
    """

    fault: Fault
    seed: int
    others: str
    sentence: str

    @property
    def line(self) -> str:
        """It as the file has it."""
        return "\t".join((self.fault.name, str(self.seed), self.others, self.sentence))


def read() -> list[Reason]:
    """Return what the file says."""
    fields = (line.split("\t") for line in FILE.read_text().splitlines())
    return [Reason(Fault[name], int(seed), others, at) for name, seed, others, at in fields]


def finds(mutation: Mutation, seed: int) -> bool:
    """Whether a world finds a mutation, with only the kinds of faults that it needs."""
    with mutation.broken():
        return bool(simulate(seed, mutation.needs, **mutation.pipeline).violations)


def survives(mutation: Mutation, fault: Fault, others: str, seed: int) -> bool:
    """Whether a world without a kind of fault does not find a mutation."""
    with mutation.broken():
        if others == ALL:
            outcome = simulate(seed, without=(fault,), **mutation.pipeline)
        else:
            outcome = simulate(seed, mutation.needs - {fault}, **mutation.pipeline)
    return not outcome.violations


def reason_of(fault: Fault) -> Reason | None:
    """Return why a kind is there; None: what it finds is found without it."""
    mutations = [entry for entry in MUTATIONS.items() if fault in entry[1].needs]
    candidates = sorted(mutations, key=lambda entry: len(entry[1].needs))
    for others in (ALL, NEEDED):
        for sentence, mutation in candidates:
            if not all(survives(mutation, fault, others, seed) for seed in range(OTHER_SEEDS)):
                continue
            seed = next(
                (seed_tried for seed_tried in range(FINDING_SEEDS) if finds(mutation, seed_tried)),
                None,
            )
            if seed is not None:
                return Reason(fault, seed, others, sentence)
    return None


def justify() -> int:
    """Write the file, and name the kinds that nothing needs; the exit code."""
    reasons = []
    for fault in Fault:
        reason = reason_of(fault)
        print(f"{fault.name}: nothing needs it" if reason is None else reason.line, flush=True)
        reasons += [] if reason is None else [reason]
    FILE.write_text("".join(f"{entry.line}\n" for entry in reasons))
    return int(len(reasons) < len(Fault))


def page() -> str:
    """Return the table of kinds, each with its mutation."""
    rows = ["| kind of fault | brings to light that | alone | seed |", "| --- | --- | --- | --- |"]
    rows += [
        f"| {reason.fault.value} | {reason.sentence} | {'yes' * (reason.others == ALL)} "
        f"| {reason.seed} |"
        for reason in read()
    ]
    return "\n".join(rows)
