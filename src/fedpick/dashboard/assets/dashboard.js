/* The live view: asks the server every two seconds, and draws again what has changed. */
"use strict";

(() => {
  const EVERY = 2000;
  const element = (id) => document.getElementById(id);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const wide = window.matchMedia("(min-width: 641px)");
  let chosen = location.hash.slice(1).split(",").filter((text) => /^\d+$/.test(text)).map(Number);
  let seen = "";

  async function ask(path) {
    const answer = await fetch(path, { credentials: "same-origin" });
    const content = await answer.json().catch(() => ({}));
    if (!answer.ok) throw new Error(content.error || "The server answered " + answer.status + ".");
    return content;
  }

  function made(tag, text, attributes = {}) {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  }

  function percent(value) {
    return (100 * value).toFixed(1) + " %";
  }

  function shown(value, content) {
    return content.percent ? percent(value) : value.toPrecision(4);
  }

  function experimentCard(each) {
    const item = made("li", undefined, { class: "card experiment", "data-id": each.id, "data-chosen": chosen.includes(each.id) });
    const label = made("label");
    const box = made("input", undefined, { type: "checkbox", id: "experiment-" + each.id });
    box.checked = chosen.includes(each.id);
    box.addEventListener("change", () => {
      chosen = box.checked ? [...chosen, each.id] : chosen.filter((other) => other !== each.id);
      history.replaceState(null, "", "#" + chosen.join(","));
      refresh(true);
    });
    label.append(box, made("span", each.title));
    const bar = made("progress", undefined, { max: Math.max(each.wanted, 1), value: each.done, "aria-label": "Progress of " + each.title });
    const states = Object.entries(each.states).map(([state, count]) => count + " " + state).join(", ");
    const progress = made("p");
    progress.append(made("span", `${each.done.toLocaleString("en")} of ${each.wanted.toLocaleString("en")} rounds`), made("span", states));
    const more = made("p");
    const best = each.policies.filter((policy) => policy.accuracy !== null).map((policy) => `${policy.label} ${percent(policy.accuracy)}`);
    more.append(made("span", best.slice(0, 4).join(", ") + (best.length > 4 ? ", …" : "")), made("a", "report", { href: "/report/" + each.id, target: "_blank", rel: "noopener" }));
    item.append(label, bar, progress, more);
    return item;
  }

  function drawList(content) {
    element("store").textContent = content.store;
    const focused = document.activeElement && document.activeElement.id;
    element("experiments").replaceChildren(...content.experiments.map(experimentCard));
    if (focused && element(focused)) element(focused).focus({ preventScroll: true });
    if (!element("measure").options.length) {
      for (const [key, name] of Object.entries(content.measures)) element("measure").append(made("option", name, { value: key }));
    }
  }

  function drawCurves(content) {
    const several = new Set(content.lines.map((line) => line.experiment)).size > 1;
    const short = (text) => (text.length > 24 ? text.slice(0, 23) + "…" : text);
    const name = (line) => (several ? short(line.title) + ": " : "") + line.label;
    const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;");
    const axis = element("axis").value;
    const style = getComputedStyle(document.documentElement);
    const colour = (key) => style.getPropertyValue("--" + key).trim();
    const traces = content.lines.map((line) => ({
      type: "scatter", mode: line.mean.length > 1 ? "lines" : "markers", name: plain(name(line)), x: line[axis], y: line.mean,
      line: { color: dark.matches ? line.dark : line.light, dash: line.dash, width: 2.2 },
      marker: { color: dark.matches ? line.dark : line.light },
      hovertemplate: plain(name(line)) + (content.percent ? ": %{y:.1%}" : ": %{y:.4~g}") + "<extra></extra>",
    }));
    const lines = { gridcolor: colour("grid"), linecolor: colour("line"), zeroline: false };
    Plotly.react(element("plot"), traces, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour("muted"), size: 12 },
      margin: { l: 60, r: 16, t: 10, b: 50 }, hovermode: "x unified", hoverlabel: { bgcolor: colour("card") },
      xaxis: { ...lines, title: { text: axis === "bytes" ? "bytes sent, both ways" : "round" } },
      yaxis: { ...lines, title: { text: content.name }, tickformat: content.percent ? "~%" : "" },
      legend: { orientation: "h", y: -0.22 }, modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("muted"), activecolor: colour("text") },
      showlegend: true, uirevision: [content.measure, axis, chosen].join(),
    }, { responsive: true, displayModeBar: wide.matches, displaylogo: false, modeBarButtons: [["zoom2d", "pan2d", "resetScale2d"]] });
    element("plot").dataset.points = content.lines.reduce((sum, line) => sum + line.mean.length, 0);
    element("value-head").textContent = "latest " + content.name;
    element("values").replaceChildren(...content.lines.map((line) => {
      const row = made("tr");
      const head = made("th", undefined, { scope: "row" });
      const dot = made("span", undefined, { class: "dot" });
      dot.style.setProperty("--light", line.light);
      dot.style.setProperty("--dark", line.dark);
      head.append(dot, line.label);
      const value = shown(line.latest, content) + (line.sd === null ? "" : " ± " + shown(line.sd, content));
      row.append(head);
      for (const [heading, text] of [["experiment", line.title], ["seeds", line.seeds], ["rounds", line.round.at(-1)], ["latest", value]]) {
        row.append(made("td", text, { "data-heading": heading }));
      }
      return row;
    }));
  }

  function say(state, text, problem) {
    element("live").dataset.state = state;
    element("live").textContent = text;
    element("notice").hidden = !problem;
    element("notice").textContent = problem || "";
  }

  async function refresh(anew) {
    try {
      const content = await ask("/api/experiments");
      if (!chosen.length && content.experiments.length && !seen) chosen = [content.experiments[0].id];
      chosen = chosen.filter((id) => content.experiments.some((each) => each.id === id));
      const now = JSON.stringify(content.experiments);
      if (anew || now !== seen) {
        drawList(content);
        const query = chosen.map((id) => "experiment=" + id).join("&");
        drawCurves(await ask(`/api/curves?${query}&measure=${element("measure").value}`));
        seen = now;
      }
      const running = content.experiments.some((each) => each.states.running);
      say(running ? "live" : "idle", running ? "live" : "no run is being computed");
      document.documentElement.dataset.ready = "true";
    } catch (error) {
      say("lost", "no answer", error.message);
    }
  }

  async function follow() {
    if (!document.hidden) await refresh(false);
    setTimeout(follow, EVERY);
  }

  element("measure").addEventListener("change", () => refresh(true));
  element("axis").addEventListener("change", () => refresh(true));
  dark.addEventListener("change", () => refresh(true));
  follow();
})();
