"""The lag of a pipeline while no epoch ends.

The progress of an epoch has the ends of the inputs as they were at its plan. While an epoch hangs,
or fails again and again, records pile up unseen: here a thread of the driver asks Kafka for the
ends. It asks nothing while epochs end, nor where nobody observes the pipeline.
"""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from threading import Event, Lock, Thread

from tallystick.errors import TallystickError
from tallystick.kafka import cluster
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.pipeline.listeners import OBSERVERS, PIPELINES, SourceProgress
from tallystick.source.offsets import SourceOffsets
from tallystick.source.subscription import LATEST
from tallystick.values import TopicPartition

logger = logging.getLogger(__name__)

WATCH_S = 5.0
"""The time without an epoch after which Kafka is asked, and between two questions."""
PATIENCE_MS = 3_000
"""The longest wait for Kafka's answer; the next question comes `WATCH_S` later anyway."""


class LagWatch:
    """A thread that keeps `PipelineCounts.watched` up to date while no epoch ends.

    Args:
        pipeline: its name.
        configs: of the cluster that each input reads, by the input's id.
        reached: returns the positions before which all is committed.
    """

    def __init__(
        self,
        pipeline: str,
        configs: Mapping[str, KafkaConfig],
        reached: Callable[[], tuple[SourceOffsets, ...]],
    ) -> None:
        self._pipeline = pipeline
        self._configs = {
            uid: replace(
                config, request_timeout_ms=PATIENCE_MS // 2, delivery_timeout_ms=PATIENCE_MS
            )
            for uid, config in configs.items()
        }
        self._reached = reached
        self._lock = Lock()
        self._ended = Event()
        self._epoch_ended_s = time.monotonic()
        Thread(target=self._run, name=f"tallystick lag of {pipeline}", daemon=True).start()

    def epoch_ended(self) -> None:
        """Note that the newest progress has the lag."""
        with self._lock:
            self._epoch_ended_s = time.monotonic()
            PIPELINES[self._pipeline].watched = ()

    def close(self) -> None:
        """Ask no more; a question under way ends by itself."""
        self._ended.set()
        self.epoch_ended()

    def _run(self) -> None:
        with ExitStack() as stack:
            clients: dict[KafkaConfig, Client] = {}
            while not self._ended.wait(WATCH_S):
                since_s = self._epoch_ended_s
                if not OBSERVERS or time.monotonic() - since_s < WATCH_S:
                    continue
                for config in self._configs.values():
                    if config not in clients:
                        clients[config] = stack.enter_context(closing(Client(config)))
                watched = tuple(
                    self._look(clients[self._configs[source.input]], index, source)
                    for index, source in enumerate(self._reached())
                    if source.input in self._configs
                )
                with self._lock:
                    if since_s == self._epoch_ended_s:
                        PIPELINES[self._pipeline].watched = watched

    def _look(self, client: Client, index: int, source: SourceOffsets) -> SourceProgress:
        """Return an input's positions with the ends as they are now; without, if Kafka is away."""
        ends: Mapping[TopicPartition, int] = {}
        try:
            ends = cluster.list_offsets(client, source.positions, LATEST, absent_after_s=0.0)
        except (TallystickError, OSError) as error:
            logger.info("pipeline %s: its lag is not known: %s", self._pipeline, error)
        return SourceProgress(
            index, source.cluster_id, source.group, source.positions, ends, input=source.input
        )
