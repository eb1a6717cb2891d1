"""The meaning of a source's options: topics and offsets in a cluster now, and columns of rows."""

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import assert_never

import pyarrow as pa

from tallystick.codec.avro.reader import AvroReader
from tallystick.codec.ddl import ddl_of
from tallystick.codec.formats import (
    DEADLETTER,
    PERMISSIVE,
    Avro,
    Format,
    Json,
    JsonSchema,
    Protobuf,
    Text,
    columns_read,
)
from tallystick.codec.json.read import FramedJsonReader, JsonReader
from tallystick.codec.layout import CORRUPT_COLUMN, Layout, ddl
from tallystick.codec.protobuf.reader import ProtobufReader
from tallystick.codec.values import TextReader, ValueReader
from tallystick.errors import DataLossError, OptionError
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.cluster import (
    READ_UNCOMMITTED,
    describe_topics,
    list_offsets,
    offsets_for_times,
)
from tallystick.kafka.registry import columns_to_read, schema_source
from tallystick.options.source import SourceOptions
from tallystick.source.offsets import SourceOffsets
from tallystick.source.subscription import (
    EARLIEST,
    LATEST,
    Assignment,
    AtCommitted,
    AtOffsets,
    AtTime,
    Bound,
    FoundTopic,
    Subscription,
    TopicPattern,
)
from tallystick.state.schema import schema_of
from tallystick.text import shortened
from tallystick.values import TopicPartition

logger = logging.getLogger(__name__)


STARTING = "startingOffsets"
"""The name of the option that says where a query starts, for messages."""


def find_topics(
    broker: KafkaBroker, subscription: Subscription, known: Collection[str] = ()
) -> dict[str, FoundTopic]:
    """Return the existing topics that a subscription covers; named topics may be missing.

    Args:
        broker: the cluster's.
        subscription: what is read.
        known: topics that have been read. If the list of all topics lacks one, the broker is asked
            for it by name, and for longer: a broker may lag, and its list leaves out topics that
            the user may not describe.

    Raises:
        AuthorizationError: a named or known topic may not be described.
    """
    existing = describe_topics(broker.client, subscription.named)
    if subscription.named is None:
        lacking = {t for t in known if t not in existing and subscription.partitions(t, 1)}
        existing = {**existing, **(describe_topics(broker.client, lacking) if lacking else {})}
    covered = {t: f for t, f in existing.items() if subscription.partitions(t, f.partition_count)}
    if isinstance(subscription, TopicPattern) and subscription.pattern not in _warned:
        _warned.add(subscription.pattern)
        _warn_of_near_misses(subscription.pattern, existing, covered)
    return covered


_warned: set[str] = set()
"""Patterns of topics of which this process has warned; each gets a single warning."""


def _warn_of_near_misses(pattern: str, existing: Collection[str], covered: Collection[str]) -> None:
    """Warn of topics that only contain the pattern: Spark's connector would read them."""
    within = sorted(
        topic for topic in existing if re.search(pattern, topic) and topic not in covered
    )
    if within:
        logger.warning(
            "subscribePattern=%r is matched against whole names; it occurs within %s, which are "
            "not read (Spark's own connector would read them): write .* where anything may stand",
            pattern,
            ", ".join(within[:5]) + (" and others" if len(within) > 5 else ""),
        )
    elif not covered:
        logger.warning("subscribePattern=%r matches none of %d topics", pattern, len(existing))


def partitions_of(
    subscription: Subscription, existing: Mapping[str, FoundTopic]
) -> list[TopicPartition]:
    """Return the partitions of found topics that a subscription covers, sorted."""
    return sorted(
        TopicPartition(topic, index)
        for topic, facts in existing.items()
        for index in subscription.partitions(topic, facts.partition_count)
    )


def check_named(
    broker: KafkaBroker, subscription: Subscription, existing: Mapping[str, FoundTopic]
) -> None:
    """Check that all named topics and partitions exist.

    Raises:
        OptionError: a named topic or partition does not exist.
    """
    for topic in subscription.named or ():
        if topic not in existing and not isinstance(subscription, Assignment):
            raise OptionError(
                f"topic {topic!r} does not exist at {broker.client.config.bootstrap_servers}: "
                f"create it, or correct the name. Tallystick never creates topics by itself."
            )
    if isinstance(subscription, Assignment):
        counts = {t: f.partition_count for t, f in existing.items()}
        for partition in subscription.assigned:
            count = counts.get(partition.topic, 0)
            if partition.partition >= count:
                raise OptionError(
                    f"assign names {partition}, but the topic has {count} partitions: correct the "
                    f"numbers (they begin at 0), or create what is missing"
                )


def check_same_cluster(offsets: SourceOffsets, cluster_id: str, servers: str) -> None:
    """Refuse offsets of another cluster, which mean nothing here even for topics of equal names.

    Raises:
        DataLossError: the offsets are another cluster's.
    """
    if offsets.cluster_id != cluster_id:
        raise DataLossError(
            f"the checkpoint's offsets belong to cluster {offsets.cluster_id}, and {servers} is "
            f"cluster {cluster_id}: correct bootstrap.servers. To read the other cluster, start "
            f"from a new checkpoint. Nothing was changed."
        )


def resolve(
    broker: KafkaBroker, bound: Bound, partitions: Collection[TopicPartition], option: str
) -> dict[TopicPartition, int]:
    """Return the offsets that a bound means now, per partition.

    Args:
        broker: the cluster's.
        bound: what a user said.
        partitions: those that are read.
        option: the name of the option, for messages.

    Raises:
        OptionError: the bound names a partition that is not read, or means nothing in one.
    """
    match bound:
        case AtOffsets(default, named):
            _check_strangers(named, partitions, option)
            return _at_markers(broker, {p: named.get(p, default) for p in partitions})
        case AtTime(default_ms, named, fallback):
            _check_strangers(named, partitions, option)
            times = {p: named.get(p, default_ms) for p in partitions}
            timed = {p: time for p, time in times.items() if time is not None}
            known = _at_times(broker, timed)
            if fallback == LATEST:
                known |= _at_end(broker, {p: t for p, t in timed.items() if p not in known}, option)
            problem = "no record as late as its time"
            if option == STARTING and (untimed := [p for p in times if p not in timed]):
                missing_time = "no time is given, and its records would be passed over unread"
                raise OptionError(
                    f"{option}: {shortened(sorted(untimed))}: {missing_time}. Name a time"
                )
        case AtCommitted(group, fallback):
            known = broker.committed_offsets(group, partitions)
            problem = f"no offset committed by group {group!r}"
    missing = [p for p in partitions if p not in known]
    if missing and fallback is None:
        raise OptionError(
            f"{option}: {shortened(sorted(missing))}: {problem}. Name another place, or say what "
            f"to do then: startingOffsetsByTimestampStrategy=latest (in a pipeline "
            f"KafkaSource(starting_time_fallback='latest'), the default), or "
            f"committed.fallback=earliest or latest"
        )
    return known | _at_markers(broker, dict.fromkeys(missing, fallback or LATEST))


def check_within(
    broker: KafkaBroker, starts: Mapping[TopicPartition, int], option: str, *, may_expire: bool
) -> None:
    """Check that start offsets lie within the logs of their partitions, or at the ends.

    Args:
        broker: the cluster's.
        starts: the resolved offsets.
        option: the name of the option, for messages.
        may_expire: whether records that are gone may be skipped.

    Raises:
        OptionError: a log begins after the offset, or ends before it.
    """
    earliest = {} if may_expire else list_offsets(broker.client, starts, EARLIEST)
    ends = list_offsets(broker.client, starts, LATEST, isolation=READ_UNCOMMITTED)
    for partition, offset in starts.items():
        low, high = earliest.get(partition, 0), ends[partition]
        if not low <= offset <= high:
            raise OptionError(
                f"{option}: {partition} is to start at {offset}, but its log begins at {low} and "
                f"ends at {high}: name an offset in between, or earliest or latest"
            )


def ending_positions(
    broker: KafkaBroker, bound: Bound, partitions: Collection[TopicPartition]
) -> dict[TopicPartition, int]:
    """Return where a batch ends: never beyond what is committed now.

    Raises:
        OptionError: an ending offset lies beyond the end of the log.
    """
    stop = resolve(broker, bound, partitions, "endingOffsets")
    latest = list_offsets(broker.client, partitions, LATEST)
    for partition, offset in stop.items():
        if offset > latest[partition] and isinstance(bound, AtOffsets):
            raise OptionError(
                f"endingOffsets: {partition} is to end at {offset}, but its log ends at "
                f"{latest[partition]}: name an offset up to that, or -1 for the end"
            )
    return {partition: min(offset, latest[partition]) for partition, offset in stop.items()}


def _at_times(
    broker: KafkaBroker, times: Mapping[TopicPartition, int]
) -> dict[TopicPartition, int]:
    """Return the first record at or after the time of each partition that has one."""
    offsets = offsets_for_times(broker.client, times)
    return {partition: offset for partition, offset in offsets.items() if offset is not None}


def _at_end(
    broker: KafkaBroker, times: Mapping[TopicPartition, int], option: str
) -> dict[TopicPartition, int]:
    """Return the ends of partitions that have no record so late, and say so in the log.

    They are asked for their time again when their ends are known: a record that is written in
    between is as late as that, and would be passed over. Source: Flink's
    `TimestampOffsetsInitializer`.
    """
    if not times:
        return {}
    ends = list_offsets(broker.client, times, LATEST)
    ends |= (meanwhile := _at_times(broker, times))
    late = {partition: end for partition, end in ends.items() if partition not in meanwhile}
    if late and option == STARTING:
        logger.warning(
            "%s: %s: no record is as late as the time, so each is at its end now, and stays "
            "there whenever the query starts again: %s",
            option,
            shortened(sorted(late)),
            ", ".join(f"{p} at {late[p]}" for p in sorted(late)[:5]),
        )
    return ends


def _at_markers(
    broker: KafkaBroker, offsets: Mapping[TopicPartition, int]
) -> dict[TopicPartition, int]:
    resolved = {p: offset for p, offset in offsets.items() if offset >= 0}
    for marker in {offset for offset in offsets.values() if offset < 0}:
        resolved |= list_offsets(
            broker.client, [p for p, o in offsets.items() if o == marker], marker
        )
    return resolved


def _check_strangers(
    named: Mapping[TopicPartition, int], partitions: Collection[TopicPartition], option: str
) -> None:
    strangers = sorted(set(named) - set(partitions))
    if strangers:
        raise OptionError(
            f"{option}: {shortened(sorted(strangers))}: named, but not read by the query: remove "
            f"them, or subscribe to them"
        )


def columns_ddl(options: SourceOptions) -> str:
    """Return the columns of a query's rows, as Spark's DDL text.

    Raises:
        OptionError: the registry does not have the schema that says them, or no columns follow.
        RegistryUnavailableError: the registry does not answer.
    """
    value_schema = options.value_schema
    if isinstance(options.value, JsonSchema) and value_schema is None:
        value_schema = ddl_of(columns_to_read(options.value))
    return ddl(
        value_schema,
        mode=options.value_mode,
        prefix=options.metadata_prefix,
        headers=options.headers,
        text=isinstance(options.value, Text),
        metadata=options.metadata_columns,
        key_ddl=None if options.key is None else ddl_of(_prefixed(options)),
    )


def layout_of(options: SourceOptions, schema: pa.Schema, *, dead_letters: bool = False) -> Layout:
    """Return the layout whose columns are `schema`, parsed from our DDL.

    Args:
        options: of the query.
        schema: its columns.
        dead_letters: True if the reader writes the malformed records to a topic of their own.

    Raises:
        OptionError: the value cannot be read as asked, or malformed records would have to go to a
            topic of their own and no sink writes them there.
    """
    if options.value_mode == DEADLETTER and not dead_letters:
        raise OptionError(
            "value.mode=deadletter works in a Pipeline only, whose sink has a dead_letter_topic: "
            "in a query of your own use permissive as value.mode, and split the rows yourself by "
            "whether _corrupt_record is null"
        )
    value: ValueReader | None = None
    if isinstance(options.value, Text):
        value = TextReader()
    elif options.value is not None:
        value = _reader(options.value, _value_schema(options, schema))
    return Layout(
        value,
        options.value_mode,
        options.metadata_prefix,
        options.headers,
        options.metadata_columns,
        None if options.key is None else _reader(options.key, _key_schema(options)),
        options.key_prefix if options.key is not None else "",
    )


def with_fields(layout: Layout, options: SourceOptions, names: Collection[str]) -> Layout:
    """Return the layout with those fields of the value alone that are named.

    All stay if no field is named: rows of no column cannot be counted. So they do where
    `_corrupt_record` is asked for, which says of all fields whether the record is malformed.
    """
    form, value = options.value, layout.value
    if value is None or form is None or isinstance(form, Text) or CORRUPT_COLUMN in names:
        return layout
    kept = [field for field in value.schema if field.name in names]
    if not kept:
        return layout
    if isinstance(form, Avro) and form.name_column is not None and form.name_column not in names:
        kept.append(value.schema.field(form.name_column))  # the reader takes its last one for it
    return replace(layout, value=_reader(form, pa.schema(kept)))


def _reader(form: Format, schema: pa.Schema) -> ValueReader:
    """Return the reader of values in a format; `kafka.registry.value_writer` has the writers."""
    match form:
        case Json():
            return JsonReader(schema)
        case JsonSchema():
            return FramedJsonReader(JsonReader(schema))
        case Protobuf():
            return ProtobufReader(schema, schema_source(form))
        case Avro():
            return AvroReader(schema, schema_source(form), form.name_column is not None)
        case _:
            assert_never(form)


def _value_schema(options: SourceOptions, schema: pa.Schema) -> pa.Schema:
    """Return the fields that the value becomes: they stand before the key's and Kafka's own."""
    beside = len(options.metadata_columns) + options.headers + (options.value_mode == PERMISSIVE)
    if options.key is not None:
        beside += len(_key_schema(options)) - 1 + (options.value_mode == PERMISSIVE)
    return pa.schema(list(schema)[: len(schema) - beside])


def _key_schema(options: SourceOptions) -> pa.Schema:
    """Return the fields that the key becomes, without their prefix."""
    assert options.key is not None, "asked for with a key only"
    columns = columns_read(options.key)
    assert columns is not None, "checked with the options"
    return schema_of(columns, "key.schema")


def _prefixed(options: SourceOptions) -> pa.Schema:
    fields = [field.with_name(options.key_prefix + field.name) for field in _key_schema(options)]
    return pa.schema(fields)
