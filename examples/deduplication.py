"""Let each flight through once, though its producer retried and wrote many of them twice."""

from tempfile import TemporaryDirectory

import pandas as pd
import playground

import tallystick as ts
from tallystick.testing import EmbeddedKafka
from tallystick_tools.demo.flights import load

with EmbeddedKafka() as kafka, TemporaryDirectory() as folder:
    servers = kafka.bootstrap_servers
    for topic in ("flights", "unique"):
        kafka.create_topic(topic, 3)
    flights = load(5_000)
    repeated = pd.concat([flights, flights[1_000:4_000]])
    playground.write(servers, "flights", repeated, key="carrier")

    source = ts.KafkaSource(
        servers,
        topics=["flights"],
        value=ts.Json("id bigint, carrier string, dest string"),
        starting_offsets="earliest",
    )
    sink = ts.KafkaSink(servers, topic="unique", key="carrier", value=ts.Json())
    query = (
        ts.Pipeline("unique-flights")
        .read(source)
        .key_by("id")
        # For a stream without an end: an id is forgotten after a day, and so is its state.
        .process(ts.deduplicate(forget_after_ms=86_400_000), uid="ids", parallelism=2)
        .write(sink)
        .start(checkpoint=f"{folder}/checkpoint", trigger={"availableNow": True})
    )
    query.awaitTermination()

    numbers = sorted(row["id"] for row in playground.read(servers, "unique"))
    expected = flights["id"].tolist()
    playground.check(f"{len(numbers)} of {len(repeated)} records are new", numbers, expected)
