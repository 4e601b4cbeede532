// A conversation with the model.

import { ApiError, call, events } from "./api.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const byId = (id) => document.getElementById(id);

export class Chat {
  #messages = []; // as the server takes them
  #answering = null; // the AbortController of the answer under way
  #scroll = new Scroll();

  constructor() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#stop();
    });
    byId("stop").addEventListener("click", () => this.#stop());
    byId("again").addEventListener("click", () => this.#regenerate());
    byId("new-chat").addEventListener("click", () => this.#clear());
    byId("settings-form").addEventListener("submit", (event) => event.preventDefault());
  }

  #send() {
    const text = byId("prompt").value;
    if (this.#answering || !text.trim()) return;
    byId("prompt").value = "";
    this.#messages.push({ role: "user", content: text });
    addMessage("user").text.textContent = text;
    this.#scroll.toEnd();
    this.#answer();
  }

  #stop() {
    this.#answering?.abort();
  }

  #regenerate() {
    if (this.#messages.at(-1).role === "assistant") {
      this.#messages.pop();
      byId("conversation").lastElementChild.remove();
    }
    byId("prompt").focus(); // the button is about to be disabled, which would lose the focus
    this.#answer();
  }

  #clear() {
    this.#stop();
    this.#messages = [];
    byId("conversation").replaceChildren();
    byId("error").textContent = "";
    this.#show();
    byId("prompt").focus();
  }

  async #answer() {
    const messages = this.#messages; // another one after "New chat"
    const answering = (this.#answering = new AbortController());
    const answer = new Answer(this.#scroll);
    byId("error").textContent = "";
    this.#show();
    try {
      await answer.stream(request(messages), answering.signal);
    } catch (error) {
      if (messages === this.#messages && error.name !== "AbortError") complain(error);
    }
    this.#answering = null;
    if (answer.end(answering.signal.aborted)) messages.push({ role: "assistant", content: answer.content });
    this.#show();
  }

  #show() {
    const busy = this.#answering !== null;
    const hadFocus = document.activeElement === byId("stop") || document.activeElement === byId("send");
    byId("send").hidden = busy;
    byId("stop").hidden = !busy;
    byId("again").disabled = busy || this.#messages.length === 0;
    byId("welcome").hidden = this.#messages.length > 0;
    if (hadFocus) byId("prompt").focus();
  }
}

// An answer while it comes.
class Answer {
  content = "";
  #message = addMessage("assistant");
  #speaker = new Speaker();
  #started = performance.now();
  #first = 0;
  #latest = 0;
  #usage = null;
  #reason = null;
  #scroll;

  constructor(scroll) {
    this.#scroll = scroll;
  }

  async stream(body, signal) {
    this.#message.item.setAttribute("aria-busy", "true");
    const response = await call("v1/chat/completions", { body, signal });
    for await (const data of events(response)) {
      if (data === "[DONE]") return;
      this.#take(JSON.parse(data));
    }
    throw new ApiError(0, "The connection ended before the answer did.");
  }

  #take(chunk) {
    if (chunk.error) throw new ApiError(0, chunk.error.message);
    this.#usage = chunk.usage ?? this.#usage;
    const choice = chunk.choices[0];
    this.#reason = choice?.finish_reason ?? this.#reason;
    const text = choice?.delta.content;
    if (!text) return;
    this.#latest = performance.now();
    this.#first ||= this.#latest;
    this.content += text;
    this.#message.text.append(text); // a text node: markup stays text
    this.#scroll.follow();
    this.#speaker.push(text);
  }

  // Returns whether there is one, were it empty.
  end(stopped) {
    this.#speaker.finish();
    this.#message.item.removeAttribute("aria-busy");
    this.#message.text.normalize(); // one text node in place of one a token
    this.#message.caption.textContent = this.#describe(stopped);
    const isThere = Boolean(this.content || this.#usage);
    if (!isThere) this.#message.item.remove();
    this.#scroll.follow();
    return isThere;
  }

  #describe(stopped) {
    const told = [];
    if (stopped) told.push("stopped");
    if (this.#reason === "length") told.push("cut: as many tokens as may be");
    if (this.#usage) told.push(`${this.#usage.completion_tokens} tokens`);
    if (this.#first) told.push(`first after ${seconds(this.#first - this.#started)}`);
    const rate = ((this.#usage?.completion_tokens ?? 0) - 1) / ((this.#latest - this.#first) / 1000);
    if (rate > 0 && Number.isFinite(rate)) told.push(`${Math.round(rate)} tokens/s`);
    return told.join(" · ");
  }
}

// Tells a screen reader whole sentences: token by token would be noise.
class Speaker {
  #pending = "";

  constructor() {
    byId("spoken").replaceChildren();
  }

  push(text) {
    this.#pending += text;
    const end = /^[^]*(?:[.!?:;]\s|\n)/.exec(this.#pending)?.[0].length ?? 0;
    this.#say(this.#pending.slice(0, end));
    this.#pending = this.#pending.slice(end);
  }

  finish() {
    this.#say(this.#pending);
    this.#pending = "";
  }

  #say(text) {
    if (!text.trim()) return;
    const piece = document.createElement("p");
    piece.textContent = text;
    byId("spoken").append(piece);
  }
}

function request(messages) {
  const given = new FormData(byId("settings-form"));
  const system = given.get("system").trim() ? [{ role: "system", content: given.get("system") }] : [];
  const body = { messages: [...system, ...messages], stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) {
    if (given.get(name) !== "") body[name] = Number(given.get(name));
  }
  return body;
}

function addMessage(role) {
  const item = document.createElement("li");
  const [who, text, caption] = ["h3", "div", "p"].map((tag) => document.createElement(tag));
  item.className = role;
  who.className = "unseen";
  who.textContent = role === "user" ? "You" : "Answer";
  text.className = "text";
  caption.className = "note";
  item.append(who, text, caption);
  byId("conversation").append(item);
  return { item, text, caption };
}

// The end of the conversation stays in view for whoever looks at it; nobody is torn away who reads further up.
class Scroll {
  #place = byId("scroll");
  #atEnd = true;

  constructor() {
    this.#place.addEventListener("scroll", () => {
      this.#atEnd = this.#place.scrollHeight - this.#place.scrollTop - this.#place.clientHeight < 40;
    });
    new ResizeObserver(() => this.follow()).observe(this.#place);
  }

  follow() {
    if (this.#atEnd) this.toEnd();
  }

  toEnd() {
    this.#place.scrollTop = this.#place.scrollHeight;
    this.#atEnd = true;
  }
}

function complain(error) {
  byId("error").textContent = error.message;
  if (error.status !== 401) return;
  byId("settings").open = true;
  byId("key").focus();
}

function seconds(milliseconds) {
  return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
}
