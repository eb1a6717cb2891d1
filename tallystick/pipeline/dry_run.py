"""A start that makes all checks of a start, says what would change, writes nothing, and ends.

It asks clusters and reads the checkpoint, so a run of the pipeline may be at work meanwhile. Sinks
that are not Kafka's are left out: to try one out, a start makes a table or writes a file.
"""

import uuid
from collections.abc import Callable
from typing import cast

from tallystick.pipeline.compiled import PipelineRun, newest_manifest
from tallystick.pipeline.input_planning import by_input, check_none_gone
from tallystick.run.console import Console
from tallystick.run.driver import Driver
from tallystick.run.epoch_loop import EpochLoop, LoopSource, Trigger
from tallystick.run.query import Query
from tallystick.storage.file_storage import FileStorage


class _NoDriver:
    """The driver of a loop without epochs."""

    runs_epoch = False

    def end(self) -> None:
        """Do nothing."""


def dry_run(
    run: PipelineRun,
    storage: FileStorage,
    trigger: Trigger,
    accepted: frozenset[str],
    console: Console,
    on_end: Callable[[], None],
) -> Query:
    """Compare a pipeline, checked beside its clusters, with its checkpoint; return an ended query.

    Args:
        run: the pipeline.
        storage: the checkpoint, which may be new.
        trigger: of the start.
        accepted: decisions that the user stated.
        console: told what would change.
        on_end: called at the end.

    Raises:
        OptionError: the pipeline does not fit what the checkpoint holds.
    """
    manifest = newest_manifest(storage, run.name)
    state = () if manifest is None else manifest.state
    positions = by_input(() if manifest is None else manifest.sources, run.previous_inputs)
    check_none_gone(positions, [source.uid for source in run.all_inputs], accepted)
    run.keyed.check(state)
    changes = run.keyed.state_changes(state)
    new = [source for source in run.all_inputs if positions and source.uid not in positions]
    changes += [f"{source.text} is new: it begins as its source says" for source in new]
    begin = "the first epoch" if manifest is None else f"epoch {manifest.checkpoint_id}"
    changes = changes or ["nothing changes"]
    untried = [f"sink {uid} was not tried out" for uid, _ in run.topology.others]
    console.info(
        f"dry run, from {begin} in {storage.location}: {'; '.join([*changes, *untried])}; a start "
        f"would go on. Nothing was written"
    )
    loop = EpochLoop(
        cast(Driver, _NoDriver()), cast(LoopSource, None), trigger, on_end=lambda _: None
    )
    loop.stop()
    query = Query(
        run.name,
        "",
        str(uuid.uuid4()),
        loop=lambda _: loop,
        prepare=lambda: None,
        cancel=lambda: None,
        close=run.close,
        describe=lambda _: {},
        rescale=lambda _: None,
        console=console,
        on_end=lambda _: on_end(),
    )
    query.begin()
    return query
