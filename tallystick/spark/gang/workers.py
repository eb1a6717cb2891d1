"""The Python workers of Spark that fork members: none of them has ever run a user's code.

Spark gives a task any idle worker of the same environment. One that ran an earlier job has the
user's modules, with their connections, generators and caches, and forks would share these; threads
would be gone in them. Spark keeps a daemon and a pool of workers for each environment, so the jobs
of gangs have one of their own. Their functions hold the user's objects pickled (`tasks.Parcel`),
and only members unpickle them.

Source: `SparkEnv.createPythonWorker`, whose pools go by executable, modules and environment.
"""

from collections.abc import Mapping

from pyspark import SparkContext

ENVIRONMENT: Mapping[str, str] = {"TALLYSTICK_FORKS_MEMBERS": "1"}
"""Environment variables of the workers that fork members, and of no others."""


def in_clean_workers(context: SparkContext) -> SparkContext:
    """Return the same context, for jobs that run nothing of the user's in Spark's workers.

    Args:
        context: is left as it is: other threads start their jobs with it.
    """
    same = object.__new__(type(context))
    vars(same).update(vars(context))
    same.environment = {**context.environment, **ENVIRONMENT}
    return same
