"""A fixture that runs a program of yours under faults; pytest finds it by itself.

    def test_late_flights_survive(tallystick_chaos):
        tallystick_chaos(
            [sys.executable, "late.py"], inputs={"flights": "flights.ndjson"}, outputs=["late"]
        )

Loaded in every run of pytest: so it imports nothing before the fixture is used.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tallystick_tools.chaos.verify import Verdict


@pytest.fixture
def tallystick_chaos(tmp_path: Path) -> Callable[..., "Verdict"]:
    """Return a function that runs `tallystick chaos`, and fails if the output is not exact.

    Its arguments are those of `tallystick_tools.chaos.verify.question_of`.
    """

    def check(command: Sequence[str], **options: Any) -> "Verdict":
        from tallystick_tools.chaos.report import as_text
        from tallystick_tools.chaos.verify import question_of, verify

        verdict = verify(question_of(command, **options), tmp_path / "chaos", print)
        assert verdict.is_exact, as_text(verdict)
        return verdict

    return check
