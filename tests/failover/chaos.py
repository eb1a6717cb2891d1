"""A campaign: brokers and drivers are killed and frozen at random, then the logs are judged.

    python -m tests.failover.chaos --seconds 120 [--seed 7] [--folder /tmp/campaign]

One broker at a time is out; a driver may be killed at any moment, and its tasks go on writing as
zombies beside the next driver. At the end every row must be visible once, in order, each epoch
whole; and every zombie row that is visible must have been told (`ForeignRowsError`).
"""

import argparse
import json
import random
import statistics
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tallystick.kafka.client import Client
from tallystick.testing import EmbeddedKafka
from tallystick.testing.process import ProcessGroup
from tests.failover.chaos_processes import ZOMBIE_S, Settings, run_job
from tests.failover.evidence import Part, problems_of, read_committed, replay, visible_zombies
from tests.failover.job import Job
from tests.failover.known_rows import ZOMBIE

PARTITIONS = 6
PAUSE_SHARE = 0.35
"""How many of the faults are a SIGSTOP, not a SIGKILL."""
OUT_S = (0.0, 6.0)
BETWEEN_FAULTS_S = (0.5, 4.0)
DRIVER_LIVES_S = (0.0, 14.0)
"""After its first epoch; or, of one in so many drivers, from the start of its process."""
STARTING_ONE_IN = 4
KILLS_MIN = 2
"""A campaign goes on until so many of its drivers have done an epoch and been killed."""
LAST_EPOCHS = 3


@dataclass
class Verdict:
    """What a campaign found."""

    seconds: float = 0.0
    broker_kills: int = 0
    broker_pauses: int = 0
    driver_kills: int = 0
    driver_deaths: int = 0  # of its own
    epochs: int = 0
    epoch_median_s: float = 0.0
    epoch_slowest_s: float = 0.0
    rows: int = 0
    aborted_transactions: int = 0
    aborted_rows: int = 0
    zombie_rows_aborted: int = 0
    zombie_rows_visible: int = 0
    zombie_rows_told: int = 0
    zombie_answers: dict[str, int] = field(default_factory=dict)
    obstacles: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)  # of runs: the query was started again
    problems: list[str] = field(default_factory=list)

    @property
    def is_exact(self) -> bool:
        """Nothing lost, nothing twice, nothing torn, nothing foreign that was not told."""
        return not self.problems and not self.driver_deaths and self.epochs > 0


class DriverKiller:
    """Keeps one driver running, and kills it now and then."""

    def __init__(
        self, settings: Settings, chance: random.Random, lives_s: tuple[float, float]
    ) -> None:
        self.kills = self.kills_at_work = self.deaths = 0
        self._settings = settings
        self._chance = chance
        self._lives_s = lives_s
        self._over = threading.Event()
        self._group = ProcessGroup()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """Kill the last one, and wait until its zombies are gone too."""
        self._over.set()
        self._thread.join()
        time.sleep(2 * ZOMBIE_S)
        self._group.close()

    def _run(self) -> None:
        while not self._over.is_set():
            log = Path(self._settings.folder, "drivers.log")
            driver = self._group.spawn(self._settings.command, log)
            before = self._settings.logged
            if self._chance.randrange(STARTING_ONE_IN):
                self._wait_for_an_epoch(driver)
            self._over.wait(self._chance.uniform(*self._lives_s))
            if driver.poll() is None:
                driver.kill()
                self.kills += 1
                self.kills_at_work += self._settings.logged > before
            else:
                self.deaths += 1
            driver.wait()

    def _wait_for_an_epoch(self, driver: subprocess.Popen[bytes]) -> None:
        before = self._settings.logged
        while driver.poll() is None and self._settings.logged == before:
            if self._over.wait(0.1):
                break


def run_campaign(
    kafka: EmbeddedKafka,
    seconds: float,
    seed: int,
    folder: Path,
    lives_s: tuple[float, float] = DRIVER_LIVES_S,
) -> Verdict:
    """Do it, on a cluster of three; it is whole again afterwards."""
    chance = random.Random(seed)
    topic = kafka.create_topic(f"chaos-{seed}-{time.time_ns()}", PARTITIONS)
    settings = Settings(kafka.bootstrap_servers, topic, PARTITIONS, str(folder), 2)
    verdict = Verdict()
    began = time.monotonic()
    killer = DriverKiller(settings, random.Random(chance.random()), lives_s)
    with _stopped(killer, verdict):
        while time.monotonic() < began + seconds or killer.kills_at_work < KILLS_MIN:
            _fault(kafka, chance, verdict)
            time.sleep(chance.uniform(*BETWEEN_FAULTS_S))
    verdict.seconds = round(time.monotonic() - began, 1)
    kafka.wait_until_in_sync()
    job = Job(settings.shape, settings.config("last"), settings.checkpoint, logged=settings.logged)
    run_job(settings, job, until=job.logged + LAST_EPOCHS)
    job.close()
    _judge(kafka, settings, verdict)
    return verdict


@contextmanager
def _stopped(killer: DriverKiller, verdict: Verdict) -> Iterator[None]:
    try:
        yield
    finally:
        killer.stop()
        verdict.driver_kills, verdict.driver_deaths = killer.kills, killer.deaths


def _fault(kafka: EmbeddedKafka, chance: random.Random, verdict: Verdict) -> None:
    """Take one broker out for a while, and wait until nothing is left of it."""
    node = chance.randint(1, len(kafka.nodes))
    out_s = chance.uniform(*OUT_S)
    if chance.random() < PAUSE_SHARE:
        kafka.pause(node)
        time.sleep(out_s)
        kafka.resume(node)
        verdict.broker_pauses += 1
    else:
        kafka.kill(node)
        time.sleep(out_s)
        kafka.restart(node)
        verdict.broker_kills += 1
    kafka.wait_until_in_sync()


def _judge(kafka: EmbeddedKafka, settings: Settings, verdict: Verdict) -> None:
    """Read everything back, and read the diary."""
    client = Client(settings.config("judge"))
    seen = read_committed(kafka.confluent_options(), settings.topic, PARTITIONS)
    parts = replay(client, settings.topic, PARTITIONS)
    client.close()
    verdict.epochs = settings.logged
    verdict.rows = sum(map(len, seen.values()))
    verdict.problems += problems_of(settings.shape, verdict.epochs, seen, parts)
    _count_aborted(parts, verdict)
    _count_zombies(parts, settings, verdict)
    _read_diary(settings, verdict)


def _count_aborted(parts: list[Part], verdict: Verdict) -> None:
    aborted = [part for part in parts if not part.committed]
    verdict.aborted_transactions = len({part.transaction for part in aborted})
    verdict.aborted_rows = sum(len(part.values) for part in aborted)
    verdict.zombie_rows_aborted = sum(part.values.count(ZOMBIE) for part in aborted)


def _count_zombies(parts: list[Part], settings: Settings, verdict: Verdict) -> None:
    """Those that are visible, against those that a driver has told: per epoch and partition."""
    visible = visible_zombies(parts)
    reported = {
        (entry["foreign"]["epoch"], int(partition)): count
        for entry in settings.diary()
        if "foreign" in entry
        for partition, count in entry["foreign"]["rows"].items()
    }
    verdict.zombie_rows_visible = sum(visible.values())
    verdict.zombie_rows_told = sum(reported.values())
    if visible != reported:
        verdict.problems.append(f"zombie rows are visible at {visible}, and told at {reported}")


def _read_diary(settings: Settings, verdict: Verdict) -> None:
    diary = settings.diary()
    lengths = sorted(entry["seconds"] for entry in diary if "seconds" in entry)
    verdict.epoch_median_s = round(statistics.median(lengths), 3)
    verdict.epoch_slowest_s = round(lengths[-1], 1)
    verdict.failures = [entry["failed"] for entry in diary if "failed" in entry]
    verdict.zombie_answers = _sum(entry["zombie"] for entry in diary if "zombie" in entry)
    verdict.obstacles = _sum(entry["obstacles"] for entry in diary if "obstacles" in entry)


def _sum(counts: Iterator[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counts_of_run in counts:
        total.update({name.split(" [")[0][:60]: count for name, count in counts_of_run.items()})
    return dict(total.most_common(12))


def main() -> None:
    """Run a campaign by hand; the last line says how it went."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", help="new or empty; stays behind")
    arguments = parser.parse_args()
    folder = Path(arguments.folder or tempfile.mkdtemp(prefix="tallystick-chaos-"))
    with EmbeddedKafka(brokers=3) as kafka:
        verdict = run_campaign(kafka, arguments.seconds, arguments.seed, folder)
    print(json.dumps(asdict(verdict), indent=2))
    print(f"what the drivers said, and their diary: {folder}")
    print("EXACT" if verdict.is_exact else "NOT EXACT")
    raise SystemExit(not verdict.is_exact)


if __name__ == "__main__":
    main()
