// The page of `dreamc studio`: an editor on the language server, and next to it what the text makes.
import { autocompletion, closeBrackets, closeBracketsKeymap, completionKeymap } from "@codemirror/autocomplete";
import { defaultKeymap, history, historyKeymap, indentWithTab } from "@codemirror/commands";
import { yaml } from "@codemirror/lang-yaml";
import { HighlightStyle, StreamLanguage, bracketMatching, indentOnInput, syntaxHighlighting } from "@codemirror/language";
import { lintKeymap, setDiagnostics } from "@codemirror/lint";
import { searchKeymap } from "@codemirror/search";
import { EditorState } from "@codemirror/state";
import { EditorView, drawSelection, highlightActiveLine, highlightActiveLineGutter, hoverTooltip, keymap, lineNumbers } from "@codemirror/view";
import { tags } from "@lezer/highlight";
import uPlot from "uplot";
import plotStyle from "uplot/dist/uPlot.min.css";

const token = new URLSearchParams(location.search).get("token") ?? "";
const tab = crypto.randomUUID();
const at = (id) => document.getElementById(id);
// Pause after a keystroke before the text is looked at, in milliseconds.
const PAUSE = 40;

async function ask(path, body) {
  const headers = { "x-dreamc-token": token, "x-dreamc-tab": tab };
  const options = body === undefined ? { headers } : { method: "POST", headers: { ...headers, "content-type": "application/json" }, body: JSON.stringify(body) };
  const answer = await fetch(path, options);
  const value = await answer.json().catch(() => ({}));
  if (!answer.ok) throw Object.assign(new Error(value.error ?? `the server answered ${answer.status}`), { status: answer.status });
  return value;
}

function say(text, bad = false) {
  at("said").textContent = text;
  at("said").classList.toggle("bad", bad);
}

// --- the file -----------------------------------------------------------------------------------

const file = { path: "", saved: "", version: null, number: 0 };
const uri = () => `file:///${tab}/${encodeURI(file.path)}`;
const text = () => editor.state.doc.toString();

async function language(method, params, id) {
  const message = { jsonrpc: "2.0", method, params, ...(id === undefined ? {} : { id }) };
  return ask("/lsp", { path: file.path, message });
}

const position = (state, offset) => {
  const line = state.doc.lineAt(offset);
  return { line: line.number - 1, character: offset - line.from };
};
const offset = (state, { line, character }) => {
  const found = state.doc.line(Math.min(line + 1, state.doc.lines));
  return Math.min(found.from + character, found.to);
};
const here = (state, at) => ({ textDocument: { uri: uri() }, position: position(state, at) });

async function open(path) {
  if (file.path && text() !== file.saved && !confirm(`${file.path} has changes that are not saved. Leave them?`)) {
    at("files").value = file.path;
    return;
  }
  const found = await ask(`/file?path=${encodeURIComponent(path)}`);
  Object.assign(file, { path, saved: found.text, version: found.version });
  compared.key = "";
  at("files").value = path;
  const dream = path.endsWith(".dream");
  editor.setState(EditorState.create({ doc: found.text, extensions: extensions(dream) }));
  looked = found.text;
  await language("textDocument/didOpen", { textDocument: { uri: uri(), languageId: dream ? "dream" : "yaml", version: 0, text: found.text } }).then(publish);
  await view();
  said();
}

async function save() {
  if (text() === file.saved) return;
  const now = text();
  try {
    const { version } = await ask("/file", { path: file.path, text: now, version: file.version });
    Object.assign(file, { saved: now, version });
    say(`${file.path} is saved`);
    said(true);
    await view();
  } catch (error) {
    say(error.message, true);
  }
}

function said(keep = false) {
  const changed = text() !== file.saved;
  at("save").disabled = !changed;
  document.title = `${changed ? "• " : ""}${file.path} · dreamc studio`;
  if (!keep) say(changed ? "not saved" : "");
}

// --- the editor ---------------------------------------------------------------------------------

const dreamLanguage = StreamLanguage.define({
  token(stream) {
    if (stream.eatSpace()) return null;
    if (stream.match(/#.*/)) return "comment";
    if (stream.match(/"([^"\\]|\\.)*"?/)) return "string";
    if (stream.match(/\d[\d_.]*(e[+-]?\d+)?%?/)) return "number";
    if (stream.match(/(model|train|data|eval|define|include|let|repeat|recur|skip|match|task|return|input|state|weights)\b/)) return "keyword";
    if (stream.match(/[A-Za-z_][\w.-]*/)) return "variableName";
    stream.next();
    return null;
  },
  languageData: { commentTokens: { line: "#" } },
});

const colours = HighlightStyle.define([
  { tag: tags.comment, color: "var(--soft)", fontStyle: "italic" },
  { tag: tags.keyword, color: "var(--accent)" },
  { tag: [tags.propertyName, tags.definition(tags.propertyName)], color: "var(--accent)" },
  { tag: tags.number, color: "var(--warn)" },
]);

async function complete(context) {
  if (!context.explicit && !context.matchBefore(/[\w.]+|[{:|>( ]/)) return null;
  await look();
  const [{ result }] = await language("textDocument/completion", here(context.state, context.pos), 1);
  const items = result?.items ?? result ?? [];
  if (!items.length) return null;
  const word = context.matchBefore(/[\w.-]*/);
  const options = items.map((item) => ({
    label: item.label,
    detail: item.detail,
    info: item.documentation?.value ?? item.documentation,
    apply: (item.insertText ?? item.textEdit?.newText ?? item.label).replace(/\$\{\d+:?([^}]*)\}|\$\d+/g, "$1"),
  }));
  return { from: word?.from ?? context.pos, options };
}

const hover = hoverTooltip(async (view, pos) => {
  const [{ result }] = await language("textDocument/hover", here(view.state, pos), 2);
  const value = result?.contents?.value ?? result?.contents;
  if (!value) return null;
  return {
    pos,
    create() {
      const dom = document.createElement("div");
      dom.textContent = value;
      return { dom };
    },
  };
});

async function format() {
  await look();
  const [{ result }] = await language("textDocument/formatting", { textDocument: { uri: uri() }, options: {} }, 3);
  const { state } = editor;
  const changes = (result ?? []).map(({ range, newText }) => ({ from: offset(state, range.start), to: offset(state, range.end), insert: newText }));
  if (changes.length) editor.dispatch({ changes });
}

const extensions = (dream) => [
  lineNumbers(), history(), drawSelection(), indentOnInput(), bracketMatching(), closeBrackets(), highlightActiveLine(), highlightActiveLineGutter(),
  dream ? dreamLanguage : yaml(),
  syntaxHighlighting(colours),
  autocompletion({ override: [complete] }),
  hover,
  EditorView.contentAttributes.of({ "aria-label": "Specification", "aria-description": "Escape, then Tab leaves the editor" }),
  EditorView.updateListener.of((update) => update.docChanged && changed()),
  keymap.of([
    { key: "Mod-s", preventDefault: true, run: () => (save(), true) },
    { key: "Alt-Shift-f", run: () => (format(), true) },
    ...closeBracketsKeymap, ...defaultKeymap, ...searchKeymap, ...historyKeymap, ...completionKeymap, ...lintKeymap, indentWithTab,
  ]),
];

const editor = new EditorView({ parent: at("editor"), state: EditorState.create({ extensions: [] }) });

let timer, looked = "";
function changed() {
  said();
  clearTimeout(timer);
  timer = setTimeout(() => Promise.all([look(), view()]).catch((error) => say(error.message, true)), PAUSE);
}

// Sends the text where it is not the one that was sent last.
async function look() {
  const now = text();
  if (now === looked) return;
  looked = now;
  const version = ++file.number;
  publish(await language("textDocument/didChange", { textDocument: { uri: uri(), version }, contentChanges: [{ text: now }] }));
}

function publish(messages) {
  const found = messages.filter((m) => m.method === "textDocument/publishDiagnostics").pop();
  if (!found) return;
  const { state } = editor;
  const problems = found.params.diagnostics.map((d) => {
    const from = offset(state, d.range.start);
    return { from, to: Math.max(from, offset(state, d.range.end)), severity: d.severity === 1 ? "error" : "warning", message: d.message };
  });
  editor.dispatch(setDiagnostics(state, problems));
  at("problems").replaceChildren(...problems.map((problem) => {
    const item = document.createElement("li");
    const button = document.createElement("button");
    const line = state.doc.lineAt(problem.from);
    button.className = problem.severity;
    button.textContent = `${line.number}:${problem.from - line.from + 1} ${problem.severity}: ${problem.message}`;
    button.onclick = () => {
      editor.dispatch({ selection: { anchor: problem.from }, scrollIntoView: true });
      editor.focus();
    };
    item.append(button);
    return item;
  }));
}

// --- what the text makes ------------------------------------------------------------------------

let asked = 0;
// Counts of what the text is compared with: asked for where that has changed, not at each keystroke.
const compared = { key: "", counts: null };
addEventListener("focus", () => (compared.key = ""));

async function view() {
  const mine = ++asked;
  const now = text(), device = at("device").value || null, baseline = at("baseline").value || null;
  const key = JSON.stringify([file.path, file.version, baseline, device]), compare = key !== compared.key;
  const seen = await ask("/view", { path: file.path, text: now, baseline, device, passes: at("passes").checked, compare });
  if (mine !== asked) return;
  if (compare) Object.assign(compared, { key, counts: seen.other });
  // While the text has an error the last drawing stays, pale.
  for (const panel of ["drawing", "sizes", "change"]) at(panel).classList.toggle("stale", !seen.counts);
  if (!seen.counts) return;
  const inside = at("inside"), open = seen.components.includes(inside.value) ? inside.value : "";
  inside.replaceChildren(element("option", "the model", { value: "" }), ...seen.components.map((name) => element("option", `inside ${name}`, { value: name })));
  inside.value = open;
  const svg = open ? (await ask("/inside", { path: file.path, text: now, inside: open })).svg : seen.svg;
  if (mine !== asked) return;
  picture(svg, open ? `Inside of ${open}` : drawn(seen.counts));
  at("sizes").replaceChildren(...sizes(seen.counts));
  at("change").replaceChildren(...change(seen.counts, compared.counts, at("baseline").value || "the saved file"));
}

const drawn = (counts) => `Drawing of ${counts.model}: ${counts.depth} layers`;

function picture(svg, alt) {
  const image = element("img", [], { src: `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`, alt });
  image.dataset.width = /viewBox="0 0 (\d+)/.exec(svg)?.[1] ?? "";
  at("picture").replaceChildren(image);
  zoom();
}

// At 100 % a drawing fills the panel, and is no larger than it was drawn.
function zoom() {
  const image = at("picture").firstElementChild;
  if (image) image.style.width = `${Math.min(at("picture").clientWidth, Number(image.dataset.width) || Infinity) * at("zoom").value / 100}px`;
}

const number = (x) => {
  for (const [unit, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) if (Math.abs(x) >= size) return `${(x / size).toFixed(2)} ${unit}`;
  return Number.isInteger(x) ? `${x}` : x.toFixed(2);
};

function element(name, children, attributes = {}) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...[children].flat());
  return made;
}

function table(caption, head, rows) {
  const cells = ([first, ...rest], name) => element("tr", [element("th", first, { scope: "row" }), ...rest.map((cell) => element(name, cell))]);
  return [element("h2", caption), element("table", [cells(head, "th"), ...rows.map((row) => cells(row, "td"))])];
}

const FIGURES = [
  ["parameters", (c) => c.parameters.total], ["active parameters", (c) => c.parameters.active],
  ["FLOPs of a generated token", (c) => c.flops_per_token.decode], ["FLOPs of a trained token", (c) => c.flops_per_token.training],
  ["bytes of weights", (c) => c.memory_bytes.weights], ["bytes of activations", (c) => c.memory_bytes.activations],
  ["bytes of training", (c) => c.memory_bytes.training], ["bytes of the cache of a full context", (c) => c.memory_bytes.sequence_cache_context],
];

const time = (seconds) => (seconds < 1e-3 ? `${(1e6 * seconds).toFixed(3)} µs` : `${(1e3 * seconds).toFixed(2)} ms`);

function predicted({ device, decode, prefill, training }) {
  const row = (name, { seconds_per_token, bound }) => [name, time(seconds_per_token), bound];
  return table(`Predicted on ${device.title}, from its data sheet`, ["a token", "time", "bound by"], [row("generated", decode), row("of a prompt", prefill), row("trained", training)]);
}

// Figures that are split by component: name, values, total.
const SPLIT = [
  ["Parameters", (c) => c.parameters.by_component, (c) => c.parameters.total],
  ["FLOPs of a generated token", (c) => c.flops_per_token.decode_by_component, (c) => c.flops_per_token.decode],
  ["Bytes of activations of training", (c) => c.memory_bytes.activations_by_component, (c) => c.memory_bytes.activations],
  ["Bytes of caches of a full context", (c) => c.memory_bytes.caches_by_component, (c) => Object.values(c.memory_bytes.caches_by_component).reduce((sum, v) => sum + v, 0)],
];

function sizes(counts) {
  const names = [...new Set(SPLIT.flatMap(([, values]) => Object.keys(values(counts))))];
  const share = (x, total) => `${number(x)} (${(100 * x / (total || 1)).toFixed(1)} %)`;
  const maps = SPLIT.filter(([, values]) => Object.keys(values(counts)).length);
  return [
    ...table(`${counts.model}: ${counts.depth} layers`, ["", "in all"], FIGURES.map(([name, of]) => [name, number(of(counts))])),
    ...(counts.predicted ? predicted(counts.predicted) : []),
    ...maps.flatMap(([name, values]) => [element("h2", `${name} by component`), treemap(values(counts))]),
    ...table("By component", ["component", ...SPLIT.map(([name]) => name)], names.map((name) => [
      name, ...SPLIT.map(([, values, total]) => share(values(counts)[name] ?? 0, total(counts))),
    ])),
  ];
}

function change(counts, other, name, own = "this text") {
  if (!other) return [element("p", `${name} has errors: there is nothing to compare with.`)];
  const rows = FIGURES.map(([figure, of]) => {
    const [now, was] = [of(counts), of(other)];
    const by = was ? 100 * (now - was) / was : 0;
    return [figure, number(was), number(now), `${by > 0 ? "+" : ""}${by.toFixed(2)} %`];
  });
  return table(`Against ${name}`, ["", name, own, "change"], rows);
}

// Sizes that meet the baseline, shown before they are written into the text.
async function match() {
  const before = text();
  say("looking for sizes …");
  const found = await ask("/match", { path: file.path, text: before, baseline: at("baseline").value });
  const write = element("button", "Write these sizes into the text");
  write.onclick = () => {
    if (text() !== before) return say("the text has changed: match it again", true);
    editor.dispatch({ changes: { from: 0, to: before.length, insert: found.text } });
    editor.focus();
  };
  at("change").replaceChildren(
    ...table(`Sizes that meet ${at("baseline").value}`, ["size", "value"], Object.entries(found.fields).map(([name, value]) => [name, `${value}`])),
    ...table("Differences that are left", ["", "share"], Object.entries(found.residual).map(([name, share]) => [name.replaceAll("_", " "), percent(share, 3)])),
    write,
  );
  show(at("tab-change"));
  say("");
}

// A name has the same colour in every map.
const hue = (name) => [...name].reduce((sum, letter) => (31 * sum + letter.codePointAt(0)) % 997, 7) * 137 % 360;

// Rectangles of areas in proportion, in rows of nearly square ones.
function treemap(values) {
  const width = 600, height = 220, made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const items = Object.entries(values).filter(([, v]) => v > 0).sort((a, b) => b[1] - a[1]);
  const total = items.reduce((sum, [, v]) => sum + v, 0);
  made.setAttribute("viewBox", `0 0 ${width} ${height}`);
  made.setAttribute("class", "map");
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", items.map(([name, v]) => `${name} ${(100 * v / total).toFixed(1)} %`).join(", "));
  let [x, y, w, h] = [0, 0, width, height], left = total;
  while (items.length) {
    const side = Math.min(w, h), scale = (w * h) / left;
    let row = [], sum = 0, worst = Infinity;
    while (items.length) {
      const next = sum + items[0][1], thick = next * scale / side;
      const ratio = Math.max(...[...row, items[0]].map(([, v]) => { const long = v * scale / thick; return Math.max(long / thick, thick / long); }));
      if (ratio > worst) break;
      [worst, sum] = [ratio, next];
      row.push(items.shift());
    }
    const thick = sum * scale / side;
    let along = 0;
    for (const [name, v] of row) {
      const long = v * scale / thick, flat = w >= h;
      const box = flat ? [x, y + along, thick, long] : [x + along, y, long, thick];
      made.append(tile(name, v / total, box, hue(name)));
      along += long;
    }
    if (w >= h) [x, w] = [x + thick, w - thick]; else [y, h] = [y + thick, h - thick];
    left -= sum;
  }
  return made;
}

function tile(name, share, [x, y, w, h], hue) {
  const svg = (kind, attributes, text = "") => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    return made;
  };
  const group = svg("g", {});
  group.append(svg("rect", { x, y, width: w, height: h, fill: `hsl(${hue} 55% 78%)` }), svg("title", {}, `${name}: ${(100 * share).toFixed(2)} %`));
  if (w > 7 * name.length && h > 14) group.append(svg("text", { x: x + 4, y: y + 14 }, name));
  return group;
}

// --- runs -----------------------------------------------------------------------------------------

// Points of a curve that are kept: of a longer one every second, so that a page left open does not grow.
const POINTS = 4000;
// Curves at once, rows of the list, and milliseconds between two looks.
const CURVES = 8, ROWS = 200, EVERY = 1000, EVALUATIONS = 500;
const chosen = new Map();
const colour = (n) => `hsl(${(n * 67 + 210) % 360} 70% 50%)`;
let listed = [], chart, colours_used = 0;

document.head.append(element("style", plotStyle));

// Figures that have curves: of steps, and of evaluations by part of the model.
const CURVE = {
  loss: { name: "loss", axis: "loss, nats", step: (p) => p.loss, held: (e) => (e.validation_loss === undefined ? {} : { "held out": e.validation_loss }) },
  norm: { name: "gradient norm", axis: "norm", step: (p) => p.norm, held: () => ({}) },
  busiest: { name: "busiest expert", axis: "choices over the mean", step: (p) => (p.balance ? 1 + p.balance.violation : undefined), held: (e) => named(e.health?.mixtures, (m) => m.busiest) },
  dead: { name: "dead experts", axis: "share of experts", step: (p) => p.balance?.idle, held: (e) => named(e.health?.mixtures, (m) => m.dead / m.experts) },
  processed: { name: "tokens processed by parts", axis: "share of tokens", step: () => undefined, held: (e) => named(e.health?.parts, (p) => p.processed) },
  leaves: { name: "tokens that leave by pass", axis: "share of tokens", step: () => undefined, held: (e) => passes(e, (p) => p.share) },
  passes: { name: "loss by pass", axis: "loss, nats", step: () => undefined, held: (e) => passes(e, (p) => p.loss) },
  match: { name: "exact match", axis: "share of problems", step: () => undefined, held: (e) => (e.exact_match === undefined ? {} : { "held out": e.exact_match }) },
};
const named = (all, of) => Object.fromEntries((all ?? []).map((one) => [one.name, of(one)]));
const passes = (e, of) => Object.fromEntries((e.health?.passes ?? []).map((p, n) => [`pass ${n + 1}`, of(p)]).filter(([, v]) => v !== undefined));

// The account that comes before a job, and a button that starts it.
async function offer(job, words, before = []) {
  say("asking what it takes …");
  const { plan } = await ask("/plan", job);
  say("");
  const start = element("button", `Start ${words}`), leave = element("button", "Not now");
  start.onclick = async () => {
    at("plan").hidden = true;
    await ask("/start", job).catch((error) => say(error.message, true));
    await runs();
  };
  leave.onclick = () => (at("plan").hidden = true);
  at("plan").replaceChildren(...before, element("pre", plan), start, " ", leave);
  at("plan").hidden = false;
  start.focus();
}

async function plan() {
  show(at("tab-runs"));
  if (text() !== file.saved) return say("save the file first: training reads what is saved", true);
  await offer({ path: file.path }, `training ${file.path}`);
}

// An exam of the file, against the baseline where one is chosen.
function exam() {
  show(at("tab-runs"));
  if (text() !== file.saved) return say("save the file first: an exam reads what is saved", true);
  const specs = [at("baseline").value, file.path].filter((path, n, all) => path && all.indexOf(path) === n);
  const field = (label, value, size) => element("input", [], { value, size, "aria-label": label });
  const tasks = field("Tasks, between commas; six by default", "", 20), budget = field("Time of all runs", "10m", 6), steps = field("Steps of every run, in place of time", "", 5), seeds = field("Seeds", "3", 3);
  const see = element("button", "See what it takes");
  const form = [element("p", [`An exam of ${specs.join(" and ")}: `, element("label", ["Tasks ", tasks]), " ", element("label", ["Time ", budget]), " ", element("label", ["Steps ", steps]), " ", element("label", ["Seeds ", seeds]), " ", see])];
  see.onclick = () => {
    const job = { exam: { specs, tasks: tasks.value.replaceAll(" ", ""), budget: budget.value, steps: Number(steps.value) || null, seeds: Number(seeds.value) || 1 } };
    offer(job, "the exam", form).catch((error) => say(error.message, true));
  };
  at("plan").replaceChildren(...form);
  at("plan").hidden = false;
  tasks.focus();
}

function choose(path, on) {
  if (!on) chosen.delete(path);
  else if (chosen.size < CURVES) chosen.set(path, { next: 0, skip: 1, seen: 0, points: [], held: [], version: 0, hue: colour(colours_used++) });
  else return say(`${CURVES} curves are the most at once`, true);
  buttons();
  runs().catch((error) => say(error.message, true));
}

// New lines of a run's metrics.
async function follow(path, run) {
  for (;;) {
    const { lines, next, again } = await ask(`/metrics?run=${encodeURIComponent(path)}&from=${run.next}`);
    if (again) Object.assign(run, { skip: 1, seen: 0, points: [], held: [] });
    const moved = next !== run.next;
    run.next = next;
    if (lines.length || again) run.version++;
    for (const line of lines) take(run, JSON.parse(line));
    if (!moved || !lines.length || !chosen.has(path)) return;
  }
}

function take(run, { step, tokens, seconds, loss, norm, balance, ...more }) {
  if (loss !== undefined) {
    if (run.seen++ % run.skip === 0) run.points.push({ step, tokens, seconds, loss, norm, ...(balance ? { balance } : {}) });
    if (run.points.length > POINTS) [run.points, run.skip] = [run.points.filter((_, n) => n % 2 === 0), 2 * run.skip];
  } else if (more.skipped === undefined) {
    const near = run.points.at(-1), { validation_loss, exact_match, health } = more;
    run.held.push({ step, tokens: near?.tokens, seconds: near?.seconds, validation_loss, exact_match, health });
    if (run.held.length > EVALUATIONS) run.held = run.held.filter((_, n) => n % 2 === 0);
  }
}

// Curves of the figure that is chosen: name, points as [x, y], run, and whether they are dots.
function curves() {
  const { step, held } = CURVE[at("figure").value], over = at("over").value;
  const lines = [];
  for (const [path, run] of chosen) {
    const flops = listed.find((one) => one.path === path)?.flops;
    const x = (p) => (over === "flops" ? (flops ? p.tokens * flops : undefined) : p[over]);
    const add = (name, points, dots) => {
      const known = points.filter(([x, y]) => x !== undefined && y !== undefined && y !== null);
      if (known.length) lines.push([name, known, run, dots]);
    };
    add(path, run.points.map((p) => [x(p), step(p)]), false);
    const parts = new Set(run.held.flatMap((e) => Object.keys(held(e))));
    for (const part of parts) add(`${path}, ${part}`, run.held.map((e) => [x(e), held(e)[part]]), true);
  }
  return lines;
}

// Draws where something has changed since the last time.
let last_drawn = "", redrawn = 0;
function draw() {
  const { name, axis: unit } = CURVE[at("figure").value], width = Math.max(240, at("runs").clientWidth - 40);
  const key = JSON.stringify([name, at("over").value, width, dark.matches, ...[...chosen].map(([path, run]) => [path, run.version])]);
  if (key === last_drawn) return;
  last_drawn = key;
  at("curves").setAttribute("data-drawn", ++redrawn);
  const lines = curves(), shape = JSON.stringify([name, at("over").value, width, dark.matches, lines.map(([label]) => label)]);
  const data = lines.length ? uPlot.join(lines.map(([, points]) => [points.map(([x]) => x), points.map(([, y]) => y)])) : [];
  const last = lines.map(([label, points]) => `${label}: ${points.at(-1)[1].toPrecision(4)}`);
  at("curves").setAttribute("aria-label", lines.length ? `Curves of ${name}; the last values: ${last.join("; ")}` : `No curve of ${name}: choose a run that has one`);
  at("curves").setAttribute("data-points", lines.map(([, points]) => points.length).join(" "));
  if (chart && chart.shape === shape) return chart.setData(data);
  chart?.destroy();
  chart = undefined;
  at("curves").replaceChildren();
  if (!lines.length) return;
  const style = getComputedStyle(document.body), axis = { stroke: style.color, grid: { stroke: style.getPropertyValue("--line") } };
  const series = lines.map(([label, , run, dots], n) => ({ label, stroke: dots ? colour(n + 3) : run.hue, width: dots ? 0.5 : 1.5, points: { show: dots, fill: dots ? colour(n + 3) : run.hue, size: 6 }, spanGaps: true }));
  const over = at("over").selectedOptions[0].text;
  chart = new uPlot({
    width, height: 280, scales: { x: { time: false } }, axes: [{ ...axis, label: over }, { ...axis, label: unit }], series: [{ label: over }, ...series],
  }, data, at("curves"));
  chart.shape = shape;
}
const dark = matchMedia("(prefers-color-scheme: dark)");

async function runs() {
  const found = await ask("/runs");
  listed = found.runs;
  for (const [id, text] of [["failed", found.said], ["notes", found.notes]]) {
    at(id).hidden = !text;
    if (at(id).textContent !== (text ?? "")) at(id).textContent = text ?? "";
  }
  list();
  for (const [path, run] of chosen) await follow(path, run);
  draw();
}

// Rows of the list by path. A row stays in the page, and a button in it, while what they say changes: a
// click that begins on a button ends on it.
let rows_shown = "";
const rows = new Map(), head = element("tr", ["", "run", "status", "steps", "held-out loss", ""].map((name) => element("th", name, { scope: "col" })));
function list() {
  const part = at("filter").value, those = listed.filter((run) => run.path.includes(part));
  buttons();
  const shown = those.slice(0, ROWS), key = JSON.stringify([part, shown, [...chosen.keys()], those.length]);
  if (key === rows_shown) return;
  rows_shown = key;
  const table = at("list"), lines = [head, ...shown.map(row)], stay = new Set(lines);
  for (const line of [...table.children]) if (!stay.has(line)) line.remove();
  lines.forEach((line, n) => {
    if (table.children[n] !== line) table.insertBefore(line, table.children[n] ?? null);
  });
  const paths = new Set(shown.map((run) => run.path));
  for (const path of rows.keys()) if (!paths.has(path)) rows.delete(path);
  at("more").textContent = those.length > ROWS ? `${those.length - ROWS} more: type a part of their names` : those.length ? "" : "no run yet: Train… starts one";
  const options = listed.filter((run) => run.kind === "run").slice(0, 1000).map((run) => run.path);
  choices("looked", options);
  for (const id of ["one", "other"]) choices(id, [...names, ...options]);
}

function row(run) {
  const { path } = run;
  if (!rows.has(path)) rows.set(path, { line: element("tr", Array.from({ length: 6 }, () => element("td", ""))) });
  const own = rows.get(path), cells = own.line.children;
  if (own.kind !== run.kind) {
    own.kind = run.kind;
    own.box = element("input", [], { type: "checkbox", "aria-label": `Curve of ${path}` });
    own.box.onchange = () => choose(path, own.box.checked);
    cells[0].replaceChildren(...(run.kind === "run" ? [own.box] : []));
  }
  own.box.checked = chosen.has(path);
  [path, run.status, `${run.steps ?? ""}`, run.loss?.toFixed(4) ?? ""].forEach((text, n) => {
    if (cells[n + 1].textContent !== text) cells[n + 1].textContent = text;
  });
  const name = run.trains ? "Stop" : run.ended ? "" : "Resume";
  if (own.name !== name) {
    own.name = name;
    const button = element("button", name, { "aria-label": `${name} ${path}` });
    button.onclick = () => ask(`/${name.toLowerCase()}`, { path }).then(runs).catch((error) => say(error.message, true));
    const focused = cells[5].contains(document.activeElement);
    cells[5].replaceChildren(...(name ? [button] : []));
    if (focused) button.focus();
  }
  return own.line;
}

function choices(id, paths) {
  const select = at(id), chosen = select.value;
  if (paths.length === select.options.length && paths.every((path, n) => select.options[n].value === path)) return;
  select.replaceChildren(...paths.map((path) => element("option", path, { value: path })));
  if (paths.includes(chosen)) select.value = chosen;
}

function buttons() {
  for (const [name, runs] of [["details", 1], ["continue", 1], ["differ", 2]]) at(name).disabled = chosen.size !== runs;
}

// Reports open in a tab of their own, where they may run their scripts and ask nobody.
async function reports() {
  const { reports } = await ask("/reports");
  at("reports").replaceChildren(...reports.map((path) => {
    const link = element("a", path, { href: `/report?path=${encodeURIComponent(path)}&token=${encodeURIComponent(token)}`, target: "_blank", rel: "noopener" });
    return element("li", link);
  }));
}

// The view that is shown, as one file that opens without a server.
function share() {
  const panel = at(tabs.find((tab) => tab.getAttribute("aria-selected") === "true").getAttribute("aria-controls")).cloneNode(true);
  const canvas = at("curves").querySelector("canvas");
  for (const control of panel.querySelectorAll("button, input, select, label, [hidden], .u-wrap")) control.remove();
  const copy = panel.querySelector("#curves");
  if (copy && canvas) copy.prepend(element("img", [], { src: canvas.toDataURL(), alt: "Loss curves", style: "max-width: 100%" }));
  const page = document.implementation.createHTMLDocument(`${file.path} · dreamc`);
  page.head.append(element("meta", [], { charset: "utf-8" }), element("style", document.querySelector("style").textContent + "body { height: auto; padding: 1rem; }"));
  page.body.append(element("h1", file.path), panel, element("h2", "Text"), element("pre", text()));
  const blob = new Blob([`<!doctype html>${page.documentElement.outerHTML}`], { type: "text/html" });
  const link = element("a", "", { href: URL.createObjectURL(blob), download: `${file.path.replaceAll("/", "-")}.html` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// What a command says of the runs that are chosen, below it more.
async function tell(question, more = async () => []) {
  at("told").hidden = false;
  at("told").replaceChildren(element("pre", "…"));
  const { text } = await ask("/tell", question).catch((error) => ({ text: error.message }));
  at("told").replaceChildren(element("pre", text), ...(await more().catch(() => [])));
}

// The texts that a run wrote at its last evaluation, and its ledger.
async function account(run) {
  const { samples, ledger } = await ask(`/account?run=${encodeURIComponent(run)}`);
  const last = samples.at(-1)?.step, those = samples.filter((sample) => sample.step === last);
  const flat = (value, path) => (value && typeof value === "object" ? Object.entries(value).flatMap(([key, inner]) => flat(inner, path ? `${path}.${key}` : key)) : [[path, `${value}`]]);
  return [
    ...(those.length ? table(`Samples after step ${last}`, ["prompt", "text", "answer"], those.map((s) => [s.prompt, s.text, s.answer ?? ""])) : []),
    ...(ledger ? table("Ledger", ["", ""], flat(ledger, "")) : []),
  ];
}

function details() {
  const [run] = chosen.keys();
  return tell({ about: "run", run }, () => account(run));
}

// --- a run from inside ----------------------------------------------------------------------------

const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;

async function read() {
  const run = at("looked").value;
  if (!run) return say("train a model first: a run is read", true);
  at("reading").textContent = "reading …";
  try {
    const { text } = await ask("/tell", { about: "reading", run, prompt: at("text").value });
    at("reading").replaceChildren(...reading(JSON.parse(text)));
  } catch (error) {
    at("reading").textContent = error.message;
  }
}

// A table of tokens: what may follow each, and the way it took.
function reading({ model, depth, tokens }) {
  const shown = (text) => JSON.stringify(text).slice(1, -1).replaceAll(" ", "␣") || "∅";
  const columns = [
    ["token", (t) => shown(t.text), true],
    ["given", (t) => (t.given === null ? "–" : percent(t.given)), true],
    ["next", (t) => t.next.map((n) => `${shown(n.text)} ${percent(n.probability)}`).join(", "), true],
    ["experts by depth", (t) => lines(routes(t.experts ?? []), (route) => route), tokens.some((t) => t.experts)],
    ["processed at depths", (t) => (t.parts ?? []).filter((p) => p.taken).map((p) => p.depth).join(" ") || "none", tokens.some((t) => t.parts)],
    ["attention over depth", (t) => (t.looks ?? []).length ? heat(t.looks) : "", tokens.some((t) => t.looks)],
    ["leaves after pass", (t) => (t.exits ?? []).map((share, n) => `${n + 1}: ${percent(share, 0)}`).join(", "), tokens.some((t) => t.exits)],
  ].filter(([, , there]) => there);
  const head = element("tr", columns.map(([name]) => element("th", name, { scope: "col" })));
  const rows = tokens.map((token) => element("tr", columns.map(([, of], n) => element(n ? "td" : "th", of(token), n ? {} : { scope: "row" }))));
  return [element("h2", `${model}, ${depth} layers, token by token`), element("table", [head, ...rows])];
}

// Of each component the experts by depth, in a line.
const routes = (experts) => [...new Set(experts.map((e) => e.component))].map((name) => {
  const own = experts.filter((e) => e.component === name);
  return `${name} ${own.map((e) => `${e.depth}: ${e.experts.join(" ")}`).join(" · ")}`;
});
const lines = (all, of) => (all ?? []).flatMap((one, n) => (n ? [element("br", []), of(one)] : [of(one)]));

// Scores of depth attention: a row for each depth that looks, a column for each that is looked at.
function heat(looks) {
  const size = 9, wide = Math.max(...looks.map((l) => l.scores.length));
  const svg = (kind, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  const label = looks.map((l) => `${l.component}, depth ${l.depth}: ${l.scores.map((s) => percent(s, 0)).join(" ")}`).join("; ");
  const made = svg("svg", { width: size * wide, height: size * looks.length, role: "img", "aria-label": label });
  looks.forEach((l, y) => l.scores.forEach((score, x) => {
    const box = { x: x * size, y: y * size, width: size, height: size };
    made.append(svg("rect", { ...box, class: "heat", "fill-opacity": score }), svg("rect", { ...box, class: "cell" }));
  }));
  const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
  title.textContent = label;
  made.prepend(title);
  return made;
}

// The report of `dreamc analyze` beside the run, made where it is not there.
async function analyse() {
  const run = at("looked").value;
  if (!run) return say("train a model first: a run is analysed", true);
  const path = `${run}/analysis/analysis.html`;
  at("analysis").textContent = "running the model on held-out rows …";
  try {
    const { reports } = await ask("/reports");
    if (!reports.includes(path)) await ask("/tell", { about: "analysis", run });
    const src = `/report?path=${encodeURIComponent(path)}&token=${encodeURIComponent(token)}`;
    at("analysis").replaceChildren(element("iframe", [], { src, sandbox: "allow-scripts", title: `Analysis of ${run}` }));
  } catch (error) {
    at("analysis").textContent = error.message;
  }
}

// --- two side by side -----------------------------------------------------------------------------

async function beside() {
  const paths = [at("one").value, at("other").value];
  if (!paths[0] || !paths[1]) return say("choose two specifications or runs", true);
  at("sides").textContent = "comparing …";
  try {
    const seen = await Promise.all(paths.map(async (path) => {
      const spec = names.includes(path) ? path : `${path}/spec.yaml`;
      const { text } = await ask(`/file?path=${encodeURIComponent(spec)}`);
      return ask("/view", { path: spec, text, device: at("device").value || null });
    }));
    const { text } = await ask("/tell", { about: "difference", run: paths[0], other: paths[1] });
    const pictures = seen.map(({ svg, counts }, n) => element("figure", [
      ...(svg ? [element("img", [], { src: `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`, alt: drawn(counts) })] : []),
      element("figcaption", svg ? paths[n] : `${paths[n]} has errors`),
    ]));
    const figures = seen[0].counts && seen[1].counts ? change(seen[1].counts, seen[0].counts, paths[0], paths[1]) : [];
    at("sides").replaceChildren(element("div", pictures, { class: "pair" }), ...figures, element("h2", "Fields that differ"), element("pre", text));
  } catch (error) {
    at("sides").textContent = error.message;
  }
}

// Looks while the runs are shown and the page is.
async function watch() {
  if (!at("runs").hidden && !document.hidden) await runs().catch((error) => say(error.message, true));
  setTimeout(watch, EVERY);
}

// --- the frame ----------------------------------------------------------------------------------

const tabs = [...document.querySelectorAll("[role=tab]")];
function show(tab) {
  for (const other of tabs) {
    const chosen = other === tab;
    other.setAttribute("aria-selected", chosen);
    other.tabIndex = chosen ? 0 : -1;
    at(other.getAttribute("aria-controls")).hidden = !chosen;
  }
  if (tab === at("tab-runs") || tab === at("tab-look")) Promise.all([runs(), reports()]).catch((error) => say(error.message, true));
}
tabs.forEach((tab, n) => {
  tab.onclick = () => show(tab);
  tab.onkeydown = ({ key }) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[key];
    if (!step) return;
    const next = tabs[(n + step + tabs.length) % tabs.length];
    show(next);
    next.focus();
  };
});
at("files").onchange = () => open(at("files").value).catch((error) => say(error.message, true));
at("baseline").onchange = () => {
  at("match").disabled = !at("baseline").value;
  view().catch((error) => say(error.message, true));
};
for (const name of ["device", "inside", "passes"]) at(name).onchange = () => view().catch((error) => say(error.message, true));
at("zoom").oninput = zoom;
at("match").onclick = () => match().catch((error) => say(error.message, true));
at("save").onclick = save;
at("train").onclick = () => plan().catch((error) => say(error.message, true));
at("over").onchange = draw;
at("filter").oninput = list;
at("share").onclick = share;
at("exam").onclick = exam;
at("figure").append(...Object.entries(CURVE).map(([value, { name }]) => element("option", name, { value })));
at("figure").onchange = draw;
dark.onchange = draw;
at("read").onclick = read;
at("text").onkeydown = ({ key }) => {
  if (key === "Enter") read();
};
at("analyse").onclick = analyse;
at("beside").onclick = beside;
at("details").onclick = details;
at("differ").onclick = () => tell({ about: "difference", run: [...chosen.keys()][0], other: [...chosen.keys()][1] });
at("continue").onclick = () => tell({ about: "continuation", run: [...chosen.keys()][0], prompt: at("prompt").value });

at("format").onclick = () => format().catch((error) => say(error.message, true));
addEventListener("beforeunload", (event) => text() !== file.saved && event.preventDefault());

let names = [];
async function begin() {
  const { files, first, devices } = await ask("/files");
  names = files;
  const options = (names) => names.map((name) => element("option", name, { value: name }));
  at("files").replaceChildren(...options(files));
  at("baseline").replaceChildren(element("option", "the saved file", { value: "" }), ...options(files));
  at("device").append(...options(devices));
  if (!files.length) return say("the folder has no specification: write one with `dreamc new`", true);
  await open(first ?? files[0]);
}
begin().catch((error) => say(error.message, true));
watch();
