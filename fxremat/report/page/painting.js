// Painting the storages, pixel by pixel: each band's colour, and whose pixel it is.
//
// A column of pixels shows one step: of those that fall into it, the one that holds most, so that
// no peak is lost, however many steps there are. Storages lie on each other in one fixed order.
// What is too low to be seen is painted on top of the others, as one band.

const SMALL = -2;
const LEAST_PIXELS = 1.5;

// The step that each column shows.
function shownSteps(graph, view, width) {
  const shown = new Int32Array(width);
  const each = (view.to - view.from) / width;
  for (let column = 0; column < width; column++) {
    const first = within(Math.floor(view.from + column * each), 0, graph.steps - 1);
    const end = within(Math.floor(view.from + (column + 1) * each), first + 1, graph.steps);
    let best = first;
    for (let step = first + 1; step < end; step++) {
      if (graph.timeline[step] > graph.timeline[best]) best = step;
    }
    shown[column] = best;
  }
  return shown;
}

// The first column that shows ``step`` or a later one.
function firstColumn(shown, step) {
  let low = 0, high = shown.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (shown[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low;
}

// ``colours.of`` gives a storage's colour as [red, green, blue]; ``stressed`` are never small.
function paint(graph, view, width, height, ratio, colours, stressed) {
  const pixels = new Uint32Array(width * height).fill(packed(colours.plot));
  const owner = new Int32Array(width * height).fill(NONE);
  const shown = shownSteps(graph, view, width);
  const top = new Float64Array(width);
  const scale = height / (view.high - view.low);
  const least = (LEAST_PIXELS * ratio) / scale;
  const isSmall = (i) => graph.bytes[i] < least && !stressed(i);
  const band = (storage, mark, colour) => {
    const from = firstColumn(shown, graph.start[storage]);
    const end = firstColumn(shown, graph.stop[storage]);
    const fill = packed(colour), edge = packed(mixed(colour, colours.plot, 0.45));
    const wide = end - from > 4 * ratio;
    for (let column = from; column < end; column++) {
      const low = top[column], high = low + graph.bytes[storage];
      top[column] = high;
      if (high <= view.low || low >= view.high) continue;
      const first = Math.max(Math.ceil(height - (high - view.low) * scale - 0.5), 0);
      const last = Math.min(Math.ceil(height - (low - view.low) * scale - 0.5), height);
      const lined = last - first > 3 * ratio;
      for (let row = first; row < last; row++) {
        const isEdge = lined && (row === first || (wide && column === from));
        pixels[row * width + column] = isEdge && mark !== SMALL ? edge : fill;
        owner[row * width + column] = mark;
      }
    }
  };
  const small = [];
  for (const storage of graph.order) {
    if (!graph.bytes[storage]) continue;
    if (isSmall(storage)) small.push(storage);
    else band(storage, storage, colours.of(storage));
  }
  for (const storage of small) band(storage, SMALL, colours.small);
  return { pixels, owner, shown, width, height, isSmall };
}

function packed([red, green, blue]) {
  return (255 << 24 | blue << 16 | green << 8 | red) >>> 0;
}

function mixed(colour, other, part) {
  return colour.map((value, i) => Math.round(value * (1 - part) + other[i] * part));
}

// --- colours ---------------------------------------------------------------------------------

const THEMED = new Map();  // emptied when the theme changes

// A colour of the style sheet, as it is in the theme that is shown.
function themed(name) {
  if (!THEMED.has(name)) {
    const probe = make("span");
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    const text = getComputedStyle(probe).color;
    probe.remove();
    THEMED.set(name, text.match(/[\d.]+/g).slice(0, 3).map(Number));
  }
  return THEMED.get(name);
}

const OF_MODULES = ["saved", "again", "backward", "end", "moved", "forward", "scratch"];

class Colours {
  constructor(graph, by, matches, selected) {
    const basic = new Map();
    const named = (name) => {
      if (!basic.has(name)) basic.set(name, themed(name));
      return basic.get(name);
    };
    this.plot = named("plot");
    this.small = matches ? mixed(named("small"), this.plot, 0.6) : named("small");
    const byModule = (storage) => {
      const module = graph.names.module[graph.name[storage]];
      if (!graph.names.modules[module]) return "resident";
      return OF_MODULES[module % OF_MODULES.length];
    };
    const byKind = (storage) => graph.kinds[graph.kind[storage]].key;
    const nameOf = by === "module" ? byModule : byKind;
    const shades = new Map();
    // Neighbours differ a little, so that one can be told from the next.
    const shade = (name, which, faint) => {
      const key = `${name} ${which} ${faint}`;
      if (!shades.has(key)) {
        const tinted = mixed(named(name), this.plot, which * 0.13);
        shades.set(key, faint ? mixed(tinted, this.plot, 0.8) : tinted);
      }
      return shades.get(key);
    };
    this.of = (storage) => {
      const faint = matches !== null && !matches[storage] && storage !== selected;
      return shade(nameOf(storage), graph.name[storage] % 3, faint);
    };
  }
}
