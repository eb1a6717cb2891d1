"""The table of `checkpoint/verdict.py`, row by row and without gaps."""

import itertools
import json
from dataclasses import replace

import pytest

from tallystick.epoch.facts import Base, CommittedEpoch, Request
from tallystick.epoch.manifest import CHECKPOINT, KAFKA, Identity, Manifest, Origin
from tallystick.epoch.tokens import Token
from tallystick.epoch.verdict import AlreadyCommitted, Open, Refusal, Run, judge, look_back
from tallystick.errors import DataLossError, ManifestError, OtherOffsetsError
from tallystick.source.offsets import SourceOffsets
from tallystick.state.catalog import StepState
from tallystick.values import Producer, TopicPartition

N = 5
REQUEST = Request(N, ("ends",), may_skip=True)
OURS = Identity("pipeline", "ours", "s3://checkpoint")
ACCEPTING = Identity("pipeline", "ours", "s3://checkpoint", frozenset({"new-lineage-after-theirs"}))


def manifest(epoch: int, sources: tuple[str, ...] = ("ends",)) -> Manifest:
    return Manifest(epoch, "pipeline", "ours", sources, (), Producer("t", 1, 1))


def judged(
    token: Token | None, in_storage: Manifest | None, exists: bool, identity: Identity = OURS
):
    verdict = judge(REQUEST, CommittedEpoch(token, in_storage, exists), identity)
    return type(verdict.error if isinstance(verdict, Refusal) else verdict)


def expected(lineage: str, epoch: int, path: str, exists: bool, accepts: bool) -> type:
    """The table, written down a second time."""
    if lineage == "theirs":
        has_committed = epoch >= 0 or path
        return DataLossError if has_committed and not accepts else Open
    if epoch > N or (epoch == N and not path):
        return DataLossError
    if path and not exists:
        return ManifestError
    return Run if epoch < N else AlreadyCommitted


@pytest.mark.parametrize(
    ("lineage", "epoch", "path", "exists", "accepts"),
    list(
        itertools.product(
            ("ours", "theirs"), range(-1, N + 3), ("", "path"), (False, True), (False, True)
        )
    ),
)
def test_every_token_has_its_verdict(lineage, epoch, path, exists, accepts):
    token = Token(epoch, lineage, "s3://checkpoint", path)
    ours = lineage == "ours"
    in_storage = manifest(epoch) if ours and exists and path and epoch >= 0 else None
    verdict = judged(token, in_storage, bool(in_storage), ACCEPTING if accepts else OURS)

    assert verdict is expected(lineage, epoch, path, bool(in_storage), accepts)


@pytest.mark.parametrize(
    ("decided_by", "words"),
    [
        (KAFKA, "Kafka's answer was set back"),
        (CHECKPOINT, "the log (tallystick/decisions) was set"),
    ],
)
def test_a_token_that_was_set_back_is_not_taken_for_epochs_that_were_left_out(decided_by, words):
    refused = on_top_of(N - 3, decided_by=decided_by, begun=(N - 2, N - 1))

    assert isinstance(refused, Refusal)
    assert words in str(refused.error)
    assert "may be missing" in str(refused.error)


def test_no_token_and_no_manifest_is_a_first_run():
    assert judged(None, None, exists=False) is Open


@pytest.mark.parametrize("token", [None, Token(2, "theirs", "s3://older", "p")])
def test_files_of_state_that_no_manifest_names_are_not_forgotten(token):
    """What a restore left that was killed: a first run there would begin with empty state."""
    committed = CommittedEpoch(token, None, manifest_exists=False, has_state=True)
    verdict = judge(REQUEST, committed, ACCEPTING)

    assert isinstance(verdict, Refusal)
    assert "no manifest that names them" in str(verdict.error)


def test_no_token_but_manifests_is_a_loss():
    """Kafka forgets offsets after seven days: taking that for a first run would repeat all."""
    assert judged(None, None, exists=True) is DataLossError


def on_top_of(epoch: int, request: Request = REQUEST, word: str = "", **changes):
    """The verdict where Kafka has committed this epoch last."""
    token = Token(epoch, "ours", "s3://checkpoint", "path")
    committed = replace(CommittedEpoch(token, manifest(epoch), True, logged=("ends",)), **changes)
    return judge(request, committed, replace(OURS, accepted=frozenset({word})))


@pytest.mark.parametrize("epoch", [N, N - 1, N - 3])
def test_no_epoch_follows_one_of_which_the_caller_has_other_offsets_than_the_manifest(epoch):
    refused = on_top_of(epoch, manifest=manifest(epoch, ("the truth",)))

    assert isinstance(refused, Refusal)
    assert isinstance(refused.error, OtherOffsetsError)
    assert (refused.error.checkpoint_id, refused.error.sources) == (epoch, ("the truth",))
    assert refused.error.logged == ("ends",)


def test_a_log_that_spark_has_shortened_is_not_compared():
    assert on_top_of(N - 3, logged=None) == Run()


def test_epochs_that_the_users_function_left_out_stop_nothing():
    assert on_top_of(N - 3) == Run()


@pytest.mark.parametrize("may_skip", [False, True])
def test_an_epoch_that_was_begun_was_not_left_out_and_a_pipeline_leaves_none_out(may_skip):
    """Its manifest says so, or the note of a call that failed: committed or not, it had rows."""
    word = f"without-epochs-{N - 2}-to-{N - 1}"
    request = replace(REQUEST, may_skip=may_skip)
    begun = (N - 1,) if may_skip else ()
    refused = on_top_of(N - 3, request, begun=begun)

    assert isinstance(refused, Refusal)
    assert type(refused.error) is DataLossError
    assert (f"accept={word!r}" in str(refused.error)) == may_skip
    assert (on_top_of(N - 3, request, word, begun=begun) == Run()) == may_skip


@pytest.mark.parametrize("epoch", [N, N - 1])
def test_an_epoch_that_lacks_the_rows_of_a_second_call_needs_a_decision(epoch):
    word = f"partial-epoch-{epoch}"
    refused = on_top_of(epoch, is_partial=True)

    assert isinstance(refused, Refusal)
    assert type(refused.error) is DataLossError
    assert f"accept={word!r}" in str(refused.error)
    assert not isinstance(on_top_of(epoch, word=word, is_partial=True), Refusal)


@pytest.mark.parametrize(
    ("token", "exists", "words"),
    [
        (None, True, "offsets.retention.minutes"),
        (Token(2, "theirs", "s3://older", "p"), False, "accept='new-lineage-after-theirs'"),
        (Token(7, "ours", "s3://checkpoint", "p"), True, "set back"),
        (Token(N, "ours", "s3://checkpoint", "tallystick/x.json"), True, "tallystick/x.json"),
    ],
)
def test_a_refusal_says_what_to_do(token, exists, words):
    verdict = judge(REQUEST, CommittedEpoch(token, None, exists), OURS)

    assert isinstance(verdict, Refusal)
    assert words in str(verdict.error)
    assert "pipeline 'pipeline'" in str(verdict.error)


@pytest.mark.parametrize(
    ("token", "exists", "words"),
    [
        (None, True, "its files were removed, or not copied"),
        (Token(7, "ours", "s3://checkpoint", "p"), True, "its log of decisions has epoch 7 last"),
        (Token(N, "ours", "s3://checkpoint", "p"), True, "the checkpoint's log decided epoch 5"),
    ],
)
def test_where_the_log_decides_a_refusal_does_not_speak_of_kafka_alone(token, exists, words):
    verdict = judge(REQUEST, CommittedEpoch(token, None, exists, decided_by=CHECKPOINT), OURS)

    assert isinstance(verdict, Refusal)
    assert words in str(verdict.error)
    assert "Kafka committed" not in str(verdict.error)
    assert "Raise offsets.retention.minutes" not in str(verdict.error)


@pytest.mark.parametrize(
    ("epoch", "path", "is_loop", "is_empty"),
    [
        (0, "tallystick/0-1-seed1.json", True, True),
        (0, "tallystick/0-1-seed1.json", False, False),  # a restored epoch of a query of Spark's
        (0, "tallystick/0-1-a.json", True, False),
        (1, "tallystick/1-1-seed1.json", True, False),
        (-1, "", False, True),
    ],
)
def test_a_lineage_that_committed_nothing_leaves_its_name_without_a_word(
    epoch: int, path: str, is_loop: bool, is_empty: bool
) -> None:
    """As after a first run that failed, whose checkpoint was removed: nothing can repeat."""
    token = Token(epoch, "theirs", "s3://checkpoint", path)
    request = Request(1, ("ends",), may_skip=True, start=("begins",) if is_loop else ())
    verdict = judge(request, CommittedEpoch(token, None, manifest_exists=False), OURS)
    assert isinstance(verdict, Open if is_empty else Refusal)
    if isinstance(verdict, Refusal):
        assert "s3://checkpoint was removed or emptied: epochs up to" in str(verdict.error)
        assert "accept='new-lineage-after-theirs'" in str(verdict.error)
    if is_loop:
        looked = look_back(CommittedEpoch(token, None, manifest_exists=False), OURS)
        assert (looked is None) is is_empty, "a start looks before it has planned"
    earlier = CommittedEpoch(token, None, manifest_exists=True, bases=(OWN,))
    assert isinstance(judge(request, earlier, OURS), Refusal), "this one has lost the name"


# A lineage that Kafka's token is not of begins with a base: a seed, or its own manifest.
POSITIONS = json.dumps(SourceOffsets("c", "g", {TopicPartition("in", 0): 70}).to_json())
ORIGIN = Origin("pipeline", "theirs", "s3://older", "tallystick/4-1-a.json", "s3://savepoint")
SEED = Base("tallystick/4-1-seed1.json", replace(manifest(N - 1, (POSITIONS,)), origin=ORIGIN))
FORK = Base(SEED.path, replace(SEED.manifest, origin=replace(ORIGIN, pipeline="the original")))
OWN = Base("tallystick/4-1-b.json", manifest(N - 1))
STATE = (StepState("step", 128, 2, "[]", 1),)
WITH_STATE = Base("tallystick/4-1-c.json", replace(OWN.manifest, state=STATE))
AT_THE_SAVEPOINT = Token(N - 1, "theirs", "s3://older", ORIGIN.manifest_path)
BEYOND = replace(AT_THE_SAVEPOINT, checkpoint_id=N + 3, manifest_path="tallystick/8-1-d.json")
BEHIND = replace(BEYOND, checkpoint_id=N - 3)
ANOTHER_ATTEMPT = replace(AT_THE_SAVEPOINT, manifest_path="tallystick/4-0-e.json")
STRANGE = Token(N - 1, "a third one", "s3://third", ORIGIN.manifest_path)
OLD_WORD, NO_TOKEN_WORD = "new-lineage-after-theirs", "restored-at-epoch-4-without-token"


def begun(token: Token | None, *bases: Base, ran: bool = False, seeded: bool = False, word=""):
    """The verdict for a checkpoint with these manifests of the epoch before."""
    is_seeded = seeded or any(base.manifest.origin for base in bases)
    exists = ran or any(base.manifest.origin is None for base in bases)
    committed = CommittedEpoch(token, None, exists, is_seeded, bases)
    return judge(REQUEST, committed, replace(OURS, accepted=frozenset({word})))


def test_a_restored_savepoint_goes_on_where_the_pipeline_stands_without_being_asked():
    assert begun(AT_THE_SAVEPOINT, SEED) == Open(SEED.path)


def test_a_fork_under_a_new_name_goes_on_without_being_asked():
    assert begun(None, FORK) == Open(FORK.path)


@pytest.mark.parametrize("token", [BEYOND, BEHIND, ANOTHER_ATTEMPT, STRANGE])
def test_a_savepoint_older_than_the_output_needs_a_decision_that_names_the_consequence(token):
    word = f"new-lineage-after-{token.lineage}"
    refused = begun(token, SEED)

    assert isinstance(refused, Refusal)
    assert type(refused.error) is DataLossError
    for part in ("in-0 from offset 70", "output from epoch 5 on", f"accept={word!r}"):
        assert part in str(refused.error)
    assert begun(token, SEED, word=word) == Open(SEED.path)
    assert isinstance(begun(token, SEED, word="new-lineage-after-some"), Refusal)


def test_a_savepoint_of_a_seed_is_asked_about_under_every_name():
    """It has the name of the original, not of the fork that it was taken of."""
    seed = replace(FORK.manifest, base_path=SEED.path)
    refused = begun(None, Base(FORK.path, seed))

    assert isinstance(refused, Refusal)
    assert "had not run yet, perhaps this one" in str(refused.error)
    assert f"accept={NO_TOKEN_WORD!r}" in str(refused.error)
    assert begun(None, Base(FORK.path, seed), word=NO_TOKEN_WORD) == Open(FORK.path)


def test_a_savepoint_of_a_seed_goes_on_where_the_pipeline_stands_without_being_asked():
    seed = replace(SEED.manifest, base_path="tallystick/4-1-seed2.json")
    assert begun(AT_THE_SAVEPOINT, Base(SEED.path, seed)) == Open(SEED.path)
    assert isinstance(begun(BEYOND, Base(SEED.path, seed)), Refusal)


def test_a_savepoint_of_this_very_name_with_no_token_needs_a_decision():
    """Its manifest was committed under this name: so Kafka knew, and forgot."""
    refused = begun(None, SEED)

    assert isinstance(refused, Refusal)
    assert f"accept={NO_TOKEN_WORD!r}" in str(refused.error)
    assert begun(None, SEED, word=NO_TOKEN_WORD) == Open(SEED.path)


@pytest.mark.parametrize("decided_by", [KAFKA, CHECKPOINT])
def test_a_savepoint_of_a_query_without_a_name_is_no_fork_for_its_new_id(decided_by):
    """Spark calls it by an id, which a restore draws anew: the original may have gone on."""
    origin = replace(ORIGIN, pipeline="theirs")
    seed = Base(SEED.path, replace(SEED.manifest, origin=origin))
    committed = CommittedEpoch(None, None, False, True, (seed,), decided_by=decided_by)
    unnamed = replace(OURS, pipeline=OURS.lineage)
    refused = judge(REQUEST, committed, unnamed)

    assert isinstance(refused, Refusal)
    assert "query theirs, which had no name" in str(refused.error)
    assert (".queryName('theirs')" in str(refused.error)) == (decided_by == KAFKA)
    accepting = replace(unnamed, accepted=frozenset({NO_TOKEN_WORD}))
    assert judge(REQUEST, committed, accepting) == Open(SEED.path)
    named = replace(OURS, pipeline="a name of its own")
    assert judge(REQUEST, committed, named) == Open(SEED.path), "a fork, as is documented"


def test_in_a_log_of_its_own_a_restored_savepoint_always_needs_a_decision_and_is_told_why():
    committed = CommittedEpoch(None, None, False, True, (SEED,), decided_by=CHECKPOINT)
    refused = judge(REQUEST, committed, OURS)

    assert isinstance(refused, Refusal)
    assert "nothing tells whether the original went on" in str(refused.error)
    assert f"accept={NO_TOKEN_WORD!r}" in str(refused.error)
    accepting = replace(OURS, accepted=frozenset({NO_TOKEN_WORD}))
    assert judge(REQUEST, committed, accepting) == Open(SEED.path)


@pytest.mark.parametrize("token", [None, AT_THE_SAVEPOINT])
@pytest.mark.parametrize("seed", [SEED, FORK])
def test_a_seed_behind_which_epochs_ran_begins_nothing_by_itself(token, seed):
    assert isinstance(begun(token, seed, ran=True, word=NO_TOKEN_WORD), Refusal)


def test_a_checkpoint_that_takes_its_name_back_goes_on_with_its_own_state():
    assert begun(BEYOND, WITH_STATE, word=OLD_WORD) == Open(WITH_STATE.path)
    assert begun(BEYOND, OWN, OWN, word=OLD_WORD) == Open(), "two attempts, neither has state"


@pytest.mark.parametrize(
    ("bases", "options"),
    [
        ((WITH_STATE, OWN), {}),
        ((), {"ran": True}),
        ((), {"seeded": True}),
        ((replace(SEED, manifest=replace(SEED.manifest, lineage="other")),), {}),
    ],
    ids=["two attempts", "only other epochs", "a seed of another epoch", "half restored"],
)
def test_what_state_to_go_on_from_is_never_guessed(bases, options):
    refused = begun(BEYOND, *bases, word=OLD_WORD, **options)

    assert isinstance(refused, Refusal)
    assert type(refused.error) is ManifestError


def test_a_base_before_epochs_that_were_left_out_has_no_state():
    """Those of a user's function have none; what a pipeline goes on from is the epoch before."""
    base = replace(WITH_STATE, manifest=replace(WITH_STATE.manifest, checkpoint_id=N - 3))

    assert isinstance(begun(BEYOND, base, word=OLD_WORD), Refusal)
    bare = replace(base, manifest=replace(base.manifest, state=()))
    assert begun(BEYOND, bare, word=OLD_WORD) == Open(bare.path)


OPENED = CommittedEpoch(Token(-1, "ours", "s3://checkpoint", ""), None, manifest_exists=False)


def test_a_loop_does_not_guess_where_a_query_of_sparks_began() -> None:
    """`latest` would be another place now, and at each start again."""
    refused = look_back(OPENED, OURS)

    assert isinstance(refused, Refusal)
    assert "where its first one begins only Spark's log says" in str(refused.error)


@pytest.mark.parametrize("is_settled", [False, True])
def test_a_loop_that_takes_its_name_back_goes_on_behind_what_it_knows_to_be_committed(is_settled):
    base = Base("tallystick/000000000004-1-ab.json", manifest(4))
    theirs = Token(7, "theirs", "s3://other", "p")
    committed = CommittedEpoch(theirs, None, True, bases=(base,), is_settled=is_settled)

    judged = look_back(committed, ACCEPTING)

    assert (judged is None) == is_settled
    if not is_settled:
        assert isinstance(judged, Refusal)
        assert "no note of a run that ended in order" in str(judged.error)
