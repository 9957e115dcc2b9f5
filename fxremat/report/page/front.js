// The front: the time that each peak costs, the budget and the proven least marked.

const WIDE = 380, HIGH = 300, PAD = { left: 48, right: 14, top: 20, bottom: 38 };

function drawFront(front, budget) {
  const points = front.points;
  const [unit, size] = unitOf(Math.max(...points.map((p) => p.peak_bytes), budget ?? 1));
  const most = Math.max(...points.map((p) => p.peak_bytes), budget ?? 0) * 1.05;
  const added = points.map((p) => 100 * p.added);
  const low = Math.min(0, ...added), room = Math.max(Math.max(...added) - low, 1) * 1.08;
  const x = (bytes) => PAD.left + (bytes / most) * (WIDE - PAD.left - PAD.right);
  const y = (part) => HIGH - PAD.bottom - ((part - low) / room) * (HIGH - PAD.top - PAD.bottom);
  const svg = makeSvg("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img",
    "aria-label": `Added time against peak, ${several(points.length, "plan")}` });
  const text = (at, up, words, more = {}) =>
    svg.append(makeSvg("text", { x: at, y: up, ...more }, words));
  const rule = (kind, x1, y1, x2, y2) =>
    svg.append(makeSvg("line", { class: kind, x1, y1, x2, y2 }));
  const round = (number) => String(Number(number.toPrecision(6)));

  const across = roundStep(most / size, 5), up = roundStep(room, 6);
  for (let k = 0; k * across * size <= most; k++) {
    const at = x(k * across * size);
    rule("grid", at, PAD.top, at, HIGH - PAD.bottom);
    text(at, HIGH - PAD.bottom + 15, round(k * across), { "text-anchor": "middle" });
  }
  for (let k = Math.ceil(low / up); k * up <= low + room; k++) {
    rule("grid", PAD.left, y(k * up), WIDE - PAD.right, y(k * up));
    text(PAD.left - 7, y(k * up) + 4, `${round(k * up)} %`, { "text-anchor": "end" });
  }
  text((PAD.left + WIDE) / 2, HIGH - 6, `peak, ${unit}`, { "text-anchor": "middle" });
  text(PAD.left + 4, PAD.top - 6, "added time");

  // Between two plans, the slower one is what fits.
  const corners = points.flatMap((p, i) => {
    const at = x(p.peak_bytes), high = y(added[i]);
    return i === 0 ? [[at, high]] : [[x(points[i - 1].peak_bytes), high], [at, high]];
  });
  svg.append(makeSvg("polyline", { class: "stairs", points: corners.map(String).join(" ") }));
  const mark = (kind, words, bytes, lift) => {
    const at = x(bytes), left = at > WIDE / 2 || (kind === "least" && at > PAD.left + 150);
    rule(kind, at, PAD.top, at, HIGH - PAD.bottom);
    text(left ? at - 5 : at + 5, lift, `${words} ${formatBytes(bytes)}`,
      { class: "halo", "text-anchor": left ? "end" : "start" });
  };
  const least = front.peak_bound_bytes;
  if (least !== null) mark("least", "proven least", least, HIGH - PAD.bottom - 8);
  if (budget !== null) mark("limit", "budget", budget, PAD.top + 12);
  const chosen = budget === null ? undefined : points.find((p) => p.peak_bytes <= budget);
  const inOrder = points.filter((point) => point !== chosen);
  if (chosen) inOrder.push(chosen);  // over the others
  for (const point of inOrder) {
    const words = `${formatBytes(point.peak_bytes)}, ${formatAdded(point.added)} time`;
    svg.append(makeSvg("circle", { class: point === chosen ? "here" : "plan",
      cx: x(point.peak_bytes), cy: y(100 * point.added), r: point === chosen ? 5.5 : 3.5 },
    makeSvg("title", {}, point === chosen ? `${words}: the fastest within the budget` : words)));
  }
  return svg;
}
