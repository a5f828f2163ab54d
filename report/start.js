// The beginning: where the data come from, and what the controls do.

function setTheme() {
  const chosen = document.querySelector("#theme :checked").value;
  const isDark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.classList.toggle("dark", isDark);
  document.documentElement.classList.toggle("light", !isDark);
}

// Depths of layers, from 0 to 1, which style sheets cannot count.
function setDepths() {
  const sheet = document.styleSheets[0];
  for (let i = 0; i < N_DEPTHS; i++)
    sheet.insertRule(`.d${i} { --depth: ${i / (N_DEPTHS - 1)}; }`, sheet.cssRules.length);
}

function listen() {
  byId("theme").onchange = setTheme;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", setTheme);
  byId("x").onchange = (event) => page.setAxis(event.target.value);
  byId("log-x").onchange = (event) => {
    page.isLogX = event.target.checked;
    page.view = null;
    page.draw();
  };
  byId("smoothing").oninput = (event) => {
    page.smoothing = event.target.value / 100;
    byId("smoothing-value").textContent = event.target.value === "0" ? "0" : page.smoothing.toFixed(2);
    page.draw();
  };
  byId("reset").onclick = () => page.zoom(null);
  let width = 0;
  new ResizeObserver(() => {
    if (width !== byId("charts").clientWidth) {
      width = byId("charts").clientWidth;
      page.draw();
    }
  }).observe(byId("charts"));
}

async function embedded(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

// Ask for newer data for ever; a server that has gone may come back.
async function follow() {
  let version = "",
    seconds = 2;
  for (;;) {
    try {
      const answer = await fetch(`data?${version}`).catch(() => {
        throw new Error("the server does not answer");
      });
      if (!answer.ok) throw new Error((await answer.text()).trim());
      if (answer.status === 200) {
        const data = await answer.json();
        ({ version, seconds } = data.watch);
        page.update(data);
      }
      byId("message").textContent = "";
    } catch (error) {
      byId("message").textContent = page.data
        ? `The report is not updated: ${error.message}.`
        : `No data: ${error.message}`;
    }
    await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
  }
}

async function start() {
  setTheme();
  setDepths();
  listen();
  const text = byId("data").textContent;
  try {
    await (text ? embedded(text).then((data) => page.update(data)) : follow());
  } catch (error) {
    byId("message").textContent =
      `The report cannot be shown: ${error.message}. It needs a browser of 2023 or newer.`;
    throw error;
  }
}
start();
