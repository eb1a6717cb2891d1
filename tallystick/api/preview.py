"""`Pipeline.preview`: some rows through a pipeline, in this process, to look at."""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tallystick.api.pipeline import Pipeline
from tallystick.api.tables import as_html, as_text, counted
from tallystick.codec.formats import DEADLETTER
from tallystick.epoch.two_phase import Owner, RunFacts, TwoPhaseCommitSink
from tallystick.kafka.output import KafkaOutput
from tallystick.pipeline.compiled import PipelineRun
from tallystick.pipeline.topology import OutputTopology
from tallystick.spark.cluster import Cluster
from tallystick.tasks.steps import Step
from tallystick.testing.driver import PREVIEW, run


@dataclass(frozen=True, repr=False)
class Preview:
    """The rows that came out of a pipeline, with their types.

    Args:
        table: the rows of the main output.
        dead_letters: the malformed records; see `tallystick.testing.Driver`.
    """

    table: pa.Table
    dead_letters: pa.Table

    @property
    def _last_line(self) -> str:
        malformed = self.dead_letters.num_rows
        return counted(self.table.num_rows) + (f"; {malformed} malformed" if malformed else "")

    def __repr__(self) -> str:
        return as_text(self.table, self._last_line)

    def _repr_html_(self) -> str:
        return as_html(self.table, self._last_line)


class _EveryOutput(tuple[str, ...]):
    """The outputs that go nowhere: whichever a pipeline has."""

    __slots__ = ()

    def __contains__(self, name: object) -> bool:
        return True


@dataclass(frozen=True)
class PreviewSink:
    """The sink in place of a pipeline's own: its rows stay in memory."""

    dead_letter_topic: str | None
    kind: str = PREVIEW
    uid: str | None = PREVIEW

    def open(self, owner: Owner, facts: RunFacts) -> TwoPhaseCommitSink:
        """Raise an error: a `Driver` keeps the rows of such a sink itself."""
        raise AssertionError("it writes nothing")


@dataclass(frozen=True)
class _PreviewedPipeline:
    """A pipeline whose main output goes to a `PreviewSink`, and nothing else anywhere."""

    pipeline: Pipeline

    @property
    def name(self) -> str:
        return self.pipeline.name

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.pipeline.steps

    @property
    def topology(self) -> OutputTopology:
        options = [declared.options for declared in self.pipeline.inputs.declared(self.name)]
        has_letters = any(one.value_mode == DEADLETTER for one in options)
        letters = "preview-dead-letters" if has_letters else None
        # Dead letters of keyed steps need a sink that decides.
        decider = letters and KafkaOutput(options[0].config, PREVIEW, PREVIEW)
        return OutputTopology(
            decider=decider or None,
            others=((PREVIEW, PreviewSink(letters)),),
            dead_letter_topic=letters,
            dropped=_EveryOutput(),
        )

    def _compiled(self, cluster: Cluster) -> PipelineRun:
        pipeline = self.pipeline
        pipeline.inputs.check_joined(self.name, next(iter(pipeline.steps), None))
        return pipeline._run(cluster, None, topology=self.topology)


def previewed(pipeline: Pipeline, rows: Any) -> Preview:
    """Return what comes out of a pipeline; see `Pipeline.preview`.

    Raises:
        OptionError: the pipeline has no source, or `start` would find the same mistake.
    """
    result = run(_PreviewedPipeline(pipeline), rows)
    return Preview(result.output(), result.dead_letters())
