"""Words of Spark, Flink, Kafka Streams, Quix, Polars and pandas, and what they are called here."""

from collections.abc import Iterable

from tallystick.arguments import near
from tallystick.errors import UnknownNameError

_AGGREGATE = ".key_by('user').process(ts.aggregate({'n': ts.count()}), uid='counts')"
_WINDOW = ".process(ts.windowed(ts.tumbling('1 minute'), {'n': ts.count()}), event_time='at')"
_MAP = ".map_batches(function), which gets a pyarrow.RecordBatch and returns one"
_FILTER = ".filter(lambda rows: pc.greater(rows['delay'], 15)), with pyarrow.compute as pc"
_START = ".start(checkpoint='/data/checkpoints/orders'), which returns the query"
_JOIN = (
    ".read(orders=…, payments=…).key_by(orders='id', payments='order_id').process("
    "ts.interval_join(…)); with a small table, .map_batches(ts.enrich(table, on='id'))"
)
_QUERY = "; .start(…) returns the query that has it"

_OF_A_PIPELINE: tuple[tuple[str, str], ...] = (
    ("map apply flatmap mapinarrow mapinpandas mappartitions withcolumn withcolumns select drop "
     "process_batch update assign pipe foreach withcolumnrenamed project cast", _MAP),
    ("where query", _FILTER),
    ("groupby group groupbykey partitionby keyby key keyedby", ".key_by('user')"),
    ("agg aggregate reduce count sum min max avg mean fold", _AGGREGATE),
    ("window windowed tumbling tumblingwindow hoppingwindow slidingwindow sessionwindow "
     "groupbywindow timewindow", f".key_by('user'){_WINDOW}"),
    ("join leftjoin coprocess connect merge lookup", _JOIN),
    ("union concat unionbyname", ".read(first, second), which become one stream"),
    ("dropduplicates distinct unique dropduplicateswithinwatermark",
     ".key_by('id').process(ts.deduplicate(), uid='once')"),
    ("to totopic sink sinkto addsink writestream output save saveas into", ".write(sink)"),
    ("readstream source addsource fromsource frm load subscribe topic stream", ".read(source)"),
    ("run execute collect launch go toTable startasync", _START),
    ("withwatermark assigntimestampsandwatermarks",
     ".process(…, event_time='at', watermark_delay='10 seconds')"),
    ("checkpoint option options trigger outputmode queryname checkpointlocation",
     ".start(checkpoint=…, trigger=…)"),
    ("awaittermination stop isactive lastprogress status exception", _QUERY),
    ("show print printschema schema describe head", ".explain(), which returns a text"),
)  # fmt: skip
_OF_A_QUERY: tuple[tuple[str, str], ...] = (
    ("wait join run result await block loop", ".awaitTermination()"),
    ("terminate close cancel kill shutdown interrupt", ".stop()"),
    ("progress metrics stats", ".lastProgress"),
    ("error", ".exception()"),
)
_OF_THE_MODULE: tuple[tuple[str, str], ...] = (
    ("mean", "ts.avg"),
    ("app application streamingdataframe stream_environment topology flow dataflow", "ts.Pipeline"),
    ("consumer kafkaconsumer input topic", "ts.KafkaSource"),
    ("producer kafkaproducer output", "ts.KafkaSink"),
    ("window slide sliding", "ts.tumbling, ts.hopping, ts.cumulative or ts.session"),
    ("col lit udf expr func functions", "pyarrow.compute, in a function of map_batches"),
    ("countdistinct nunique approxcountdistinct", "ts.approximate_distinct_count"),
    ("median percentile quantile", "ts.quantiles"),
    ("collectlist arrayagg list", "ts.collect"),
    ("join", "ts.interval_join, ts.window_join, ts.temporal_join or ts.enrich"),
    ("parquet parquetsink files", "ts.FileSink"),
    ("delta deltalake deltatable lakehouse", "ts.DeltaSink"),
    ("iceberg pyiceberg icebergtable", "ts.IcebergSink"),
    ("jdbc postgres", "ts.PostgresSink"),
    ("csv bytes raw", "a source without value=, whose column value is bytes"),
)


def unknown_name(owner: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """Return the error about a name that a class, or the package, does not have.

    Args:
        owner: `Pipeline`, `KeyedPipeline`, `Query` or `tallystick`.
        name: the name.
        known: the names that it has.
    """
    table = {"Query": _OF_A_QUERY, "tallystick": _OF_THE_MODULE}.get(owner, _OF_A_PIPELINE)
    word = name.replace("_", "").lower()
    meant = next((here for words, here in table if word in words.lower().split()), "")
    hint = f" What does that here: {meant.lstrip('; ')}" if meant else ""
    is_near = near(name, (one for one in known if not one.startswith("_")))
    return UnknownNameError(f"{owner!r} object has no attribute {name!r}.{hint or is_near}")
