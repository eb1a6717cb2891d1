"""The whole table of mutations: each module enters its own when it is imported."""

from tests.simulation import (  # noqa: F401  imported for what they enter
    gang_mutations,
    keyed_mutations,
    loop_mutations,
    operator_mutations,
    pipeline_mutations,
    sink_mutations,
    two_input_mutations,
)
from tests.simulation.mutations import MUTATIONS

__all__ = ["MUTATIONS"]
