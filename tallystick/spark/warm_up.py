"""The preparation that shortens all later starts, once per machine and user."""

import resource
from collections.abc import Iterator
from threading import Event

from pyspark import SparkContext

from tallystick.errors import OptionError
from tallystick.host import kernel_cache
from tallystick.host.java import java_home
from tallystick.spark import class_archive
from tallystick.spark.context import end, is_local, new_context
from tallystick.spark.gang.gang import Gang, Size

NAME = "tallystick warm-up"
JVM_END_MAX_S = 120.0


def warm_up() -> Iterator[str]:
    """Fill the caches of later starts; yield a line about each cache, with its place and cost.

    Raises:
        OSError: the cache folder cannot be written.
    """
    before_s = _cpu_s()
    kernel_cache.warm_up_on_two_cores()
    compiled_s = _cpu_s()
    where = kernel_cache.directory_in_use()
    yield f"kernels are compiled in {where} ({compiled_s - before_s:.1f} CPU s)"
    archived = _archive_classes()
    yield f"{archived} ({_cpu_s() - compiled_s:.1f} CPU s)"


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of its ended children."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _archive_classes() -> str:
    """Make the archive of JVM classes; says why not, where it is not made."""
    try:
        home = java_home()
    except OptionError:
        return "no class archive: this machine has no Java that runs Spark"
    if not is_local():
        return "no class archive: Spark's settings name a master on other machines"
    archive = class_archive.make(home, _start_and_end)
    if archive is None:
        return f"no class archive: {home} cannot make one"
    return f"classes of Spark's JVM are in {archive}"


def _start_and_end(jvm_options: str) -> None:
    """Have a JVM load what a start needs."""
    context = new_context(NAME, is_light=True, archive=jvm_options)
    try:
        Gang(context, Size(tasks=1), (), NAME, Event()).leave()
    finally:
        end(context)
        end_jvm()


def end_jvm() -> None:
    """End the JVM, which PySpark would keep for the next context; its last act is the archive."""
    gateway = SparkContext._gateway
    assert gateway is not None
    SparkContext._gateway = SparkContext._jvm = None
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(JVM_END_MAX_S)
