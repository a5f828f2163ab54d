// Numbers to pixels and to text: scales, ticks, averages, and curves by columns of pixels.

// Index of the last value that is at most x; -1 if there is none. Values ascend; undefined ones end them.
function lastUpTo(values, x) {
  let low = 0,
    high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= x) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

function nearest(values, x) {
  const i = Math.max(lastUpTo(values, x), 0);
  return i + 1 < values.length && values[i + 1] - x < x - values[i] ? i + 1 : i;
}

// Exponential moving average that begins without bias; a gap has no value.
function smoothed(values, weight) {
  let sum = 0,
    mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

class Scale {
  constructor(low, high, from, to, isLog) {
    Object.assign(this, { low, high, from, to, isLog });
    [this.a, this.b] = isLog ? [Math.log10(low), Math.log10(high)] : [low, high];
  }
  at(value) {
    const v = this.isLog ? Math.log10(value) : value;
    // Halves, because the difference of large numbers may be infinite.
    return this.from + ((v / 2 - this.a / 2) / (this.b / 2 - this.a / 2)) * (this.to - this.from);
  }
  inverse(pixel) {
    const share = (pixel - this.from) / (this.to - this.from);
    const v = this.a * (1 - share) + this.b * share;
    return this.isLog ? 10 ** v : v;
  }
  ticks(most, steps) {
    const found = this.isLog ? this.logTicks() : [];
    if (found.length >= 2) return found;
    const rough = ((this.high / 2 - this.low / 2) / most) * 2;
    const base = 10 ** Math.floor(Math.log10(rough));
    const step =
      steps?.find((s) => s >= rough) ?? [1, 2, 5, 10].map((m) => m * base).find((s) => s >= rough * 0.999);
    const ticks = [];
    const first = Math.ceil(this.low / step),
      last = Math.floor(this.high / step);
    for (let i = first; i <= last && ticks.length < 30; i++) ticks.push(i * step);
    return ticks.filter(Number.isFinite);
  }
  logTicks() {
    const decades = this.b - this.a,
      marks = decades > 3 ? [1] : decades > 1.2 ? [1, 3] : [1, 2, 3, 5, 7];
    const stride = Math.max(1, Math.ceil(decades / 8)),
      ticks = [];
    for (let e = Math.floor(this.a); e <= this.b; e += stride) {
      for (const m of marks) if (m * 10 ** e >= this.low && m * 10 ** e <= this.high) ticks.push(m * 10 ** e);
    }
    return ticks;
  }
}

// Least difference of consecutive ticks; 0 if there is one tick.
function stepOf(ticks) {
  return ticks.length > 1 ? Math.min(...ticks.slice(1).map((tick, i) => tick - ticks[i])) : 0;
}

// Digits that tell a tick from the next one.
function digitsOf(value, step) {
  const needed = step > 0 && value !== 0 ? Math.floor(Math.log10(Math.abs(value) / step)) + 2 : 0;
  return Math.min(Math.max(needed, 4), 15);
}

function shortNumber(value, digits = 4) {
  if (value === null || value === undefined) return "no finite value";
  const size = Math.abs(value);
  if (size === 0) return "0";
  for (const [unit, name] of [
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
    [1e4, "k"],
  ]) {
    if (size >= unit && size < 1e15)
      return `${+(value / (name === "k" ? 1e3 : unit)).toPrecision(digits)}${name}`;
  }
  if (size >= 1e15 || size < 1e-4) return (+value.toPrecision(digits)).toExponential();
  return (+value.toPrecision(digits)).toLocaleString("en-US", { maximumFractionDigits: 8 });
}

function clock(seconds) {
  const s = Math.round(seconds),
    days = Math.floor(s / 86400),
    two = (n) => String(n).padStart(2, "0");
  return `${days ? `${days} d ` : ""}${Math.floor(s / 3600) % 24}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
}

const MINUTE = 60,
  HOUR = 3600,
  DAY = 86400;
const TIME_STEPS = [
  1,
  2,
  5,
  10,
  20,
  30,
  ...[1, 2, 5, 10, 20, 30].map((m) => m * MINUTE),
  ...[1, 2, 4, 6, 12].map((h) => h * HOUR),
  ...[1, 2, 5, 10, 20, 50, 100].map((d) => d * DAY),
];

function placeTick(kind, value, step, isLog) {
  if (kind !== "time") return shortNumber(value, digitsOf(value, step));
  if (value === 0) return "0";
  const least = isLog ? value : step || 1,
    [unit, name] =
      least >= DAY ? [DAY, "d"] : least >= HOUR ? [HOUR, "h"] : least >= MINUTE ? [MINUTE, "min"] : [1, "s"];
  return `${+(value / unit).toPrecision(digitsOf(value, step))} ${name}`;
}

function placeText(kind, value) {
  if (kind === "time") return clock(value);
  return `${kind} ${Math.round(value).toLocaleString("en-US")}`;
}

// Values of a curve per column of pixels: the mean of its points, their lowest and highest value.
function columnsOf(curve, values, place, x, first, last) {
  const columns = [];
  let column = null;
  for (let i = first; i <= last; i++) {
    if (values[i] === null) {
      column = null;
      columns.push(null);
      continue;
    }
    const pixel = x.at(place[i]),
      low = curve.low[i],
      high = curve.high[i];
    if (column && pixel - column.begin < 1) {
      column.low = Math.min(column.low, low);
      column.high = Math.max(column.high, high);
      column.n += 1;
      column.y += (values[i] - column.y) / column.n;
      column.x = pixel;
    } else {
      column = { begin: pixel, x: pixel, y: values[i], low, high, n: 1 };
      columns.push(column);
    }
  }
  return columns;
}

function runsOf(columns) {
  const runs = [[]];
  for (const column of columns)
    if (column) runs.at(-1).push(column);
    else if (runs.at(-1).length) runs.push([]);
  return runs.filter((run) => run.length);
}

function linePath(runs, y) {
  // A run of one point is a dot.
  return runs
    .map(
      (run) =>
        "M" +
        run.map((c) => `${c.x.toFixed(1)} ${y.at(c.y).toFixed(1)}`).join("L") +
        (run.length > 1 ? "" : "h.01"),
    )
    .join("");
}

function bandPath(runs, y) {
  const top = (c) => `${c.x.toFixed(1)} ${y.at(c.high).toFixed(1)}`,
    bottom = (c) => `${c.x.toFixed(1)} ${y.at(c.low).toFixed(1)}`;
  return runs.map((run) => `M${run.map(top).join("L")}L${run.toReversed().map(bottom).join("L")}Z`).join("");
}
