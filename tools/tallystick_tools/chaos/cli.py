"""`tallystick chaos`: a user's own program under faults."""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from tallystick.errors import OptionError
from tallystick.host.installed import pip_install
from tallystick.ops.cli_savepoint import errors_as_messages

NOT_EXACT = 1

Command = Annotated[
    list[str],
    typer.Argument(
        help="Your program and its arguments, after `--`. {servers}, {checkpoint}, "
        "{files} and {parallelism} in them are filled in; the same is in the environment, as "
        "TALLYSTICK_CHAOS_SERVERS, TALLYSTICK_CHAOS_CHECKPOINT, TALLYSTICK_CHAOS_FILES and "
        "TALLYSTICK_CHAOS_PARALLELISM."
    ),
]
Inputs = Annotated[
    list[str],
    typer.Option("--input", help="TOPIC=FILE, a JSON value on each line. May be given again."),
]
Outputs = Annotated[
    list[str] | None,
    typer.Option("--output", help="A topic that it writes. May be given again."),
]
Files = Annotated[
    bool,
    typer.Option("--output-files", help="It writes Parquet files below {files}; compared as rows."),
]
DeltaTables = Annotated[
    list[str] | None,
    typer.Option(
        "--output-delta",
        help="A Delta table that it writes, a folder in {files}; compared as rows. May be given "
        "again.",
    ),
]
IcebergTables = Annotated[
    list[str] | None,
    typer.Option(
        "--output-iceberg",
        help="An Iceberg table that it writes, NAMESPACE.TABLE of the SQLite catalog "
        "{files}/catalog.db; compared as rows. May be given again.",
    ),
]
Tables = Annotated[
    list[str] | None,
    typer.Option(
        "--output-table",
        help="A table of PostgreSQL that it writes, in the database of --postgres; emptied before "
        "each run, and compared as rows. May be given again.",
    ),
]
Postgres = Annotated[
    str,
    typer.Option(
        help="The DSN of the database of --output-table. Other users see the command: leave a "
        "password to PGPASSFILE or a service."
    ),
]
Keys = Annotated[
    list[str] | None,
    typer.Option("--key", help="TOPIC=FIELD of the input's values, which becomes the key."),
]
Kills = Annotated[int, typer.Option(help="How many faults.", min=1)]
Seed = Annotated[int, typer.Option(help="Repeats a schedule of faults.")]
Kinds = Annotated[
    str | None,
    typer.Option("--faults", help="Kinds of faults, with commas. Without it: all that fit."),
]
Schedule = Annotated[
    Path | None,
    typer.Option(
        help="A file with the faults, instead of --kills, --seed and --faults: the smallest.json "
        "that --shrink leaves beside the logs."
    ),
]
Compare = Annotated[
    str,
    typer.Option(
        help="sequence: the rows of each key in their order. rows: in any order. final: the last "
        "row of each key."
    ),
]
Servers = Annotated[
    str,
    typer.Option(
        help="HOST:PORT of a cluster to use, without TLS and SASL. The topics of --input and "
        "--output must not exist in it; they are made and deleted."
    ),
]
Brokers = Annotated[int, typer.Option(help="1 or 3. Three are killed one at a time.")]
Partitions = Annotated[int, typer.Option(help="Of each topic.", min=1)]
Version = Annotated[
    int | None, typer.Option(help="Kafka's feature transaction.version.", min=0, max=2)
]
Timeout = Annotated[float, typer.Option(help="Seconds without progress that end a run.", min=10)]
Shrink = Annotated[
    bool, typer.Option("--shrink", help="If it fails, look for fewer faults that do, too.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="The report for programs.")]
HtmlFile = Annotated[Path | None, typer.Option("--html", help="The report as a page.")]
Checkpoint = Annotated[
    str,
    typer.Option(
        help="s3://BUCKET/FOLDER for checkpoints, in the store of AWS_ENDPOINT_URL_S3, without "
        "TLS. Without it, they are on the local disk."
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        help="For logs and local checkpoints. Without it, they stay only after a failure."
    ),
]


def chaos(
    command: Command,
    inputs: Inputs,
    outputs: Outputs = None,
    writes_files: Files = False,
    delta: DeltaTables = None,
    iceberg: IcebergTables = None,
    tables: Tables = None,
    postgres: Postgres = "",
    keys: Keys = None,
    kills: Kills = 20,
    seed: Seed = 1,
    kinds: Kinds = None,
    schedule: Schedule = None,
    compare: Compare = "sequence",
    brokers: Brokers = 1,
    partitions: Partitions = 4,
    transaction_version: Version = None,
    timeout: Timeout = 180.0,
    bootstrap_servers: Servers = "",
    shrink: Shrink = False,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    checkpoint: Checkpoint = "",
    folder: Folder = None,
) -> None:
    """Run your program undisturbed, then under faults, and compare the outputs.

    Kafka is an embedded cluster, new for each run, or a given one. The exit code is 0 only if
    readers of committed records see the same, and the state of keyed steps is the same.
    """
    with errors_as_messages():
        try:
            from tallystick_tools.chaos import report
            from tallystick_tools.chaos.verify import question_of, verify
        except ModuleNotFoundError as error:
            raise OptionError(f"chaos needs {error.name}: {pip_install('chaos')}") from None
        question = question_of(
            command,
            inputs=dict(_pair("--input", pair) for pair in inputs),
            keys=dict(_pair("--key", pair) for pair in keys or ()),
            outputs=outputs or (),
            writes_files=writes_files,
            lakes=(delta or (), iceberg or ()),
            tables=tables or (),
            postgres=postgres,
            kills=kills,
            seed=seed,
            kinds=kinds.split(",") if kinds else (),
            schedule=schedule,
            compare=compare,
            brokers=brokers,
            partitions=partitions,
            transaction_version=transaction_version,
            timeout_s=timeout,
            bootstrap_servers=bootstrap_servers,
            checkpoint=checkpoint,
            shrink=shrink,
        )
        kept = folder or Path(tempfile.mkdtemp(prefix="tallystick-chaos-"))
        verdict = verify(question, kept, _teller())
    report.write(verdict, json_file, html_file)
    typer.echo(report.as_text(verdict))
    if not verdict.is_exact or folder is not None:
        typer.echo(f"checkpoints and logs: {kept}", err=True)
    else:
        shutil.rmtree(kept, ignore_errors=True)
    sys.exit(0 if verdict.is_exact else NOT_EXACT)


def _teller() -> Callable[[str], None]:
    began = time.monotonic()
    return lambda text: typer.echo(f"{time.monotonic() - began:7.1f} s  {text}", err=True)


def _pair(option: str, text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not (name and value):
        raise OptionError(f"{option} {text}: expected a topic, =, and what belongs to it")
    return name, value
