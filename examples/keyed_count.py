"""Count flights by destination, in keyed state that is exactly once with the output."""

from tempfile import TemporaryDirectory

import playground

import tallystick as ts
from tallystick.testing import EmbeddedKafka
from tallystick_tools.demo.flights import load

with EmbeddedKafka() as kafka, TemporaryDirectory() as folder:
    servers = kafka.bootstrap_servers
    for topic in ("flights", "counts"):
        kafka.create_topic(topic, 3)
    flights = load(5_000)
    source = ts.KafkaSource(
        servers,
        topics=["flights"],
        value=ts.Json("dest string, distance double"),
        starting_offsets="earliest",
    )
    totals = {"flights": ts.count(), "miles": ts.sum("distance")}
    sink = ts.KafkaSink(servers, topic="counts", key="dest", value=ts.Json())
    pipeline = ts.Pipeline("flights-by-destination").read(source).key_by("dest")

    # Two runs, as before and after a restart: state goes on, with any parallelism.
    for part, parallelism in ((flights[:3_000], 1), (flights[3_000:], 2)):
        playground.write(servers, "flights", part, key="carrier")
        counting = pipeline.process(ts.aggregate(totals), uid="totals", parallelism=parallelism)
        query = counting.write(sink).start(
            checkpoint=f"{folder}/checkpoint", trigger={"availableNow": True}
        )
        query.awaitTermination()

    last = {row["dest"]: row for row in playground.read(servers, "counts")}
    totals_by_dest = {dest: (row["flights"], row["miles"]) for dest, row in last.items()}
    by_dest = flights.groupby("dest")["distance"]
    expected = {dest: (len(miles), float(miles.sum())) for dest, miles in by_dest}
    playground.check(
        f"{len(flights)} flights to {len(totals_by_dest)} destinations", totals_by_dest, expected
    )
