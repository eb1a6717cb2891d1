"""`tallystick transactions …`: what is open in Kafka, beside what a checkpoint says of it.

A pipeline settles its transactions whenever it starts. These commands are for those who cannot
start it now, and whose readers wait; or who want to know what they wait for.

Exit codes: 0: done; 1: an error, or what was to be committed is lost; 3: refused, and said why.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from tallystick.cli_savepoint import errors_told, options_in
from tallystick.errors import OptionError

if TYPE_CHECKING:
    from tallystick.checkpoint_says import Stated
    from tallystick.settling import Door, KafkaDoor
    from tallystick.sink.two_phase import Committable
    from tallystick.storage import FileStorage
    from tallystick.transactions import Judged, Lingering, Told

REFUSED = 3
"""The exit code of what was refused."""
BEGUN = "it is committed already, and the pipeline makes the rest of it visible when it starts"
DSN_VARIABLE = "TALLYSTICK_POSTGRES_DSN"
PATIENCE = {"delivery.timeout.ms": "30000"}
"""A person waits here, and can try again."""

app = typer.Typer(
    help="Lingering transactions, beside what the checkpoint says of them.", no_args_is_help=True
)

Servers = Annotated[str, typer.Option(help="Of the cluster that holds them: host:port,host:port.")]
KafkaOptions = Annotated[
    Path | None, typer.Option(help="A file of further client options: name=value lines.")
]
PipelineName = Annotated[str | None, typer.Option(help="Only this pipeline's.")]
Prefix = Annotated[
    str | None,
    typer.Option(help="Only those whose ids have this prefix; if a pipeline chose its own."),
]
Checkpoint = Annotated[str | None, typer.Option(help="The pipeline's checkpoint folder, or URI.")]
Decider = Annotated[
    str | None,
    typer.Option(help="Servers of the cluster that decides, where it is another one."),
]
Postgres = Annotated[
    str | None,
    typer.Option(
        envvar=DSN_VARIABLE,
        help="A connection string: also what is prepared there. Better in the variable than here.",
    ),
]
Files = Annotated[str | None, typer.Option(help="The path of a FileSink: also its hidden drafts.")]
SinkUids = Annotated[
    list[str] | None, typer.Option("--sink", help="The uid of a sink that no manifest names.")
]
QuietFor = Annotated[
    int,
    typer.Option(
        min=0,
        help="Seconds. A pipeline counts as running if it has planned an epoch, or begun or "
        "written a transaction, since.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]
Transaction = Annotated[str, typer.Argument(help="As `list` shows it.")]
Force = Annotated[
    bool, typer.Option("--force", help="Even if it may lose or repeat records: it says which.")
]


@dataclass(frozen=True)
class _Where:
    """Where to look, as the user said."""

    servers: str
    kafka_options: Path | None
    pipeline: str | None
    prefix: str | None
    checkpoint: str | None
    decider: str | None
    postgres: str | None
    files: str | None
    sinks: tuple[str, ...]
    quiet_s: int

    @property
    def stated(self) -> "Stated":
        from tallystick.checkpoint_says import Stated

        return Stated(self.pipeline, self.prefix, self.decider is not None)


@dataclass
class _View:
    """What was found."""

    where: _Where
    kafka: "KafkaDoor"
    decider: "KafkaDoor"
    doors: dict[str, "Door"]
    checkpoint: "FileStorage | None"
    found: "list[Lingering]"
    told: "Told | None"
    running: str

    def judge(self, lingering: "Lingering") -> "Judged":
        """What is to be said of one."""
        from tallystick.transactions import judge

        return judge(lingering, self.told, self.running)


@app.command("list")
def list_transactions(
    bootstrap_servers: Servers,
    kafka_options: KafkaOptions = None,
    pipeline: PipelineName = None,
    prefix: Prefix = None,
    checkpoint: Checkpoint = None,
    decider: Decider = None,
    postgres: Postgres = None,
    files: Files = None,
    sink: SinkUids = None,
    quiet_for: QuietFor = 60,
    as_json: Json = False,
) -> None:
    """List what is open in a cluster, ours first, and what the checkpoint says of each.

    Changes nothing. A transaction of an id that this user may not DESCRIBE is not shown: Kafka
    leaves it out.
    """
    from tallystick import cli_show

    where = _Where(bootstrap_servers, kafka_options, pipeline, prefix, checkpoint, decider,
                   postgres, files, tuple(sink or ()), quiet_for)  # fmt: skip
    with errors_told(), _looked(where) as view:
        found = [_fields(each, view.judge(each), view.told) for each in _wanted(view)]
        running = view.running
    if as_json:
        typer.echo(cli_show.as_json({"running": running, "transactions": found}))
        return
    if found:
        cli_show.show_transactions(found, cli_show.console())
    else:
        typer.echo("No transaction is open.")
    if running:
        typer.echo(f"The pipeline may be running: {running}.")


@app.command("describe")
def describe(
    transaction: Transaction,
    bootstrap_servers: Servers,
    kafka_options: KafkaOptions = None,
    pipeline: PipelineName = None,
    prefix: Prefix = None,
    checkpoint: Checkpoint = None,
    decider: Decider = None,
    postgres: Postgres = None,
    files: Files = None,
    sink: SinkUids = None,
    quiet_for: QuietFor = 60,
    as_json: Json = False,
) -> None:
    """Say all of one transaction: who wrote it, where, for which epoch, who names it, its token."""
    from tallystick import cli_show
    from tallystick.transactions import named_as

    where = _Where(bootstrap_servers, kafka_options, pipeline, prefix, checkpoint, decider,
                   postgres, files, tuple(sink or ()), quiet_for)  # fmt: skip
    with errors_told(), _looked(where) as view:
        lingering = _the(transaction, view)
        fields = _fields(lingering, view.judge(lingering), view.told)
        named = named_as(lingering, view.told)
        fields["details"] = view.doors[lingering.system].details(lingering, named)
    if as_json:
        typer.echo(cli_show.as_json(fields))
    else:
        cli_show.show_transaction(fields, cli_show.console())


@app.command("commit")
def commit(
    transaction: Transaction,
    bootstrap_servers: Servers,
    kafka_options: KafkaOptions = None,
    pipeline: PipelineName = None,
    prefix: Prefix = None,
    checkpoint: Checkpoint = None,
    decider: Decider = None,
    postgres: Postgres = None,
    files: Files = None,
    sink: SinkUids = None,
    quiet_for: QuietFor = 60,
    force: Force = False,
) -> None:
    """Commit what the newest decided manifest of the checkpoint names; anything else is refused.

    It is what the pipeline does when it starts, so nothing is lost if both do it. The transaction
    of a whole epoch is never committed by hand: its driver has to decide it.
    """
    where = _Where(bootstrap_servers, kafka_options, pipeline, prefix, checkpoint, decider,
                   postgres, files, tuple(sink or ()), quiet_for)  # fmt: skip
    with errors_told(), _looked(where) as view:
        named = _named_and_over(transaction, view)
        if named is not None:
            _report(transaction, view.kafka.commit_named(named))
            return
        lingering = _the(transaction, view)
        judged = view.judge(lingering)
        if not judged.may_commit:
            _needs_force(lingering, judged, judged.risk_of_commit, force)
        due = None if view.told is None else view.told.due(lingering)
        _report(transaction, view.doors[lingering.system].commit(lingering, due))


@app.command("abort")
def abort(
    transaction: Transaction,
    bootstrap_servers: Servers,
    kafka_options: KafkaOptions = None,
    pipeline: PipelineName = None,
    prefix: Prefix = None,
    checkpoint: Checkpoint = None,
    decider: Decider = None,
    postgres: Postgres = None,
    files: Files = None,
    sink: SinkUids = None,
    quiet_for: QuietFor = 60,
    force: Force = False,
) -> None:
    """Abort what no completed checkpoint names; anything else is refused.

    Where an epoch is under way, the pipeline is taken over first, as by a new start of it: so a run
    that is at work all the same cannot decide it any more, and stops; nothing is lost. A pipeline
    counts as running, and its transactions are left alone, as long as --quiet-for says.
    """
    where = _Where(bootstrap_servers, kafka_options, pipeline, prefix, checkpoint, decider,
                   postgres, files, tuple(sink or ()), quiet_for)  # fmt: skip
    with errors_told(), _looked(where) as view:
        lingering = _the(transaction, view)
        judged = view.judge(lingering)
        if not judged.may_abort:
            _needs_force(lingering, judged, judged.risk_of_abort, force)
        if judged.forestall:
            _forestall(lingering, view)
        if not view.doors[lingering.system].abort(lingering):
            _refuse(f"{transaction} is left as it is: {BEGUN}.")
        typer.echo(f"Aborted {transaction}.")


@contextmanager
def _looked(where: _Where) -> Iterator[_View]:
    """Connect, list what is open, then see what the checkpoint says."""
    from tallystick import settling
    from tallystick import transactions as t
    from tallystick.checkpoint_says import look
    from tallystick.kafka.config import KafkaConfig
    from tallystick.storage import FileStorage

    if where.checkpoint is None:
        where = _only_kafka(where, "--checkpoint", "theirs have the checkpoint's id in them")
    options = dict(PATIENCE)
    if where.kafka_options is not None:
        options |= options_in(where.kafka_options)
    with ExitStack() as stack:

        def connected(servers: str) -> settling.KafkaDoor:
            config = KafkaConfig.from_options({**options, "bootstrap.servers": servers})
            door = settling.KafkaDoor(config)
            stack.callback(door.close)
            return door

        kafka = connected(where.servers)
        decider = kafka if where.decider is None else connected(where.decider)
        doors: dict[str, Door] = {t.KAFKA: kafka}
        checkpoint = None if where.checkpoint is None else FileStorage(where.checkpoint)
        if checkpoint is not None:
            said = look(checkpoint, decider.ask, where.stated)
            if not said.pipeline:
                where = _only_kafka(where, "--pipeline", "no manifest has the pipeline's name")
            doors |= _further_doors(where, checkpoint, said)
        for system, door in doors.items():
            if system != t.KAFKA:
                stack.callback(door.close)
        found = [each for door in doors.values() for each in door.lingering()]
        told = None
        if checkpoint is not None:  # behind the list: see `settling`
            told = settling.only_here(look(checkpoint, decider.ask, where.stated), kafka)
        running = t.sign_of_a_run(told, found, settling.now_ms(), where.quiet_s * 1000)
        found = t.in_order(found, told)
        yield _View(where, kafka, decider, doors, checkpoint, found, told, running)


def _only_kafka(where: _Where, needed: str, why: str) -> _Where:
    """Leave out the other systems for want of an option.

    Raises:
        OptionError: the user asked for one; a variable of the environment may be there always.
    """
    is_by_variable = where.postgres == os.environ.get(DSN_VARIABLE)
    if where.files is not None or (where.postgres is not None and not is_by_variable):
        option = "--postgres" if where.files is None else "--files"
        raise OptionError(f"{option} needs {needed}: {why}")
    if where.postgres is not None:
        typer.echo(f"PostgreSQL ({DSN_VARIABLE}) is left out without {needed}: {why}.", err=True)
    return replace(where, postgres=None)


def _further_doors(where: _Where, checkpoint: "FileStorage", told: "Told") -> "dict[str, Door]":
    """The other systems that are to be looked into."""
    from tallystick import settling
    from tallystick import transactions as t
    from tallystick.checkpoint_says import owners_of

    owners = partial(owners_of, checkpoint, told, where.sinks)
    doors: dict[str, Door] = {}
    if where.files is not None:
        doors[t.FILES] = settling.files_door(where.files, owners(t.FILES))
    if where.postgres is not None:
        doors[t.POSTGRES] = settling.postgres_door(where.postgres, owners(t.POSTGRES))
    return doors


def _wanted(view: _View) -> "list[Lingering]":
    """All, or only those of the pipeline that the user names."""
    from tallystick.transactions import of_prefixes

    prefixes = view.where.stated.prefixes
    return of_prefixes(view.found, view.told, prefixes) if prefixes else view.found


def _the(transaction: str, view: _View) -> "Lingering":
    """The one that is meant.

    Raises:
        OptionError: there is none.
    """
    for each in view.found:
        if transaction in (each.transactional_id, each.name):
            return each
    raise OptionError(
        f"no transaction {transaction!r} is open: it was ended since, or never begun, or this user "
        f"may not DESCRIBE it. `tallystick transactions list` shows those that are."
    )


def _named_and_over(transaction: str, view: _View) -> "Committable | None":
    """What the decided manifest names under this id, if nothing is open there any more."""
    if view.told is None or view.told.decided is None:
        return None
    if any(transaction in (each.transactional_id, each.name) for each in view.found):
        return None
    for each in view.told.decided.committables:
        is_meant = transaction in (each.name, each.name.rsplit(":", 2)[0])
        if is_meant and view.kafka.is_here(each):
            return each
    return None


def _needs_force(lingering: "Lingering", judged: "Judged", risk: str, force: bool) -> None:
    """Say what would be risked; without --force, that is the end of it."""
    from tallystick.transactions import NEVER_BY_HAND, Standing

    name, standing = lingering.transactional_id, judged.standing
    if not risk:
        is_ending = standing is Standing.ENDING
        why = judged.says if is_ending else NEVER_BY_HAND
        _refuse(f"{name} is left as it is: {why}.")
    if not force:
        _refuse(f"{name} is left as it is: {judged.says}. With --force: {risk}.")
    typer.echo(f"--force, although {judged.says}: {risk}.", err=True)


def _forestall(lingering: "Lingering", view: _View) -> None:
    """Take the pipeline over; what was decided until then stays."""
    from tallystick import settling
    from tallystick.transactions import Standing, judge

    if view.told is None or view.checkpoint is None:
        return
    told = settling.forestall(view.checkpoint, view.told, view.decider, view.where.stated)
    again = judge(lingering, settling.only_here(told, view.kafka), "")
    if again.standing is not Standing.UNNAMED:
        _refuse(f"{lingering.transactional_id} is left as it is: meanwhile it is {again.says}.")


def _report(transaction: str, outcome: Any) -> None:
    from tallystick.sink.two_phase import Outcome

    if outcome is Outcome.COMMITTED:
        typer.echo(f"Committed {transaction}.")
        return
    typer.echo(
        f"{transaction} is lost: it was aborted, by a timeout or by hand, and can never be "
        f"committed any more. Start the pipeline: it runs the epoch again if all of it is lost, "
        f"and says which records are missing if not.",
        err=True,
    )
    sys.exit(1)


def _refuse(why: str) -> NoReturn:
    typer.echo(why, err=True)
    sys.exit(REFUSED)


def _fields(lingering: "Lingering", judged: "Judged", told: "Told | None") -> dict[str, Any]:
    """One line of `--json`; the fields are there to stay."""
    from tallystick.settling import now_ms
    from tallystick.transactions import KAFKA, Standing, named_as

    pooled = lingering.pooled
    named = named_as(lingering, told) or lingering.found
    foreign = judged.standing is Standing.FOREIGN
    is_kafka = lingering.system == KAFKA
    return {
        "system": lingering.system,
        "transaction": lingering.transactional_id,
        "name": lingering.name,
        "state": lingering.state,
        "prepared": lingering.prepared,
        "producer_id": lingering.producer_id if is_kafka else None,
        "producer_epoch": lingering.producer_epoch if is_kafka else None,
        "begun_ms": lingering.begun_ms,
        "age_ms": max(0, now_ms() - lingering.begun_ms) if lingering.begun_ms else None,
        "timeout_ms": lingering.timeout_ms,
        "partitions": [str(each) for each in lingering.partitions],
        "standing": judged.standing.value,
        "says": judged.says,
        "commit": judged.may_commit,
        "abort": judged.may_abort,
        "pipeline": "" if told is None or foreign else told.pipeline,
        "lineage": "" if told is None or foreign else told.lineage,
        "sink": lingering.sink or ("" if pooled is None else pooled.sink),
        "task": pooled.task if pooled is not None else None if named is None else named.task,
        "epoch": judged.epoch if named is None else named.checkpoint_id,
        "records": None if named is None else named.record_count,
        "manifest": judged.manifest_path,
    }
