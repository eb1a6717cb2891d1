"""The public names of the package, each once: loaded from its module when it is first used."""

from .api.kafka_sink import KafkaSink as KafkaSink
from .api.kafka_source import KafkaSource as KafkaSource
from .api.pipeline import Pipeline as Pipeline
from .codec.formats import (
    Avro as Avro,
    Json as Json,
    JsonSchema as JsonSchema,
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
from .files.sink import FileSink as FileSink
from .ops.state_table import read_state as read_state
from .postgres.sink import PostgresSink as PostgresSink
from .run.query import Query as Query
from .source.losses import LossPolicy as LossPolicy
from .spark.progress import (
    SourceProgress as SourceProgress,
    source_progress as source_progress,
)
from .spark.recovery import Recovery as Recovery
from .spark.context import (
    configure as configure,
    spark_session as spark_session,
)
from .spark.streaming.registration import kafka_partition as kafka_partition
from .spark.streaming.registration import register as register
from .state.functions.keyed_batch import (
    KeyedBatch as KeyedBatch,
    Update as Update,
)
from .state.functions.ready_made import (
    aggregate as aggregate,
    count as count,
    deduplicate as deduplicate,
    last_value as last_value,
    maximum as maximum,
    minimum as minimum,
    sessions as sessions,
    sum as sum,
    top_n as top_n,
)
from .state.functions.vectorised import vectorised as vectorised

__version__: str
