"""`tallystick doctor`: every check there is, and what to type about what it finds."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tallystick.errors import TallystickError
from tallystick.ops.cli_savepoint import Checkpoint, Json, KafkaOptions, options_in

if TYPE_CHECKING:
    from rich.console import Console

    from tallystick.ops.doctor import Diagnosis

ERROR_EXIT_CODE = 2
"""Also where the doctor cannot be asked so; Typer's for wrong words is the same."""
STYLES = {"ERROR": "bold red", "WARNING": "yellow", "INFO": "dim"}


def doctor(
    checkpoint: Checkpoint,
    bootstrap_servers: Annotated[
        str, typer.Option(help="Of the cluster that the pipeline writes to: host:port,host:port.")
    ],
    kafka_options: KafkaOptions = None,
    as_json: Json = False,
) -> None:
    """Look for everything that is wrong, or may be soon, with a checkpoint and its Kafka.

    Changes nothing; the pipeline may run meanwhile, or be dead. Use the pipeline's own login, since
    its rights are looked at too. Every file of the checkpoint is read. Exit codes: 0: nothing is
    wrong; 1: warnings; 2: errors, or the doctor could not be asked so.
    """
    from tallystick.ops import cli_show
    from tallystick.ops.doctor import diagnose

    try:
        options = {} if kafka_options is None else options_in(Path(kafka_options))
        found = diagnose(checkpoint, {**options, "bootstrap.servers": bootstrap_servers})
    except TallystickError as error:
        typer.echo(cli_show.printable(str(error)), err=True)
        sys.exit(ERROR_EXIT_CODE)
    if as_json:
        findings = [{**asdict(each), "severity": each.severity.name.lower()}
                    for each in found.findings]  # fmt: skip
        fields = {"checkpoint": found.checkpoint, "exit_code": found.exit_code}
        typer.echo(cli_show.as_json({**fields, "checks": found.checks, "findings": findings}))
    else:
        _show(found, cli_show.console())
    sys.exit(found.exit_code)


def _show(found: "Diagnosis", out: "Console") -> None:
    from tallystick.ops.cli_show import plain

    for each in found.findings:
        word = each.severity.name
        out.print(
            f"[{STYLES[word]}]{word.lower()}[/] {each.check}: {plain(each.found)}", soft_wrap=True
        )
        for text in (each.meaning, each.remedy and f"-> {each.remedy}"):
            if text:
                out.print(f"    {plain(text)}", soft_wrap=True)
    made = f"{len(found.checks)} checks: {', '.join(found.checks)}"
    counts = [sum(each.severity == level for each in found.findings) for level in (2, 1)]
    if any(counts):
        out.print(f"{counts[0]} errors, {counts[1]} warnings. {made}.", soft_wrap=True)
    else:
        out.print(f"Nothing is wrong. {made}.", soft_wrap=True)
