"""A probe for Kubernetes: exit code 0 while the pipeline of this machine commits what it reads.

    python probe.py        # a run of the pipeline is in the process
    python probe.py 60     # and committed within 60 s, if records wait

The metrics of the process are asked, so an interpreter that hangs is noticed too. Where lag is not
known, since Kafka does not answer, the pipeline is not to blame: a restart would not help.
"""

import sys
import time
from collections import defaultdict
from urllib.request import ProxyHandler, build_opener

from prometheus_client.parser import text_string_to_metric_families

METRICS = "http://127.0.0.1:9400/metrics"


def complaint(metrics: str, now_s: float, limit_s: float | None = None) -> str:
    """Return what is wrong with the pipelines of a process; "": nothing.

    Args:
        metrics: the page for Prometheus.
        now_s: the time, as Unix time.
        limit_s: how long ago the last commit may be while records wait; None: any time.
    """
    samples: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            samples[sample.name][sample.labels.get("query", "")] += sample.value
    running = samples["tallystick_running"]
    if not running or not all(running.values()):
        return "no run of the pipeline is in the process"
    for query, lag in samples["tallystick_source_lag_offsets"].items():
        since_s = max(
            samples["tallystick_last_commit_timestamp_seconds"][query],
            samples["tallystick_started_timestamp_seconds"][query],
        )
        if limit_s is not None and lag > 0 and now_s - since_s > limit_s:
            return f"{query}: {lag:.0f} records wait, and {now_s - since_s:.0f} s without a commit"
    return ""


def main() -> None:
    """Ask once, and end with a message, and code 1, if something is wrong."""
    limit_s = float(sys.argv[1]) if len(sys.argv) > 1 else None
    try:
        with build_opener(ProxyHandler({})).open(METRICS, timeout=4) as answer:
            metrics = answer.read().decode()
    except OSError as error:
        sys.exit(f"{METRICS}: {error}")
    sys.exit(complaint(metrics, time.time(), limit_s) or None)


if __name__ == "__main__":
    main()
