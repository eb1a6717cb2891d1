"""Cases for Flink's window and join operators, answered in `../flink_operators.jsonl`.

Each case is a script of steps: the watermark that is known when the step begins, and the rows that
come then, as (side, key, time, value). Rows come out of order, late, at equal times, and after
pauses. Flink's own operators answer, in its test harness, so that no clock or thread takes part.

To make the file again (a JDK from 17 on, and Maven):

    cd tests/golden/flink_operators
    mvn -q dependency:copy-dependencies -DoutputDirectory=/tmp/flink-lib
    javac -cp '/tmp/flink-lib/*' -d /tmp/flink-classes *.java
    python cases.py | java -cp '/tmp/flink-classes:/tmp/flink-lib/*' \
        --add-opens java.base/java.util=ALL-UNNAMED FlinkOperators > ../flink_operators.jsonl
"""

import json
import random
from collections.abc import Iterator
from typing import Any

KEYS = 3


def main() -> None:
    """Print a case per line."""
    for number, settings in enumerate(_settings()):
        steps = list(_steps(random.Random(number), settings))
        print(json.dumps({"number": number, **settings, "steps": steps}, separators=(",", ":")))


def _settings() -> Iterator[dict[str, Any]]:
    for lateness in (0, 7, 40):
        for offset in (0, 3, -4):
            yield {"kind": "tumbling", "size": 10, "offset": offset, "lateness": lateness}
            for size, every in ((12, 4), (10, 5), (9, 9), (20, 2)):
                hopping = {
                    "kind": "hopping",
                    "size": size,
                    "every": every,
                    "offset": offset % every,
                }
                yield {**hopping, "lateness": lateness}
        for gap in (1, 5, 12):
            yield {"kind": "session", "size": gap, "lateness": lateness}
    for lower, upper in ((0, 0), (-5, 5), (-10, -2), (3, 9), (0, 8), (-6, 0)):
        for _ in range(2):
            yield {"kind": "interval_join", "lower": lower, "upper": upper}
    for size, every in ((1, 1), (4, 4), (7, 7), (4, 2), (6, 4), (5, 1), (7, 3)):
        yield {"kind": "count", "size": size, "every": every}

    yield from _newer_settings()


def _newer_settings() -> Iterator[dict[str, Any]]:
    for size, step, offset in ((12, 4, 0), (20, 5, 3), (9, 3, -2), (6, 6, 0)):
        for lateness in (0, 7, 40):
            cumulative = {"kind": "cumulative", "size": size, "step": step, "offset": offset}
            yield {**cumulative, "lateness": lateness}
    for how in ("inner", "left", "right", "full"):
        for lower, upper in ((0, 0), (-5, 5), (-10, -2), (3, 9)):
            yield {"kind": "interval_join", "lower": lower, "upper": upper, "how": how}
        for size, offset in ((10, 0), (7, 3)):
            yield {"kind": "window_join", "size": size, "offset": offset, "how": how}
    for how in ("inner", "left"):
        for _ in range(4):
            yield {"kind": "temporal_join", "how": how}
    for how in ("inner", "left", "right", "full"):
        for deletes in (3, 4, 1000):  # a row whose value it divides deletes that of its key
            yield {"kind": "upsert_join", "how": how, "deletes": deletes}


def _steps(chance: random.Random, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield steps whose watermark follows the latest time by a delay, and at times stands still."""
    latest, watermark, value = chance.randrange(-30, 30), None, 0
    if "how" in settings:
        latest += 1000  # Flink's interval join of tables takes no partner from before 1970
    sides = 2 if settings["kind"].endswith("join") else 1
    delays = (6, 12, 15) if sides == 2 else (0, 4, 8)
    for _ in range(14):
        rows = []
        for _ in range(chance.choice((0, 1, 3, 8))):
            time = latest + chance.randrange(-12, 6)
            if chance.random() < 0.03:
                time += 60  # a pause of the stream
            if sides == 2 and time == watermark:
                time += 1  # late by Flink's windows and by ours, not by its interval join
            if "how" in settings and watermark is not None and time <= watermark:
                time = watermark + chance.randrange(1, 4)  # Flink's tables join some late rows too
            value += 1
            rows.append([chance.randrange(sides), chance.randrange(KEYS), time, value])
        if settings["kind"] == "session":
            # Flink judges rows one by one: one that is late by itself is dropped, unless a session
            # that it touches came before it. Ours looks at all rows of an epoch.
            rows.sort(key=lambda row: -row[2])
        yield {"watermark": watermark, "rows": rows}
        latest = max([latest, *(row[2] for row in rows)])
        if rows and chance.random() < 0.8:
            after = latest - chance.choice(delays)
            watermark = after if watermark is None else max(watermark, after)
    yield {"watermark": latest + 1000, "rows": []}


if __name__ == "__main__":
    main()
