"""Which manifests go, and that the one that counts never does."""

from hypothesis import given
from hypothesis import strategies as st

from tallystick.epoch.retention import EPOCHS_RETAINED, EXPIRED_MAX, expired, retained

epochs = st.lists(st.integers(0, 200), max_size=40)


def path(epoch: int) -> str:
    return f"tallystick/{epoch:012d}-3-ab12.json"


@given(epochs, st.integers(0, 200))
def test_every_manifest_is_kept_or_goes_and_the_newest_epochs_are_kept(found, committed):
    paths = [path(epoch) for epoch in (*found, committed)]
    gone, kept = expired(paths, committed), retained(paths, committed)

    assert sorted(gone + kept) == sorted(paths)
    assert path(committed) in kept
    past = sorted({epoch for epoch in (*found, committed) if epoch <= committed})
    newest = past[-EPOCHS_RETAINED:]  # of those that ran: others were perhaps left out
    assert all((path(epoch) in kept) == (epoch >= newest[0]) for epoch in found)


def test_an_old_checkpoint_is_cleared_up_bit_by_bit():
    paths = [path(epoch) for epoch in range(EXPIRED_MAX + 100)]

    assert expired(paths, 10**6) == paths[:EXPIRED_MAX]
