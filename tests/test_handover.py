"""Runs that decide in different places get in each other's way: each epoch is decided once."""

import contextlib
import json
import random
import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from tallystick.checkpoint import manifest as m
from tallystick.checkpoint.facts import Identity
from tallystick.checkpoint.manifest import CHECKPOINT, KAFKA, Manifest
from tallystick.decision_log import DecisionLog, KafkaPlace, leave_trace, newest_entry, traces
from tallystick.errors import (
    AuthorizationError,
    FencedError,
    ManifestError,
    OptionError,
    StorageError,
)
from tallystick.handover import Earlier, Handover, Surroundings
from tallystick.sim.storage import SimulatedStorage
from tallystick.sink.tokens import decode_token, encode_token, newest_token
from tallystick.sink.transaction import Producer, Token
from tallystick.topic_partition import TopicPartition

OURS, THEIRS = "lineage", "other"
PLACE = TopicPartition("out", 0)
LOG, X, Y = None, KafkaPlace("team-p", "one"), KafkaPlace("tallystick-p", "one")
PLACES = {"log": LOG, "x": X, "y": Y}


class Kafka:
    """Clusters with any number of transactional ids; what is decided is written down here."""

    def __init__(self) -> None:
        self.epochs: dict[KafkaPlace, int] = {}
        self.tokens: dict[KafkaPlace, Token] = {}
        self.fenced: list[KafkaPlace] = []
        self.denied: set[KafkaPlace] = set()
        self.decided: list[Token] = []  # here and in the log, in the order in which it was


class KafkaBroker:
    """`ports.Broker` of one cluster, as far as a handover needs it."""

    def __init__(self, kafka: Kafka, cluster_id: str, step: Callable[[], None]) -> None:
        self._kafka, self._cluster_id, self._step = kafka, cluster_id, step
        self._staged: Token | None = None

    def fence(self, transactional_id: str, current: Producer | None) -> Producer:
        self._step()
        place = KafkaPlace(transactional_id, self._cluster_id)
        self._check(place)
        epoch = self._kafka.epochs.get(place, 0)
        if current is not None and current.producer_epoch != epoch:
            raise FencedError(str(place))
        self._kafka.epochs[place] = epoch + 1
        self._kafka.fenced.append(place)
        return Producer(transactional_id, 7, epoch + 1)

    def group_offsets(
        self, group: str, place: TopicPartition | None = None
    ) -> dict[TopicPartition, tuple[int, str]]:
        self._step()
        place = KafkaPlace(group.removesuffix("-token"), self._cluster_id)
        self._check(place)
        token = self._kafka.tokens.get(place)
        return {} if token is None else {PLACE: encode_token(token)}

    def stage_offsets(self, producer: Producer, group: str, offsets: Any, **_: Any) -> None:
        self._staged = newest_token(offsets, PLACE, OURS)

    def commit_transaction(self, producer: Producer) -> Producer:
        self._step()
        place = KafkaPlace(producer.transactional_id, self._cluster_id)
        if self._kafka.epochs[place] != producer.producer_epoch:
            raise FencedError(str(place))
        assert self._staged is not None
        self._kafka.tokens[place] = self._staged
        self._kafka.decided.append(self._staged)
        self._kafka.epochs[place] += 1
        return Producer(producer.transactional_id, 7, self._kafka.epochs[place])

    def _check(self, place: KafkaPlace) -> None:
        if place in self._kafka.denied:
            raise AuthorizationError(str(place))


class Names:
    """`ports.Clock`."""

    def __init__(self) -> None:
        self._numbers = count(1)

    def nonce(self) -> str:
        return f"run-{next(self._numbers)}"

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here waits")


class Wire:
    """Of one run: each request waits for the run's turn."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.step = step
        self.fails: str = ""

    def send(self, _: Any, call: Any) -> Any:
        self.step()
        if self.fails and call.name == self.fails:
            raise StorageError("no room")
        return call.effect()


class Watched(SimulatedStorage):
    """Notes what is decided in the log as it is written: whoever decides may not live to tell."""

    def __init__(self, wire: Wire, files: dict[str, bytes], decided: list[Token]) -> None:
        super().__init__(wire, None, "sim:/c", files)  # type: ignore[arg-type]
        self._decided = decided

    def put_new(self, path: str, data: bytes) -> bool:
        is_done = super().put_new(path, data)
        held = json.loads(data.splitlines()[0])["token"]
        token = None if held is None else decode_token(*held)
        if is_done and token is not None and token not in self._decided:
            self._decided.append(token)
        return is_done


class Checkpoint:
    """What outlives all runs."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.kafka = Kafka()
        self.names = Names()

    @property
    def decided(self) -> list[tuple[int, str]]:
        """The epochs with their manifests."""
        return [(each.checkpoint_id, each.manifest_path) for each in self.kafka.decided]

    def storage(self, step: Callable[[], None] = lambda: None) -> SimulatedStorage:
        return SimulatedStorage(Wire(step), None, "sim:/c", self.files)  # type: ignore[arg-type]


class Run:
    """As the coordinator does: fence, ask, decide."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        place: KafkaPlace | None,
        step: Callable[[], None] = lambda: None,
        assumed: tuple[KafkaPlace, ...] = (),
        accepted: frozenset[str] = frozenset(),
    ) -> None:
        self._checkpoint, self.place = checkpoint, place
        self.wire = Wire(step)
        self.storage = Watched(self.wire, checkpoint.files, checkpoint.kafka.decided)
        brokers = {each: KafkaBroker(checkpoint.kafka, each, step) for each in ("one", "two")}

        def reach(where: KafkaPlace) -> list[Earlier]:
            ids = [where.cluster_id] if where.cluster_id else list(brokers)
            group = f"{where.transactional_id}-token"
            return [Earlier(brokers[each], where.transactional_id, group) for each in ids]  # type: ignore[arg-type]

        def manifests() -> list[Manifest]:
            paths = m.manifests(self.storage.names(m.FOLDER))
            epochs = sorted({m.epoch_of(path) for path in paths})[-2:]
            found = [path for path in paths if m.epoch_of(path) in epochs]
            return [m.decode(self.storage.get(path), path) for path in found]  # type: ignore[arg-type]

        self.id = "tallystick-p" if place is None else place.transactional_id
        self.at = TopicPartition("log", 0) if place is None else PLACE
        self.handover = Handover(
            None if place is None else (place, brokers[place.cluster_id]),  # type: ignore[arg-type]
            self.at,
            Identity("p", OURS, "sim:/c", accepted),
            Surroundings(self.storage, checkpoint.names, manifests, reach, lambda: assumed),  # type: ignore[arg-type]
        )
        self.producer: Producer | None = None

    def begin(self) -> "Run":
        self.producer = self.handover.fence(self.id, None)
        return self

    def token(self) -> Token | None:
        found = self.handover.group_offsets(f"{self.id}-token")
        return newest_token(found, self.at, OURS) if found else None

    def decide(self, epoch: int, path: str = "") -> str:
        """Write the manifest and decide."""
        assert self.producer is not None
        by = CHECKPOINT if self.place is None else KAFKA
        manifest = Manifest(epoch, "p", OURS, ("ends",), (), self.producer, decided_by=by)
        path = path or m.manifest_path(manifest, self._checkpoint.names.nonce())
        self.storage.put(path, manifest.encode())
        return self.commit(epoch, path)

    def commit(self, epoch: int, path: str) -> str:
        """The decision alone; of epoch -1 it opens the lineage."""
        assert self.producer is not None
        token = Token(epoch, OURS, "sim:/c", path)
        self.handover.stage_offsets(self.producer, "group", {self.at: encode_token(token)})
        self.producer = self.handover.commit_transaction(self.producer)
        return path

    def goes_on(self, epochs: int) -> None:
        """Fence, ask, and run some epochs; or find that another run does."""
        try:
            self.begin()
            known = self.token()
            if known is None:
                self.commit(-1, "")
            epoch = -1 if known is None else known.checkpoint_id
            for _ in range(epochs):
                epoch += 1
                self.decide(epoch)
        except FencedError:
            return


# Two runs at once.


class Turns:
    """Lets threads make one step each in a given order; whatever is left runs one by one."""

    def __init__(self, order: list[int]) -> None:
        self._order = order
        self._changed = threading.Condition()
        self._over: set[int] = set()

    def step(self, who: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._next() == who, timeout=10)
            assert self._next() == who, "nobody's turn"
            if self._order:
                self._order.pop(0)
            self._changed.notify_all()

    def over(self, who: int) -> None:
        with self._changed:
            self._over.add(who)
            self._changed.notify_all()

    def _next(self) -> int:
        while self._order and self._order[0] in self._over:
            self._order.pop(0)
        return self._order[0] if self._order else min({0, 1} - self._over, default=0)


def together(checkpoint: Checkpoint, places: tuple[Any, Any], order: list[int]) -> None:
    turns = Turns(order)
    errors: list[BaseException] = []

    def work(who: int, place: KafkaPlace | None) -> None:
        try:
            Run(checkpoint, place, lambda: turns.step(who)).goes_on(2)
        except BaseException as error:
            errors.append(error)
        finally:
            turns.over(who)

    threads = [threading.Thread(target=work, args=each) for each in enumerate(places)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    assert not errors, errors


def assert_each_epoch_is_decided_once(checkpoint: Checkpoint) -> None:
    epochs = [epoch for epoch, _ in checkpoint.decided if epoch >= 0]
    assert epochs == list(range(len(epochs))), checkpoint.decided


def histories() -> Iterator[Any]:
    for before in ("nothing", "log", "x", "x, y", "log, x", "x, log"):
        for pair in (("log", "x"), ("x", "log"), ("x", "y"), ("log", "y")):
            yield pytest.param(before, pair, id=f"{before}: {' beside '.join(pair)}")


def after(history: str) -> Checkpoint:
    checkpoint = Checkpoint()
    for name in history.split(", "):
        if name != "nothing":
            Run(checkpoint, PLACES[name]).goes_on(2)
    return checkpoint


@pytest.mark.parametrize(("before", "pair"), list(histories()))
def test_of_two_runs_in_different_places_one_decides(before, pair):
    """At every step of the one, the other makes any number of its own, and all of the rest."""
    places = (PLACES[pair[0]], PLACES[pair[1]])
    dice = random.Random(f"{before} {pair}")
    orders = [[0] * first + [1] * second + [0] * 99 for first in range(22) for second in (3, 9, 99)]
    orders += [[dice.randrange(2) for _ in range(60)] for _ in range(30)]
    for _ in range(25):
        some = [[who] * dice.randint(1, 9) for _ in range(4) for who in (0, 1)]
        orders.append([who for each in some for who in each])
    for order in orders:
        checkpoint = after(before)
        together(checkpoint, places, order)
        assert_each_epoch_is_decided_once(checkpoint)
        for place in PLACES.values():
            Run(checkpoint, place).goes_on(1)
        assert_each_epoch_is_decided_once(checkpoint)
        assert checkpoint.decided[-1][0] >= 3


@pytest.mark.parametrize("seed", range(60))
def test_whatever_place_the_next_run_has_it_goes_on(seed):
    """With runs that die behind any step."""

    class Died(BaseException):
        pass

    dice = random.Random(seed)
    checkpoint = Checkpoint()
    for _ in range(25):
        left = count(dice.choice((3, 8, 15, 99)), -1)

        def step(left: Iterator[int] = left) -> None:
            if next(left) == 0:
                raise Died

        with contextlib.suppress(Died):
            Run(checkpoint, dice.choice((LOG, X, Y)), step).goes_on(dice.randint(0, 3))
        assert_each_epoch_is_decided_once(checkpoint)
    assert checkpoint.decided


# One after the other.


@pytest.fixture
def checkpoint() -> Checkpoint:
    return Checkpoint()


def test_a_run_that_wakes_up_in_kafka_finds_that_the_log_has_gone_on(checkpoint):
    """It had fenced the log, and nobody has looked into Kafka since."""
    Run(checkpoint, LOG).goes_on(1)
    paused = Run(checkpoint, X).begin()
    Run(checkpoint, LOG).goes_on(1)

    with pytest.raises(FencedError):
        paused.decide(1)
    assert_each_epoch_is_decided_once(checkpoint)


def test_a_run_that_is_overtaken_before_its_own_fence_is_told_at_once(checkpoint):
    """It would settle what lingers in other sinks, before it decides anything."""
    Run(checkpoint, LOG).goes_on(1)
    overtaken: list[Run] = []
    seen: list[bool] = []

    def step() -> None:
        held = newest_entry(checkpoint.storage())
        seen.append(held is not None and held.is_by_kafka)
        if sum(seen) == 2 and not overtaken:  # behind the look whether its slot is the newest
            overtaken.append(Run(checkpoint, LOG))
            overtaken[0].begin()

    with pytest.raises(FencedError, match="another run of checkpoint"):
        Run(checkpoint, X, step).begin()
    overtaken[0].decide(1)


def test_a_run_whose_log_was_taken_cannot_prove_that_it_owns_kafka(checkpoint):
    Run(checkpoint, LOG).goes_on(1)
    run = Run(checkpoint, X).begin()
    DecisionLog(checkpoint.storage(), checkpoint.names).fence("id", None)  # type: ignore[arg-type]

    with pytest.raises(FencedError):
        run.handover.fence(run.id, run.producer)


@pytest.mark.parametrize("place", [LOG, Y])
def test_a_run_without_a_manifest_is_found_by_its_trace(checkpoint, place):
    paused = Run(checkpoint, X).begin()
    paused.commit(-1, "")
    following = Run(checkpoint, place).begin()

    assert following.token() == Token(-1, OURS, "sim:/c", "")
    following.decide(0)
    with pytest.raises(FencedError):
        paused.decide(0)


def test_a_run_of_an_earlier_release_leaves_no_trace_and_is_fenced_all_the_same(checkpoint):
    checkpoint.kafka.tokens[Y] = Token(-1, OURS, "sim:/c", "")

    assert Run(checkpoint, LOG, assumed=(X, Y)).begin().token() == checkpoint.kafka.tokens[Y]
    assert checkpoint.kafka.fenced == [Y, X]


def test_a_place_that_is_only_assumed_is_left_to_whom_it_belongs(checkpoint):
    """Another checkpoint's run under this name; and ids that this user has no rights on."""
    checkpoint.kafka.tokens[Y] = Token(50, THEIRS, "sim:/d", "m")
    checkpoint.kafka.denied.add(X)

    assert Run(checkpoint, LOG, assumed=(X, Y)).begin().token() is None
    assert checkpoint.kafka.fenced == []


def test_once_the_log_has_decided_kafka_is_not_asked_any_more(checkpoint):
    Run(checkpoint, X).goes_on(1)
    Run(checkpoint, LOG, assumed=(X, Y)).goes_on(1)
    checkpoint.kafka.fenced.clear()
    Run(checkpoint, LOG, assumed=(X, Y)).goes_on(1)

    assert checkpoint.kafka.fenced == []
    assert [epoch for epoch, _ in checkpoint.decided] == [-1, 0, 1, 2]


def test_once_kafka_has_decided_the_log_is_not_written_any_more(checkpoint):
    Run(checkpoint, LOG).goes_on(1)
    Run(checkpoint, X).goes_on(1)
    before = newest_entry(checkpoint.storage())
    Run(checkpoint, X).goes_on(2)

    assert newest_entry(checkpoint.storage()) == before
    assert before is not None
    assert (before.token, before.kafka, before.is_by_kafka) == (None, (X,), True)
    assert_each_epoch_is_decided_once(checkpoint)


def test_where_nothing_changes_kafka_alone_is_asked_and_one_small_file_is_written(checkpoint):
    for _ in range(3):
        Run(checkpoint, X).goes_on(1)

    assert traces(checkpoint.storage()) == {X}
    assert newest_entry(checkpoint.storage()) is None
    assert set(checkpoint.kafka.fenced) == {X}


def test_what_kafka_forgot_is_not_answered_by_an_older_decision_of_the_log(checkpoint):
    Run(checkpoint, LOG).goes_on(1)
    Run(checkpoint, X).goes_on(3)
    checkpoint.kafka.tokens.clear()

    assert Run(checkpoint, LOG).begin().token() is None


def test_of_one_epoch_decided_twice_kafkas_decision_counts(checkpoint):
    """The log's was lost and run again; the other way round Kafka's would have been visible."""
    Run(checkpoint, LOG).goes_on(2)
    again = Run(checkpoint, X).begin()
    assert again.token().checkpoint_id == 1
    path = again.decide(1)

    for place in (LOG, Y, X, LOG):
        token = Run(checkpoint, place).begin().token()
        assert (token.checkpoint_id, token.manifest_path) == (1, path)


def test_of_one_epoch_decided_twice_kafkas_counts_where_that_was_not_noted(checkpoint):
    """The run dies between its decision in Kafka and the note that the log does not count."""
    Run(checkpoint, LOG).goes_on(2)
    again = Run(checkpoint, X).begin()
    again.token()
    again.handover._settle = lambda held: None
    path = again.decide(1)

    for place in (LOG, X, Y):
        assert Run(checkpoint, place).begin().token().manifest_path == path


def test_that_the_log_does_not_count_any_more_need_not_be_written(checkpoint, caplog):
    Run(checkpoint, LOG).goes_on(1)
    run = Run(checkpoint, X).begin()
    path = "tallystick/000000000001-1-abc.json"
    run.token()
    run.wire.fails = "put"
    run.commit(1, path)

    assert "nothing else depends on it" in caplog.text
    assert Run(checkpoint, LOG).begin().token().manifest_path == path


@pytest.mark.parametrize("is_accepted", [False, True])
def test_a_name_that_another_lineage_has_is_not_taken_from_it(checkpoint, is_accepted):
    """The log's own token must not hide the foreign one."""
    Run(checkpoint, LOG).goes_on(6)
    foreign = checkpoint.kafka.tokens[X] = Token(50, THEIRS, "sim:/d", "m")
    word = frozenset({f"new-lineage-after-{THEIRS}"} if is_accepted else ())
    token = Run(checkpoint, X, accepted=word).begin().token()

    assert token.lineage == (OURS if is_accepted else THEIRS)
    assert token == foreign or token.checkpoint_id == 5


def manifest_of(epoch: int, transactional_id: str, lineage: str = OURS) -> Manifest:
    return Manifest(epoch, "p", lineage, ("ends",), (), Producer(transactional_id, 7, 1))


def test_a_decider_without_a_trace_is_looked_for_on_every_cluster(checkpoint):
    """Manifests of an earlier release name the transactional id only."""
    manifest = manifest_of(4, "team-p")
    checkpoint.files["tallystick/000000000004-1-abc.json"] = manifest.encode()
    there = KafkaPlace("team-p", "two")
    checkpoint.kafka.tokens[there] = Token(4, OURS, "sim:/c", "m")

    assert Run(checkpoint, LOG).begin().token() == checkpoint.kafka.tokens[there]
    assert there in checkpoint.kafka.fenced


def test_a_manifest_of_another_lineage_names_no_place(checkpoint):
    """A seed's is that of the original; and a cluster that is known is the only one."""
    checkpoint.files["tallystick/000000000004-1-abc.json"] = manifest_of(4, "q", THEIRS).encode()
    Run(checkpoint, X).goes_on(1)
    Run(checkpoint, LOG).goes_on(1)

    assert set(checkpoint.kafka.fenced) == {X}


def test_a_place_that_cannot_be_reached_ends_the_start(checkpoint):
    Run(checkpoint, X).goes_on(1)
    run = Run(checkpoint, LOG)

    def nowhere(place: KafkaPlace) -> list[Earlier]:
        raise OptionError(place.cluster_id)

    run.handover._around = run.handover._around._replace(reach=nowhere)
    with pytest.raises(OptionError, match="one"):
        run.begin()


def test_a_damaged_trace_is_told(checkpoint):
    leave_trace(checkpoint.storage(), X)
    (path,) = checkpoint.files
    checkpoint.files[path] = checkpoint.files[path].replace(b"team", b"meat")

    with pytest.raises(ManifestError, match=path):
        traces(checkpoint.storage())


def test_a_log_keeps_the_places_that_may_know_more_until_it_decides(checkpoint):
    log = DecisionLog(checkpoint.storage(), checkpoint.names)  # type: ignore[arg-type]
    producer = log.note(log.fence("id", None), (X,))
    later = DecisionLog(checkpoint.storage(), checkpoint.names)  # type: ignore[arg-type]
    following = later.fence("id", None)

    assert newest_entry(checkpoint.storage()).kafka == (X,)
    assert not log.holds(producer)
    with pytest.raises(FencedError):
        log.note(producer, ())
    later.stage_offsets(following, "g", {PLACE: encode_token(Token(0, OURS, "c", "m"))})
    later.commit_transaction(following)
    assert newest_entry(checkpoint.storage()).kafka == ()
