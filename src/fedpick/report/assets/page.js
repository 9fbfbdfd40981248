/* The page around the charts: which policies are shown, light or dark, controls and keys. */
"use strict";

(() => {
  const root = document.documentElement;
  const content = JSON.parse(document.getElementById("fedpick-data").textContent);
  const hidden = new Set();
  const shared = { axis: content.axis || "round", spread: "band", smooth: "1" };
  const charts = content.charts.map((chart) => ({ ...chart, state: Object.create(shared), plot: document.getElementById("plot-" + chart.key) }));
  // On a phone the buttons would cover the plot, and a finger scrolls the page instead of zooming.
  const narrow = window.matchMedia("(max-width: 640px)").matches;
  const config = {
    responsive: true, displaylogo: false, displayModeBar: narrow ? false : "hover",
    // Named one by one: Plotly's own choice has buttons that send the data to a web site.
    modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"]],
  };

  function element(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  // Light and dark

  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);

  function remembered(value) {
    // A page opened from disk may be forbidden to remember anything.
    try {
      if (value) localStorage.setItem("fedpick-theme", value);
      return localStorage.getItem("fedpick-theme");
    } catch {
      return null;
    }
  }

  function theme() {
    const css = getComputedStyle(root);
    const names = ["page", "card", "text", "muted", "line", "grid", "accent", "absent", "present", "failed", "excluded", "shut-out", "middle", "more", "less"];
    const dark = isDark();
    return {
      ...Object.fromEntries(names.map((name) => [name, css.getPropertyValue("--" + name).trim()])),
      isDark: dark,
      isNarrow: narrow,
      isShown: (label) => !hidden.has(label),
      style: (label) => {
        const policy = content.policies.find((each) => each.label === label);
        return { colour: dark ? policy.dark : policy.light, dash: policy.dash };
      },
    };
  }

  // Drawing

  async function draw(chart, colours) {
    const { traces, layout, key } = fedpickDrawing[chart.kind](chart.data, chart.state, colours);
    // A zoom survives a hidden policy or another theme, but not another axis or measure.
    layout.uirevision = JSON.stringify([chart.state.axis, chart.state.measure, chart.state.view, chart.state.order]);
    await Plotly.react(chart.plot, traces, layout, { ...config, toImageButtonOptions: { format: "svg", filename: "fedpick-" + chart.key } });
    chart.plot.dataset.drawn = "true";
    const place = document.getElementById("key-" + chart.key);
    if (place && key) {
      place.replaceChildren(...key.map(({ word, colour }) => {
        const swatch = element("i", {});
        swatch.style.background = colour;
        return element("span", {}, swatch, word);
      }));
    }
  }

  async function drawAll() {
    const colours = theme();
    for (const chart of charts) await draw(chart, colours);
    root.dataset.ready = "true";
  }

  function redraw() {
    root.dataset.ready = "false";
    return drawAll();
  }

  // Controls

  function segment(name, title, options, current, onChange) {
    const box = element("fieldset", { "data-control": name }, element("legend", { class: "unseen" }, title));
    options.forEach(([value, text]) => {
      const id = `${name}-${value}`;
      const input = element("input", { type: "radio", name, id, value });
      input.checked = value === current;
      input.addEventListener("change", () => onChange(value));
      box.append(input, element("label", { for: id }, text));
    });
    return box;
  }

  function menu(name, title, options, onChange) {
    const select = element("select", { id: name, "data-control": name });
    options.forEach(([value, text]) => select.append(element("option", { value }, text)));
    select.addEventListener("change", () => onChange(select.value));
    return element("label", { class: "menu", for: name }, title, select);
  }

  function controlsOf(chart) {
    const update = (key, convert) => (value) => {
      chart.state[key] = convert ? convert(value) : value;
      return draw(chart, theme());
    };
    const { key, data } = chart;
    const made = [];
    if (data.measures && data.measures.length > 1 && chart.kind !== "bounds") {
      const options = data.measures.map((measure) => [measure.key, measure.name]);
      const letters = options.reduce((sum, option) => sum + option[1].length, 0);
      made.push(data.menu || letters > 60
        ? menu(key + "-measure", "Show", options, update("measure"))
        : segment(key + "-measure", "What to show", options, options[0][0], update("measure")));
    }
    if (chart.kind === "clients") {
      made.push(segment(key + "-order", "Order of clients", [["ranked", "ranked"], ["single", "by client"]], "ranked", update("order")));
    }
    if (chart.kind === "raster" && data.views.some((view) => view.order)) {
      made.push(segment(key + "-order", "Order of clients", [["group", "by group"], ["number", "by number"]], "group", update("order")));
    }
    if (["raster", "matrix", "points", "round"].includes(chart.kind) && data.views.length > 1) {
      const many = new Set(data.views.map((view) => view.policy)).size > 1;
      const options = data.views.map((view, index) => [index, `${many ? view.policy + ", " : ""}seed ${view.seed}`]);
      if (many) options.sort((one, other) => order(data.views[one[0]].policy) - order(data.views[other[0]].policy) || one[0] - other[0]);
      made.push(menu(key + "-view", "Run", options, update("view", Number)));
    }
    if (chart.kind === "labels" && data.views.length > 1) {
      made.push(menu(key + "-policy", "Policy", data.views.map((view) => [view.policy, view.policy]), update("policy")));
    }
    return made;
  }

  const order = (label) => content.policies.findIndex((policy) => policy.label === label);

  function sharedControls() {
    const place = document.querySelector('[data-controls="results"]');
    const withAxes = charts.filter((chart) => (chart.data.axes || []).length > 1);
    if (!place || withAxes.length === 0) return;
    const update = (key) => (value) => {
      shared[key] = value;
      return Promise.all(withAxes.map((chart) => draw(chart, theme())));
    };
    const names = { round: "by round", bytes: "by bytes", clock: "by time" };
    place.append(segment("axis", "Horizontal axis", withAxes[0].data.axes.map((axis) => [axis, names[axis]]), shared.axis || "round", update("axis")));
    const several = withAxes.some((chart) => chart.data.measures.some((measure) => Object.values(measure.series).some((line) => line.each)));
    if (several) place.append(segment("spread", "Lines", [["band", "mean and spread"], ["each", "every seed"]], "band", update("spread")));
    const points = Math.max(...withAxes.flatMap((chart) => chart.data.measures.flatMap((measure) => Object.values(measure.series).map((line) => line.mean.length))));
    if (points >= 20) place.append(segment("smooth", "Smoothing", [["1", "as measured"], ["5", "mean of 5"]], "1", update("smooth")));
  }

  function chipOf(policy) {
    const chip = element("button", { type: "button", class: "chip", "aria-pressed": "true", "data-policy": policy.label });
    const dashes = { solid: "", dash: "6 4", dot: "2 3", dashdot: "6 3 2 3" };
    chip.innerHTML = `<svg width="22" height="10" aria-hidden="true"><line x1="1" x2="21" y1="5" y2="5" stroke-width="4" stroke-linecap="round" stroke-dasharray="${dashes[policy.dash]}"/></svg>`;
    chip.append(policy.label);
    chip.addEventListener("click", () => {
      const shown = hidden.delete(policy.label);
      if (!shown) hidden.add(policy.label);
      chip.setAttribute("aria-pressed", String(shown));
      document.querySelectorAll("[data-line]").forEach((line) => { line.style.opacity = hidden.has(line.dataset.line) ? 0.35 : 1; });
      redraw();
    });
    return chip;
  }

  function paintChips() {
    const colours = theme();
    document.querySelectorAll(".chip").forEach((chip) => {
      chip.querySelector("line").setAttribute("stroke", colours.style(chip.dataset.policy).colour);
    });
    const button = document.getElementById("theme");
    button.textContent = isDark() ? "Light" : "Dark";
  }

  // Keys: a focused figure reads out its values and zooms without a mouse

  function keysOf(chart) {
    let position = -1;
    chart.plot.addEventListener("keydown", (event) => {
      const layout = chart.plot._fullLayout;
      if (!layout || event.ctrlKey || event.metaKey || event.altKey) return;
      const range = layout.xaxis.range.map(Number);
      if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
        const trace = chart.plot.data.findIndex((each) => each.visible !== false && each.hoverinfo !== "skip" && each.type !== "heatmap");
        if (trace < 0) return;
        const size = chart.plot.data[trace].x.length;
        position = (position + (event.key === "ArrowRight" ? 1 : -1) + size) % size;
        Plotly.Fx.hover(chart.plot, [{ curveNumber: trace, pointNumber: position }]);
      } else if (event.key === "+" || event.key === "=" || event.key === "-") {
        if (range.some(Number.isNaN)) return;
        const half = ((range[1] - range[0]) / 2) * (event.key === "-" ? 1.25 : 0.8);
        const middle = (range[0] + range[1]) / 2;
        Plotly.relayout(chart.plot, { "xaxis.range": [middle - half, middle + half] });
      } else if (event.key === "0" || event.key === "Escape") {
        Plotly.relayout(chart.plot, { "xaxis.autorange": true, "yaxis.autorange": chart.kind === "matrix" ? "reversed" : true });
        Plotly.Fx.unhover(chart.plot);
        position = -1;
      } else {
        return;
      }
      event.preventDefault();
    });
  }

  function followContents() {
    const links = [...document.querySelectorAll(".contents a")];
    const watch = new IntersectionObserver((entries) => {
      for (const entry of entries.filter((each) => each.isIntersecting)) {
        links.forEach((link) => link.setAttribute("aria-current", String(link.hash === "#" + entry.target.id)));
      }
    }, { rootMargin: "-15% 0px -70% 0px" });
    document.querySelectorAll("main > section[id]").forEach((section) => watch.observe(section));
  }

  function copyButtons() {
    document.querySelectorAll("[data-copy]").forEach((button) => button.addEventListener("click", async () => {
      const text = document.getElementById(button.dataset.copy).textContent;
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch {
        window.getSelection().selectAllChildren(document.getElementById(button.dataset.copy));
        button.textContent = "Selected";
      }
    }));
  }

  const kept = remembered();
  if (kept === "light" || kept === "dark") root.dataset.theme = kept;
  document.getElementById("chips").append(...content.policies.map(chipOf));
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remembered(root.dataset.theme);
    paintChips();
    redraw();
  });
  system.addEventListener("change", () => { paintChips(); redraw(); });
  sharedControls();
  charts.forEach((chart) => {
    document.getElementById("controls-" + chart.key).append(...controlsOf(chart));
    keysOf(chart);
  });
  paintChips();
  followContents();
  copyButtons();
  drawAll();
})();
