"""The resident tasks of all runs of a world, and what they are given to do."""

import random
from dataclasses import replace
from typing import Protocol

from tallystick.epoch.manifest import KAFKA
from tallystick.tasks.epoch_plan import NO_STEPS
from tallystick.tasks.keyed import WorkerHost
from tests.simulation.gang import SLOT_COUNT, Around
from tests.simulation.kafka_cluster import KafkaCluster
from tests.simulation.residents import GangEngine, Residents, Surface
from tests.simulation.rows import OUTPUT
from tests.simulation.scheduler import Process
from tests.simulation.sinks import Sinks
from tests.simulation.spark import Checkpoint
from tests.simulation.workers import Workers, unread_in


class Surroundings(Around, Protocol):
    """What these need of the world."""

    dice: random.Random
    checkpoint: Checkpoint
    is_keyed: bool
    workers: Workers
    sinks: Sinks | None
    sink: KafkaCluster

    @property
    def decided_by(self) -> str:
        """Who decides."""
        ...


class Gangs:
    """Makes what runs epochs in resident tasks."""

    def __init__(self, world: Surroundings) -> None:
        self._world = world
        self._residents: dict[str, Residents] = {}  # by process

    def residents(self, process: Process) -> Residents:
        """The resident tasks of a run."""
        world = self._world
        steps = replace(NO_STEPS, task_count=world.dice.randint(1, SLOT_COUNT))
        if world.is_keyed:
            steps = world.workers.steps(process, world.checkpoint)
        else:
            steps = world.workers.with_operator_state(steps, process, world.checkpoint)
        new_residents = Residents(world, process, steps, has_limit=world.decided_by == KAFKA)
        self._residents[process.name] = new_residents
        return new_residents

    def engine(self, process: Process, checkpoint: Checkpoint, epoch: int) -> GangEngine:
        """What runs an epoch whose input a checkpoint tells."""
        world = self._world

        def worker_host(member: Process, index: int) -> WorkerHost:
            return world.workers.worker_host(member, checkpoint, index)

        branches = None if world.sinks is None else world.sinks.branches(process)
        unread = unread_in(checkpoint, epoch)
        surface = Surface(unread, world.sink, OUTPUT, worker_host, branches)
        return GangEngine(world, self._residents[process.name], surface)
