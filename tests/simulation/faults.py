"""What can go wrong in the simulated world, how likely, and whether it does now.

A kind of fault is worth having only if some deliberately broken core fails because of it: `justify`
finds one for each, and a test checks it.
"""

import random
from collections import Counter
from collections.abc import Collection, Iterable
from enum import Enum


class Fault(Enum):
    """A kind of fault; the value is what a report calls it."""

    __hash__ = object.__hash__  # a world asks at every step, and an Enum's own is Python code

    # The driver's process, at any call that it makes.
    CRASH_BEFORE = "driver dies before a call takes effect"
    CRASH_AFTER = "driver dies after a call took effect"
    CRASH_LATE = "driver dies, its last request arrives later"
    TAKEOVER = "a second driver starts while the first lives"
    # Kafka, as a driver sees it.
    REFUSED = "Kafka gives no answer and did nothing"
    LOST_REPLY = "Kafka acted, the reply is lost"
    LATE_EFFECT = "Kafka acts after the driver has given up waiting"
    OUTAGE = "Kafka is away for longer than any deadline"
    TRANSACTION_TIMEOUT = "the transaction times out while it is open"
    COUNT_HIDDEN = "Kafka may not be asked what it holds"
    BATCH_REFUSED = "a topic takes smaller batches than before, and Kafka refuses one as too large"
    # The checkpoint storage.
    DISK_FULL = "a write is refused"
    LOST_PUT = "a write is durable, and reported as failed"
    LATE_PUT = "a write becomes durable after it was given up"
    # Spark's tasks.
    TASK_KILLED = "a task dies, Spark starts its next attempt"
    EXECUTOR_LOST = "an executor is lost, Spark runs the stage again"
    RACING_ATTEMPT = "a second attempt of a task writes too"
    STRAY_ELSEWHERE = "an attempt writes where the others have no rows"
    EMPTY_EPOCH = "an epoch has no rows"
    # The user's own function around a sink, and the disk that Spark's log is on.
    LEFT_OUT = "the user's function does not call the sink for an epoch"
    CALLED_TWICE = "the user's function calls the sink twice for an epoch"
    CAUGHT = "the user's function catches what the sink raises, and Spark logs the epoch"
    POWER_CUT = "what was not synced is gone or torn when the driver dies"
    # Tasks with keyed state, and the hosts that keep copies of it.
    RESCALED = "a run has another parallelism than the one before"
    PROGRAM_CHANGED = "a run's program gives its state a time to live, or takes it away"
    TASK_MOVED = "a task runs on another host, which has an old copy of its state or none"
    COPY_LOST = "a host loses its copies of state"
    TASK_AGAIN = "a task runs again after some of its rows were used"
    WHIM = "the user's function gives something else when it runs again"
    REWRITTEN = "state is written anew: snapshots, merged changelogs"
    COLLECTED = "files of state that nothing needs are removed"
    # Resident tasks: the members of a gang.
    MEMBER_LOST = "a resident task is lost, and its gang is given up"
    MEMBER_HUNG = "a resident task hangs for so long that its gang is given up, then it goes on"
    MEMBERS_CUT = "two resident tasks lose their connection"
    READ_FAILED = "a resident task fails, and the others stop"
    GANG_LATE = "not all resident tasks come up"
    ORPHANED = "a resident task goes on for a while after the end of its gang, or of its driver"
    REPORT_LATE = "what an orphan says reaches the gang that came after its own"
    FRAMES_LATE = "frames of an epoch that was given up arrive in its next run"
    RESCALED_LIVE = "a query is rescaled between two epochs"
    # The clock of a driver's machine.
    CLOCK_JUMPED = "the clock of a driver's machine is a day ahead, or back, for one epoch"
    # Other sinks, and the log of decisions where none of them is Kafka's.
    SINK_REFUSED = "another system gives no answer and did nothing"
    SINK_LOST_REPLY = "another system acted, the reply is lost"
    SINK_LATE = "another system acts after the driver has given up waiting"
    SINK_AWAY = "another system is away for longer than any deadline"
    SINK_TIMEOUT = "another system aborts what waits for too long"
    SINK_GONE = "a sink is taken out of the pipeline for a run"
    SLOTS_REMOVED = "old slots of the log of decisions are removed"
    # What is done to the checkpoint, or to Kafka, while no driver runs.
    TOKEN_EXPIRED = "Kafka forgot the pipeline's token"
    TOKEN_OVERWRITTEN = "a tool committed offsets in the token group"
    CHECKPOINT_SET_BACK = "an old copy of the checkpoint was put back"
    OFFSET_LOG_LOST = "the newest entries of Spark's logs are lost"
    OFFSET_LOG_REPLACED = "the newest entry of Spark's log is replaced by another"
    TOKEN_SET_BACK = "Kafka has an older token than the newest that it committed"
    MANIFEST_DELETED = "the manifest that Kafka names is deleted"
    MANIFEST_CORRUPTED = "the manifest that Kafka names is damaged"
    OTHER_CHECKPOINT = "the pipeline is started on another checkpoint"
    STATE_FILE_DELETED = "a file of state is deleted"
    STATE_FILE_DAMAGED = "a file of state is damaged"
    OLD_SAVEPOINT = "the pipeline is restored from an older savepoint"
    SITE_SET_BACK = "Kafka and the checkpoint were set back, the hosts were not"
    DECISION_DAMAGED = "the newest slot of the log of decisions is damaged"
    OTHER_DECIDER = "the pipeline is started with another decider"
    OTHER_MEANING = "the pipeline is started with a function that counts something else"


SABOTAGE = tuple(Fault)[list(Fault).index(Fault.TOKEN_EXPIRED) :]
"""Done while no driver runs. Most of it no program can make good: the job must stop and say so."""

RECENT = (Fault.BATCH_REFUSED, Fault.OTHER_MEANING, Fault.PROGRAM_CHANGED)
"""Not drawn with the others, but in worlds of later seeds: those before live as they did."""
RECENT_FROM = 200
RECENT_SHARE = 0.3

DRIVER_FAULTS = (Fault.CRASH_BEFORE, Fault.CRASH_AFTER, Fault.CRASH_LATE)
KAFKA_FAULTS = (Fault.OUTAGE, Fault.REFUSED, Fault.LOST_REPLY, Fault.LATE_EFFECT)
PUT_FAULTS = (Fault.DISK_FULL, Fault.LOST_PUT, Fault.LATE_PUT)
SINK_FAULTS = (Fault.SINK_REFUSED, Fault.SINK_LOST_REPLY, Fault.SINK_LATE, Fault.SINK_AWAY)
EFFECT = {Fault.CRASH_AFTER, Fault.LOST_REPLY, Fault.LOST_PUT, Fault.SINK_LOST_REPLY}
"""With these a call takes effect, and its sender does not hear of it."""
LATE = {Fault.CRASH_LATE, Fault.LATE_EFFECT, Fault.LATE_PUT, Fault.SINK_LATE}
"""With these it does so later."""

RATIOS = {
    Fault.CRASH_BEFORE: 0.02,
    Fault.CRASH_AFTER: 0.02,
    Fault.CRASH_LATE: 0.02,
    Fault.TAKEOVER: 0.01,
    Fault.REFUSED: 0.03,
    Fault.LOST_REPLY: 0.03,
    Fault.LATE_EFFECT: 0.03,
    Fault.OUTAGE: 0.01,
    Fault.TRANSACTION_TIMEOUT: 0.015,
    Fault.COUNT_HIDDEN: 1.0,
    Fault.BATCH_REFUSED: 0.1,
    Fault.DISK_FULL: 0.1,
    Fault.LOST_PUT: 0.1,
    Fault.LATE_PUT: 0.1,
    Fault.TASK_KILLED: 0.04,
    Fault.EXECUTOR_LOST: 0.04,
    Fault.RACING_ATTEMPT: 0.1,
    Fault.STRAY_ELSEWHERE: 0.1,
    Fault.EMPTY_EPOCH: 0.05,
    Fault.LEFT_OUT: 0.1,
    Fault.CALLED_TWICE: 0.1,
    Fault.CAUGHT: 0.3,
    Fault.POWER_CUT: 0.3,
    Fault.RESCALED: 0.3,
    Fault.PROGRAM_CHANGED: 0.5,
    Fault.TASK_MOVED: 0.15,
    Fault.COPY_LOST: 0.01,
    Fault.TASK_AGAIN: 0.05,
    Fault.WHIM: 0.1,
    Fault.REWRITTEN: 0.25,
    Fault.COLLECTED: 0.5,
    Fault.MEMBER_LOST: 0.01,
    Fault.MEMBER_HUNG: 0.01,
    Fault.MEMBERS_CUT: 0.005,
    Fault.READ_FAILED: 0.05,
    Fault.GANG_LATE: 0.1,
    Fault.ORPHANED: 0.8,
    Fault.REPORT_LATE: 0.8,
    Fault.FRAMES_LATE: 0.1,
    Fault.RESCALED_LIVE: 0.2,
    Fault.CLOCK_JUMPED: 0.3,
    Fault.SINK_REFUSED: 0.04,
    Fault.SINK_LOST_REPLY: 0.04,
    Fault.SINK_LATE: 0.04,
    Fault.SINK_AWAY: 0.02,
    Fault.SINK_TIMEOUT: 0.02,
    Fault.SINK_GONE: 0.2,
    Fault.SLOTS_REMOVED: 0.5,
}
"""How often a kind strikes where it may, at intensity 1."""

INTENSITIES = (0.5, 1.0, 1.0, 2.0, 4.0)
SABOTAGE_SHARE = 0.3
"""How many of the seeds end with an act of sabotage."""


class FaultPlan:
    """Which kinds of faults one world knows, and how often; everything follows from the dice.

    Args:
        dice: the world's only source of chance.
        kinds: exactly these kinds; None draws some.
        seed: of the world, for the recent kinds.
    """

    def __init__(
        self, dice: random.Random, kinds: Collection[Fault] | None = None, seed: int = 0
    ) -> None:
        self._dice = dice
        self.intensity = dice.choice(INTENSITIES) if kinds is None else 2.0
        drawn = draw_kinds(dice) | draw_recent_kinds(seed) if kinds is None else kinds
        self.kinds = frozenset(drawn)
        self.struck: Counter[Fault] = Counter()
        self.active = True

    def strikes(self, fault: Fault) -> bool:
        """Whether this kind of fault happens here and now; counted if so."""
        return self.pick((fault,)) is not None

    def pick(self, faults: Iterable[Fault]) -> Fault | None:
        """At most one of several kinds of faults that could happen here and now."""
        if not self.active:
            return None
        chances = [(fault, RATIOS[fault]) for fault in faults if fault in self.kinds]
        if not chances:
            return None
        remaining = self._dice.random()
        for fault, ratio in chances:
            remaining -= min(1.0, ratio * self.intensity)
            if remaining < 0:
                self.struck[fault] += 1
                return fault
        return None

    def pick_sabotage(self) -> Fault | None:
        """The one act of sabotage of this world, if it has any."""
        kinds = [fault for fault in SABOTAGE if fault in self.kinds]
        return self._dice.choice(kinds) if kinds else None


def draw_kinds(dice: random.Random) -> frozenset[Fault]:
    """A mixture: often a few kinds, so that each is seen alone; sometimes nearly all of them."""
    share = dice.choice((0.15, 0.3, 0.6, 1.0))
    kinds = {fault for fault in RATIOS if fault not in RECENT and dice.random() < share}
    if dice.random() < SABOTAGE_SHARE:
        kinds.add(dice.choice([fault for fault in SABOTAGE if fault not in RECENT]))
    return frozenset(kinds)


def draw_recent_kinds(seed: int) -> frozenset[Fault]:
    """Some of the recent kinds for the world of a seed, by dice of their own."""
    if seed < RECENT_FROM:
        return frozenset()
    dice = random.Random(f"recent kinds of {seed}")
    return frozenset(fault for fault in RECENT if dice.random() < RECENT_SHARE)
