"""`tallystick savepoint …`: committed epochs that their owner keeps."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tallystick.errors import OptionError, TallystickError
from tallystick.text import printable

if TYPE_CHECKING:
    from tallystick.checkpoint.newest import Ask
    from tallystick.storage.file_storage import FileStorage

app = typer.Typer(
    help="Committed epochs that their owner keeps, portable to another parallelism.",
    no_args_is_help=True,
)

Checkpoint = Annotated[str, typer.Argument(help="The checkpoint folder, or its URI.")]
SavepointArgument = Annotated[str, typer.Argument(help="The savepoint's own folder, or its URI.")]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]
Servers = Annotated[
    str | None,
    typer.Option(
        "--bootstrap-servers",
        help="Of the cluster that the pipeline writes to: to ask Kafka whether the newest epoch is "
        "decided, and which attempt of it counts.",
    ),
]
KafkaOptions = Annotated[
    Path | None, typer.Option(help="A file of further client options: name=value lines.")
]

PATIENCE = {"delivery.timeout.ms": "10000"}
"""A person waits here, and can try again."""


@app.command("create")
def create(
    checkpoint: Checkpoint,
    savepoint: SavepointArgument,
    epoch: Annotated[
        int | None,
        typer.Option(help="An older one that `tallystick inspect` shows as whole.", min=0),
    ] = None,
    bootstrap_servers: Servers = None,
    kafka_options: KafkaOptions = None,
) -> None:
    """Copy the newest committed epoch of a checkpoint, whether its pipeline runs or not."""
    from tallystick.checkpoint.newest import newest_decided
    from tallystick.ops import savepoints
    from tallystick.ops.cli_progress import epoch_bytes, watched
    from tallystick.storage.file_storage import FileStorage, shown

    with errors_as_messages(), watched("copying and reading back") as work:
        ask = asking_kafka(bootstrap_servers, kafka_options)
        source = FileStorage(checkpoint)
        newest = -1 if epoch is not None else newest_decided(source, ask)
        work.expect(lambda: 3 * epoch_bytes(checkpoint, epoch))  # read, written, read back
        saved = savepoints.create(
            work.storage(checkpoint),
            work.storage(savepoint),
            epoch=epoch,
            ask_kafka=ask,
        )
    typer.echo(
        f"Saved epoch {saved.manifest.checkpoint_id} of pipeline {saved.manifest.pipeline!r} to "
        f"{shown(savepoint)}."
    )
    if newest > saved.manifest.checkpoint_id:
        typer.echo(
            f"Epoch {newest} is decided too, and was not settled yet: it is not in "
            f"the savepoint. If the pipeline is stopped and this was to be its last word, start it "
            f"once, which settles that epoch; then save again.",
            err=True,
        )


@app.command("list")
def list_savepoints(
    folder: Annotated[str, typer.Argument(help="A folder of savepoints, or one of them.")],
    as_json: Json = False,
) -> None:
    """List the savepoints in a folder; exit code 1 if one cannot be read, or there is none."""
    from tallystick.ops import cli_show, savepoints
    from tallystick.storage.file_storage import shown

    with errors_as_messages():
        there = savepoints.find(folder)
    intact, damaged = [], []
    for location, saved in there:
        try:
            if isinstance(saved, TallystickError):
                raise saved
            intact.append(cli_show.savepoint_json(location, saved))
        except TallystickError as error:
            damaged.append(str(error))
    if as_json:
        typer.echo(cli_show.as_json(intact))
    elif intact:
        cli_show.show_savepoints(intact, cli_show.console())
    elif not damaged:
        damaged = [f"{shown(folder)} holds no savepoint, or there is no such folder."]
    for message in damaged:
        typer.echo(printable(message), err=True)
    if damaged:
        sys.exit(1)


@app.command("describe")
def describe(savepoint: SavepointArgument, as_json: Json = False) -> None:
    """Show a savepoint: pipeline, epoch, positions, steps, files."""
    from tallystick.ops import cli_show, savepoints
    from tallystick.storage.file_storage import FileStorage, shown

    with errors_as_messages():
        saved = savepoints.read(FileStorage(savepoint))
    if as_json:
        typer.echo(cli_show.as_json(cli_show.savepoint_json(shown(savepoint), saved)))
    else:
        cli_show.show_savepoint(shown(savepoint), saved, cli_show.console())


@app.command("delete")
def delete(savepoint: SavepointArgument) -> None:
    """Remove a savepoint; nothing else in its folder."""
    from tallystick.ops import savepoints
    from tallystick.storage.file_storage import FileStorage, shown

    with errors_as_messages():
        savepoints.delete(FileStorage(savepoint))
    typer.echo(f"Deleted {shown(savepoint)}.")


@app.command("restore")
def restore(
    savepoint: SavepointArgument,
    checkpoint: Annotated[str, typer.Argument(help="A new, empty checkpoint folder.")],
) -> None:
    """Make a new checkpoint that goes on from a savepoint; then start the pipeline on it."""
    from tallystick.ops import savepoints
    from tallystick.ops.cli_progress import savepoint_bytes, watched
    from tallystick.storage.file_storage import shown

    with errors_as_messages(), watched("copying") as work:
        work.expect(lambda: 2 * savepoint_bytes(savepoint))  # read, and written
        saved = savepoints.restore(work.storage(savepoint), work.storage(checkpoint))
    epoch, name = saved.manifest.checkpoint_id, saved.manifest.pipeline
    typer.echo(
        f"{shown(checkpoint)} goes on after epoch {epoch}. Under the name {name!r} it does so "
        f"exactly if Kafka committed nothing after that epoch; else the start is refused, and "
        f"says what would be repeated and how to state that this is meant. Under another name it "
        f"is a fork, with an output that starts after epoch {epoch}."
    )


@app.command("migrate")
def migrate(
    savepoint: SavepointArgument,
    target: Annotated[str, typer.Argument(help="The new savepoint's folder.")],
    max_parallelism: Annotated[
        list[str],
        typer.Option(
            help="STEP=NUMBER of key groups; may be given several times. The NUMBER alone where "
            "there is one step."
        ),
    ],
    scratch: Annotated[
        Path | None, typer.Option(help="A folder on a local disk with room for a step's state.")
    ] = None,
) -> None:
    """Rewrite a savepoint's state for other numbers of key groups, larger or smaller."""
    from tallystick.ops.cli_progress import savepoint_bytes, watched
    from tallystick.ops.savepoints import migrate as run
    from tallystick.storage.file_storage import shown

    with errors_as_messages(), watched("rewriting state") as work:
        source = work.storage(savepoint)
        # Read, written and read back; what is written again has about the same size.
        work.expect(lambda: 3 * savepoint_bytes(savepoint))
        wanted = dict(_step_and_number(text, source) for text in max_parallelism)
        folder = scratch or Path(tempfile.gettempdir())
        if not folder.is_dir():
            raise OptionError(f"--scratch {folder}: expected a folder on a local disk")
        run(source, work.storage(target), wanted, folder)
    typer.echo(f"Wrote {shown(target)}; {shown(savepoint)} is as it was.")


def _step_and_number(text: str, savepoint: "FileStorage") -> tuple[str, int]:
    """Return the step and the number in `--max-parallelism`; a number alone is for an only step."""
    from tallystick.ops import savepoints

    uid, equals, number = text.rpartition("=")
    if not number.isdecimal() or bool(uid) != bool(equals):
        raise OptionError(f"--max-parallelism {text}: expected STEP=NUMBER, e.g. count=512")
    if not uid:
        uids = [step.uid for step in savepoints.read(savepoint).manifest.state]
        if len(uids) != 1:
            raise OptionError(
                f"--max-parallelism {text}: expected STEP=NUMBER, since savepoint "
                f"{savepoint.location} has {len(uids)} keyed steps: {', '.join(uids) or 'none'}"
            )
        uid = uids[0]
    return uid, int(number)


def asking_kafka(servers: str | None, options_file: Path | None) -> "Ask | None":
    """Return a function that asks Kafka for a pipeline's token, if servers are given.

    Raises:
        OptionError: an option cannot work.
    """
    if servers is None:
        return None
    from tallystick.kafka.config import KafkaConfig
    from tallystick.ops.checkpoint_view import asking

    options = PATIENCE | (options_in(options_file) if options_file else {})
    return asking(KafkaConfig.from_options({**options, "bootstrap.servers": servers}))


def options_in(path: Path) -> dict[str, str]:
    """Return the client options in a file.

    Raises:
        OptionError: it is no file of name=value lines.
    """
    options = {}
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise OptionError(
            f"--kafka-options {path}: expected a file of name=value lines: {reason}"
        ) from None
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals:  # the line may hold a secret: it is not shown
            raise OptionError(f"{path}, line {number}: expected name=value")
        options[name.strip()] = value.strip()
    return options


@contextmanager
def errors_as_messages() -> Iterator[None]:
    """Print an error of ours as a message, not as a traceback, and exit with code 1."""
    try:
        yield
    except TallystickError as error:
        typer.echo(printable(str(error)), err=True)
        sys.exit(1)
