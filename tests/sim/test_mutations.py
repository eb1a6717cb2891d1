"""A simulator that finds nothing proves nothing: whatever is broken on purpose must be found."""

from collections.abc import Collection

import gang_mutations
import keyed_mutations
import loop_mutations
import pytest
import sink_mutations
from mutations import MUTATIONS, Mutation

from tallystick.sim.faults import Fault
from tallystick.sim.simulation import Outcome, simulate

assert keyed_mutations, "enters its mutations in the table"
assert sink_mutations, "does so too"
assert loop_mutations, "and so does this"
assert gang_mutations, "as well as this"
SEED_COUNT_MAX = 300
RARE = {"a change of a copy goes on though another one began": 600}
"""Two drivers have to meet in one copy of state, which the first seeds lack: 451 has it."""
FAULTLESS_SEED_COUNT = 3


def lived(seed: int, mutation: Mutation, kinds: Collection[Fault]) -> Outcome:
    """One life of a world that has what the mutation breaks."""
    return simulate(
        seed,
        kinds,
        mutation.is_keyed,
        mutation.decided_by,
        has_loop=mutation.has_loop,
        has_gang=mutation.has_gang,
    )


def failing_seed(mutation: Mutation, seed_count: int) -> int | None:
    """The first seed that brings it to light, with only the kinds of faults that it needs."""
    with mutation.broken():
        for seed in range(seed_count):
            if lived(seed, mutation, mutation.needs).violations:
                return seed
    return None


@pytest.mark.parametrize("sentence", MUTATIONS)
def test_a_broken_core_is_found_out(sentence: str) -> None:
    seed_count = RARE.get(sentence, SEED_COUNT_MAX)
    assert failing_seed(MUTATIONS[sentence], seed_count) is not None, f"survived: {sentence}"


@pytest.mark.parametrize("sentence", [each for each in MUTATIONS if MUTATIONS[each].needs])
def test_it_is_the_fault_that_brings_it_to_light(sentence: str) -> None:
    """With nothing going wrong the broken core does well: so the fault is what found it."""
    mutation = MUTATIONS[sentence]
    with mutation.broken():
        for seed in range(FAULTLESS_SEED_COUNT):
            assert not lived(seed, mutation, ()).violations


def test_every_kind_of_fault_earns_its_place() -> None:
    """A kind of fault that no mutation needs would only make the simulation slower."""
    needed = {fault for mutation in MUTATIONS.values() for fault in mutation.needs}

    assert needed == set(Fault)
