/* The charts that compare: groups of clients, paired differences, one hyper-parameter. Like drawing.js, which see. */
"use strict";

Object.assign(fedpickDrawing, (() => {
  const { axis, baseLayout, broken, plain } = fedpickDrawing.tools;

  /** What groups of clients got in the end, and what they should have had. */
  function groups(data, state, theme) {
    const measure = data.measures.find((each) => each.key === state.measure) || data.measures[0];
    const shown = measure.groups || data.groups;
    const by = measure.by || data.by;
    const many = shown.length > 4;
    const names = shown.map((name) => (many ? plain(name.replace("cluster ", "")) : broken(name)));
    const traces = Object.entries(measure.series).map(([label, cells]) => ({
      type: "bar", name: plain(label), meta: { policy: label }, visible: theme.isShown(label), x: names,
      y: cells.map((cell) => cell.mean), marker: { color: theme.style(label).colour },
      error_y: {
        // A share is never below 0, whatever its deviation.
        type: "data", symmetric: false, array: cells.map((cell) => cell.sd || null),
        arrayminus: cells.map((cell) => (cell.sd ? Math.min(cell.sd, cell.mean) : null)), color: theme.muted, thickness: 1.2, width: 2,
      },
      hovertemplate: `${plain(label)}: %{y:.1%}<extra></extra>`,
    }));
    const target = measure.target || [];
    const shapes = target.map((share, index) => ({
      type: "line", x0: index - 0.46, x1: index + 0.46, y0: share, y1: share, line: { color: theme.text, width: 2 },
    }));
    if (measure.target) traces.push({
      type: "scatter", mode: "markers", name: "target", x: names, y: target, marker: { size: 1, color: theme.text },
      hovertemplate: "target: %{y:.1%}<extra></extra>",
    });
    return {
      key: measure.target ? [{ word: "target: share of the examples", colour: theme.text }] : [],
      traces,
      layout: baseLayout(theme, {
        barmode: "group", bargap: 0.16, bargroupgap: 0.06, hovermode: "x unified", shapes,
        xaxis: axis(theme, { type: "category", showgrid: false, tickangle: 0, tickfont: { color: theme.muted, size: many ? 12 : 10 }, title: { text: many ? by : "" }, unifiedhovertitle: { text: (many ? by + ": " : "") + "%{x}" } }),
        yaxis: axis(theme, { title: { text: plain(measure.name) }, rangemode: "tozero", tickformat: "~%" }),
      }),
    };
  }

  /** Differences to one policy with their intervals, a line for each policy. */
  function forest(data, state, theme) {
    const measure = data.measures.find((each) => each.key === state.measure) || data.measures[0];
    const labels = Object.keys(measure.series);
    const traces = labels.map((label) => {
      const cell = measure.series[label];
      const known = cell.low !== null;
      return {
        type: "scatter", mode: "markers", name: plain(label), meta: { policy: label }, visible: theme.isShown(label),
        x: [cell.mean], y: [plain(label)], marker: { color: theme.style(label).colour, size: 10, symbol: "square" },
        error_x: {
          type: "data", symmetric: false, array: [known ? cell.high - cell.mean : 0], visible: known,
          arrayminus: [known ? cell.mean - cell.low : 0], color: theme.style(label).colour, thickness: 2.4, width: 6,
        },
        hovertemplate: `${plain(label)}: ${cell.text}, ${cell.pairs} pairs<extra></extra>`,
      };
    });
    const better = { high: "<br>right is better", low: "<br>left is better" }[measure.best] || "";
    return {
      traces,
      layout: baseLayout(theme, {
        hovermode: "closest",
        shapes: [{ type: "line", x0: 0, x1: 0, yref: "paper", y0: 0, y1: 1, layer: "below", line: { color: theme.muted, width: 1.4 } }],
        xaxis: axis(theme, { title: { text: broken(measure.name) + better }, zeroline: false, rangemode: "tozero", showline: true, tickangle: 0, nticks: 5 }),
        yaxis: axis(theme, { type: "category", categoryarray: labels.map(plain), categoryorder: "array", range: [labels.length - 0.5, -0.5], showgrid: false }),
      }),
    };
  }

  /** Accuracy against a hyper-parameter, or the best value of it by length of training. */
  function sweep(data, state, theme) {
    const parameter = plain(data.parameter);
    const ticks = data.values.length <= 8 ? { tickmode: "array", tickvals: data.values, ticktext: data.values.map(String) } : {};
    const scale = { type: data.logarithmic ? "log" : "linear", ...ticks };
    if (state.measure === "best") {
      return {
        traces: [{
          type: "scatter", mode: data.best.round.length === 1 ? "markers" : "lines", x: data.best.round, y: data.best.value,
          line: { color: theme.accent, width: 2.2, shape: "hv" }, hovertemplate: `after %{x} rounds: %{y}<extra></extra>`,
        }],
        layout: baseLayout(theme, {
          hovermode: "closest", xaxis: axis(theme, { title: { text: "length of training, rounds" }, showgrid: false, zeroline: false }),
          yaxis: axis(theme, { ...scale, title: { text: "best " + parameter }, zeroline: false }),
        }),
      };
    }
    const ends = [data.values[0], data.values[data.values.length - 1]];
    const across = data.references.map(({ label, mean }) => ({
      type: "scatter", mode: "lines", name: plain(label), meta: { policy: label }, visible: theme.isShown(label), x: ends,
      y: [mean, mean], line: { color: theme.style(label).colour, width: 1.6, dash: "dash" }, showlegend: true,
      hovertemplate: `${plain(label)}: %{y:.2%}<extra></extra>`,
    }));
    return {
      traces: [...across, {
        type: "scatter", mode: "lines+markers", x: data.values, y: data.mean, showlegend: false,
        line: { color: theme.muted, width: 1.4 },
        marker: { color: data.labels.map((label) => theme.style(label).colour), size: 10 },
        error_y: { type: "data", array: data.sd.map((sd) => sd ?? 0), color: theme.muted, thickness: 1.2, width: 4 },
        customdata: data.sd, hovertemplate: `${parameter} = %{x}: %{y:.2%} ± %{customdata:.2%}<extra></extra>`,
      }],
      layout: baseLayout(theme, {
        hovermode: "closest", showlegend: across.length > 0, margin: { l: 50, r: 14, t: across.length ? 34 : 10, b: 42 },
        legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11, color: theme.muted } },
        xaxis: axis(theme, { ...scale, title: { text: parameter }, showgrid: false, zeroline: false, showline: true, ticks: "outside", tickcolor: theme.line }),
        yaxis: axis(theme, { title: { text: "test accuracy at the end" }, tickformat: "~%", zeroline: false }),
      }),
    };
  }

  return { groups, forest, sweep };
})());
