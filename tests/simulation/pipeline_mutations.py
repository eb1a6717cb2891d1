"""Pipelines of several parts broken on purpose: windows, two keyed steps, sinks beside them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tallystick.epoch.coordinator import Coordinator
from tallystick.epoch.manifest import CHECKPOINT, KAFKA
from tallystick.pipeline import input_planning
from tallystick.state.catalog import StepState
from tallystick.state.functions.window_engine import Panes
from tallystick.state.functions.windows import Clock
from tallystick.state.overlay import is_final
from tallystick.tasks import epoch_plan, keyed
from tallystick.tasks.epoch_plan import PipelinePlan
from tallystick.tasks.handed_on import HandedOn
from tallystick.tasks.write import FanOut
from tests.simulation.faults import Fault
from tests.simulation.keyed_step import WINDOW_DELAY_MS, WINDOW_MS, WINDOWS_UID
from tests.simulation.mutations import MUTATIONS, Mutation
from tests.simulation.mutations import mutation as entered

LOST = (Fault.SINK_TIMEOUT, Fault.CRASH_AFTER)
"""All that a decision names is lost, before a driver that lives has committed it."""


def mutation(
    sentence: str,
    where: Any,
    name: str,
    *needs: Fault,
    decided_by: str = "",
    has_windows: bool = True,
    **pipeline: bool,
) -> Callable[[Any], Any]:
    """Enter the decorated function, from the original to the broken one, in the table."""
    settings = {"is_keyed": True, "decided_by": decided_by, "has_windows": has_windows, **pipeline}
    return entered(sentence, where, name, *needs, **settings)


# Windows and their timers.


@mutation("a timer fires again in each epoch after its own", Panes, "delete")
def _(_: Any) -> Any:
    return lambda self, entries: None


@mutation("no file of state says that a timer has fired", keyed, "write_changelog")
def _(original: Any) -> Any:
    """Where a copy is brought forward, or made again, from files, it fires again."""

    def write_changelog(*arguments: Any) -> Any:
        *name, changes = arguments
        return original(*name, changes.filter(changes.column(1).is_valid()))

    return write_changelog


@mutation("a window is put out before the watermark has passed its end", Clock, "until_ms")
def _(original: Any) -> Any:
    def until_ms(self: Any, time: Any) -> int | None:
        time_ms: int | None = original(self, time)
        return None if time_ms is None else time_ms + WINDOW_MS

    return until_ms


@mutation("an epoch without rows runs no timers", PipelinePlan, "is_idle", Fault.EMPTY_EPOCH)
def _(_: Any) -> Any:
    return lambda self, state: all(base.version is not None for base in self.check(state))


# The state of two steps is of one epoch.


def _second(change: Callable[[StepState, StepState], StepState]) -> Callable[[Any], Any]:
    """Change what the second step leaves: from what it went on from, and what it should be."""

    def make(original: Any) -> Any:
        def states(plans: Any, *arguments: Any) -> list[StepState]:
            results: list[StepState] = original(plans, *arguments)
            pairs = zip(plans, results, strict=True)
            return [state if plan.stage == 1 else change(plan.base, state) for plan, state in pairs]

        return states

    return make


def _without_files(base: StepState, state: StepState) -> StepState:
    return replace(base, watermark_ms=state.watermark_ms)


def _without_watermark(base: StepState, state: StepState) -> StepState:
    return replace(state, watermark_ms=base.watermark_ms)


for sentence, change in (
    ("the second step keeps the state of the epoch before", _without_files),
    ("the second step keeps the watermark of the epoch before", _without_watermark),
):
    MUTATIONS[sentence] = Mutation(
        frozenset(),
        epoch_plan,
        "with_watermarks",
        _second(change),
        is_keyed=True,
        has_windows=True,
    )


@mutation("the second step goes by the latest time of its rows", epoch_plan, "with_watermarks")
def _(original: Any) -> Any:
    """As if they came from one partition, in the order of their times."""

    def states(plans: Any, states: Any, source: Any, read: Any, own_ms: Any, *end: Any) -> Any:
        first, second = original(plans, states, source, read, own_ms, *end)
        times = [time_ms for time_ms in own_ms[1] if time_ms is not None]
        own = [
            time_ms - WINDOW_DELAY_MS
            for time_ms in (max(times, default=None),)
            if time_ms is not None
        ]
        known = [time_ms for time_ms in (*own, states[1].watermark_ms) if time_ms is not None]
        return [first, replace(second, watermark_ms=max(known, default=None))]

    return states


@mutation(
    "a step hands on the watermark of the epoch to come",
    epoch_plan,
    "with_watermarks",
    has_two_inputs=True,
)
def _(original: Any) -> Any:
    """Before it has put out what that closes."""

    def states(plans: Any, *arguments: Any) -> Any:
        states_after = original(plans, *arguments)
        bases = [
            replace(plan.base, watermark_ms=state.watermark_ms)
            for plan, state in zip(plans, states_after, strict=True)
        ]
        handing = [replace(plan, base=base) for plan, base in zip(plans, bases, strict=True)]
        return [states_after[0], *original(handing, *arguments)[1:]]

    return states


@mutation(
    "a start takes the second step's state from the epoch before",
    Coordinator,
    "_run",
    decided_by=KAFKA,
)
def _(original: Any) -> Any:
    """So that timers which fired in the newest epoch fire again."""

    def run(self: Any, goal: Any, base: Any, *arguments: Any) -> Any:
        before = self._known.before
        is_first = not self.__dict__.get("has_run")
        self.has_run = True
        if is_first and before is not None and base is self._known.manifest:
            old = [step_state for step_state in before.state if step_state.uid == WINDOWS_UID]
            kept = [step_state for step_state in base.state if step_state.uid != WINDOWS_UID]
            base = replace(base, state=(*kept, *old))
        return original(self, goal, base, *arguments)

    return run


# The end of all inputs.


def _over(name: str) -> Callable[[Any], Any]:
    def make(_: Any) -> Any:
        of_partitions = {"none": lambda ends: False, "one": any}[name]
        return staticmethod(
            lambda stops, without: of_partitions(
                input_planning._is_at_end(stop, at) for stop in stops for at in stop.positions
            )
        )

    return make


for sentence, name in (
    ("the end of all inputs closes no window", "none"),
    ("the end of one partition closes all windows", "one"),
):
    MUTATIONS[sentence] = Mutation(
        frozenset(),
        input_planning.InputPlanners,
        "_are_over",
        _over(name),
        is_keyed=True,
        has_two_inputs=True,
        has_windows=True,
        has_end=True,
    )


@mutation(
    "the final watermark is not handed on",
    HandedOn,
    "watermark_ms",
    has_two_inputs=True,
    has_end=True,
)
def _(original: Any) -> Any:
    def watermark_ms(self: Any, of_giver: int | None, delay_ms: int) -> int | None:
        return None if is_final(of_giver) else original(self, of_giver, delay_ms)

    return watermark_ms


# Keyed steps, and other sinks.


for decider in (KAFKA, CHECKPOINT):

    @mutation(
        f"sinks get nothing of keyed tasks but the first ({decider} decides)",
        FanOut,
        "begun",
        decided_by=decider,
        has_windows=False,
    )
    def _(original: Any) -> Any:
        def begun(self: Any, source: int, *attempt: int) -> Any:
            plan = replace(self, branches=()) if source else self
            return original(plan, source, *attempt)

        return begun


@mutation(
    "an epoch that runs again goes on from the state that it left",
    Coordinator,
    "_run",
    *LOST,
    decided_by=CHECKPOINT,
)
def _(original: Any) -> Any:
    def run(self: Any, goal: Any, base: Any, *arguments: Any) -> Any:
        known = self._known
        is_again = base is known.before and known.manifest is not None
        return original(self, goal, known.manifest if is_again else base, *arguments)

    return run
