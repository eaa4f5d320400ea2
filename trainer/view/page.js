// SPDX-License-Identifier: Apache-2.0
"use strict";
/* Draws the element "data": runs with their curves, the sums of their columns, and what their files say. A curve has for each interval
 * of steps the mean of its steps (step), and the mean, the least and the largest of its values. A chart shows curves as lines. All
 * charts share one view: the x axis, its part that is seen, the scale of values, the smoothing, and which lines are hidden. */
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const shape = JSON.parse(document.getElementById("shape").textContent); // which charts and figures there are
const WIDTH = 640, HEIGHT = 260, LEFT = 64, RIGHT = 628, TOP = 10, BOTTOM = 230;
const LOG_FROM = 20; // largest over least value that makes an axis logarithmic by itself
const view = { axis: "step", scale: "auto", smoothing: 0, range: null, hidden: new Set() };

/* Text of a run, in which control characters and marks that reverse the direction of writing are shown. */
const clean = text => String(text).replace(/[\p{Cc}\u2028\u2029\ufeff\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/gu,
  c => c === "\n" ? "\\n" : "\\u" + c.codePointAt(0).toString(16).padStart(4, "0"));
const make = (name, attributes, parent, text) => {
  const svg = ["svg", "path", "text", "rect", "circle", "polyline", "g", "title", "clipPath"].includes(name);
  const node = svg ? document.createElementNS(document.getElementById("svg").namespaceURI, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = clean(text);
  if (parent) parent.append(node);
  return node;
};

/* Numbers. */

const exact = v => v === null ? "-" : Number(v).toPrecision(5).replace(/(\.\d*?)0+(e|$)/, "$1$2").replace(/\.(e|$)/, "$1");
const inUnits = (v, units) => {
  const [from, unit, factor = from] = units.find(([least]) => Math.abs(v) >= least) ?? [1, ""];
  return exact(v / factor) + unit;
};
const short = v => inUnits(v, [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e4, " k", 1e3]]);
const bytes = v => inUnits(v, [[2 ** 40, " TiB"], [2 ** 30, " GiB"], [2 ** 20, " MiB"], [2 ** 10, " KiB"], [0, " B", 1]]);
const percent = v => (100 * v).toFixed(1) + " %";
/* A value for a person. The name says whether a number is one of bytes, or a step. */
const words = (name, value) => {
  if (Number.isFinite(value)) return (new RegExp(shape.bytes).test(name) ? bytes : /^step( |$)/.test(name) ? String : short)(value);
  return typeof value === "string" ? value : typeof (value ?? NaN) === "number" ? "-" : JSON.stringify(value);
};
const timeUnit = seconds => seconds >= 7200 ? [3600, "h"] : seconds >= 120 ? [60, "min"] : [1, "s"];
const place = (x, range) => {
  if (view.axis === "seconds") {
    const [factor, unit] = timeUnit(range[1]);
    return exact(x / factor) + " " + unit;
  }
  return view.axis === "tokens" ? short(x) + " tokens" : "step " + Math.round(x);
};
const ticks = (low, high, wanted) => {
  const raw = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find(f => raw / power <= f + 1e-9);
  const all = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) all.push(i * step);
  return all;
};
const logTicks = (low, high) => {
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high)), all = [];
  const factors = to - from > 3 ? [1] : [1, 2, 5], every = Math.floor((to - from) / 12) + 1;
  for (let e = from; e <= to; e += every) for (const f of factors) all.push(f * 10 ** e);
  return all.filter(v => v >= low && v <= high);
};

const several = data.runs.length > 1;
const lineOf = (spec, run, curve, name, colour) => {
  const { step, ...values } = data.runs[run].curves[curve];
  const [mean, low, high] = ["mean", "low", "high"].map(part => values[part].map(value => value / (spec.divide ?? 1)));
  return { name: clean(name), run, colour, points: curve.startsWith("validation"), step, mean, low, high };
};
const linesOf = spec => {
  const wanted = spec.curves ?? {}, first = data.runs[0].curves;
  if (spec.runs && (spec.runs === "several") !== several) return [];
  if (several) {
    const curve = Object.keys(wanted)[0];
    return data.runs.map((run, i) => run.curves[curve] && lineOf(spec, i, curve, run.name, i)).filter(line => line);
  }
  const names = Object.keys(spec.prefix ? first : wanted).filter(name => first[name] && name.startsWith(spec.prefix ?? ""));
  return names.map((name, i) => lineOf(spec, 0, name, spec.prefix ? name.slice(spec.prefix.length) : wanted[name] || spec.title, i));
};
/* The words of an event, beside its kind and step. */
const said = event => Object.entries(event).filter(([key]) => key !== "event" && key !== "step")
  .map(([key, value]) => (key === "bytes" ? "" : key.replaceAll("_", " ") + " ") + words(key, value)).join("; ");
const marksOf = run => {
  const events = run.events.filter(event => ["resumed", "checkpoint_failed", "records_lost"].includes(event.event));
  return [...events, ...run.skipped.map(step => ({ step, event: "skipped" }))].map(event =>
    ({ step: Math.min(event.step, run.last), text: `step ${event.step}: ${event.event} ${said(event)}` }));
};
const charts = shape.charts.map(spec => ({ ...spec, lines: linesOf(spec), marks: spec.id === "loss" && !several ? marksOf(data.runs[0]) : [] }))
  .filter(chart => chart.lines.some(line => !chart.zero || line.high.some(value => value !== 0)));

/* Index of the last element that is at most `value`, at least 0. */
const before = (list, value) => {
  let low = 0, high = list.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (list[middle] <= value) low = middle; else high = middle - 1;
  }
  return low;
};
const nearest = (list, value) => {
  const i = before(list, value);
  return i + 1 < list.length && list[i + 1] - value < value - list[i] ? i + 1 : i;
};

/* A step on the x axis: tokens and time are known where the run has its intervals, and straight between them. */
const toAxis = (run, step) => {
  if (view.axis === "step") return step;
  const steps = data.runs[run].step, values = data.runs[run][view.axis], i = before(steps, step);
  const j = Math.min(i + 1, steps.length - 1);
  if (i === j || step <= steps[i]) return values[i];
  return values[i] + (values[j] - values[i]) * Math.min((step - steps[i]) / (steps[j] - steps[i]), 1);
};
const wholeRange = () => {
  const ends = data.runs.flatMap((run, i) => [toAxis(i, run.first), toAxis(i, run.last)]), low = Math.min(...ends), high = Math.max(...ends);
  return low < high ? [low, high] : [low - 1, low + 1];
};

/* The mean of all values so far, of which older ones count less. */
const smooth = values => {
  if (view.smoothing === 0) return values;
  let sum = 0, weight = 0;
  return values.map(v => {
    sum = view.smoothing * sum + (1 - view.smoothing) * v;
    weight = view.smoothing * weight + 1 - view.smoothing;
    return sum / weight;
  });
};

/* Charts. */

const keyOf = (chart, line) => several ? "run " + line.run : chart.id + " " + line.name;
const shown = chart => chart.lines.filter(line => !view.hidden.has(keyOf(chart, line)));

const valueRange = (chart, lines, range) => {
  let low = Infinity, high = -Infinity;
  for (const line of lines) line.at.forEach((x, i) => {
    if (x < range[0] || x > range[1]) return;
    low = Math.min(low, line.points ? line.mean[i] : line.low[i]);
    high = Math.max(high, line.points ? line.mean[i] : line.high[i]);
  });
  if (low > high) [low, high] = [0, 1];
  const able = low > 0;
  const log = able && (view.scale === "log" || (view.scale === "auto" && !chart.zero && high / low > LOG_FROM));
  if (log) [low, high] = [Math.log10(low), Math.log10(high)];
  const zero = chart.zero && !log && able && view.range === null;
  const pad = high > low ? (high - low) * 0.04 : Math.abs(high) > 0 ? Math.abs(high) * 0.05 : 1;
  return { low: zero ? 0 : low - pad, high: high + pad, log };
};

const draw = (chart, range) => {
  const lines = shown(chart);
  for (const line of chart.lines) {
    line.at = line.step.map(step => toAxis(line.run, step));
    line.drawn = smooth(line.mean);
  }
  const values = valueRange(chart, lines, range);
  const x = at => LEFT + (at - range[0]) / (range[1] - range[0]) * (RIGHT - LEFT);
  const y = v => TOP + (values.high - (values.log ? Math.log10(v) : v)) / (values.high - values.low) * (BOTTOM - TOP);
  const point = (at, v) => x(at).toFixed(1) + "," + y(v).toFixed(1);
  const svg = chart.svg;
  svg.replaceChildren();
  chart.x = x;
  chart.range = range;
  chart.note.textContent = values.log ? ", logarithmic" : "";
  const marks = values.log ? logTicks(10 ** values.low, 10 ** values.high) : ticks(values.low, values.high, 5);
  make("path", { class: "grid", d: marks.map(v => `M${LEFT},${y(v).toFixed(1)}H${RIGHT}`).join("") }, svg);
  for (const v of marks) make("text", { x: LEFT - 6, y: (y(v) + 4).toFixed(1), "text-anchor": "end" }, svg, short(v));
  const [factor, unit] = view.axis === "seconds" ? timeUnit(range[1]) : [1, ""];
  for (const v of ticks(range[0] / factor, range[1] / factor, 6)) {
    if (view.axis === "step" && v !== Math.round(v)) continue; // there is no half step
    make("text", { x: x(v * factor).toFixed(1), y: BOTTOM + 18, "text-anchor": "middle" }, svg, short(v) + (unit && " " + unit));
  }
  make("path", { class: "axis", d: `M${LEFT},${TOP}V${BOTTOM}H${RIGHT}` }, svg);
  const clip = make("clipPath", { id: "clip-" + chart.id }, svg);
  make("rect", { x: LEFT, y: 0, width: RIGHT - LEFT, height: BOTTOM + 4 }, clip);
  const inside = make("g", { "clip-path": `url(#clip-${chart.id})` }, svg);
  for (const mark of chart.marks) {
    const at = x(toAxis(0, mark.step)).toFixed(1);
    make("title", {}, make("path", { class: "mark", d: `M${at},${TOP}V${BOTTOM}` }, inside), mark.text);
  }
  for (const line of lines) {
    const style = "c" + line.colour % 8 + (line.colour >= 8 ? " dash" : "");
    const usable = line.at.map((_, i) => i).filter(i => !values.log || line.low[i] > 0);
    if (!line.points && usable.some(i => line.low[i] < line.high[i])) {
      const upper = usable.map(i => point(line.at[i], line.high[i]));
      const lower = usable.map(i => point(line.at[i], line.low[i])).reverse();
      make("path", { class: "band " + style, d: "M" + upper.concat(lower).join("L") + "Z" }, inside);
    }
    if (usable.length > 1) {
      make("polyline", { class: "line " + style, points: usable.map(i => point(line.at[i], line.drawn[i])).join(" ") }, inside);
    }
    for (const i of line.points || usable.length === 1 ? usable : []) {
      make("circle", { class: "dot " + style, cx: x(line.at[i]).toFixed(1), cy: y(line.mean[i]).toFixed(1), r: 3 }, inside);
    }
  }
  chart.selection = make("rect", { class: "selection", y: TOP, height: BOTTOM - TOP, width: 0 }, svg);
  chart.cursor = make("path", { class: "cursor" }, svg);
};
const drawAll = () => {
  const range = view.range || wholeRange();
  for (const chart of charts) {
    hide(chart);
    draw(chart, range);
  }
  reset.disabled = view.range === null;
};

/* Values under the pointer, or at the cursor that the keys move. */

const hide = chart => {
  chart.tip.hidden = true;
  if (chart.cursor) chart.cursor.style.visibility = "hidden";
};
const show = (chart, wanted, spoken) => {
  const rows = [];
  let at = null;
  for (const line of shown(chart)) {
    if (line.at.length === 0) continue;
    const i = nearest(line.at, wanted);
    if (at === null) at = line.at[i];
    const range = line.low[i] < line.high[i] ? ` (${exact(line.low[i])} to ${exact(line.high[i])})` : "";
    const smoothed = view.smoothing > 0 && !line.points ? `, smoothed ${exact(line.drawn[i])}` : "";
    rows.push(line.name + ": " + exact(line.mean[i]) + range + smoothed);
  }
  if (at === null || at < chart.range[0] || at > chart.range[1]) return hide(chart);
  chart.at = at;
  const x = chart.x(at);
  chart.cursor.setAttribute("d", `M${x.toFixed(1)},${TOP}V${BOTTOM}`);
  chart.cursor.style.visibility = "visible";
  chart.tip.textContent = place(at, chart.range) + "\n" + rows.join("\n");
  chart.tip.hidden = false;
  const box = chart.svg.getBoundingClientRect(), left = box.left - chart.figure.getBoundingClientRect().left + x / WIDTH * box.width;
  chart.tip.style.left = (left > box.width / 2 ? left - chart.tip.offsetWidth - 10 : left + 10) + "px";
  chart.tip.style.top = chart.svg.offsetTop + 4 + "px";
  if (spoken) live.textContent = chart.title + ", " + chart.tip.textContent.replaceAll("\n", ", ");
};

const zoom = (low, high) => {
  const whole = wholeRange();
  low = Math.max(low, whole[0]);
  high = Math.min(high, whole[1]);
  if (!(high - low > 1e-9 * Math.max(high, whole[1] - whole[0]))) return; // ticks of a narrower part would be equal numbers
  view.range = low === whole[0] && high === whole[1] ? null : [low, high];
  drawAll();
};
const zoomBy = (chart, factor) => {
  const [low, high] = chart.range, centre = Math.min(Math.max(chart.at ?? (low + high) / 2, low), high);
  zoom(centre - (centre - low) * factor, centre + (high - centre) * factor);
  show(chart, centre, false);
};
const unzoom = () => {
  view.range = null;
  drawAll();
};
const move = (chart, by) => {
  const line = shown(chart).find(one => one.at.length > 0);
  if (!line) return;
  const [low, high] = chart.range, last = line.at.length - 1;
  const from = chart.at === undefined || chart.at < low || chart.at > high ? nearest(line.at, low) - Math.sign(by) : nearest(line.at, chart.at);
  show(chart, line.at[Math.min(Math.max(from + by, nearest(line.at, low)), Math.min(nearest(line.at, high), last))], true);
};
const keys = {
  ArrowLeft: chart => move(chart, -1), ArrowRight: chart => move(chart, 1), PageUp: chart => move(chart, -20),
  PageDown: chart => move(chart, 20), Home: chart => move(chart, -1e9), End: chart => move(chart, 1e9),
  "+": chart => zoomBy(chart, 0.5), "=": chart => zoomBy(chart, 0.5), "-": chart => zoomBy(chart, 2), 0: unzoom, Escape: unzoom,
};

const listen = chart => {
  const svg = chart.svg;
  let begin = null;
  const at = event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * WIDTH;
    return Math.min(Math.max(x, LEFT), RIGHT);
  };
  const value = x => chart.range[0] + (x - LEFT) / (RIGHT - LEFT) * (chart.range[1] - chart.range[0]);
  svg.addEventListener("pointerdown", event => {
    if (event.button !== 0) return;
    begin = at(event);
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", event => {
    const now = at(event);
    show(chart, value(now), false);
    if (begin === null) return;
    chart.selection.setAttribute("x", Math.min(begin, now));
    chart.selection.setAttribute("width", Math.abs(now - begin));
  });
  svg.addEventListener("pointerup", event => {
    const [low, high] = begin === null ? [0, 0] : [begin, at(event)].sort((a, b) => a - b);
    begin = null;
    chart.selection.setAttribute("width", 0);
    if (high - low > 6) zoom(value(low), value(high));
  });
  svg.addEventListener("pointercancel", () => { begin = null; });
  svg.addEventListener("pointerleave", () => hide(chart));
  svg.addEventListener("blur", () => hide(chart));
  svg.addEventListener("dblclick", unzoom);
  svg.addEventListener("keydown", event => {
    if (!keys[event.key] || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key](chart);
  });
};

const addLegend = (chart, caption) => {
  for (const line of chart.lines.length > 1 ? chart.lines : []) {
    const style = "key c" + line.colour % 8 + (line.colour >= 8 ? " dash" : "");
    const button = make("button", { type: "button", class: style, "aria-pressed": "true" }, caption, line.name);
    button.dataset.key = keyOf(chart, line);
    button.title = "shows or hides this curve";
    button.addEventListener("click", () => {
      const key = button.dataset.key, off = !view.hidden.delete(key);
      if (off) view.hidden.add(key);
      for (const other of document.querySelectorAll(".key")) {
        if (other.dataset.key === key) other.setAttribute("aria-pressed", String(!off));
      }
      drawAll();
    });
  }
};

const add = chart => {
  chart.figure = make("figure", { class: "chart", id: chart.id }, document.getElementById("charts"));
  const caption = make("figcaption", {}, chart.figure);
  make("b", {}, caption, chart.title);
  caption.append(" " + chart.unit);
  chart.note = make("span", {}, caption);
  addLegend(chart, caption);
  const ends = chart.lines.filter(line => line.mean.length > 0).map(line => `${line.name} from ${exact(line.mean[0])} to ${
    exact(line.mean.at(-1))}, least ${exact(Math.min(...line.low))}, largest ${exact(Math.max(...line.high))}`);
  chart.svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: 0, "aria-label":
    `${chart.title}, ${chart.unit}: ${ends.join("; ")}. Arrow keys read values, plus and minus zoom, 0 shows all.` }, chart.figure);
  chart.tip = make("div", { class: "tip", hidden: "" }, chart.figure);
  listen(chart);
};

/* Tables. A cell is a text, or a number from 0 to 1: a share, with a bar. */

let parent = document.getElementById("blocks");
/* A file of a run may have another form than the script takes: then one section says so in place of its table. */
const attempt = draw => {
  const outer = parent;
  try { draw(); } catch (error) { make("p", { class: "verdict bad" }, parent = outer, `A part of the report cannot be drawn: ${error.message}`); }
};
const fold = (title, draw) => {
  const outer = parent;
  parent = make("details", {}, outer);
  make("summary", {}, parent, title);
  draw();
  parent = outer;
};
const addRows = (heads, rows, kind) => {
  const whole = make("table", { class: kind }, make("div", { class: "scroll" }, parent));
  const head = make("tr", {}, make("thead", {}, whole)), body = make("tbody", {}, whole);
  for (const text of heads) make("th", { scope: "col" }, head, text);
  for (const cells of rows) {
    const row = make("tr", {}, body);
    cells.forEach((cell, i) => {
      const share = typeof cell === "number", text = share ? percent(cell) : cell;
      const node = make(i === 0 ? "th" : "td", share ? { class: "share" } : {}, row, text);
      if (share) node.style.setProperty("--share", text.replace(" ", ""));
    });
  }
};
/* A table of more than `many` rows is folded, and one of none is left out. Its kind is "words" where all columns have texts. */
const table = (title, heads, rows, { kind = "", note = "", many = 30 } = {}) => {
  if (rows.length === 0) return;
  make("h2", {}, parent, title);
  if (note) make("p", {}, parent, note);
  if (rows.length > many) fold(`${rows.length} rows`, () => addRows(heads, rows, kind));
  else addRows(heads, rows, kind);
};
const shares = (title, unit, entries, note) => {
  const all = entries.reduce((sum, [, value]) => sum + value, 0);
  const rows = entries.filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]).slice(0, 16);
  table(title, ["", unit, "share"], rows.map(([name, value]) => [name, words(unit, value), value / all]), { note });
};

const addFigures = () => {
  const at = (run, path) => path.split(".").reduce((object, key) => object?.[key], run);
  const rows = shape.figures.map(([name, path, compares, factor = 1]) => [name, data.runs.map(run => at(run, path) * factor), compares]);
  table(several ? "Figures; in brackets against the first run" : "Figures", ["", ...data.runs.map(run => run.name)],
    rows.filter(([, values]) => values.some(value => value)).map(([name, values, compares]) => [name, ...values.map((value, i) => {
      const difference = (value / values[0] - 1) * 100;
      return words(name, value) + (i > 0 && compares && isFinite(difference) ? ` (${difference < 0 ? "" : "+"}${difference.toFixed(2)} %)` : "");
    })]));
};

/* Settings and surroundings, as "config.train.steps". */
const flat = (value, key) => value !== null && typeof value === "object" && !Array.isArray(value)
  ? Object.entries(value).flatMap(([name, one]) => flat(one, key ? key + "." + name : name)) : [[key, value]];
const written = value => typeof value === "string" ? value : JSON.stringify(value) ?? "";
const addDifferences = runs => {
  const maps = runs.map(run => new Map(flat(run.record, "").filter(([key]) => /^(config|mesh|machine|libraries)\./.test(key))));
  const keys = [...new Set(maps.flatMap(map => [...map.keys()]))].filter(key => new Set(maps.map(map => written(map.get(key)))).size > 1);
  table("Settings that differ between the runs", ["setting", ...runs.map(run => run.name)],
    keys.map(key => [key, ...maps.map(map => written(map.get(key)))]), { kind: "words" });
};
const addSettings = run => {
  const config = Object.entries(run.record?.config ?? {}).map(([key, value]) => [key, written(value), written(data.defaults[key])]);
  const quoted = word => /^[\w\-./=:,+@%]+$/.test(word) ? word : "'" + word.replaceAll("'", "'\\''") + "'"; // as a shell takes it
  table("Settings that differ from their defaults", ["setting", "value", "default"], config.filter(([, value, usual]) => value !== usual),
    { kind: "words", many: 60 });
  table("Settings and surroundings", ["", "value"], flat(run.record ?? {}, "").filter(([key]) => key !== "command")
    .map(([key, value]) => [key, written(value)]), { kind: "words", many: 0 });
  if (Array.isArray(run.record?.command)) make("pre", {}, parent, run.record.command.map(quoted).join(" "));
};

const addRanks = run => {
  const ranks = run.slowest.sort((a, b) => b[2] - a[2]), known = ranks.reduce((sum, rank) => sum + rank[2], 0);
  table("Slowest rank", ["", "steps in which it worked longest", "share", "ms longer than the fastest, mean", "largest"],
    ranks.slice(0, 8).map(([rank, axes, steps, lag, longest]) =>
      [`rank ${rank}${axes && ` (${axes})`}`, String(steps), steps / known, exact(lag / steps), exact(longest)]),
  { note: "Work is forward, backward and waiting for data, without communication." });
  const { steps, collectives, ranks: waits } = run.waits ?? { ranks: [] };
  table("Who waited for whom", ["", "communication, ms of a step", "of it waiting for others", "others waiting for it", "entered last"],
    waits.map((numbers, rank) => [rank, ...numbers]).sort((a, b) => b[3] - a[3]).slice(0, 16).map(([rank, all, waited, caused, last]) =>
      [`rank ${rank}`, exact(all / steps), exact(waited / steps), exact(caused / steps), String(last)]),
    { note: `From profile.json: ${steps} steps, ${collectives} collectives. The rank that others waited longest for comes first.` });
};
const addEvents = run => {
  const events = run.events.reverse(), best = run.columns.validation_loss?.least_step;
  table("Sample texts", ["after step", "prompt", "goes on"], events.filter(event => event.event === "sample")
    .map(event => [String(event.step), event.prompt, event.text]), { kind: "words" });
  table("Events", ["after step", "event", ""], events.filter(event => event.event !== "sample")
    .map(event => [String(event.step), event.event, said(event)]),
  { kind: "words events", note: Object.entries(run.event_counts).map(([kind, count]) => `${kind}: ${count}`).join(", ") });
  table("Checkpoints in the folder", ["folder", "state", "size", "saved"], run.saved.map(({ name, state, why, step, bytes: size, time }) =>
    [name, state + (why && ": " + why) + (step === best ? ", best validation" : ""), bytes(size), time]), { kind: "words" });
};
const addRun = run => {
  const { least, least_step: best, last } = run.columns.validation_loss ?? {};
  if (last > least * 1.01) make("p", {}, parent, `The validation loss was lowest after step ${best} (${exact(least)}), and is ${exact(last)} now.`);
  const { first_step: first, steps } = run.trace ?? {};
  const kinds = Object.entries(run.trace ?? {}).filter(([key]) => /_ms$/.test(key) && key !== "validation_ms");
  const other = Math.max(run.traced_ms - kinds.reduce((sum, [, ms]) => sum + ms, 0), 0);
  attempt(() => shares("Where the time of rank 0 went", "ms of a step",
    [...kinds.map(([key, ms]) => [key.slice(0, -3), ms / steps]), ["everything else", other / steps]],
    `Steps ${first} to ${first + steps - 1}, without validations. Communication is the time in calls: on a CPU also the wait for slower ranks.`));
  attempt(() => addRanks(run));
  shares("Bytes on the wire, sent by rank 0", "sent in a step, mean", Object.entries(run.columns).filter(([name]) => name.startsWith("wire."))
    .map(([name, column]) => [name.slice(5), column.mean]));
  attempt(() => shares("Planned memory of rank 0, largest buffers", "size", Object.entries(run.record?.memory_plan_bytes ?? {})));
  const of = (one, named, only) => one.name ? run.columns[named + one.name] : run.columns[only]; // a source without a name is the only one
  attempt(() => table("Data", ["source", "tokens", "documents", "epochs", "labels seen", "loss at the end"],
    (run.record?.data?.sources ?? []).map(one => [one.name || one.path, ...[one.tokens, one.documents,
      one.samples * run.last / run.wanted / one.blocks, of(one, "source_tokens.", "tokens")?.sum,
      of(one, "source_loss.", "loss")?.end].map(number => words("", number))])));
  attempt(() => addEvents(run));
  table("All values", ["", "first", "last", "least", "at step", "largest", "at step", "mean", "not finite"],
    Object.entries(run.columns).map(([name, c]) => [name, ...[c.first, c.last, c.least].map(value => words(name, value)),
      words("step", c.least_step), words(name, c.largest), words("step", c.largest_step) + (c.layer === undefined ? "" : `, layer ${c.layer}`),
      words(name, c.mean), String(c.lost)]), { many: 0 });
  attempt(() => addSettings(run));
};

/* Controls that hold for all charts. */

const bar = document.getElementById("controls");
const field = (text, name, attributes) => {
  const label = make("label", {}, bar, text + " ");
  return make(name, attributes, label);
};
const choice = (text, id, options, take) => {
  const select = field(text, "select", { id });
  for (const [value, name] of Object.entries(options)) make("option", { value }, select, name);
  select.addEventListener("change", () => {
    take(select.value);
    drawAll();
  });
};
choice("x axis", "axis", { step: "steps", tokens: "tokens", seconds: "time" }, value => {
  view.axis = value;
  view.range = null;
});
choice("values", "scale", { auto: "as suits", linear: "linear", log: "logarithmic" }, value => { view.scale = value; });
const slider = field("smoothing", "input", { id: "smoothing", type: "range", min: 0, max: 0.99, step: 0.01, value: 0 });
slider.addEventListener("input", () => {
  view.smoothing = Number(slider.value);
  drawAll();
});
const reset = make("button", { type: "button", id: "reset" }, bar, "show all");
reset.addEventListener("click", unzoom);
make("span", { class: "hint" }, bar, "drag over a chart to zoom");
const live = make("p", { class: "spoken", "aria-live": "polite" }, bar);

const root = document.documentElement;
const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
document.getElementById("theme").addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; });
document.title = document.getElementById("title").textContent = clean(data.runs[0].name) + (several ? ` and ${data.runs.length - 1} more` : "");
for (const run of data.runs)
  make("p", { class: "verdict " + (run.columns.loss?.end === undefined ? "bad" : run.mood) }, document.getElementById("verdicts"),
    (several ? run.name + ": " : "") + run.verdict);
charts.forEach(add);
drawAll();
addFigures();
addDifferences(data.runs.filter(run => run.record));
for (const run of data.runs) several ? fold(run.folder, () => addRun(run)) : addRun(run);
make("p", {}, parent, `Written by ndtrain ${data.version} at ${data.time}.`);
})();
