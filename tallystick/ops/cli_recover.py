"""`tallystick recover …`: what a pipeline's start does first, for those who cannot start it now."""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tallystick.errors import OptionError, TallystickError
from tallystick.ops.cli_savepoint import errors_told

if TYPE_CHECKING:
    from tallystick.api.pipeline import Pipeline


def recover(
    pipeline: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:PIPELINE",
            help="Where the pipeline is: a module that can be imported from here, and its name "
            "there, such as jobs.flights:pipeline.",
        ),
    ],
    checkpoint: Annotated[str, typer.Option(help="Its checkpoint folder, or URI.")],
) -> None:
    """Commit and abort what a pipeline that died left in its sinks, without Spark.

    It does what the next start would do first, and ends there: no function of the pipeline is
    called, and no epoch is planned. It takes the pipeline over as any start does: a run that is at
    work stops with a FencedError, and has lost nothing.

    The module is imported: keep a start() in it behind `if __name__ == "__main__":`. Exit codes: 0:
    nothing is left; 1: an error, or an epoch that only the next start can run again.
    """
    from tallystick.ops.cli_show import printable

    with errors_told():
        try:
            done = find_pipeline(pipeline).recover(checkpoint=checkpoint)
        except TallystickError as error:
            for note in getattr(error, "__notes__", ()):
                typer.echo(printable(note))
            raise
    typer.echo(printable(str(done)))
    if done.runs_again is not None:
        sys.exit(1)


def find_pipeline(where: str) -> "Pipeline":
    """Import the module that a pipeline is defined in, and return the pipeline.

    Args:
        where: `module:name`; the working directory is looked through first.

    Raises:
        OptionError: there is no such module, no such name in it, or it is no pipeline.
    """
    from tallystick.api.pipeline import Pipeline

    module_name, colon, name = where.partition(":")
    if not (module_name and colon and name):
        raise OptionError(
            f"{where!r}: expected MODULE:PIPELINE, such as jobs.flights:pipeline for the variable "
            f"`pipeline` of jobs/flights.py"
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise OptionError(f"module {module_name!r} needs {error.name!r}: {error}") from error
        raise OptionError(
            f"there is no module {module_name!r}: neither in {here} nor on Python's path. Call "
            f"this where `python -m {module_name}` works, or set PYTHONPATH"
        ) from None
    found = getattr(module, name, None)
    if isinstance(found, Pipeline):
        return found
    names = sorted(each for each, value in vars(module).items() if isinstance(value, Pipeline))
    there = f"The module has {', '.join(names)}." if names else "The module has no Pipeline."
    if not hasattr(module, name):
        raise OptionError(f"module {module_name!r} has no {name!r}. {there}")
    raise OptionError(
        f"{where} is no Pipeline: it is a {type(found).__name__}. Give the Pipeline itself, with "
        f"its sinks, before start(). {there}"
    )
