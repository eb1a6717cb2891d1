"""What a user writes, checked as it is written; nothing is started."""

import pytest

import tallystick as ts

KEYED = ts.Pipeline("p").key_by("user")


def test_a_column_of_an_aggregate_is_no_function():
    with pytest.raises(ts.OptionError) as refused:
        KEYED.process(ts.count(), output="user string, n bigint")

    assert 'Wrap it: ts.aggregate({"n": ts.count()})' in str(refused.value)
    assert "lambda" not in str(refused.value)
