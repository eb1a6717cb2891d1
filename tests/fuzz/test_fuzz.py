"""A short run of all decoders with a fixed seed, and the harness against decoders that fail."""

import pytest

from tests.fuzz import broken_decoders
from tests.fuzz.__main__ import DECODERS, run
from tests.fuzz.child import Plan
from tests.fuzz.decoders import DECODERS as KNOWN

CASES = 60
"""Of each decoder; `make fuzz` runs as many as there is time for."""


def test_damaged_bytes_are_read_or_refused_by_every_decoder() -> None:
    plan = Plan(DECODERS, list(KNOWN), seed=1, first=0, case_count=CASES, seconds=60.0)

    results = run(plan, hang_s=120.0)

    assert [(name, result.failures) for name, result in results.items() if result.failures] == []
    assert {name: result.case_count for name, result in results.items()} == dict.fromkeys(
        KNOWN, CASES
    )
    refusing = [name for name, result in results.items() if result.refused]
    assert len(refusing) > len(KNOWN) * 0.8, "the damage reaches the decoders"
    assert sum(result.read for result in results.values()) > len(KNOWN), (
        "and leaves much that is read"
    )


def test_thousands_of_record_batches_are_read_as_by_hand_or_refused() -> None:
    """The bytes that every pipeline reads most of."""
    plan = Plan(DECODERS, ["record batches"], 1, 0, case_count=4000, seconds=300.0)

    (result,) = run(plan, hang_s=120.0).values()

    assert result.failures == []
    assert min(result.read, result.refused) > 500


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("raises", "KeyError in broken_decoders.py"),
        ("hangs", "no end after"),
        ("reads beyond", "the process died (-11)"),
        ("takes memory", "MemoryError in broken_decoders.py"),
    ],
)
def test_a_decoder_that_fails_is_noticed_with_the_case(name: str, what: str) -> None:
    """And the next decoder is run all the same."""
    plan = Plan(broken_decoders.__name__, [name, "sound"], 1, 0, case_count=1, seconds=60.0)

    results = run(plan, hang_s=1.0)

    (failure,) = results[name].failures
    assert failure.startswith("case 0: ")
    assert what in failure
    assert (results["sound"].case_count, results["sound"].failures) == (1, [])
