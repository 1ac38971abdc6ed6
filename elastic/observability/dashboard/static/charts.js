// Charts of the page, drawn by uPlot on a canvas. Each returns {update, element}.

const AXIS = 46;

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const charts = new Set();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((chart) => chart.rebuild()));

function chart(element, height, options, onClick) {
  let plot = null;
  let data = null;
  const width = () => Math.max(200, element.clientWidth);
  const made = {
    element,
    rebuild() {
      if (plot) plot.destroy();
      plot = null;
      if (data) made.update(data);
    },
    update(next) {
      data = next;
      if (!element.isConnected) return;
      if (plot) {
        plot.setData(data);
        return;
      }
      plot = new uPlot({ width: width(), height, legend: { show: true, live: true }, ...options() }, data, element);
      if (onClick) {
        plot.over.addEventListener("click", () => onClick(plot.posToVal(plot.cursor.left, "x"), plot));
      }
    },
  };
  new ResizeObserver(() => plot && plot.width !== width() && plot.setSize({ width: width(), height })).observe(element);
  charts.add(made);
  return made;
}

const TIME = { label: "time", value: (_, t) => (t ? new Date(t * 1000).toLocaleTimeString([], { hour12: false }) : "–") };

// Times of day, or with the date where the axis is longer than a day.
function times(plot, ticks) {
  const long = plot.scales.x.max - plot.scales.x.min > 86400;
  const format = long ? { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hour12: false } : { hour12: false };
  return ticks.map((t) => (long ? new Date(t * 1000).toLocaleString([], format) : new Date(t * 1000).toLocaleTimeString([], format)));
}

const WHOLE = [1, 2, 5].flatMap((one) => Array.from({ length: 7 }, (_, power) => one * 10 ** power)).sort((a, b) => a - b);
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800];

function axes(xLabel, xValues, yIncrs) {
  const common = { stroke: color("--soft"), grid: { stroke: color("--grid"), width: 1 }, ticks: { stroke: color("--grid") } };
  return [
    { ...common, ...(xValues ? { values: xValues, space: 90, incrs: SECONDS } : { incrs: WHOLE }), label: xLabel || undefined, labelSize: 18, labelFont: "12px system-ui", font: "12px system-ui" },
    { ...common, ...(yIncrs ? { incrs: yIncrs } : {}), size: AXIS, font: "12px system-ui", values: (_, ticks) => ticks.map(short) },
  ];
}

export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(1);
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  return String(Number(value.toPrecision(4)));
}

// Members over time, as a stepped line; marks: [{t, color}] are vertical lines, nearest(t) is called with a click's time.
export function worldChart(element, marks, clicked) {
  return chart(element, 220, () => ({
    scales: { x: { time: true }, y: { range: (_, low, high) => [0, Math.max(1, high) + 0.5] } },
    axes: axes("", times, WHOLE),
    series: [
      TIME,
      { label: "members", stroke: color("--accent"), fill: `${color("--accent")}22`, width: 2, paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } },
    ],
    hooks: {
      draw: [(plot) => {
        const pen = plot.ctx;
        pen.save();
        pen.lineWidth = 2 * devicePixelRatio;
        for (const mark of marks()) {
          const x = plot.valToPos(mark.t, "x", true);
          if (x < plot.bbox.left || x > plot.bbox.left + plot.bbox.width) continue;
          pen.strokeStyle = color(mark.color);
          pen.beginPath();
          pen.moveTo(x, plot.bbox.top);
          pen.lineTo(x, plot.bbox.top + plot.bbox.height);
          pen.stroke();
        }
        pen.restore();
      }],
    },
  }), clicked);
}

export function lineChart(element, name, stroke, options = {}) {
  return chart(element, 220, () => ({
    scales: { x: { time: Boolean(options.time) }, y: options.fromZero ? { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } : {} },
    axes: axes(options.label ?? "", options.time ? times : undefined),
    series: [
      options.time ? TIME : { label: "step" },
      ...(options.beside ? [{ label: options.beside, stroke: `${color("--warn")}66`, width: 5, points: { show: false }, value: (_, value) => short(value) }] : []),
      { label: name, stroke: color(stroke), width: 1.5, points: { show: false }, value: (_, value) => short(value) },
      ...(options.band ? [
        { label: "least", stroke: `${color(stroke)}55`, width: 1, points: { show: false }, value: (_, value) => short(value) },
        { label: "most", stroke: `${color(stroke)}55`, width: 1, points: { show: false }, value: (_, value) => short(value) },
      ] : []),
    ],
    bands: options.band ? [{ series: options.beside ? [4, 3] : [3, 2], fill: `${color(stroke)}22` }] : [],
  }));
}

export function forget(made) {
  if (made) charts.delete(made);
}
