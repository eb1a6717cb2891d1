"""What a user writes, checked as it is written; nothing is started."""

import pytest

import tallystick as ts

KEYED = ts.Pipeline("p").key_by("user")


def test_a_column_of_an_aggregate_is_no_function():
    with pytest.raises(ts.OptionError, match=r'Wrap it: aggregate\(\{"n": count\(\)\}\)$') as refused:
        KEYED.process(ts.count(), output="user string, n bigint")

    assert "lambda" not in str(refused.value)
