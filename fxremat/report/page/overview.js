// The whole step, small: which stretch of it the picture shows, to be moved or drawn anew.

class Overview {
  constructor(holder, page) {
    this.holder = holder;
    this.page = page;
    this.canvas = make("canvas", { class: "over", "aria-hidden": "true" });
    holder.append(this.canvas);
    this.drag = null;
    this.canvas.addEventListener("pointerdown", (event) => this.pressed(event));
    this.canvas.addEventListener("pointermove", (event) => this.moved(event));
    this.canvas.addEventListener("pointerup", () => { this.drag = null; });
    this.canvas.addEventListener("pointercancel", () => { this.drag = null; });
  }

  get area() {
    const { graph, all } = this.page;
    const width = Math.max(this.holder.clientWidth - LEFT - RIGHT, 50);
    const view = { from: 0, to: graph.steps, low: 0, high: all.high };
    return new Area(view, LEFT, 2, width, this.holder.clientHeight - 6);
  }

  draw() {
    const { graph, view } = this.page, area = this.area;
    const { clientWidth, clientHeight } = this.holder;
    const context = sharp(this.canvas, clientWidth, clientHeight);
    const bottom = area.top + area.height;
    context.clearRect(0, 0, clientWidth, clientHeight);
    context.fillStyle = rgb("plot");
    context.fillRect(area.left, area.top, area.width, area.height);
    context.fillStyle = rgb("small");
    for (let pixel = 0; pixel < area.width; pixel++) {
      const from = area.stepAt(area.left + pixel), to = area.stepAt(area.left + pixel + 1);
      const y = area.y(highest(graph.timeline, from, to));
      context.fillRect(area.left + pixel, y, 1.05, bottom - y);
    }
    context.strokeStyle = rgb("quiet");
    context.setLineDash([4, 2]);
    lineOver(context, area, graph.plain, positionInPlain(graph));
    context.setLineDash([]);
    const left = area.x(view.from), right = area.x(view.to);
    context.fillStyle = rgb("accent");
    context.globalAlpha = 0.16;
    context.fillRect(left, area.top, right - left, area.height);
    context.globalAlpha = 1;
    context.strokeStyle = rgb("accent");
    context.lineWidth = 1.5;
    context.strokeRect(left, area.top, Math.max(right - left, 2), area.height);
    context.fillStyle = rgb("quiet");
    context.font = "11.5px system-ui, sans-serif";
    context.textAlign = "right";
    context.fillText("whole step", area.left - 8, area.top + area.height / 2 + 4);
  }

  pressed(event) {
    const { view, graph } = this.page, step = this.area.stepAt(event.offsetX);
    this.canvas.setPointerCapture(event.pointerId);
    const whole = view.to - view.from >= graph.steps;
    const inside = step >= view.from && step <= view.to && !whole;
    this.drag = inside ? { step, from: view.from } : { start: step };
  }

  moved(event) {
    if (!this.drag) return;
    const { page, drag } = this, step = this.area.stepAt(event.offsetX);
    if (drag.start === undefined) page.move(drag.from + step - drag.step - page.view.from);
    else page.show({ from: Math.min(drag.start, step), to: Math.max(drag.start, step) });
  }
}
