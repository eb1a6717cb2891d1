import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.ObjectReader;
import java.nio.charset.StandardCharsets;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.serialization.SimpleStringSchema;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.api.java.tuple.Tuple3;
import org.apache.flink.connector.base.DeliveryGuarantee;
import org.apache.flink.connector.kafka.sink.KafkaSink;
import org.apache.flink.connector.kafka.source.KafkaSource;
import org.apache.flink.connector.kafka.source.enumerator.initializer.OffsetsInitializer;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.util.Collector;
import org.apache.kafka.clients.producer.ProducerRecord;

/** A running count and sum per user, from Kafka to Kafka. All else is in the cluster's settings. */
public class FlinkCount {
  private static final ObjectReader JSON = new ObjectMapper().reader();

  /** Writes an update for each event. */
  public static class Count
      extends KeyedProcessFunction<String, Tuple3<String, Long, Long>, Tuple2<String, String>> {
    private transient ValueState<Tuple2<Long, Long>> totals;

    @Override
    public void open(OpenContext context) {
      totals =
          getRuntimeContext()
              .getState(new ValueStateDescriptor<>("totals", Types.TUPLE(Types.LONG, Types.LONG)));
    }

    @Override
    public void processElement(
        Tuple3<String, Long, Long> event, Context context, Collector<Tuple2<String, String>> out)
        throws Exception {
      Tuple2<Long, Long> before = totals.value();
      long count = before == null ? 1 : before.f0 + 1;
      long sum = before == null ? event.f1 : before.f1 + event.f1;
      totals.update(Tuple2.of(count, sum));
      String update =
          String.format(
              "{\"user\":\"%s\",\"count\":%d,\"sum\":%d,\"ts\":%d}", event.f0, count, sum, event.f2);
      out.collect(Tuple2.of(event.f0, update));
    }
  }

  private static Tuple3<String, Long, Long> parsed(String text) throws Exception {
    JsonNode event = JSON.readTree(text);
    return Tuple3.of(
        event.get("user").textValue(), event.get("amount").longValue(), event.get("ts").longValue());
  }

  private static byte[] bytes(String text) {
    return text.getBytes(StandardCharsets.UTF_8);
  }

  public static void main(String[] arguments) throws Exception {
    String name = arguments[0];
    String servers = arguments[1];
    String events = arguments[2];
    String updates = arguments[3];
    String timeoutMs = arguments[4];
    KafkaSource<String> source =
        KafkaSource.<String>builder()
            .setBootstrapServers(servers)
            .setTopics(events)
            .setGroupId(name)
            .setStartingOffsets(OffsetsInitializer.earliest())
            .setValueOnlyDeserializer(new SimpleStringSchema())
            .build();
    KafkaSink<Tuple2<String, String>> sink =
        KafkaSink.<Tuple2<String, String>>builder()
            .setBootstrapServers(servers)
            .setDeliveryGuarantee(DeliveryGuarantee.EXACTLY_ONCE)
            .setTransactionalIdPrefix(name)
            .setProperty("transaction.timeout.ms", timeoutMs)
            .setRecordSerializer(
                (update, context, ts) ->
                    new ProducerRecord<>(updates, bytes(update.f0), bytes(update.f1)))
            .build();
    StreamExecutionEnvironment environment = StreamExecutionEnvironment.getExecutionEnvironment();
    environment
        .fromSource(source, WatermarkStrategy.noWatermarks(), "events")
        .uid("events")
        .map(FlinkCount::parsed)
        .returns(Types.TUPLE(Types.STRING, Types.LONG, Types.LONG))
        .uid("parsed")
        .keyBy(event -> event.f0)
        .process(new Count())
        .returns(Types.TUPLE(Types.STRING, Types.STRING))
        .uid("count")
        .sinkTo(sink)
        .uid("updates");
    environment.execute("count");
  }
}
