// The page around the charts. It holds what the reader chose, so that newer data change nothing of it.

const byId = (id) => document.getElementById(id);
const KINDS = {
  checkpoint: "checkpoints",
  restart: "restarts",
  rollback: "rollbacks",
  failure: "failures",
  alarm: "alarms",
  warning: "warnings",
  skipped: "skipped",
  quarantined: "quarantined",
  end: "end",
};
const N_COLORS = 8,
  N_DEPTHS = 24;
const UNITS = { step: 1, tokens: 1, time: 100 };

class Curve {
  // `isAlone`: of the only run; `isOnly`: the chart measures nothing else.
  constructor(series, data, isAlone, isOnly) {
    Object.assign(this, series);
    this.data = data;
    this.low ??= this.mean;
    this.high ??= this.mean;
    const name = data.runs[this.run].name,
      isMeasured = this.style === "line" || this.style === "points";
    this.name = isAlone ? this.label : isOnly && isMeasured ? name : `${name}: ${this.label}`;
    this.cache = {};
  }
  // Classes of its color. `labels`: of the chart's curves that are drawn alike; `isOrdered`: colors show their order.
  paint(labels, isAlone, isOrdered) {
    const i = Math.max(labels.indexOf(this.label), 0),
      depth = ` d${Math.round((i / Math.max(labels.length - 1, 1)) * (N_DEPTHS - 1))}`;
    if (isAlone && ["plan", "limit", "undone"].includes(this.style)) this.color = "muted";
    else if (isAlone && isOrdered) this.color = `depth${depth}`;
    // Beyond the colors there are dashes.
    else if (isAlone) this.color = `s${i % N_COLORS} again${Math.floor(i / N_COLORS)}`;
    else this.color = `s${this.run % N_COLORS}${labels.length > 1 ? ` shade${depth}` : ""}`;
  }
  place() {
    return this.data.axes[this.axis][page.axis];
  }
  smooth(weight) {
    return (this.cache[weight] ??= smoothed(this.mean, weight));
  }
  shown(i, weight) {
    return weight > 0 && this.style === "line" ? this.smooth(weight)[i] : this.mean[i];
  }
  where(i) {
    const axis = this.data.axes[this.axis],
      isMany = this.low !== this.mean && i > 0 && axis.step[i] - axis.step[i - 1] > 1;
    const parts = [
      isMany
        ? `steps ${(axis.step[i - 1] + 1).toLocaleString("en-US")} to ${axis.step[i].toLocaleString("en-US")}`
        : placeText("step", axis.step[i]),
    ];
    if (axis.tokens?.[i] !== undefined) parts.push(`${shortNumber(axis.tokens[i])} tokens`);
    if (axis.time?.[i] !== undefined) parts.push(clock(axis.time[i]));
    return parts.join(" \u00b7 ");
  }
}

class Mark {
  constructor(mark, data, axis) {
    Object.assign(this, mark);
    this.data = data;
    this.axis = axis;
  }
  place() {
    if (page.axis === "step") return this.step;
    if (page.axis === "time" && this.time !== null) return this.time;
    return between(this.axis?.step, this.axis?.[page.axis], this.step);
  }
}

// Value at x of the line through points; outside of them that of the nearest one.
function between(xs, ys, x) {
  if (!xs?.length || !ys?.length) return NaN;
  const i = Math.max(lastUpTo(xs, x), 0),
    next = Math.min(i + 1, xs.length - 1, ys.length - 1);
  const share = xs[next] > xs[i] ? Math.min(Math.max((x - xs[i]) / (xs[next] - xs[i]), 0), 1) : 0;
  return ys[i] + share * (ys[next] - ys[i]);
}

const page = {
  axis: "step",
  isLogX: false,
  smoothing: 0,
  view: null,
  cursor: null,
  // The chart under the pointer, or in focus.
  pointed: null,
  off: new Set(),
  charts: new Map(),
  sections: {},

  // Newer data: charts are kept, and other sections are made again only if they changed.
  update(data) {
    for (const axis of data.axes)
      for (const [key, unit] of Object.entries(UNITS)) axis[key] = axis[key] && sums(axis[key], unit);
    this.data = data;
    const isAlone = data.runs.length === 1;
    this.runAxes = data.runs.map((_, run) => {
      const found = data.charts.flatMap((c) => c.series).find((s) => s.run === run && s.style === "line");
      return found && data.axes[found.axis];
    });
    this.allMarks = data.marks.map((mark) => new Mark(mark, data, this.runAxes[mark.run]));
    const shown = data.charts.map((chart) => this.updateChart(chart, isAlone));
    const figures = shown.map((chart) => chart.figure);
    const old = byId("charts").children;
    if (old.length !== figures.length || figures.some((figure, i) => old[i] !== figure))
      byId("charts").replaceChildren(...figures);
    for (const input of byId("x").querySelectorAll("input"))
      input.disabled = !data.axes.some((axis) => axis[input.value]);
    showReading(data);
    for (const [name, show] of Object.entries(sections)) {
      const version = JSON.stringify(show.reads.map((key) => data[key]));
      if (this.sections[name] !== version) show(data, isAlone);
      this.sections[name] = version;
    }
    byId("page").hidden = false;
    this.measure();
    this.draw();
  },

  updateChart(chart, isAlone) {
    const known = this.charts.get(chart.id),
      shown = known ?? new Chart(this, chart.id);
    this.charts.set(chart.id, shown);
    const labelsOf = (...styles) => [
      ...new Set(chart.series.filter((s) => styles.includes(s.style)).map((s) => s.label)),
    ];
    const labels = labelsOf("line", "points");
    const curves = chart.series.map((series) => new Curve(series, this.data, isAlone, labels.length < 2));
    // Curves of one run differ by color; those of several have their run's, in shades if drawn alike.
    for (const curve of curves)
      curve.paint(isAlone ? labels : labelsOf(curve.style), isAlone, chart.ordered);
    // What was measured is drawn over what was planned.
    const order = ["limit", "undone", "plan", "line", "points", "text"];
    shown.setData(
      chart,
      curves.toSorted((a, b) => order.indexOf(a.style) - order.indexOf(b.style)),
      isAlone,
    );
    return shown;
  },

  // Range of all places that were measured, and the least above 0, for a logarithmic axis.
  measure() {
    let low = Infinity,
      high = -Infinity,
      least = Infinity;
    for (const chart of this.shownCharts()) {
      for (const curve of chart.curves.filter((c) => c.style === "line" || c.style === "points")) {
        const place = curve.place();
        if (!place?.length) continue;
        low = Math.min(low, place[0]);
        high = Math.max(high, place.at(-1));
        least = Math.min(least, place.find((value) => value > 0) ?? Infinity);
      }
    }
    // The last checkpoint and the end come after the last line. Other marks may be of steps that a
    // rollback undid, which do not count; but their time does.
    for (const mark of this.allMarks) {
      const counts = this.axis === "time" || ["checkpoint", "end"].includes(mark.kind);
      if (counts && mark.place() > high) high = mark.place();
    }
    this.range = low <= high ? [low, high] : [0, 1];
    this.leastPlace = Number.isFinite(least) ? least : 1;
  },

  shownCharts() {
    return this.data.charts.map((chart) => this.charts.get(chart.id));
  },
  draw() {
    for (const chart of this.shownCharts()) chart.draw();
    byId("reset").disabled = this.view === null;
  },
  marks() {
    return this.allMarks.filter((mark) => !this.off.has(mark.kind));
  },
  markText(mark) {
    return this.data.runs.length > 1 ? `${this.data.runs[mark.run].name}: ${mark.text}` : mark.text;
  },

  // Show a part, moved to where there are data; all if it is not a part, or empty.
  zoom(view) {
    const wholes = this.shownCharts().map((chart) => chart.whole());
    const low = Math.min(...wholes.map((whole) => whole[0])),
      high = Math.max(...wholes.map((whole) => whole[1]));
    this.view = view && within(view, low, high, this.isLogX);
    this.draw();
  },

  moveCursor(chart, cursor, isKey = false) {
    this.cursor = cursor;
    this.pointed = cursor === null ? null : chart;
    for (const other of this.shownCharts()) {
      const text = other.x ? other.showCursor() : "";
      if (isKey && other === chart) byId("live").textContent = text;
    }
  },

  // Another axis shows the same part of the first run.
  setAxis(axis) {
    const known = this.runAxes.find((found) => found?.[this.axis] && found[axis]);
    this.view =
      this.view && known ? this.view.map((place) => between(known[this.axis], known[axis], place)) : null;
    this.axis = axis;
    this.cursor = null;
    this.measure();
    this.zoom(this.view);
  },
};

// The range of that width that is nearest to `view` between low and high; null if it is all, or empty.
function within(view, low, high, isLog) {
  const [a, b, least, most] = isLog ? [...view, low, high].map(Math.log10) : [...view, low, high];
  // The logarithm of 0 is at no place.
  const begin = a === -Infinity ? least : a;
  if (!(b > begin) || b - begin >= most - least) return null;
  const shift = Math.max(least - begin, 0) || Math.min(most - b, 0);
  if (shift === 0) return [isLog ? 10 ** begin : begin, view[1]];
  return [begin + shift, b + shift].map((place) => (isLog ? 10 ** place : place));
}

// Values from their consecutive differences, which count parts of a unit.
function sums(differences, unit) {
  let sum = 0;
  return differences.map((difference) => (sum += difference) / unit);
}
