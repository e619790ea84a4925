"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const frames = document.querySelectorAll(".frame");
const element = (id) => document.getElementById(id);
const slider = element("slider");
const SECONDS_PER_STEP = 1.6;
let current = 0;
let timer = null;

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = count ? Math.min(units.length - 1, Math.floor(Math.log2(count) / 10)) : 0;
  const value = count / 1024 ** power;
  return `${Number(value.toPrecision(4))} ${units[power]}`;
}

// Such as [0, 1, 2, 5] -> "0-2, 5".
function ranges(numbers) {
  const runs = [];
  for (const number of numbers) {
    const run = runs[runs.length - 1];
    if (run && run[1] === number - 1) run[1] = number;
    else runs.push([number, number]);
  }
  return runs.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(", ");
}

function fill(id, rows) {
  const cells = rows.length ? rows : [["nothing"]];
  element(id).replaceChildren(...cells.map((row) => {
    const line = document.createElement("tr");
    for (const text of row) line.appendChild(document.createElement("td")).textContent = text;
    return line;
  }));
}

function moveRow(move) {
  const sizes = move.sends.map((send) => send[2]);
  const [least, most] = [Math.min(...sizes), Math.max(...sizes)];
  const each = least === most ? bytes(most) : `${bytes(least)} to ${bytes(most)}`;
  const shown = move.sends.slice(0, 12).map(([source, target]) => `${source}→${target}`);
  if (move.sends.length > shown.length) shown.push(`and ${move.sends.length - shown.length} more`);
  const late = move.late ? " (of the step before)" : "";
  return [move.tensors.join(", ") + late, move.kind.replaceAll("_", "-"), move.axis, each, shown.join("  ")];
}

function show(index) {
  current = Math.max(0, Math.min(frames.length - 1, index));
  frames.forEach((frame, i) => frame.classList.toggle("current", i === current));
  const frame = data.frames[current];
  element("title").textContent = frame.title;
  slider.value = current;
  slider.setAttribute("aria-valuetext", frame.title);
  fill("moves", frame.moves.map(moveRow));
  fill("blocks", frame.blocks.map((block) => [
    block.rank, ranges(block.queries), ranges(block.keys), ranges(block.heads), block.pairs.toLocaleString("en")]));
  fill("sent", frame.sent.map((sent) => [
    sent.axis, sent.kind.replaceAll("_", "-"), bytes(sent.total), bytes(sent.busiest)]));
}

function play(on) {
  clearInterval(timer);
  timer = on ? setInterval(() => (current + 1 < frames.length ? show(current + 1) : play(false)), 1000 * SECONDS_PER_STEP) : null;
  document.body.classList.toggle("playing", on);
  element("play").textContent = on ? "❚❚ Pause" : "▶\uFE0E Play";
  element("play").setAttribute("aria-label", on ? "Pause" : "Play");
}

function step(index) {
  play(false);
  show(index);
}

function toggle() {
  if (timer === null && current + 1 === frames.length) show(0);
  play(timer === null);
}

const KEYS = {
  ArrowLeft: () => step(current - 1),
  ArrowRight: () => step(current + 1),
  Home: () => step(0),
  End: () => step(frames.length - 1),
  " ": toggle,
};

document.addEventListener("keydown", (event) => {
  // A button handles Space itself, and the slider all other keys.
  const elementHandlesKey = event.key === " " ? event.target.tagName === "BUTTON" : event.target === slider;
  if (elementHandlesKey || event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key]();
});
slider.addEventListener("input", () => step(Number(slider.value)));
element("first").addEventListener("click", () => step(0));
element("back").addEventListener("click", () => step(current - 1));
element("next").addEventListener("click", () => step(current + 1));
element("play").addEventListener("click", toggle);

// Without scripts, all frames are shown one below the other.
document.body.classList.add("stepping");
document.querySelectorAll("[hidden]").forEach((part) => part.removeAttribute("hidden"));
slider.max = frames.length - 1;
show(Number(location.hash.slice(1)) || 0);
