"""The end of a checkpoint: the newest decision, the settled epochs, the manifests that count.

`newest_committed` chooses the epoch that the checkpoint can go on from.

Everything that reads a checkpoint without being its driver gets the same answer here: savepoints,
`inspect`, `read_state`, and the commands for transactions.

Invariants:
    * An epoch is settled when it is decided, and committed in every sink. An epoch that is decided
      and not settled may be visible in part only: nothing is restored from it.
    * In a query of Spark's an epoch is settled when Spark has logged it as done, with two
      exceptions: a call failed or was refused, and the user's function returned all the same (see
      `doubts`); or a killed run began the epoch, and the function then left it out (see
      `is_denied`).
    * A loop of our own keeps no such log. There an epoch is settled when a later manifest goes on
      from it (written after the last commit of the epoch), when a run has noted it as settled, or
      when it is decided and other sinks hold nothing of it.
    * Only the decider knows whether the newest manifest is decided: Kafka by its token, or the
      checkpoint's log of decisions. Where the decider cannot be asked, nothing is guessed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tallystick.checkpoint.decision_log import decider_of, newest_entry
from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.epoch.manifest import CHECKPOINT, Manifest, attempt_of, epoch_of, is_seed
from tallystick.epoch.manifest import manifests as manifest_paths
from tallystick.epoch.micro_batches import OWN_LOOP, doubts, failures, settled_path, traces_between
from tallystick.epoch.tokens import Token
from tallystick.errors import DataLossError, ManifestError, OptionError
from tallystick.ports import Storage

NOT_ASKED = "only Kafka knows whether it is decided, and was not asked (--bootstrap-servers)"


class TokenAnswer(NamedTuple):
    """Kafka's answer to the question for a pipeline's token.

    Args:
        token: the newest one; None: Kafka holds none, or it is unknown.
        doubt: the reason why the newest token is unknown; "": it is known, or Kafka holds none.
    """

    token: Token | None
    doubt: str = ""


Ask = Callable[[str, str], TokenAnswer]
"""Asks Kafka for the decision of a transactional id, and a lineage."""


def ask_nobody(transactional_id: str, lineage: str) -> TokenAnswer:
    """Answer for a Kafka that cannot be asked; see `Ask`."""
    return TokenAnswer(None, NOT_ASKED)


@dataclass(frozen=True, slots=True)
class CheckpointEnd:
    """The end of a checkpoint, as far as it is known.

    Args:
        settled: the newest epoch that is certainly settled; -1: none is.
        settled_path: its manifest; "": see `Epochs.counting`, several attempts may have left one.
        decided: the newest decision; None: there is none, or its decider did not answer.
        doubt: the reason why the newest decision is unknown; "": it is known.
    """

    settled: int
    settled_path: str
    decided: Token | None
    doubt: str


class Epochs:
    """The epochs of a checkpoint, at one look.

    Args:
        checkpoint: its location.
    """

    def __init__(self, checkpoint: Storage) -> None:
        self._checkpoint = checkpoint
        folder = CheckpointFolder(checkpoint)
        self._logged = folder.done_by_spark()
        self._planned = folder.planned_by_spark()
        names = folder.files()  # after Spark's log: of all that it has there is one
        self.paths = sorted(manifest_paths(names), key=attempt_of)
        self._names = names
        self._noted = frozenset(path for path in self.paths if settled_path(path) in names)
        self.is_loops = OWN_LOOP in names or not self._planned
        self._manifests: dict[str, Manifest] = {}

    @property
    def lineage(self) -> str:
        """The lineage of the newest manifest; empty without any.

        Raises:
            ManifestError: it is damaged.
        """
        return self.manifest(self.paths[-1]).lineage if self.paths else ""

    @property
    def newest_begun(self) -> int:
        """The newest epoch that Spark has planned, or that has left a manifest; -1: none."""
        planned = () if self.is_loops else self._planned
        return max((*planned, *map(epoch_of, self.paths)), default=-1)

    def of(self, epoch: int) -> list[str]:
        """Return the manifests of an epoch, of all its attempts."""
        return [path for path in self.paths if epoch_of(path) == epoch]

    def manifest(self, path: str) -> Manifest:
        """Return a manifest.

        Raises:
            ManifestError: it is missing or damaged.
        """
        if path not in self._manifests:
            self._manifests[path] = CheckpointFolder(self._checkpoint).read_manifest(path)
        return self._manifests[path]

    def settled(self) -> int:
        """Return the newest epoch that the files prove settled; -1: none is."""
        newest = self._logged[-1] if self._logged else -1
        if not self.is_loops:
            return newest
        known = (path for path in self.paths if path in self._noted or is_seed(path))
        newest = max(newest, max(map(epoch_of, known), default=-1))
        for path in reversed(self.paths):
            if epoch_of(path) <= newest:
                break
            base = self._base_of(path)
            newest = max(newest, epoch_of(base) if base else -1)
        return newest

    def newest_written(self) -> int:
        """Return the newest settled epoch that a sink was called in; -1: none is settled.

        A user's own function may leave a micro-batch out, which then has no trace, and nothing to
        go on from. Where a decided epoch's manifest was removed, a missing trace proves nothing.

        Raises:
            ManifestError: the log of decisions is damaged.
        """
        newest = self.settled()
        if self.is_loops:
            return newest
        written = max(traces_between(self._names, 0, newest + 1), default=newest)
        token = logged_decision(self._checkpoint)
        is_gone = token is not None and written < token.checkpoint_id <= newest
        return newest if is_gone else written

    def is_settled(self, epoch: int) -> bool:
        """Return whether the files prove an epoch settled."""
        if epoch in self._logged or not self.is_loops:
            return epoch in self._logged
        return epoch <= self.settled() and bool(self.of(epoch))

    def last(self, ask: Ask, lineage: str) -> CheckpointEnd:
        """Return the newest decision and the newest settled epoch.

        Args:
            ask: Kafka, where it decides.
            lineage: whose decisions count.

        Raises:
            ManifestError: a manifest, or the log of decisions, is damaged.
        """
        settled = self.settled()
        token, doubt = self._decided(ask, lineage, settled)
        if not self.is_loops or token is None or doubt:
            return CheckpointEnd(settled, "", token, doubt)
        if token.checkpoint_id <= settled or not token.manifest_path:
            if token.checkpoint_id < settled:
                doubt = f"epoch {settled} is settled, and its decider knows only of epoch "
                doubt += f"{token.checkpoint_id}: it was set back, or it is another one"
            return CheckpointEnd(settled, "", token, doubt)
        path = token.manifest_path  # perhaps of an epoch that ran since the folder was listed
        try:
            manifest = self.manifest(path)
        except ManifestError as error:
            return CheckpointEnd(settled, "", token, str(error))
        if manifest.committables:
            path = manifest.base_path
        return (
            CheckpointEnd(epoch_of(path), path, token, "")
            if path
            else CheckpointEnd(settled, "", token, "")
        )

    def counting(self, epoch: int) -> str:
        """Return the manifest of a settled epoch that counts; "": only Kafka knows, or none exists.

        Raises:
            ManifestError: the log of decisions is damaged.
        """
        paths = self.of(epoch)
        if len(paths) <= 1:
            return "".join(paths)
        noted = self._noted.intersection(paths)
        if len(noted) == 1:
            return next(iter(noted))
        return self._by_the_next(epoch, paths)

    def doubts(self, path: str) -> list[str]:
        """Return the notes that put a manifest in doubt, even if Spark has logged the epoch."""
        return doubts(self._names, path, self._base_of)

    def failures(self, epoch: int) -> list[str]:
        """Return the notes that a call for an epoch failed, whether or not it left a manifest."""
        return failures(self._names, epoch)

    def is_denied(self, path: str, ask: Ask) -> bool:
        """True if Spark logged a manifest's epoch, and the decider knows of earlier epochs only.

        A killed run left such a manifest, and then the user's function left the micro-batch out. Of
        several manifests of an epoch `counting` proves one, or none.

        Args:
            path: of the manifest.
            ask: Kafka; the log of decisions is asked where that decides.
        """
        manifest, epoch = self.manifest(path), epoch_of(path)
        later = (other for other in self.paths if epoch_of(other) > epoch)
        if self.is_loops or manifest.origin is not None or len(self.of(epoch)) > 1:
            return False
        if path in map(self._base_of, later):
            return False
        token = self._token(ask, manifest.lineage).token
        return token is not None and token.checkpoint_id < epoch

    def _base_of(self, path: str) -> str:
        """Return the path of a manifest's base; "": the manifest is damaged, or has no base."""
        try:
            return self.manifest(path).base_path
        except ManifestError:
            return ""

    def _token(self, ask: Ask, lineage: str) -> TokenAnswer:
        """Ask the checkpoint's decider, Kafka or the log of decisions, for a lineage's token."""
        decider = decider_of(self._checkpoint)
        if decider is None:
            return TokenAnswer(None)
        if decider.decided_by == CHECKPOINT:
            entry = newest_entry(self._checkpoint)
            token = None if entry is None else entry.token
            is_own = token is not None and token.lineage == lineage
            return TokenAnswer(token if is_own else None)
        answer = ask(decider.transactional_id, lineage)
        if answer.token is not None and answer.token.lineage == lineage:
            return answer
        no_token = _no_token(decider.transactional_id, answer.token)
        return TokenAnswer(None, answer.doubt or no_token)

    def _decided(self, ask: Ask, lineage: str, settled: int) -> TokenAnswer:
        """Return a lineage's newest token, and the reason to doubt that no newer one exists.

        Where no epoch has left a manifest after the newest that is settled, no doubt matters:
        nothing else can have been decided.
        """
        if not self.paths:
            return TokenAnswer(None)
        token, doubt = self._token(ask, lineage)
        begun = epoch_of(self.paths[-1])
        is_sure = not any(map(self.doubts, self.of(begun)))
        decided = -1 if token is None else token.checkpoint_id
        if begun <= max(settled if is_sure else -1, decided):
            return TokenAnswer(token)
        if self.is_loops and not doubt and token is None:
            doubt = "the log of decisions (tallystick/decisions) says nothing"
        return TokenAnswer(token, doubt)

    def _by_the_next(self, epoch: int, paths: list[str]) -> str:
        """Return the manifest that the next epoch's went on from, decided or not; "": unknown.

        An epoch begins only after the one before is decided. Of the newest epoch the log of
        decisions names the manifest.
        """
        token = logged_decision(self._checkpoint)
        newest = "" if token is None else token.manifest_path
        if newest in paths:
            return newest
        later = [path for path in self.paths if epoch_of(path) > epoch] or [newest]
        following = [path for path in later if path and epoch_of(path) == epoch_of(later[0])]
        bases = set(map(self._base_of, following)).intersection(paths)
        return bases.pop() if len(bases) == 1 else ""


def logged_decision(checkpoint: Storage) -> Token | None:
    """Return the newest decision of the checkpoint's own log; None: no epoch is decided.

    Raises:
        ManifestError: the log is damaged.
    """
    entry = newest_entry(checkpoint)
    token = None if entry is None else entry.token
    return token if token is not None and token.manifest_path else None


def _no_token(transactional_id: str, token: Token | None) -> str:
    what = "no token" if token is None else f"a token of lineage {token.lineage}"
    return (
        f"Kafka decides for this checkpoint, and holds {what} of {transactional_id!r}: is it "
        f"another cluster that decides (--decider), or has another checkpoint taken over?"
    )


class Newest(NamedTuple):
    """The newest epoch of a checkpoint that is certainly settled."""

    epoch: int
    manifest_path: str
    manifest: Manifest


def newest_committed(
    checkpoint: Storage, ask: Ask | None = None, wanted: int | None = None
) -> Newest:
    """Return the epoch that the checkpoint can go on from: the newest settled one, or `wanted`.

    Args:
        checkpoint: its location.
        ask: asks Kafka; None: it cannot be asked.
        wanted: an older epoch, whose manifest is still there.

    Raises:
        DataLossError: a call of the sink failed in it, and the function of foreachBatch went on.
        OptionError: there is no settled epoch, or not the wanted one; or Kafka has to be asked, and
            cannot be.
        ManifestError: the epoch's manifest is missing or damaged.
        DataLossError: Kafka does not report what is decided last.
    """
    epochs = Epochs(checkpoint)
    refuse_nothing_settled(checkpoint, epochs)
    epoch, path = epochs.newest_written(), ""
    if wanted is not None and epochs.is_settled(wanted):
        epoch = wanted
    elif epochs.is_loops and epochs.newest_begun > epoch:
        last = epochs.last(ask or ask_nobody, epochs.lineage)
        if last.doubt:
            raise _not_told(checkpoint, epochs, last.doubt, ask)
        epoch, path = last.settled, last.settled_path
    if wanted not in (None, epoch):
        raise OptionError(
            f"checkpoint {checkpoint.location}: it has no committed epoch {wanted}; the "
            f"newest is {epoch}. `tallystick inspect` shows those that are retained."
            f"{_not_settled(checkpoint, wanted)}"
        )
    path = path or _counting(checkpoint, epochs, epoch, ask)
    if doubts := epochs.doubts(path):
        raise call_failed(checkpoint, epoch, doubts)
    if epochs.is_denied(path, ask or ask_nobody):
        raise DataLossError(
            f"checkpoint {checkpoint.location}: {never_committed(epoch, path)} Nothing was changed."
        )
    return Newest(epoch, path, epochs.manifest(path))


def refuse_nothing_settled(checkpoint: Storage, epochs: Epochs) -> None:
    """Raise OptionError where no epoch is settled."""
    if epochs.settled() < 0:
        raise OptionError(
            f"{checkpoint.location} holds no committed epoch: expected the checkpoint folder of a "
            f"pipeline that has run. Check the path.{_not_settled(checkpoint, None)}"
        )


def call_failed(checkpoint: Storage, epoch: int, notes: list[str]) -> DataLossError:
    """Return the error for an epoch that Spark has logged as done, and of which a call failed."""
    return DataLossError(
        f"checkpoint {checkpoint.location}: Spark logged epoch {epoch} as done, but a call of its "
        f"sink failed or was refused ({', '.join(notes)}): whether all its rows are in the output "
        f"is not known here. Start the query, with something to read: that commits what is left, "
        f"or says what is missing; then try again."
    )


def never_committed(epoch: int, path: str) -> str:
    """Return the message about a manifest that its decider denies; see `Epochs.is_denied`."""
    return (
        f"Spark logged epoch {epoch} as done, and its decider knows of earlier epochs only. As a "
        f"rule manifest {path} was never committed then: a run was killed before that, and the "
        f"function of foreachBatch has left the micro-batch out since; its rows are not in the "
        f"output. Or the decider was set back, or is another cluster. Start the query, with "
        f"something to read: it says which, and how to go on."
    )


def newest_decided(checkpoint: Storage, ask: Ask | None = None) -> int:
    """Return the newest epoch that is decided, settled or not; -1 where it is unknown."""
    epochs = Epochs(checkpoint)
    token = epochs.last(ask or ask_nobody, epochs.lineage).decided
    return -1 if token is None else token.checkpoint_id


def _counting(checkpoint: Storage, epochs: Epochs, epoch: int, ask: Ask | None) -> str:
    """Return the manifest of a settled epoch that counts; ask Kafka where nothing else shows it."""
    paths = epochs.of(epoch)
    if not paths and (failures := epochs.failures(epoch)):
        raise call_failed(checkpoint, epoch, failures)
    if not paths:
        raise ManifestError(
            f"checkpoint {checkpoint.location}: epoch {epoch} is done, as Spark's log has it, but "
            f"there is no manifest of it: the epoch is no longer retained, or files were "
            f"removed, or it is no checkpoint of a Tallystick pipeline. `tallystick inspect` shows "
            f"what there is."
        )
    path = epochs.counting(epoch)
    if path:
        return path
    several = f"checkpoint {checkpoint.location} has {len(paths)} manifests of epoch {epoch}"
    if ask is None:
        raise OptionError(
            f"{several}, since an attempt of it failed: only Kafka knows which one counts. Try "
            f"again after the next epoch; or let `tallystick savepoint create` ask Kafka, by "
            f"--bootstrap-servers, and use the savepoint."
        )
    last = epochs.last(ask, epochs.manifest(paths[0]).lineage)
    token, doubt = last.decided, last.doubt
    if token is not None and token.checkpoint_id > epoch:  # the pipeline runs
        path = Epochs(checkpoint).counting(epoch)
    elif token is not None and token.manifest_path in paths:
        path = token.manifest_path
    if not path:
        answer = (
            "nothing" if token is None else f"epoch {token.checkpoint_id} of {token.checkpoint}"
        )
        raise DataLossError(
            f"{several}, and Kafka, asked for what pipeline {epochs.manifest(paths[0]).pipeline!r} "
            f"committed last, says {answer}{doubt and f' ({doubt})'}: which one counts is "
            f"unknown. Start the pipeline, so that it finishes an epoch; then try again."
        )
    return path


def _not_told(
    checkpoint: Storage, epochs: Epochs, doubt: str, ask: Ask | None
) -> OptionError | DataLossError:
    """Return the error where nothing proves whether the newest epoch of a loop is decided."""
    known, begun = epochs.settled(), epochs.newest_begun
    what = (
        f"checkpoint {checkpoint.location}: epoch {begun} has left a manifest, and what is decided "
        f"last is unknown: {doubt}"
    )
    if ask is None:
        return OptionError(
            f"{what}. Give the servers of the cluster that the pipeline writes to; or stop the "
            f"pipeline, or wait until it has nothing to read, for then it notes what is done; or "
            f"save epoch {known} (`tallystick savepoint create --epoch {known}`)."
        )
    return DataLossError(
        f"{what}. Nothing was changed. Give the servers of the cluster that decides; or start the "
        f"pipeline, so that it finishes an epoch; then try again."
    )


def _not_settled(checkpoint: Storage, epoch: int | None) -> str:
    """Return a note on an epoch that is decided and may not be settled; None: the newest epoch.

    Settling takes the pipeline's sinks, so only the pipeline can do it.
    """
    token = logged_decision(checkpoint)
    if token is None or epoch not in (None, token.checkpoint_id):
        return ""
    return (
        f" Epoch {token.checkpoint_id} is decided, and not settled: what its sinks have prepared "
        f"may not be committed in all of them. Start the pipeline once, which settles it."
    )
