"""The driver's shell: what it puts into Kafka reads back, and strangers' writes are refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.errors import DataLossError, ManifestError
from tallystick.job import decode_token, encode_token
from tallystick.sim.world import OTHER, OWN, World
from tallystick.sink.transaction import Token

words = st.text(max_size=20)
tokens = st.builds(Token, st.integers(-1, 2**62), words, words, words)


@given(tokens)
def test_a_token_reads_back_as_it_was(token):
    offset, metadata = encode_token(token)

    assert decode_token(offset, metadata) == token
    assert offset == token.checkpoint_id + 1, "Kafka's offsets name what comes next"


@given(st.integers(0, 2**62), st.text(max_size=30))
def test_what_is_no_token_is_refused(offset, metadata):
    """A consumer or a tool that commits under the pipeline's group must not look like a run."""
    with pytest.raises(DataLossError, match="no token"):
        decode_token(offset, metadata)


@pytest.mark.parametrize("metadata", ["null", "7", "[]", "{}", '{"tallystick": 1}', '"tallystick"'])
def test_json_that_is_no_token_is_refused(metadata):
    with pytest.raises(DataLossError, match="another name"):
        decode_token(4, metadata)


def test_a_newer_token_names_its_version():
    with pytest.raises(ManifestError, match="version 2, this release reads 1"):
        decode_token(4, json.dumps({"tallystick": 2}))


def test_a_token_fits_into_kafkas_metadata():
    """Kafka keeps 4096 bytes of metadata per offset by default."""
    token = Token(2**40, "0" * 36, "s3://bucket/" + "folder/" * 40, "tallystick/" + "x" * 60)

    assert len(encode_token(token)[1].encode()) < 4096


def test_positions_on_the_sinks_cluster_are_committed_with_the_rows_and_no_others():
    """Those of another cluster cannot be in the transaction; `spark.group_offsets` shows them."""
    world = World(seed=0, kinds=())
    world.sources = (OWN, OTHER)
    partitions = (*OWN.partitions, *OTHER.partitions)
    world.available = dict.fromkeys(partitions, 5)
    world.checkpoint.base = dict.fromkeys(partitions, 0)
    try:
        world.run_quietly()
    finally:
        world.close()
    world.check_positions()

    assert world.checker.violations == []
    shown = {place: at for place, at in world.sink.offsets.items() if place[0] == OWN.group}
    assert shown == {(OWN.group, partition): (5, "") for partition in OWN.partitions}
    assert OTHER.group not in {group for group, _ in world.sink.offsets}
