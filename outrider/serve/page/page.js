"use strict";

const at = (id) => document.getElementById(id);
const INTERVAL = 1000;
let running = null;
// The messages of the chat so far, and the element of the answer that grows.
let talk = [];
let answer = null;

function made(kind, name, text) {
  const element = document.createElement(kind);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
}

function headers(more = {}) {
  const key = at("key").value;
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

// The objects of a stream of events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

async function refusal(response) {
  if (response.status === 401) at("keybox").hidden = false;
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

// The places of a text that are code: what stands between fences, or all of it if most lines look like code.
function codeRanges(text) {
  const fenced = [...text.matchAll(/^```[^\n]*\n(?:[^]*?^```|[^]*$)/gm)].map((each) => [each.index, each.index + each[0].length]);
  if (fenced.length) return fenced;
  const lines = text.split("\n").filter((line) => line.trim());
  const code = lines.filter((line) => /^(\s{2,}|\t)|[{};:([]$|^\s*(def|class|import|from|return|#include|function|const|let|fn|func)\b/.test(line));
  return lines.length > 1 && code.length > lines.length / 2 ? [[0, text.length]] : [];
}

// Code in a fixed font.
function setFonts(element) {
  const ranges = codeRanges(element.textContent);
  let start = 0;
  for (const part of element.children) {
    const end = start + part.textContent.length, first = start;
    part.classList.toggle("code", ranges.some(([from, to]) => first < to && end > from));
    start = end;
  }
}

function show(event) {
  for (const token of event.tokens ?? []) {
    const element = made("span", `token ${token.kind}`, token.text);
    element.title = `${token.kind}, token ${token.id}`;
    answer.append(element);
  }
  setFonts(answer);
  if (event.tree) drawTree(event.tree);
  if (event.output) {
    const { num_tokens: tokens, num_steps: steps, seconds, finish_reason: reason } = event.output;
    const rate = seconds ? `, ${(tokens / seconds).toFixed(0)} tokens/s` : "";
    const efficiency = steps ? (tokens / steps).toFixed(2) : "–";
    at("own").textContent = `${tokens} tokens, ${steps} steps, block efficiency ${efficiency}${rate}, ${reason}`;
  }
  if (event.error) at("error").textContent = event.error.message;
}

function drawTree(tree) {
  const items = [];
  at("tree").replaceChildren();
  tree.forEach((node, i) => {
    const item = made("li", "", "");
    const parent = node.parent < 0 ? at("tree") : items[node.parent];
    let list = parent;
    if (node.parent >= 0) {
      list = parent.querySelector(":scope > ul") ?? parent.appendChild(made("ul"));
    }
    item.append(made("span", node.kind, JSON.stringify(node.text).slice(1, -1)), made("span", "small", `  ${node.kind}`));
    list.append(item);
    items[i] = item;
  });
}

async function generate(submitted) {
  submitted.preventDefault();
  running?.abort();
  const mine = (running = new AbortController());
  const prompt = at("prompt").value, chats = at("chat").checked;
  if (!chats || !talk.length) at("answer").replaceChildren();
  answer = made("div", "turn");
  const question = { role: "user", content: prompt };
  if (chats) {
    // A question whose answer was broken off by this one is left out.
    if (talk.at(-1)?.role === "user") talk.pop();
    talk.push(question);
    at("answer").append(made("div", "turn user", prompt));
    at("prompt").value = "";
  } else {
    talk = [];
    answer.append(made("span", "given", prompt));
  }
  at("answer").append(answer);
  let text = "";
  at("error").textContent = at("own").textContent = "";
  at("forest").hidden = !at("draws").checked;
  at("stop").hidden = false;
  const body = {
    ...(chats ? { messages: talk } : { prompt }),
    tree: at("draws").checked,
    max_tokens: Number(at("most").value),
    temperature: Number(at("temperature").value),
  };
  try {
    const response = await fetch("v1/outrider/stream", {
      method: "POST",
      headers: headers({ "Content-Type": "application/json" }),
      body: JSON.stringify(body),
      signal: mine.signal,
    });
    if (!response.ok) throw new Error(await refusal(response));
    for await (const event of events(response)) {
      text = event.output?.text ?? text + (event.tokens ?? []).map((token) => token.text).join("");
      show(event);
    }
  } catch (error) {
    if (error.name !== "AbortError") at("error").textContent = error.message;
  } finally {
    // A chat goes on behind what was answered. A question without an answer comes back.
    if (talk.at(-1) === question) {
      if (text) talk.push({ role: "assistant", content: text });
      else {
        talk.pop();
        at("prompt").value ||= prompt;
      }
    }
    at("anew").hidden = !talk.length;
    if (running === mine) at("stop").hidden = true;
  }
}

function forget() {
  running?.abort();
  talk = [];
  at("answer").replaceChildren();
  at("anew").hidden = true;
}

// Sums of Prometheus's text by name and, where there is one, by position.
function parse(text) {
  const found = { positions: {} };
  for (const line of text.split("\n")) {
    const match = /^([\w:]+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const [, name, labels, value] = match;
    if (name === NAMES.positions) found.positions[/position="(\d+)"/.exec(labels)[1]] = Number(value);
    else found[name] = (found[name] ?? 0) + Number(value);
  }
  return found;
}

const NAMES = {
  tokens: "vllm:generation_tokens_total",
  drafts: "vllm:spec_decode_num_drafts_total",
  emitted: "outrider:tokens_per_step_sum",
  steps: "outrider:tokens_per_step_count",
  running: "vllm:num_requests_running",
  waiting: "vllm:num_requests_waiting",
  positions: "vllm:spec_decode_num_accepted_tokens_per_pos_total",
};
const history = [];
let first = null;

async function look() {
  try {
    if (document.hidden) return;
    const response = await fetch("metrics", { headers: headers() });
    if (!response.ok) {
      at("state").textContent = await refusal(response);
      return;
    }
    const now = { at: performance.now(), ...parse(await response.text()) };
    at("state").textContent = "";
    first ??= now;
    history.push(now);
    if (history.length > 6) history.shift();
    tell(history[0], now);
  } catch {
    at("state").textContent = "the server does not answer";
  } finally {
    setTimeout(look, INTERVAL);
  }
}

function tell(before, now) {
  const grown = (name, since) => (now[NAMES[name]] ?? 0) - (since[NAMES[name]] ?? 0);
  const seconds = (now.at - before.at) / 1000;
  at("throughput").textContent = seconds ? (grown("tokens", before) / seconds).toFixed(0) : "–";
  const steps = grown("steps", before);
  if (steps) at("efficiency").textContent = (grown("emitted", before) / steps).toFixed(2);
  at("running").textContent = now[NAMES.running] ?? "–";
  at("waiting").textContent = now[NAMES.waiting] ?? "–";
  const drafts = grown("drafts", first);
  if (!drafts) return;
  const shares = Object.keys(now.positions)
    .sort((a, b) => a - b)
    .map((each) => (now.positions[each] - (first.positions[each] ?? 0)) / drafts);
  while (shares.length && !shares.at(-1)) shares.pop();
  at("positions").replaceChildren(
    ...shares.map((share) => {
      const item = made("li"), bar = made("span", "bar");
      bar.style.width = `${70 * share}%`;
      item.append(bar, `${(100 * share).toFixed(0)} %`);
      return item;
    }),
  );
}

async function introduce() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) return void (await refusal(response));
    const { data } = await response.json();
    at("model").textContent = `${data[0].id}, context ${data[0].max_model_len}`;
    const info = await (await fetch("server_info", { headers: headers() })).json();
    at("chatbox").hidden = !info.chat_template;
    at("chat").checked = info.chat_template;
  } catch {
    at("model").textContent = "";
  }
}

at("ask").addEventListener("submit", generate);
at("anew").addEventListener("click", forget);
at("chat").addEventListener("change", forget);
at("stop").addEventListener("click", () => running?.abort());
at("key").addEventListener("change", introduce);
introduce();
look();
