"""The command line: `tallystick broker start`, and other tools that need no code.

Commands import what they run when they run: `--help` must not wait for Spark or Kafka. The commands
`chaos`, `compare` and `demo` come from the distribution `tallystick-tools`, where it is installed.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

import tallystick
from tallystick.errors import OptionError, TallystickError
from tallystick.host.installed import pip_install
from tallystick.ops import cli
from tallystick.ops.cli_fork import fork
from tallystick.ops.cli_savepoint import (
    Checkpoint,
    Json,
    KafkaOptions,
    Servers,
    asking_kafka,
    errors_as_messages,
)
from tallystick.ops.cli_savepoint import app as savepoint
from tallystick.ops.cli_state import ParquetFile, offsets_of, rows_of
from tallystick.ops.cli_state import app as state
from tallystick.ops.cli_topic import LOCAL, partition_counts
from tallystick.ops.cli_topic import app as topic
from tallystick.storage.places import resolved
from tallystick.text import printable

if TYPE_CHECKING:
    from tallystick.api.pipeline import Pipeline
    from tallystick.ops.doctor_pipeline import DeclaredPipeline
    from tallystick.testing import EmbeddedKafka


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
    """Commit or abort the output that a dead pipeline left in its sinks, without Spark.

    It does what the next start would do first, and ends there: no function of the pipeline is
    called, and no epoch is planned. It takes the pipeline over as any start does: a run that is at
    work stops with a FencedError, and has lost nothing.

    The module is imported: keep a start() in it behind `if __name__ == "__main__":`. Exit codes: 0:
    nothing is left; 1: an error, or an epoch that only the next start can run again.
    """
    from tallystick.ops.cli_progress import waiting

    with errors_as_messages():
        checkpoint = resolved(checkpoint)  # a module that is imported may change the folder
        imported = find_pipeline(pipeline)
        try:
            with waiting("fencing earlier runs, committing and aborting what they left"):
                done = imported.recover(checkpoint=checkpoint)
        except TallystickError as error:
            for note in getattr(error, "__notes__", ()):
                typer.echo(printable(note))
            raise
    typer.echo(printable(str(done)))
    if done.runs_again is not None:
        sys.exit(1)


def doctor(
    checkpoint: Checkpoint,
    bootstrap_servers: Annotated[
        str | None,
        typer.Option(
            help="Of the cluster that the pipeline writes to: host:port,host:port; needed unless "
            "--pipeline names it."
        ),
    ] = None,
    kafka_options: KafkaOptions = None,
    pipeline: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:PIPELINE",
            help="Where the pipeline is, as for `recover`: its own settings, topics and rights are "
            "checked then, also before its first epoch.",
        ),
    ] = None,
    trigger: Annotated[
        str | None,
        typer.Option(
            help="The trigger interval that start() is given, such as '10 seconds': timeouts are "
            "compared with it."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Look for everything that is wrong, or may be soon, with a checkpoint and its Kafka.

    Changes nothing; the pipeline may run meanwhile, or be dead. Use the pipeline's own login, since
    its rights are looked at too. Every file of the checkpoint is read. With --pipeline the module
    is imported: keep a start() in it behind `if __name__ == "__main__":`. Exit codes: 0: nothing is
    wrong; 1: warnings; 2: errors, or the command was wrong.
    """
    try:
        checkpoint = resolved(checkpoint)
        interval_ms = cli.interval_of(trigger)
        options, declaration = ({}, None) if pipeline is None else _declared(pipeline, checkpoint)
        cli.examine(
            checkpoint,
            bootstrap_servers,
            kafka_options,
            as_json=as_json,
            pipeline=declaration,
            options=options,
            trigger_interval_ms=interval_ms,
        )
    except TallystickError as error:
        cli.fail(error)


def _declared(where: str, checkpoint: str) -> "tuple[dict[str, str], DeclaredPipeline]":
    from tallystick.api.forks import as_forked
    from tallystick.api.pipeline import connection_of, declared

    pipeline = as_forked(find_pipeline(where), checkpoint)
    declaration = declared(pipeline)
    return connection_of(pipeline), declaration


def import_state(
    file: ParquetFile,
    step: Annotated[str, typer.Option(help="The step's uid.")],
    to: Annotated[str, typer.Option(help="The new savepoint's folder, empty.")],
    savepoint: Annotated[
        str | None,
        typer.Option(
            help="The savepoint's folder, or its URI, with positions and all other steps; not "
            "needed with --pipeline."
        ),
    ] = None,
    pipeline: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:PIPELINE",
            help="Where the pipeline is, as for `recover`, whose step the savepoint does not have; "
            "without --savepoint it has never run, and begins where its sources say.",
        ),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            help="A column of another key, in the order of the new program's key_by; may be "
            "repeated. Without it the key stays."
        ),
    ] = None,
    offsets: Annotated[
        str | None,
        typer.Option(
            help="The next offsets to read in place of the savepoint's, as JSON or the name of a "
            'file of it: \'{"orders": {"0": 1200, "1": 950}}\'.'
        ),
    ] = None,
    scratch: Annotated[
        Path | None, typer.Option(help="A folder on a local disk with room for the step's state.")
    ] = None,
) -> None:
    """Write a savepoint in which the state of a step is what a Parquet file says."""
    from tallystick.api.state_writing import write_state
    from tallystick.storage.file_storage import shown

    with errors_as_messages():
        if savepoint is None and pipeline is None:
            raise OptionError("state import: expected --savepoint, or --pipeline of a first state")
        rows = rows_of(file)
        write_state(
            rows,
            savepoint,
            step,
            to=to,
            key=key or None,
            offsets=None if offsets is None else offsets_of(offsets),
            pipeline=None if pipeline is None else find_pipeline(pipeline),
            scratch=scratch,
        )
    typer.echo(f"Wrote {shown(to)}, with {rows.num_rows} keys in step {step!r}.")


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
    variable = getattr(module, name, None)
    if isinstance(variable, Pipeline):
        return variable
    names = sorted(
        attribute for attribute, value in vars(module).items() if isinstance(value, Pipeline)
    )
    there = f"The module has {', '.join(names)}." if names else "The module has no Pipeline."
    if not hasattr(module, name):
        raise OptionError(f"module {module_name!r} has no {name!r}. {there}")
    raise OptionError(
        f"{where} is no Pipeline: it is a {type(variable).__name__}. Give the Pipeline itself, "
        f"with its sinks, before start(). {there}"
    )


POLL_S = 0.5
"""The interval of the checks that the brokers are alive."""

app = typer.Typer(
    help="Exactly-once streaming for people who have PySpark and Kafka.",
    no_args_is_help=True,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)
broker = typer.Typer(help="A real Kafka for trying things out.", no_args_is_help=True)
app.add_typer(broker, name="broker")
app.add_typer(topic, name="topic")
app.add_typer(savepoint, name="savepoint")
app.add_typer(state, name="state")
app.add_typer(cli.transactions_app, name="transactions")
state.command("import")(import_state)
app.command("fork")(fork)
app.command("recover")(recover)
app.command("doctor")(doctor)
app.command("stop")(cli.stop)
app.command("rescale")(cli.rescale)
app.command("ui")(cli.ui)


@app.callback()
def _tallystick(
    version: Annotated[bool, typer.Option("--version", help="Print the version, and end.")] = False,
) -> None:
    """Exactly-once streaming for people who have PySpark and Kafka."""
    if version:
        typer.echo(f"tallystick {tallystick.__version__}")
        raise typer.Exit


@app.command("inspect")
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
    from tallystick.ops import cli_show, inspection
    from tallystick.ops.cli_progress import checkpoint_bytes, watched

    with errors_as_messages():
        ask = asking_kafka(bootstrap_servers, kafka_options)
        with watched("reading the checkpoint") as work:
            if verify:
                work.expect(lambda: checkpoint_bytes(checkpoint))
            report = inspection.inspect(work.storage(checkpoint), verify=verify, ask=ask)
    if as_json:
        typer.echo(cli_show.as_json(report))
    else:
        cli_show.show_report(report, cli_show.console())
    sys.exit(0 if report.is_whole else 1)


@broker.callback()
def _broker() -> None:
    """A real Kafka for trying things out."""


@broker.command("start")
def start_broker(
    brokers: Annotated[int, typer.Option(help="How many nodes, 1 to 3.", min=1, max=3)] = 1,
    port: Annotated[int, typer.Option(help="Of the first node; the others follow.")] = 9092,
    directory: Annotated[
        Path | None,
        typer.Option(help="Where data is kept; without it, all is gone at the end."),
    ] = None,
    transaction_version: Annotated[
        int, typer.Option(help="Kafka's feature transaction.version.", min=0, max=2)
    ] = 2,
    topics: Annotated[
        str, typer.Option(help="Topics to create: NAME:PARTITIONS,…, such as flights:3,late:3.")
    ] = "",
    sample: Annotated[
        str | None,
        typer.Option(help="Real rows for the topic of the same name, which is made: flights."),
    ] = None,
) -> None:
    """Run Apache Kafka in the foreground until Ctrl-C."""
    from tallystick.ops.cli_progress import counted
    from tallystick.testing import EmbeddedKafka, jars
    from tallystick.testing.process import first_taken, free_port_after
    from tallystick.testing.samples import check_sample

    signal.signal(signal.SIGTERM, _interrupt)
    with errors_as_messages():
        counts = partition_counts(topics.split(",") if topics else [])
        if sample is not None:
            check_sample(sample)
            counts.setdefault(sample, 3)
    if (taken := first_taken(port, brokers)) is not None:
        _fail(f"port {taken} is taken: --port {free_port_after(taken, brokers)}")
    typer.echo("Starting Apache Kafka (the first time, it is downloaded) ...", err=True)
    try:
        jars.fetch_kafka(counted)
        kafka = EmbeddedKafka(
            brokers, port=port, directory=directory, transaction_version=transaction_version
        )
        with kafka:
            for line in _prepared(kafka, counts, sample):
                typer.echo(line, err=True)
            typer.echo(kafka.bootstrap_servers)
            typer.echo("Ctrl-C stops it.", err=True)
            while all(kafka.is_running(node.node_id) for node in kafka.nodes):
                time.sleep(POLL_S)
            dead = [node for node in kafka.nodes if not kafka.is_running(node.node_id)]
            logs = "\n".join(f"{node.log_path}:\n{node.log_tail()}" for node in dead)
            _fail(f"A broker has ended by itself. The end of {logs}")
    except KeyboardInterrupt:
        typer.echo("Stopped.", err=True)
    except TallystickError as error:
        _fail(str(error))


def _prepared(
    kafka: "EmbeddedKafka", counts: Mapping[str, int], sample: str | None
) -> Iterator[str]:
    """Create the topics and write the sample; yield what is there, and the next commands."""
    from tallystick.kafka.client import Client
    from tallystick.kafka.config import KafkaConfig
    from tallystick.testing.samples import fill

    servers = kafka.bootstrap_servers
    for name, count in counts.items():
        kafka.create_topic(name, count)
        rows = ""
        if name == sample:
            client = Client(KafkaConfig.from_options({"bootstrap.servers": servers}))
            try:
                rows = f", {written:,} records" if (written := fill(client, name)) else ""
            finally:
                client.close()
        yield f"Topic {name!r}: {count} partitions{rows}."
    if counts:
        where = "" if servers == LOCAL else f" --bootstrap-servers {servers}"
        yield "Next, in another terminal:"
        yield f"  tallystick topic read {sample or next(iter(counts))}{where}"
        yield "  tallystick new my-job"


@app.command("sql")
def run_sql(
    file: Annotated[Path, typer.Argument(help="CREATE TABLE …, and one INSERT INTO … SELECT ….")],
    checkpoint: Annotated[str, typer.Option(help="The checkpoint folder, or URI.")] = "",
    name: Annotated[str, typer.Option(help="Of the pipeline; by default that of the file.")] = "",
    explain: Annotated[bool, typer.Option("--explain", help="Show it, and start nothing.")] = False,
    trigger: Annotated[str, typer.Option(help="Between epochs, such as '5 seconds'.")] = "",
    once: Annotated[bool, typer.Option("--once", help="End when all is read.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all, say what would change, and end.")
    ] = False,
) -> None:
    """Run a query over streams, with tables declared as in Flink's SQL.

    Exit codes: 0: it ended, or was stopped in order; 1: an error.
    """
    with errors_as_messages():
        from tallystick.queries.program import program

        pipeline = program(file.read_text(), name or file.stem)
        if explain:
            typer.echo(pipeline.explain(checkpoint=checkpoint or None))
            return
        if not checkpoint:
            raise OptionError("tallystick sql needs --checkpoint FOLDER; --explain does not")
        every = {"availableNow": True} if once else trigger or None
        query = pipeline.start(checkpoint=checkpoint, trigger=every, dry_run=dry_run)
        query.awaitTermination()


@app.command("new")
def new(
    folder: Annotated[Path, typer.Argument(help="To make; its name is the pipeline's.")],
) -> None:
    """Write a small job, which runs as it is: pipeline, test, Dockerfile, README."""
    from tallystick.ops.new_job import write_job

    with errors_as_messages():
        write_job(folder, tallystick.__version__)
    typer.echo(f"Made {folder}. Next:")
    typer.echo(f"  cd {folder}")
    typer.echo("  python -m pytest       # its test, without a broker")
    typer.echo("  python pipeline.py     # with `tallystick broker start --topics flights:3,late:3")
    typer.echo("                         # --sample flights` in another terminal")


@app.command("warm-up")
def warm_up() -> None:
    """Compile kernels and archive JVM classes, which shortens every later start.

    Once per machine and user, and again with another Python, Java or PySpark.
    """
    from tallystick.ops.cli_progress import waiting
    from tallystick.spark.warm_up import warm_up

    with waiting("compiling kernels (about 25 s at the first time), then archiving classes"):
        for line in warm_up():
            typer.echo(line)


def _interrupt(*_: object) -> NoReturn:
    """SIGTERM ends the command as Ctrl-C does."""
    raise KeyboardInterrupt


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    sys.exit(1)


def _how_to_install(tool: str, extra: str) -> Callable[[typer.Context], None]:
    """Return a command that takes the words of a tool and says how to install the tool."""

    def command(_: typer.Context) -> None:
        _fail(f"`tallystick {tool}` is not installed: {pip_install(extra)}")

    return command


if find_spec("tallystick_tools") is None:
    for name, extra in {"chaos": "chaos", "compare": "chaos", "demo": "demo"}.items():
        app.command(
            name,
            help=f"Not installed: {pip_install(extra)}",
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )(_how_to_install(name, extra))
else:
    from tallystick_tools.chaos.cli import chaos
    from tallystick_tools.chaos.compare_cli import compare
    from tallystick_tools.demo.cli import demo

    app.command("chaos")(chaos)
    app.command("compare")(compare)
    app.command("demo")(demo)

if __name__ == "__main__":
    app()
