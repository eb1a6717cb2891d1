"""A `StatefulProcessor` written for Spark's `transformWithState`, moved over unchanged.

In Spark: `flights.groupBy("carrier").transformWithState(LongestStreak(), …)`.
"""

from tempfile import TemporaryDirectory

import playground
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import tallystick as ts
from tallystick.testing import EmbeddedKafka
from tallystick_tools.demo.flights import load


class LongestStreak(StatefulProcessor):
    """How many flights of a carrier in a row were late, at most."""

    def init(self, handle):
        self.streak = handle.getValueState("streak", "now int, longest int")

    def handleInputRows(self, key, rows, timerValues):  # noqa: N802, N803 - Spark's names
        now, longest = self.streak.get() or (0, 0)
        for row in rows:
            now = now + 1 if row.dep_delay is not None and row.dep_delay >= 15 else 0
            longest = max(now, longest)
        self.streak.update((now, longest))
        yield Row(carrier=key[0], longest=longest)

    def close(self):
        pass


with EmbeddedKafka() as kafka, TemporaryDirectory() as folder:
    servers = kafka.bootstrap_servers
    for topic in ("flights", "streaks"):
        kafka.create_topic(topic, 3)
    flights = load(5_000)
    playground.write(servers, "flights", flights, key="carrier")

    source = ts.KafkaSource(
        servers,
        topics=["flights"],
        value=ts.Json("carrier string, dep_delay double"),
        starting_offsets="earliest",
    )
    sink = ts.KafkaSink(servers, topic="streaks", key="carrier", value=ts.Json())
    query = (
        ts.Pipeline("late-streaks")
        .read(source)
        .key_by("carrier")
        .process(LongestStreak(), output="carrier string, longest int", uid="streaks")
        .write(sink)
        .start(checkpoint=f"{folder}/checkpoint", trigger={"availableNow": True})
    )
    query.awaitTermination()

    streaks = {row["carrier"]: row["longest"] for row in playground.read(servers, "streaks")}
    late = flights["dep_delay"] >= 15
    run = (~late).groupby(flights["carrier"]).cumsum()  # a number for each streak
    lengths = late.groupby([flights["carrier"], run]).sum()
    expected = {name: int(most) for name, most in lengths.groupby("carrier").max().items()}
    playground.check(f"the longest streaks of {len(streaks)} carriers", streaks, expected)
