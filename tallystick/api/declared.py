"""A pipeline as `tallystick doctor` needs it: what its code says, and how its Kafka is reached."""

from tallystick.api.kafka_sink import KafkaSink
from tallystick.api.pipeline import Pipeline
from tallystick.ops.doctor_pipeline import DeclaredPipeline
from tallystick.spark.cluster import Cluster


def declared(pipeline: Pipeline) -> DeclaredPipeline:
    """Return what a pipeline's code says; no Spark is started, and no function is called.

    Args:
        pipeline: whole, with source and sinks.

    Raises:
        OptionError: `start` would find the same mistake.
    """
    pipeline._check_whole(None)
    topology = pipeline.topology
    by_uid = dict(topology.by_uid)
    return DeclaredPipeline(
        run=pipeline._run(Cluster.at_hand(None), None),
        outputs={uid: each.output for uid, each in by_uid.items() if isinstance(each, KafkaSink)},
        decider=topology.uid,
        other_sinks=tuple(uid for uid, each in by_uid.items() if not isinstance(each, KafkaSink)),
        sharing=tuple(each.uid for each in topology.sharing),
    )
