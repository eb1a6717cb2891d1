"""`tallystick doctor`: all checks, and what to type about their findings."""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tallystick.errors import OptionError, TallystickError
from tallystick.ops.cli_savepoint import options_in

if TYPE_CHECKING:
    from rich.console import Console

    from tallystick.ops.doctor import Diagnosis
    from tallystick.ops.doctor_pipeline import DeclaredPipeline

ERROR_EXIT_CODE = 2
"""Also for a wrong use of the command; Typer's own is the same."""
STYLES = {"ERROR": "bold red", "WARNING": "yellow", "INFO": "dim"}


def fail(error: TallystickError) -> None:
    """Print an error in the use of the command, and exit."""
    from tallystick.ops.cli_show import printable

    typer.echo(printable(str(error)), err=True)
    sys.exit(ERROR_EXIT_CODE)


def interval_of(trigger: str | None) -> int | None:
    """Return the interval in `--trigger`, in ms; None: epochs follow each other at once.

    Raises:
        OptionError: the text is no interval.
    """
    from tallystick.run.query import Trigger

    return None if trigger is None else Trigger.of({"processingTime": trigger}).interval_ms or None


def examine(
    checkpoint: str,
    servers: str | None,
    kafka_options: Path | None,
    *,
    as_json: bool,
    pipeline: "DeclaredPipeline | None",
    options: Mapping[str, str],
    trigger_interval_ms: int | None,
) -> None:
    """Make every check, print the findings, and exit with the weight of the worst.

    Args:
        checkpoint: its location.
        servers: of the cluster to ask; None: the servers in `options`.
        kafka_options: a file of further options; they win over `options`.
        as_json: print JSON.
        pipeline: the checkpoint's pipeline, if the user named it.
        options: of the pipeline's own connection; empty without one.
        trigger_interval_ms: see `diagnose`.

    Raises:
        OptionError: an option cannot work.
    """
    from tallystick.ops import cli_show
    from tallystick.ops.cli_progress import checkpoint_bytes, watched
    from tallystick.ops.doctor import diagnose

    if servers is None and not options:
        raise OptionError(
            "which Kafka? Give --bootstrap-servers HOST:PORT of the cluster that the pipeline "
            "writes to, or --pipeline MODULE:PIPELINE, which names it"
        )
    given = {} if kafka_options is None else options_in(kafka_options)
    given |= {} if servers is None else {"bootstrap.servers": servers}
    with watched("examining") as work:
        work.expect(lambda: checkpoint_bytes(checkpoint))
        diagnosis = diagnose(
            checkpoint,
            {**options, **given},
            pipeline=pipeline,
            trigger_interval_ms=trigger_interval_ms,
            storage_of=work.storage,
            on_check=lambda name: work.say(f"checking {name}"),
        )
    if as_json:
        findings = [{**asdict(finding), "severity": finding.severity.name.lower()}
                    for finding in diagnosis.findings]  # fmt: skip
        fields = {"checkpoint": diagnosis.checkpoint, "exit_code": diagnosis.exit_code}
        typer.echo(cli_show.as_json({**fields, "checks": diagnosis.checks, "findings": findings}))
    else:
        _show(diagnosis, cli_show.console())
    sys.exit(diagnosis.exit_code)


def _show(diagnosis: "Diagnosis", out: "Console") -> None:
    from tallystick.ops.cli_show import plain

    for finding in diagnosis.findings:
        word = finding.severity.name
        out.print(
            f"[{STYLES[word]}]{word.lower()}[/] {finding.check}: {plain(finding.found)}",
            soft_wrap=True,
        )
        for text in (finding.meaning, finding.remedy and f"-> {finding.remedy}"):
            if text:
                out.print(f"    {plain(text)}", soft_wrap=True)
    summary = f"{len(diagnosis.checks)} checks: {', '.join(diagnosis.checks)}"
    counts = [sum(finding.severity == level for finding in diagnosis.findings) for level in (2, 1)]
    if any(counts):
        out.print(f"Errors: {counts[0]}, warnings: {counts[1]}. {summary}.", soft_wrap=True)
    else:
        out.print(f"Nothing is wrong. {summary}.", soft_wrap=True)
