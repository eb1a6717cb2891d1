"""The table of `checkpoint/verdict.py`, row by row and without gaps."""

import itertools

import pytest

from tallystick.checkpoint.manifest import Manifest
from tallystick.checkpoint.verdict import (
    Committed,
    Done,
    Identity,
    Open,
    Refused,
    Request,
    Run,
    judge,
)
from tallystick.errors import DataLossError, ManifestError
from tallystick.sink.transaction import Producer, Token

N = 5
REQUEST = Request(N, ("ends",))
OURS = Identity("pipeline", "ours", "s3://checkpoint")
ACCEPTING = Identity("pipeline", "ours", "s3://checkpoint", frozenset({"new-lineage-after-theirs"}))


def manifest(epoch: int, sources: tuple[str, ...] = ("ends",)) -> Manifest:
    return Manifest(epoch, "pipeline", "ours", sources, (), Producer("t", 1, 1))


def judged(token: Token | None, found: Manifest | None, exists: bool, identity: Identity = OURS):
    verdict = judge(REQUEST, Committed(token, found, exists), identity)
    return type(verdict.error if isinstance(verdict, Refused) else verdict)


def expected(lineage: str, epoch: int, path: str, found: bool, accepts: bool) -> type:
    """The table, written down a second time."""
    if lineage == "theirs":
        return Open if accepts else DataLossError
    if epoch not in (N - 1, N) or (epoch == N and not path):
        return DataLossError
    if path and not found:
        return ManifestError
    return Run if epoch == N - 1 else Done


@pytest.mark.parametrize(
    ("lineage", "epoch", "path", "found", "accepts"),
    list(
        itertools.product(
            ("ours", "theirs"), range(-1, N + 3), ("", "path"), (False, True), (False, True)
        )
    ),
)
def test_every_token_has_its_verdict(lineage, epoch, path, found, accepts):
    token = Token(epoch, lineage, "s3://checkpoint", path)
    held = manifest(epoch) if found and path and epoch >= 0 else None
    verdict = judged(token, held, bool(held), ACCEPTING if accepts else OURS)

    assert verdict is expected(lineage, epoch, path, bool(held), accepts)


def test_no_token_and_no_manifest_is_a_first_run():
    assert judged(None, None, exists=False) is Open


def test_no_token_but_manifests_is_a_loss():
    """Kafka forgets offsets after seven days: taking that for a first run would repeat all."""
    assert judged(None, None, exists=True) is DataLossError


def test_a_finished_epoch_with_other_offsets_is_refused():
    token = Token(N, "ours", "s3://checkpoint", "path")

    assert judged(token, manifest(N, ("other ends",)), exists=True) is ManifestError


@pytest.mark.parametrize(
    ("token", "exists", "words"),
    [
        (None, True, "offsets.retention.minutes"),
        (Token(2, "theirs", "s3://older", "p"), False, "accept='new-lineage-after-theirs'"),
        (Token(7, "ours", "s3://checkpoint", "p"), True, "set back"),
        (Token(2, "ours", "s3://checkpoint", "p"), True, "may be missing"),
        (Token(N, "ours", "s3://checkpoint", "tallystick/x.json"), True, "tallystick/x.json"),
    ],
)
def test_a_refusal_says_what_to_do(token, exists, words):
    verdict = judge(REQUEST, Committed(token, None, exists), OURS)

    assert isinstance(verdict, Refused)
    assert words in str(verdict.error)
    assert "pipeline 'pipeline'" in str(verdict.error)
