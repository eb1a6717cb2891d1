"""A short campaign, so that the long ones can be trusted to run."""

from pathlib import Path

import pytest

from tallystick.testing import EmbeddedKafka
from tests.failover.chaos import KILLS_MIN, LAST_EPOCHS, run_campaign


@pytest.mark.broker
@pytest.mark.chaos
def test_a_short_campaign_ends_exact(cluster: EmbeddedKafka, tmp_path: Path) -> None:
    verdict = run_campaign(cluster, seconds=10.0, seed=1, folder=tmp_path)

    assert verdict.problems == []
    assert verdict.is_exact, (tmp_path / "drivers.log").read_text()[-4_000:]
    assert verdict.broker_kills + verdict.broker_pauses > 0
    assert verdict.driver_kills >= KILLS_MIN
    assert verdict.epochs > LAST_EPOCHS
    assert sum(verdict.zombie_answers.values()) > 0, "tasks outlive their driver, and write on"
