"""Watermarks that keyed steps hand on: no row that came in time is late in a later step.

Random pipelines of two and three steps read partitions of different paces, cut into epochs at
random. What comes out is compared with what the rows alone say: an oracle that knows neither
epochs nor watermarks.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tallystick.state.functions.aggregates import count, first_value, last_value, maximum, minimum
from tallystick.state.functions.count_windows import count_window
from tallystick.state.functions.inputs import TIME, KeyedInput, KeyedInputs
from tallystick.state.functions.joins import interval_join, temporal_join, window_join
from tallystick.state.functions.keyed_batch import Update
from tallystick.state.functions.processing import EVENT_TIME, NO_TIME, PROCESSING_TIME
from tallystick.state.functions.ready_made import aggregate, deduplicate, sessions
from tallystick.state.functions.vectorised import ByColumns, vectorised
from tallystick.state.functions.windowed import windowed
from tallystick.state.functions.windows import cumulative, hopping, session, tumbling
from tallystick.state.overlay import FINAL_WATERMARK_MS, is_final
from tallystick.tasks import epoch_plan
from tallystick.tasks.epoch_plan import PipelinePlan, final_stage
from tallystick.tasks.event_times import InputState, TimesRead
from tallystick.tasks.handed_on import HandedOn
from tallystick.tasks.keyed import KeyedStep
from tallystick.tasks.read import send
from tallystick.values import TopicPartition
from tests.keyed_job import Job, finish, routed, step

FAR_MS = 10**8
FAR = "far"
"""The user whose rows, at the end, close all windows of the others."""
DELAY_MS = 20
"""By as much are rows of a partition out of order."""
PARTITIONS = 3
READ = pa.schema([("user", pa.string()), ("at", pa.int64())])

Timed = tuple[str, int]
"""A row as oracles see it: its user, and the time that the next step goes by."""
Oracle = Callable[[Counter[Timed]], Counter[Timed]]


@dataclass(frozen=True)
class Part:
    """A kind of step.

    Args:
        make: from the column of times to the function.
        times: a column of its output, and what it holds there of which rows.
        is_timed: whether the step itself goes by event time.
        is_by_time: its key has the time too.
    """

    make: Callable[[str], object]
    times: dict[str, Oracle]
    is_timed: bool = True
    is_by_time: bool = False


def grid(bounds: Callable[[int], list[tuple[int, int]]], column: str) -> Oracle:
    """What windows put out: one row each, with its start, its end, its first or last row's time."""

    def oracle(rows: Counter[Timed]) -> Counter[Timed]:
        windows: dict[tuple[str, int, int], list[int]] = defaultdict(list)
        for user, time in rows:
            for start, end in bounds(time):
                windows[user, start, end].append(time)
        return Counter(
            (user, {"window_start": start, "window_end": end}.get(column, picks(column, times)))
            for (user, start, end), times in windows.items()
        )

    return oracle


def picks(column: str, times: Sequence[int]) -> int:
    return min(times) if column in ("least", "first") else max(times)


def sessions_of(gap: int, column: str) -> Oracle:
    def oracle(rows: Counter[Timed]) -> Counter[Timed]:
        times_of_ends: Counter[Timed] = Counter()
        for user in {user for user, _ in rows}:
            times = sorted(time for owner, time in rows if owner == user)
            ends = [
                a
                for a, b in zip(times, [*times[1:], None], strict=True)
                if b is None or b - a > gap
            ]
            times_of_ends.update(
                (user, end + gap if column == "window_end" else end) for end in ends
            )
        return times_of_ends

    return oracle


def windows(kind, bounds: Callable[[int], list[tuple[int, int]]]) -> Part:
    values = {"least": minimum, "greatest": maximum, "first": first_value, "last": last_value}
    columns = ("window_start", "window_end", *values)
    return Part(
        lambda at: windowed(kind, {name: function(at) for name, function in values.items()}),
        {name: grid(bounds, name) for name in columns},
    )


def hops(size: int, every: int) -> Callable[[int], list[tuple[int, int]]]:
    def bounds(time: int) -> list[tuple[int, int]]:
        last = time // every * every
        return [
            (s, s + size) for s in range(last - size + every, last + 1, every) if s + size > time
        ]

    return bounds


def steps_of(size: int, step_ms: int) -> Callable[[int], list[tuple[int, int]]]:
    def bounds(time: int) -> list[tuple[int, int]]:
        start = time // size * size
        return [(start, e) for e in range(start + step_ms, start + size + 1, step_ms) if e > time]

    return bounds


def same(rows: Counter[Timed]) -> Counter[Timed]:
    return rows


def passing(mode: str) -> object:
    return vectorised(
        lambda batch: Update(batch.rows), state="", time_mode=mode, output=lambda key, rows: rows
    )


def once(rows: Counter[Timed]) -> Counter[Timed]:
    return Counter(set(rows))


PARTS = {
    "tumbling": windows(tumbling(70), hops(70, 70)),
    "hopping": windows(hopping(90, every=30), hops(90, 30)),
    "cumulative": windows(cumulative(80, step=20), steps_of(80, 20)),
    "session": Part(
        lambda at: windowed(session(40), {"last": last_value(at), "greatest": maximum(at)}),
        {name: sessions_of(40, name) for name in ("window_end", "last", "greatest")},
    ),
    "sessions": Part(lambda at: sessions(40, at), {"end": sessions_of(40, "last")}),
    "timed function": Part(lambda at: passing(EVENT_TIME), {"same": same}),
    "function": Part(lambda at: passing(NO_TIME), {"same": same}, is_timed=False),
    "deduplicate": Part(lambda at: deduplicate(), {"same": once}, is_timed=False, is_by_time=True),
    "kept": Part(
        lambda at: aggregate({"rows": count()}, each="record", keep=[at]),
        {"same": same},
        is_timed=False,
    ),
    "aggregate": Part(
        lambda at: aggregate({"newest": maximum(at)}, each="record"),
        {"newest": same},
        is_timed=False,
        is_by_time=True,
    ),
    "count window": Part(
        lambda at: windowed(count_window(1), {"latest": maximum(at)}),
        {"latest": same},
        is_timed=False,
    ),
}


@dataclass(frozen=True)
class Case:
    """A pipeline and what it must put out."""

    steps: tuple[KeyedStep, ...]
    oracles: tuple[Oracle, ...]


def in_ms(column: pa.Array) -> pa.Array:
    if not pa.types.is_timestamp(column.type):
        return column
    return pc.divide(column.cast(pa.int64()), 1000)


def plain(name: str) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """Make the rows that are compared: user and time."""
    return lambda rows: pa.record_batch({"user": rows["user"], "at": in_ms(rows[name])})


def renamed(name: str) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """A function of the user's, which makes another column of a time."""
    return lambda rows: pa.record_batch({"user": rows["user"], "made": in_ms(rows[name])})


def case_of(dice: random.Random, count: int) -> Case:
    """Draw a pipeline of so many steps."""
    columns, at, steps, oracles = READ, "at", [], []
    names = [dice.choice(sorted(PARTS)) for _ in range(count - 1)]
    names.append(dice.choice([name for name, part in PARTS.items() if part.is_timed]))
    has_time = False
    for place, name in enumerate(names):
        part = PARTS[name]
        function = part.make(at)
        key = ("user", at) if part.is_by_time else ("user",)
        if isinstance(function, ByColumns):
            function = function.make(columns)
        output = function.output(pa.schema([columns.field(name) for name in key]), columns)
        chosen = dice.choice(sorted(part.times))
        # The first step may name the times for those behind it; or leave it to them, if they stay.
        names_times = not place and (chosen != "same" or dice.random() < 0.5)
        is_timed = part.is_timed or names_times
        first = step(
            function,
            uid=f"{place}",
            key=key,
            columns=columns,
            output=output,
            event_time=at if is_timed else None,
            watermark_delay_ms=DELAY_MS if is_timed and not has_time else 0,
        )
        has_time = has_time or is_timed
        oracles.append(part.times[chosen])
        column = at if chosen == "same" else chosen
        if place == count - 1:
            first = replace(first, functions=(plain(column),))
        elif dice.random() < 0.3 and is_timed:
            first = replace(first, functions=(renamed(column),))
            output, column = pa.schema([("user", pa.string()), ("made", pa.int64())]), "made"
        steps.append(first)
        columns, at = output, column
    return Case(tuple(steps), tuple(oracles))


def rows_of(dice: random.Random) -> list[list[Timed]]:
    """Draw the rows of each partition, which are of users of its own and of a pace of its own."""
    rows_fed = []
    for partition in range(PARTITIONS):
        now, pace = dice.randrange(500), dice.choice((1, 5, 25))
        rows = []
        for _ in range(dice.randrange(1, 60)):
            now += dice.randrange(pace + 1) + (dice.randrange(300) if dice.random() < 0.1 else 0)
            rows.append((f"{partition}{dice.randrange(3)}", now - dice.randrange(DELAY_MS + 1)))
        rows_fed.append([*rows, (FAR, FAR_MS)])
    return rows_fed


class Feed:
    """Runs the epochs of a job whose readers each read a partition, and note its times."""

    def __init__(self, dice: random.Random, steps: tuple[KeyedStep, ...]) -> None:
        self.dice, self.job, self.keyed = dice, Job(steps), PipelinePlan(steps)
        self.late = 0

    def epoch(
        self, parts: Sequence[pa.RecordBatch], unfinished: Sequence[int], **further: object
    ) -> list[dict]:
        """Run an epoch; sometimes twice, as after a failure."""
        tasks = [TopicPartition("t", index) for index in range(len(parts))]
        source = InputState(
            frozenset(tasks), frozenset(tasks[index] for index in unfinished), **further
        )
        assert self.keyed.event_time is not None
        for _ in range(self.dice.choice((1, 1, 1, 2))):
            planned = self.job.plan(parallelism=self.dice.randrange(1, 4), source=source)
            frames = []
            for index, rows in enumerate(parts):
                times = TimesRead(self.keyed.event_time)
                times.note(tasks[index], rows)
                frames += list(send(planned.first, [rows], index, times.notes))
            for plan in planned.plans:
                shares = routed(frames, plan.base.parallelism)
                frames = [f for at, mine in enumerate(shares) for f in plan.run(mine, at)]
            prepared, rows = finish(planned, routed(frames, planned.writer_count))
        self.job.state = prepared.state
        self.late += sum(late for _, late in prepared.late)
        return rows

    def all(self, parts: Sequence[pa.RecordBatch], *, to_their_ends: bool = False) -> list[dict]:
        """Read everything in epochs cut at random, then run those that timers need.

        Args:
            parts: the rows of each partition.
            to_their_ends: each epoch reads all partitions to their ends, as these are then.
        """
        at, out = [0] * len(parts), []
        least = (1, 1, 2) if to_their_ends else (0, 0, 1)
        while any(start < part.num_rows for start, part in zip(at, parts, strict=True)):
            stops = [
                min(part.num_rows, start + self.dice.choice((*least, 3, 10, 100)))
                for start, part in zip(at, parts, strict=True)
            ]
            read = [p.slice(a, b - a) for p, a, b in zip(parts, at, stops, strict=True)]
            behind = [i for i, part in enumerate(parts) if stops[i] < part.num_rows]
            if to_their_ends:
                come = [TopicPartition("t", i) for i, rows in enumerate(read) if rows.num_rows]
                out += self.epoch(read, (), arrived=frozenset(come))
            else:
                out += self.epoch(read, behind)
            at = stops
        for _ in range(self.keyed.tick_count):
            out += self.epoch([part.slice(0, 0) for part in parts], ())
        return out


def part_of(rows: list[Timed]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"user": u, "at": t} for u, t in rows], schema=READ)


def of_others(rows: list[dict]) -> Counter[Timed]:
    return Counter((row["user"], row["at"]) for row in rows if row["user"] != FAR)


def put_out(oracles: Sequence[Oracle], rows: Counter[Timed]) -> Counter[Timed]:
    for oracle in oracles:
        rows = oracle(rows)
    return Counter({row: n for row, n in rows.items() if row[0] != FAR})


def check_random(seed: int, *, to_their_ends: bool) -> None:
    """Compare the rows of a random pipeline, of random partitions, with the oracle's."""
    dice = random.Random(seed)
    case = case_of(dice, dice.choice((2, 3)))
    fed = rows_of(dice)
    feed = Feed(dice, case.steps)
    out = of_others(feed.all(list(map(part_of, fed)), to_their_ends=to_their_ends))
    expected = put_out(case.oracles, Counter(row for rows in fed for row in rows))
    assert out == expected, [run_step.uid for run_step in case.steps]
    assert feed.late == 0


@pytest.mark.parametrize("to_their_ends", [False, True], ids=["a backlog", "as rows come"])
@pytest.mark.parametrize("seed", range(30))
def test_rows_of_later_steps_are_those_of_the_input_however_it_is_cut_and_paced(
    seed, to_their_ends
):
    check_random(seed, to_their_ends=to_their_ends)


def check_end(seed: int) -> None:
    """Compare what a random pipeline puts out by the end of all inputs; no row closes windows."""
    dice = random.Random(seed)
    case = case_of(dice, 3)
    fed = [rows[:-1] for rows in rows_of(dice)]
    feed, parts = Feed(dice, case.steps), list(map(part_of, fed))
    out = feed.all(parts)
    for _ in range(1 + feed.keyed.tick_count):
        out += feed.epoch([part.slice(0, 0) for part in parts], (), is_over=True)
    assert of_others(out) == put_out(case.oracles, Counter(row for rows in fed for row in rows))
    assert feed.late == 0


@pytest.mark.parametrize("seed", range(5))
def test_at_the_end_of_all_inputs_every_step_closes_all(seed):
    check_end(seed)


# --- broken on purpose --------------------------------------------------------------------------


def without_lags(original):
    return lambda self, given, delay_ms: given


def at_once(original):
    """A step hands on the watermark that it leaves, before it has put out what that closes."""

    def states_after(plans, states, *arguments):
        results = original(plans, states, *arguments)
        pairs = zip(plans, results, strict=True)
        ahead = [
            replace(plan, base=replace(plan.base, watermark_ms=state.watermark_ms))
            for plan, state in pairs
        ]
        return [results[0], *original(ahead, states, *arguments)[1:]]

    return states_after


def never_over(original):
    def states_after(plans, states, source, *arguments):
        over = None if source is None else replace(source, is_over=False)
        return original(plans, states, over, *arguments[:2])

    return states_after


def unheard(original):
    """No step but the first hears of the end of all inputs."""
    return lambda self, given, delay_ms: (
        None if is_final(given) else original(self, given, delay_ms)
    )


BROKEN = {
    "lags are left out": (HandedOn, "watermark_ms", without_lags, False),
    "handed on at once": (epoch_plan, "with_watermarks", at_once, False),
    "what comes next is not waited for": (
        epoch_plan,
        "in_use",
        lambda original: lambda base, *_: base,
        True,
    ),
    "the end is never told": (epoch_plan, "with_watermarks", never_over, None),
    "later steps do not hear of the end": (HandedOn, "watermark_ms", unheard, None),
}
"""What is broken, how, and where it is looked for: in a backlog, as rows come, or at the end."""


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_watermark_is_found_out(name, monkeypatch):
    where, attribute, broken, to_their_ends = BROKEN[name]
    monkeypatch.setattr(where, attribute, broken(getattr(where, attribute)))
    for seed in (5, *range(20)):  # the first finds those that take longest
        try:
            if to_their_ends is None:
                check_end(seed)
            else:
                check_random(seed, to_their_ends=to_their_ends)
        except AssertionError:
            return
    pytest.fail(f"survived: {name}")


class BehindATransform(Feed):
    """Rows of DataFrame code: nobody knows their partitions, and the rows alone tell the time."""

    def epoch(
        self, parts: Sequence[pa.RecordBatch], unfinished: Sequence[int], **further: object
    ) -> list[dict]:
        for _ in range(self.dice.choice((1, 1, 1, 2))):
            planned = self.job.plan(parallelism=self.dice.randrange(1, 4))
            frames = [f for at, rows in enumerate(parts) for f in send(planned.first, [rows], at)]
            for plan in planned.plans:
                shares = routed(frames, plan.base.parallelism)
                frames = [f for at, mine in enumerate(shares) for f in plan.run(mine, at)]
            prepared, rows = finish(planned, routed(frames, planned.writer_count))
        self.job.state = prepared.state
        self.late += sum(late for _, late in prepared.late)
        return rows


@pytest.mark.parametrize("seed", range(8))
def test_behind_a_transform_too_no_row_is_late_in_a_later_step(seed):
    dice = random.Random(seed)
    case = case_of(dice, 3)
    # A row right at the watermark is late there, as behind Spark's: so the delay is longer by 1.
    steps = tuple(
        replace(one, watermark_delay_ms=DELAY_MS + 1) if one.watermark_delay_ms else one
        for one in case.steps
    )
    fed = rows_of(dice)[0]
    feed = BehindATransform(dice, steps)
    assert of_others(feed.all([part_of(fed)])) == put_out(case.oracles, Counter(fed))
    assert feed.late == 0


# --- behind joins of two inputs -----------------------------------------------------------------

LEFT = pa.schema([("user", pa.string()), ("sold", pa.int64())])
RIGHT = pa.schema([("user", pa.string()), ("paid", pa.int64())])
Pairs = Callable[[list[Timed], list[Timed]], list[tuple[str, int | None, int | None]]]


def within(lower: int, upper: int) -> Pairs:
    """The pairs of an interval join, and the rows without a partner."""

    def pairs_of(left_rows, right):
        both = [
            (u, a, b) for u, a in left_rows for v, b in right if u == v and lower <= b - a <= upper
        ]
        alone = [(u, a, None) for u, a in left_rows if not any((u, a) == pair[:2] for pair in both)]
        alone += [(u, None, b) for u, b in right if not any((u, b) == (e[0], e[2]) for e in both)]
        return both + alone

    return pairs_of


def in_windows(size: int) -> Pairs:
    def pairs_of(left_rows, right):
        return [
            (u, a, b) for u, a in left_rows for v, b in right if u == v and a // size == b // size
        ]

    return pairs_of


JOINS = {
    "interval, sold": (interval_join, within(-30, 60), "sold"),
    "interval, paid": (interval_join, within(-30, 60), "paid"),
    "window, sold": (window_join, in_windows(80), "sold"),
    "window, paid": (window_join, in_windows(80), "paid"),
    "window, window_start": (window_join, in_windows(80), "window_start"),
    "window, window_end": (window_join, in_windows(80), "window_end"),
    "temporal, sold": (temporal_join, None, "sold"),
}
ARGUMENTS = {
    interval_join: {"lower": "-30 milliseconds", "upper": "60 milliseconds", "how": "full"},
    window_join: {"size": "80 milliseconds"},
    temporal_join: {"how": "left"},
}


def joined_times(join: object, pairs: Pairs | None, column: str, left_rows, right) -> list[Timed]:
    """The rows of a join, by the time that the next step goes by."""
    if pairs is None:  # each left row comes out once, and no right one of its own
        return left_rows
    own = {"sold": lambda a, b: a, "paid": lambda a, b: b}
    starts = {
        "window_start": lambda a, b: a // 80 * 80,
        "window_end": lambda a, b: a // 80 * 80 + 80,
    }
    return [(u, {**own, **starts}[column](a, b)) for u, a, b in pairs(left_rows, right)]


@pytest.mark.parametrize("name", JOINS)
@pytest.mark.parametrize("seed", range(2))
def test_windows_behind_a_join_get_all_of_its_rows(name, seed):
    """A pair comes out with the later of its rows: the other one's time is behind the watermark."""
    join, pairs, column = JOINS[name]
    dice = random.Random(seed)
    inputs = KeyedInputs(
        [KeyedInput("l", LEFT, ("user",), "sold"), KeyedInput("r", RIGHT, ("user",), "paid")]
    )
    first = join("l", "r", **ARGUMENTS[join]).make(inputs.columns)
    output = first.output(pa.schema([("user", pa.string())]), inputs.columns)

    def with_time(rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows.filter(rows[column].is_valid())  # a row without a partner may have none

    second = windowed(tumbling(50), {"n": count()}).make(output)
    steps = (
        step(
            first,
            uid="join",
            columns=inputs.columns,
            output=output,
            functions=(with_time,),
            event_time=TIME,
            watermark_delay_ms=DELAY_MS,
            input_times={"l": "sold", "r": "paid"},
        ),
        step(
            second,
            uid="windows",
            columns=output,
            output=second.output(pa.schema([("user", pa.string())]), output),
            event_time=column,
            functions=(plain("window_start"),),
        ),
    )
    users = [f"u{n}" for n in range(4)]
    fed = []
    for pace in (2, 20):
        times = sorted(dice.randrange(40 * pace) for _ in range(40))
        rows = [(dice.choice(users), time - dice.randrange(DELAY_MS + 1)) for time in times]
        fed.append([*rows, (FAR, FAR_MS)])
    parts = [
        inputs.numbered(
            number,
            pa.record_batch(
                {
                    "user": [u for u, _ in rows],
                    join_columns.names[1]: pa.array([t for _, t in rows]),
                }
            ),
        )
        for number, (rows, join_columns) in enumerate(zip(fed, (LEFT, RIGHT), strict=True))
    ]
    feed = Feed(dice, steps)
    out = Counter((row["user"], row["at"]) for row in feed.all(parts) if row["user"] != FAR)
    joined = joined_times(join, pairs, column, fed[0], fed[1])
    expected = {(u, t // 50 * 50) for u, t in joined if t is not None and u != FAR}
    assert out == Counter(expected)
    assert feed.late == 0


# --- over restarts and at the end ---------------------------------------------------------------


def hours() -> tuple[KeyedStep, ...]:
    """Windows of windows, as a user writes them."""
    minutes = windowed(tumbling(60), {"n": count()}).make(READ)
    columns = minutes.output(pa.schema([READ.field("user")]), READ)
    function = windowed(tumbling(600), {"n": count()}).make(columns)
    output = function.output(pa.schema([READ.field("user")]), columns)
    first = step(minutes, uid="minutes", columns=READ, output=columns, event_time="at")
    second = step(
        function,
        uid="hours",
        columns=columns,
        output=output,
        event_time="window_start",
        functions=(plain("window_start"),),
    )
    return first, second


def rows_at(*times: int) -> list[pa.RecordBatch]:
    return [pa.record_batch({"user": ["u"] * len(times), "at": pa.array(times, pa.int64())})]


def test_a_step_is_handed_what_the_one_before_fired_by_less_the_size_of_its_windows():
    feed = Feed(random.Random(1), hours())
    marks = []
    for times in ((100,), (700,), (), ()):
        feed.epoch(rows_at(*times), ())
        marks.append([step_state.watermark_ms for step_state in feed.job.state])
    assert marks == [[100, None], [700, 100 - 59], [700, 700 - 59], [700, 700 - 59]]


def test_a_watermark_of_an_earlier_release_never_goes_back():
    """It was the greatest time that had come, which the one that is handed on has yet to reach."""
    feed = Feed(random.Random(1), hours())
    feed.epoch(rows_at(100), ())
    first, second = feed.job.state
    feed.job.state = (first, replace(second, watermark_ms=300))
    for at, expected in ((330, 300), (900, 300), (901, 900 - 59)):
        feed.epoch(rows_at(at), ())
        assert feed.job.state[1].watermark_ms == expected


# --- the final watermark, and timers of the clock -----------------------------------------------


def through(second: object, **settings: object) -> tuple[KeyedStep, ...]:
    """Windows, a step of columns alone, and windows of what it passes on."""
    first, last = hours()
    columns = first.output
    function = second.make(columns) if isinstance(second, ByColumns) else second
    middle = step(function, uid="middle", columns=columns, output=columns, **settings)
    return first, middle, replace(last, watermark_delay_ms=1000)


def at_its_end(steps: tuple[KeyedStep, ...]) -> tuple[list[int | None], list[dict]]:
    """The watermarks, and what came out, after all that the end of all inputs brings."""
    feed = Feed(random.Random(1), steps)
    out = feed.epoch(rows_at(100, 200), ())
    for _ in range(1 + feed.keyed.tick_count):
        out += feed.epoch(rows_at(), (), is_over=True)
    assert feed.late == 0
    return [step_state.watermark_ms for step_state in feed.job.state], out


@pytest.mark.parametrize("forget", [None, 1000], ids=["directly after", "after deduplicate"])
def test_the_final_watermark_reaches_the_last_step_without_what_it_may_be_behind(forget):
    first, last = hours()
    steps = first, replace(last, watermark_delay_ms=1000)
    if forget is not None:
        steps = through(deduplicate(forget))
    marks, out = at_its_end(steps)
    assert {*marks} - {None} == {FINAL_WATERMARK_MS}
    assert out == [{"user": "u", "at": 0}]


def test_it_does_not_pass_timers_of_the_clock_that_may_still_make_rows():
    """Else these rows would be late, all of them."""
    steps = through(passing(PROCESSING_TIME))
    marks, out = at_its_end(steps)
    assert (marks[0], marks[2], out) == (FINAL_WATERMARK_MS, 200 - 59 - 1000, [])


def test_the_first_step_with_event_time_gets_it_behind_timers_that_make_no_rows():
    first, middle, last = through(deduplicate(1000))
    assert final_stage((middle, last)) == 2
    assert final_stage((replace(middle, processor=passing(PROCESSING_TIME)), last)) == 0
    assert final_stage((first, middle, last)) == 1
