import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.Comparator;
import java.util.List;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;

import org.apache.flink.api.common.ExecutionConfig;
import org.apache.flink.api.common.typeinfo.TypeHint;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.common.typeutils.TypeSerializer;
import org.apache.flink.api.java.tuple.Tuple4;
import org.apache.flink.streaming.api.functions.co.ProcessJoinFunction;
import org.apache.flink.streaming.api.functions.windowing.ProcessWindowFunction;
import org.apache.flink.streaming.api.operators.co.IntervalJoinOperator;
import org.apache.flink.streaming.api.windowing.assigners.EventTimeSessionWindows;
import org.apache.flink.streaming.api.windowing.assigners.GlobalWindows;
import org.apache.flink.streaming.api.windowing.assigners.SlidingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.assigners.TumblingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.assigners.WindowAssigner;
import org.apache.flink.streaming.api.windowing.evictors.CountEvictor;
import org.apache.flink.streaming.api.windowing.triggers.CountTrigger;
import org.apache.flink.streaming.api.windowing.triggers.EventTimeTrigger;
import org.apache.flink.streaming.api.windowing.triggers.PurgingTrigger;
import org.apache.flink.streaming.api.windowing.triggers.Trigger;
import org.apache.flink.streaming.api.windowing.windows.GlobalWindow;
import org.apache.flink.streaming.api.windowing.windows.TimeWindow;
import org.apache.flink.streaming.runtime.operators.windowing.WindowOperatorBuilder;
import org.apache.flink.streaming.runtime.streamrecord.StreamRecord;
import org.apache.flink.streaming.util.KeyedOneInputStreamOperatorTestHarness;
import org.apache.flink.streaming.util.KeyedTwoInputStreamOperatorTestHarness;
import org.apache.flink.table.runtime.operators.window.groupwindow.assigners.CumulativeWindowAssigner;
import org.apache.flink.util.Collector;
import org.apache.flink.util.OutputTag;

/**
 * Runs Flink's window and interval join operators over cases: a JSON text per line in, one with
 * Flink's answer out. See cases.py, which makes the cases.
 *
 * A row is (side, key, time, value). A step first moves the watermark, then brings rows.
 */
public class FlinkOperators {
    static final ObjectMapper JSON = new ObjectMapper();
    static final OutputTag<Tuple4<Long, Long, Long, Long>> LATE = new OutputTag<>("late") {};
    static final TypeInformation<Tuple4<Long, Long, Long, Long>> ROW =
            TypeInformation.of(new TypeHint<Tuple4<Long, Long, Long, Long>>() {});

    public static void main(String[] arguments) throws Exception {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = lines.readLine()) != null; ) {
            ObjectNode one = (ObjectNode) JSON.readTree(line);
            String kind = one.get("kind").asText();
            one.set("flink", one.has("how") ? FlinkJoins.answer(one)
                    : kind.equals("interval_join") ? joined(one)
                    : kind.equals("count") ? counted(one) : windowed(one, kind));
            System.out.println(JSON.writeValueAsString(one));
        }
    }

    static WindowAssigner<Object, TimeWindow> assigner(JsonNode one, String kind) {
        Duration size = Duration.ofMillis(one.get("size").asLong());
        switch (kind) {
            case "tumbling":
                return TumblingEventTimeWindows.of(size, Duration.ofMillis(one.get("offset").asLong()));
            case "hopping":
                return SlidingEventTimeWindows.of(size, Duration.ofMillis(one.get("every").asLong()),
                        Duration.ofMillis(one.get("offset").asLong()));
            case "cumulative":
                return new Cumulative(CumulativeWindowAssigner.of(size, Duration.ofMillis(one.get("step").asLong()))
                        .withOffset(Duration.ofMillis(one.get("offset").asLong())));
            default:
                return EventTimeSessionWindows.withGap(size);
        }
    }

    /** The windows of SQL's CUMULATE, in an operator that takes late rows. */
    static class Cumulative extends WindowAssigner<Object, TimeWindow> {
        final CumulativeWindowAssigner windows;

        Cumulative(CumulativeWindowAssigner windows) {
            this.windows = windows;
        }

        @Override
        public Collection<TimeWindow> assignWindows(Object element, long timestamp, WindowAssignerContext context) {
            List<TimeWindow> found = new ArrayList<>();
            windows.assignWindows(null, timestamp).forEach(each -> found.add(new TimeWindow(each.getStart(), each.getEnd())));
            return found;
        }

        @Override
        public Trigger<Object, TimeWindow> getDefaultTrigger() {
            return EventTimeTrigger.create();
        }

        @Override
        public TypeSerializer<TimeWindow> getWindowSerializer(ExecutionConfig config) {
            return new TimeWindow.Serializer();
        }

        @Override
        public boolean isEventTime() {
            return true;
        }
    }

    /** Key, window, count, sum, and first and last value by event time, ties by arrival. */
    static class Folded extends ProcessWindowFunction<Tuple4<Long, Long, Long, Long>, List<Long>, Long, TimeWindow> {
        @Override
        public void process(Long key, Context context, Iterable<Tuple4<Long, Long, Long, Long>> rows,
                Collector<List<Long>> out) {
            List<Tuple4<Long, Long, Long, Long>> all = new ArrayList<>();
            rows.forEach(all::add);
            all.sort(Comparator.comparing(row -> row.f2)); // stable
            long sum = all.stream().mapToLong(row -> row.f3).sum();
            out.collect(List.of(key, context.window().getStart(), context.window().getEnd(),
                    (long) all.size(), sum, all.get(0).f3, all.get(all.size() - 1).f3));
        }
    }

    static ObjectNode windowed(JsonNode one, String kind) throws Exception {
        WindowOperatorBuilder<Tuple4<Long, Long, Long, Long>, Long, TimeWindow> builder =
                new WindowOperatorBuilder<>(assigner(one, kind), EventTimeTrigger.create(),
                        new ExecutionConfig(), ROW, row -> row.f1, Types.LONG);
        builder.allowedLateness(Duration.ofMillis(one.get("lateness").asLong()));
        builder.sideOutputLateData(LATE);
        ObjectNode answer = JSON.createObjectNode();
        ArrayNode out = answer.putArray("out");
        try (KeyedOneInputStreamOperatorTestHarness<Long, Tuple4<Long, Long, Long, Long>, List<Long>> harness =
                new KeyedOneInputStreamOperatorTestHarness<>(builder.process(new Folded()), row -> row.f1, Types.LONG)) {
            harness.open();
            int number = 0;
            for (JsonNode step : one.get("steps")) {
                if (!step.get("watermark").isNull()) {
                    harness.processWatermark(step.get("watermark").asLong());
                }
                for (JsonNode row : step.get("rows")) {
                    harness.processElement(record(row));
                }
                take(out, number++, harness.getOutput());
            }
            answer.set("late", late(harness.getSideOutput(LATE)));
            answer.put("entries", harness.numKeyedStateEntries());
        }
        return answer;
    }

    /** Key, count, sum, and first and last value by arrival. */
    static class InOrder extends ProcessWindowFunction<Tuple4<Long, Long, Long, Long>, List<Long>, Long, GlobalWindow> {
        @Override
        public void process(Long key, Context context, Iterable<Tuple4<Long, Long, Long, Long>> rows,
                Collector<List<Long>> out) {
            List<Long> all = new ArrayList<>();
            rows.forEach(row -> all.add(row.f3));
            long sum = all.stream().mapToLong(value -> value).sum();
            out.collect(List.of(key, (long) all.size(), sum, all.get(0), all.get(all.size() - 1)));
        }
    }

    /** What KeyedStream.countWindow(size) and countWindow(size, slide) are made of. */
    static ObjectNode counted(JsonNode one) throws Exception {
        long size = one.get("size").asLong(), every = one.get("every").asLong();
        WindowOperatorBuilder<Tuple4<Long, Long, Long, Long>, Long, GlobalWindow> builder =
                new WindowOperatorBuilder<>(GlobalWindows.create(), size == every
                        ? PurgingTrigger.of(CountTrigger.of(size)) : CountTrigger.of(every),
                        new ExecutionConfig(), ROW, row -> row.f1, Types.LONG);
        if (size != every) {
            builder.evictor(CountEvictor.of(size));
        }
        ObjectNode answer = JSON.createObjectNode();
        ArrayNode out = answer.putArray("out");
        try (KeyedOneInputStreamOperatorTestHarness<Long, Tuple4<Long, Long, Long, Long>, List<Long>> harness =
                new KeyedOneInputStreamOperatorTestHarness<>(builder.process(new InOrder()), row -> row.f1, Types.LONG)) {
            harness.open();
            int number = 0;
            for (JsonNode step : one.get("steps")) {
                for (JsonNode row : step.get("rows")) {
                    harness.processElement(record(row));
                }
                take(out, number++, harness.getOutput());
            }
        }
        return answer;
    }

    static class Pairs extends ProcessJoinFunction<Tuple4<Long, Long, Long, Long>, Tuple4<Long, Long, Long, Long>, List<Long>> {
        @Override
        public void processElement(Tuple4<Long, Long, Long, Long> left, Tuple4<Long, Long, Long, Long> right,
                Context context, Collector<List<Long>> out) {
            out.collect(List.of(left.f1, left.f2, left.f3, right.f2, right.f3));
        }
    }

    static ObjectNode joined(JsonNode one) throws Exception {
        IntervalJoinOperator<Long, Tuple4<Long, Long, Long, Long>, Tuple4<Long, Long, Long, Long>, List<Long>> operator =
                new IntervalJoinOperator<>(one.get("lower").asLong(), one.get("upper").asLong(), true, true,
                        LATE, LATE, ROW.createSerializer(new ExecutionConfig().getSerializerConfig()),
                        ROW.createSerializer(new ExecutionConfig().getSerializerConfig()), new Pairs());
        ObjectNode answer = JSON.createObjectNode();
        ArrayNode out = answer.putArray("out");
        try (KeyedTwoInputStreamOperatorTestHarness<Long, Tuple4<Long, Long, Long, Long>, Tuple4<Long, Long, Long, Long>, List<Long>> harness =
                new KeyedTwoInputStreamOperatorTestHarness<>(operator, row -> row.f1, row -> row.f1, Types.LONG)) {
            harness.open();
            int number = 0;
            for (JsonNode step : one.get("steps")) {
                if (!step.get("watermark").isNull()) {
                    harness.processWatermark1(new org.apache.flink.streaming.api.watermark.Watermark(step.get("watermark").asLong()));
                    harness.processWatermark2(new org.apache.flink.streaming.api.watermark.Watermark(step.get("watermark").asLong()));
                }
                for (JsonNode row : step.get("rows")) {
                    if (row.get(0).asLong() == 0) {
                        harness.processElement1(record(row));
                    } else {
                        harness.processElement2(record(row));
                    }
                }
                take(out, number++, harness.getOutput());
            }
            answer.set("late", late(harness.getSideOutput(LATE)));
            answer.put("entries", harness.numKeyedStateEntries());
        }
        return answer;
    }

    static StreamRecord<Tuple4<Long, Long, Long, Long>> record(JsonNode row) {
        return new StreamRecord<>(Tuple4.of(row.get(0).asLong(), row.get(1).asLong(), row.get(2).asLong(),
                row.get(3).asLong()), row.get(2).asLong());
    }

    @SuppressWarnings("unchecked")
    static void take(ArrayNode out, int step, java.util.Queue<Object> found) {
        for (Object each; (each = found.poll()) != null; ) {
            if (each instanceof StreamRecord) {
                ArrayNode row = out.addArray().add(step);
                ((StreamRecord<List<Long>>) each).getValue().forEach(row::add);
            }
        }
    }

    static ArrayNode late(java.util.Queue<StreamRecord<Tuple4<Long, Long, Long, Long>>> found) {
        ArrayNode rows = JSON.createArrayNode();
        if (found != null) {
            for (StreamRecord<Tuple4<Long, Long, Long, Long>> each : found) {
                Tuple4<Long, Long, Long, Long> row = each.getValue();
                rows.addArray().add(row.f0).add(row.f1).add(row.f2).add(row.f3);
            }
        }
        return rows;
    }
}
