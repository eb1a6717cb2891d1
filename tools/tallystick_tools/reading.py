"""Topics read to their end by confluent-kafka, a client independent of this package."""

import time

from confluent_kafka import Consumer, Message

POLL_S = 0.2
"""`consume` waits that long for a full batch, also when the end has been read already."""
BATCH = 10_000


def read_to_end(consumer: Consumer, idle_s: float) -> list[Message]:
    """Return all records of the assigned partitions, up to their ends.

    Args:
        consumer: With partitions assigned, and `enable.partition.eof`.
        idle_s: The longest time without an answer: longer than any wait of a healthy broker.

    Raises:
        TimeoutError: The end was not reached: a transaction is open, or a broker is out.
    """
    output: list[Message] = []
    unfinished = {(partition.topic, partition.partition) for partition in consumer.assignment()}
    answered_at = time.monotonic()
    error: object = "no answer"
    while unfinished:
        messages = consumer.consume(BATCH, timeout=POLL_S)
        if messages:
            answered_at = time.monotonic()
        elif time.monotonic() - answered_at > idle_s:
            raise TimeoutError(f"the output could not be read to its end in {idle_s} s: {error}")
        for message in messages:
            if message.error() is None:
                output.append(message)
            elif message.error().name() == "_PARTITION_EOF":
                unfinished.discard((message.topic(), message.partition()))
            else:
                error = message.error()
    return output
