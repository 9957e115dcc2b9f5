// Long lists of storages, of which only the rows in sight exist.

const ROW = 26, BEYOND = 6;

class Rows {
  // ``cells`` gives the cells of an item; ``choose`` is called with the item that is chosen.
  constructor(holder, { label: words, height, template, cells, choose, isSelected, colour }) {
    Object.assign(this, { template, cells, choose, isSelected, colour });
    this.items = [];
    this.active = NONE;
    this.id = `rows-${holder.id}`;
    this.room = make("div", { role: "presentation" });
    this.box = make("div", { class: "rows", tabindex: "0", role: "grid", "aria-label": words,
      onscroll: () => this.draw(), onkeydown: (event) => this.typed(event),
      onclick: (event) => this.clicked(event) }, this.room);
    this.box.style.height = `${height}px`;
    holder.append(this.box);
  }

  put(items) {
    this.items = items;
    this.active = NONE;
    this.room.style.height = `${items.length * ROW}px`;
    this.box.setAttribute("aria-rowcount", items.length);
    this.box.scrollTop = 0;
    this.draw();
  }

  draw() {
    const { scrollTop, clientHeight } = this.box;
    const first = Math.max(Math.floor(scrollTop / ROW) - BEYOND, 0);
    const end = Math.min(Math.ceil((scrollTop + clientHeight) / ROW) + BEYOND, this.items.length);
    const rows = [];
    for (let index = first; index < end; index++) rows.push(this.row(index));
    if (!this.items.length) rows.push(make("div", { class: "empty" }, "nothing"));
    this.room.replaceChildren(...rows);
  }

  row(index) {
    const item = this.items[index], classes = ["row"];
    if (this.isSelected(item)) classes.push("selected");
    if (index === this.active) classes.push("active");
    const made = make("div", { class: classes.join(" "), role: "row", id: `${this.id}-${index}`,
      "aria-rowindex": index + 1, "aria-selected": String(this.isSelected(item)),
      "data-index": index }, ...this.cells(item));
    made.style.top = `${index * ROW}px`;
    made.style.gridTemplateColumns = this.template;
    return made;
  }

  // Bring an item in sight; nothing happens where it is not among them.
  reveal(item) {
    const index = this.items.indexOf(item);
    if (index !== NONE) this.activate(index);
  }

  activate(index) {
    this.active = within(index, 0, this.items.length - 1);
    const top = this.active * ROW, { scrollTop, clientHeight } = this.box;
    if (top < scrollTop) this.box.scrollTop = top;
    else if (top + ROW > scrollTop + clientHeight) this.box.scrollTop = top + ROW - clientHeight;
    this.box.setAttribute("aria-activedescendant", `${this.id}-${this.active}`);
    this.draw();
  }

  typed(event) {
    const page = Math.max(Math.floor(this.box.clientHeight / ROW) - 1, 1);
    const to = { ArrowDown: this.active + 1, ArrowUp: this.active - 1, PageDown: this.active + page,
      PageUp: this.active - page, Home: 0, End: this.items.length - 1 }[event.key];
    if (!this.items.length) return;
    if (to !== undefined) this.activate(to);
    else if (event.key === "Enter" && this.active !== NONE) this.choose(this.items[this.active]);
    else return;
    event.preventDefault();
  }

  clicked(event) {
    const row = event.target.closest(".row");
    if (!row) return;
    this.active = Number(row.dataset.index);
    this.choose(this.items[this.active]);
  }
}

function cell(text, kind = "") {
  return make("span", { class: kind, role: "gridcell", title: text }, text);
}

function swatch(colour) {
  const made = make("span", { class: "swatch" });
  made.style.background = `rgb(${colour.join(" ")})`;
  return made;
}

// A name behind the colour of its storage in the picture.
function named(graph, storage, colour) {
  const text = graph.names.name[graph.name[storage]];
  return make("span", { role: "gridcell", title: text }, swatch(colour), text);
}

// What is live at one step, largest first.
class LiveList {
  constructor(holder, page) {
    this.page = page;
    this.rows = new Rows(holder, {
      label: "What is live at the step, largest first",
      height: 300,
      template: "minmax(0, 1.3fr) minmax(0, 1fr) 92px 62px",
      cells: (storage) => this.cells(storage),
      choose: (storage) => page.choose(storage, page.step, true),
      isSelected: (storage) => storage === page.selected,
    });
  }

  cells(storage) {
    const { graph, step, colours } = this.page, name = graph.name[storage];
    const total = graph.timeline[step];
    return [
      named(graph, storage, colours.of(storage)),
      cell([graph.moduleOf(name), graph.sourceOf(name)].filter(Boolean).join(", ")),
      cell(formatBytes(graph.bytes[storage]), "number-cell"),
      cell(formatShare(total ? graph.bytes[storage] / total : 0), "number-cell"),
    ];
  }

  put() {
    const { graph, step, matches } = this.page;
    const live = graph.steps ? graph.liveAt(step) : [];
    this.rows.put(matches ? live.filter((storage) => matches[storage]) : live);
  }
}
