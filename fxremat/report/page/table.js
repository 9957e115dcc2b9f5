// All storages of a graph, or those that are looked for, in an order that is chosen.

const COLUMNS = [
  { head: "Name", wide: "minmax(0, 2fr)", of: (g, i) => g.names.name[g.name[i]] },
  { head: "What", wide: "minmax(0, 1.2fr)", of: (g, i) => g.kinds[g.kind[i]].text },
  { head: "Module", wide: "minmax(0, 1.5fr)", of: (g, i) => g.moduleOf(g.name[i]) },
  { head: "Source", wide: "minmax(0, 1fr)", of: (g, i) => g.sourceOf(g.name[i]),
    key: (g, i) => [g.names.files[g.names.file[g.name[i]]], g.names.line[g.name[i]]] },
  { head: "Bytes", wide: "90px", number: (g, i) => g.bytes[i], shown: formatBytes },
  { head: "Born", wide: "64px", number: (g, i) => g.start[i], shown: formatCount },
  { head: "Freed", wide: "64px", number: (g, i) => g.stop[i], shown: formatCount },
  { head: "Steps", wide: "64px", number: (g, i) => g.stop[i] - g.start[i], shown: formatCount },
  { head: "Again", wide: "58px", number: (g, i) => g.names.again[g.name[i]], shown: dashed },
  { head: "Moves", wide: "58px", number: (g, i) => g.names.moves[g.name[i]], shown: dashed },
];

const TEMPLATE = COLUMNS.map((column) => column.wide).join(" ");

function dashed(count) {
  return count ? formatCount(count) : "–";
}

class StorageTable {
  constructor(holder, page) {
    this.page = page;
    this.by = COLUMNS.findIndex((column) => column.head === "Bytes");
    this.falling = true;
    this.heads = make("div", { class: "heads", role: "row" });
    this.heads.style.gridTemplateColumns = TEMPLATE;
    holder.append(this.heads);
    this.rows = new Rows(holder, {
      label: "All storages",
      height: 380,
      template: TEMPLATE,
      cells: (storage) => this.cells(storage),
      choose: (storage) => page.choose(storage, page.step, true),
      isSelected: (storage) => storage === page.selected,
    });
    this.drawHeads();
  }

  drawHeads() {
    this.heads.replaceChildren(...COLUMNS.map((column, index) => {
      const now = index === this.by;
      const arrow = now ? (this.falling ? " ↓" : " ↑") : "";
      const order = now ? (this.falling ? "descending" : "ascending") : undefined;
      return make("span", { role: "columnheader", "aria-sort": order,
        class: column.number ? "number-cell" : "" },
      make("button", { type: "button", onclick: () => this.sortBy(index) }, column.head + arrow));
    }));
  }

  // Texts rise and numbers fall at first; once more turns the order round.
  sortBy(index) {
    this.falling = index === this.by ? !this.falling : Boolean(COLUMNS[index].number);
    this.by = index;
    this.drawHeads();
    this.put();
    this.heads.querySelectorAll("button")[index].focus();
  }

  cells(storage) {
    const { graph, colours } = this.page;
    return COLUMNS.map((column, index) => {
      if (index === 0) return named(graph, storage, colours.of(storage));
      if (!column.number) return cell(column.of(graph, storage));
      return cell(column.shown(column.number(graph, storage)), "number-cell");
    });
  }

  put() {
    const { graph, matches } = this.page, column = COLUMNS[this.by];
    const items = [];
    for (let i = 0; i < graph.count; i++) if (!matches || matches[i]) items.push(i);
    const turn = this.falling ? -1 : 1;
    if (column.number) {
      const keys = Float64Array.from({ length: graph.count }, (_, i) => column.number(graph, i));
      items.sort((a, b) => turn * (keys[a] - keys[b]) || a - b);
    } else {
      const words = new Intl.Collator("en", { numeric: true });
      const places = this.places(column, words);
      items.sort((a, b) => turn * (places[a] - places[b]) || a - b);
    }
    this.rows.put(items);
    const all = several(graph.count, "storage");
    get("table-title").textContent = matches
      ? `${formatCount(items.length)} of ${all}` : `All ${all}`;
  }

  // Where each storage's text stands among all texts: texts are many times the same.
  places(column, words) {
    const { graph } = this.page, texts = new Map();
    const textOf = (i) => (column.key ? column.key(graph, i).join("\n") : column.of(graph, i));
    for (let i = 0; i < graph.count; i++) texts.set(textOf(i), 0);
    [...texts.keys()].sort(words.compare).forEach((text, place) => texts.set(text, place));
    return Int32Array.from({ length: graph.count }, (_, i) => texts.get(textOf(i)));
  }
}
