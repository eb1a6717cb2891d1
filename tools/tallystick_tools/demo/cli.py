"""`tallystick demo`: real flights, kills, an audit."""

import sys
from typing import Annotated, NoReturn

import typer

from tallystick.errors import TallystickError
from tallystick.host.installed import pip_install


def demo(
    kills: Annotated[
        int, typer.Option(help="How often to kill the pipeline; three at its crash points.", min=0)
    ] = 5,
    records: Annotated[
        int | None, typer.Option(help="How many flights; without it, all 336,776.", min=100)
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Flights per second while it runs; without it, all at once.", min=1),
    ] = None,
    seed: Annotated[int, typer.Option(help="Repeats a schedule of kills.")] = 1,
    stateless: Annotated[
        bool, typer.Option("--stateless", help="Without the counts by destination.")
    ] = False,
    ui_port: Annotated[
        int | None,
        typer.Option(help="Serve a page about the pipeline there, such as 4050.", min=1, max=65535),
    ] = None,
) -> None:
    """Kill a pipeline of real flights again and again, then audit its output.

    It counts flights by destination, in keyed state, and starts again with another number of tasks
    after each kill. The last line is one JSON object; the exit code is 0 only if nothing is lost,
    duplicated, wrong or out of order.
    """
    from rich.console import Console

    from tallystick.ops.cli_progress import counted, waiting
    from tallystick.spark.warm_up import warm_up
    from tallystick.testing import jars

    try:
        from tallystick_tools.demo.run import DemoError, DemoOptions, run_demo
    except ModuleNotFoundError as error:
        _fail(f"the demo needs {error.name}: {pip_install('demo')}")
    console = Console()
    console.print("making kernels ready: about 25 s at the first time on a machine")
    with waiting("compiling kernels, then archiving classes"):
        for line in warm_up():  # the first epoch would wait for it, maybe beyond STALL_S
            console.print(line)
    try:
        jars.fetch_kafka(counted)
        exact = run_demo(DemoOptions(kills, records, rate, seed, stateless, ui_port), console)
    except (DemoError, TallystickError) as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        _fail(f"the demo needs {error.name}: {pip_install('demo')}")
    sys.exit(0 if exact else 1)


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    sys.exit(1)
