/* How each kind of chart becomes Plotly traces. Pure functions of (data, state, theme); page.js calls them. */
"use strict";

const fedpickDrawing = (() => {
  const AXES = {
    round: { title: "round", format: "~s", suffix: "" },
    bytes: { title: "bytes sent, both ways", format: "~s", suffix: "B" },
    clock: { title: "time on the clients' devices", format: "~s", suffix: "s" },
  };

  function withAlpha(hex, alpha) {
    const value = parseInt(hex.slice(1), 16);
    return `rgba(${value >> 16}, ${(value >> 8) & 255}, ${value & 255}, ${alpha})`;
  }

  /** Labels are the user's own text: Plotly would read tags and entities in them. */
  function plain(text) {
    return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  }

  function short(value, unit) {
    if (value === null) return "N/A";
    if (unit === "bytes") {
      const power = Math.min(4, Math.max(0, Math.floor(Math.log10(Math.max(value, 1)) / 3)));
      return (value / 1000 ** power).toPrecision(3) + " " + ["B", "kB", "MB", "GB", "TB"][power];
    }
    return value >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
  }

  /** Names of groups are long: a line for each part, so that three of them have room side by side on a phone. */
  function broken(text) {
    return plain(text).replace(/, (weakly )?/g, (_, weakly) => ",<br>" + (weakly ? "weakly<br>" : ""));
  }

  function matrixOf(packed, map) {
    const text = atob(packed.bytes);
    const [rows, columns] = packed.shape;
    const matrix = [];
    for (let row = 0; row < rows; row += 1) {
      const line = new Array(columns);
      for (let column = 0; column < columns; column += 1) line[column] = map(text.charCodeAt(row * columns + column));
      matrix.push(line);
    }
    return matrix;
  }

  function axis(theme, more) {
    return {
      gridcolor: theme.grid, linecolor: theme.line, zerolinecolor: theme.line, tickfont: { color: theme.muted },
      automargin: true, ...more, title: { text: "", font: { color: theme.muted, size: 12 }, standoff: 8, ...(more || {}).title },
    };
  }

  function baseLayout(theme, more) {
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: 'system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif', size: 12, color: theme.text },
      margin: { l: 50, r: 14, t: 10, b: 42 }, showlegend: false, dragmode: theme.isNarrow ? false : "zoom",
      hoverlabel: { bgcolor: theme.card, bordercolor: theme.line, font: { color: theme.text, size: 12 }, align: "left" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: theme.muted, activecolor: theme.accent },
      ...more,
    };
  }

  /** Mean of the latest values, as many as there are up to the window. */
  function smoothed(values, window) {
    if (window <= 1) return values;
    let sum = 0;
    return values.map((value, index) => {
      sum += value - (index >= window ? values[index - window] : 0);
      return sum / Math.min(index + 1, window);
    });
  }

  function lineTraces(series, x, measure, theme, options) {
    const traces = [];
    for (const [label, raw] of Object.entries(series)) {
      const smooth = (values) => values && smoothed(values, options.window || 1);
      const line = { ...raw, mean: smooth(raw.mean), sd: smooth(raw.sd), each: raw.each && raw.each.map(smooth) };
      const style = theme.style(label);
      const visible = theme.isShown(label);
      const single = line.mean.length === 1;
      const common = { meta: { policy: label }, visible, xaxis: options.xaxis, yaxis: options.yaxis, type: "scatter" };
      if (options.each && line.each) {
        line.each.forEach((values, index) => traces.push({
          ...common, x: line[x], y: values, mode: single ? "markers" : "lines", name: plain(label),
          line: { color: style.colour, width: 1.2, dash: style.dash }, opacity: 0.75,
          hovertemplate: `${plain(label)}, seed ${line.seeds[index]}: %{y:${options.format}}<extra></extra>`,
        }));
        continue;
      }
      if (line.sd) {
        const above = line.mean.map((mean, index) => mean + line.sd[index]);
        const below = line.mean.map((mean, index) => mean - line.sd[index]);
        traces.push({
          ...common, x: [...line[x], ...[...line[x]].reverse()], y: [...above, ...below.reverse()], mode: "lines",
          fill: "toself", fillcolor: withAlpha(style.colour, theme.isDark ? 0.2 : 0.14), line: { width: 0 }, hoverinfo: "skip",
        });
      }
      traces.push({
        ...common, x: line[x], y: line.mean, customdata: line.sd, name: plain(label), mode: single ? "markers" : "lines",
        line: { color: style.colour, width: 2.2, dash: options.dash || style.dash }, marker: { color: style.colour, size: 9 },
        hovertemplate: `${plain(label)}${options.suffix || ""}: %{y:${options.format}}` +
          (line.sd ? ` ± %{customdata:${options.format}}` : "") + "<extra></extra>",
      });
    }
    return traces;
  }

  function levelTrace(measure, x, theme, format) {
    const across = Object.values(measure.series).flatMap((line) => line[x]);
    const { name, value } = measure.reference;
    return {
      type: "scatter", mode: "lines", name: plain(name), x: [Math.min(...across), Math.max(...across)], y: [value, value],
      line: { color: theme.text, width: 1.6, dash: "dot" }, hovertemplate: `${plain(name)}: %{y:${format}}<extra></extra>`,
    };
  }

  function lines(data, state, theme) {
    const measure = data.measures.find((each) => each.key === state.measure) || data.measures[0];
    const x = data.axes.includes(state.axis) ? state.axis : "round";
    const options = { format: measure.percent ? ".2%" : ".4~g", each: state.spread === "each", window: data.axes.length > 1 ? Number(state.smooth) : 1 };
    const traces = lineTraces(measure.series, x, measure, theme, options);
    const shapes = measure.key !== "accuracy" ? [] : data.targets.map((target) => ({
      type: "line", xref: "paper", x0: 0, x1: 1, y0: target, y1: target, layer: "below",
      line: { color: theme.muted, width: 1, dash: "dot" },
    }));
    // A line, not a shape: it stays in sight if no policy comes near it, and its value can be read.
    if (measure.reference) traces.unshift(levelTrace(measure, x, theme, options.format));
    return {
      traces,
      layout: baseLayout(theme, {
        shapes, hovermode: x === "round" ? "x unified" : "closest",
        xaxis: axis(theme, {
          title: { text: AXES[x].title }, ticksuffix: AXES[x].suffix, tickformat: x === "bytes" ? "~s" : undefined,
          hoverformat: x === "round" ? "d" : "~s", unifiedhovertitle: { text: "round %{x}" }, zeroline: false,
          showgrid: false, ticks: "outside", tickcolor: theme.line, showline: true,
        }),
        yaxis: axis(theme, { title: { text: plain(measure.name) }, tickformat: measure.percent ? ".0%" : undefined, zeroline: false, rangemode: measure.from_zero ? "tozero" : measure.reference ? "nonnegative" : "normal" }),
      }),
    };
  }

  function bars(data, state, theme) {
    const measure = data.measures.find((each) => each.key === state.measure) || data.measures[0];
    const traces = Object.entries(measure.series).map(([label, cells]) => ({
      type: "bar", name: plain(label), meta: { policy: label }, visible: theme.isShown(label), x: data.targets,
      y: cells.map((cell) => cell.mean ?? 0), marker: { color: theme.style(label).colour },
      error_y: { type: "data", array: cells.map((cell) => cell.sd ?? 0), color: theme.muted, thickness: 1.2, width: 3 },
      text: cells.map((cell) => short(cell.mean, measure.key)), textposition: "inside", insidetextanchor: "start",
      textangle: 0, cliponaxis: false, outsidetextfont: { color: theme.muted }, textfont: { size: 11 },
      customdata: cells.map((cell) => [short(cell.mean, measure.key), cell.sd === null ? "" : " ± " + short(cell.sd, measure.key), cell.reached, cell.seeds]),
      hovertemplate: `${plain(label)}, %{x}: %{customdata[0]}%{customdata[1]}<br>%{customdata[2]} of %{customdata[3]} seeds reached it<extra></extra>`,
    }));
    traces.forEach((trace, index) => {
      const cells = Object.values(measure.series)[index];
      trace.textposition = cells.map((cell) => (cell.mean === null ? "outside" : "inside"));
    });
    return {
      traces,
      layout: baseLayout(theme, {
        barmode: "group", bargap: 0.24, bargroupgap: 0.08, hovermode: "closest",
        xaxis: axis(theme, { title: { text: "target accuracy" }, type: "category", showgrid: false }),
        yaxis: axis(theme, {
          title: { text: plain(measure.name) }, rangemode: "tozero", tickformat: "~s", ticksuffix: { bytes: "B", clock: "s" }[measure.key] || "",
        }),
      }),
    };
  }

  /** Bars of what every client does in a round, the fastest at the bottom, and a line where the round ends. */
  function round(data, state, theme) {
    const view = data.views[state.view] || data.views[0];
    const colour = theme.style(view.policy).colour;
    const of = (wanted) => view.status.map((each) => (each === "in time" ? wanted : withAlpha(wanted, 0.3)));
    const parts = [["receiving", "#8A97A3"], ["computing", colour], ["sending", "#17A398"]];
    const rows = view.status.map((_, index) => index + 1);
    return {
      key: [...parts.map(([word, each]) => ({ word, colour: each })), { word: "pale: cancelled or late", colour: withAlpha(colour, 0.3) }],
      traces: parts.map(([name, each]) => ({
        type: "bar", orientation: "h", y: rows, x: view[name], name, marker: { color: of(each) },
        customdata: view.status, hovertemplate: `${name} %{x:.3~g} s (%{customdata})<extra></extra>`,
      })),
      layout: baseLayout(theme, {
        barmode: "stack", bargap: 0.15, hovermode: "closest",
        shapes: [{ type: "line", yref: "paper", y0: 0, y1: 1, x0: view.end, x1: view.end, line: { color: theme.text, width: 1.6, dash: "dot" } }],
        xaxis: axis(theme, { title: { text: `seconds after the request, round ${view.round}` }, rangemode: "tozero", zeroline: false }),
        yaxis: axis(theme, { title: { text: "selected clients, by speed" }, showgrid: false, zeroline: false }),
      }),
    };
  }

  function clients(data, state, theme) {
    const measure = data.measures.find((each) => each.key === state.measure) || data.measures[0];
    const ranked = state.order !== "single";
    const key = ranked ? "ranked" : "single";
    const x = ranked ? data.positions.map((position) => position + 1) : data.positions;
    const name = ranked ? "rank %{x}" : "client %{x}";
    const few = x.length === 1;
    const traces = [{
      type: "scatter", mode: few ? "markers" : "lines", x, y: measure.reference[key], name: measure.reference.name,
      line: { color: theme.muted, width: 1.4, dash: "dot" }, hovertemplate: `${measure.reference.name}: %{y:.3~p}<extra></extra>`,
    }];
    for (const [label, values] of Object.entries(measure[key])) {
      const style = theme.style(label);
      traces.push({
        type: "scatter", mode: ranked && !few ? "lines" : "markers", x, y: values, name: plain(label), meta: { policy: label },
        visible: theme.isShown(label), line: { color: style.colour, width: 2.2, dash: style.dash },
        marker: { color: style.colour, size: x.length > 150 ? 4 : 6, opacity: 0.85 },
        hovertemplate: `${plain(label)}: %{y:.3~p}<extra></extra>`,
      });
    }
    return {
      traces,
      layout: baseLayout(theme, {
        hovermode: "x unified",
        xaxis: axis(theme, {
          title: { text: ranked ? "clients, most often chosen first" : "client" }, unifiedhovertitle: { text: name },
          hoverformat: ",d", showgrid: false, zeroline: false, ticks: "outside", tickcolor: theme.line, showline: true,
        }),
        yaxis: axis(theme, { title: { text: measure.name }, tickformat: "~%", rangemode: "tozero" }),
      }),
    };
  }

  /** A cell for every client and round; clients group by group where there are groups. */
  function exactRaster(view, state, theme, rounds, rows) {
    const grouped = Boolean(view.order) && state.order !== "number";
    const numbered = matrixOf(view.exact, (code) => code);
    const order = grouped ? view.order : numbered.map((_, index) => index);
    const codes = order.map((client) => numbered[client]);
    const colour = theme.style(view.policy).colour;
    const words = ["not available", "available, not chosen", "chosen", "chosen, did not complete", "available, excluded", "not available, excluded"];
    const colours = [theme.absent, theme.present, colour, theme.failed, theme.excluded, theme["shut-out"]];
    const scale = colours.flatMap((each, index) => [[index / 6, each], [(index + 1) / 6, each]]);
    const used = new Set(codes.flat());
    const gap = view.exact.shape[0] <= 80 && view.exact.shape[1] <= 120 ? 1 : 0;
    const names = new Array(order.length).fill("");
    const shapes = [];
    const ticks = { tickvals: [], ticktext: [] };
    let start = 0;
    if (grouped) view.groups.forEach((name, index) => {
      const size = view.sizes[index];
      names.fill(", " + plain(name), start, start + size);
      ticks.tickvals.push(start + (size - 1) / 2);
      ticks.ticktext.push(broken(name));
      if (start > 0) shapes.push({
        type: "line", xref: "paper", x0: 0, x1: 1, y0: start - 0.5, y1: start - 0.5, line: { color: theme.text, width: 1 },
      });
      start += size;
    });
    const axisOfClients = grouped ? { ...rows, ...ticks, tickmode: "array", tickfont: { color: theme.muted, size: 11 }, title: { ...rows.title, text: "" } } : rows;
    return {
      key: words.map((word, index) => ({ word, colour: colours[index] })).filter((_, index) => used.has(index)),
      traces: [{
        type: "heatmap", z: codes, x0: 1, dx: 1, y0: 0, dy: 1, zmin: 0, zmax: 5, colorscale: scale, showscale: false,
        xgap: gap, ygap: gap,
        text: codes.map((line, row) => line.map((code) => `client ${order[row]}${names[row]}: ${words[code]}`)),
        hovertemplate: "round %{x}, %{text}<extra></extra>",
      }],
      layout: baseLayout(theme, { shapes, xaxis: rounds, yaxis: axisOfClients, hovermode: "closest" }),
    };
  }

  function raster(data, state, theme) {
    const view = data.views[state.view] || data.views[0];
    const rounds = axis(theme, { title: { text: "round" }, showgrid: false, zeroline: false });
    const rows = axis(theme, { title: { text: "client" }, showgrid: false, zeroline: false });
    if (view.exact) return exactRaster(view, state, theme, rounds, rows);
    const place = {
      x0: 1 + (view.rounds_per_column - 1) / 2, dx: view.rounds_per_column,
      y0: (view.clients_per_row - 1) / 2, dy: view.clients_per_row,
    };
    const bar = { thickness: 10, outlinewidth: 0, tickfont: { color: theme.muted }, len: 0.46 };
    return {
      key: [],
      traces: [
        {
          type: "heatmap", ...place, z: matrixOf(view.available, (code) => code / 255), zmin: 0, zmax: 1,
          colorscale: [[0, theme.absent], [1, theme.muted]], colorbar: { ...bar, y: 0.77, tickformat: ".0%" },
          hovertemplate: "around round %{x:.0f}, client %{y:,.0f}: %{z:.0%} available<extra></extra>",
        },
        {
          type: "heatmap", ...place, yaxis: "y2", z: matrixOf(view.chosen, (code) => (code / 255) * view.peak), zmin: 0,
          colorscale: [[0, theme.absent], [1, theme.style(view.policy).colour]], colorbar: { ...bar, y: 0.23 },
          hovertemplate: "around round %{x:.0f}, client %{y:,.0f}: %{z:.3~g} chosen per round<extra></extra>",
        },
      ],
      layout: baseLayout(theme, {
        hovermode: "closest", xaxis: { ...rounds, anchor: "y2" },
        yaxis: { ...rows, domain: [0.54, 1], title: { ...rows.title, text: "client" } }, yaxis2: { ...rows, domain: [0, 0.46], matches: "y" },
      }),
    };
  }

  function labels(data, state, theme) {
    const view = data.views.find((each) => each.policy === state.policy) || data.views[0];
    const largest = Math.max(1e-9, ...data.views.flatMap((each) => each.gaps.flat().map((gap) => Math.abs(gap ?? 0))));
    const population = data.population.map((share) => view.rounds.map(() => share));
    const dense = view.rounds.length > 120 || view.gaps.length > 30;
    return {
      traces: [{
        type: "heatmap", x: view.rounds, z: view.gaps, zmin: -largest, zmax: largest, customdata: population,
        colorscale: [[0, theme.less], [0.5, theme.middle], [1, theme.more]], xgap: dense ? 0 : 1, ygap: dense ? 0 : 1,
        colorbar: {
          thickness: 10, outlinewidth: 0, tickformat: "+.0%", tickfont: { color: theme.muted },
          title: { text: "share − all data", side: "right", font: { color: theme.muted, size: 11 } },
        },
        hovertemplate: "round %{x:.0f}, label %{y}: %{z:+.1%} against %{customdata:.1%} of all data<extra></extra>",
      }],
      layout: baseLayout(theme, {
        hovermode: "closest", xaxis: axis(theme, { title: { text: "round" }, showgrid: false, zeroline: false }),
        yaxis: axis(theme, { title: { text: "label" }, showgrid: false, zeroline: false, dtick: view.gaps.length <= 20 ? 1 : undefined }),
      }),
    };
  }

  function matrix(data, state, theme) {
    const view = data.views[state.view] || data.views[0];
    const lowest = Math.min(0, ...view.matrix.flat());
    const name = (index) => "client " + view.clients[index] + (view.labels ? ", mostly label " + view.labels[index] : "");
    const names = view.clients.map((_, index) => name(index));
    const scale = lowest < -0.05
      ? [[0, theme.less], [-lowest / (1 - lowest), theme.middle], [1, theme.more]]
      : [[0, theme.middle], [1, theme.more]];
    return {
      traces: [{
        type: "heatmap", z: view.matrix, zmin: lowest, zmax: 1, colorscale: scale,
        customdata: names.map((first) => names.map((second) => [first, second])),
        colorbar: { thickness: 10, outlinewidth: 0, tickfont: { color: theme.muted } },
        hovertemplate: "%{customdata[0]}<br>%{customdata[1]}<br>correlation %{z:.2f}<extra></extra>",
      }],
      layout: baseLayout(theme, {
        hovermode: "closest",
        xaxis: axis(theme, { title: { text: "clients, ordered by cluster" }, showticklabels: false, ticks: "", showgrid: false, zeroline: false, constrain: "domain" }),
        yaxis: axis(theme, { showticklabels: false, ticks: "", showgrid: false, zeroline: false, autorange: "reversed", scaleanchor: "x", constrain: "domain" }),
      }),
    };
  }

  // A hue per label, apart from the policies' colours in meaning and order; shapes help where hues do not.
  const HUES = ["#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#999999", "#EE8866", "#44BB99", "#AAAA00"];
  const SHAPES = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon", "triangle-down", "pentagon"];

  function points(data, state, theme) {
    const view = data.views[state.view] || data.views[0];
    const most = Math.max(1, ...view.chosen);
    const size = (index) => 7 + 13 * Math.sqrt(view.chosen[index] / most);
    const groups = new Map();
    view.clients.forEach((_, index) => {
      const label = view.labels ? view.labels[index] : null;
      if (!groups.has(label)) groups.set(label, []);
      groups.get(label).push(index);
    });
    const traces = [...groups.entries()].sort((one, other) => one[0] - other[0]).map(([label, members]) => ({
      type: "scatter", mode: "markers", name: label === null ? "clients" : "label " + label,
      x: members.map((index) => view.x[index]), y: members.map((index) => view.y[index]),
      marker: {
        size: members.map(size), color: label === null ? theme.style(view.policy).colour : HUES[label % HUES.length],
        symbol: label === null ? "circle" : SHAPES[label % SHAPES.length], opacity: 0.85, line: { color: theme.card, width: 1 },
      },
      customdata: members.map((index) => [view.clients[index], view.chosen[index]]),
      hovertemplate: "client %{customdata[0]}" + (label === null ? "" : `, mostly label ${label}`) + "<br>chosen %{customdata[1]} times<extra></extra>",
    }));
    const bare = { showticklabels: false, showgrid: false, zeroline: false };
    return {
      traces,
      layout: baseLayout(theme, {
        hovermode: "closest", showlegend: groups.size > 1 && groups.size <= 30,
        legend: { font: { size: 11, color: theme.muted }, itemsizing: "constant", tracegroupgap: 0 },
        margin: { l: 14, r: 14, t: 10, b: 20 },
        xaxis: axis(theme, { ...bare, showline: true, mirror: true }), yaxis: axis(theme, { ...bare, showline: true, mirror: true }),
      }),
    };
  }

  function bounds(data, state, theme) {
    const of = (key) => data.measures.find((each) => each.key === key).series;
    const above = { format: ".4~g", yaxis: "y" };
    return {
      traces: [
        ...lineTraces(of("epsilon_opt"), "round", null, theme, { ...above, dash: "solid", suffix: ", ε_opt" }),
        ...lineTraces(of("epsilon_bias"), "round", null, theme, { ...above, dash: "dot", suffix: ", ε_bias" }),
        ...lineTraces(of("excluded"), "round", null, theme, { format: ".3~g", yaxis: "y2", suffix: ", left out" }),
      ],
      layout: baseLayout(theme, {
        hovermode: "x unified",
        xaxis: axis(theme, { title: { text: "round" }, anchor: "y2", showgrid: false, zeroline: false, unifiedhovertitle: { text: "round %{x}" } }),
        yaxis: axis(theme, { domain: [0.42, 1], title: { text: "ε_opt —  ε_bias ···" }, zeroline: false }),
        yaxis2: axis(theme, { domain: [0, 0.32], title: { text: "left out" }, rangemode: "tozero" }),
      }),
    };
  }

  const tools = { axis, baseLayout, broken, plain };
  return { lines, bars, round, clients, raster, labels, matrix, points, bounds, tools };
})();
