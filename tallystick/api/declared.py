"""A pipeline's declaration, for `tallystick doctor`: its parts, and how to reach its Kafka."""

from tallystick.api.kafka_sink import KafkaSink
from tallystick.api.pipeline import Pipeline
from tallystick.ops.doctor_pipeline import DeclaredPipeline
from tallystick.spark.cluster import Cluster


def declared(pipeline: Pipeline) -> DeclaredPipeline:
    """Return a pipeline as its code declares it; start no Spark, and call no function.

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
        outputs={uid: sink.output for uid, sink in by_uid.items() if isinstance(sink, KafkaSink)},
        decider=topology.uid,
        other_sinks=tuple(uid for uid, sink in by_uid.items() if not isinstance(sink, KafkaSink)),
        sharing=tuple(sharing.uid for sharing in topology.sharing),
    )
