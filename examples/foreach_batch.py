"""A Structured Streaming query of your own, made exactly once by its sink: Spark SQL and state."""

from tempfile import TemporaryDirectory

import playground
from pyspark.sql.functions import col, from_json

import tallystick as ts
from tallystick.testing import EmbeddedKafka
from tallystick_tools.demo.flights import load

with EmbeddedKafka() as kafka, TemporaryDirectory() as folder:
    servers = kafka.bootstrap_servers
    for topic in ("flights", "counts"):
        kafka.create_topic(topic, 3)
    flights = load(5_000)
    playground.write(servers, "flights", flights, key="carrier")

    quick = {"spark.sql.shuffle.partitions": "2", "spark.ui.enabled": "false"}
    spark = ts.spark_session("delays", master="local[2]", config=quick)
    ts.register(spark)
    rows = (
        spark.readStream.format("tallystick")
        .option("kafka.bootstrap.servers", servers)
        .option("subscribe", "flights")
        .option("startingOffsets", "earliest")
        .load()
    )
    fields = from_json(col("value").cast("string"), "origin string, dep_delay double")
    delays = rows.select(fields.alias("flight")).select("flight.*")
    counts = delays.where("dep_delay >= 15").groupBy("origin").count()
    query = (
        counts.writeStream.outputMode("update")
        .foreachBatch(ts.KafkaSink(servers, topic="counts", key="origin", value=ts.Json()))
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()

    counts_out = {row["origin"]: row["count"] for row in playground.read(servers, "counts")}
    expected = flights[flights["dep_delay"] >= 15].groupby("origin").size().to_dict()
    playground.check(f"late flights of {len(counts_out)} airports", counts_out, expected)
