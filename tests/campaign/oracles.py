"""What programs must have written, by their input alone: no undisturbed run takes part."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime

from tallystick_tools.chaos.cluster import NO_OFFSET, InputRecord, OutputRecord
from tests.campaign.answers import answer_of

Inputs = Mapping[str, Sequence[InputRecord]]
Row = dict[str, object]

UNEVEN_TOPIC = "uneven"
DELAY_MS = 2_000
WINDOW_MS, LONG_WINDOW_MS = 1_000, 10_000
TEAMS = 3


def team(player: str) -> str:
    """Return the team that a player is in; each has players in all partitions."""
    return f"t{int(player[1:]) % TEAMS}"


def values(inputs: Inputs, topic: str) -> list[dict[str, object]]:
    """Return the input's values."""
    return [json.loads(record.value) for record in inputs[topic]]


def answered(inputs: Inputs) -> list[Row]:
    """Return each bet with its own answers, from a process in which all of its module lives."""
    (topic,) = inputs
    return [
        {
            "player": bet["player"],
            "id": bet["id"],
            "answer": answer_of(f"{bet['id']}"),
            "team": answer_of(f"team of {bet['player']}"),
            "is_refreshed": True,
        }
        for bet in values(inputs, topic)
    ]


def with_teams(inputs: Inputs) -> list[Row]:
    """Return each bet with its player's team."""
    (topic,) = inputs
    return [bet | {"team": team(str(bet["player"]))} for bet in values(inputs, topic)]


def windows_of_windows(inputs: Inputs) -> list[Row]:
    """Return the long windows of teams, over the short windows of players, that are closed.

    A short window is a row at its end. The watermark is that of the slowest partition.
    """
    latest: dict[int, int] = {}
    short: Counter[tuple[str, int]] = Counter()
    amounts: Counter[tuple[str, int]] = Counter()
    for record in inputs[UNEVEN_TOPIC]:
        bet = json.loads(record.value)
        latest[record.partition] = max(latest.get(record.partition, 0), bet["at"])
        window = bet["player"], bet["at"] // WINDOW_MS * WINDOW_MS
        short[window] += 1
        amounts[window] += bet["amount"]
    watermark_ms = min(latest.values()) - DELAY_MS
    long: dict[tuple[str, int], Counter[str]] = {}
    for (player, start), count in short.items():
        end = start + WINDOW_MS
        if end - 1 <= watermark_ms:
            at = team(player), end // LONG_WINDOW_MS * LONG_WINDOW_MS
            sums = {"n": count, "amount": amounts[player, start], "windows": 1}
            long.setdefault(at, Counter()).update(sums)
    return [
        {"team": name, "window_start": start, "window_end": start + LONG_WINDOW_MS, **sums}
        for (name, start), sums in long.items()
        if start + LONG_WINDOW_MS - 1 <= watermark_ms
    ]


def expected_records(rows: Sequence[Row], outputs: Sequence[str]) -> list[OutputRecord]:
    """Return rows as records to compare with, of each output."""
    texts = [_text(row) for row in rows]
    return [OutputRecord(output, -1, NO_OFFSET, None, text) for output in outputs for text in texts]


def found_records(
    records: Sequence[OutputRecord], own: str
) -> tuple[list[OutputRecord], list[str]]:
    """Return what was written as records to compare, and what is wrong whatever the input is.

    Args:
        records: As they were read.
        own: A field that each row has a value of its own in, and that differs from run to run; "":
            there is none.
    """
    outputs: list[OutputRecord] = []
    drawn: Counter[object] = Counter()
    for record in records:
        row = {name: _plain(name, value) for name, value in json.loads(record.value or b"").items()}
        if own:
            drawn[row.pop(own)] += 1
        outputs.append(
            OutputRecord(record.topic, record.partition, record.offset, None, _text(row))
        )
    twice = sum(count > 1 for count in drawn.values())
    text = f"{twice} of {len(drawn)} values of {own!r} are in more than one row"
    return outputs, [text] if twice else []


def _plain(name: str, value: object) -> object:
    """Return a moment in milliseconds, anything else as it is."""
    if name in ("window_start", "window_end"):
        moment = datetime.fromisoformat(str(value))
        assert moment.tzinfo is not None, value
        return round(moment.timestamp() * 1000)
    return value


def _text(row: Row) -> bytes:
    return json.dumps(row, sort_keys=True).encode()
