// The page: what is chosen and shown, and what has to be drawn again when that changes.
//
// Part of it is kept in the address, behind #: graph, find, from, to, step, name. So a view can be
// found again.

const FREE_ABOVE = 1.07;  // of the highest line
const LEAST_STEPS = 4;

class Page {
  constructor(data) {
    this.data = data;
    this.graphs = data.graphs.map((raw) => new Graph(raw, data.kinds));
    this.colourBy = "kind";
    this.timeline = new TimelineChart(get("timeline"), this);
    this.overview = new Overview(get("overview"), this);
    this.live = new LiveList(get("live"), this);
    this.table = new StorageTable(get("table"), this);
    this.listen();
    this.open(this.read());
    this.drawFront();
  }

  // --- what is shown -------------------------------------------------------------------------

  // Show a graph; ``given`` says what of it, as the address does.
  open(given) {
    const number = Number(given.get("graph") ?? 0);
    const index = Math.max(this.graphs.findIndex((g) => g.raw.graph === number), 0);
    this.graph = this.graphs[index];
    const { graph } = this;
    this.all = { from: 0, to: Math.max(graph.steps, 1), low: 0, high: this.top() };
    this.view = { ...this.all };
    const step = Number(given.get("step") ?? graph.peakStep) || 0;
    this.step = within(step, 0, Math.max(graph.steps - 1, 0));
    this.selected = NONE;
    this.hovered = null;
    get("graph").value = String(graph.raw.graph);
    get("find").value = given.get("find") ?? "";
    if (given.has("from") && given.has("to")) {
      this.view = this.kept({ from: Number(given.get("from")), to: Number(given.get("to")) });
    }
    const name = graph.names.name.indexOf(given.get("name"));
    if (name !== NONE) this.selected = graph.name.indexOf(name);
    this.find();
    this.drawFigures();
    this.drawLegend();
  }

  top() {
    const { graph } = this, budget = graph.raw.budget_bytes ?? 0;
    const lines = Math.max(graph.peakBytes, graph.plainPeak, 1);
    return FREE_ABOVE * (budget < 3 * lines ? Math.max(lines, budget) : lines);
  }

  // A view inside of the whole one; what is not given stays as it is.
  kept(wanted) {
    const { all } = this, view = { ...this.view, ...wanted };
    const fit = (low, high, least, most) => {
      const size = within(high - low, Math.min(least, most), most);
      const start = within((low + high - size) / 2, 0, most - size);
      return [start, start + size];
    };
    [view.from, view.to] = fit(view.from, view.to, LEAST_STEPS, all.to);
    [view.low, view.high] = fit(view.low, view.high, all.high / 1e6, all.high);
    return view;
  }

  show(wanted) {
    this.view = this.kept(wanted);
    this.draw();
  }

  move(steps) {
    this.show({ from: this.view.from + steps, to: this.view.to + steps });
  }

  zoomSteps(factor, around) {
    const { from, to } = this.view;
    this.show({ from: around + (from - around) * factor, to: around + (to - around) * factor });
  }

  zoomBytes(factor, around) {
    const { low, high } = this.view;
    this.show({ low: around + (low - around) * factor, high: around + (high - around) * factor });
  }

  showAll() {
    this.show(this.all);
  }

  showPeak() {
    const { graph } = this, half = Math.max(graph.steps / 20, 10);
    const [from, to] = [graph.peakStep - half, graph.peakStep + half];
    this.show({ from, to, low: 0, high: this.all.high });
    this.pin(graph.peakStep);
  }

  isAllShown() {
    return ["from", "to", "low", "high"].every((key) => this.view[key] === this.all[key]);
  }

  // --- what is chosen ------------------------------------------------------------------------

  // ``reveal``: it was chosen in a list, so the picture has to show where it is.
  choose(storage, step, reveal = false) {
    this.selected = storage >= 0 ? storage : NONE;
    const { graph, view } = this;
    if (reveal && this.selected !== NONE) {
      const [start, stop] = [graph.start[storage], graph.stop[storage]];
      if (stop <= view.from || start >= view.to) {
        const half = (view.to - view.from) / 2, middle = (start + stop) / 2;
        this.view = this.kept({ from: middle - half, to: middle + half });
      }
    }
    this.pin(step);
    if (!reveal && this.selected !== NONE) {
      this.live.rows.reveal(storage);
      this.table.rows.reveal(storage);
    }
    this.draw();
  }

  // The step whose storages are listed.
  pin(step) {
    const moved = this.step !== step;
    this.step = step;
    if (moved) this.live.put();
    this.drawLiveTitle();
  }

  find() {
    const query = get("find").value, { graph } = this;
    this.matches = graph.matching(query);
    if (this.matches) {
      const hits = this.matches.reduce((sum, hit) => sum + hit, 0);
      const most = graph.steps ? this.matches.reduce((sum, hit, i) =>
        sum + (hit && graph.isLive(i, graph.peakStep) ? graph.bytes[i] : 0), 0) : 0;
      get("found").textContent = `${formatCount(hits)} of ${several(graph.count, "storage")}`
        + `, ${formatBytes(most)} at the peak`;
    } else {
      get("found").textContent = "";
    }
    this.recolour();
    this.live.put();
    this.table.put();
    this.drawLiveTitle();
    this.draw();
  }

  recolour() {
    this.colours = new Colours(this.graph, this.colourBy, null, NONE);
  }

  hover(found) {
    this.hovered = found;
    this.timeline.drawOver();
    this.drawTip();
  }

  // --- drawing -------------------------------------------------------------------------------

  draw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.timeline.draw();
      this.overview.draw();
      this.live.rows.draw();
      this.table.rows.draw();
      this.drawSelected();
      this.write();
    });
  }

  drawFigures() {
    const { raw } = this.graph, budget = raw.budget_bytes, peak = raw.counted_peak_bytes;
    const counted = raw.count === "reserved" && raw.predicted_reserved_bytes !== null;
    const figures = [
      ["Budget", budget === null ? "none" : formatBytes(budget),
        raw.minimum_peak_bytes === null ? ""
          : `the least is ${formatBytes(raw.minimum_peak_bytes)}`],
      [counted ? "Predicted peak, reserved" : "Predicted peak", formatBytes(peak),
        budget === null ? "" : `${formatShare(peak / budget)} of the budget`],
      counted && ["Predicted peak, allocated", formatBytes(raw.predicted_peak_bytes),
        `${formatBytes(peak - raw.predicted_peak_bytes)} reserved but unused`],
      ["Store-all peak", formatBytes(raw.store_all_peak_bytes), "if nothing were recomputed"],
      ["Added time", formatAdded(raw.time_overhead), "over running every op once, planned"],
      ["Recomputed", formatBytes(raw.recomputed_bytes), several(raw.runs_again, "extra run")],
      raw.moves > 0 && ["Moved", formatBytes(raw.moved_bytes), several(raw.moves, "time")],
      ["Saved", formatBytes(raw.saved_bytes), "from forward to backward"],
      ["Resident", formatBytes(raw.resident_bytes), raw.held_bytes
        ? `and ${formatBytes(raw.held_bytes)} outside` : "there throughout"],
    ].filter(Boolean);
    get("figures").replaceChildren(...figures.map(([what, number, more]) => make("div",
      { class: "figure" }, make("div", { class: "what" }, what),
      make("div", { class: "number" }, number), make("div", { class: "more" }, more))));
    get("graph-name").textContent = `graph ${raw.graph}`
      + ` · ${several(raw.nodes, "node")} · ${several(this.graph.steps, "step")} · ${raw.solver}`;
  }

  drawLegend() {
    const { graph, colourBy } = this;
    const entry = (mark, text) => make("span", {}, mark, text);
    const stroke = (colour, style) => {
      const made = make("span", { class: "line" });
      made.style.borderTop = `2px ${style} ${rgb(colour)}`;
      return made;
    };
    const there = new Set(graph.kind);
    const kinds = graph.kinds.filter((_, i) => there.has(i));
    const entries = colourBy === "kind"
      ? kinds.map((kind) => entry(swatch(themed(kind.key)), kind.text)) : [];
    if (colourBy === "module") entries.push(entry(swatch(themed("small")), "small ones together"));
    if (graph.plain.length) entries.push(entry(stroke("quiet", "dashed"), "store-all: every op once"));
    const budget = graph.raw.budget_bytes;
    if (budget !== null) {
      const words = budget > this.all.high ? `budget, ${formatBytes(budget)}: above` : "budget";
      entries.push(entry(stroke("budget", "dashed"), words));
    }
    get("legend").replaceChildren(...entries);
  }

  drawLiveTitle() {
    const { graph, step } = this, atPeak = step === graph.peakStep;
    const total = graph.steps ? formatBytes(graph.timeline[step]) : "0 B";
    const which = atPeak ? "the peak, step" : "step";
    get("live-title").textContent = `Live at ${which} ${formatCount(step)}: ${total}`;
    get("back-to-peak").hidden = atPeak;
  }

  drawSelected() {
    const { graph, selected } = this, box = get("selected");
    if (selected === NONE) {
      const words = "Click a storage in the picture or in a list.";
      box.replaceChildren(make("p", { class: "empty" }, words));
      return;
    }
    const parts = [make("p", { class: "name" }, graph.names.name[graph.name[selected]]),
      definitions(graph.facts(selected))];
    const others = graph.othersOf(selected);
    if (others.length) {
      parts.push(make("p", { class: "hint" }, "Other storages of the same value:"));
      for (const other of others.slice(0, 8)) {
        const [name, first, last] = [graph.names.name[graph.name[other]],
          graph.start[other], graph.stop[other] - 1];
        const words = `${name}, ${steps(first, last)}`;
        parts.push(make("button", { type: "button",
          onclick: () => this.choose(other, this.step, true) }, words));
      }
    }
    box.replaceChildren(...parts);
  }

  drawTip() {
    const tip = get("tip"), { graph, hovered } = this;
    tip.hidden = !hovered;
    if (!hovered) return;
    const { step, storage } = hovered, done = graph.doneAt(step);
    const parts = [];
    if (storage >= 0) {
      parts.push(make("div", { class: "name" }, graph.names.name[graph.name[storage]]),
        definitions(graph.facts(storage)));
    } else if (storage <= SMALL) {
      const { isSmall } = this.timeline.painted, kind = SMALL - storage;
      const small = graph.liveAt(step).filter((i) => graph.kind[i] === kind && isSmall(i));
      const bytes = small.reduce((sum, i) => sum + graph.bytes[i], 0);
      parts.push(make("div", { class: "name" },
        `${several(small.length, "small storage")}, ${formatBytes(bytes)} together`),
      make("div", {}, `${graph.kinds[kind].text}; zoom in to part them`));
    }
    const live = formatBytes(graph.timeline[step]);
    const words = `Step ${formatCount(step)}${done ? `, ${done}` : ""}: ${live} live`;
    parts.push(make("div", { class: "hint" }, words));
    tip.replaceChildren(...parts);
    const box = get("timeline").getBoundingClientRect();
    const x = box.left + hovered.x, y = box.top + hovered.y;
    const isFar = x + 18 + tip.offsetWidth > window.innerWidth;
    const lowest = Math.max(window.innerHeight - tip.offsetHeight - 4, 4);
    tip.style.left = `${Math.max(isFar ? x - 18 - tip.offsetWidth : x + 18, 4)}px`;
    tip.style.top = `${within(y + 14, 4, lowest)}px`;
    if (hovered.aloud) get("said").textContent = tip.innerText.replace(/\s+/g, " ");
  }

  drawFront() {
    const { front } = this.data;
    if (!front || !front.points.length) return;
    get("front-card").hidden = false;
    get("front").replaceChildren(drawFront(front, front.budget_bytes));
  }

  // --- the address ---------------------------------------------------------------------------

  read() {
    return new URLSearchParams(location.hash.slice(1));
  }

  write() {
    const { graph, view, all } = this, kept = new URLSearchParams();
    if (this.graphs.length > 1) kept.set("graph", graph.raw.graph);
    if (get("find").value) kept.set("find", get("find").value);
    if (view.from !== all.from || view.to !== all.to) {
      kept.set("from", view.from.toFixed(2));
      kept.set("to", view.to.toFixed(2));
    }
    if (this.step !== graph.peakStep) kept.set("step", this.step);
    if (this.selected !== NONE) kept.set("name", graph.names.name[graph.name[this.selected]]);
    const text = String(kept);
    if (text !== location.hash.slice(1)) history.replaceState(null, "", text ? `#${text}` : "#");
  }

  // --- what the user does --------------------------------------------------------------------

  listen() {
    const middle = () => (this.view.from + this.view.to) / 2;
    const on = (id, kind, act) => get(id).addEventListener(kind, act);
    on("in", "click", () => this.zoomSteps(0.5, middle()));
    on("out", "click", () => this.zoomSteps(2, middle()));
    on("to-peak", "click", () => this.showPeak());
    on("all", "click", () => this.showAll());
    on("back-to-peak", "click", () => { this.pin(this.graph.peakStep); this.draw(); });
    on("find", "input", () => this.find());
    on("colour", "change", (event) => {
      this.colourBy = event.target.value;
      this.retheme();
    });
    on("graph", "change", (event) =>
      this.open(new URLSearchParams({ graph: event.target.value, find: get("find").value })));
    on("theme", "click", () => {
      document.documentElement.dataset.theme = isDark() ? "light" : "dark";
      this.retheme();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.retheme());
    window.addEventListener("hashchange", () => this.open(this.read()));
    new ResizeObserver(() => this.draw()).observe(get("timeline"));
    get("graph").append(...this.graphs.map(({ raw }) => make("option", { value: raw.graph },
      `${raw.graph}: peak ${formatBytes(raw.counted_peak_bytes)}`)));
    get("graph-choice").hidden = this.graphs.length < 2;
    nameTheme();
  }

  retheme() {
    THEMED.clear();
    nameTheme();
    this.recolour();
    this.drawLegend();
    this.draw();
  }
}

function definitions(facts) {
  const pairs = facts.flatMap(([word, text]) => [make("dt", {}, word), make("dd", {}, text)]);
  return make("dl", {}, ...pairs);
}

function isDark() {
  const { theme } = document.documentElement.dataset;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

// The button says what it does.
function nameTheme() {
  get("theme").textContent = isDark() ? "Light" : "Dark";
}

const DATA = JSON.parse(get("data").textContent);
let page = null;
if (DATA.graphs.length) {
  page = new Page(DATA);
} else {
  get("nothing").hidden = false;
  for (const part of document.querySelectorAll("main > :not(#nothing)")) part.hidden = true;
}
