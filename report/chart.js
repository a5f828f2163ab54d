// One chart: an SVG that is drawn again for each size, zoom, axis and smoothing.

// Styles of the curves that say where the cursor is, the best first.
const PLACED = ["line", "points", "undone", "text", "plan"];
const MARGIN = { left: 50, right: 12, top: 12, bottom: 24 };

class Chart {
  // `page` has what all charts share: axis, zoom, cursor, smoothing, marks; and is called on zoom and hover.
  constructor(page, id) {
    this.page = page;
    this.id = id;
    this.hidden = new Set();
    this.isLog = false;
    this.title = element("h2");
    this.unit = element("span", { class: "quiet" });
    this.logButton = element("button", { type: "button", "aria-pressed": "false" }, "log");
    this.logButton.onclick = () => {
      this.isLog = !this.isLog;
      this.logButton.setAttribute("aria-pressed", this.isLog);
      this.draw();
    };
    this.legend = element("div", { class: "legend" });
    this.svg = svg("svg", { tabindex: "0", role: "application", "aria-roledescription": "chart" });
    this.tip = element("div", { class: "tip" });
    this.plot = element("div", { class: "plot" }, this.svg, this.tip);
    this.figure = element(
      "figure",
      { class: id === "loss" ? "wide" : "" },
      element("figcaption", {}, this.title, this.unit, this.logButton),
      this.legend,
      this.plot,
    );
    this.listen();
  }

  setData(chart, curves, isAlone) {
    this.chart = chart;
    this.curves = curves;
    this.title.textContent = chart.title;
    this.unit.textContent = chart.unit;
    this.logButton.setAttribute("aria-label", `${chart.title}: logarithmic axis`);
    this.hasPlan = curves.some((c) => c.style === "plan");
    const labels = new Map(),
      isMeasured = (c) => c.style === "line" || c.style === "points";
    for (const curve of curves.toSorted((a, b) => isMeasured(b) - isMeasured(a)))
      if (curve.style !== "text" && !labels.has(curve.name)) labels.set(curve.name, curve);
    const key = [...labels.keys()].join("\n");
    if (key === this.labels) return;
    this.labels = key;
    // A single curve needs no name besides the title.
    const isNamed = labels.size > 1 || !isAlone || this.hasPlan;
    this.legend.replaceChildren(...(isNamed ? [...labels.values()].map((c) => this.legendButton(c)) : []));
  }

  legendButton(curve) {
    const line = svg(
      "svg",
      { viewBox: "0 0 20 8", "aria-hidden": "true" },
      svg("line", { class: `${curve.color} ${curve.style}`, x1: 0, x2: 20, y1: 4, y2: 4, "stroke-width": 2 }),
    );
    if (curve.style === "points") line.append(svg("circle", { class: curve.color, cx: 10, cy: 4, r: 3.2 }));
    const isShown = !this.hidden.has(curve.name),
      button = element("button", { type: "button", "aria-pressed": isShown }, line, curve.name);
    button.onclick = () => {
      if (!this.hidden.delete(curve.name)) this.hidden.add(curve.name);
      button.setAttribute("aria-pressed", !this.hidden.has(curve.name));
      this.draw();
    };
    return button;
  }

  visible() {
    return this.curves.filter((c) => !this.hidden.has(c.name) && c.style !== "text");
  }

  // Range of all places: of what was measured or, where a plan is drawn, of the plan too.
  whole() {
    let [low, high] = this.page.range;
    for (const curve of this.hasPlan ? this.curves : []) {
      const place = curve.place();
      if (place?.length) {
        low = Math.min(low, place[0]);
        high = Math.max(high, place.at(-1));
      }
    }
    const isLog = this.page.isLogX;
    if (isLog) low = Math.max(low, this.page.leastPlace);
    return high > low ? [low, high] : [isLog ? low / 1.1 : low - 0.5, isLog ? low * 1.1 : low + 0.5];
  }

  scales(width, height) {
    const x = new Scale(
      ...(this.page.view ?? this.whole()),
      MARGIN.left,
      width - MARGIN.right,
      this.page.isLogX,
    );
    let low = Infinity,
      high = -Infinity;
    const take = (value) => {
      if (value === null || value === undefined || (this.isLog && value <= 0)) return;
      low = Math.min(low, value);
      high = Math.max(high, value);
    };
    for (const curve of this.visible()) {
      const place = curve.place();
      if (!place || curve.style === "limit") continue;
      // One point beyond each edge: a line leads to it.
      const first = Math.max(lastUpTo(place, x.low), 0),
        last = Math.min(lastUpTo(place, x.high) + 1, place.length - 1);
      for (let i = first; i <= last; i++) {
        take(curve.low[i]);
        take(curve.high[i]);
      }
    }
    if (low > high) [low, high] = this.isLog ? [1, 10] : [0, 1];
    if (this.isLog) {
      const room = Math.max((high / low) ** 0.05, 1.02);
      [low, high] = [Math.max(low / room, 1e-320), Math.min(high * room, Number.MAX_VALUE)];
    } else {
      if (this.chart.zero && low > 0) low = 0;
      const room = (high / 2 - low / 2) * 0.12 || Math.abs(high) * 0.05 || 0.5,
        isFloor = low === 0 && (this.chart.zero || high > 0);
      [low, high] = [
        Math.max(isFloor ? 0 : low - room, -Number.MAX_VALUE),
        Math.min(high + room, Number.MAX_VALUE),
      ];
    }
    return [x, new Scale(low, high, height - MARGIN.bottom, MARGIN.top, this.isLog)];
  }

  draw() {
    const width = this.svg.clientWidth,
      height = this.svg.clientHeight;
    if (!width) return;
    const [x, y] = this.scales(width, height);
    Object.assign(this, { x, y, width, height });
    const clip = `clip-${this.id.replace(/\W/g, "_")}`;
    const box = svg(
      "clipPath",
      { id: clip },
      svg("rect", {
        x: MARGIN.left - 4,
        y: 0,
        width: Math.max(width - MARGIN.left - MARGIN.right, 0) + 8,
        height: height - MARGIN.bottom + 3,
      }),
    );
    const inside = svg("g", { "clip-path": `url(#${clip})` });
    for (const curve of this.visible()) inside.append(...this.drawCurve(curve));
    this.hover = svg("g", { "aria-hidden": "true" });
    this.svg.replaceChildren(box, ...this.drawAxes(), inside, ...this.drawMarks(), this.hover);
    this.svg.setAttribute("aria-label", this.describe());
    this.showCursor();
  }

  drawAxes() {
    const { x, y, width, height } = this,
      nodes = [],
      bottom = height - MARGIN.bottom;
    const levels = y.ticks(Math.max(2, height / 48)),
      difference = stepOf(levels);
    for (const tick of levels) {
      const at = y.at(tick).toFixed(1);
      nodes.push(
        svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: at, y2: at }),
        svg(
          "text",
          { x: MARGIN.left - 8, y: at, dy: ".35em", "text-anchor": "end" },
          shortNumber(tick, digitsOf(tick, difference)),
        ),
      );
    }
    nodes.push(
      svg("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom }),
    );
    const kind = this.page.axis,
      ticks = x.ticks(Math.max(2, Math.min(8, width / 95)), kind === "time" ? TIME_STEPS : null);
    let free = -Infinity;
    for (const tick of ticks) {
      const text = placeTick(kind, tick, stepOf(ticks), x.isLog),
        half = text.length * 3.4;
      if (x.at(tick) - half < free) continue;
      free = x.at(tick) + half + 8;
      nodes.push(
        svg("text", { x: Math.min(x.at(tick), width - half), y: height - 6, "text-anchor": "middle" }, text),
      );
    }
    return nodes;
  }

  drawCurve(curve) {
    const place = curve.place(),
      { x, y } = this;
    if (!place?.length) return [];
    const first = Math.max(lastUpTo(place, x.low), 0),
      last = Math.min(lastUpTo(place, x.high) + 1, place.length - 1);
    const drawable = (values) =>
      runsOf(
        columnsOf(
          curve,
          this.isLog || x.isLog
            ? values.map((v, i) => ((this.isLog && v <= 0) || (x.isLog && place[i] <= 0) ? null : v))
            : values,
          place,
          x,
          first,
          last,
        ),
      );
    const nodes = [],
      runs = drawable(curve.mean),
      isSmooth = this.page.smoothing > 0 && curve.style === "line";
    if (runs.some((run) => run.some((c) => c.low < c.high))) {
      const least = this.isLog ? y.low : -Infinity;
      for (const run of runs) for (const c of run) c.low = Math.max(c.low, least);
      nodes.push(svg("path", { class: `band ${curve.color}`, d: bandPath(runs, y) }));
    } else if (isSmooth) nodes.push(svg("path", { class: `curve raw ${curve.color}`, d: linePath(runs, y) }));
    nodes.push(
      svg("path", {
        class: `curve ${curve.style} ${curve.color}`,
        d: linePath(isSmooth ? drawable(curve.smooth(this.page.smoothing)) : runs, y),
      }),
    );
    const dots = runs.flat(),
      crowd = Math.max(1, this.visible().length / 6);
    if (dots.length === 1 || (curve.style === "points" && dots.length * crowd < this.width / 9)) {
      nodes.push(
        ...dots.map((c) =>
          svg("circle", { class: curve.color, cx: c.x.toFixed(1), cy: y.at(c.y).toFixed(1), r: 3.2 }),
        ),
      );
    }
    return nodes;
  }

  drawMarks() {
    const { x, height } = this,
      seen = new Set(),
      stacked = new Map(),
      nodes = [];
    for (const mark of this.page.marks()) {
      const at = Math.round(x.at(mark.place()));
      if (!(at >= MARGIN.left && at <= this.width - MARGIN.right + 1) || seen.has(`${mark.kind} ${at}`))
        continue;
      seen.add(`${mark.kind} ${at}`);
      const isSmall = ["checkpoint", "warning", "end"].includes(mark.kind),
        above = stacked.get(at) ?? 0;
      if (!isSmall) stacked.set(at, above + 1);
      const top = isSmall ? height - MARGIN.bottom : 5 + 10 * above;
      const group = svg("g", { class: `mark k-${mark.kind}` });
      if (!isSmall) group.append(svg("line", { x1: at, x2: at, y1: 10, y2: height - MARGIN.bottom }));
      group.append(
        svg("g", { transform: `translate(${at} ${top}) scale(${isSmall ? 0.72 : 0.9})` }, symbol(mark.kind)),
      );
      nodes.push(group);
    }
    return nodes;
  }

  // Draw the cursor, and the values beside it: as a text only in the chart under the pointer.
  showCursor() {
    const cursor = this.page.cursor;
    this.hover.replaceChildren();
    this.tip.style.visibility = "hidden";
    if (cursor === null || !(cursor >= this.x.low && cursor <= this.x.high)) return "";
    const at = this.x.at(cursor),
      found = [];
    this.hover.append(
      svg("line", { class: "cursor", x1: at, x2: at, y1: MARGIN.top, y2: this.height - MARGIN.bottom }),
    );
    for (const curve of this.curves.filter((c) => !this.hidden.has(c.name))) {
      const place = curve.place(),
        i = place?.length ? nearest(place, cursor) : -1;
      if (i < 0 || Math.abs(this.x.at(place[i]) - at) > this.reach(curve, place, i)) continue;
      found.push([curve, i]);
      const value = curve.shown(i, this.page.smoothing),
        height = value === null ? NaN : this.y.at(value);
      if (curve.style !== "text" && curve.style !== "limit" && Number.isFinite(height))
        this.hover.append(svg("circle", { class: curve.color, cx: this.x.at(place[i]), cy: height, r: 3.6 }));
    }
    return this.page.pointed === this ? this.showTip(at, found) : "";
  }

  // A curve has a value beside the cursor if one of its points is as near as its points are apart.
  reach(curve, place, i) {
    if (curve.style === "limit" || curve.style === "plan") return Infinity;
    const gap = Math.max(
      this.x.at(place[i]) - this.x.at(place[i - 1] ?? place[i]),
      this.x.at(place[i + 1] ?? place[i]) - this.x.at(place[i]),
    );
    return Math.max(gap * 0.51, 6);
  }

  showTip(at, found) {
    const table = element("table");
    for (const [curve, i] of found) {
      const value = curve.shown(i, this.page.smoothing);
      const spread =
        curve.low[i] < curve.high[i]
          ? ` (${shortNumber(curve.low[i])} to ${shortNumber(curve.high[i])})`
          : "";
      const name = element(
        "td",
        {},
        element("span", { class: `dot ${curve.color}`, "aria-hidden": "true" }),
        curve.name,
      );
      table.append(element("tr", {}, name, element("td", {}, shortNumber(value) + spread)));
    }
    // The place of what was measured: a limit has points at its ends only.
    const placed = PLACED.map((style) => found.find(([curve]) => curve.style === style)).find(Boolean);
    const head = placed ? placed[0].where(placed[1]) : placeText(this.page.axis, this.page.cursor);
    const near = this.page.marks().filter((mark) => Math.abs(this.x.at(mark.place()) - at) < 6);
    const texts = near
      .slice(0, 4)
      .map((mark) => element("p", { class: `k-${mark.kind}` }, this.page.markText(mark)));
    if (near.length > 4) texts.push(element("p", {}, `and ${near.length - 4} more`));
    this.tip.replaceChildren(element("p", {}, head), table, ...texts);
    const isLeft = at > this.width / 2,
      top = Math.max(0, Math.min(14, this.height - this.tip.offsetHeight));
    const left = isLeft ? at - this.tip.offsetWidth - 12 : at + 12;
    this.tip.style.transform = `translate(${Math.max(0, Math.min(left, this.width - this.tip.offsetWidth))}px, ${top}px)`;
    this.tip.style.visibility = "visible";
    return [
      head,
      ...[...table.rows].map((row) => [...row.cells].map((c) => c.textContent).join(" ")),
      ...texts.map((t) => t.textContent),
    ].join(", ");
  }

  describe() {
    const parts = this.visible()
      .filter((c) => c.style === "line" || c.style === "points")
      .map((c) => {
        const known = c.mean.filter((v) => v !== null);
        return known.length ? `${c.name} from ${shortNumber(known[0])} to ${shortNumber(known.at(-1))}` : "";
      });
    return `${this.chart.title}, ${this.chart.unit}: ${parts.filter(Boolean).slice(0, 8).join("; ")}. Arrow keys move the cursor, plus and minus zoom, Escape shows all.`;
  }

  listen() {
    const at = (event) => event.clientX - this.svg.getBoundingClientRect().left;
    const inside = (pixel) => Math.min(Math.max(pixel, MARGIN.left), this.width - MARGIN.right);
    let begin = null;
    this.svg.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || !this.x) return;
      begin = inside(at(event));
      this.svg.setPointerCapture(event.pointerId);
      this.page.moveCursor(this, this.x.inverse(begin));
    });
    this.svg.addEventListener("pointermove", (event) => {
      if (!this.x) return;
      this.page.moveCursor(this, this.x.inverse(inside(at(event))));
      const end = inside(at(event));
      if (begin === null || Math.abs(end - begin) < 5) return;
      this.hover.prepend(
        svg("rect", {
          class: "select",
          x: Math.min(begin, end),
          width: Math.abs(end - begin),
          y: MARGIN.top,
          height: this.height - MARGIN.top - MARGIN.bottom,
        }),
      );
    });
    this.svg.addEventListener("pointerup", (event) => {
      if (begin === null) return;
      const [from, to] = [begin, inside(at(event))].sort((a, b) => a - b);
      begin = null;
      if (to - from >= 5) this.page.zoom([this.x.inverse(from), this.x.inverse(to)]);
    });
    this.svg.addEventListener("pointercancel", () => {
      begin = null;
      this.page.moveCursor(this, null);
    });
    this.svg.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse" && begin === null) this.page.moveCursor(this, null);
    });
    this.svg.addEventListener("dblclick", () => this.page.zoom(null));
    this.svg.addEventListener("keydown", (event) => this.press(event));
    this.svg.addEventListener("blur", () => this.page.moveCursor(this, null));
  }

  press(event) {
    if (!this.x || event.ctrlKey || event.metaKey || event.altKey) return;
    const { from, to } = this.x,
      cursor = this.page.cursor ?? this.x.inverse((from + to) / 2);
    const pixel = Math.min(Math.max(this.x.at(cursor), from), to),
      stride = (to - from) * (event.shiftKey ? 0.1 : 0.01);
    const zoomBy = (factor) => [from, to].map((edge) => this.x.inverse(pixel + (edge - pixel) * factor));
    const move = { ArrowLeft: pixel - stride, ArrowRight: pixel + stride, Home: from, End: to }[event.key];
    if (move !== undefined) {
      if (this.page.view && (move < from || move > to))
        this.page.zoom([this.x.inverse(from + move - pixel), this.x.inverse(to + move - pixel)]);
      this.page.moveCursor(this, this.x.inverse(Math.min(Math.max(move, from), to)), true);
    } else if (event.key === "+" || event.key === "=") this.page.zoom(zoomBy(0.5));
    else if (event.key === "-" || event.key === "_") this.page.zoom(this.page.view && zoomBy(2));
    else if (event.key === "Escape" || event.key === "0") this.page.zoom(null);
    else return;
    event.preventDefault();
  }
}
