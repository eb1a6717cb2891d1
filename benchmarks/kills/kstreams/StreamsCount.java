import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.ObjectReader;
import java.io.FileReader;
import java.nio.ByteBuffer;
import java.util.Properties;
import org.apache.kafka.common.serialization.Serde;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.common.utils.Bytes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.state.KeyValueStore;

/** A running count and sum per user, from Kafka to Kafka. Settings are in a file of properties. */
public class StreamsCount {
  private static final ObjectReader JSON = new ObjectMapper().reader();

  private record Totals(long count, long sum, long ts) {
    Totals plus(String text) {
      try {
        JsonNode event = JSON.readTree(text);
        return new Totals(
            count + 1, sum + event.get("amount").longValue(), event.get("ts").longValue());
      } catch (Exception error) {
        throw new IllegalArgumentException(text, error);
      }
    }

    String update(String user) {
      return String.format(
          "{\"user\":\"%s\",\"count\":%d,\"sum\":%d,\"ts\":%d}", user, count, sum, ts);
    }
  }

  private static byte[] written(String topic, Totals totals) {
    if (totals == null) {
      return null;
    }
    ByteBuffer buffer = ByteBuffer.allocate(3 * Long.BYTES);
    return buffer.putLong(totals.count).putLong(totals.sum).putLong(totals.ts).array();
  }

  private static Totals read(String topic, byte[] bytes) {
    if (bytes == null) {
      return null;
    }
    ByteBuffer buffer = ByteBuffer.wrap(bytes);
    return new Totals(buffer.getLong(), buffer.getLong(), buffer.getLong());
  }

  public static void main(String[] arguments) throws Exception {
    Properties settings = new Properties();
    try (FileReader file = new FileReader(arguments[0])) {
      settings.load(file);
    }
    Serde<Totals> totals = Serdes.serdeFrom(StreamsCount::written, StreamsCount::read);
    StreamsBuilder builder = new StreamsBuilder();
    builder.stream(arguments[1], Consumed.with(Serdes.String(), Serdes.String()))
        .groupByKey(Grouped.with(Serdes.String(), Serdes.String()))
        .aggregate(
            () -> new Totals(0, 0, 0),
            (user, event, before) -> before.plus(event),
            Materialized.<String, Totals, KeyValueStore<Bytes, byte[]>>as("totals")
                .withKeySerde(Serdes.String())
                .withValueSerde(totals)
                .withCachingDisabled())
        .toStream()
        .mapValues((user, found) -> found.update(user))
        .to(arguments[2], Produced.with(Serdes.String(), Serdes.String()));
    KafkaStreams streams = new KafkaStreams(builder.build(), settings);
    streams.setUncaughtExceptionHandler(
        error -> {
          error.printStackTrace();
          return StreamThreadExceptionResponse.REPLACE_THREAD;
        });
    Runtime.getRuntime().addShutdownHook(new Thread(streams::close));
    streams.start();
    Thread.currentThread().join();
  }
}
