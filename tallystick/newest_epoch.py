"""Which epoch of a checkpoint is certainly committed, and which of its manifests counts.

Invariants:
    * An epoch is settled when Spark has logged it as done: decided, and committed in every sink.
      What is decided and not logged may be visible in part only: nothing is restored from it.
    * Which manifest of an epoch counts, the checkpoint's log of decisions tells where it decided
      the epoch: by its newest entry, and by the manifest that each later epoch went on from.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tallystick.checkpoint import manifest as m
from tallystick.checkpoint import savepoint as s
from tallystick.checkpoint.manifest import CHECKPOINT, Manifest
from tallystick.checkpoint.micro_batches import failed_path, newest_settled, partial_path
from tallystick.decision_log import newest_entry
from tallystick.errors import DataLossError, ManifestError, OptionError
from tallystick.ports import Storage
from tallystick.sink.transaction import Token
from tallystick.state.handles import StepState, Version
from tallystick.wholeness import read_manifest

AskKafka = Callable[[Manifest], Token | None]
"""The token that Kafka holds of the pipeline that left a manifest."""


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest epoch of a checkpoint that is certainly committed."""

    epoch: int
    manifest_path: str
    manifest: Manifest


def newest_committed(
    checkpoint: Storage, ask_kafka: AskKafka | None = None, wanted: int | None = None
) -> Newest:
    """Look up which epoch the checkpoint can go on from.

    Spark logs an epoch as done only after it was decided and settled; so it is the newest one in
    that log, and its manifest counts if it is the only one of the epoch. Attempts that failed leave
    others: then the checkpoint's log of decisions tells, or the next epoch, or else Kafka knows.

    Args:
        checkpoint: its location.
        ask_kafka: for Kafka's word where there are several.
        wanted: an older epoch, whose manifest is still there.

    Raises:
        DataLossError: a call of the sink failed in it, and the function of foreachBatch went on.
        OptionError: there is no committed epoch, or not the wanted one; or Kafka has to be asked,
            and cannot be.
        ManifestError: the epoch's manifest is missing or damaged.
        DataLossError: Kafka does not tell which of several manifests counts.
    """
    names = checkpoint.names(m.FOLDER)  # first: a pipeline that is quick goes on meanwhile
    epochs = settled_epochs(checkpoint)
    _check_is_sparks(checkpoint, names, epochs[-1])
    epoch = epochs[-1] if wanted is None else wanted
    if epoch not in epochs:
        raise OptionError(
            f"checkpoint {checkpoint.location}: Spark's log has no committed epoch {epoch}; the "
            f"newest is {epochs[-1]}. `tallystick inspect` shows those that are retained."
            f"{_not_settled(checkpoint, epoch)}"
        )
    paths = [path for path in m.manifests(checkpoint.names(m.FOLDER)) if m.epoch_of(path) == epoch]
    if not paths:
        raise ManifestError(
            f"checkpoint {checkpoint.location}: Spark logged epoch {epoch} as done, but there is "
            f"no manifest of it: the epoch is not retained any more, or files were removed, or it "
            f"is no checkpoint of a Tallystick pipeline. `tallystick inspect` shows what there is."
        )
    path = paths[0]
    if len(paths) > 1:
        path = counting(checkpoint, epoch, paths) or _by_kafkas_word(
            checkpoint, epoch, paths, ask_kafka
        )
    notes = {failed_path(epoch, path), partial_path(path)}
    if found := notes & set(checkpoint.names(m.FOLDER)):
        raise DataLossError(
            f"checkpoint {checkpoint.location}: Spark logged epoch {epoch} as done, but a call of "
            f"its sink failed or was refused ({', '.join(sorted(found))}): whether all its rows "
            f"are in the output is not known here. Start the query once, which commits what is "
            f"left or says what is missing; then try again."
        )
    return Newest(epoch, path, read_manifest(checkpoint, path))


def _check_is_sparks(checkpoint: Storage, names: list[str], newest: int) -> None:
    """Spark logs an epoch durably before it leaves a manifest; a loop of our own does not at all.

    Args:
        checkpoint: its location.
        names: of its manifests and notes, as they were before the log was read.
        newest: the epoch that Spark logged as done.
    """
    logged = s.epochs_logged(checkpoint.names("offsets"))
    epochs = {epoch for epoch in map(m.epoch_of, m.manifests(names)) if epoch > newest}
    if newest_settled(names) > newest or not epochs <= {*logged}:
        raise OptionError(
            f"checkpoint {checkpoint.location}: Spark's log ends with epoch {newest}, the "
            f"manifests go on: its epochs are run with execution='jobs', and which one is "
            f"committed cannot be told here yet."
        )


def settled_epochs(checkpoint: Storage) -> list[int]:
    """The epochs that Spark has logged as done, of which it keeps the newest ones; in order.

    Raises:
        OptionError: there is none.
    """
    epochs = s.epochs_logged(checkpoint.names("commits"))
    if not epochs:
        raise OptionError(
            f"{checkpoint.location} holds no committed epoch: expected the checkpoint folder of a "
            f"pipeline that has run. Check the path.{_not_settled(checkpoint, None)}"
        )
    return epochs


def logged_decision(checkpoint: Storage) -> Token | None:
    """What the checkpoint's own log decided last; None: nothing.

    Raises:
        ManifestError: the log is damaged.
    """
    entry = newest_entry(checkpoint)
    token = None if entry is None else entry.token
    return token if token is not None and token.manifest_path else None


def counting(checkpoint: Storage, epoch: int, paths: list[str]) -> str:
    """Which of several manifests of a settled epoch counts; "": only Kafka knows.

    Raises:
        ManifestError: one of them is missing or damaged, or the log of decisions is.
    """
    return _by_the_log(checkpoint, epoch, paths) or _by_the_next(checkpoint, epoch, paths)


def _not_settled(checkpoint: Storage, epoch: int | None) -> str:
    """What to say of an epoch that is decided, where Spark has not logged it; None: of the newest.

    To settle it takes the pipeline's sinks, so only the pipeline can.
    """
    token = logged_decision(checkpoint)
    if token is None or epoch not in (None, token.checkpoint_id):
        return ""
    return (
        f" Epoch {token.checkpoint_id} is decided, and not settled: what its sinks have prepared "
        f"may not be committed in all of them. Start the pipeline once, which settles it."
    )


def _by_the_log(checkpoint: Storage, epoch: int, paths: list[str]) -> str:
    """The manifest of the epoch on the way back from the newest decision; "": none is."""
    token = logged_decision(checkpoint)
    if token is None or token.checkpoint_id < epoch:
        return ""
    if any(read_manifest(checkpoint, path).decided_by != CHECKPOINT for path in paths):
        return ""  # the place of decisions has changed with this very epoch
    path = token.manifest_path
    while path and m.epoch_of(path) > epoch:
        data = checkpoint.get(path)
        path = "" if data is None else m.decode(data, path).base_path
    return path if path in paths else ""


def _by_the_next(checkpoint: Storage, epoch: int, paths: list[str]) -> str:
    """The manifest that the next epoch's went on from, committed or not; "": it cannot be told.

    They have the same positions; of some with the same state it does not matter which is taken.
    """
    behind = [
        path for path in m.manifests(checkpoint.names(m.FOLDER)) if m.epoch_of(path) == epoch + 1
    ]
    if not behind:
        return ""
    bases = {read_manifest(checkpoint, path).base_path for path in behind} & set(paths)
    if len(bases) == 1:
        return bases.pop()
    trails = {step.uid: step.trail for step in read_manifest(checkpoint, behind[0]).state}
    found = {path: read_manifest(checkpoint, path).state for path in paths}
    fitting = [path for path in paths if all(_is_before(step, trails) for step in found[path])]
    if not fitting or any(found[path] != found[fitting[0]] for path in fitting):
        return ""
    return fitting[0]


def _is_before(step: StepState, trails: Mapping[str, tuple[Version, ...]]) -> bool:
    """Whether a step's state is the one that the next epoch's went on from."""
    if step.version is None or step.uid not in trails:
        return True
    until = [version for version in trails[step.uid] if version.epoch <= step.version.epoch]
    return until[-1:] == [step.version]


def _newest_word(manifests: list[Manifest], ask_kafka: AskKafka) -> Token | None:
    """Attempts with several transactional ids, since a prefix was changed, have several tokens."""
    asked = {each.producer.transactional_id: each for each in manifests}
    tokens = [token for token in map(ask_kafka, asked.values()) if token is not None]
    own = [token for token in tokens if token.lineage == manifests[0].lineage]
    return max(own or tokens, key=lambda token: token.checkpoint_id, default=None)


def _by_kafkas_word(
    checkpoint: Storage, epoch: int, paths: list[str], ask_kafka: AskKafka | None
) -> str:
    found = f"checkpoint {checkpoint.location} has {len(paths)} manifests of epoch {epoch}"
    if ask_kafka is None:
        raise OptionError(
            f"{found}, since an attempt of it failed: only Kafka knows which one counts. Try "
            f"again behind the next epoch; or let `tallystick savepoint create` ask Kafka, by "
            f"--bootstrap-servers, and use the savepoint."
        )
    manifests = [read_manifest(checkpoint, path) for path in paths]
    pipeline = manifests[0].pipeline
    token = _newest_word(manifests, ask_kafka)
    if token is not None and token.checkpoint_id > epoch:  # the pipeline runs
        path = _by_the_next(checkpoint, epoch, paths)
        if path:
            return path
    if token is None or token.manifest_path not in paths:
        said = "nothing" if token is None else f"epoch {token.checkpoint_id} of {token.checkpoint}"
        raise DataLossError(
            f"{found}, and Kafka, asked for what pipeline {pipeline!r} committed last, says "
            f"{said}: which one counts cannot be told. Start the pipeline, so that it finishes an "
            f"epoch; then try again."
        )
    return token.manifest_path
