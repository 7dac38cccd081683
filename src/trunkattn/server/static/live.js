// The live page: snapshots of the engine as server-sent events, and a chat box. No build step, no other host.

const element = (id) => document.getElementById(id);
const SHOWN_SECONDS = 60;
const history = []; // snapshots of the last minute

let key = sessionStorage.getItem("trunkattn-key") ?? "";
const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});

// ---- figures -------------------------------------------------------------------------------------------------------

const UNITS = ["B", "kB", "MB", "GB", "TB"];

function bytes(count) {
  let unit = 0;
  while (count >= 1000 && unit < UNITS.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return `${count.toFixed(count < 10 && unit > 0 ? 1 : 0)} ${UNITS[unit]}`;
}

function sum(name) {
  return history.reduce((total, snapshot) => total + snapshot[name], 0);
}

function showFigures(now) {
  const read = sum("bytes_read");
  element("saved").textContent = read > 0 ? `${(sum("bytes_unshared") / read).toFixed(1)}×` : "–";
  element("rate").textContent = now.tokens_per_second.toFixed(0);
  element("per-token").textContent = now.seconds_per_token === null ? "–" : (1000 * now.seconds_per_token).toFixed(1);
  element("running").textContent = now.running;
  element("waiting").textContent = now.waiting;
  const share = now.pages_in_use / now.pages;
  element("cache").textContent = `${(100 * share).toFixed(0)} %`;
  element("cache-bar").value = share;
  element("cache-bar").title = `${now.pages_in_use} of ${now.pages} pages in use, ${now.pages_cached} more hold prefixes`;
}

// ---- charts --------------------------------------------------------------------------------------------------------

const style = getComputedStyle(document.documentElement);
const colour = (name) => style.getPropertyValue(name).trim();
const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, size: 64 };

function chart(id, series, format) {
  const box = element(id);
  const options = {
    width: box.clientWidth || 400,
    height: 180,
    legend: { show: false },
    cursor: { show: false },
    scales: { x: { time: true }, y: { range: (_, __, top) => [0, top > 0 ? 1.1 * top : 1] } },
    axes: [{ ...axis, size: 32 }, { ...axis, values: (_, ticks) => ticks.map(format) }],
    series: [{}, ...series.map((name) => ({ stroke: colour(name), width: 2, points: { show: false } }))],
  };
  const plot = new uPlot(options, [[], ...series.map(() => [])], box);
  new ResizeObserver(() => plot.setSize({ width: box.clientWidth, height: 180 })).observe(box);
  return plot;
}

const bytesChart = chart("bytes-chart", ["--read", "--unshared"], bytes);
const tokensChart = chart("tokens-chart", ["--read"], (value) => value);

function perSecond(name) {
  return history.map((snapshot, i) => (i === 0 ? 0 : snapshot[name] / Math.max(snapshot.time - history[i - 1].time, 0.05)));
}

function showCharts() {
  const times = history.map((snapshot) => snapshot.time);
  bytesChart.setData([times, perSecond("bytes_read"), perSecond("bytes_unshared")]);
  tokensChart.setData([times, history.map((snapshot) => snapshot.tokens_per_second)]);
}

// ---- forest --------------------------------------------------------------------------------------------------------

const svg = document.querySelector("#forest svg");
const tip = element("tip");

function box(node) {
  const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  const place = { x: node.first, y: node.start, width: node.requests, height: node.tokens };
  for (const [name, value] of Object.entries(place)) rect.setAttribute(name, value);
  if (node.requests > 1) rect.classList.add("trunk");
  rect.setAttribute("tabindex", "0");
  const requests = node.requests === 1 ? "1 request" : `${node.requests} requests`;
  const text = `${node.tokens} tokens, ${bytes(node.bytes)}, ${requests}\n\n${node.text}`;
  rect.setAttribute("aria-label", text);
  const show = (x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    tip.style.left = `${Math.min(x + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(y + 14, innerHeight - tip.offsetHeight - 8)}px`;
  };
  rect.addEventListener("pointermove", (event) => show(event.clientX, event.clientY));
  rect.addEventListener("focus", () => { const at = rect.getBoundingClientRect(); show(at.left, at.top); });
  for (const name of ["pointerleave", "blur"]) rect.addEventListener(name, () => { tip.hidden = true; });
  return rect;
}

function showForest(forest) {
  if (svg.matches(":hover") && !tip.hidden) return; // what somebody reads stands still
  const depth = Math.max(1, ...forest.nodes.map((node) => node.start + node.tokens));
  svg.setAttribute("viewBox", `0 0 ${Math.max(1, forest.requests)} ${depth}`);
  svg.replaceChildren(...forest.nodes.filter((node) => node.tokens > 0).map(box));
  element("no-forest").hidden = forest.requests > 0;
  tip.hidden = true;
}

// ---- events --------------------------------------------------------------------------------------------------------

function setState(text, name) {
  element("state").textContent = text;
  element("state").className = name;
}

async function* serverSentEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event.startsWith("data: ")) yield event.slice(6);
  }
}

function take(snapshot) {
  history.push(snapshot);
  while (history[0].time < snapshot.time - SHOWN_SECONDS) history.shift();
  showFigures(snapshot);
  showCharts();
  showForest(snapshot.forest);
}

async function watch() {
  for (;;) {
    try {
      const response = await fetch("live", { headers: headers() });
      element("key-form").hidden = response.status !== 401;
      if (response.ok) {
        setState("live", "on");
        showModel();
        for await (const event of serverSentEvents(response)) take(JSON.parse(event));
      } else {
        setState(response.status === 401 ? "an API key is needed" : `status ${response.status}`, "off");
      }
    } catch {
      setState("the server does not answer", "off");
    }
    await new Promise((resolve) => { retry = resolve; setTimeout(resolve, 2000); });
  }
}

let retry = () => {};
element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = element("key").value;
  sessionStorage.setItem("trunkattn-key", key);
  retry();
});

let model = null;
async function showModel() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) return;
  model = (await response.json()).data[0].id;
  element("model").textContent = model;
}

// ---- chat ----------------------------------------------------------------------------------------------------------

const conversation = [];
let running = null;

function addMessage(role, text) {
  const message = document.createElement("div");
  message.className = `message ${role}`;
  message.textContent = text;
  element("messages").append(message);
  element("messages").scrollTop = element("messages").scrollHeight;
  return message;
}

async function answer() {
  const shown = addMessage("assistant", "");
  running = new AbortController();
  let text = "";
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify({ messages: conversation, stream: true }),
      signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of serverSentEvents(response)) {
      if (event === "[DONE]") break;
      const chunk = JSON.parse(event);
      if (chunk.error) throw new Error(chunk.error.message);
      text += chunk.choices[0]?.delta?.content ?? "";
      shown.textContent = text;
      element("messages").scrollTop = element("messages").scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") addMessage("error", error.message);
  }
  running = null;
  if (text) conversation.push({ role: "assistant", content: text });
  else conversation.pop();
}

element("chat-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const question = element("question").value.trim();
  if (!question || running) return;
  conversation.push({ role: "user", content: question });
  addMessage("user", question);
  element("question").value = "";
  element("send").hidden = true;
  element("stop").hidden = false;
  await answer();
  element("send").hidden = false;
  element("stop").hidden = true;
});
element("stop").addEventListener("click", () => running?.abort());
element("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    element("chat-form").requestSubmit();
  }
});

watch();
