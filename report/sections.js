// The sections around the charts. Each is made again if what it reads has changed.

function runName(run, i) {
  return [element("span", { class: `dot s${i}`, "aria-hidden": "true" }), run.name];
}

function factText([value, note]) {
  return note ? [value, " ", element("small", {}, note)] : [value];
}

function table(heads, rows) {
  const head = element(
    "thead",
    {},
    element("tr", {}, ...heads.map((cells) => element("th", { scope: "col" }, ...[cells].flat()))),
  );
  return element("table", {}, head, element("tbody", {}, ...rows));
}

function row(head, cells) {
  return element("tr", {}, element("th", { scope: "row" }, ...[head].flat()), ...cells);
}

// How the charts are to be read, said of these data.
function showReading(data) {
  const longest = Math.max(0, ...data.axes.map((axis) => axis.step.length)).toLocaleString("en-US");
  const isMerged = data.charts.some((chart) => chart.series.some((series) => series.low));
  const lines = isMerged
    ? `A curve has at most ${longest} points. Where there are more lines of metrics, a point stands for consecutive ones: the curve is their mean, and the band spans their lowest and highest value, so that no spike is hidden.`
    : "Every line of metrics is drawn. Where lines are closer than pixels, the curve is their mean, and the band spans their lowest and highest value.";
  byId("reading").textContent =
    `${lines} Smoothing is an exponential moving average; the paler curve has the values themselves. Drag to zoom, double-click to see all.`;
}

const sections = {
  title(data) {
    const names = data.runs.map((run) => run.name).join(", ");
    byId("title").textContent = names;
    document.title = `${names} \u2013 Shardloom report`;
    const time = new Date(data.time * 1000);
    byId("footer").textContent =
      `Made on ${time.toLocaleString(undefined, { dateStyle: "long", timeStyle: "short" })}.`;
  },

  facts(data, isAlone) {
    const states = data.runs.map((run) =>
      element(
        "span",
        { class: `state ${run.state}` },
        element("b", {}, run.state),
        run.why ? `: ${run.why}` : "",
      ),
    );
    byId("state").replaceChildren(...(isAlone ? states : []));
    if (isAlone) {
      const facts = data.runs[0].facts.map(([name, ...value]) =>
        element("div", {}, element("dt", {}, name), element("dd", {}, ...factText(value))),
      );
      byId("facts").replaceChildren(element("dl", { class: "facts" }, ...facts));
      return;
    }
    const names = [...new Set(data.runs.flatMap((run) => run.facts.map(([name]) => name)))];
    const rows = names.map((name) =>
      row(
        name,
        data.runs.map((run) =>
          element("td", {}, ...factText(run.facts.find((fact) => fact[0] === name)?.slice(1) ?? ["\u2013"])),
        ),
      ),
    );
    const attributes = { class: "scroll", tabindex: "0", role: "group", "aria-label": "Summary" };
    // Kept, because a new one would be neither scrolled nor in focus.
    const scroll = byId("facts").firstElementChild ?? byId("facts").appendChild(element("div", attributes));
    scroll.replaceChildren(
      table(
        ["", ...data.runs.map(runName)],
        [
          row(
            "state",
            states.map((state) => element("td", {}, state)),
          ),
          ...rows,
        ],
      ),
    );
  },

  kinds(data) {
    const label = (kind, name) => {
      const input = element("input", { type: "checkbox" });
      input.checked = !page.off.has(kind);
      input.onchange = () => {
        if (input.checked) page.off.delete(kind);
        else page.off.add(kind);
        page.draw();
      };
      const image = svg("svg", { viewBox: "-5 -5 10 10", "aria-hidden": "true" }, symbol(kind));
      return element("label", { class: "check" }, input, image, name);
    };
    const shown = Object.entries(KINDS).filter(([kind]) => data.marks.some((mark) => mark.kind === kind));
    arrange(
      byId("kinds"),
      shown.map(([kind, name]) => [kind, (old) => old ?? label(kind, name)]),
      byId("kinds").firstElementChild,
    );
  },

  samples(data, isAlone) {
    const steps = [...new Set(data.samples.flat().map((sample) => sample.step))].sort((a, b) => a - b);
    const section = byId("samples"),
      old = section.querySelector("input");
    section.hidden = steps.length === 0;
    if (section.hidden) return;
    // A reader of the newest samples goes on to newer ones.
    const chosen = old && +old.value < +old.max ? Math.min(+old.value, steps.length - 1) : steps.length - 1;
    const input = old ?? element("input", { type: "range", min: 0, "aria-label": "Step of the samples" });
    input.max = steps.length - 1;
    input.value = chosen;
    const label = section.querySelector("output") ?? element("output"),
      boxes = data.runs.map(() => element("pre", { tabindex: "0" }));
    const show = () => {
      const step = steps[+input.value];
      label.textContent = placeText("step", step);
      input.setAttribute("aria-valuetext", label.textContent);
      data.samples.forEach((samples, i) => {
        const last = Math.max(
          ...samples.filter((sample) => sample.step <= step).map((sample) => sample.step),
        );
        const parts = samples
          .filter((sample) => sample.step === last)
          .flatMap((sample) => [element("b", {}, sample.prompt), sample.text, "\n\n"]);
        boxes[i].replaceChildren(...parts.slice(0, -1));
      });
    };
    input.oninput = show;
    const runs = data.runs.map((run, i) =>
      element("div", {}, ...(isAlone ? [] : [element("h3", {}, ...runName(run, i))]), boxes[i]),
    );
    if (!old) {
      const slider = element("p", { class: "row slider" }, input, label);
      section.append(slider, element("div", { class: "samples" }));
    }
    section.lastElementChild.replaceChildren(...runs);
    show();
  },

  events(data, isAlone) {
    byId("events").hidden = data.marks.length === 0;
    const rows = page.allMarks.map((mark) => {
      const time = mark.time ?? between(mark.axis?.step, mark.axis?.time, mark.step);
      const cells = [
        element("td", {}, mark.step.toLocaleString("en-US")),
        element(
          "td",
          {},
          svg("svg", { viewBox: "-5 -5 10 10", "aria-hidden": "true" }, symbol(mark.kind)),
          mark.text,
        ),
      ];
      if (!isAlone) cells.unshift(element("td", {}, ...runName(data.runs[mark.run], mark.run)));
      return row(Number.isFinite(time) ? clock(Math.max(time, 0)) : "\u2013", cells);
    });
    byId("events").lastElementChild.replaceChildren(
      table(["time", ...(isAlone ? [] : ["run"]), "step", "event"], rows),
    );
  },

  config(data, isAlone) {
    byId("config").hidden = data.config.length === 0;
    byId("differing-text").textContent = isAlone
      ? "only what differs from the defaults"
      : "only what differs between the runs";
    const shown = (value) => value ?? "unset";
    const show = () => {
      const words = byId("filter").value.toLowerCase();
      const rows = data.config.filter(({ key, values, default: usual }) => {
        const isSame = values.every((value) => shown(value) === shown(isAlone ? usual : values[0]));
        return (
          !(byId("differing").checked && isSame) &&
          `${key} ${values.map(shown).join(" ")}`.toLowerCase().includes(words)
        );
      });
      const cell = (value, other) =>
        element("td", { class: `value${shown(value) === shown(other) ? " same" : ""}` }, shown(value));
      const cells = ({ values, default: usual }) =>
        isAlone
          ? [cell(values[0], usual), element("td", { class: "value same" }, shown(usual))]
          : values.map((value) => cell(value, values.every((v) => v === value) ? value : undefined));
      const heads = isAlone ? ["value", "default"] : data.runs.map(runName);
      const none = row(
        element("span", { class: "quiet" }, "none"),
        heads.map(() => element("td")),
      );
      byId("config").lastElementChild.replaceChildren(
        table(
          ["key", ...heads],
          rows.length ? rows.map((found) => row(element("code", {}, found.key), cells(found))) : [none],
        ),
      );
    };
    byId("filter").oninput = byId("differing").onchange = show;
    show();
  },

  provenance(data, isAlone) {
    const files = data.provenance.flatMap((found, i) =>
      Object.entries(found).map(([file, rows]) => {
        const lines = Object.entries(rows).map(([key, value]) =>
          row(element("code", {}, key), [element("td", { class: "value" }, value)]),
        );
        const name = isAlone ? [file] : [...runName(data.runs[i], i), ` ${file}`];
        const build = (old) => {
          const details = old ?? element("details", {}, element("summary", {}, ...name), element("table"));
          details.lastElementChild.replaceChildren(element("tbody", {}, ...lines));
          return details;
        };
        return [`${i} ${file}`, build];
      }),
    );
    byId("provenance").hidden = files.length === 0;
    arrange(byId("provenance").lastElementChild, files);
  },

  problems(data) {
    const texts = [...data.problems, ...data.notes];
    byId("problems").hidden = texts.length === 0;
    byId("problems").lastElementChild.replaceChildren(...texts.map((text) => element("li", {}, text)));
  },
};
const READS = {
  title: ["runs", "time"],
  facts: ["runs"],
  kinds: ["marks"],
  samples: ["samples"],
  events: ["marks"],
  config: ["config"],
  provenance: ["provenance"],
  problems: ["problems", "notes"],
};
for (const [name, keys] of Object.entries(READS)) sections[name].reads = keys;
