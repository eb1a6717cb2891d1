"""The checks of `tallystick doctor` that need the pipeline's code: what a start would look at.

Each calls what the start calls. Sinks that are not Kafka's are left out: to look at them, a start
makes tables or writes a file, and the doctor changes nothing.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.epoch.transactional_ids import checkpoint_prefix
from tallystick.epoch.two_phase import Guarantee, Owner
from tallystick.errors import AuthorizationError, OptionError, TallystickError
from tallystick.kafka import cluster
from tallystick.kafka.broker_settings import check_broker_settings
from tallystick.kafka.client import Client
from tallystick.kafka.output import KafkaOutput
from tallystick.kafka.preflight import (
    UNVERIFIED,
    Right,
    check,
    check_recovery,
    grants_message,
    missing_rights,
    rights_to_write,
)
from tallystick.kafka.task_sink import rights_of
from tallystick.pipeline.compiled import PipelineRun, newest_manifest
from tallystick.pipeline.input_planning import by_input, check_none_gone
from tallystick.pipeline.sinks import decider_rights
from tallystick.storage.file_storage import FileStorage
from tallystick.values import CheckFinding, Severity

PATIENCE_S = 30.0
"""The time each cluster of the pipeline has for its answers."""


@dataclass(frozen=True, slots=True)
class DeclaredPipeline:
    """A pipeline as declared in its code.

    Args:
        run: its parts; not started.
        outputs: its Kafka sinks, by uid.
        decider: the uid of the sink whose transaction decides; "": the checkpoint decides.
        other_sinks: the uids of the sinks that do not write into Kafka.
        sharing: the uids of further Kafka sinks that write into the deciding transaction.
    """

    run: PipelineRun
    outputs: Mapping[str, KafkaOutput]
    decider: str
    other_sinks: tuple[str, ...]
    sharing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeclaredSubject:
    """The pipeline and the checkpoint to check.

    Args:
        pipeline: as its code has it.
        storage: the checkpoint.
        written: topics that the retained epochs have rows in.
        trigger_interval_ms: see `preflight.check`.
    """

    pipeline: DeclaredPipeline
    storage: FileStorage
    written: Collection[str]
    trigger_interval_ms: int | None


def pipeline(subject: DeclaredSubject) -> Iterator[CheckFinding]:
    """Check that the checkpoint belongs to the pipeline and fits its inputs and steps."""
    declared = subject.pipeline
    if declared.other_sinks:
        uids = ", ".join(declared.other_sinks)
        text = f"only a start looks at sinks that are not Kafka's: {uids}"
        yield CheckFinding(Severity.INFO, "pipeline", text)
    try:
        manifest = newest_manifest(subject.storage, declared.run.name)
    except TallystickError as error:
        yield _refusal("pipeline", error)
        return
    inputs = [planned_input.uid for planned_input in declared.run.all_inputs]
    sources = () if manifest is None else manifest.sources
    positions = by_input(sources, declared.run.previous_inputs)
    for check_it in (
        lambda: declared.run.keyed.check(() if manifest is None else manifest.state),
        lambda: check_none_gone(positions, inputs),
    ):
        try:
            check_it()
        except TallystickError as error:
            yield _refusal("pipeline", error)
    with suppress(OptionError):  # reported already
        for text in declared.run.keyed.state_changes(() if manifest is None else manifest.state):
            yield CheckFinding(Severity.INFO, "pipeline", text)


def source(subject: DeclaredSubject) -> Iterator[CheckFinding]:
    """Check the cluster of the sources, the topics, and the rights to read them."""
    is_new = not CheckpointFolder(subject.storage).manifest_paths()
    try:
        subject.pipeline.run.check_source(is_new=is_new)
    except OptionError as error:
        yield _refusal("rights" if isinstance(error, AuthorizationError) else "topics", error)


def rights(subject: DeclaredSubject) -> Iterator[CheckFinding]:
    """Ask the brokers which rights each Kafka sink's login lacks; call `source` before."""
    declared = subject.pipeline
    for uid, output in declared.outputs.items():
        with _asking(output) as client:
            wanted: list[Right] = [*_wanted(declared, uid, output)]
            if output.topic is None:
                wanted += rights_to_write(subject.written)
            if uid == declared.decider:
                wanted += declared.run.shown_rights(cluster.cluster_id(client))
            if missing := missing_rights(client, wanted):
                text = f"sink {uid}: {grants_message(missing, output.config.sasl_username)}"
                yield CheckFinding(
                    Severity.ERROR,
                    "rights",
                    text,
                    "The next start is refused.",
                    "Each of the kafka-acls arguments above, with --bootstrap-server SERVERS.",
                )


def settings(subject: DeclaredSubject) -> Iterator[CheckFinding]:
    """Make the pre-flight check of a start for each Kafka sink, with its own settings."""
    declared = subject.pipeline
    for uid, output in declared.outputs.items():
        with _asking(output) as client:
            there = cluster.describe_topics(client, output.topics | {output.token_topic})
            for topic in sorted((output.topics | {output.token_topic}) - there.keys()):
                yield CheckFinding(
                    Severity.ERROR,
                    "topics",
                    f"sink {uid}: topic {topic!r} does not exist",
                    "The next start is refused.",
                    f"kafka-topics --bootstrap-server SERVERS --create --topic {topic} "
                    f"--partitions N",
                )
            if output.guarantee is not Guarantee.EXACTLY_ONCE:
                continue
            facts = cluster.cluster_facts(client, output.topics & there.keys())
            interval_ms, accepted = subject.trigger_interval_ms, frozenset({UNVERIFIED})
            preflight = check(facts, output, trigger_interval_ms=interval_ms, accepted=accepted)
            problems = list(preflight.problems)
            if uid != declared.decider and uid not in declared.sharing:
                problems += check_recovery(output, interval_ms)
            for problem in problems:
                text = f"sink {uid}: {problem}"
                yield CheckFinding(Severity.ERROR, "settings", text, "The next start is refused.")
            for warning in preflight.warnings:
                yield CheckFinding(Severity.WARNING, "settings", f"sink {uid}: {warning}")
            yield from check_broker_settings(client, facts)


@contextmanager
def _asking(output: KafkaOutput) -> Iterator[Client]:
    with closing(Client(output.config)) as client, client.within(time.monotonic() + PATIENCE_S):
        yield client


def _wanted(declared: DeclaredPipeline, uid: str, output: KafkaOutput) -> tuple[Right, ...]:
    if uid == declared.decider:
        return decider_rights(output, declared.run.name)
    if uid in declared.sharing:
        return rights_to_write(output.topics)
    owner = Owner(declared.run.name, uid, "")
    prefix = checkpoint_prefix(f"{output.id_prefix}{owner.pipeline}", owner.lineage)
    return rights_of(output, owner, prefix)


def _refusal(name: str, error: TallystickError) -> CheckFinding:
    return CheckFinding(Severity.ERROR, name, str(error), "The next start is refused.")


PIPELINE_CHECKS: dict[str, Callable[[DeclaredSubject], Iterator[CheckFinding]]] = {
    "pipeline": pipeline,
    "source": source,
    "rights": rights,
    "settings": settings,
}
"""In the order in which they are made."""
