(() => {
  "use strict";
  const specs = JSON.parse(document.getElementById("charts").textContent);
  const views = new Map();

  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  // What the charts look like, from the variables of the style sheet, which has a light and a dark set.
  function config() {
    const [ink, soft, line, halo] = ["ink", "soft", "line", "halo"].map(variable);
    const range = (name) => variable(name).split(/\s+/);
    const text = { labelColor: soft, titleColor: soft, labelFontSize: 11, titleFontSize: 11, titleFontWeight: "normal" };
    return {
      background: "transparent",
      font: getComputedStyle(document.body).fontFamily,
      view: { stroke: null },
      axis: { ...text, gridColor: line, domainColor: line, tickColor: line, labelOverlap: true, tickCount: 6 },
      legend: { ...text, labelColor: ink, symbolOpacity: 1 },
      range: { category: range("category"), ordinal: range("ordinal"), ramp: range("ramp"), heatmap: range("ramp") },
      rule: { color: soft },
      style: {
        tile: { stroke: variable("paper"), strokeWidth: 1.5 },
        field: { strokeWidth: 0 },
        unit: { color: variable("accent") },
        "line-on-low": { color: variable("on-low"), strokeWidth: 1, opacity: 0.5 },
        "line-on-high": { color: variable("on-high"), strokeWidth: 1, opacity: 0.5 },
        "text-on-low": { color: variable("on-low"), fontSize: 10 },
        "text-on-high": { color: variable("on-high"), fontSize: 10 },
        model: { filled: true, size: 90, color: variable("model"), stroke: halo, strokeWidth: 1.5, opacity: 1 },
        "model-label": { color: ink, fontSize: 12, fontWeight: 600 },
        "model-halo": { color: halo, stroke: halo, strokeWidth: 4, fontSize: 12, fontWeight: 600, opacity: 0.85 },
      },
    };
  }

  const height = (spec, box) => Math.round(Math.min(560, (box.clientWidth - 60) * spec.usermeta.aspect));

  async function draw(number) {
    const box = document.getElementById(`chart-${number}`);
    const spec = structuredClone(specs[number]);
    const aspect = spec.usermeta && spec.usermeta.aspect;
    box.classList.toggle("square", Boolean(aspect) && box.closest(".half") !== null);
    if (aspect) spec.height = height(spec, box);
    spec.description = document.getElementById(`chart-${number}-text`).textContent;
    views.get(number)?.finalize();
    // `ast` interprets expressions instead of compiling them, which the page's policy forbids.
    const options = { renderer: "svg", actions: false, ast: true, config: config(), tooltip: { theme: "custom" } };
    const made = await window.vegaEmbed(box, spec, options);
    views.set(number, made);
    box.dataset.drawn = variable("paper");
  }

  const drawAll = () => Promise.all(specs.map((_, number) => draw(number)));

  function resized() {
    for (const [number, { view }] of views) {
      const spec = specs[number];
      if (spec.usermeta && spec.usermeta.aspect) view.height(height(spec, document.getElementById(`chart-${number}`))).run();
    }
  }

  // -- copying ---------------------------------------------------------------------------------

  const cell = (one) => one.dataset.value ?? (one.textContent === "–" ? "" : one.textContent);

  const asText = (table) =>
    [...table.rows].map((row) => [...row.cells].map((c) => cell(c).replace(/\s+/g, " ")).join("\t")).join("\n");

  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // From file:// some browsers have no clipboard for scripts, only for what is selected.
      const area = document.createElement("textarea");
      area.value = text;
      area.style.position = "fixed";
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      if (!done) throw new Error("the browser did not allow it");
    }
  }

  let hiding = 0;
  function say(text) {
    const box = document.getElementById("said");
    box.textContent = text;
    box.classList.add("on");
    clearTimeout(hiding);
    hiding = setTimeout(() => box.classList.remove("on"), 2500);
  }

  document.addEventListener("click", (event) => {
    if (!event.target.matches("button.copy")) return;
    const table = event.target.parentElement.querySelector("table");
    copy(asText(table)).then(
      () => say(`Copied ${table.rows.length - 1} rows`),
      (error) => say(`Not copied: ${error.message}`),
    );
  });

  // ------------------------------------------------------------------------------------------------

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  addEventListener("resize", resized);
  drawAll().then(() => document.documentElement.classList.add("drawn"));
})();
