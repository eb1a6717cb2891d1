"""`tallystick inspect`: what is in a checkpoint."""

import sys
from typing import Annotated

import typer

from tallystick.cli_savepoint import KafkaOptions, Servers, asking_kafka


def inspect(
    checkpoint: Annotated[str, typer.Argument(help="The checkpoint folder, or its URI.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every file and compare its checksums.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    bootstrap_servers: Servers = None,
    kafka_options: KafkaOptions = None,
) -> None:
    """Show epochs, positions, state by key groups, files, damage, and what would be removed.

    Changes nothing; the pipeline may run meanwhile. The exit code is 1 if the newest epoch is not
    whole.
    """
    from tallystick import cli_show
    from tallystick import inspection as i
    from tallystick.errors import TallystickError
    from tallystick.storage import FileStorage

    try:
        ask = asking_kafka(bootstrap_servers, kafka_options)
        report = i.inspect(FileStorage(checkpoint), verify=verify, ask=ask)
    except TallystickError as error:
        typer.echo(str(error), err=True)
        sys.exit(1)
    if as_json:
        typer.echo(cli_show.as_json(report))
    else:
        cli_show.show_report(report, cli_show.console())
    sys.exit(0 if report.is_whole else 1)
