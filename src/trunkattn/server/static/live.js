// The live page: snapshots of the engine as server-sent events, and a chat box. No build step, no other host.

const element = (id) => document.getElementById(id);
const KEPT_SECONDS = 300; // the server keeps as many
const MEAN_SECONDS = 3; // of the figures that would flicker
const samples = []; // of the last five minutes: what the engine has counted between two times

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

function duration(seconds) {
  if (seconds < 1) return `${(1000 * seconds).toFixed(0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

function sum(name, seconds) {
  const after = (samples.at(-1)?.uptime ?? 0) - seconds;
  return samples.reduce((total, sample) => total + (sample.uptime > after ? sample[name] : 0), 0);
}

const ratio = (part, whole, format) => (whole > 0 ? format(part / whole) : "–");
const percent = (share) => `${(100 * share).toFixed(0)} %`;

function showFigures(now) {
  const read = sum("bytes_read", 60);
  const saved = sum("bytes_unshared", 60) / read;
  const isSaved = read > 0 && saved >= 1.05;
  element("saved").textContent = read > 0 ? `${saved.toFixed(1)}×` : "–";
  element("saved").classList.toggle("read", isSaved);
  element("saved-text").textContent = read > 0 && !isSaved
    ? "no KV bytes saved by sharing, last minute" : "fewer KV bytes read than without sharing, last minute";
  element("rate").textContent = ratio(sum("tokens", MEAN_SECONDS), sum("seconds", MEAN_SECONDS), (rate) => rate.toFixed(0));
  element("per-token").textContent = ratio(
    1000 * sum("busy_seconds", MEAN_SECONDS), sum("steps", MEAN_SECONDS), (time) => time.toFixed(1));
  element("first-token").textContent = now.first_token_p50 === null ? "–" : duration(now.first_token_p50);
  element("first-token-p99").textContent = `P99 ${now.first_token_p99 === null ? "–" : duration(now.first_token_p99)}`;
  element("running").textContent = now.running;
  element("waiting").textContent = now.waiting;
  element("cache").textContent = percent(now.pages_in_use / now.pages);
  element("cache-bar").value = now.pages_in_use / now.pages;
  element("cache-bar").title = `${now.pages_in_use} of ${now.pages} pages in use, ${now.pages_cached} more hold prefixes`;
  element("hits").textContent = ratio(sum("cache_hits", KEPT_SECONDS), sum("cache_queries", KEPT_SECONDS), percent);
  element("errors").textContent = now.failed;
  element("refused").textContent = now.refused;
  element("uptime").textContent = duration(now.uptime);
}

// ---- charts --------------------------------------------------------------------------------------------------------

const style = getComputedStyle(document.documentElement);
const colour = (name) => () => style.getPropertyValue(name).trim(); // asked for at each drawing: the theme may change
const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, size: 64 };
const ago = (seconds) => (seconds === 0 ? "now" : `${seconds / 60} min`);

function chart(id, series, format, least) {
  const box = element(id);
  const options = {
    width: box.clientWidth || 400,
    height: 180,
    padding: [12, 20, 0, 0],
    legend: { show: false },
    cursor: { show: false },
    scales: { x: { time: false, range: [-KEPT_SECONDS, 0] }, y: { range: (_, __, top) => [0, Math.max(1.1 * top, least)] } },
    axes: [
      { ...axis, size: 32, splits: [-300, -240, -180, -120, -60, 0], values: (_, ticks) => ticks.map(ago) },
      { ...axis, values: (_, ticks) => ticks.map(format) },
    ],
    series: [{}, ...series.map((name) => ({ stroke: colour(name), width: 2, points: { show: false } }))],
  };
  const plot = new uPlot(options, [[-KEPT_SECONDS, 0], ...series.map(() => [null, null])], box);
  new ResizeObserver(() => plot.setSize({ width: box.clientWidth, height: 180 })).observe(box);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plot.redraw());
  return plot;
}

const bytesChart = chart("bytes-chart", ["--read", "--unshared"], bytes, 1000);
const tokensChart = chart("tokens-chart", ["--read"], (value) => value, 10);

function showCharts(now) {
  const times = samples.map((sample) => sample.uptime - now.uptime);
  const perSecond = (name) => samples.map((sample) => sample[name] / sample.seconds);
  bytesChart.setData([times, perSecond("bytes_read"), perSecond("bytes_unshared")]);
  tokensChart.setData([times, perSecond("tokens")]);
}

// ---- forest --------------------------------------------------------------------------------------------------------

const SHADES = 5; // colours of shared boxes, by the number of requests
const TRUNK_SHARE = 0.35; // of the width, for a long stretch that all requests share
const ROW_PIXELS = [3, 26]; // of one request
const FOREST_PIXELS = 480;
const NARROW_PIXELS = 90; // a box with less writes from top to bottom
const ROUND = [5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000];
const forestBox = element("forest");
const tip = element("tip");

const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

// Shade of a box: 0 for one request's own tokens, else from 1 to SHADES, the darkest for those that all share.
function shade(requests, total) {
  return requests === 1 ? 0 : Math.max(1, Math.ceil(SHADES * (Math.log(requests) / Math.log(total)) ** 2 - 1e-9));
}

// Maps tokens to shares of the width. A long stretch that all requests share leaves room for the rest.
function tokenScale(forest) {
  const end = Math.max(1, ...forest.nodes.map((node) => node.start + node.tokens));
  const common = Math.max(0, ...forest.nodes.filter((node) => node.requests === forest.requests && node.requests > 1)
    .map((node) => node.start + node.tokens));
  const trunk = common > TRUNK_SHARE * end && common < end ? common : 0;
  const place = (token) => {
    if (!trunk) return token / end;
    return token <= trunk ? (TRUNK_SHARE * token) / trunk : TRUNK_SHARE + ((1 - TRUNK_SHARE) * (token - trunk)) / (end - trunk);
  };
  const step = ROUND.find((size) => (end - trunk) / size <= 4) ?? end;
  const first = trunk + (trunk ? 0.75 * step : 0.5 * step);
  const ticks = [0, ...(trunk ? [trunk] : [])];
  for (let token = Math.ceil(first / step) * step; token <= end; token += step) ticks.push(token);
  return { place, ticks, trunk };
}

function showTip(node, text) {
  const at = node.getBoundingClientRect();
  tip.textContent = text;
  tip.hidden = false;
  tip.style.left = `${Math.max(8, Math.min(at.left + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${Math.max(8, Math.min(at.top + Math.min(at.height, 60) + 6, innerHeight - tip.offsetHeight - 8))}px`;
}

function box(node, forest, scale, rowPixels) {
  const shown = document.createElement("div");
  const [left, right] = [scale.place(node.start), scale.place(node.start + node.tokens)];
  shown.className = `node shade-${shade(node.requests, forest.requests)}`;
  if (node.requests > 1) shown.classList.add("trunk");
  if (scale.trunk && node.start === 0 && node.requests === forest.requests) shown.classList.add("shortened");
  shown.style.left = `${100 * left}%`;
  shown.style.width = `${100 * (right - left)}%`;
  shown.style.top = `${node.first * rowPixels}px`;
  shown.style.height = `${node.requests * rowPixels}px`;
  const height = node.requests * rowPixels;
  if (height >= 14) {
    const title = document.createElement("b");
    title.textContent = node.requests > 1 ? `${plural(node.tokens, "token")} · shared by ${node.requests}` : plural(node.tokens, "token");
    const text = document.createElement("span");
    text.textContent = node.text.replace(/\s+/g, " ");
    shown.append(title, " ", text);
    shown.classList.add(...(height < 48 ? ["low"] : (right - left) * forestBox.clientWidth < NARROW_PIXELS ? ["narrow"] : []));
  }
  const text = `${plural(node.tokens, "token")}, ${bytes(node.bytes)}, ${plural(node.requests, "request")}\n\n${node.text}`;
  shown.tabIndex = 0;
  shown.setAttribute("role", "img");
  shown.setAttribute("aria-label", text);
  for (const name of ["pointerenter", "focus"]) shown.addEventListener(name, () => showTip(shown, text));
  for (const name of ["pointerleave", "blur"]) shown.addEventListener(name, () => { tip.hidden = true; });
  return shown;
}

function showLegend(forest) {
  const counts = new Map(); // shade: numbers of requests
  for (const { requests } of forest.nodes) {
    const name = shade(requests, forest.requests);
    counts.set(name, [...(counts.get(name) ?? []), requests]);
  }
  element("legend").replaceChildren(...[...counts].sort(([a], [b]) => b - a).map(([name, all]) => {
    const item = document.createElement("span");
    const [least, most] = [Math.min(...all), Math.max(...all)];
    item.className = `shade-${name}`;
    item.textContent = name === 0 ? "one request's own" : `shared by ${least === most ? most : `${least} to ${most}`}`;
    return item;
  }));
}

function showForest(forest) {
  const isRead = forestBox.matches(":hover") || forestBox.contains(document.activeElement);
  if (isRead && !tip.hidden) return; // what somebody reads stands still
  const nodes = forest.nodes.filter((node) => node.tokens > 0);
  const scale = tokenScale(forest);
  const rowPixels = Math.min(ROW_PIXELS[1], Math.max(ROW_PIXELS[0], FOREST_PIXELS / Math.max(1, forest.requests)));
  forestBox.style.height = `${forest.requests * rowPixels}px`;
  forestBox.replaceChildren(...nodes.map((node) => box(node, forest, scale, rowPixels)));
  element("token-axis").hidden = forest.requests === 0;
  element("token-axis").replaceChildren(...scale.ticks.map((token) => {
    const tick = document.createElement("span");
    tick.textContent = token === 0 ? "0 tokens" : token.toLocaleString("en");
    tick.style.left = `${100 * scale.place(token)}%`;
    return tick;
  }));
  element("break-note").hidden = scale.trunk === 0;
  element("no-forest").textContent = "No request is running.";
  element("no-forest").hidden = forest.requests > 0;
  tip.hidden = true;
  showLegend({ ...forest, nodes });
}

function showRequests(requests) {
  document.querySelector("#requests tbody").replaceChildren(...requests.map((request) => {
    const row = document.createElement("tr");
    const values = [request.id, request.state, request.seconds.toFixed(1), request.prompt_tokens,
      request.cached_tokens, `${request.answer_tokens} of ${request.max_tokens}`];
    row.append(...values.map((value) => {
      const cell = document.createElement("td");
      cell.textContent = value;
      return cell;
    }));
    return row;
  }));
  element("requests").hidden = requests.length === 0;
  element("requests").parentElement.hidden = requests.length === 0;
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

function take(now) {
  samples.push(...now.samples);
  while (samples.length && samples[0].uptime < now.uptime - KEPT_SECONDS) samples.shift();
  showFigures(now);
  showCharts(now);
  showForest(now.forest);
  showRequests(now.requests);
}

// Without events the page does not know what runs, and says so.
function showNothing(text) {
  setState(text, "off");
  showForest({ requests: 0, nodes: [] });
  showRequests([]);
  element("no-forest").textContent = `Nothing is known: ${text}.`;
}

async function watch() {
  for (;;) {
    try {
      const response = await fetch("live", { headers: headers() });
      element("key-form").hidden = response.status !== 401;
      if (response.ok) {
        setState("live", "on");
        samples.length = 0; // the first event has all that the server keeps
        showModel();
        for await (const event of serverSentEvents(response)) take(JSON.parse(event));
      } else {
        showNothing(response.status === 401 ? "an API key is needed" : `status ${response.status}`);
      }
    } catch {
      showNothing("the server does not answer");
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
