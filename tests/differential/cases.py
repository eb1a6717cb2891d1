"""What is compared: every subscription, every way to say where to begin and end, every oddity."""

import json
from typing import Any

from tests.differential.reading import Case
from tests.differential.strange_topics import MIDNIGHT_MS, MINUTE_MS

CLOCK = {"subscribe": "clock"}
UNEQUAL = {"subscribe": "unequal"}
EARLIEST = {"startingOffsets": "earliest"}


def at(*minutes: int) -> str:
    """Per partition of the topic `clock`: so many minutes after its first record."""
    return json.dumps(
        {"clock": {str(p): MIDNIGHT_MS + m * MINUTE_MS for p, m in enumerate(minutes)}}
    )


def after(minutes: int) -> str:
    """The same for all."""
    return str(MIDNIGHT_MS + minutes * MINUTE_MS)


def offsets(topic: str, *numbers: int) -> str:
    """Per partition."""
    return json.dumps({topic: {str(p): offset for p, offset in enumerate(numbers)}})


def batch(*options: dict[str, str], **rest: Any) -> Case:
    """A case of `spark.read`."""
    return Case({name: value for settings in options for name, value in settings.items()}, **rest)


def stream(*options: dict[str, str], **rest: Any) -> Case:
    """A case of `spark.readStream`."""
    return batch(*options, streaming=True, **rest)


LATE = {"startingOffsetsByTimestampStrategy": "latest"}
STRICT = {"startingOffsetsByTimestampStrategy": "error"}

CASES = {
    # What a log may hold.
    "nulls, empties": batch({"subscribe": "oddities"}),
    "headers": batch({"subscribe": "oddities", "includeHeaders": "true"}),
    "headers asked of records without": batch(UNEQUAL, {"includeHeaders": "true"}),
    "compressions": batch({"subscribe": "compressed"}),
    "log append time": batch({"subscribe": "appended"}),
    "transactions": batch({"subscribe": "transactions"}),
    "transactions from within": batch(
        {"subscribe": "transactions", "startingOffsets": offsets("transactions", 7, 33, 2)}
    ),
    "transactions cut short": batch(
        {"subscribe": "transactions", "endingOffsets": offsets("transactions", 12, 35, 3)}
    ),
    "nothing but aborted": batch({"subscribe": "aborted"}, empty=True),
    "compacted": batch({"subscribe": "compacted"}),
    "compacted from a gap on": batch(
        {"subscribe": "compacted", "startingOffsets": offsets("compacted", 3)}
    ),
    "deleted records": batch({"subscribe": "deleted"}),
    "deleted records accepted": batch(
        {
            "subscribe": "deleted",
            "startingOffsets": offsets("deleted", 3),
            "failOnDataLoss": "false",
        }
    ),
    # Which partitions.
    "two topics": batch({"subscribe": "unequal,oddities"}),
    "a pattern": batch({"subscribePattern": "com.*|o?dditie[rs]"}),
    "assigned": batch({"assign": json.dumps({"unequal": [0, 3], "compressed": [1]})}),
    "split up": batch(UNEQUAL, {"minPartitions": "9"}),
    # From where to where, by offset.
    "earliest": batch(UNEQUAL, EARLIEST),
    "offsets": batch(UNEQUAL, {"startingOffsets": offsets("unequal", 690, 0, -2, -2)}),
    "ending latest": batch(UNEQUAL, {"endingOffsets": "latest"}),
    "ending offsets": batch(UNEQUAL, {"endingOffsets": offsets("unequal", 20, -1, -1, 0)}),
    "a slice": batch(
        UNEQUAL,
        {
            "startingOffsets": offsets("unequal", 100, -2, 0, 1),
            "endingOffsets": offsets("unequal", 120, 2, -1, -1),
        },
    ),
    # By time.
    "timestamp": batch(CLOCK, LATE, {"startingTimestamp": after(3)}),
    "timestamp between records": batch(CLOCK, LATE, {"startingTimestamp": str(int(after(4)) + 1)}),
    "timestamps": batch(CLOCK, LATE, {"startingOffsetsByTimestamp": at(8, 1, 10, 0)}),
    "strict timestamps": batch(
        {"assign": '{"clock": [0, 1, 2]}'},
        STRICT,
        {"startingOffsetsByTimestamp": at(2, 1, 9)},
    ),
    "ending timestamp": batch(CLOCK, {"endingTimestamp": after(2)}),
    "ending timestamps": batch(CLOCK, {"endingOffsetsByTimestamp": at(4, 9, 9, 0)}),
    "between two times": batch(
        CLOCK, LATE, {"startingTimestamp": after(1), "endingTimestamp": after(7)}
    ),
    # As streams; each has a Python of its own in Spark.
    "stream from earliest, with headers": stream(
        {"subscribe": "transactions,oddities", "includeHeaders": "true"}, EARLIEST
    ),
    "stream in steps, split up": stream(
        UNEQUAL, EARLIEST, {"maxOffsetsPerTrigger": "200", "minPartitions": "7"}
    ),
    "stream from latest": stream(UNEQUAL, {"startingOffsets": "latest"}, empty=True),
    "stream from offsets": stream(
        UNEQUAL, {"startingOffsets": offsets("unequal", 650, -1, -2, -2)}
    ),
    "stream from a time": stream(CLOCK, LATE, {"startingTimestamp": after(2)}),
    "stream from times": stream(CLOCK, LATE, {"startingOffsetsByTimestamp": at(0, 1, 11, 0)}),
    # What must not be read.
    "unknown topic": batch({"subscribe": "nobody-knows-it"}, fails=True),
    "unknown topic as a stream": stream({"subscribe": "nobody-knows-it"}, fails=True),
    "no such time": batch(CLOCK, STRICT, {"startingTimestamp": after(1000)}, fails=True),
    "no such time in one partition": batch(
        CLOCK, STRICT, {"startingOffsetsByTimestamp": at(0, 0, 0, 0)}, fails=True
    ),
    "no such time, by default": batch(CLOCK, {"startingTimestamp": after(3)}, fails=True),
    "deleted records not accepted": batch(
        {"subscribe": "deleted", "startingOffsets": offsets("deleted", 3)}, fails=True
    ),
    "a batch that begins at its end": batch(UNEQUAL, {"startingOffsets": "latest"}, fails=True),
    "a batch that ends at its beginning": batch(UNEQUAL, {"endingOffsets": "earliest"}, fails=True),
    "offsets of a stranger": batch(
        {"subscribe": "oddities", "startingOffsets": offsets("unequal", 0, 0, 0, 0)}, fails=True
    ),
    "two subscriptions": batch(UNEQUAL, {"subscribePattern": "unequal"}, fails=True),
    "no subscription": batch({}, fails=True),
}

DIFFERENT = {
    # Ours matches whole names, as the consumer's own subscribe(Pattern) and Flink do.
    "a pattern of a part of names": batch({"subscribePattern": "c[aeiou]m"}),
    # In Spark the time wins silently.
    "two starts": batch(CLOCK, LATE, EARLIEST, {"startingTimestamp": after(5)}),
}
"""What ours does on purpose otherwise; Spark's connector reads it."""
