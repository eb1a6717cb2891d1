"""A checkpoint's view of transactions: the last decided epoch, and prepared ones after it.

Reads, never changes anything; the pipeline may run meanwhile. Where Kafka decides, it is asked for
its token: `asking` is the one place that does so for anybody but the driver.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from tallystick.checkpoint.decision_log import transactional_ids
from tallystick.checkpoint.folder import CheckpointFolder, existing_lineage
from tallystick.checkpoint.newest import Ask, Epochs, TokenAnswer
from tallystick.epoch.manifest import Manifest, epoch_of
from tallystick.epoch.tokens import newest_token
from tallystick.epoch.transactional_ids import checkpoint_prefix, default_prefix, parse, token_group
from tallystick.epoch.two_phase import Owner
from tallystick.errors import DataLossError, OptionError
from tallystick.kafka import group_offsets, transactions
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.ports import Storage
from tallystick.values import TopicPartition

SINKS_OF_A_KIND = 20
"""This many sinks without a uid are looked for, of a run that died before its first manifest."""
LOOKS_MAX = 3
"""A checkpoint that a running pipeline changes meanwhile is read at most this often."""
ASKS_MAX = 30
ASK_AGAIN_S = 0.1
NOWHERE = TopicPartition("", 0)
"""The token is found wherever the group has it."""


class StatedPipeline(NamedTuple):
    """The user's statement about a pipeline, besides its checkpoint.

    Args:
        pipeline: its name.
        prefix: of its transactional ids.
    """

    pipeline: str | None = None
    prefix: str | None = None

    @property
    def prefixes(self) -> frozenset[str]:
        """The prefixes of transactional ids that belong to the pipeline."""
        names = () if self.pipeline is None else (default_prefix(self.pipeline),)
        return frozenset(names if self.prefix is None else (*names, self.prefix))


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """The content of a checkpoint, with Kafka's answer about the last decision.

    Args:
        location: the location of the checkpoint.
        pipeline: the name of the pipeline; "": no epoch has left a manifest.
        lineage: the lineage of the checkpoint.
        is_loops: True of a pipeline; False of a query of Structured Streaming.
        prefixes: the transactional ids, and the prefixes of ids, that belong to the pipeline.
        decided_path: the path of the newest decided manifest; "": none is decided.
        decided: that manifest; None: none is decided, or its file is missing.
        doubt: why the last decision is unknown; "": it is known.
        undecided: later manifests, by path: of attempts that failed, or wait for the decision.
    """

    location: str
    pipeline: str
    lineage: str
    is_loops: bool = True
    prefixes: frozenset[str] = frozenset()
    decided_path: str = ""
    decided: Manifest | None = None
    doubt: str = ""
    undecided: tuple[tuple[str, Manifest], ...] = ()


def asking(config: KafkaConfig) -> Ask:
    """Return a function that asks a cluster for the token, and again while it ends a commit."""

    def ask(transactional_id: str, lineage: str) -> TokenAnswer:
        client = Client(config)
        try:
            return asking_again(partial(ask_kafka, client))(transactional_id, lineage)
        finally:
            client.close()

    return ask


def asking_again(ask: Ask) -> Ask:
    """Return a function that asks Kafka again while in doubt: a pipeline may just be committing."""

    def ask_often(transactional_id: str, lineage: str) -> TokenAnswer:
        for _ in range(ASKS_MAX):
            answer = ask(transactional_id, lineage)
            if answer.token is not None or not answer.doubt:
                break
            time.sleep(ASK_AGAIN_S)
        return answer

    return ask_often


def ask_kafka(client: Client, transactional_id: str, lineage: str) -> TokenAnswer:
    """Return the token of a pipeline's last decision in Kafka, or a doubt; see `newest.Ask`.

    An open transaction is not decided, so its token is not waited for: the one before counts. One
    that Kafka is just ending is decided, and its token may not be readable yet: that is a doubt.

    Args:
        client: of the cluster.
        transactional_id: the pipeline's.
        lineage: of its checkpoint.

    Raises:
        AuthorizationError: the group, or the transactional id, may not be described.
    """
    try:
        state = transactions.describe(client, transactional_id)
        if state is not None and state.state.startswith("Prepare"):
            return TokenAnswer(None, f"Kafka is just ending {transactional_id!r}: try again")
        tokens = group_offsets.fetch(client, token_group(transactional_id), None, stable=False)
        return TokenAnswer(newest_token(tokens, NOWHERE, lineage))
    except DataLossError as error:
        return TokenAnswer(None, str(error))


def look(
    checkpoint: Storage,
    ask: Ask,
    stated: StatedPipeline = StatedPipeline(),  # noqa: B008  a value
) -> CheckpointView:
    """Read a checkpoint, and ask Kafka for the last decision.

    Args:
        checkpoint: its location.
        ask: asks Kafka for the token.
        stated: the user's statement about the pipeline.

    Raises:
        OptionError: the location is no checkpoint, or one of another pipeline.
        ManifestError: a manifest, or the log of decisions, is damaged.
    """
    for _ in range(LOOKS_MAX):
        view = _look(checkpoint, ask, stated)
        if not view.decided_path or view.decided is not None:
            return view
    return view


def owners_of(
    checkpoint: Storage, view: CheckpointView, uids: Iterable[str], *kinds: str
) -> tuple[Owner, ...]:
    """Return the possible sinks of a pipeline of some kinds: all named by manifests or the user.

    Besides the default names of sinks without a uid: the kind, and a number.
    """
    numbers = range(1, SINKS_OF_A_KIND + 1)
    numbered = (f"{kind}-{number}" for kind in kinds for number in numbers)
    named = {
        committable.sink
        for it in _manifests(checkpoint).values()
        for committable in it.committables
    }
    uids = sorted({*named, *uids, *numbered})
    return tuple(Owner(view.pipeline, uid, view.lineage) for uid in uids)


def _look(checkpoint: Storage, ask: Ask, stated: StatedPipeline) -> CheckpointView:
    lineage, epochs = existing_lineage(CheckpointFolder(checkpoint)), Epochs(checkpoint)
    last = epochs.last(ask, lineage)
    manifests = _manifests(checkpoint)  # after the question: what is decided is among them
    own = {path: manifest for path, manifest in manifests.items() if manifest.lineage == lineage}
    pipeline = next(
        (manifest.pipeline for manifest in reversed(own.values())), stated.pipeline or ""
    )
    if stated.pipeline not in (None, pipeline):
        raise OptionError(
            f"checkpoint {checkpoint.location} is one of pipeline {pipeline!r}, and --pipeline "
            f"names {stated.pipeline!r}: give the checkpoint of that one."
        )
    token, doubt = last.decided, last.doubt
    path = "" if token is None else token.manifest_path
    decided = own.get(path)
    if path and decided is None:
        doubt = f"epoch {epoch_of(path)} is decided last, and its manifest {path} is missing"
    newest = -1 if token is None else token.checkpoint_id
    prefixes = _prefixes(own.values(), lineage) | transactional_ids(checkpoint) | stated.prefixes
    return CheckpointView(
        location=checkpoint.location,
        pipeline=pipeline,
        lineage=lineage,
        is_loops=epochs.is_loops,
        prefixes=prefixes | {checkpoint_prefix(prefix, lineage) for prefix in prefixes},
        decided_path=path,
        decided=decided,
        doubt=doubt,
        undecided=tuple(
            (other_path, manifest)
            for other_path, manifest in own.items()
            if other_path != path and epoch_of(other_path) >= newest
        ),
    )


def _manifests(checkpoint: Storage) -> dict[str, Manifest]:
    """Return the retained manifests by path, of all attempts, oldest first."""
    folder = CheckpointFolder(checkpoint)
    return folder.manifests(folder.manifest_paths())


def _prefixes(manifests: Iterable[Manifest], lineage: str) -> frozenset[str]:
    """Return the id prefixes that manifests prove, and the prefix of a query on the checkpoint."""
    prefixes = {default_prefix(lineage)}
    for manifest in manifests:
        if manifest.origin is None:
            prefixes.add(manifest.producer.transactional_id)
        for committable in manifest.committables:
            pooled = parse(committable.name.rsplit(":", 2)[0])
            if pooled is not None and pooled.sink == committable.sink:
                prefixes.add(pooled.prefix)
    return frozenset(prefixes)
