"""Schedules: the same kinds of faults at the same times for every system, drawn from a seed.

A system that has not recovered from a fault when the next is due is waited for: the times are the
same as long as all recover in time, and each fault hits a job at work.
"""

import random
from dataclasses import dataclass

PAUSE_S = 15.0
BROKER_AWAY_S = 3.0
OUTAGE_S = 20.0
GAPS_S = (10.0, 16.0)
"""The time after a fault is over, or after the first output, until the next begins."""

KINDS = {
    "job": "kill -9 of all processes of the job",
    "worker": "kill -9 of one worker: Flink's TaskManager, a Python worker of Tallystick's; "
    "Kafka Streams has one process, which dies",
    "pause": f"the coordinating process (Flink's JobManager, Tallystick's driver; Kafka Streams' "
    f"only one) stands still for {PAUSE_S:.0f} s (SIGSTOP), then goes on",
    "broker": f"kill -9 of one of three brokers, which is started again {BROKER_AWAY_S:.0f} s "
    f"later",
    "before-commit": "the request that commits a transaction (EndTxn) is lost, and all processes "
    "of the job get kill -9 at that moment",
    "after-commit": "it arrives, but its reply is lost, and all processes of the job get kill -9",
}
"""Every kind of fault in the main comparison, and what happens in it."""
OUTAGE = "outage"
"""As `before-commit`, and the job is started again after `OUTAGE_S` only."""
LENGTHS_S = {"pause": PAUSE_S, "broker": BROKER_AWAY_S, OUTAGE: OUTAGE_S}


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned fault.

    Args:
        kind: One of `KINDS`, or `OUTAGE`.
        gap_s: How long after the end of the one before it begins.
        pick: 0 to 1, which of several workers or brokers it hits.
    """

    kind: str
    gap_s: float
    pick: float

    @property
    def length_s(self) -> float:
        """How long it lasts."""
        return LENGTHS_S.get(self.kind, 0.0)


def plan(seed: int, count: int, kinds: tuple[str, ...] = tuple(KINDS)) -> tuple[Fault, ...]:
    """Return a schedule: each kind about as often as any other, in an order of the seed's."""
    chance = random.Random(seed)
    chosen: list[str] = []
    while len(chosen) < count:
        chosen += chance.sample(kinds, len(kinds))
    return tuple(
        Fault(kind, round(chance.uniform(*GAPS_S), 2), round(chance.random(), 4) % 1)
        for kind in chosen[:count]
    )
