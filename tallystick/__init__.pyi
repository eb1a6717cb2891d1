"""The public names of the package, each once: loaded from its module when it is first used."""

from .api.console_sink import ConsoleSink as ConsoleSink
from .api.kafka_sink import KafkaSink as KafkaSink
from .api.kafka_source import KafkaSource as KafkaSource
from .api.pipeline import Pipeline as Pipeline
from .api.rows_source import RowsSource as RowsSource
from .api.routing import (
    mapped as mapped,
    when as when,
)
from .api.state_writing import write_state as write_state
from .api.streams import (
    BroadcastTable as BroadcastTable,
    ListState as ListState,
    Stream as Stream,
    broadcast as broadcast,
    enrich as enrich,
    list_state as list_state,
    stream as stream,
)
from .codec.formats import (
    Avro as Avro,
    Json as Json,
    JsonSchema as JsonSchema,
    Protobuf as Protobuf,
    Text as Text,
)
from .epoch.two_phase import (
    Committable as Committable,
    Outcome as Outcome,
    Owner as Owner,
    Place as Place,
    RunFacts as RunFacts,
    Sink as Sink,
    Timeout as Timeout,
    Transaction as Transaction,
    TwoPhaseCommitSink as TwoPhaseCommitSink,
)
from .errors import (
    AuthorizationError as AuthorizationError,
    BrokerUnavailableError as BrokerUnavailableError,
    DataLossError as DataLossError,
    FencedError as FencedError,
    ForeignRowsError as ForeignRowsError,
    LogTruncatedError as LogTruncatedError,
    FunctionError as FunctionError,
    ManifestError as ManifestError,
    OptionError as OptionError,
    PartitionRemovedError as PartitionRemovedError,
    RecordError as RecordError,
    RecordsExpiredError as RecordsExpiredError,
    SecondCallError as SecondCallError,
    SparkLogError as SparkLogError,
    StateError as StateError,
    StateFileError as StateFileError,
    StorageError as StorageError,
    TallystickError as TallystickError,
    TopicRecreatedError as TopicRecreatedError,
)
from .delta.sink import DeltaSink as DeltaSink
from .iceberg.sink import IcebergSink as IcebergSink
from .api.file_sink import FileSink as FileSink
from .ops.state_table import read_state as read_state
from .postgres.sink import PostgresSink as PostgresSink
from .tasks.outputs import Rows as Rows
from .run.query import Query as Query
from .source.subscription import LossPolicy as LossPolicy
from .pipeline.listeners import (
    SourceProgress as SourceProgress,
    source_progress as source_progress,
)
from .pipeline.recovery import Recovery as Recovery
from .spark.context import (
    configure as configure,
    spark_session as spark_session,
)
from .spark.streaming.registration import register as register
from .queries.query import sql as sql
from .state.functions.aggregates import (
    approximate_distinct_count as approximate_distinct_count,
    average as average,
    avg as avg,
    collect as collect,
    count as count,
    first as first,
    first_value as first_value,
    last as last,
    last_value as last_value,
    max as max,
    maximum as maximum,
    min as min,
    minimum as minimum,
    quantiles as quantiles,
    sum as sum,
    vectorised_aggregate as vectorised_aggregate,
)
from .state.functions.co_process import (
    CoKeyedBatch as CoKeyedBatch,
    co_process as co_process,
)
from .state.functions.count_windows import count_window as count_window
from .state.functions.joins import (
    interval_join as interval_join,
    temporal_join as temporal_join,
    window_join as window_join,
)
from .state.functions.keyed_batch import (
    KeyedBatch as KeyedBatch,
    Update as Update,
)
from .state.functions.ready_made import (
    aggregate as aggregate,
    deduplicate as deduplicate,
    sessions as sessions,
    top_n as top_n,
)
from .state.functions.upsert_join import upsert_join as upsert_join
from .state.functions.vectorised import vectorised as vectorised
from .state.functions.windowed import windowed as windowed
from .state.functions.windows import (
    cumulative as cumulative,
    hopping as hopping,
    session as session,
    tumbling as tumbling,
)

__version__: str
