"""How fast records become Kafka batches and come back: the codec alone, then through a broker.

python benchmarks/codec.py               the codec alone
python benchmarks/codec.py --broker      and beside confluent-kafka, on an embedded broker

Rates are records per second of this process's CPU time, the best of three: other load on the
machine disturbs them least. One thread; 10-byte keys and 100-byte values.
"""

import argparse
import time
from collections.abc import Callable, Iterable
from hashlib import sha256

import confluent_kafka
import pyarrow as pa

from tallystick.codec.records.compression import CODEC_IDS
from tallystick.codec.records.decoder import decode, warm_up
from tallystick.codec.records.encoder import EncodedBatch, encode, stamp
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.fetcher import fetch
from tallystick.kafka.writer import PartitionWriter
from tallystick.testing.kafka import EmbeddedKafka
from tallystick.values import Producer, SplitRange, TopicPartition

REPEATS = 3
FETCH_BYTES = 8 << 20
PRODUCER = Producer("benchmark", 1, 0)
LOG = TopicPartition("benchmark", 0)
WAIT_S = 60.0


def sample(count: int) -> pa.RecordBatch:
    """Records of random hexadecimal digits and text, so that they compress, but not to nothing."""
    values = [
        b'{"flight": %d, "hash": "%s", "late": true}'
        % (row, sha256(b"%d" % row).hexdigest().encode())
        for row in range(count)
    ]
    return pa.record_batch(
        {
            "key": pa.array([b"k%09d" % row for row in range(count)]),
            "value": pa.array([value[:100].ljust(100) for value in values]),
        }
    )


def rate(count: int, work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Millions of records per second of CPU time."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return count / best / 1e6


def fetched(encoded: Iterable[EncodedBatch]) -> list[bytes]:
    """The batches as fetch responses of `FETCH_BYTES` each."""
    responses, offset = [bytearray()], 0
    for batch in encoded:
        if len(responses[-1]) > FETCH_BYTES:
            responses.append(bytearray())
        data = stamp(batch.data, PRODUCER, offset)
        responses[-1] += offset.to_bytes(8, "big") + data[8:]
        offset += batch.record_count
    return [bytes(response) for response in responses]


def decode_all(responses: Iterable[bytes]) -> None:
    """Decode response after response."""
    position = 0
    for response in responses:
        position = decode(
            response,
            topic_partition=LOG,
            start_offset=position,
            stop_offset=2**62,
            aborted=[],
            headers=False,
        ).next_offset


def codec_alone(records: pa.RecordBatch) -> None:
    """Print what each compression costs."""
    print(f"{'codec alone':14}{'encode':>9}{'stamp':>9}{'decode':>9}{'bytes':>9}   Mrec/s, ratio")
    count = records.num_rows
    for name in CODEC_IDS:
        encoded = list(encode(records, compression=name, now_ms=0))
        responses = fetched(encoded)
        size = sum(len(batch.data) for batch in encoded)
        encode_rate = rate(
            count, lambda name=name: list(encode(records, compression=name, now_ms=0))
        )
        stamp_rate = rate(count, lambda all_=encoded: [stamp(e.data, PRODUCER, 0) for e in all_])
        decode_rate = rate(count, lambda responses=responses: decode_all(responses))
        print(
            f"{name:14}{encode_rate:9.2f}{stamp_rate:9.1f}{decode_rate:9.2f}"
            f"{size / (count * 110):9.2f}"
        )


def through_broker(records: pa.RecordBatch) -> None:
    """Print the cost in this process of writing to and reading from a real broker."""
    print(f"\n{'with broker':14}{'write':>9}{'confl.':>9}{'read':>9}{'confl.':>9}   Mrec/s")
    count = records.num_rows
    with EmbeddedKafka() as kafka:
        for name in CODEC_IDS:
            ours = kafka.create_topic(f"ours-{name}")
            theirs = kafka.create_topic(f"theirs-{name}")
            rates = (
                rate(count, lambda topic=ours, name=name: write(kafka, topic, records, name), 1),
                rate(
                    count, lambda topic=theirs, name=name: produce(kafka, topic, records, name), 1
                ),
                rate(count, lambda topic=ours: read(kafka, topic, count), 1),
                rate(count, lambda topic=ours: consume(kafka, topic, count), 1),
            )
            print(f"{name:14}" + "".join(f"{throughput:9.2f}" for throughput in rates))


def config_of(kafka: EmbeddedKafka) -> KafkaConfig:
    """How our client reaches the cluster."""
    options = kafka.kafka_options
    return KafkaConfig.from_options({name[len("kafka.") :]: options[name] for name in options})


def write(kafka: EmbeddedKafka, topic: str, records: pa.RecordBatch, compression: str) -> None:
    """Write in one transaction."""
    broker = KafkaBroker(config_of(kafka))
    producer = broker.fence(topic, None)
    version = broker.transaction_version
    writer = PartitionWriter(broker.client, producer, transaction_version=version)
    encoded = encode(records, compression=compression, now_ms=time.time_ns() // 1_000_000)
    writer.write([(TopicPartition(topic, 0), batch) for batch in encoded])
    broker.commit_transaction(producer)
    broker.close()


def produce(kafka: EmbeddedKafka, topic: str, records: pa.RecordBatch, compression: str) -> None:
    """Write in one transaction with confluent-kafka."""
    producer = confluent_kafka.Producer(
        {
            **kafka.confluent_options(),
            "transactional.id": topic,
            "compression.type": compression,
            "linger.ms": 50,
            "batch.size": 900_000,
            "queue.buffering.max.messages": 10_000_000,
        }
    )
    producer.init_transactions(WAIT_S)
    producer.begin_transaction()
    keys, values = (records.column(name).to_pylist() for name in ("key", "value"))
    for key, value in zip(keys, values, strict=True):
        producer.produce(topic, value, key, 0)
    producer.commit_transaction(WAIT_S)


def read(kafka: EmbeddedKafka, topic: str, count: int) -> None:
    """Read it all into Arrow batches."""
    broker = KafkaBroker(config_of(kafka))
    rows_read = sum(b.num_rows for b in fetch(broker.client, SplitRange(topic, 0, 0, count)))
    assert rows_read == count, rows_read
    broker.close()


def consume(kafka: EmbeddedKafka, topic: str, count: int) -> None:
    """Read it all into Arrow batches with confluent-kafka."""
    options = {"group.id": "benchmark", "check.crcs": True, "enable.auto.commit": False}
    consumer = confluent_kafka.Consumer({**kafka.confluent_options(), **options})
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    rows_read = 0
    while rows_read < count:
        messages = consumer.consume(10_000, WAIT_S)
        pa.record_batch(
            {
                "key": pa.array([message.key() for message in messages], pa.binary()),
                "value": pa.array([message.value() for message in messages], pa.binary()),
            }
        )
        rows_read += len(messages)
    consumer.close()


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--records", type=int, default=300_000, help="how many (default 300000)")
    parser.add_argument("--broker", action="store_true", help="also through an embedded broker")
    arguments = parser.parse_args()
    warm_up()
    records = sample(arguments.records)
    codec_alone(records)
    if arguments.broker:
        through_broker(records)


if __name__ == "__main__":
    main()
