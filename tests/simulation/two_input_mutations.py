"""What only pipelines of two inputs have, broken on purpose; in the table of `mutations`."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.epoch.protocol import WriteManifest
from tallystick.pipeline import input_planning
from tallystick.pipeline.input_planning import InputPlanners
from tallystick.run.driver import Driver
from tallystick.run.epoch_clock import SteadyClock
from tallystick.source.offsets import from_json
from tallystick.tasks import event_times, handed_on, read_plan
from tallystick.tasks.keyed import ProcessPlan
from tests.simulation.faults import Fault
from tests.simulation.mutations import mutation as entered


def mutation(sentence: str, where: Any, name: str, *needs: Fault) -> Callable[[Any], Any]:
    """Enter the decorated function in the table."""
    pipeline = {"is_keyed": True, "has_two_inputs": True}
    return entered(f"{sentence} (two inputs)", where, name, *needs, **pipeline)


# Positions.


@mutation("positions go to inputs by their places", input_planning, "by_input")
def _(_: Any) -> Any:
    """As they did before a pipeline had several: the order may differ from run to run."""
    uids = ("input-1", "second")

    def by_input(texts: tuple[str, ...], *_: Any) -> dict[str, Any]:
        states = [from_json(json.loads(text)) for text in texts]
        return {uid: replace(state, input=uid) for uid, state in zip(uids, states, strict=False)}

    return by_input


@mutation("the second input begins anew in each run", InputPlanners, "positions")
def _(original: Any) -> Any:
    def positions(self: Any, start: tuple[str, ...]) -> Any:
        original_positions = original(self, start)
        if "begun" in self.__dict__:
            return original_positions
        self.begun = True
        first = {source.uid: source.planner.first() for source in self._inputs}
        return tuple(
            first[position.input] if position.input == "second" else position
            for position in original_positions
        )

    return positions


@mutation("a manifest has the second input's positions of the one before", Driver, "_perform")
def _(original: Any) -> Any:
    def perform(self: Any, action: Any, running: Any) -> Any:
        if not isinstance(action, WriteManifest):
            return original(self, action, running)
        texts = action.manifest.sources
        is_second = [from_json(json.loads(text)).input == "second" for text in texts]
        second = next((text for text, is_its in zip(texts, is_second, strict=True) if is_its), "")
        before = self.__dict__.get("before", second)
        self.before = second
        sources = tuple(
            before if is_its else text for text, is_its in zip(texts, is_second, strict=True)
        )
        manifest = replace(action.manifest, sources=sources)
        return original(self, replace(action, manifest=manifest), running)

    return perform


@mutation("topics of one name are one, whose event times are mixed", read_plan, "of_input")
def _(_: Any) -> Any:
    return lambda uid, partition: partition


# The watermark.


@mutation("the watermark is that of the first input", handed_on, "advanced")
def _(original: Any) -> Any:
    def advanced(base: Any, read_ms: Any, source: Any, *settings: int) -> Any:
        first = frozenset(
            partition for partition in source.partitions if "/" not in partition.topic
        )
        after = original(base, read_ms, source, *settings)
        own_ms = {at: ms for at, ms in read_ms.items() if at in first}
        alone = original(base, own_ms, replace(source, partitions=first), *settings)
        return replace(after, watermark_ms=alone.watermark_ms)

    return advanced


@mutation("the watermark does not wait for an input without rows", event_times, "_times_after")
def _(original: Any) -> Any:
    return lambda *read, is_waiting: original(*read, is_waiting=False)


@mutation("pauses are measured by a clock that jumps", SteadyClock, "__init__", Fault.CLOCK_JUMPED)
def _(original: Any) -> Any:
    return lambda self, wall, _: original(self, wall, wall)


@mutation("rows are not judged by the watermark of the manifest", ProcessPlan, "_in_time")
def _(original: Any) -> Any:
    def in_time(self: Any, rows: Any, context: Any) -> Any:
        return original(replace(self, time=self.time._replace(watermark_ms=None)), rows, context)

    return in_time


@mutation("a run begins without the watermark of the manifest", CheckpointFolder, "manifest")
def _(original: Any) -> Any:
    def manifest(self: Any, *path: str) -> Any:
        decided = original(self, *path)
        if decided is None:
            return None
        return replace(
            decided, state=tuple(replace(step, watermark_ms=None) for step in decided.state)
        )

    return manifest
