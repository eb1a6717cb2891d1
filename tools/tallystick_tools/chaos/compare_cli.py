"""`tallystick compare`: the outputs of a program and of another one that is tried beside it."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from tallystick.errors import OptionError
from tallystick.ops.cli_savepoint import KafkaOptions, errors_as_messages, options_in
from tallystick.text import printable
from tallystick_tools.chaos.cli import NOT_EXACT, Compare

if TYPE_CHECKING:
    from tallystick_tools.chaos.cluster import OutputRecord

ANSWER_S = 10.0


def compare(
    first: Annotated[str, typer.Argument(metavar="TOPIC", help="What is expected.")],
    second: Annotated[str, typer.Argument(metavar="TOPIC", help="What is compared with it.")],
    bootstrap_servers: Annotated[
        str, typer.Option(help="Of the cluster with both: host:port,host:port.")
    ],
    fork: Annotated[
        str,
        typer.Option(
            help="A checkpoint of `tallystick fork`: the first topic is read from where the fork "
            "began to write the second."
        ),
    ] = "",
    compare: Compare = "sequence",
    live: Annotated[
        bool,
        typer.Option(
            "--live", help="Compare each key as far as both topics have it, and count the rest."
        ),
    ] = False,
    kafka_options: KafkaOptions = None,
) -> None:
    """Say where the committed records of two topics differ: keys and values.

    Read by librdkafka, a client independent of Tallystick, whose settings --kafka-options has. All
    records are held in memory. Exit codes: 0: no difference; 1: differences, or an error.
    """
    from tallystick_tools.chaos.compare import SHOWN_MAX, differences
    from tallystick_tools.chaos.verify import comparison_of

    with errors_as_messages():
        comparison = comparison_of(compare)
        if live and comparison != "sequence":
            raise OptionError(
                f"--live is for --compare sequence: without an order, {comparison!r} cannot know "
                f"which rows are still to come. Leave it out, and stop both programs at one place"
            )
        starts = _starts(fork, first, second) if fork else ()
        options = {} if kafka_options is None else options_in(kafka_options)
        options["bootstrap.servers"] = bootstrap_servers
        expected = _read(options, first, starts)
        actual = [replace(record, topic=first) for record in _read(options, second)]
        beyond = 0
        if live:
            everything = len(expected) + len(actual)
            expected, actual = _as_far_as_both(expected, actual)
            beyond = everything - len(expected) - len(actual)
        if not expected and not actual:
            raise OptionError(f"neither {first!r} nor {second!r} has a record to compare")
        different = differences(expected, actual, comparison)
    for difference in different[:SHOWN_MAX]:
        named = replace(difference, topic=second)
        typer.echo(printable(named.text(first)))
    if len(different) > SHOWN_MAX:
        typer.echo(f"and {len(different) - SHOWN_MAX} more")
    count = f"{len(different) or 'no'} difference{'s' * (len(different) != 1)}"
    if different:
        kinds = Counter(difference.kind for difference in different)
        count += f" ({', '.join(f'{number} {kind}' for kind, number in kinds.items())})"
    typer.echo(
        f"{count}: {len(expected)} records of {first!r} and {len(actual)} of {second!r}, compared "
        f"as {comparison}" + f"; {beyond} that only one of them has so far" * bool(beyond)
    )
    if different:
        sys.exit(NOT_EXACT)


def _starts(checkpoint: str, first: str, second: str) -> tuple[int, ...]:
    """Return the offsets of the first topic at which a fork began to write the second."""
    from tallystick.checkpoint.forks import fork_of
    from tallystick.storage.file_storage import FileStorage

    fork = fork_of(FileStorage(checkpoint))
    if fork is None:
        raise OptionError(f"--fork {checkpoint}: expected a checkpoint that `tallystick fork` made")
    if fork.topics.get(first) != second:
        pairs = ", ".join(f"{old} {new}" for old, new in fork.topics.items())
        raise OptionError(f"--fork {checkpoint}: {first} {second}: expected of its topics {pairs}")
    return fork.starts[first]


def _read(
    options: Mapping[str, str], topic: str, starts: Sequence[int] = ()
) -> list["OutputRecord"]:
    """Return the committed records of a topic, by partition in the order of the log.

    Args:
        options: Of the client.
        topic: The topic.
        starts: The first offset of each partition; without it, the beginning.
    """
    from confluent_kafka import Consumer, KafkaException, TopicPartition

    from tallystick_tools.chaos.cluster import READ_IDLE_S, record_of
    from tallystick_tools.reading import read_to_end

    settings: dict[str, str | int | bool] = {
        **options,
        "group.id": "tallystick-compare",
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "earliest" if not starts else "error",
        "log_level": 0,
    }
    try:
        consumer = Consumer(settings)
    except (KafkaException, ValueError) as error:
        raise OptionError(f"--kafka-options: librdkafka refuses them: {error}") from None
    try:
        known = consumer.list_topics(topic, ANSWER_S).topics[topic]
        if known.error is not None:
            raise OptionError(f"topic {topic!r}: {known.error.str()}. Check its name")
        offsets = dict(enumerate(starts))
        consumer.assign(
            [TopicPartition(topic, one, offsets.get(one, 0)) for one in known.partitions]
        )
        records = map(record_of, read_to_end(consumer, READ_IDLE_S))
        return sorted(records, key=lambda record: record.place)
    except KafkaException as error:
        raise OptionError(
            f"{options['bootstrap.servers']} does not answer about {topic!r}: {error.args[0].str()}"
        ) from None
    except TimeoutError as error:
        raise OptionError(
            f"topic {topic!r}: {error}. Wait until no transaction is open there, and try again"
        ) from None
    finally:
        consumer.close()


def _as_far_as_both(
    *sides: Sequence["OutputRecord"],
) -> tuple[list["OutputRecord"], list["OutputRecord"]]:
    """Return the records of both sides, of each partition and key as many as both have."""
    counts = [Counter((record.partition, record.key) for record in side) for side in sides]
    common = counts[0] & counts[1]
    cut: list[list[OutputRecord]] = []
    for side in sides:
        seen: Counter[tuple[int, bytes | None]] = Counter()
        cut.append([])
        for record in side:
            where = record.partition, record.key
            seen[where] += 1
            if seen[where] <= common[where]:
                cut[-1].append(record)
    return cut[0], cut[1]
