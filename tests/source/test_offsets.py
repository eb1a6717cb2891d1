"""Offsets survive Spark's log: what is read back is what was planned."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.errors import ManifestError
from tallystick.source.offsets import SourceOffsets, from_json, parse_source
from tallystick.values import TopicPartition

positions = st.dictionaries(
    st.builds(TopicPartition, st.text(min_size=1, max_size=5), st.integers(0, 40)),
    st.integers(0, 2**62),
    max_size=6,
)
ranges = st.dictionaries(
    st.builds(TopicPartition, st.text(min_size=1, max_size=5), st.integers(0, 40)),
    st.tuples(st.integers(0, 2**62), st.integers(0, 2**62)),
    max_size=3,
)
offsets = st.builds(
    SourceOffsets,
    st.text(max_size=8),
    st.text(max_size=8),
    positions=positions,
    starts=positions,
    initial=st.booleans(),
    topic_ids=st.dictionaries(st.text(min_size=1, max_size=5), st.text(max_size=22), max_size=3),
    stops=st.none() | positions,
    gone=st.dictionaries(st.text(min_size=1, max_size=5), st.integers(0, 2**62), max_size=2),
    skipped=ranges,
    tick=st.integers(0, 3),
)


@given(offsets)
def test_offsets_read_back_as_they_were(value):
    through_spark = json.loads(json.dumps(value.to_json()))

    assert from_json(through_spark) == value
    assert parse_source(json.dumps(value.to_json())) == value


@given(offsets)
def test_the_text_depends_on_the_value_only(value):
    """Verdicts compare the texts, so the order in which partitions were found must not show."""
    turned = dict(reversed(list(value.positions.items())))
    other = replace(value, positions=turned)

    assert json.dumps(other.to_json()) == json.dumps(value.to_json())


@pytest.mark.parametrize("text", ["-", "7", '"text"', "[1]", '{"offset": 3}', ""])
def test_the_offsets_of_other_sources_are_not_ours(text):
    assert parse_source(text) is None


@pytest.mark.parametrize("version", [2, 99])
def test_another_format_is_refused(version):
    with pytest.raises(ManifestError, match="another release"):
        parse_source(
            json.dumps(
                {"tallystick": version, "cluster": "c", "group": "", "ids": {}, "topics": {}}
            )
        )
