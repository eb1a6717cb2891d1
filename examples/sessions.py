"""Busy times of each destination: sessions of departures with at most 90 minutes between them."""

from tempfile import TemporaryDirectory

import pandas as pd
import playground

import tallystick as ts
from tallystick.testing import EmbeddedKafka
from tallystick_tools.demo.flights import all_flights

GAP_MS = 90 * 60_000
MINUTE_MS = 60_000

first = all_flights().head(5_000)
hour = pd.to_datetime(first["time_hour"], utc=True) - pd.Timestamp(0, tz="UTC")
at = hour // pd.Timedelta(milliseconds=1) + first["minute"].astype(int) * MINUTE_MS
flights = pd.DataFrame({"dest": first["dest"], "at": at}).sort_values("at", kind="stable")


def run(servers: str, folder: str) -> None:
    """Read what there is, and go on at the next call where this one ended."""
    source = ts.KafkaSource(
        servers,
        topics=["flights"],
        value=ts.Json("dest string, at bigint"),
        starting_offsets="earliest",
    )
    busy = ts.Pipeline("busy-times").read(source).key_by("dest")
    query = (
        busy.process(
            ts.sessions(GAP_MS, "at"), uid="busy", event_time="at", watermark_delay="1 minute"
        )
        .write(ts.KafkaSink(servers, topic="busy", key="dest", value=ts.Json()))
        .start(checkpoint=f"{folder}/checkpoint", trigger={"availableNow": True})
    )
    query.awaitTermination()


with EmbeddedKafka() as kafka, TemporaryDirectory() as folder:
    servers = kafka.bootstrap_servers
    for topic in ("flights", "busy"):
        kafka.create_topic(topic, 1)  # in the order of time: no row is late
    playground.write(servers, "flights", flights, key="dest")
    # A session ends when a later epoch's watermark says so: a day later nobody flies any more.
    for days in (1, 2):
        later = int(flights["at"].max()) + days * 86_400_000
        end = pd.DataFrame({"dest": ["END"], "at": [later]})
        playground.write(servers, "flights", end, key="dest")
        run(servers, folder)

    rows = [row for row in playground.read(servers, "busy") if row["dest"] != "END"]
    counts = sorted((row["dest"], row["count"]) for row in rows)
    since = flights.groupby("dest")["at"].diff()
    number = (since > GAP_MS).groupby(flights["dest"]).cumsum()
    sizes = flights.groupby(["dest", number]).size()
    expected = sorted((dest, int(count)) for (dest, _), count in sizes.items())
    playground.check(f"{len(counts)} busy times of {len(flights)} flights", counts, expected)
