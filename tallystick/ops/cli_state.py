"""`tallystick state …`: the state of a keyed step as a Parquet file, and back."""

import json
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


def rows_of(file: Path) -> "pa.Table":
    """Read a Parquet file.

    Raises:
        OptionError: it is none.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(file)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise OptionError(f"{file}: expected a Parquet file: {reason}") from None


def offsets_of(text: str) -> dict[str, dict[int, int]]:
    """Return the offsets by topic and partition in `--offsets`: JSON, or the name of a file of it.

    Raises:
        OptionError: it is neither.
    """
    from tallystick.options.source import by_partition

    if not text.lstrip().startswith("{"):
        try:
            text = Path(text).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(
                f"--offsets {text}: expected JSON, or a file of it: {error}"
            ) from None
    try:
        return {topic: by_partition(offsets) for topic, offsets in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        raise OptionError(
            f"--offsets {text.strip()}: expected the next offset by topic and partition, such as "
            f'{{"orders": {{"0": 1200, "1": 950}}}}'
        ) from None
