"""`tallystick doctor`, `transactions list`, `stop`, `rescale` and `ui`.

None of them changes a checkpoint: a run does what it is asked for, and a start of the pipeline, or
`tallystick recover`, settles its transactions. Each command imports what it runs when it runs.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tallystick.errors import OptionError, TallystickError
from tallystick.host.installed import pip_install
from tallystick.host.stopwatch import now_ms
from tallystick.ops.cli_savepoint import (
    PATIENCE,
    Checkpoint,
    KafkaOptions,
    Servers,
    errors_as_messages,
    options_in,
)
from tallystick.storage.places import resolved
from tallystick.text import printable

if TYPE_CHECKING:
    from rich.console import Console

    from tallystick.kafka.config import KafkaConfig
    from tallystick.ops.checkpoint_view import CheckpointView, StatedPipeline
    from tallystick.ops.doctor import Diagnosis
    from tallystick.ops.doctor_pipeline import DeclaredPipeline
    from tallystick.ops.transactions import LingeringTransaction

ERROR_EXIT_CODE = 2
"""Also for a wrong use of the command; Typer's own is the same."""
STYLES = {"ERROR": "bold red", "WARNING": "yellow", "INFO": "dim"}


def fail(error: TallystickError) -> None:
    """Print an error in the use of the command, and exit."""
    typer.echo(printable(str(error)), err=True)
    sys.exit(ERROR_EXIT_CODE)


def interval_of(trigger: str | None) -> int | None:
    """Return the interval in `--trigger`, in ms; None: epochs follow each other at once.

    Raises:
        OptionError: the text is no interval.
    """
    from tallystick.run.epoch_loop import Trigger

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
    servers = servers or options.get("bootstrap.servers")
    if servers is not None:
        diagnosis = replace(
            diagnosis,
            findings=tuple(
                replace(finding, remedy=finding.remedy.replace("SERVERS", servers))
                for finding in diagnosis.findings
            ),
        )
    if as_json:
        findings = [{**asdict(finding), "severity": finding.severity.name.lower()}
                    for finding in diagnosis.findings]  # fmt: skip
        fields = {"checkpoint": diagnosis.checkpoint, "exit_code": diagnosis.exit_code}
        typer.echo(cli_show.as_json({**fields, "checks": diagnosis.checks, "findings": findings}))
    else:
        _show_diagnosis(diagnosis, cli_show.console())
    sys.exit(diagnosis.exit_code)


def _show_diagnosis(diagnosis: "Diagnosis", out: "Console") -> None:
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


DSN_VARIABLE = "TALLYSTICK_POSTGRES_DSN"

transactions_app = typer.Typer(no_args_is_help=True)


@transactions_app.callback()
def _transactions() -> None:
    """Lingering transactions, with the checkpoint's view of them."""


class _Elsewhere(NamedTuple):
    """The systems to look through besides Kafka."""

    postgres: str | None
    files: str | None
    sinks: tuple[str, ...]


@transactions_app.command("list")
def list_transactions(
    bootstrap_servers: Annotated[
        str, typer.Option(help="Of the cluster that holds them: host:port,host:port.")
    ],
    kafka_options: Annotated[
        Path | None, typer.Option(help="A file of further client options: name=value lines.")
    ] = None,
    pipeline: Annotated[str | None, typer.Option(help="Only this pipeline's.")] = None,
    prefix: Annotated[
        str | None,
        typer.Option(help="Only those whose ids have this prefix; if a pipeline chose its own."),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="The pipeline's checkpoint folder, or URI.")
    ] = None,
    decider: Annotated[
        str | None,
        typer.Option(help="Servers of the cluster that decides, where it is another one."),
    ] = None,
    postgres: Annotated[
        str | None,
        typer.Option(
            envvar=DSN_VARIABLE,
            help="A connection string: also what is prepared there. Better in the variable.",
        ),
    ] = None,
    files: Annotated[
        str | None, typer.Option(help="The folder of a FileSink or table: also what waits.")
    ] = None,
    sink: Annotated[
        list[str] | None, typer.Option(help="The uid of a sink that no manifest names.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List a cluster's open transactions, the pipeline's first, with owner and way to settle each.

    Changes nothing. A transaction of an id that this user may not DESCRIBE is not shown: Kafka
    leaves it out.
    """
    from tallystick.kafka.config import KafkaConfig
    from tallystick.ops import cli_show
    from tallystick.ops.checkpoint_view import StatedPipeline
    from tallystick.ops.transactions import in_order, of_prefixes

    stated = StatedPipeline(pipeline, prefix)
    elsewhere = _Elsewhere(postgres, files, tuple(sink or ()))
    with errors_as_messages():
        options = PATIENCE | ({} if kafka_options is None else options_in(kafka_options))
        kafka, deciding = (
            KafkaConfig.from_options({**options, "bootstrap.servers": servers})
            for servers in (bootstrap_servers, decider or bootstrap_servers)
        )
        lingering, view = _lingering(kafka, deciding, checkpoint, stated, elsewhere)
    if stated.prefixes:
        lingering = of_prefixes(lingering, view, stated.prefixes)
    fields = [_transaction_fields(transaction, view) for transaction in in_order(lingering, view)]
    if as_json:
        typer.echo(cli_show.as_json({"transactions": fields}))
    elif fields:
        cli_show.show_transactions(fields, cli_show.console())
        if remedy := _transactions_remedy(fields, view):
            typer.echo(printable(remedy))
    else:
        typer.echo("No transaction is open.")


def _lingering(
    kafka: "KafkaConfig",
    deciding: "KafkaConfig",
    checkpoint: str | None,
    stated: "StatedPipeline",
    elsewhere: _Elsewhere,
) -> "tuple[list[LingeringTransaction], CheckpointView | None]":
    """List lingering transactions, then read the checkpoint: by then their epochs are planned.

    Raises:
        OptionError: the user asked for a system besides Kafka that cannot be searched.
    """
    from tallystick.ops import transactions
    from tallystick.ops.checkpoint_view import look, owners_of
    from tallystick.storage.file_storage import FileStorage

    with ExitStack() as stack:
        cluster, decider = transactions.KafkaCluster(kafka), transactions.KafkaCluster(deciding)
        stack.callback(cluster.close)
        stack.callback(decider.close)
        if checkpoint is None:
            _only_kafka(elsewhere, "--checkpoint", "theirs have the checkpoint's id in them")
            return list(cluster.lingering()), None
        storage = FileStorage(checkpoint)
        view = look(storage, decider.ask, stated)
        if not view.pipeline:
            why = "no manifest has the pipeline's name"
            elsewhere = _only_kafka(elsewhere, "--pipeline", why)
        lingering = list(cluster.lingering())
        if elsewhere.files is not None:
            owners = owners_of(storage, view, elsewhere.sinks, *transactions.IN_FOLDERS)
            lingering += transactions.lingering_in_files(elsewhere.files, owners)
        if elsewhere.postgres is not None:
            owners = owners_of(storage, view, elsewhere.sinks, transactions.POSTGRES)
            lingering += transactions.lingering_in_postgres(elsewhere.postgres, owners)
        return lingering, look(storage, decider.ask, stated)


def _only_kafka(elsewhere: _Elsewhere, needed: str, why: str) -> _Elsewhere:
    """Leave out the other systems without their options.

    Raises:
        OptionError: the user asked for one of them by an option, not just by a variable of the
            environment, which may be set always.
    """
    is_by_variable = elsewhere.postgres == os.environ.get(DSN_VARIABLE)
    if elsewhere.files is not None or (elsewhere.postgres is not None and not is_by_variable):
        option = "--postgres" if elsewhere.files is None else "--files"
        raise OptionError(f"{option} needs {needed}: {why}")
    if elsewhere.postgres is not None:
        typer.echo(f"PostgreSQL ({DSN_VARIABLE}) is left out without {needed}: {why}.", err=True)
    return elsewhere._replace(postgres=None)


def _transaction_fields(
    lingering: "LingeringTransaction", view: "CheckpointView | None"
) -> dict[str, Any]:
    """Return one line of `--json`, a public format: fields stay."""
    from tallystick.ops.transactions import KAFKA, TransactionStatus, describe

    description, pooled = describe(lingering, view), lingering.pooled
    named = description.named or lingering.committable
    is_kafka = lingering.system == KAFKA
    is_foreign = description.standing is TransactionStatus.FOREIGN
    age_ms = max(0, now_ms() - lingering.begun_ms)
    return {
        "system": lingering.system,
        "transaction": lingering.transactional_id,
        "name": lingering.name,
        "state": lingering.state,
        "prepared": lingering.prepared,
        "producer_id": lingering.producer_id if is_kafka else None,
        "producer_epoch": lingering.producer_epoch if is_kafka else None,
        "begun_ms": lingering.begun_ms,
        "age_ms": age_ms if lingering.begun_ms else None,
        "timeout_ms": lingering.timeout_ms,
        "partitions": [str(partition) for partition in lingering.partitions],
        "standing": description.standing.value,
        "says": description.says,
        "pipeline": "" if view is None or is_foreign else view.pipeline,
        "lineage": "" if view is None or is_foreign else view.lineage,
        "sink": lingering.sink or ("" if pooled is None else pooled.sink),
        "task": pooled.task if pooled is not None else None if named is None else named.task,
        "epoch": None if named is None else named.checkpoint_id,
        "records": None if named is None else named.record_count,
        "manifest": description.manifest_path,
    }


def _transactions_remedy(fields: list[dict[str, Any]], view: "CheckpointView | None") -> str:
    """Return the command that settles the pipeline's transactions; "": there are none."""
    from tallystick.ops.transactions import OURS

    if view is None or not any(line["standing"] in {one.value for one in OURS} for line in fields):
        return ""
    what = f"What is of pipeline {view.pipeline!r} is settled when it starts"
    if not view.is_loops:
        return f"{what}: start the query."
    return (
        f"{what}; or, without Spark, by\n"
        f"  tallystick recover MODULE:PIPELINE --checkpoint {view.location}\n"
        f"Either stops a run that is at work with a FencedError."
    )


def stop(
    checkpoint: Checkpoint,
    drain: Annotated[
        bool, typer.Option("--drain", help="Finish and commit the running epoch first.")
    ] = False,
    savepoint: Annotated[
        str | None,
        typer.Option(
            help="A new folder, or URI, for a savepoint of the last epoch, as the run reaches it; "
            "drains."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="How long the running epoch may take to end, in s.", min=0)
    ] = 20.0,
) -> None:
    """Stop the run of a checkpoint, wherever it runs; without --drain its epoch is aborted.

    Returns when it has ended. The run finds the request in the checkpoint, and needs no port.
    Whoever supervises the run's program starts it again: stop that first, or scale it to 0 after.
    Exit codes: 0: done; 1: not done, or no run is alive.
    """
    from tallystick.ops import requests
    from tallystick.ops.cli_progress import waiting

    with errors_as_messages(), waiting("waiting for the run"):
        place = savepoint or ""
        text = requests.stop(checkpoint, drain=drain, savepoint=place, timeout_s=timeout)
    _print(text)
    if savepoint is not None:
        _print(f"Its savepoint is {resolved(savepoint)}.")


def rescale(
    checkpoint: Checkpoint,
    parallelism: Annotated[
        int, typer.Option(help="Tasks that read, and that hold the keys of each step.", min=1)
    ],
) -> None:
    """Let the run of a checkpoint go on with another parallelism, from its next epoch on.

    A later start has that of the pipeline again. Exit codes: 0: done; 1: not done, or no run is
    alive.
    """
    from tallystick.ops import requests
    from tallystick.ops.cli_progress import waiting

    with errors_as_messages(), waiting("waiting for the run"):
        text = requests.rescale(checkpoint, parallelism)
    _print(text)


def _print(text: str) -> None:
    typer.echo(printable(text))


LOCAL = "127.0.0.1"


def ui(
    checkpoint: Checkpoint,
    bootstrap_servers: Servers = None,
    kafka_options: KafkaOptions = None,
    port: Annotated[int, typer.Option(help="To listen on.", min=1, max=65535)] = 4050,
    host: Annotated[
        str,
        typer.Option(
            help="The address to listen on. Any but 127.0.0.1 needs a token: that of the "
            "environment variable TALLYSTICK_UI_TOKEN, or one that is made and printed."
        ),
    ] = LOCAL,
) -> None:
    """Serve a page about a pipeline, from its checkpoint and Kafka, until Ctrl-C.

    The pipeline may run meanwhile, or be dead. Only with a token (TALLYSTICK_UI_TOKEN) the page can
    stop and rescale the run, and take savepoints. How long the parts of its epochs take
    only its own process knows: `Pipeline.start(ui_port=...)` shows them.
    """
    with errors_as_messages():
        try:
            from tallystick.ops.ui.actions import Actions
            from tallystick.ops.ui.page import CheckpointReader
            from tallystick.ops.ui.server import TOKEN_VARIABLE, Server, Source, new_token
        except ModuleNotFoundError as error:
            raise OptionError(f"the page needs {error.name}: {pip_install('ui')}") from None
        options = None
        if bootstrap_servers is not None:
            given = {} if kafka_options is None else options_in(Path(kafka_options))
            options = {**given, "bootstrap.servers": bootstrap_servers}
        token = os.environ.get(TOKEN_VARIABLE) or ("" if host == LOCAL else new_token())
        reader, actions = CheckpointReader(checkpoint, options), Actions(checkpoint, options)
        server = Server(Source(reader.read, act=actions), port, host, token)
    shown = f"?token={token}" if token and TOKEN_VARIABLE not in os.environ else ""
    typer.echo(f"http://{host}:{server.port}/{shown}")
    typer.echo("Ctrl-C stops it.", err=True)
    server.run()
