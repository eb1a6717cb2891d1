"""What the kept pipelines must have written and must hold, worked out from their input in Python.

Nothing here shares code with the library. Which windows are closed and which orders are given up as
unpaid depends on where epochs are cut: each must be in the output or in the state, and in one only.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.upgrade.pipelines import (
    ASK,
    FAR_MS,
    LOT,
    PAID_WITHIN_MS,
    WINDOW_MS,
    Record,
)

Rows = list[dict[str, Any]]
Window = tuple[str, int]
"""The item, and the beginning in ms."""


@dataclass
class User:
    """What is remembered of a user."""

    orders: int = 0
    total: int = 0
    streak: tuple[str, int] = ("", 0)
    latest: list[int] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    timers: list[int] = field(default_factory=list)

    def note(self, row: dict[str, Any], price: int | None) -> str:
        """Take a row, and return what the step `habits` says of it."""
        item, length = self.streak
        self.orders += 1
        self.total += row["amount"]
        self.streak = (row["item"], length + 1 if row["item"] == item else 1)
        self.latest = [*self.latest, row["n"]][-3:]
        self.seen[row["item"]] += 1
        text = (
            f"{row['n']}: {self.orders} of {self.total} at {price}, streak {self.streak[1]}, "
            f"{self.seen[row['item']]} x {row['item']}, {self.orders} visits, latest {self.latest}"
        )
        if row["item"] == ASK:
            return f"{text}, fresh [], timers {self.timers}"
        if self.orders == 2:
            self.timers.append(FAR_MS + row["n"])
        return text


class Expected:
    """The results of the pipelines after some phases of input."""

    def __init__(self, phases: Iterable[list[Record]]) -> None:
        self.users: dict[str, User] = defaultdict(User)
        self.prices: dict[str, int] = {}
        self.windows: dict[Window, list[dict[str, Any]]] = defaultdict(list)
        self.returns: Rows = []
        self.orders: dict[int, dict[str, Any]] = {}
        self.payments: dict[int, int] = {}
        for phase in phases:
            for topic, _, value in phase:
                self._take(topic, value)

    def _take(self, topic: str, value: str) -> None:
        if topic == "returns":
            user, item, *numbers = value.split(";")
            amount, at, n = map(int, numbers)
            row = {"user": user, "item": item, "amount": amount, "at": at, "n": n}
            self.returns.append(row)
        else:
            row = json.loads(value)
        if topic == "prices":
            self.prices[row["item"]] = row["price"]
        elif topic == "payments":
            self.payments[row["order"]] = row["on"]
        else:
            if topic == "orders":
                self.orders[row["n"]] = row
            note = self.users[row["user"]].note(row, self.prices.get(row["item"]))
            start = row["at"] - row["at"] % WINDOW_MS
            self.windows[row["item"], start].append({**row, "note": note})

    def check_windows(self, output: Rows, panes: dict[Window, dict[str, Any]]) -> None:
        """Each window is in the output or open, and has just the rows that it must have.

        Args:
            output: the rows of the topic.
            panes: the lines of accumulators that the state holds.
        """
        closed = [(row["item"], row["window_start"]) for row in output]
        assert len(set(closed)) == len(closed), "a window was put out twice"
        assert not set(closed) & panes.keys(), "a window was put out, and is open still"
        assert {*closed, *panes} == self.windows.keys()
        for row in output:
            rows = self.windows[row["item"], row["window_start"]]
            assert row["notes"] == [row_in["note"] for row_in in rows]
            amounts = sorted(row_in["amount"] for row_in in rows)
            assert (row["n"], row["highest"]) == (len(rows), amounts[-1])
            assert row["average"] == sum(amounts) / len(rows)
            assert row["users"] == len({row_in["user"] for row_in in rows}), "few: counted exactly"
            low, high = amounts[(len(rows) - 1) // 2], amounts[len(rows) // 2]
            assert 0.99 * low <= row["median"][0] <= 1.01 * high
        for window, pane in panes.items():
            rows = self.windows[window]
            assert sorted(pane["notes.values"]) == sorted(row_in["note"] for row_in in rows)
            amounts = [row_in["amount"] for row_in in rows]
            assert (pane["n"], pane["highest"]) == (len(rows), max(amounts))
            assert (pane["average.sum"], pane["average.count"]) == (sum(amounts), len(rows))
            assert sum(pane["median.counts"]) == len(rows)

    def check_lots(self, lots: Rows, waiting: Rows) -> None:
        """Each return was put out in a lot, or is held by a task for its next one."""
        assert len(lots) % LOT == 0
        returns = [
            {name: row[name] for name in ("user", "item", "amount", "at", "n")}
            for row in [*lots, *waiting]
        ]
        assert _sorted(returns) == _sorted(self.returns)

    def check_state(self, state: dict[str, Rows]) -> None:
        """The keyed state and the table are those that follow from the input."""
        totals = {row["user"]: (row["orders"], row["total"]) for row in state["totals"]}
        assert totals == {name: (user.orders, user.total) for name, user in self.users.items()}
        assert {row["item"]: row["price"] for row in state["prices"]} == self.prices
        habits = {
            row["user"]: User(
                orders=row["visits"]["visits"],
                total=totals[row["user"]][1],
                streak=(row["streak"]["item"], row["streak"]["length"]),
                latest=[member["n"] for member in row["latest"]],
                seen=Counter({key["item"]: value["times"] for key, value in row["seen"]}),
                timers=row["timers"],
            )
            for row in state["habits"]
        }
        assert habits == self.users

    def check_paid(self, output: Rows, waiting: set[int]) -> None:
        """Each order was put out once, with its payment if that came in time; or waits for one.

        Args:
            output: the rows of the files.
            waiting: the orders in the state.
        """
        pairs = {
            (n, on)
            for n, on in self.payments.items()
            if 0 <= on - self.orders[n]["at"] <= PAID_WITHIN_MS
        }
        unpaid = {n for n in self.orders if n not in {n for n, _ in pairs}}
        given_up = [row["n"] for row in output if row["order"] is None]
        pairs_out = [(row["order"], row["on"]) for row in output if row["order"] is not None]
        assert sorted(pairs_out) == sorted(pairs)
        assert sorted(given_up) == sorted(unpaid - waiting)
        for row in output:
            assert {
                name: row[name] for name in ("user", "item", "amount", "at", "n")
            } == self.orders[row["n"]]


def _sorted(rows: Rows) -> Rows:
    return sorted(rows, key=lambda row: row["n"])
