"""A simulator that finds nothing proves nothing: whatever is broken on purpose must be found."""

from collections.abc import Collection
from dataclasses import replace
from functools import cache

import pytest

from tests.simulation import justify
from tests.simulation.every_mutation import MUTATIONS
from tests.simulation.faults import Fault
from tests.simulation.justify import OTHER_SEEDS
from tests.simulation.mutations import Mutation
from tests.simulation.simulation import Outcome, simulate

SEED_COUNT_MAX = 300
RARE = {
    "a change of a copy goes on though another one began": 1200,
    "what an orphan says counts for the gang after its own (resident tasks)": 600,
    "Kafka is asked before fencing, for unstable offsets (crash_late)": 600,
}
"""These need a rare meeting of events: two drivers in one copy of state; an orphan's report of an
epoch whose rows did not count, and the same epoch in another gang; a late commit that arrives
between the question of another driver and its fence."""
FOUND_BY = {
    "a change of a copy goes on though another one began": 1168,
    "a replaced driver blames the checkpoint": 83,
    "Kafka does not fence writers": 65,
    "a snapshot is laid over an old copy": 14,
    "a copy does not check what a change starts from": 156,
    "what a sink that is gone has prepared is passed over (kafka decides)": 73,
    "the event times of all attempts of a reader count": 35,
    "control records of one key count in any order (operator state)": 5,
    "lists stay where they are when there are other readers (operator state)": 5,
    "a replaced run aborts what it prepared, decided or not (kafka decides)": 20,
    "a merged file lacks one that it stands for": 5,
    "a second call that knows no manifest is any call": 305,
    "a copy has its new version before it is whole": 4,
    "what lingers is aborted without a proof of ownership (kafka decides)": 11,
    "ownership is proved before it is asked what lingers (kafka decides)": 9,
}
"""Seeds that have brought these to light, tried before all others: to search for one took from a
second to half a minute. When the simulator changes and a seed no longer does it, the search from 0
finds another."""
FOUND_FIRST = {reason.sentence: [reason.seed] for reason in justify.read()}
"""The seeds of the kinds of faults, whose worlds are lived through anyway."""
FOUND_FIRST |= {sentence: [seed] for sentence, seed in FOUND_BY.items()}
FAULTLESS_SEED_COUNT = 1


def lived(seed: int, mutation: Mutation, kinds: Collection[Fault]) -> Outcome:
    """One life of a world that has what the mutation breaks, up to the first broken promise."""
    outcome = simulate(seed, kinds, to_the_end=False, **mutation.pipeline)
    words = ("has no attribute", "positional argument", "keyword argument")
    mistakes = [
        violation for violation in outcome.violations if any(word in violation for word in words)
    ]
    assert not mistakes, "the mutation itself is wrong: what it changes was changed"
    return outcome


@cache
def is_found(sentence: str, seed: int) -> bool:
    """True if a seed brings a mutation to light with only the kinds of faults that it needs."""
    mutation = MUTATIONS[sentence]
    with mutation.broken():
        return bool(lived(seed, mutation, mutation.needs).violations)


@pytest.mark.parametrize("sentence", MUTATIONS)
def test_a_broken_core_is_found_out(sentence: str) -> None:
    seed_count = RARE.get(sentence, SEED_COUNT_MAX)
    seeds = [*FOUND_FIRST.get(sentence, ()), *range(seed_count)]
    assert any(is_found(sentence, seed) for seed in seeds), f"survived: {sentence}"


def test_the_seeds_tried_first_are_of_mutations_that_there_are() -> None:
    assert MUTATIONS.keys() >= FOUND_BY.keys() | RARE.keys()


@pytest.mark.parametrize("sentence", [name for name in MUTATIONS if MUTATIONS[name].needs])
def test_it_is_the_fault_that_brings_it_to_light(sentence: str) -> None:
    """With nothing going wrong the broken core does well: so the fault is what found it."""
    mutation = MUTATIONS[sentence]
    with mutation.broken():
        for seed in range(FAULTLESS_SEED_COUNT):
            assert not lived(seed, mutation, ()).violations


@pytest.mark.parametrize("sentence", [name for name in MUTATIONS if MUTATIONS[name].has_two_inputs])
def test_only_worlds_of_two_inputs_bring_it_to_light(sentence: str) -> None:
    """Else these worlds would not be needed for it."""
    mutation = replace(MUTATIONS[sentence], has_two_inputs=False)
    with mutation.broken():
        for seed in range(FAULTLESS_SEED_COUNT):
            for kinds in (mutation.needs, None):
                assert not simulate(seed, kinds, is_keyed=True).violations


def test_every_kind_of_fault_earns_its_place() -> None:
    """A kind of fault that no mutation needs would only make the simulation slower."""
    assert [reason.fault for reason in justify.read()] == list(Fault)


@pytest.mark.parametrize("reason", justify.read(), ids=lambda reason: reason.fault.name)
def test_a_kind_of_fault_finds_what_nothing_else_does(reason: justify.Reason) -> None:
    """One world of each; `python -m tests.simulation --justify` lives through many."""
    mutation = MUTATIONS[reason.sentence]

    assert reason.fault in mutation.needs
    assert is_found(reason.sentence, reason.seed)
    assert justify.survives(mutation, reason.fault, reason.others, reason.seed % OTHER_SEEDS)
