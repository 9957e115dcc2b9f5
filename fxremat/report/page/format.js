"use strict";
// Numbers as people read them, and elements whose texts are never HTML.

const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];

// The largest binary unit of which there is at least one.
function unitOf(bytes) {
  return UNITS.find(([, size]) => Math.abs(bytes) >= size) ?? ["B", 1];
}

function formatBytes(bytes) {
  const [unit, size] = unitOf(bytes);
  return size === 1 ? `${bytes} B` : `${(bytes / size).toFixed(2)} ${unit}`;
}

function formatCount(count) {
  return count.toLocaleString("en-US");
}

function formatShare(part) {
  return `${(100 * part).toFixed(part && Math.abs(part) < 0.001 ? 2 : 1)} %`;
}

function formatAdded(part) {
  return `${part < 0 ? "−" : "+"}${formatShare(Math.abs(part))}`;
}

function several(count, one, many = `${one}s`) {
  return `${formatCount(count)} ${count === 1 ? one : many}`;
}

function steps(first, last) {
  return first === last ? `step ${formatCount(first)}`
    : `steps ${formatCount(first)} to ${formatCount(last)}`;
}

// The least of 1, 2, 5, 10, 20 ... that cuts a range into at most so many parts.
function roundStep(range, most) {
  let power = 10 ** Math.floor(Math.log10(Math.max(range / most, 1e-12)));
  for (const factor of [1, 2, 5, 10]) {
    if (range / (power * factor) <= most) return power * factor;
  }
  return power * 10;
}

function make(kind, attributes = {}, ...children) {
  const made = document.createElement(kind);
  return fill(made, attributes, children);
}

function makeSvg(kind, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", kind), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== undefined));
  return element;
}

function get(id) {
  return document.getElementById(id);
}

function within(value, low, high) {
  return Math.min(Math.max(value, low), high);
}
