"use strict";
// Replaces sections that have changed, and draws the charts. Everything works without it, once.

const COLOURS = ["#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#999999", "#aa3377", "#8a6d3b"];
const IN = "#4477aa", OUT = "#cc6600";
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000, 1000000];
const HEIGHT = 220;
const drawn = {};

const number = (value) => (value === null || value === undefined ? "" : value.toLocaleString("en", { maximumFractionDigits: Math.abs(value) < 10 ? 1 : 0 }));
const clock = (seconds) => new Date(seconds * 1000).toISOString().slice(11, 19);
const grid = { stroke: "rgba(128, 128, 128, 0.25)", width: 1 };
const colour = () => getComputedStyle(document.body).color;

// An axis from 0 to the largest value, or to where the page says that it ends.
const upTo = (entry, index) => (u, least, most) => [0, entry.ends[index] || (most || 1) * 1.1];

function epochAxis() {
  return { stroke: colour(), grid: { show: false }, incrs: WHOLE, values: (u, ticks) => ticks.map((each) => (Number.isInteger(each) ? each : "")) };
}

function valueAxis(settings) {
  return { stroke: colour(), grid, size: 64, values: (u, ticks) => ticks.map(number), ...settings };
}

// A triangle at the top of each bar that goes on beyond the axis.
function markCut(entry) {
  return (u) => {
    u.ctx.fillStyle = colour();
    entry.data[1].forEach((value, index) => {
      if (entry.ends[0] && value > entry.ends[0]) {
        const x = u.valToPos(entry.data[0][index], "x", true), y = u.bbox.top, size = 5 * devicePixelRatio;
        u.ctx.beginPath();
        u.ctx.moveTo(x, y);
        u.ctx.lineTo(x - size, y + 1.5 * size);
        u.ctx.lineTo(x + size, y + 1.5 * size);
        u.ctx.fill();
      }
    });
  };
}

function draw(id, data, ends, raw, options, key) {
  const place = document.getElementById(`chart-${id}`);
  const entry = drawn[id] && drawn[id].key === key && drawn[id].width === place.clientWidth ? drawn[id] : {};
  Object.assign(entry, { data, ends, raw, key, width: place.clientWidth });
  if (entry.plot) { entry.plot.setData(data); return; }
  if (drawn[id]) drawn[id].plot.destroy();
  drawn[id] = entry;
  const { series, scales, axes, hooks } = options(entry);
  entry.plot = new uPlot({ width: entry.width, height: HEIGHT, series, scales, axes, hooks, cursor: { points: { show: false } } }, data, place);
}

// Parts lie on top of one another: the series of each is the sum up to it, the last one first.
function drawParts({ epochs, ms, end }) {
  const parts = Object.entries(ms).filter(([, values]) => values.some((each) => each));
  let below = epochs.map(() => 0);
  const sums = parts.map(([, values]) => (below = below.map((sum, index) => sum + (values[index] || 0)))).reverse();
  const raw = parts.map(([, values]) => values).reverse();
  const names = parts.map(([name]) => name).reverse();
  const all = Object.keys(ms);
  draw("parts", [epochs, ...sums], [end], raw, (entry) => ({
    series: [
      { label: "epoch", value: (u, value) => number(value) },
      ...names.map((label, index) => ({
        label, fill: COLOURS[all.indexOf(label)], stroke: COLOURS[all.indexOf(label)], width: 0, points: { show: false },
        paths: uPlot.paths.bars({ size: [0.8, 40] }),
        value: (u, sum, series, at) => (at === null ? "" : number(entry.raw[index][at] || 0)),
      })),
    ],
    scales: { x: { time: false, range: (u, least, most) => [least - 0.5, most + 0.5] }, y: { range: upTo(entry, 0) } },
    axes: [epochAxis(), valueAxis({})],
    hooks: { draw: [markCut(entry)] },
  }), names.join());
}

// What goes in has its axis on the left, what comes out on the right: often they differ much.
function drawBoth(id, { x, in: read, out, ends }, readName, isTime) {
  const wide = { width: 2, points: { show: x.length < 3 } };
  const series = (label, scale, stroke, align) => ({
    label, scale, stroke, value: (u, value) => number(value),
    ...(isTime
      ? { ...wide, paths: uPlot.paths.stepped({ align: -1 }) }
      : { fill: stroke, width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.4, 20], align }) }),
  });
  draw(id, [x, read, out], ends, [], (entry) => ({
    series: [
      isTime ? { label: "UTC", value: (u, value) => (value === null ? "" : clock(value)) } : { label: "epoch", value: (u, value) => number(value) },
      series(readName, "in", IN, -1),
      series("Rows out", "out", OUT, 1),
    ],
    scales: {
      x: isTime ? { time: true } : { time: false, range: (u, least, most) => [least - 0.5, most + 0.5] },
      in: { range: upTo(entry, 0) },
      out: { range: upTo(entry, 1) },
    },
    axes: [
      isTime ? { stroke: colour(), grid: { show: false }, space: 80, values: (u, ticks) => ticks.map(clock) } : epochAxis(),
      valueAxis({ scale: "in", stroke: IN }),
      valueAxis({ scale: "out", stroke: OUT, side: 1, grid: { show: false } }),
    ],
  }), readName);
}

function drawAll({ readName, parts, counts, throughput }) {
  document.getElementById("charts").hidden = !counts.x.length;
  const show = (id, is) => { document.getElementById(`chart-${id}`).parentElement.hidden = !is; };
  show("parts", parts);
  show("throughput", throughput.x.length > 1);
  if (parts) drawParts(parts);
  if (counts.x.length) drawBoth("counts", counts, readName, false);
  if (throughput.x.length > 1) drawBoth("throughput", throughput, readName, true);
  for (const [id, chart] of Object.entries({ parts, counts, throughput })) {
    document.getElementById(`cut-${id}`).textContent = chart && chart.cut ? `Beyond the axis: ${chart.cut}` : "";
  }
}

// Replaces a section, and leaves open, scrolled and focused what was so.
function replace(place, html) {
  const parts = () => [...place.querySelectorAll("details, summary, [tabindex]")];
  const old = parts().map((each) => ({ open: each.open, left: each.scrollLeft, focused: each === document.activeElement }));
  place.innerHTML = html;
  parts().forEach((each, index) => {
    if (!old[index]) return;
    if (old[index].open !== undefined) each.open = old[index].open;
    each.scrollLeft = old[index].left;
    if (old[index].focused) each.focus({ preventScroll: true });
  });
}

let newest = null;
const connection = document.getElementById("connection");
const events = new EventSource("/events");
events.onmessage = (message) => {
  const { sections, charts } = JSON.parse(message.data);
  for (const [name, html] of Object.entries(sections)) replace(document.getElementById(name), html);
  if (charts) { newest = charts; drawAll(charts); }
  if (connection.textContent !== "page up to date") connection.textContent = "page up to date";
};
events.onerror = () => { connection.textContent = "no answer: what is shown is old"; };

function redraw() {
  if (newest) drawAll(newest);
}
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const id of Object.keys(drawn)) { drawn[id].plot.destroy(); delete drawn[id]; }
  redraw();
});

// Asks the page's server for an action, once the user has confirmed it. JSON, so that a page
// elsewhere cannot send it without asking this one.
const answer = document.getElementById("answer");
async function act(button) {
  const fields = { drain: "drain" in button.dataset }, needs = button.dataset.needs;
  if (needs) {
    fields[needs] = document.getElementById(needs).value.trim();
    if (!fields[needs]) { document.getElementById(needs).focus(); return; }
  }
  const what = button.textContent + (needs ? ` (${fields[needs]})` : "");
  if (!confirm(`${what}: ${document.querySelector("h1").textContent}?`)) return;
  answer.textContent = `${what}: asked …`;
  try {
    const response = await fetch(`/actions/${button.dataset.action}`, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(fields),
    });
    answer.textContent = `${what}: ${(await response.json()).text}`;
  } catch {
    answer.textContent = `${what}: no answer. This page ends with the program of the run, as after a stop; its log has the answer.`;
  }
}
for (const button of document.querySelectorAll("[data-action]")) button.addEventListener("click", () => act(button));
