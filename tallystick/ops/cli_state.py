"""`tallystick state …`: the state of a keyed step as a Parquet file, and back."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tallystick.errors import OptionError
from tallystick.ops.cli_savepoint import KafkaOptions, Servers, asking_kafka, errors_as_messages

if TYPE_CHECKING:
    import pyarrow as pa

app = typer.Typer(
    help="The state of a keyed step as a Parquet file, and back.", no_args_is_help=True
)

ParquetFile = Annotated[Path, typer.Argument(help="A Parquet file.")]


@app.command("export")
def export_state(
    checkpoint: Annotated[
        str, typer.Argument(help="The folder of a checkpoint or a savepoint, or its URI.")
    ],
    file: ParquetFile,
    step: Annotated[
        str | None, typer.Option(help="The step's uid; not needed where there is one keyed step.")
    ] = None,
    bootstrap_servers: Servers = None,
    kafka_options: KafkaOptions = None,
) -> None:
    """Write the committed state of a keyed step, a row per key, into a new Parquet file."""
    import pyarrow.parquet as pq

    from tallystick.ops.state_table import rows_in
    from tallystick.storage.file_storage import FileStorage

    with errors_as_messages():
        if file.exists():
            raise OptionError(f"{file} exists already: expected the name of a new file")
        ask = asking_kafka(bootstrap_servers, kafka_options)
        rows = rows_in(FileStorage(checkpoint), step, ask)
        draft = file.with_name(f".{file.name}.{os.getpid()}")  # a file of that name is whole
        count = 0
        try:
            with pq.ParquetWriter(draft, rows.schema) as writer:
                for batch in rows:
                    writer.write_batch(batch)
                    count += batch.num_rows
            draft.rename(file)
        except OSError as error:
            raise OptionError(f"cannot write {file}: {error.strerror or error}") from None
        finally:
            draft.unlink(missing_ok=True)
    typer.echo(f"Wrote {count} keys to {file}.")


@app.command("import")
def import_state(
    file: ParquetFile,
    savepoint: Annotated[
        str,
        typer.Argument(
            help="A savepoint's folder, or its URI: of its positions and its other steps."
        ),
    ],
    target: Annotated[str, typer.Argument(help="The new savepoint's folder.")],
    step: Annotated[str, typer.Option(help="The step's uid.")],
    key: Annotated[
        list[str] | None,
        typer.Option(
            help="A column of another key, in the order of the new program's key_by; may be "
            "repeated. Without it the key stays."
        ),
    ] = None,
    scratch: Annotated[
        Path | None, typer.Option(help="A folder on a local disk with room for the step's state.")
    ] = None,
) -> None:
    """Write a savepoint in which the state of a step is what a Parquet file says."""
    from tallystick.ops.state_writing import write_table
    from tallystick.storage.file_storage import shown

    with errors_as_messages():
        rows = _rows_of(file)
        write_table(rows, savepoint, step, to=target, key=key or None, scratch=scratch)
    typer.echo(
        f"Wrote {shown(target)}, with {rows.num_rows} keys in step {step!r}; {shown(savepoint)} "
        f"is as it was."
    )


def _rows_of(file: Path) -> "pa.Table":
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(file)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise OptionError(f"{file}: expected a Parquet file: {reason}") from None
