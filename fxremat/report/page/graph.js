// One graph of the step: its storages as columns, and questions that can be asked of them.

const NONE = -1;
const STACKED = [
  "outside", "resident", "saved", "end", "moved", "again", "forward", "backward", "scratch",
];

class Graph {
  constructor(raw, kinds) {
    this.raw = raw;
    this.kinds = kinds;
    this.names = raw.names;
    this.steps = raw.timeline.length;
    this.timeline = Float64Array.from(raw.timeline);
    this.plain = Float64Array.from(raw.store_all_timeline);
    const columns = raw.storages;
    this.count = columns.bytes.length;
    this.name = Int32Array.from(columns.name);
    this.kind = Uint8Array.from(columns.kind);
    this.bytes = Float64Array.from(columns.bytes);
    this.start = Int32Array.from(columns.start);
    this.stop = Int32Array.from(columns.stop);
    this.peakStep = this.timeline.reduce((best, n, i, all) => (n > all[best] ? i : best), 0);
    this.peakBytes = this.steps ? this.timeline[this.peakStep] : 0;
    this.plainPeak = this.plain.reduce((most, n) => Math.max(most, n), 0);
    this.order = this.stackingOrder();
    this.texts = this.names.name.map((name, i) =>
      [name, this.moduleOf(i), this.sourceOf(i)].join("\n").toLowerCase());
  }

  // Kind after kind; of each, what is there longest lies lowest: what is saved first is freed last,
  // so bands stay in place.
  stackingOrder() {
    const { start, stop, kind } = this;
    const place = this.kinds.map(({ key }) => STACKED.indexOf(key));
    return Int32Array.from({ length: this.count }, (_, i) => i).sort((a, b) =>
      place[kind[a]] - place[kind[b]] || stop[b] - start[b] - (stop[a] - start[a])
      || start[a] - start[b] || a - b);
  }

  moduleOf(name) {
    return this.names.modules[this.names.module[name]];
  }

  sourceOf(name) {
    const file = this.names.files[this.names.file[name]];
    return file ? `${file}:${this.names.line[name]}` : "";
  }

  isLive(storage, step) {
    return this.start[storage] <= step && step < this.stop[storage];
  }

  // Largest first.
  liveAt(step) {
    const live = [];
    for (let i = 0; i < this.count; i++) if (this.isLive(i, step) && this.bytes[i]) live.push(i);
    return live.sort((a, b) => this.bytes[b] - this.bytes[a] || a - b);
  }

  // What the step does: the node that it computes, "" where none is known.
  doneAt(step) {
    const name = this.raw.computed[step] ?? NONE;
    return name === NONE ? "" : this.names.name[name];
  }

  // Which storages have all words of a query in name, module or source; null where it is empty.
  matching(query) {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return null;
    const hit = this.texts.map((text) => words.every((word) => text.includes(word)));
    return Uint8Array.from({ length: this.count }, (_, i) => (hit[this.name[i]] ? 1 : 0));
  }

  // Other storages of the same value: it is computed again, moved, or held in parts.
  othersOf(storage) {
    const value = this.names.value[this.name[storage]];
    const others = [];
    for (let i = 0; i < this.count; i++) {
      if (i !== storage && this.names.value[this.name[i]] === value) others.push(i);
    }
    return others;
  }

  // All that is said of a storage, as pairs of words and text.
  facts(storage) {
    const name = this.name[storage], { names } = this;
    const last = this.stop[storage] - 1, length = this.stop[storage] - this.start[storage];
    const value = names.value[name];
    return [
      ["What", this.kinds[this.kind[storage]].text],
      value !== names.name[name] && ["Copy of", value],
      ["Module", this.moduleOf(name) || "—"],
      ["Source", this.sourceOf(name) || (names.known[name] ? "—" : "temporary of the compiler")],
      ["Bytes", `${formatBytes(this.bytes[storage])} (${formatCount(this.bytes[storage])})`],
      ["Live", length === this.steps ? "in all steps" : `${steps(this.start[storage], last)}`
        + ` (${formatCount(length)} of ${formatCount(this.steps)})`],
      ["Recomputed", names.again[name] ? several(names.again[name], "time") : "never"],
      names.moves[name] > 0 && ["Back from host", several(names.moves[name], "time")],
    ].filter(Boolean);
  }
}
