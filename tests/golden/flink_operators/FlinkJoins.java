import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;

import org.apache.flink.api.common.ExecutionConfig;
import org.apache.flink.api.common.functions.AbstractRichFunction;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.tuple.Tuple4;
import org.apache.flink.streaming.api.functions.windowing.ProcessWindowFunction;
import org.apache.flink.streaming.api.operators.TwoInputStreamOperator;
import org.apache.flink.streaming.api.operators.co.KeyedCoProcessOperator;
import org.apache.flink.streaming.api.watermark.Watermark;
import org.apache.flink.streaming.api.windowing.assigners.TumblingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.triggers.EventTimeTrigger;
import org.apache.flink.streaming.api.windowing.windows.TimeWindow;
import org.apache.flink.streaming.runtime.operators.windowing.WindowOperatorBuilder;
import org.apache.flink.streaming.runtime.streamrecord.StreamRecord;
import org.apache.flink.streaming.util.KeyedOneInputStreamOperatorTestHarness;
import org.apache.flink.streaming.util.KeyedTwoInputStreamOperatorTestHarness;
import org.apache.flink.table.data.GenericRowData;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.runtime.generated.GeneratedJoinCondition;
import org.apache.flink.table.runtime.generated.JoinCondition;
import org.apache.flink.table.runtime.operators.join.FlinkJoinType;
import org.apache.flink.table.runtime.operators.join.interval.IntervalJoinFunction;
import org.apache.flink.table.runtime.operators.join.interval.RowTimeIntervalJoin;
import org.apache.flink.table.runtime.operators.join.stream.StreamingJoinOperator;
import org.apache.flink.table.runtime.operators.join.stream.utils.JoinInputSideSpec;
import org.apache.flink.table.runtime.operators.join.temporal.TemporalRowTimeJoinOperator;
import org.apache.flink.table.runtime.typeutils.InternalTypeInfo;
import org.apache.flink.table.types.logical.BigIntType;
import org.apache.flink.types.RowKind;
import org.apache.flink.util.Collector;

/** Joins of Flink's tables, and of its windows. A row is (side, key, time, value), all on time. */
class FlinkJoins {
    static final InternalTypeInfo<RowData> ROW =
            InternalTypeInfo.ofFields(new BigIntType(), new BigIntType(), new BigIntType());
    static final InternalTypeInfo<RowData> PAIR = InternalTypeInfo.ofFields(new BigIntType(),
            new BigIntType(), new BigIntType(), new BigIntType(), new BigIntType(), new BigIntType());

    static final InternalTypeInfo<RowData> KEY = InternalTypeInfo.ofFields(new BigIntType());

    static RowData key(RowData row) {
        return KEY.toRowSerializer().toBinaryRow(GenericRowData.of(row.getLong(0))).copy();
    }

    /** Equal keys are all that a pair needs, and the operators see to these. */
    static class Always extends GeneratedJoinCondition {
        Always() {
            super("", "", new Object[0]);
        }

        @Override
        public JoinCondition newInstance(ClassLoader loader) {
            return new True();
        }
    }

    static class True extends AbstractRichFunction implements JoinCondition {
        @Override
        public boolean apply(RowData left, RowData right) {
            return true;
        }
    }

    static ObjectNode answer(JsonNode one) throws Exception {
        String how = one.get("how").asText();
        if (one.get("kind").asText().equals("window_join")) {
            return windows(one, how);
        }
        if (one.get("kind").asText().equals("temporal_join")) {
            return joined(one, new TemporalRowTimeJoinOperator(ROW, ROW, new Always(), 1, 1, 0, 0, how.equals("left")));
        }
        if (one.get("kind").asText().equals("upsert_join")) {
            return upserted(one, how);
        }
        // Ours says how far the right row is after the left one, Flink's how far the left is after the right.
        RowTimeIntervalJoin join = new RowTimeIntervalJoin(FlinkJoinType.valueOf(how.toUpperCase()),
                -one.get("upper").asLong(), -one.get("lower").asLong(), 0, 0, ROW, ROW,
                new IntervalJoinFunction(new Always(), PAIR, new boolean[] {false}), 1, 1);
        return joined(one, new KeyedCoProcessOperator<>(join));
    }

    /** Of each step, the table that a join of two tables with one row per key has become. */
    static ObjectNode upserted(JsonNode one, String how) throws Exception {
        boolean keepsLeft = how.equals("left") || how.equals("full");
        boolean keepsRight = how.equals("right") || how.equals("full");
        JoinInputSideSpec side = JoinInputSideSpec.withUniqueKeyContainedByJoinKey(KEY, FlinkJoins::key);
        StreamingJoinOperator operator = new StreamingJoinOperator(ROW, ROW, new Always(), side, side,
                keepsLeft, keepsRight, new boolean[] {false}, 0, 0);
        ObjectNode answer = FlinkOperators.JSON.createObjectNode();
        ArrayNode out = answer.putArray("out");
        Map<List<Long>, List<Long>> known = new HashMap<>();
        Map<String, Integer> table = new TreeMap<>();
        try (KeyedTwoInputStreamOperatorTestHarness<RowData, RowData, RowData, RowData> harness =
                new KeyedTwoInputStreamOperatorTestHarness<>(operator, FlinkJoins::key, FlinkJoins::key, KEY)) {
            harness.setup(PAIR.toSerializer());
            harness.open();
            int number = 0;
            for (JsonNode step : one.get("steps")) {
                for (JsonNode row : step.get("rows")) {
                    List<Long> place = List.of(row.get(0).asLong(), row.get(1).asLong());
                    boolean isDelete = row.get(3).asLong() % one.get("deletes").asLong() == 0;
                    List<Long> values = List.of(row.get(1).asLong(), row.get(2).asLong(), row.get(3).asLong());
                    List<Long> before = isDelete ? known.remove(place) : known.put(place, values);
                    if (before != null) {
                        send(harness, place.get(0), isDelete ? RowKind.DELETE : RowKind.UPDATE_BEFORE, before);
                    }
                    if (!isDelete) {
                        send(harness, place.get(0), before == null ? RowKind.INSERT : RowKind.UPDATE_AFTER, values);
                    }
                }
                for (Object each; (each = harness.getOutput().poll()) != null; ) {
                    RowData pair = (RowData) ((StreamRecord<?>) each).getValue();
                    ArrayNode row = FlinkOperators.JSON.createArrayNode();
                    put(row, pair);
                    boolean comes = pair.getRowKind() == RowKind.INSERT || pair.getRowKind() == RowKind.UPDATE_AFTER;
                    table.merge(row.toString(), comes ? 1 : -1, Integer::sum);
                }
                for (Map.Entry<String, Integer> each : table.entrySet()) {
                    for (int times = 0; times < each.getValue(); times++) {
                        ArrayNode row = out.addArray().add(number);
                        FlinkOperators.JSON.readTree(each.getKey()).forEach(row::add);
                    }
                }
                number++;
            }
        }
        return answer;
    }

    static void send(KeyedTwoInputStreamOperatorTestHarness<RowData, RowData, RowData, RowData> harness,
            long side, RowKind kind, List<Long> values) throws Exception {
        StreamRecord<RowData> record = new StreamRecord<>(GenericRowData.ofKind(kind, values.toArray()));
        if (side == 0) {
            harness.processElement1(record);
        } else {
            harness.processElement2(record);
        }
    }

    static ObjectNode joined(JsonNode one, TwoInputStreamOperator<RowData, RowData, RowData> operator) throws Exception {
        ObjectNode answer = FlinkOperators.JSON.createObjectNode();
        ArrayNode out = answer.putArray("out");
        try (KeyedTwoInputStreamOperatorTestHarness<RowData, RowData, RowData, RowData> harness =
                new KeyedTwoInputStreamOperatorTestHarness<>(operator, FlinkJoins::key, FlinkJoins::key, KEY)) {
            harness.setup(PAIR.toSerializer());
            harness.open();
            int number = 0;
            for (JsonNode step : one.get("steps")) {
                if (!step.get("watermark").isNull()) {
                    harness.processWatermark1(new Watermark(step.get("watermark").asLong()));
                    harness.processWatermark2(new Watermark(step.get("watermark").asLong()));
                }
                for (JsonNode row : step.get("rows")) {
                    StreamRecord<RowData> record = new StreamRecord<>(GenericRowData.of(
                            row.get(1).asLong(), row.get(2).asLong(), row.get(3).asLong()), row.get(2).asLong());
                    if (row.get(0).asLong() == 0) {
                        harness.processElement1(record);
                    } else {
                        harness.processElement2(record);
                    }
                }
                for (Object each; (each = harness.getOutput().poll()) != null; ) {
                    if (each instanceof StreamRecord) {
                        put(out.addArray().add(number), (RowData) ((StreamRecord<?>) each).getValue());
                    }
                }
                number++;
            }
            answer.put("entries", harness.numKeyedStateEntries());
        }
        return answer;
    }

    /** Key, and time and value of both sides. */
    static void put(ArrayNode out, RowData pair) {
        out.add(pair.getLong(pair.isNullAt(0) ? 3 : 0));
        for (int at : new int[] {1, 2, 4, 5}) {
            if (pair.isNullAt(at)) {
                out.addNull();
            } else {
                out.add(pair.getLong(at));
            }
        }
    }

    /** What coGroup does with a window's rows, as the join of a window of each kind. */
    static class Crossed extends ProcessWindowFunction<Tuple4<Long, Long, Long, Long>, List<Long>, Long, TimeWindow> {
        final boolean keepsLeft;
        final boolean keepsRight;

        Crossed(String how) {
            keepsLeft = how.equals("left") || how.equals("full");
            keepsRight = how.equals("right") || how.equals("full");
        }

        @Override
        public void process(Long key, Context context, Iterable<Tuple4<Long, Long, Long, Long>> rows,
                Collector<List<Long>> out) {
            List<Tuple4<Long, Long, Long, Long>> left = new ArrayList<>(), right = new ArrayList<>();
            rows.forEach(row -> (row.f0 == 0 ? left : right).add(row));
            for (Tuple4<Long, Long, Long, Long> one : left) {
                for (Tuple4<Long, Long, Long, Long> other : right) {
                    out.collect(Arrays.asList(key, one.f2, one.f3, other.f2, other.f3));
                }
                if (right.isEmpty() && keepsLeft) {
                    out.collect(Arrays.asList(key, one.f2, one.f3, null, null));
                }
            }
            for (Tuple4<Long, Long, Long, Long> other : left.isEmpty() && keepsRight ? right : List.<Tuple4<Long, Long, Long, Long>>of()) {
                out.collect(Arrays.asList(key, null, null, other.f2, other.f3));
            }
        }
    }

    static ObjectNode windows(JsonNode one, String how) throws Exception {
        WindowOperatorBuilder<Tuple4<Long, Long, Long, Long>, Long, TimeWindow> builder =
                new WindowOperatorBuilder<>(TumblingEventTimeWindows.of(Duration.ofMillis(one.get("size").asLong()),
                        Duration.ofMillis(one.get("offset").asLong())), EventTimeTrigger.create(),
                        new ExecutionConfig(), FlinkOperators.ROW, row -> row.f1, Types.LONG);
        ObjectNode answer = FlinkOperators.JSON.createObjectNode();
        ArrayNode out = answer.putArray("out");
        try (KeyedOneInputStreamOperatorTestHarness<Long, Tuple4<Long, Long, Long, Long>, List<Long>> harness =
                new KeyedOneInputStreamOperatorTestHarness<>(builder.process(new Crossed(how)), row -> row.f1, Types.LONG)) {
            harness.open();
            int number = 0;
            for (JsonNode step : one.get("steps")) {
                if (!step.get("watermark").isNull()) {
                    harness.processWatermark(step.get("watermark").asLong());
                }
                for (JsonNode row : step.get("rows")) {
                    harness.processElement(FlinkOperators.record(row));
                }
                FlinkOperators.take(out, number++, harness.getOutput());
            }
            answer.put("entries", harness.numKeyedStateEntries());
        }
        return answer;
    }
}
