"""What runs the tasks of a pipeline: chosen by the user, else by what fits."""

from collections.abc import Mapping
from typing import NamedTuple

from pyspark import SparkContext

from tallystick.errors import OptionError
from tallystick.spark.cluster import Cluster

RESIDENT, JOBS = "resident", "jobs"
"""Tasks stay in the same processes, or each epoch is a Spark job."""
SLOTS_TO_SHARE = 4
"""From so many slots on, resident tasks leave one for other jobs."""


class Execution(NamedTuple):
    """What runs the tasks of a pipeline.

    Args:
        kind: `RESIDENT` or `JOBS`.
        reason: why no resident tasks do; empty: they do.
    """

    kind: str
    reason: str


def execution_of(
    pipeline: str, asked: str | None, conf: Mapping[str, str], *, has_transform: bool
) -> Execution:
    """Choose what runs the tasks.

    Args:
        pipeline: its name.
        asked: "resident" or "jobs", as the user wants it; None: whichever fits.
        conf: the settings of Spark.
        has_transform: there are steps that Spark plans.

    Raises:
        OptionError: the tasks cannot stay resident, and that is wanted.
    """
    why = "Spark plans the transform steps for each epoch" if has_transform else obstacle(conf)
    if asked == RESIDENT and why:
        raise OptionError(
            f"pipeline {pipeline!r}: execution='resident' does not work here, as {why}. Leave "
            f"execution out, or set execution='jobs'"
        )
    if asked == JOBS or why:
        return Execution(JOBS, why or "execution='jobs'")
    return Execution(RESIDENT, "")


def obstacle(conf: Mapping[str, str]) -> str:
    """Say what keeps tasks from staying resident under these settings of Spark's; empty: nothing.

    Connections between members are authenticated and not encrypted, and frames that overflow lie
    on disk as they are: where Spark is told to encrypt, its own shuffle is used.
    """
    for name, why in (
        ("spark.network.crypto.enabled", "resident tasks do not encrypt what they exchange"),
        ("spark.ssl.rpc.enabled", "resident tasks do not encrypt what they exchange"),
        ("spark.io.encryption.enabled", "resident tasks do not encrypt what overflows to disk"),
        ("spark.dynamicAllocation.enabled", "resident tasks would hold all executors for ever"),
    ):
        if conf.get(name, "false").lower() == "true":
            return f"{name}=true: {why}"
    return ""


def tasks_at_once(cluster: Cluster, execution: Execution) -> int:
    """How many tasks of a pipeline run at the same time: the parallelism that nobody asked for."""
    slots = cluster.parallelism
    if not cluster.is_there or execution.kind == JOBS or is_local(cluster.context):
        return slots
    return members_max(slots)


def members_max(slots: int) -> int:
    """How many resident tasks a cluster has at most: each holds a slot, and one is left free."""
    return slots - 1 if slots >= SLOTS_TO_SHARE else slots


def is_local(context: SparkContext) -> bool:
    """Whether all tasks run on the driver's host, in its own JVM."""
    return (context.master or "").startswith("local")
