// Painting the storages, pixel by pixel: each band's colour, and whose pixel it is.
//
// A column of pixels shows one step: of those that fall into it, the one that holds most, so that
// no peak is lost, however many steps there are. Storages lie on each other in one fixed order,
// kind after kind. Those that are too low to be seen lie on the others of their kind, as one band.

const SMALL = -2;  // the owner of such a band is SMALL less the number of its kind
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

  const fillColumn = (column, bytes, mark, fill, edge, isFirst) => {
    const low = top[column], high = low + bytes;
    top[column] = high;
    if (high <= view.low || low >= view.high) return;
    const first = Math.max(Math.ceil(height - (high - view.low) * scale - 0.5), 0);
    const last = Math.min(Math.ceil(height - (low - view.low) * scale - 0.5), height);
    const lined = last - first > 3 * ratio;
    for (let row = first; row < last; row++) {
      const place = row * width + column;
      pixels[place] = lined && (isFirst || row === first) ? edge : fill;
      owner[place] = mark;
    }
  };

  const band = (storage) => {
    const from = firstColumn(shown, graph.start[storage]);
    const end = firstColumn(shown, graph.stop[storage]);
    const colour = colours.of(storage), wide = end - from > 4 * ratio;
    const fill = packed(colour), edge = packed(mixed(colour, colours.plot, 0.5));
    for (let column = from; column < end; column++) {
      fillColumn(column, graph.bytes[storage], storage, fill, edge, wide && column === from);
    }
  };

  // The small ones of one kind, as one band.
  const changes = new Float64Array(width + 1);
  const together = (kind) => {
    const colour = packed(colours.together(kind));
    let bytes = 0;
    for (let column = 0; column < width; column++) {
      bytes += changes[column];
      if (bytes) fillColumn(column, bytes, SMALL - kind, colour, colour, false);
    }
    changes.fill(0);
  };

  let kind = NONE, anySmall = false;
  const flush = () => {
    if (anySmall) together(kind);
    anySmall = false;
  };
  for (const storage of graph.order) {
    if (graph.kind[storage] !== kind) flush();
    kind = graph.kind[storage];
    if (!graph.bytes[storage]) continue;
    if (isSmall(storage)) {
      anySmall = true;
      changes[firstColumn(shown, graph.start[storage])] += graph.bytes[storage];
      changes[firstColumn(shown, graph.stop[storage])] -= graph.bytes[storage];
    } else {
      band(storage);
    }
  }
  flush();
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
    this.together = (kind) => {
      const colour = by === "module" ? named("small") : named(graph.kinds[kind].key);
      return mixed(colour, this.plot, matches ? 0.86 : 0.35);
    };
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
      const which = byKind(storage) === "outside" ? 0 : graph.name[storage] % 3;
      return shade(nameOf(storage), which, faint);
    };
  }
}
