"""The events of Nexmark: persons, auctions and bids, as columns. Pure, and the same for a seed.

As in the generators of Beam and nexmark/nexmark: of 50 events one is a person, three are auctions
and 46 are bids; half the bids are for a hot auction, three quarters of the sellers and bidders are
hot. Each draw is a hash of the event's number, so events do not depend on how they are cut.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Numbers = npt.NDArray[np.int64]

BIDS, AUCTIONS, PERSONS = "bids", "auctions", "persons"
BLOCK = 50
"""Events in which each kind comes as often as it does: event 0 a person, 1 to 3 auctions."""
AUCTIONS_A_BLOCK = 3
FIRST_ID = 1000
FIRST_CATEGORY, CATEGORY_COUNT = 10, 5
START_MS = 1_700_000_000_000
EVENTS_PER_MS = 10
AUCTIONS_IN_FLIGHT = 100
PEOPLE_ACTIVE = 1000
LEAD = 10
"""How far ids may run ahead: some bids name auctions and bidders that come later."""
HOT_EVERY = 100
AUCTION_MS_MAX = 2 * AUCTIONS_IN_FLIGHT * BLOCK // (AUCTIONS_A_BLOCK * EVENTS_PER_MS)
STATES = ("AZ", "CA", "ID", "OR", "WA", "WY")
CITIES = ("Phoenix", "Los Angeles", "San Francisco", "Boise", "Portland", "Bend", "Seattle")
FIRST_NAMES = ("Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter")
LAST_NAMES = (
    "Shultz",
    "Abrams",
    "Spencer",
    "White",
    "Bartels",
    "Walton",
    "Smith",
    "Jones",
    "Noris",
)
CHANNELS = ("Google", "Facebook", "Baidu", "Apple")
TEXT_COUNT = 1024
_GOLDEN = 0x9E3779B97F4A7C15
_DRAWS = {name: number for number, name in enumerate(("hot", "hot2", "id", "id2", "price", "text"))}
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


@dataclass(frozen=True, slots=True)
class Draw:
    """Random numbers for events, by their numbers.

    Args:
        seed: of all of them.
        events: the numbers of the events.
    """

    seed: int
    events: Numbers

    def below(self, what: str, limit: Numbers | int) -> Numbers:
        """Whole numbers from 0 to `limit`, which is not one of them."""
        return (self._hash(what) % np.asarray(limit).astype(np.uint64)).astype(np.int64)

    def share(self, what: str) -> npt.NDArray[np.float64]:
        """Numbers from 0 up to 1."""
        return (self._hash(what) >> np.uint64(11)).astype(np.float64) / float(1 << 53)

    def _hash(self, what: str) -> npt.NDArray[np.uint64]:
        """SplitMix64 of seed, event and what is drawn."""
        steps = self.events.astype(np.uint64) * np.uint64(len(_DRAWS)) + np.uint64(_DRAWS[what])
        mixed = (steps + np.uint64((self.seed << 40) + 1)) * np.uint64(_GOLDEN)
        for shift, factor in _MIX:
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return mixed ^ (mixed >> np.uint64(31))


def events(kind: str, first: int, stop: int, seed: int) -> pa.RecordBatch:
    """Return the events of a kind whose numbers are from `first` to `stop`, which is not included.

    Args:
        kind: `BIDS`, `AUCTIONS` or `PERSONS`.
        first: the number of an event; each stands for a tenth of a millisecond.
        stop: the same.
        seed: another one gives other events.
    """
    numbers = np.arange(first, stop, dtype=np.int64)
    place = numbers % BLOCK
    is_kind = {
        PERSONS: place == 0,
        AUCTIONS: (place > 0) & (place <= AUCTIONS_A_BLOCK),
        BIDS: place > AUCTIONS_A_BLOCK,
    }[kind]
    make = {PERSONS: _persons, AUCTIONS: _auctions, BIDS: _bids}[kind]
    return make(Draw(seed, numbers[is_kind]))


def count_of(kind: str, event_count: int) -> int:
    """How many of so many events are of a kind; whole blocks only."""
    assert event_count % BLOCK == 0, event_count
    per_block = {PERSONS: 1, AUCTIONS: AUCTIONS_A_BLOCK, BIDS: BLOCK - 1 - AUCTIONS_A_BLOCK}
    return event_count // BLOCK * per_block[kind]


def time_of(event: int) -> int:
    """The time of an event in ms."""
    return START_MS + event // EVENTS_PER_MS


def json_of(rows: pa.RecordBatch) -> pa.Array:
    """Each row as JSON, in the order of the columns; there is nothing to escape in these."""
    parts: list[pa.Array | str] = []
    for number, field in enumerate(rows.schema):
        quote = '"' if pa.types.is_string(field.type) else ""
        ended = ('"' if pa.types.is_string(rows.schema[number - 1].type) else "") if number else ""
        parts += [f'{ended}{"," if number else "{"}"{field.name}":{quote}']
        parts += [pc.cast(rows.column(number), pa.string())]
    parts += [f"{quote}}}", ""]  # the last is the separator
    return pc.binary_join_element_wise(*parts)


def _persons(draw: Draw) -> pa.RecordBatch:
    number = draw.events // BLOCK
    first, last = draw.below("id", len(FIRST_NAMES)), draw.below("id2", len(LAST_NAMES))
    names = pc.binary_join_element_wise(_of(FIRST_NAMES, first), _of(LAST_NAMES, last), " ")
    texts = _texts(draw)
    return pa.record_batch(
        {
            "id": FIRST_ID + number,
            "name": names,
            "emailAddress": pc.binary_join_element_wise(texts, "mail.com", "@"),
            "creditCard": pc.cast(pa.array(10**15 + draw.below("price", 10**15)), pa.string()),
            "city": _of(CITIES, draw.below("hot", len(CITIES))),
            "state": _of(STATES, draw.below("hot2", len(STATES))),
            "dateTime": _times(draw),
            "extra": pc.binary_repeat(texts, 3),
        }
    )


def _auctions(draw: Draw) -> pa.RecordBatch:
    number = draw.events // BLOCK * AUCTIONS_A_BLOCK + draw.events % BLOCK - 1
    times, texts = _times(draw), _texts(draw)
    initial = _prices(draw)
    return pa.record_batch(
        {
            "id": FIRST_ID + number,
            "itemName": texts,
            "description": pc.binary_repeat(texts, 4),
            "initialBid": initial,
            "reserve": initial + draw.below("hot2", 10**6),
            "dateTime": times,
            "expires": times + 1 + draw.below("text", AUCTION_MS_MAX),
            "seller": _people(draw, 0),
            "category": FIRST_CATEGORY + draw.below("price", CATEGORY_COUNT),
            "extra": pc.binary_repeat(texts, 10),
        }
    )


def _bids(draw: Draw) -> pa.RecordBatch:
    last = draw.events // BLOCK * AUCTIONS_A_BLOCK + AUCTIONS_A_BLOCK - 1
    earliest = np.maximum(last - AUCTIONS_IN_FLIGHT, 0)
    some = earliest + draw.below("id", last - earliest + 1 + LEAD)
    is_hot = draw.below("hot", 2) > 0
    texts = _texts(draw)
    return pa.record_batch(
        {
            "auction": FIRST_ID + np.where(is_hot, last // HOT_EVERY * HOT_EVERY, some),
            "bidder": _people(draw, 1),
            "price": _prices(draw),
            "channel": _of(CHANNELS, draw.below("text", len(CHANNELS))),
            "url": pc.binary_join_element_wise("https://www.nexmark.com", texts, "item.htm", "/"),
            "dateTime": _times(draw),
            "extra": texts,
        }
    )


def _people(draw: Draw, hot_place: int) -> Numbers:
    """Sellers (hot place 0) or bidders (1) of events: three of four are a hot one."""
    last = draw.events // BLOCK
    active = np.minimum(last + 1, PEOPLE_ACTIVE)
    some = last + 1 - active + draw.below("id2", active + LEAD)
    hot = last // HOT_EVERY * HOT_EVERY + hot_place
    idents: Numbers = FIRST_ID + np.where(draw.below("hot2", 4) > 0, hot, some)
    return idents


def _prices(draw: Draw) -> Numbers:
    prices: Numbers = np.round(10 ** (6 * draw.share("price")) * 100).astype(np.int64)
    return prices


def _times(draw: Draw) -> Numbers:
    return START_MS + draw.events // EVENTS_PER_MS


def _of(words: tuple[str, ...], numbers: Numbers) -> pa.Array:
    return pa.array(words).take(pa.array(numbers))


def _texts(draw: Draw) -> pa.Array:
    """Texts of 16 letters, of which there are `TEXT_COUNT`."""
    words = tuple(f"{(number * _GOLDEN) % (1 << 64):016x}" for number in range(TEXT_COUNT))
    return _of(words, draw.below("text", TEXT_COUNT))
