"""What a test that waits in vain says."""

import pytest

from tests.waiting import wait_for, wait_until


def test_it_says_what_was_waited_for_and_what_there_is_by_then():
    looks = []
    with pytest.raises(
        AssertionError, match=r"^after 0\.01 s: no epoch ended, after 2 looks or more"
    ):
        wait_until(
            lambda: looks.append(1),
            lambda: "no epoch ended, after 2 looks or more" if len(looks) > 1 else "too early",
            timeout_s=0.01,
            poll_s=0.001,
        )


def test_it_says_the_last_answer_and_the_expected_one():
    answers = iter([1, 2, *[3] * 10_000])
    with pytest.raises(AssertionError, match=r"the number of rows: expected 4, found 3$"):
        wait_for(lambda: next(answers), 4, "the number of rows", timeout_s=0.02, poll_s=0.001)


def test_what_holds_is_not_described():
    wait_until(lambda: True, lambda: pytest.fail("it held"))
    wait_for(lambda: [], [], "rows")


def test_an_assertion_in_the_condition_ends_the_wait():
    with pytest.raises(ZeroDivisionError):
        wait_until(lambda: 1 / 0, "a division")
