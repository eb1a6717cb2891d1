"""Reasons why an epoch is not run or has failed: the finding, and the remedy."""

from collections.abc import Mapping

from tallystick.epoch.facts import Base, CommittedEpoch, Request
from tallystick.epoch.manifest import CHECKPOINT, Identity, Manifest
from tallystick.epoch.tokens import Token
from tallystick.epoch.two_phase import Committable, Lost
from tallystick.errors import (
    DataLossError,
    EpochAbortedError,
    ForeignRowsError,
    ManifestError,
    OptionError,
    OtherOffsetsError,
)
from tallystick.source.offsets import parse_source
from tallystick.text import shortened
from tallystick.values import TopicPartition

POSITIONS_SHOWN_MAX = 20
LOST_SHOWN_MAX = 20


def skip_word(request: Request, newest: int) -> str:
    """Return what a person states to go on without the epochs after the newest that counts."""
    return f"without-epochs-{newest + 1}-to-{request.checkpoint_id - 1}"


def without_token(seed: Base) -> str:
    """Return what a person states to go on from a savepoint that Kafka has no token of."""
    return f"restored-at-epoch-{seed.manifest.checkpoint_id}-without-token"


def new_lineage_word(token: Token) -> str:
    """Return what a person states to take a name over from another lineage."""
    return f"new-lineage-after-{token.lineage}"


def token_lost(request: Request, identity: Identity, committed: CommittedEpoch) -> DataLossError:
    """No token names the epoch committed last, although the checkpoint has manifests."""
    if committed.is_by_log:
        return DataLossError(
            f"pipeline {identity.pipeline!r}: epoch {request.checkpoint_id} was asked for, and the "
            f"log of decisions of checkpoint {identity.checkpoint} (tallystick/decisions) does not "
            f"say which epoch was decided last, although the checkpoint has manifests: its files "
            f"were removed, or not copied; or Kafka decided the newest epochs, and forgot "
            f"(offsets.retention.minutes, 7 days by default). Whether the newest epoch became "
            f"visible cannot be proved, so running it could repeat it. Put a whole copy of the "
            f"checkpoint back. Or compare the end of the output with the newest manifest; then "
            f"make a savepoint of this checkpoint and restore it into a new one, or start from a "
            f"new checkpoint at the offsets that the manifest names."
        )
    return DataLossError(
        f"pipeline {identity.pipeline!r}: epoch {request.checkpoint_id} was asked for, and Kafka "
        f"no longer knows which epoch it committed last, although checkpoint {identity.checkpoint} "
        f"has manifests. Kafka forgets a group's offsets after offsets.retention.minutes (7 days "
        f"by default) without a commit, and at once when the topic under whose name they are kept "
        f"was deleted (token_topic=, or the sink's own). Whether the newest epoch became visible "
        f"cannot be proved, so running it could repeat it. Compare the end of the output with the "
        f"newest manifest; "
        f"then make a savepoint of this checkpoint and restore it into a new one, or start from a "
        f"new checkpoint at the offsets that the manifest names. Raise offsets.retention.minutes "
        f"for the next long stop."
    )


def token_lost_after_savepoint(
    seed: Base, identity: Identity, committed: CommittedEpoch
) -> DataLossError:
    """No token exists for the pipeline of a restored savepoint: the original may have gone on."""
    epoch, origin = seed.manifest.checkpoint_id, seed.manifest.origin
    is_of_seed = seed.manifest.is_of_seed
    whose = "a pipeline that had not run yet, perhaps this one," if is_of_seed else "this pipeline"
    why = (
        "and nothing tells whether the original went on: without a KafkaSink that has "
        "transactions='epoch', decisions are kept in each checkpoint's own log, and the one of "
        "the original is not looked at"
        if committed.is_by_log
        else "and Kafka does not know which epoch the pipeline committed last: it forgot "
        "(offsets.retention.minutes, 7 days by default), or this is another cluster"
    )
    if origin is not None and origin.pipeline not in (identity.pipeline, "") and not is_of_seed:
        whose = f"query {origin.pipeline}, which had no name,"
        if not committed.is_by_log:
            why = (
                f"and as this query has another id, nothing tells whether that one went on: with "
                f".queryName({origin.pipeline!r}) Kafka is asked"
            )
    return DataLossError(
        f"pipeline {identity.pipeline!r}: checkpoint {identity.checkpoint} was restored from a "
        f"savepoint of {whose} at epoch {epoch}, {why}. {_consequence(seed)} if epochs after "
        f"{epoch} were ever committed; if none was, it goes on exactly. To go on either way, "
        f"start once with "
        f"accept={without_token(seed)!r}; or give the pipeline another name and another output."
    )


def other_lineage(token: Token, identity: Identity, seed: Base | None) -> DataLossError:
    """Another checkpoint owns the pipeline's name."""
    last = f", the last at {token.staged_at}," if token.staged_at else ""
    what = (
        f"checkpoint {token.checkpoint} was removed or emptied: epochs up to "
        f"{token.checkpoint_id} were committed{last} from what it was (lineage {token.lineage}), "
        f"and now it begins anew (lineage {identity.lineage})"
        if token.checkpoint == identity.checkpoint
        else f"epochs up to {token.checkpoint_id} were committed{last} from checkpoint "
        f"{token.checkpoint} (lineage {token.lineage}); this run uses checkpoint "
        f"{identity.checkpoint} (lineage {identity.lineage})"
    )
    if seed is None:
        consequence = "Beginning anew would write that output a second time, or leave a gap"
    else:
        what += f", restored from a savepoint of epoch {seed.manifest.checkpoint_id}"
        consequence = _consequence(seed)
    return DataLossError(
        f"pipeline {identity.pipeline!r}: {what}. {consequence}. Use that checkpoint, or give this "
        f"pipeline a name of its own; or, if this checkpoint is meant to take over, as when "
        f"trying out, start once with accept={new_lineage_word(token)!r}."
    )


def _consequence(seed: Base) -> str:
    positions = [
        f"{partition} from offset {offset}"
        for source in map(parse_source, seed.manifest.sources)
        if source is not None
        for partition, offset in sorted(source.positions.items())
    ]
    shown = shortened(positions, POSITIONS_SHOWN_MAX, "partitions more")
    where = f" ({shown})" if shown else ""
    return (
        f"Going on reads again what comes after epoch {seed.manifest.checkpoint_id}{where}, so "
        f"output from epoch {seed.manifest.checkpoint_id + 1} on is written a second time"
    )


def half_restored(bases: tuple[Base, ...], identity: Identity) -> ManifestError:
    """Manifests of two lineages lie in one checkpoint."""
    other = next(base for base in bases if base.manifest.lineage != identity.lineage)
    return ManifestError(
        f"pipeline {identity.pipeline!r}: manifest {other.path} in checkpoint "
        f"{identity.checkpoint} is of lineage {other.manifest.lineage}, the checkpoint's own is "
        f"{identity.lineage}: a restore was interrupted, or folders of two checkpoints were mixed. "
        f"Nothing was changed. Restore the savepoint again, into an empty folder."
    )


def base_gone(request: Request, identity: Identity) -> ManifestError:
    """The manifest is missing whose state the epoch would go on from."""
    return ManifestError(
        f"pipeline {identity.pipeline!r}: checkpoint {identity.checkpoint} is to go on with epoch "
        f"{request.checkpoint_id}, but has no manifest of the epoch before, only of others: which "
        f"state to go on from is unknown. Nothing was changed. Put a whole copy of the "
        f"checkpoint back; or restore a savepoint into an empty folder."
    )


def base_unknown(epoch: int, identity: Identity) -> ManifestError:
    """A loop of our own takes its name back, and does not know which epoch was committed last."""
    return ManifestError(
        f"pipeline {identity.pipeline!r}: checkpoint {identity.checkpoint} has a manifest of "
        f"epoch {epoch}, and no note of a run that ended in order: whether the epoch was "
        f"committed, Kafka no longer knows. Nothing was changed. Restore a savepoint into "
        f"an empty folder; or start from a new checkpoint at the offsets where the output ends."
    )


def no_base(identity: Identity) -> ManifestError:
    """A query of Spark's has opened the lineage, and no epoch is committed."""
    return ManifestError(
        f"pipeline {identity.pipeline!r}: checkpoint {identity.checkpoint} is one of Structured "
        f"Streaming without any committed epoch: where its first one begins only Spark's log "
        f"says (offsets/0). Nothing was changed, and nothing is in the output: use a new "
        f"checkpoint, with starting_offsets= from there."
    )


def state_without_manifest(identity: Identity) -> ManifestError:
    """Files of state without a manifest."""
    return ManifestError(
        f"pipeline {identity.pipeline!r}: checkpoint {identity.checkpoint} has files of keyed "
        f"state, but no manifest that names them: a restore was interrupted, the manifests were "
        f"removed, or no epoch of an earlier pipeline was ever finished. Beginning here would "
        f"begin with empty state. Nothing was changed. Restore the savepoint again, into an empty "
        f"folder; or use a new checkpoint folder."
    )


def several_bases(bases: tuple[Base, ...], identity: Identity) -> ManifestError:
    """The epoch before has several manifests, and nothing shows which one counts."""
    return ManifestError(
        f"pipeline {identity.pipeline!r}: checkpoint {identity.checkpoint} has "
        f"{len(bases)} manifests of epoch {bases[0].manifest.checkpoint_id} "
        f"({', '.join(base.path for base in bases)}), and Kafka no longer knows which of "
        f"them counts. Nothing was changed. Restore a savepoint into an empty folder."
    )


def wrong_epoch(
    request: Request, token: Token, identity: Identity, committed: CommittedEpoch
) -> DataLossError:
    """The requested epoch does not follow the committed one."""
    behind = token.checkpoint_id >= request.checkpoint_id
    by_log = committed.is_by_log
    who = "its log of decisions has" if by_log else "Kafka committed"
    answer = "the log (tallystick/decisions)" if by_log else "Kafka's answer"
    what = (
        "the checkpoint was set back: the epochs in between would be written a second time"
        if behind
        else f"{answer} was set back: the epochs in between may be missing from the output"
    )
    return DataLossError(
        f"pipeline {identity.pipeline!r}: checkpoint {identity.checkpoint} asks for epoch "
        f"{request.checkpoint_id}, but {who} epoch {token.checkpoint_id} last "
        f"(expected {request.checkpoint_id - 1}). If another run of this checkpoint was active "
        f"until now, start again: that is all. If not, {what}. Put the newest copy of the "
        f"checkpoint back; or start from a new checkpoint, stating where to read from."
        f"{'' if behind else _on_skipping(request, token, committed)}"
    )


def _on_skipping(request: Request, token: Token, committed: CommittedEpoch) -> str:
    """Return the remedy for a function that left out micro-batches that had been begun."""
    if not request.may_skip:
        return ""
    word = skip_word(request, token.checkpoint_id)
    return f" Or {_function_went_on(committed, word)}"


def _function_went_on(committed: CommittedEpoch, word: str) -> str:
    begun = ", ".join(map(str, committed.begun[:POSITIONS_SHOWN_MAX]))
    return (
        f"the function of foreachBatch went on after the sink had failed (begun, and not "
        f"committed: {begun}), or leaves out now what it gave to the sink before: what the sink "
        f"raises must not be caught, for Spark takes a micro-batch whose function returns for "
        f"done. To go on without their rows, start once "
        f"with accept={word!r}."
    )


def failed_before_the_first(
    request: Request, newest: int, identity: Identity, committed: CommittedEpoch
) -> DataLossError:
    """A lineage would open after micro-batches whose rows were not written."""
    return DataLossError(
        f"pipeline {identity.pipeline!r}: checkpoint {identity.checkpoint} is to begin its output "
        f"with epoch {request.checkpoint_id}, and rows of earlier micro-batches are missing: "
        f"{_function_went_on(committed, skip_word(request, newest))} Or start from a new "
        f"checkpoint: it reads them again."
    )


def manifest_gone(token: Token, identity: Identity, committed: CommittedEpoch) -> ManifestError:
    """The manifest of the committed epoch is missing."""
    who = "the checkpoint's log decided" if committed.is_by_log else "Kafka committed"
    return ManifestError(
        f"pipeline {identity.pipeline!r}: {who} epoch {token.checkpoint_id}, whose "
        f"manifest {token.manifest_path} is missing from checkpoint {identity.checkpoint}: it was "
        f"removed, or the checkpoint was set back to an older copy. Nothing was changed. Put the "
        f"newest copy of the checkpoint back; or start from a new checkpoint, stating where to "
        f"read from."
    )


def other_offsets(
    identity: Identity, token: Token, manifest: Manifest, logged: tuple[str, ...] | None
) -> OtherOffsetsError:
    """The caller has another end of the committed epoch than its manifest."""
    return OtherOffsetsError(
        f"pipeline {identity.pipeline!r}: epoch {token.checkpoint_id} is committed with the source "
        f"offsets {manifest.sources} (manifest {token.manifest_path})",
        token.checkpoint_id,
        manifest.sources,
        logged,
    )


def partial_word(token: Token) -> str:
    """Return what a person states to go on without the rows of a second call."""
    return f"partial-epoch-{token.checkpoint_id}"


def partial(token: Token, identity: Identity) -> DataLossError:
    """The committed epoch lacks the rows of a second call."""
    epoch = token.checkpoint_id
    return DataLossError(
        f"pipeline {identity.pipeline!r}: the function of foreachBatch called a sink twice in "
        f"micro-batch {epoch}. The rows of the first call are committed, those of the second call "
        f"are not in the output, and no start writes them: the epoch is committed. Write all rows "
        f"of a micro-batch with one call of one sink (union the DataFrames); write the missing "
        f"ones of micro-batch {epoch} by other means (its offsets are in offsets/{epoch} of "
        f"checkpoint {identity.checkpoint}); then start once with accept={partial_word(token)!r}. "
        f"Or start from a new checkpoint, with an empty output."
    )


def miscount(
    checkpoint_id: int,
    reported: Mapping[TopicPartition, int],
    in_kafka: Mapping[TopicPartition, int],
) -> EpochAbortedError:
    """Rows of an attempt that did not report are in the transaction, or reported ones are not.

    Kafka cannot distinguish two attempts of one task, since they share producer id and epoch.
    Before the commit such rows cost one attempt of the epoch; after it they are visible, and a
    person decides.
    """
    strays = [
        f"{partition}: last sequence reported {reported.get(partition)}, Kafka has "
        f"{in_kafka.get(partition)}"
        for partition in sorted({*reported, *in_kafka})
        if reported.get(partition) != in_kafka.get(partition)
    ]
    return EpochAbortedError(
        f"epoch {checkpoint_id}: the open transaction does not hold what the tasks "
        f"reported, so another attempt wrote into it too; it is aborted and the epoch runs again "
        f"({'; '.join(strays)})"
    )


def foreign_rows_word(checkpoint_id: int) -> str:
    """Return what a person states to go on although the epoch holds foreign rows."""
    return f"foreign-rows-in-epoch-{checkpoint_id}"


def foreign_rows_found(
    checkpoint_id: int, foreign_rows: Mapping[TopicPartition, int]
) -> ForeignRowsError:
    """The epoch is committed, and rows that no task reported are visible with it."""
    where = ", ".join(f"{partition}: {rows}" for partition, rows in sorted(foreign_rows.items()))
    return ForeignRowsError(
        f"epoch {checkpoint_id} is committed, with rows that no reporting task wrote "
        f"({where}): a stray task attempt wrote between the last check and the commit. They stand "
        f"after the offsets that the manifest names, and are visible. Remove or compensate them "
        f"where the output is used; then start with accept={foreign_rows_word(checkpoint_id)!r}."
    )


def is_replayable(committed: CommittedEpoch, lost: tuple[Lost, ...]) -> bool:
    """True if running the newest decided epoch again repeats nothing.

    Nothing is repeated if none of its output is visible, and the state that it went on from exists.
    """
    manifest = committed.manifest
    if manifest is None or not is_invisible(manifest, lost):
        return False
    return committed.before is not None or not manifest.base_path


def is_invisible(manifest: Manifest, lost: tuple[Lost, ...]) -> bool:
    """True if all output is lost, with nothing in the transaction of a deciding producer."""
    if manifest.decided_by != CHECKPOINT or manifest.produced:
        return False
    return {loss.committable for loss in lost} == set(manifest.committables)


def accepting_word(manifest: Manifest) -> str:
    """Return what a person states to go on without the lost output of an epoch."""
    return f"lost-output-of-epoch-{manifest.checkpoint_id}"


def is_accepted(identity: Identity, manifest: Manifest) -> bool:
    """True if a person stated to go on without the lost output."""
    return accepting_word(manifest) in identity.accepted


def output_lost(
    identity: Identity, manifest: Manifest, lost: tuple[Lost, ...], *, is_logged: bool = False
) -> DataLossError:
    """Some output of a decided epoch was aborted: its transactions, records and input.

    `is_logged`: Spark takes the epoch for done, as after a function that caught what a sink raised.
    """
    why = (
        "The function of foreachBatch caught what the sink raised, so Spark has logged the epoch "
        "as done and does not ask for it again."
        if is_logged
        else "The other output of the epoch is visible, and its state and positions count, so "
        "running it again would repeat records."
    )
    known = sum(loss.committable.record_count for loss in lost)
    shown = "; ".join(loss.what for loss in lost[:LOST_SHOWN_MAX])
    more = f"; and {len(lost) - LOST_SHOWN_MAX} more" if len(lost) > LOST_SHOWN_MAX else ""
    ends = [
        f"{partition} up to offset {offset}"
        for source in map(parse_source, manifest.sources)
        if source is not None
        for partition, offset in sorted(source.positions.items())
    ]
    inputs = shortened(ends, LOST_SHOWN_MAX, "partitions more")
    where = f" Its input: {inputs}." if ends else ""
    return DataLossError(
        f"pipeline {identity.pipeline!r}: epoch {manifest.checkpoint_id} was decided, and "
        f"{len(lost)} of its {len(manifest.committables)} transactions with {known} records were "
        f"aborted before they could be committed, by a timeout or by hand: {shown}{more}.{where} "
        f"{why} Write the lost records by other means (the offsets say "
        f"which input they come from); then start once with "
        f"accept={accepting_word(manifest)!r}. To make it less likely, give transactions a longer "
        f"timeout than the longest down time."
    )


def lost_repeatedly(
    identity: Identity, manifest: Manifest, lost: tuple[Lost, ...]
) -> DataLossError | EpochAbortedError:
    """An epoch was lost as often as it ran; unless some output is visible, nothing is amiss."""
    if not is_invisible(manifest, lost):
        return output_lost(identity, manifest, lost)
    shown = "; ".join(loss.what for loss in lost[:LOST_SHOWN_MAX])
    return EpochAbortedError(
        f"pipeline {identity.pipeline!r}: epoch {manifest.checkpoint_id} was decided, and all of "
        f"its {len(lost)} transactions were aborted before they could be committed, by a timeout "
        f"or by hand, each time that it was run: {shown}. Nothing of it is visible. Give "
        f"transactions a longer timeout, and start again: the epoch runs again, nothing is lost "
        f"or repeated."
    )


def no_sinks(identity: Identity, decided: tuple[Committable, ...]) -> OptionError:
    """Sinks that have decided transactions are gone from the pipeline."""
    uids = sorted({committable.sink for committable in decided})
    return OptionError(
        f"pipeline {identity.pipeline!r}: checkpoint {identity.checkpoint} holds {len(decided)} "
        f"decided transactions of sinks that the pipeline no longer has: "
        f"{', '.join(uids)}. They are prepared and have to be committed. Nothing was changed. Add "
        f"the sinks again, with these uids, for one start."
    )
