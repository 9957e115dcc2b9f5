// What is drawn around and over the storages: axes, lines over the steps, labels.

class Area {
  constructor(view, left, top, width, height) {
    Object.assign(this, { view, left, top, width, height });
  }

  x(step) {
    return this.left + ((step - this.view.from) / (this.view.to - this.view.from)) * this.width;
  }

  y(bytes) {
    const part = (bytes - this.view.low) / (this.view.high - this.view.low);
    return this.top + this.height * (1 - part);
  }

  stepAt(x) {
    return this.view.from + ((x - this.left) / this.width) * (this.view.to - this.view.from);
  }

  bytesAt(y) {
    return this.view.low + (1 - (y - this.top) / this.height) * (this.view.high - this.view.low);
  }

  holds(x, y) {
    return x >= this.left && x < this.left + this.width && y >= this.top
      && y < this.top + this.height;
  }
}

// A canvas as sharp as the screen, in units of the page.
function sharp(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.max(Math.round(width * ratio), 1);
  canvas.height = Math.max(Math.round(height * ratio), 1);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

function rgb(name) {
  return `rgb(${themed(name).join(" ")})`;
}

// The most of a series over its positions from ``from`` up to ``to``.
function highest(series, from, to) {
  const first = within(Math.floor(from), 0, series.length - 1);
  const end = within(Math.floor(to), first + 1, series.length);
  let most = series[first];
  for (let i = first + 1; i < end; i++) most = Math.max(most, series[i]);
  return most;
}

// A line over the steps; ``position`` is where in the series a step is.
function lineOver(context, area, series, position = (step) => step) {
  if (!series.length) return;
  context.beginPath();
  for (let pixel = 0; pixel < area.width; pixel++) {
    const from = area.stepAt(area.left + pixel), to = area.stepAt(area.left + pixel + 1);
    const y = area.y(highest(series, position(from), position(to)));
    if (pixel === 0) context.moveTo(area.left, y);
    else context.lineTo(area.left + pixel, y);
    context.lineTo(area.left + pixel + 1, y);
  }
  context.stroke();
}

// The store-all step has its own steps: its forward is drawn over this forward, its backward too.
function positionInPlain(graph) {
  const { forward_steps: border, store_all_forward_steps: other } = graph.raw;
  const steps = graph.steps, others = graph.plain.length;
  if (!(border > 0 && border < steps && other > 0 && other < others)) {
    return (step) => (step / steps) * others;
  }
  return (step) => (step < border ? (step / border) * other
    : other + ((step - border) / (steps - border)) * (others - other));
}

function label(context, text, x, y, colour, align = "left") {
  context.save();
  context.font = "12px system-ui, sans-serif";
  context.textAlign = align;
  context.lineJoin = "round";
  context.lineWidth = 4;
  context.strokeStyle = rgb("plot");
  context.strokeText(text, x, y);
  context.fillStyle = colour;
  context.fillText(text, x, y);
  context.restore();
}

// A label on a ground of its own, for where bands are behind it; ``y`` is its upper edge.
function boxed(context, text, x, y, isLeft) {
  context.font = "600 12px system-ui, sans-serif";
  const width = context.measureText(text).width + 10, left = isLeft ? x - width : x;
  context.fillStyle = rgb("plot");
  context.strokeStyle = rgb("quiet");
  context.lineWidth = 1;
  context.beginPath();
  context.roundRect(Math.round(left) + 0.5, Math.round(y) + 0.5, Math.round(width), 18, 4);
  context.fill();
  context.stroke();
  context.fillStyle = rgb("text");
  context.textAlign = "left";
  context.fillText(text, Math.round(left) + 5.5, Math.round(y) + 13.5);
}

function drawAxes(context, area, steps) {
  const quiet = rgb("quiet"), grid = rgb("line"), { view } = area;
  context.font = "11.5px system-ui, sans-serif";
  context.fillStyle = quiet;
  context.lineWidth = 1;
  const [unit, size] = unitOf(Math.max(view.high, 1));
  const each = roundStep((view.high - view.low) / size, Math.max(area.height / 55, 2));
  context.textAlign = "right";
  context.strokeStyle = grid;
  for (let k = Math.ceil(view.low / size / each); k * each * size <= view.high; k++) {
    const y = Math.round(area.y(k * each * size)) + 0.5;
    line(context, area.left - 4, y, area.left, y);
    const digits = Math.max(0, -Math.floor(Math.log10(each)));
    context.fillText(`${(k * each).toFixed(digits)} ${unit}`, area.left - 7, y + 4);
  }
  context.textAlign = "center";
  const across = Math.max(roundStep(view.to - view.from, area.width / 90), 1);
  const bottom = area.top + area.height;
  for (let k = Math.ceil(view.from / across); k * across < view.to; k++) {
    const x = Math.round(area.x(k * across)) + 0.5;
    line(context, x, bottom + 8, x, bottom + 12);
    context.fillText(formatCount(k * across), x, bottom + 24);
  }
  context.textAlign = "right";
  context.fillText(`step, of ${formatCount(steps)}`, area.left + area.width, bottom + 38);
  context.strokeStyle = quiet;
  line(context, area.left - 0.5, area.top, area.left - 0.5, bottom);
  line(context, area.left, bottom + 0.5, area.left + area.width, bottom + 0.5);
}

function line(context, x1, y1, x2, y2) {
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x2, y2);
  context.stroke();
}
