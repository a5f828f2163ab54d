"use strict";
// Elements of HTML and SVG, and the symbols of marks.

// Texts are only ever set as text, never parsed as HTML.
function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// Make `box` have a child for each key, in their order. `build` gets the child that it has, or undefined. What stays
// is not moved: a moved control loses the focus.
function arrange(box, parts, last = null) {
  const known = new Map([...box.children].map((node) => [node.dataset.key, node]));
  for (const [key, build] of parts) {
    const old = known.get(key),
      node = build(old);
    known.delete(key);
    if (node !== old) {
      node.dataset.key = key;
      if (last) last.after(node);
      else box.prepend(node);
    }
    last = node;
  }
  for (const [key, node] of known) if (key !== undefined) node.remove();
}

const SYMBOLS = {
  checkpoint: "M0 -4 L4 3 L-4 3 Z",
  restart: "M-4 -4 L4 0 L-4 4 Z",
  rollback: "M4 -4 L-4 0 L4 4 Z",
  failure: "M-4 -2.6 L-2.6 -4 L0 -1.4 L2.6 -4 L4 -2.6 L1.4 0 L4 2.6 L2.6 4 L0 1.4 L-2.6 4 L-4 2.6 L-1.4 0 Z",
  alarm: "M-1.6 -5 H1.6 L1 1.6 H-1 Z M0 2.4 A1.5 1.5 0 1 1 -0.01 2.4 Z",
  warning: "M0 -4.4 L4.6 3.8 H-4.6 Z M-0.6 -1.6 V1.4 H0.6 V-1.6 Z M-0.6 2 V3 H0.6 V2 Z",
  skipped: "M0 -5 L5 0 L0 5 L-5 0 Z",
  quarantined: "M-4 -4 H4 V4 H-4 Z M-2 -2 V2 H2 V-2 Z",
  end: "M-4 -4 H4 V4 H-4 Z",
};

function symbol(kind) {
  return svg("path", { class: `symbol k-${kind}`, d: SYMBOLS[kind], "fill-rule": "evenodd" });
}
