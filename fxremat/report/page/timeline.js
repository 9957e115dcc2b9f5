// The picture of the step: storages as bands over the steps, what has to be known marked in it.

const LEFT = 78, RIGHT = 12, TOP = 24, BOTTOM = 44;

class TimelineChart {
  constructor(holder, page) {
    this.holder = holder;
    this.page = page;
    this.bands = make("canvas", { "aria-hidden": "true" });
    this.over = make("canvas", {
      class: "over", tabindex: "0", role: "application",
      "aria-label": "Memory over the step. Left and right: step. Up and down: storage. Enter: "
        + "select. Plus and minus: zoom. P: peak. 0: all.",
    });
    holder.append(this.bands, this.over);
    this.drag = null;
    this.listen();
  }

  get area() {
    const { clientWidth, clientHeight } = this.holder;
    const width = Math.max(clientWidth - LEFT - RIGHT, 50);
    return new Area(this.page.view, LEFT, TOP, width, clientHeight - TOP - BOTTOM);
  }

  // --- drawing -------------------------------------------------------------------------------

  draw() {
    const { graph, matches, selected, colourBy } = this.page, area = this.area;
    this.bands.style.left = `${LEFT}px`;
    this.bands.style.top = `${TOP}px`;
    const context = sharp(this.bands, area.width, area.height);
    const { width, height } = this.bands, ratio = window.devicePixelRatio || 1;
    const colours = new Colours(graph, colourBy, matches, selected);
    const stressed = (i) => i === selected || (matches !== null && matches[i] === 1);
    this.painted = paint(graph, area.view, width, height, ratio, colours, stressed);
    const bytes = new Uint8ClampedArray(this.painted.pixels.buffer);
    context.putImageData(new ImageData(bytes, width, height), 0, 0);
    this.drawOver();
  }

  drawOver() {
    const { graph, selected, hovered } = this.page, area = this.area;
    const { clientWidth, clientHeight } = this.holder;
    const context = sharp(this.over, clientWidth, clientHeight);
    context.clearRect(0, 0, clientWidth, clientHeight);
    drawAxes(context, area, graph.steps);
    context.save();
    context.beginPath();
    context.rect(area.left, area.top - TOP, area.width, area.height + TOP);
    context.clip();
    if (hovered && hovered.storage >= 0) this.outline(context, hovered.storage, 1.5);
    if (selected !== NONE) this.outline(context, selected, 2.5);
    this.drawLines(context, area);
    if (hovered) this.drawCursor(context, area, hovered.step);
    if (this.drag?.band) this.drawDrag(context, area);
    context.restore();
    this.drawSpans(context, area);
  }

  drawLines(context, area) {
    const { graph } = this.page, { raw } = graph, text = rgb("text"), quiet = rgb("quiet");
    context.lineWidth = 1.2;
    context.strokeStyle = text;
    lineOver(context, area, graph.timeline);
    if (graph.plain.length) {
      context.save();
      context.lineWidth = 1.8;
      context.strokeStyle = quiet;
      context.setLineDash([6, 3]);
      lineOver(context, area, graph.plain, positionInPlain(graph));
      context.restore();
    }
    const border = Math.round(area.x(raw.forward_steps)) + 0.5;
    if (raw.forward_steps > 0 && raw.forward_steps < graph.steps) {
      context.strokeStyle = text;
      context.setLineDash([2, 3]);
      line(context, border, area.top - 16, border, area.top + area.height);
      context.setLineDash([]);
      label(context, "forward", border - 7, area.top - 9, quiet, "right");
      label(context, "backward", border + 7, area.top - 9, quiet);
    }
    this.drawBudget(context, area);
    this.drawPeak(context, area);
  }

  drawBudget(context, area) {
    const { graph } = this.page, budget = graph.raw.budget_bytes;
    if (budget === null || budget > area.view.high) return;
    const y = Math.round(area.y(budget)) + 0.5, colour = rgb("budget");
    context.strokeStyle = colour;
    context.lineWidth = 1.6;
    context.setLineDash([9, 4]);
    line(context, area.left, y, area.left + area.width, y);
    context.setLineDash([]);
    const onRight = area.x(graph.peakStep) < area.left + area.width / 2;
    const x = onRight ? area.left + area.width - 8 : area.left + 8;
    label(context, `budget ${formatBytes(budget)}`, x, y - 6, colour, onRight ? "right" : "left");
  }

  drawPeak(context, area) {
    const { graph } = this.page, text = rgb("text");
    const x = area.x(graph.peakStep + 0.5), y = area.y(graph.peakBytes);
    if (x < area.left || x > area.left + area.width || y < area.top) return;
    context.fillStyle = text;
    context.beginPath();
    context.moveTo(x, y + 1);
    context.lineTo(x - 5, y + 10);
    context.lineTo(x + 5, y + 10);
    context.fill();
    const right = x > area.left + area.width - 160;
    boxed(context, `peak ${formatBytes(graph.peakBytes)}`, right ? x - 10 : x + 10, y + 8, right);
  }

  drawCursor(context, area, step) {
    context.strokeStyle = rgb("text");
    context.globalAlpha = 0.55;
    context.lineWidth = 1;
    const x = Math.round(area.x(step + 0.5)) + 0.5;
    line(context, x, area.top, x, area.top + area.height);
    context.globalAlpha = 1;
  }

  drawDrag(context, area) {
    const [from, to] = [this.drag.x, this.drag.now].sort((a, b) => a - b);
    context.fillStyle = rgb("accent");
    context.globalAlpha = 0.22;
    context.fillRect(from, area.top, to - from, area.height);
    context.globalAlpha = 1;
  }

  // When the selected storage is live, below the axis, and others of its value.
  drawSpans(context, area) {
    const { graph, selected } = this.page;
    if (selected === NONE) return;
    const bar = (storage, colour) => {
      const from = within(area.x(graph.start[storage]), area.left, area.left + area.width);
      const to = within(area.x(graph.stop[storage]), area.left, area.left + area.width);
      context.fillStyle = colour;
      if (to > area.left && from < area.left + area.width) {
        context.fillRect(from, area.top + area.height + 2, Math.max(to - from, 2), 5);
      }
    };
    for (const other of graph.othersOf(selected)) bar(other, rgb("again"));
    bar(selected, rgb("accent"));
  }

  // Around all pixels of a storage.
  outline(context, storage, thick) {
    const { owner, shown, width, height } = this.painted, { graph } = this.page;
    const ratio = window.devicePixelRatio || 1;
    const from = firstColumn(shown, graph.start[storage]);
    const end = firstColumn(shown, graph.stop[storage]);
    const above = [], below = [];
    for (let column = from; column < end; column++) {
      let first = 0, last = height - 1;
      while (first < height && owner[first * width + column] !== storage) first++;
      while (last > first && owner[last * width + column] !== storage) last--;
      if (first === height) continue;
      const x = LEFT + column / ratio, wide = 1 / ratio;
      above.push([x, TOP + first / ratio], [x + wide, TOP + first / ratio]);
      below.push([x, TOP + (last + 1) / ratio], [x + wide, TOP + (last + 1) / ratio]);
    }
    if (!above.length) return;
    context.beginPath();
    for (const [x, y] of [...above, ...below.reverse()]) context.lineTo(x, y);
    context.closePath();
    context.lineJoin = "round";
    context.lineWidth = thick + 2;
    context.strokeStyle = rgb("plot");
    context.stroke();
    context.lineWidth = thick;
    context.strokeStyle = rgb("text");
    context.stroke();
  }

  // --- pointing ------------------------------------------------------------------------------

  listen() {
    const { over, page } = this;
    over.addEventListener("pointermove", (event) => this.moved(event));
    over.addEventListener("pointerleave", () => this.drag || page.hover(null));
    over.addEventListener("pointerdown", (event) => this.pressed(event));
    over.addEventListener("pointerup", (event) => this.released(event));
    over.addEventListener("pointercancel", () => this.letGo());
    over.addEventListener("dblclick", () => page.showAll());
    over.addEventListener("wheel", (event) => this.wheeled(event), { passive: false });
    over.addEventListener("keydown", (event) => this.typed(event));
    over.addEventListener("blur", () => page.hover(null));
  }

  // The step and the storage at a point; null beside the picture.
  at(x, y) {
    const area = this.area, { graph } = this.page;
    if (!area.holds(x, y) || !graph.steps) return null;
    const { owner, shown, width, height } = this.painted;
    const column = within(Math.floor(((x - area.left) / area.width) * width), 0, width - 1);
    const row = within(Math.floor(((y - area.top) / area.height) * height), 0, height - 1);
    return { step: shown[column], storage: owner[row * width + column], x, y };
  }

  // Where a storage is at a step, for what the keys choose.
  placeOf(step, storage) {
    const area = this.area, { graph } = this.page;
    const { owner, shown, width, height, isSmall } = this.painted;
    const column = within(firstColumn(shown, step), 0, width - 1);
    const mark = storage >= 0 && isSmall(storage) ? SMALL - graph.kind[storage] : storage;
    let row = 0;
    while (row < height && owner[row * width + column] !== mark) row++;
    const y = area.top + (row / height) * area.height;
    return { x: area.x(step + 0.5), y: row === height ? area.y(graph.timeline[step]) : y };
  }

  moved(event) {
    const { offsetX: x, offsetY: y } = event;
    if (this.drag) {
      this.dragged(x, y);
      return;
    }
    this.page.hover(this.at(x, y));
  }

  pressed(event) {
    if (event.button !== 0) return;
    const { offsetX: x, offsetY: y } = event;
    if (!this.area.holds(x, y)) return;
    this.over.setPointerCapture(event.pointerId);
    this.drag = { x, y, now: x, band: false, moving: event.shiftKey, view: { ...this.page.view } };
  }

  dragged(x, y) {
    const { drag, page } = this, area = this.area;
    drag.now = within(x, area.left, area.left + area.width);
    if (Math.abs(x - drag.x) > 4) drag.band = !drag.moving;
    if (drag.moving) {
      const { view } = drag, old = new Area(view, LEFT, TOP, area.width, area.height);
      const steps = old.stepAt(drag.x) - old.stepAt(x);
      const bytes = old.bytesAt(drag.y) - old.bytesAt(y);
      page.show({ from: view.from + steps, to: view.to + steps,
        low: view.low + bytes, high: view.high + bytes });
    } else {
      this.drawOver();
    }
  }

  released(event) {
    const { drag, page } = this, area = this.area;
    if (!drag) return;
    this.letGo();
    if (drag.band) {
      const [from, to] = [drag.x, drag.now].map((x) => area.stepAt(x)).sort((a, b) => a - b);
      page.show({ from, to });
    } else if (!drag.moving) {
      const found = this.at(event.offsetX, event.offsetY);
      if (found) page.choose(found.storage, found.step);
    }
    this.drawOver();
  }

  letGo() {
    this.drag = null;
  }

  wheeled(event) {
    const { page } = this, area = this.area;
    const turned = event.deltaY || event.deltaX;
    const out = turned > 0;
    if (!area.holds(event.offsetX, event.offsetY)) return;
    if (out && page.isAllShown()) return;  // then the wheel scrolls the page
    event.preventDefault();
    const factor = Math.exp(within(turned, -120, 120) / 300);
    if (event.shiftKey) page.zoomBytes(factor, area.bytesAt(event.offsetY));
    else page.zoomSteps(factor, area.stepAt(event.offsetX));
  }

  // --- keys ----------------------------------------------------------------------------------

  typed(event) {
    const { page } = this, { graph, view } = page;
    const step = page.hovered?.step ?? page.step;
    const middle = page.hovered ? step + 0.5 : (view.from + view.to) / 2;
    const part = (view.to - view.from) / 10;
    const acts = {
      ArrowLeft: () => this.point(step - 1), ArrowRight: () => this.point(step + 1),
      ArrowUp: () => this.climb(step, 1), ArrowDown: () => this.climb(step, -1),
      "+": () => page.zoomSteps(0.6, middle), "=": () => page.zoomSteps(0.6, middle),
      "-": () => page.zoomSteps(1 / 0.6, middle), 0: () => page.showAll(),
      p: () => { page.showPeak(); this.point(graph.peakStep); },
      Enter: () => page.choose(page.hovered?.storage ?? NONE, step),
      Escape: () => { page.hover(null); page.choose(NONE, graph.peakStep); },
    };
    if (event.shiftKey && event.key === "ArrowLeft") acts.ArrowLeft = () => page.move(-part);
    if (event.shiftKey && event.key === "ArrowRight") acts.ArrowRight = () => page.move(part);
    const act = acts[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  }

  // Put the cursor of the keys at a step, on the storage it was on if that is live there.
  point(step, storage = this.page.hovered?.storage ?? NONE) {
    const { page } = this, { graph, view } = page;
    if (!graph.steps) return;
    const there = within(step, 0, graph.steps - 1);
    if (there < view.from) page.move(there - view.from);
    if (there + 1 > view.to) page.move(there + 1 - view.to);
    const kept = storage >= 0 && graph.isLive(storage, there) ? storage : NONE;
    page.hover({ step: there, storage: kept, ...this.placeOf(there, kept), aloud: true });
  }

  // The storage above the one that the cursor is on, or below it.
  climb(step, by) {
    const { graph, hovered } = this.page;
    const live = [...graph.order].filter((i) => graph.isLive(i, step) && graph.bytes[i]);
    const now = live.indexOf(hovered?.storage ?? NONE);
    const next = now < 0 ? (by > 0 ? 0 : live.length - 1) : within(now + by, 0, live.length - 1);
    if (live.length) this.point(step, live[next]);
  }
}
