"""The enumerator against a cluster that changes in every order.

Whatever happens, each record of each topic that is subscribed is read exactly once, and what is
lost is lost by the policy's word.
"""

import json
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tallystick.source.enumerator import Enumerator
from tallystick.source.offsets import SourceOffsets, from_json
from tallystick.source.splits import plan_splits
from tallystick.source.subscription import LENIENT, FoundTopic, TopicPattern
from tallystick.values import TopicPartition

TOPICS = ("flights-a", "flights-b", "flights-c", "other")
topics = st.sampled_from(TOPICS)


class Topic:
    """One topic: its id, and per partition the first offset that is left and the end."""

    def __init__(self, topic_id: str, partition_count: int) -> None:
        self.topic_id = topic_id
        self.logs = [[0, 0] for _ in range(partition_count)]


class WorldMachine(RuleBasedStateMachine):
    """Spark's loop over the enumerator, crashes included, in a world that does what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster: dict[str, Topic] = {}
        self.created = 0
        self.log: list[str] = []  # Spark's offset log
        self.committed = 0  # how many of its entries are committed
        self.read: Counter[tuple[str, int, int]] = Counter()
        self.skippable: set[tuple[str, int, int]] = set()  # what the world took away
        self.start_process()

    def start_process(self) -> None:
        self.enumerator = Enumerator(TopicPattern("flights-.*"), LENIENT)
        self.has_discovered = False

    @initialize(
        partition_count=st.integers(0, 3), earlier=st.integers(0, 9), added=st.integers(0, 2)
    )
    def first_plan(self, partition_count, earlier, added):
        """A new query at `latest`: what was there before is not its business.

        It may die once its first plan is logged, and find partitions that were added meanwhile.
        """
        if partition_count:
            self.create("flights-a", partition_count)
            self.cluster["flights-a"].logs[0][1] = earlier
        self.initial = self.first()
        for name, topic in self.cluster.items():
            for index, (_, end) in enumerate(topic.logs):
                self.skippable |= {(topic.topic_id, index, offset) for offset in range(end)}
                assert self.initial.positions[TopicPartition(name, index)] == end
        if partition_count and added:
            self.plan(None)
            self.cluster["flights-a"].logs += [[0, 5] for _ in range(added)]
            self.crash()

    def first(self):
        """What `StreamPlanner.first` says; Spark also asks where it replays the first epoch."""
        self.discover()
        self.enumerator.resolved(self.seen(self.enumerator.unresolved, 1))
        return self.enumerator.first("c", "g", None)

    # --- the world --------------------------------------------------------------------------------

    def create(self, topic, partition_count):
        self.created += 1
        self.cluster[topic] = Topic(f"id{self.created}", partition_count)

    @rule(topic=topics, partition_count=st.integers(1, 4))
    def create_or_grow(self, topic, partition_count):
        if topic not in self.cluster:
            self.create(topic, partition_count)
        logs = self.cluster[topic].logs
        logs.extend([0, 0] for _ in range(partition_count - len(logs)))

    @rule(topic=topics, count=st.integers(1, 20), data=st.data())
    def produce(self, topic, count, data):
        if topic in self.cluster:
            data.draw(st.sampled_from(self.cluster[topic].logs))[1] += count

    @rule(topic=topics)
    def delete(self, topic):
        gone = self.cluster.pop(topic, None)
        if gone is not None:
            self.take_away(gone, lambda low, end: end)

    @rule(topic=topics, share=st.floats(0, 1))
    def expire(self, topic, share):
        if topic in self.cluster:
            self.take_away(self.cluster[topic], lambda low, end: low + int((end - low) * share))

    def take_away(self, topic, until):
        for index, log in enumerate(topic.logs):
            kept = until(*log)
            self.skippable |= {(topic.topic_id, index, offset) for offset in range(log[0], kept)}
            log[0] = kept

    # --- the query --------------------------------------------------------------------------------

    @rule()
    def discover(self):
        topics_now = {t: FoundTopic(w.topic_id, len(w.logs)) for t, w in self.cluster.items()}
        self.enumerator.discovered(topics_now, now_ms=1)
        self.has_discovered = True

    @precondition(lambda self: self.committed == len(self.log))
    @rule(limit=st.none() | st.integers(1, 30))
    def plan(self, limit):
        """One trigger, as `StreamPlanner.next` does it."""
        start = self.last_logged()
        self.enumerator.restored(start)
        if not self.has_discovered:
            self.discover()
        self.enumerator.resolved(self.seen(self.enumerator.unresolved, 0))
        self.enumerator.ended(self.seen(self.enumerator.readable, 1))
        if self.enumerator.suspicious:
            self.discover()
            self.enumerator.ended(self.seen(self.enumerator.readable, 1))
        self.enumerator.begun(self.seen(self.enumerator.readable, 0))
        plan = self.enumerator.plan(limit)
        assert plan == self.enumerator.plan(limit)
        if plan.offsets is not start:
            self.log.append(json.dumps(plan.offsets.to_json()))

    def seen(self, partitions, which):
        """What ListOffsets says, by name: it does not know of ids."""
        return {
            p: self.cluster[p.topic].logs[p.partition][which]
            for p in partitions
            if p.topic in self.cluster and p.partition < len(self.cluster[p.topic].logs)
        }

    def last_logged(self):
        return from_json(json.loads(self.log[-1])) if self.log else self.initial

    @precondition(lambda self: self.committed < len(self.log))
    @rule()
    def run_epoch(self):
        """Read what the last log entry says; tasks fetch by topic id, so never from a namesake."""
        stop = from_json(json.loads(self.log[-1]))
        before = from_json(json.loads(self.log[-2])) if len(self.log) > 1 else None
        for split in plan_splits(before or SourceOffsets("c", "g"), stop):
            topic = self.cluster.get(split.topic)
            if topic is None or topic.topic_id != split.topic_id:
                continue  # gone, which the policy accepts
            low = max(split.start_offset, topic.logs[split.partition][0])
            for offset in range(low, split.stop_offset):
                self.read[topic.topic_id, split.partition, offset] += 1
        self.committed = len(self.log)

    @rule()
    def crash(self):
        """A new process knows what is in Spark's log, and nothing else."""
        if self.log:
            self.start_process()
            if len(self.log) == 1 and self.committed == 0:
                self.first()

    # --- what must hold ---------------------------------------------------------------------------

    @invariant()
    def nothing_is_read_twice(self):
        assert max(self.read.values(), default=1) == 1

    @invariant()
    def positions_never_go_back_while_a_topic_lives(self):
        for before, after in zip(self.log, self.log[1:], strict=False):
            old, new = from_json(json.loads(before)), from_json(json.loads(after))
            for partition, position in new.positions.items():
                topic = partition.topic
                if old.topic_ids.get(topic) == new.topic_ids[topic]:
                    assert position >= old.positions.get(partition, 0)

    def teardown(self):
        """Let the query catch up: then everything that is left of every topic was read."""
        if not hasattr(self, "initial"):
            return
        for _ in range(3):
            if self.committed < len(self.log):
                self.run_epoch()
            self.discover_quietly()
            self.plan(None)
        if self.committed < len(self.log):
            self.run_epoch()
        for name, topic in self.cluster.items():
            for index, (_, end) in enumerate(topic.logs if name != "other" else []):
                for offset in range(end):
                    record = (topic.topic_id, index, offset)
                    assert self.read[record] == 1 or record in self.skippable, record
        assert all(topic_id != "" for topic_id, _, _ in self.read)

    def discover_quietly(self):
        self.enumerator.restored(self.last_logged())
        self.discover()


WorldMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestEveryOrder = WorldMachine.TestCase
