// What the engine does, while this page is looked at.

import { call, events } from "./api.js";

const MAX_STEPS = 300;
const COLUMN = 3; // pixels a step is wide
const STATES = { w: "waiting", p: "prefill", d: "decode", o: "offloaded", x: "reset" };
// Of a row's height: those that do not run are thin, so that colour is not all that tells.
const HEIGHTS = { w: 0.3, p: 1, d: 1, o: 0.5, x: 0.3 };
const STRIP = 34; // pixels for the tokens of each step
const TABLE_ROWS = 20;
const byId = (id) => document.getElementById(id);
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class EngineView {
  #steps = [];
  #numSteps = 0;
  #latest = null;
  #drawn = 0;
  #told = 0;
  #due = false;

  constructor() {
    byId("tables").addEventListener("toggle", () => this.#latest && this.#fillTables());
    const redraw = () => this.#draw();
    new ResizeObserver(redraw).observe(byId("steps"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  }

  // Watches for as long as the page is open and seen, and tries again when the connection ends.
  async run() {
    for (;;) {
      let wait = 2000;
      await seen();
      const watching = new AbortController();
      const leave = () => watching.abort();
      for (const event of ["visibilitychange", "keychange"]) document.addEventListener(event, leave, { once: true });
      try {
        await this.#watch(watching.signal);
        this.#lost("not connected");
      } catch (error) {
        this.#lost(error.message);
        if (error.status === 401) wait = 60000; // or until the key changes
      }
      for (const event of ["visibilitychange", "keychange"]) document.removeEventListener(event, leave);
      if (!watching.signal.aborted) await pause(wait);
    }
  }

  async #watch(signal) {
    const response = await call("engine/events", { signal });
    this.#steps = [];
    this.#numSteps = 0;
    for await (const data of events(response)) this.#take(JSON.parse(data));
  }

  #lost(why) {
    if (document.hidden) return;
    byId("connection").textContent = why;
    byId("connection").className = "lost";
  }

  #take(snapshot) {
    if (byId("connection").className !== "live") {
      byId("connection").textContent = "live";
      byId("connection").className = "live";
    }
    const first = snapshot.num_steps - snapshot.steps.length;
    if (first !== this.#numSteps) this.#steps = [];
    this.#steps = [...this.#steps, ...snapshot.steps].slice(-MAX_STEPS);
    this.#numSteps = snapshot.num_steps;
    this.#latest = snapshot;
    if (this.#due) return;
    this.#due = true;
    const wait = calm.matches ? 1000 - (performance.now() - this.#drawn) : 0;
    setTimeout(() => requestAnimationFrame(() => this.#show()), Math.max(0, wait));
  }

  #show() {
    this.#due = false;
    this.#drawn = performance.now();
    const now = this.#latest;
    byId("tokens-rate").textContent = rounded(now.tokens_per_second);
    byId("steps-rate").textContent = rounded(now.steps_per_second);
    byId("first-token").textContent = now.first_token_seconds === null ? "–" : seconds(now.first_token_seconds);
    byId("hits").textContent = now.prefix_hit_share === null ? "–" : percent(now.prefix_hit_share);
    this.#showCounts(now);
    showCache(now.cache);
    this.#draw();
    if (performance.now() - this.#told < 1000) return;
    this.#told = performance.now(); // words change once a second: faster nobody reads them
    byId("summary").textContent = this.#summary();
    this.#fillTables();
  }

  #showCounts(now) {
    const number = (state) => now.requests.filter((request) => request[1] === state).length;
    const [prefill, reset] = [number("prefill"), number("reset")];
    const counts = {
      waiting: Math.max(0, now.waiting - reset),
      prefill,
      decode: Math.max(0, now.running - prefill),
      offloaded: now.offloaded,
      reset,
    };
    document.querySelector("#legend .reset").hidden = reset === 0;
    for (const [state, count] of Object.entries(counts)) {
      document.querySelector(`#legend .${state} b`).textContent = count;
    }
  }

  #summary() {
    const steps = this.#steps;
    if (!steps.length) return "No steps yet.";
    const total = steps.reduce((sum, [, milliseconds]) => sum + milliseconds, 0);
    const tokens = steps.reduce((sum, [, , count]) => sum + count, 0);
    const most = Math.max(...steps.map(([column]) => running(column)));
    return `The last ${steps.length} steps: ${(total / steps.length).toFixed(1)} ms and ` +
      `${(tokens / steps.length).toFixed(1)} tokens a step, at most ${most} ${most === 1 ? "request" : "requests"} at once.`;
  }

  #fillTables() {
    if (!byId("tables").open) return;
    const requests = this.#latest.requests.map((facts) => [...facts.slice(0, -1), facts.at(-1).toFixed(1)]);
    fill(byId("request-rows"), requests);
    const newest = this.#steps.slice(-TABLE_ROWS).reverse();
    fill(byId("step-rows"), newest.map(([column, milliseconds, tokens, waiting], index) =>
      [this.#numSteps - index, count(column, "p"), count(column, "d"), waiting, tokens, milliseconds.toFixed(1)]));
  }

  #draw() {
    const canvas = byId("steps");
    const { clientWidth: width, clientHeight: height } = canvas;
    const scale = devicePixelRatio;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const steps = this.#steps.slice(-Math.floor(width / COLUMN));
    const left = width - steps.length * COLUMN; // the newest is at the right edge
    if (!steps.length) return;
    drawRows(context, steps.map(([column]) => column), left, height - STRIP - 6);
    drawTokens(context, steps.map(([, , tokens]) => tokens), left, width, height);
  }
}

function drawRows(context, columns, left, height) {
  const used = Math.max(0, ...columns.map((column) => column.length));
  const pitch = height / [8, 12, 16, 24, 32, 48, 64].find((rows) => rows >= used);
  const thickness = pitch > 4 ? pitch - Math.max(1, pitch * 0.2) : pitch;
  const colours = Object.fromEntries(Object.entries(STATES).map(([letter, name]) => [letter, colour(`--${name}`)]));
  for (let row = 0; row < used; row++) {
    const at = (index) => columns[index][row] ?? " ";
    for (let start = 0, end; start < columns.length; start = end) {
      const state = at(start).toLowerCase();
      end = start + 1;
      while (end < columns.length && !isLast(at(end - 1)) && at(end).toLowerCase() === state) end++;
      if (!(state in STATES)) continue;
      const tall = thickness * HEIGHTS[state];
      const wide = (end - start) * COLUMN - (isLast(at(end - 1)) ? 1 : 0); // a gap before the row's next request
      context.fillStyle = colours[state];
      context.fillRect(left + start * COLUMN, row * pitch + (thickness - tall) / 2, wide, tall);
    }
  }
}

// A capital letter is a request's last step.
function isLast(letter) {
  return letter !== letter.toLowerCase();
}

function drawTokens(context, tokens, left, width, height) {
  const most = Math.max(1, ...tokens);
  context.fillStyle = colour("--line");
  context.fillRect(0, height - 1, width, 1);
  context.fillStyle = colour("--batch");
  tokens.forEach((count, index) => {
    const tall = (count / most) * (STRIP - 12);
    context.fillRect(left + index * COLUMN, height - 1 - tall, COLUMN - 0.5, tall);
  });
  context.fillStyle = colour("--muted");
  context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  context.textBaseline = "top";
  context.fillText(`tokens a step, up to ${most}`, 0, height - STRIP - 2);
}

function showCache({ used, blank }) {
  const idle = Math.max(0, 1 - used - blank);
  byId("cache").querySelector(".used").style.width = `${100 * used}%`;
  byId("cache").querySelector(".idle").style.width = `${100 * idle}%`;
  const told = `${percent(used)} owned by requests, ${percent(idle)} idle but cached, ${percent(blank)} blank`;
  if (byId("cache-note").textContent === told) return;
  byId("cache-note").textContent = told;
  byId("cache").setAttribute("aria-label", `Cache: ${told}`);
}

function fill(body, rows) {
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((values, index) => {
    const row = body.rows[index] ?? body.insertRow();
    values.forEach((value, column) => {
      (row.cells[column] ?? row.insertCell()).textContent = value;
    });
  });
}

function count(column, letter) {
  return [...column.toLowerCase()].filter((one) => one === letter).length;
}

function running(column) {
  return count(column, "p") + count(column, "d");
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name);
}

function rounded(value) {
  return value > 0 && value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

function percent(share) {
  return `${Math.round(100 * share)}%`;
}

function seconds(value) {
  return value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(1)} s`;
}

function seen() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}

function pause(milliseconds) {
  return new Promise((resolve) => {
    const wake = () => {
      clearTimeout(timer);
      document.removeEventListener("keychange", wake);
      resolve();
    };
    const timer = setTimeout(wake, milliseconds);
    document.addEventListener("keychange", wake);
  });
}
