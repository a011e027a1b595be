(() => {
  "use strict";
  const specs = JSON.parse(document.getElementById("charts").textContent);
  const views = new Map();

  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  // What the charts look like: "$name" is a variable of the style sheet, which has a light and a dark set; of several
  // colours a list.
  const theme = {{theme}};
  function config() {
    const value = (name) => (/\s/.test(variable(name)) ? variable(name).split(/\s+/) : variable(name));
    const filled = JSON.parse(JSON.stringify(theme), (_, one) => (/^\$/.test(one) ? value(one.slice(1)) : one));
    return { ...filled, font: getComputedStyle(document.body).fontFamily };
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
