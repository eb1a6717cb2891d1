"""`Pipeline.preview`: some rows through a pipeline, in this process, to look at."""

from dataclasses import dataclass
from html import escape
from typing import Any

import pyarrow as pa

from tallystick.api.pipeline import Pipeline
from tallystick.codec.ddl import ddl_of_type
from tallystick.codec.formats import DEADLETTER
from tallystick.epoch.two_phase import Owner, RunFacts, TwoPhaseCommitSink
from tallystick.kafka.output import KafkaOutput
from tallystick.pipeline.compiled import PipelineRun
from tallystick.pipeline.topology import OutputTopology
from tallystick.spark.cluster import Cluster
from tallystick.tasks.keyed_step import Step
from tallystick.testing.driver import PREVIEW, run

SHOWN_MAX = 20
WIDTH_MAX = 40


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
    def _lines(self) -> list[list[str]]:
        """Names, types and rows, as texts."""
        schema = self.table.schema
        rows = self.table.slice(0, SHOWN_MAX).to_pylist()
        cells = [[str(row[name])[:WIDTH_MAX] for name in schema.names] for row in rows]
        return [schema.names, [ddl_of_type(field.type) for field in schema], *cells]

    @property
    def _counted(self) -> str:
        count, malformed = self.table.num_rows, self.dead_letters.num_rows
        more = f", the first {SHOWN_MAX} shown" if count > SHOWN_MAX else ""
        return f"{count} rows{more}" + (f"; {malformed} malformed records" if malformed else "")

    def __repr__(self) -> str:
        lines = self._lines
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        texts = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        return "\n".join([*texts, self._counted])

    def _repr_html_(self) -> str:
        names, types, *rows = self._lines
        head = "".join(
            f"<th>{escape(name)}<br><small>{escape(kind)}</small></th>"
            for name, kind in zip(names, types, strict=True)
        )
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
        )
        return f"<table><tr>{head}</tr>{body}</table><p>{self._counted}</p>"


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
