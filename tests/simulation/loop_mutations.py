"""A loop of our own, broken on purpose; entered in the table of `mutations`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tallystick.epoch import verdict
from tallystick.epoch.coordinator import Coordinator
from tallystick.epoch.facts import Request
from tallystick.epoch.manifest import CHECKPOINT, KAFKA
from tallystick.epoch.micro_batches import settled_path
from tallystick.run.driver import Driver
from tests.simulation.faults import Fault
from tests.simulation.mutations import mutation as entered


def mutation(
    sentence: str, where: Any, name: str, *needs: Fault, decided_by: str = ""
) -> Callable[[Any], Any]:
    """Enter the decorated function in the table."""
    pipeline = {"decided_by": decided_by, "has_loop": True}
    return entered(f"{sentence} (a loop of our own)", where, name, *needs, **pipeline)


@mutation("where a lineage begins is not kept", verdict, "following")
def _(original: Any) -> Any:
    def following(committed: Any, identity: Any) -> Any:
        request = original(committed, identity)
        is_first = request.checkpoint_id == verdict.FIRST_EPOCH
        return request._replace(start=()) if is_first else request

    return following


@mutation(
    "the newest epoch is not settled before the next",
    verdict,
    "look_back",
    Fault.CRASH_BEFORE,
    decided_by=CHECKPOINT,
)
def _(original: Any) -> Any:
    def look(committed: Any, identity: Any) -> Any:
        request = original(committed, identity)
        return None if isinstance(request, Request) else request

    return look


@mutation(
    "a start with nothing to read leaves what lingers",
    Coordinator,
    "_end_without_epoch",
    decided_by=CHECKPOINT,
)
def _(original: Any) -> Any:
    def end(self: Any, goal: Any) -> Any:
        self._is_recovered |= not goal.only_recovers
        return original(self, goal)

    return end


@mutation(
    "a token that was set back is not noticed", Driver, "_read_committed", Fault.TOKEN_SET_BACK
)
def _(original: Any) -> Any:
    return lambda self: replace(original(self), begun=(), is_set_back=False)


@mutation(
    "a note that all is settled is made too early",
    Driver,
    "_commit",
    Fault.CRASH_BEFORE,
    decided_by=KAFKA,
)
def _(original: Any) -> Any:
    def commit(self: Any, action: Any) -> Any:
        done = original(self, action)
        if self.coordinator.manifest_path(action.token.checkpoint_id):
            self._folder.storage.put(settled_path(action.token.manifest_path), b"")
        return done

    return commit
