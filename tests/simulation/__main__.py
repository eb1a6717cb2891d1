"""`python -m tests.simulation --seeds 1000`: many worlds, or one of them told in full.

Exit code 1 when any promise was broken; the seed it names repeats the story.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence

from tallystick.epoch.manifest import CHECKPOINT, KAFKA
from tests.simulation.faults import Fault
from tests.simulation.justify import justify
from tests.simulation.simulation import Outcome, simulate

SEEDS = 1000
SHOWN_CHARACTERS = 400
SHOWN_MAX = 5
"""How many broken seeds are told of at the end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--seed", type=int, help="tell this one in full")
    parser.add_argument("--keyed", action="store_true", help="with a keyed step, every seed")
    parser.add_argument("--two-inputs", action="store_true", help="which a keyed step has")
    parser.add_argument("--sinks", action="store_true", help="with other sinks, every seed")
    parser.add_argument("--gang", action="store_true", help="with resident tasks, every seed")
    parser.add_argument("--windows", action="store_true", help="after a keyed step, every seed")
    parser.add_argument("--end", action="store_true", help="of two inputs with windows, every seed")
    parser.add_argument("--recover", action="store_true", help="before each run, every seed")
    parser.add_argument("--lists", action="store_true", help="of readers, and a table, every seed")
    parser.add_argument(
        "--justify", action="store_true", help="find a mutation for each kind of fault; no seeds"
    )
    options = parser.parse_args(arguments)
    if options.justify:
        return justify()
    is_keyed = options.keyed or options.two_inputs or options.windows or options.end
    is_stateless = options.sinks and not is_keyed

    def run(seed: int) -> Outcome:
        return simulate(
            seed,
            is_keyed=True if is_keyed else False if is_stateless else None,
            decided_by=(KAFKA, CHECKPOINT)[seed % 2] if options.sinks else None,
            has_loop=options.gang or options.recover or options.lists or None,
            has_gang=options.gang or options.lists or None,
            has_two_inputs=options.two_inputs or options.end or None,
            has_windows=options.windows or options.end or None,
            has_end=options.end or None,
            recovers=options.recover or None,
            has_operator_state=options.lists or None,
        )

    if options.seed is not None:
        return tell(run(options.seed))
    return run_many(range(options.first, options.first + options.seeds), run)


def tell(outcome: Outcome) -> int:
    """Print the story of one world."""
    print("\n".join(outcome.trace))
    print(f"seed {outcome.seed}: {outcome.verdict}, {outcome.epochs} epochs committed")
    for violation in outcome.violations:
        print(f"BROKEN: {violation}")
    return 1 if outcome.violations else 0


def run_many(seeds: range, run: Callable[[int], Outcome]) -> int:
    """Run worlds one after the other, and print what happened in them."""
    started = time.monotonic()
    faults: Counter[Fault] = Counter()
    verdicts: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    met: Counter[str] = Counter()
    epochs, broken = 0, []
    for number, seed in enumerate(seeds, 1):
        outcome = run(seed)
        faults += outcome.faults
        ends += outcome.ends
        met += outcome.met
        verdicts[outcome.verdict] += 1
        epochs += outcome.epochs
        if outcome.violations:
            broken.append(outcome)
        if number % 100 == 0 or number == len(seeds):
            print(f"{number:6d} of {len(seeds)} seeds, {len(broken)} broken", flush=True)
    seconds = time.monotonic() - started
    _print_table("injected faults", Counter({fault.value: n for fault, n in faults.items()}))
    _print_table("what came of resident tasks", met)
    _print_table("how drivers ended", ends)
    _print_table("verdicts", verdicts)
    for outcome in broken[:SHOWN_MAX]:
        print(f"\nBROKEN: seed {outcome.seed}: {outcome.violations[0][:SHOWN_CHARACTERS]}")
    rate = len(seeds) / max(seconds, 1e-9)
    print(f"\n{len(seeds)} seeds, {epochs} epochs in {seconds:.1f} s: {rate:.0f} seeds/s")
    return 1 if broken else 0


def _print_table(title: str, counts: Counter[str]) -> None:
    print(f"\n{title}")
    for name, count in counts.most_common():
        print(f"{count:8d}  {name}")


if __name__ == "__main__":
    sys.exit(main())
