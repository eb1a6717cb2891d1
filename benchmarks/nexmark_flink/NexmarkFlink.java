package peers;

import java.nio.file.Files;
import java.nio.file.Path;
import org.apache.flink.api.common.JobStatus;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.core.execution.JobClient;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.table.api.TableResult;
import org.apache.flink.table.api.bridge.java.StreamTableEnvironment;

/** Runs the SQL statements of a file, the last of which inserts; {@code FIRST ms} says since when.
 * Arguments: file, milliseconds between checkpoints, whether in mini-batches. */
public class NexmarkFlink {
  public static void main(String[] arguments) throws Exception {
    Configuration settings = new Configuration();
    settings.setString("state.backend.type", "hashmap");
    settings.setString("execution.checkpointing.storage", "filesystem");
    settings.setString(
        "execution.checkpointing.dir", Path.of("checkpoints").toAbsolutePath().toUri().toString());
    settings.setString("taskmanager.memory.managed.size", "512m");
    settings.setString("taskmanager.memory.network.max", "256m");
    settings.setString("rest.port", "22050-22069");
    settings.setString("rest.bind-port", "22050-22069");
    settings.setString("pipeline.object-reuse", "true");
    settings.setString("restart-strategy.type", "none");
    settings.setString("table.local-time-zone", "UTC");
    settings.setString("table.exec.mini-batch.enabled", arguments[2]);
    settings.setString("table.exec.mini-batch.allow-latency", "1 s");
    settings.setString("table.exec.mini-batch.size", "500000");
    StreamExecutionEnvironment environment =
        StreamExecutionEnvironment.createLocalEnvironment(2, settings);
    environment.enableCheckpointing(Long.parseLong(arguments[1]));
    StreamTableEnvironment tables = StreamTableEnvironment.create(environment);
    TableResult result = null;
    for (String statement : Files.readString(Path.of(arguments[0])).split(";")) {
      if (!statement.isBlank()) result = tables.executeSql(statement);
    }
    JobClient job = result.getJobClient().get();
    while (job.getJobStatus().get() == JobStatus.INITIALIZING
        || job.getJobStatus().get() == JobStatus.CREATED) Thread.sleep(10);
    System.out.println("FIRST " + System.currentTimeMillis());
    result.await();
    System.out.println("DONE " + System.currentTimeMillis());
    System.exit(0);
  }
}
