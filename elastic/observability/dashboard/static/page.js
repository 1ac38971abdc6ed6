// The dashboard's page: a fleet, or a job. It shows what the server tells, and asks it for actions.
// Text from jobs (names, reasons, logs) is put into the page as text only, never as markup.

import { forget, lineChart, short, worldChart } from "./charts.js";

const PARTS = ["detect", "abort", "decide", "build", "sync", "redo", "paused", "resuming", "repeating"];
const SHOWN_MEMBERS = 200;
const SHOWN_MOMENTS = 300;
const REREAD_STEPS = 2000; // more live points than these, and the document is read anew: the server thins it
const STATE_LEVEL = { running: "good", closed: "info", forming: "info", starting: "info", placed: "info", waits: "info" };
const RETRY_MS = 1000;
const FINAL = [403, 404]; // what is not there, or not for this browser, stays so

const $ = (id) => document.getElementById(id);

// ----------------------------------------------------------------------------------------------- small things

function h(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const clock = (t) => new Date(t * 1000).toLocaleTimeString([], { hour12: false });

function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds > 0 && seconds < 1) return `${Math.max(1, Math.round(1000 * seconds))} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function bytes(count) {
  if (count === undefined) return "";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (count >= 1024 && at < units.length - 1) { count /= 1024; at += 1; }
  return `${count < 10 && at ? count.toFixed(1) : Math.round(count)} ${units[at]}`;
}

function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

function toast(said, level = "info") {
  const shown = h("p", { class: `toast ${level}`, role: "alert" }, said);
  $("toasts").append(shown);
  setTimeout(() => shown.remove(), 8000);
}

class Refused extends Error {
  constructor(said, status) {
    super(said);
    this.status = status;
  }
}

// In a page that is a file: what the server would have answered.
const saved = JSON.parse($("saved")?.textContent ?? "null");

async function get(path) {
  if (saved) {
    if (path in saved) return saved[path];
    throw new Refused("this file does not have it; elastic dashboard shows it from the files of the job");
  }
  const answer = await fetch(path, { credentials: "same-origin" });
  const document_ = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(document_.error ?? `the dashboard answers ${answer.status}`, answer.status);
  return document_;
}

async function post(path, body) {
  const headers = { "Content-Type": "application/json", "X-Elastic-Token": session.token };
  const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), credentials: "same-origin" });
  const document_ = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(document_.error ?? `the dashboard answers ${answer.status}`, answer.status);
  return document_.said;
}

async function tried(promise) {
  try {
    return await promise;
  } catch (error) {
    toast(error instanceof Refused ? error.message : "the dashboard does not answer", "bad");
    return null;
  }
}

// Begin again, until it succeeds.
async function retried(begin) {
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    try {
      return await begin();
    } catch (error) {
      if (error instanceof Refused && FINAL.includes(error.status)) return toast(error.message, "bad");
    }
  }
}

// A question before an action. Resolves to the input's value, or true; null if it is cancelled.
function ask({ title, detail, confirm, danger = false, number = null }) {
  const dialog = $("ask");
  return new Promise((resolve) => {
    const input = number === null ? null : h("input", { type: "number", min: 1, value: number, "aria-label": "Workers", name: "workers" });
    const close = (value) => { dialog.close(); resolve(value); };
    const yes = h("button", { type: "submit", class: danger ? "danger" : "", id: "ask-yes" }, confirm);
    const form = h("form", { method: "dialog", class: "body", onsubmit: (event) => { event.preventDefault(); close(input ? Number(input.value) : true); } },
      h("h2", { id: "ask-title" }, title), h("p", {}, detail), input,
      h("div", { class: "head" }, h("button", { type: "button", onclick: () => close(null) }, "Cancel"), yes));
    dialog.oncancel = () => resolve(null);
    dialog.replaceChildren(form);
    dialog.showModal();
    (input ?? yes).focus();
  });
}

// A panel over the page: its address is in the page's, so that it can be reloaded and sent to somebody.
function panel(title, ...content) {
  const dialog = $("panel");
  const close = h("button", { onclick: () => dialog.close(), class: "push" }, "Close");
  dialog.replaceChildren(h("div", { class: "body" }, h("div", { class: "head" }, h("h2", { id: "panel-title" }, title), close), ...content));
  if (!dialog.open) dialog.showModal();
  return dialog;
}

function place(changes) {
  if (saved) return; // browsers refuse it for files
  const address = new URL(location.href);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null) address.searchParams.delete(name);
    else address.searchParams.set(name, value);
  }
  history.replaceState(null, "", address);
}

$("panel").addEventListener("close", () => place({ worker: null, about: null, flight: null }));

// ------------------------------------------------------------------------------------------------- a job's page

class JobPage {
  constructor(name, fleet) {
    this.name = name;
    this.path = `/api/jobs/${encodeURIComponent(name)}`;
    this.fleet = fleet;
    this.document = null;
    this.live = 0;
    this.dirty = new Set();
    this.scalar = null;
    this.showAll = false;
    this.filter = "";
    this.connected = false;
    this.over = false;
    this.rows = new Map();
    this.build();
  }

  async start() {
    await this.read();
    this.follow();
    const asked = new URLSearchParams(location.search);
    if (asked.has("worker")) this.openWorker(asked.get("worker"));
    else if (asked.has("about")) this.openStory(asked.get("about"));
    else if (asked.has("flight")) this.openFlight();
  }

  async read() {
    this.take(await get(this.path));
  }

  take(read) {
    this.document = read;
    this.live = 0;
    this.choose();
    this.draw(...SECTIONS);
  }

  choose() {
    const names = Object.keys(this.document.steps.values);
    if (!names.includes(this.scalar)) this.scalar = names.find((name) => name === "loss") ?? names[0] ?? null;
  }

  // What comes while the answer is under way may be missing in it: then it is asked for again, from the answer's number.
  async reread() {
    const { events } = this;
    const read = await get(this.path);
    if (this.events !== events || events.readyState === EventSource.CLOSED) return; // it begins again anyway
    const { boot, number } = this.document;
    const misses = read.boot !== boot || read.number < number;
    this.take(read);
    if (misses) {
      events.close();
      this.follow();
    }
  }

  follow() {
    if (saved) return;
    const { boot, number } = this.document;
    const events = new EventSource(`${this.path}/events?after=${boot}-${number}`);
    this.events = events;
    events.onopen = () => { this.connected = true; this.draw("head"); };
    events.onerror = () => {
      this.connected = false;
      this.draw("head");
      if (events.readyState === EventSource.CLOSED && !this.over) this.again();
    };
    const on = (kind, take) => events.addEventListener(kind, (event) => take(JSON.parse(event.data), event));
    // An event without a number has that of the event before it: only those that have one of their own are asked for it.
    const onNumbered = (kind, take) => on(kind, (data, event) => {
      const at = Number(event.lastEventId.split("-")[1]);
      if (at <= this.document.number) return; // it is in a document that was read meanwhile
      this.document.number = at;
      take(data);
    });
    const keep = (list, limit) => (data) => { this.document[list].push(data); if (this.document[list].length > limit) this.document[list].shift(); };
    onNumbered("moment", (data) => { keep("moments", 2000)(data); this.draw("moments", "world"); this.speak(data); });
    onNumbered("generation", (data) => { keep("generations", 1000)(data); this.draw("world", "head"); });
    onNumbered("recovery", (data) => { keep("recoveries", 1000)(data); this.draw("recoveries"); });
    onNumbered("checkpoint", (data) => { keep("checkpoints", 1000)(data); this.draw("checkpoints"); });
    onNumbered("fault", (data) => { keep("faults", 1000)(data); this.draw("faults"); });
    onNumbered("plan", (data) => { this.document.plan = data; this.draw("tiles"); });
    onNumbered("steps", (data) => this.addSteps(data));
    onNumbered("rate", (data) => {
      const { t, ...values } = data;
      addPoint(this.document.rate, t, values);
      this.draw("rate");
    });
    on("state", (data) => { Object.assign(this.document, data); this.draw("head", "tiles", "time", "members", "world", "troubles"); });
    on("reset", () => { events.close(); this.again(); });
    on("end", () => { this.over = true; events.close(); this.connected = false; this.draw("head"); });
  }

  async again() {
    this.events.close();
    await retried(async () => {
      await this.read();
      this.follow();
    });
  }

  addSteps(data) {
    data.at.forEach((step, at) => addPoint(this.document.steps, step, data.scalars[at]));
    this.choose();
    this.live += data.at.length;
    this.draw("loss", "tiles");
    if (this.live > REREAD_STEPS) {
      this.live = 0;
      this.reread().catch(() => {}); // the next one does it
    }
  }

  speak(moment) {
    if (moment.level === "bad" || moment.event === "running") text($("spoken"), moment.said);
  }

  // Sections are drawn together, before the next frame.
  draw(...sections) {
    const idle = this.dirty.size === 0;
    sections.forEach((section) => this.dirty.add(section));
    if (!idle) return;
    const now = () => {
      const asked = [...this.dirty];
      this.dirty.clear();
      for (const section of asked) this[`draw_${section}`]();
    };
    if (document.visibilityState === "visible") requestAnimationFrame(now);
    else setTimeout(now, 200);
  }

  get status() { return this.document.status ?? {}; }
  get rounds() { return Boolean(this.status.restart); }

  build() {
    const card = (id, title, options = {}, ...content) => h("section", { class: `card ${options.half ? "half" : ""}`, id: `${id}-card`, "aria-label": title, hidden: options.hidden },
      h("div", { class: "head" }, h("h2", {}, title), ...(options.head ?? [])), ...content);
    const div = (id, cls = "") => h("div", { id, class: cls });
    const table = (id, caption, ...names) => h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
      h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, ...names.map((name) => h("th", { scope: "col", class: name.startsWith("#") ? "number" : "" }, name.replace("#", ""))))), h("tbody", { id })));
    const legend = h("div", { class: "legend" }, ...[["--bad", "loss"], ["--good", "join"], ["--warn", "drain, notice"]].map(([name, said]) => {
      const swatch = h("span", { class: "swatch" });
      swatch.style.background = `var(${name})`;
      return h("span", {}, swatch, said);
    }), h("span", {}, "click a line for its story"));
    const pick = h("select", { id: "scalar", "aria-label": "Scalar", onchange: (event) => { this.scalar = event.target.value; forget(this.lossChart); this.lossChart = null; this.draw("loss"); } });
    const filter = h("input", { type: "search", placeholder: "Filter events", "aria-label": "Filter events", class: "push", oninput: (event) => { this.filter = event.target.value.toLowerCase(); this.draw("moments"); } });
    const all = h("button", { id: "all-members", hidden: true, onclick: () => { this.showAll = true; this.draw("members"); } }, "Show all");
    const flight = h("button", { class: "push", onclick: () => this.openFlight() }, "Who waits for whom");
    $("main").replaceChildren(
      h("dl", { class: "tiles", id: "tiles" }),
      h("section", { id: "troubles", "aria-label": "Troubles", class: "card", hidden: true }),
      card("world", "Members over time", {}, div("world", "chart"), legend),
      card("loss", "Training", { half: true, head: [pick] }, div("loss", "chart")),
      card("rate", "Speed", { half: true }, div("rate", "chart")),
      card("time", "Where the time went", {}, div("time-bar", "bar"), h("ul", { class: "parts", id: "time-parts" })),
      card("members", "Members", { head: [all, flight] }, table("members", "Members", "Rank", "Worker", "Node", "#Pid", "#Step", "Doing", "#Shards", "#ms a shard", "")),
      card("recoveries", "Recoveries", { half: true }, table("recoveries", "Recoveries", "Generation", "When", "Lost", "#ms", "Phases")),
      card("checkpoints", "Checkpoints", { half: true }, table("checkpoints", "Checkpoints", "When", "Kind", "#Step", "#Size", "Outcome")),
      card("faults", "Injected faults", { hidden: true }, table("faults", "Injected faults", "#Number", "When", "Fault", "At", "Over")),
      card("moments", "Events", { head: [filter] }, h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Events" }, h("ol", { class: "events", id: "moments" }))),
    );
  }

  draw_head() {
    const { status } = this;
    const shown = JSON.stringify([status.state, status.because, status.level, status.exit_code, status.digest, this.connected, this.over, this.document.problem]);
    if (shown === this.head) return; // its buttons keep their focus
    this.head = shown;
    const state = status.state ?? "starting";
    const can = (action) => session.may_act && (this.document.actions ?? []).includes(action) && state !== "closed" && state !== "ended";
    const where = saved ? "" : this.connected ? h("span", { class: "live good", id: "connection" }, "live") : h("span", { class: "live warn", id: "connection" }, this.over ? "the dashboard has ended" : "connecting");
    const exit = status.exit_code === undefined || status.exit_code === null ? "" : `exit ${status.exit_code}`;
    document.title = `${this.name}: ${state}`;
    $("top").replaceChildren(...[
      this.fleet ? h("a", { href: "/" }, "← Fleet") : null,
      h("h1", {}, this.name),
      h("span", { class: `pill ${STATE_LEVEL[state] ?? "warn"}`, id: "state" }, state),
      exit ? h("span", { class: `pill ${status.exit_code === 0 ? "good" : "bad"}` }, exit) : null,
      h("span", { class: "push" }, where),
      can("scale") ? h("button", { id: "scale", onclick: () => this.scale() }, "Scale…") : null,
      can("stop") ? h("button", { class: "danger", onclick: () => this.stop() }, "Stop…") : null,
      h("p", { class: "because" }, [status.because, status.level].filter(Boolean).join(" — ")),
      status.digest ? h("p", { class: "because" }, `digest ${status.digest}`) : null,
      this.document.problem ? h("p", { class: "because bad" }, `The dashboard: ${this.document.problem}`) : null,
    ].filter(Boolean));
  }

  draw_tiles() {
    const { status, summary = {}, plan = {} } = { ...this.document, status: this.status };
    const time = summary.time ?? {};
    const rate = lastValue(this.document.rate, "steps_per_s");
    const total = plan.total ?? null;
    const step = summary.last_step ?? null;
    const left = total !== null && step !== null && rate > 0 ? span((total - 1 - step) / rate) : null;
    const recovery = this.document.recoveries.at(-1);
    const complete = this.document.checkpoints.filter((entry) => entry.outcome === "complete").at(-1);
    const tile = (name, value, more = "") => h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, value), h("dd", { class: "more" }, more));
    $("tiles").replaceChildren(
      this.rounds ? tile("Round", String(status.generation ?? 0)) : tile("Step", step === null ? "–" : String(step), [total !== null ? `of ${total}` : "", left && status.state !== "closed" ? `${left} left` : ""].filter(Boolean).join(", ")),
      tile("Steps a second", rate === null ? "–" : short(rate), samplesText(this.document.rate)),
      tile("Members", String(status.members?.length ?? 0), status.wanted ? `of ${status.wanted} wanted${status.spares?.length ? `, ${status.spares.length} spare` : ""}` : ""),
      tile("Generation", String(status.generation ?? 0), status.leader ? `leader ${status.leader}` : ""),
      tile("Goodput", time.goodput === null || time.goodput === undefined ? "–" : `${(100 * time.goodput).toFixed(1)} %`, time.redone_steps ? `${time.redone_steps} steps done again` : "no step done again"),
      tile("Recoveries", String(summary.recoveries ?? 0), recovery ? `the last in ${Math.round(recovery.recovery_ms)} ms` : ""),
      tile("Checkpoint", complete ? `step ${complete.step ?? "–"}` : "none yet", complete ? `${complete.kind}, ${clock(complete.t)}` : ""),
    );
  }

  draw_troubles() {
    const troubles = [...(this.status.troubles ?? []), ...(this.document.summary?.troubles ?? [])].map((trouble) => `${trouble.because}; ${trouble.advice}`);
    const held = Object.entries(this.status.held_up_by ?? {}).map(([worker, how]) => `${worker}: ${how}`);
    const slow = Object.entries(this.status.stragglers ?? {}).map(([worker, how]) => `straggler ${worker}: ${how}`);
    const said = [...held, ...slow, ...troubles];
    $("troubles").hidden = said.length === 0;
    $("troubles").replaceChildren(h("h2", { class: "warn" }, "Look at this"), h("ul", {}, ...said.map((one) => h("li", {}, one))));
  }

  draw_world() {
    const { generations } = this.document;
    if (!generations.length) return;
    const at = generations.map((one) => one.t);
    const members = generations.map((one) => one.members);
    const end = this.status.state === "closed" || this.status.state === "ended" ? Math.max(at.at(-1), this.document.moments.at(-1)?.t ?? 0) : Date.now() / 1000;
    this.world = this.world ?? worldChart($("world"), () => this.marks(), (t, plot) => {
      const reach = 10 * (plot.scales.x.max - plot.scales.x.min) / plot.over.clientWidth;
      const near = this.marks().filter((mark) => Math.abs(mark.t - t) <= reach).sort((a, b) => Math.abs(a.t - t) - Math.abs(b.t - t))[0];
      if (near) this.openStory(String(near.generation));
    });
    this.world.update([[...at, Math.max(end, at.at(-1) + 1)], [...members, members.at(-1)]]);
  }

  marks() {
    const kinds = { loss: "--bad", planned: "--good" };
    let before = 0;
    return this.document.generations.map((one) => {
      const fewer = one.members < before;
      before = one.members;
      return { t: one.t, generation: one.generation, color: one.kind === "planned" && fewer ? "--warn" : kinds[one.kind] };
    }).filter((mark) => mark.color);
  }

  draw_loss() {
    const { steps } = this.document;
    const names = Object.keys(steps.values);
    const pick = $("scalar");
    if (JSON.stringify([...pick.options].map((option) => option.value)) !== JSON.stringify(names)) pick.replaceChildren(...names.map((name) => h("option", { value: name, selected: name === this.scalar }, name)));
    $("loss-card").hidden = names.length === 0;
    if (this.scalar === null || !steps.values[this.scalar]) return;
    const values = steps.values[this.scalar];
    const band = Boolean(values.min);
    const shown = JSON.stringify([this.scalar, band]);
    if (this.lossChart && this.lossShown !== shown) { forget(this.lossChart); this.lossChart = null; }
    if (!this.lossChart) {
      $("loss").replaceChildren();
      this.lossChart = lineChart($("loss"), this.scalar, "--accent", { band, label: "step", beside: this.document.beside?.name });
      this.lossShown = shown;
    }
    const beside = this.document.beside;
    const others = beside ? [steps.at.map((at) => beside.steps.values[this.scalar]?.mean[beside.steps.at.indexOf(at)] ?? null)] : [];
    this.lossChart.update([steps.at, ...others, ...(band ? [values.mean, values.min, values.max] : [values.mean])]);
  }

  draw_rate() {
    const { rate } = this.document;
    $("rate-card").hidden = !rate.at.length;
    if (!rate.at.length) return;
    this.rateChart = this.rateChart ?? lineChart($("rate"), "steps a second", "--good", { time: true, fromZero: true });
    this.rateChart.update([rate.at, rate.values.steps_per_s.mean]);
  }

  draw_time() {
    const time = this.document.summary?.time ?? {};
    $("time-card").hidden = !time.total_s;
    if (!time.total_s) return;
    const parts = [["training", time.training_s], ...PARTS.map((name) => [name, time.parts[name] ?? 0])].filter(([, seconds]) => seconds > 0);
    $("time-bar").replaceChildren(...parts.map(([name, seconds]) => {
      const piece = h("span", { class: `s-${name}`, title: `${name}: ${span(seconds)}` });
      piece.style.width = `${(100 * seconds) / time.total_s}%`;
      return piece;
    }));
    $("time-parts").replaceChildren(...parts.map(([name, seconds]) => h("li", {}, h("span", { class: `swatch s-${name}` }), `${name} ${span(seconds)}`)));
  }

  draw_members() {
    const members = [...(this.status.members ?? [])];
    const held = this.status.held_up_by ?? {};
    const shown = this.showAll ? members : members.slice(0, SHOWN_MEMBERS);
    $("all-members").hidden = shown.length === members.length;
    text($("all-members"), `Show all ${members.length}`);
    const kept = new Set();
    const body = $("members");
    shown.forEach((member, at) => {
      kept.add(member.worker_id);
      const cells = this.rows.get(member.worker_id) ?? this.memberRow(member.worker_id);
      const slow = this.status.stragglers?.[member.worker_id] ? ", straggler" : "";
      const waited = held[member.worker_id] ? `the others wait: ${held[member.worker_id]}` : "";
      [member.rank, null, member.node, member.pid, this.rounds ? "" : member.applied, waited || `${member.phase || "–"}${slow}`, member.shards, member.shard_ms === null ? "–" : short(member.shard_ms)].forEach((value, index) => {
        if (value !== null) text(cells.cells[index], String(value));
      });
      cells.cells[5].className = waited || slow ? "wide warn" : "wide";
      if (body.children[at] !== cells.row) body.insertBefore(cells.row, body.children[at] ?? null);
    });
    for (const [worker, cells] of this.rows) {
      if (!kept.has(worker)) { cells.row.remove(); this.rows.delete(worker); }
    }
  }

  memberRow(worker) {
    const cells = Array.from({ length: 9 }, (_, at) => h("td", { class: [3, 4, 6, 7].includes(at) ? "number" : "" }));
    cells[1].append(h("button", { class: "link", onclick: () => this.openWorker(worker) }, worker));
    if (session.may_act && this.document.actions.includes("kill")) cells[8].append(h("button", { class: "danger", "aria-label": `Kill ${worker}`, onclick: () => this.kill(worker) }, "Kill…"));
    const made = { row: h("tr", { "data-worker": worker }, ...cells), cells };
    this.rows.set(worker, made);
    return made;
  }

  draw_recoveries() {
    show($("recoveries"), this.document.recoveries.slice(-100).reverse(), (one) => {
      const bar = h("span", { class: "bar phases" });
      const total = PARTS.reduce((sum, part) => sum + (one[`${part}_ms`] ?? 0), 0);
      for (const part of PARTS) {
        const piece = h("span", { class: `s-${part}`, title: `${part} ${Math.round(one[`${part}_ms`] ?? 0)} ms` });
        piece.style.width = `${total ? (100 * (one[`${part}_ms`] ?? 0)) / total : 0}%`;
        bar.append(piece);
      }
      const story = h("button", { class: "link", onclick: () => this.openStory(String(one.generation)) }, String(one.generation));
      return h("tr", {}, h("td", {}, story), h("td", {}, clock(one.t)), h("td", { class: "wide" }, one.lost.join(", ") || one.because),
        h("td", { class: "number" }, String(Math.round(one.recovery_ms))), h("td", {}, bar));
    }, emptyRow("nothing was lost yet"));
  }

  draw_checkpoints() {
    show($("checkpoints"), this.document.checkpoints.slice(-100).reverse(), (one) => h("tr", {}, h("td", {}, clock(one.t)), h("td", {}, one.kind),
      h("td", { class: "number" }, String(one.step ?? "")), h("td", { class: "number" }, bytes(one.bytes)),
      h("td", { class: `wide ${one.outcome === "complete" ? "" : "warn"}` }, one.because ? `${one.outcome}: ${one.because}` : one.outcome)), emptyRow("none yet"));
  }

  draw_faults() {
    const ended = new Map(this.document.faults.filter((one) => one.event === "fault_ended").map((one) => [one.number, one.t]));
    const injected = this.document.faults.filter((one) => one.event === "fault_injected").reverse();
    $("faults-card").hidden = injected.length === 0;
    show($("faults"), injected, (one) => h("tr", {}, h("td", { class: "number" }, String(one.number ?? "")), h("td", {}, clock(one.t)),
      h("td", {}, one.fault ?? ""), h("td", { class: "wide" }, one.worker || one.target || ""), h("td", {})), emptyRow("none"));
    injected.forEach((one) => text(made.get(one).lastChild, ended.has(one.number) ? clock(ended.get(one.number)) : ""));
  }

  draw_moments() {
    const wanted = (one) => !this.filter || `${one.said} ${one.because} ${one.event}`.toLowerCase().includes(this.filter);
    const none = h("li", { class: "empty" }, h("span"), h("span", {}, this.filter ? "no event says that" : "nothing yet"));
    show($("moments"), this.document.moments.filter(wanted).slice(-SHOWN_MOMENTS).reverse(), (one) => h("li", { "data-event": one.event },
      h("time", { datetime: new Date(one.t * 1000).toISOString() }, clock(one.t)),
      h("span", { class: one.level === "info" ? "" : one.level }, one.because ? `${one.said}: ${one.because.split("\n")[0]}` : one.said)), none);
  }

  // ---------------------------------------------------------------------------------------------- panels

  async openStory(about) {
    place({ about, worker: null, flight: null });
    const told = await tried(get(`${this.path}/story?about=${encodeURIComponent(about)}`));
    if (!told) return;
    const title = /^\d+$/.test(about) ? `${this.rounds ? "Round" : "Generation"} ${about}` : about;
    const recovery = this.document.recoveries.find((one) => String(one.generation) === about);
    panel(title,
      recovery ? h("p", {}, `Recovery in ${Math.round(recovery.recovery_ms)} ms: ${PARTS.slice(0, 5).map((part) => `${part} ${Math.round(recovery[`${part}_ms`])}`).join(", ")}; then the operation in ${Math.round(recovery.redo_ms)} ms.`) : null,
      ...Object.entries(told.away).map(([who, because]) => h("p", { class: "warn" }, `What ${who} knows is missing: ${because}`)),
      told.left_out ? h("p", { class: "soft" }, `${told.left_out} earlier lines are left out; elastic story has them.`) : null,
      told.moments.length ? h("ol", { class: "events" }, ...told.moments.map((one) => h("li", {}, h("time", {}, `${clock(one.t)}`), h("span", {}, one.because ? `${one.said}: ${one.because.split("\n")[0]}` : one.said)))) : h("p", { class: "empty" }, "The journals say nothing of it."));
  }

  async openFlight() {
    place({ flight: "1", worker: null, about: null });
    const told = await tried(get(`${this.path}/flight`));
    if (told) panel("Who waits for whom", h("pre", { tabindex: 0 }, told.text || "No worker has noted anything yet."));
  }

  async openWorker(worker) {
    place({ worker, about: null, flight: null });
    const log = h("pre", { tabindex: 0, id: "log" }, "…");
    const stacks = h("pre", { tabindex: 0, id: "stacks", hidden: true });
    const member = () => (this.status.members ?? []).find((one) => one.worker_id === worker);
    const facts = member() ? `rank ${member().rank} on ${member().node}, process ${member().pid}, ${member().phase || "–"}` : "no member now";
    const may = (action) => session.may_act && this.document.actions.includes(action) && member();
    const dialog = panel(worker, h("p", { class: "soft" }, facts),
      h("div", { class: "head" },
        h("button", { onclick: () => this.openStory(worker) }, "Story"),
        may("stacks") ? h("button", { id: "ask-stacks", onclick: async (event) => {
          event.target.disabled = true;
          const said = await tried(post(`${this.path}/actions`, { action: "stacks", worker }));
          event.target.disabled = false;
          if (said !== null) { stacks.hidden = false; stacks.textContent = said; }
        } }, "Stacks") : null,
        may("kill") ? h("button", { class: "danger", onclick: () => this.kill(worker) }, "Kill…") : null),
      stacks, h("h3", {}, "Log"), log);
    let end = "";
    const look = async () => {
      const piece = await get(`${this.path}/workers/${encodeURIComponent(worker)}/log?offset=${end}`);
      const below = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
      if (end === "") log.textContent = piece.text || "";
      else if (piece.text) log.append(piece.text);
      if (end === "" || (below && piece.text)) log.scrollTop = log.scrollHeight;
      end = piece.end;
    };
    while (dialog.open && log.isConnected) {
      try { await look(); } catch (error) {
        if (end === "") log.textContent = error instanceof Refused ? error.message : "the dashboard does not answer";
      }
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }

  // --------------------------------------------------------------------------------------------- actions

  async act(body, question) {
    const answer = await ask(question);
    if (answer === null) return;
    const said = await tried(post(`${this.path}/actions`, question.number === undefined ? body : { ...body, workers: answer }));
    if (said !== null) toast(said, "good");
  }

  kill(worker) {
    return this.act({ action: "kill", worker }, { title: `Kill ${worker}?`, detail: "It gets SIGKILL, as if its machine had failed. The others finish the step, and a new worker takes its place.", confirm: "Kill", danger: true });
  }

  stop() {
    return this.act({ action: "stop" }, { title: `Stop ${this.name}?`, detail: "It stops after a step, with a checkpoint of that step.", confirm: "Stop", danger: true });
  }

  scale() {
    return this.act({ action: "scale" }, { title: `Scale ${this.name}`, detail: "How many workers shall the job have?", confirm: "Scale", number: this.status.wanted ?? this.status.workers ?? 1 });
  }
}

const SECTIONS = ["head", "tiles", "troubles", "world", "loss", "rate", "time", "members", "recoveries", "checkpoints", "faults", "moments"];

// The elements of these things, in this order.
function show(parent, things, make, otherwise) {
  arrange(parent, things.map((thing) => {
    if (!made.has(thing)) made.set(thing, make(thing));
    return made.get(thing);
  }), otherwise);
}

// These elements, in this order. One that is there already stays, with its focus and selection.
function arrange(parent, elements, otherwise) {
  const wanted = elements.length ? elements : [otherwise];
  const kept = new Set(wanted);
  for (const child of [...parent.children]) if (!kept.has(child)) child.remove();
  wanted.forEach((element, at) => {
    if (parent.children[at] !== element) parent.insertBefore(element, parent.children[at] ?? null);
  });
}

const made = new WeakMap();

const emptyRow = (said) => h("tr", {}, h("td", { colspan: 9, class: "empty" }, said));

// A point of a thinned series: a live point is one value, whatever the points before stand for.
function addPoint(series, at, values) {
  series.at.push(at);
  for (const [name, value] of Object.entries(values)) {
    if (!Object.hasOwn(series.values, name)) {
      // A plain assignment to "__proto__" would make no value of that name.
      const value = { mean: series.at.slice(1).map(() => null) };
      Object.defineProperty(series.values, name, { value, enumerable: true, configurable: true, writable: true });
    }
    const kept = series.values[name];
    kept.mean.push(value);
    if (kept.min) { kept.min.push(value); kept.max.push(value); }
  }
  for (const kept of Object.values(series.values)) {
    for (const list of Object.values(kept)) if (list.length < series.at.length) list.push(null);
  }
}

function lastValue(series, name) {
  return series.values[name]?.mean.at(-1) ?? null;
}

function samplesText(rate) {
  const value = lastValue(rate, "samples_per_s");
  return value ? `${short(value)} samples a second` : "";
}

// ---------------------------------------------------------------------------------------------- a fleet's page

const taken = (node) => Object.values(node.jobs).reduce((total, count) => total + count, 0);

class FleetPage {
  shown = {};

  async start() {
    this.build();
    await this.begin();
  }

  async begin() {
    this.draw(await get("/api/fleet"));
    const events = new EventSource("/api/fleet/events");
    events.addEventListener("fleet", (event) => { this.live = true; this.draw(JSON.parse(event.data)); });
    events.addEventListener("end", () => events.close());
    events.onerror = () => {
      this.live = false;
      this.draw(this.seen);
      if (events.readyState === EventSource.CLOSED) retried(() => this.begin());
    };
  }

  build() {
    const card = (id, title, ...names) => h("section", { class: "card", "aria-label": title }, h("div", { class: "head" }, h("h2", {}, title)),
      h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, h("table", {}, h("caption", {}, title),
        h("thead", {}, h("tr", {}, ...names.map((name) => h("th", { scope: "col" }, name)))), h("tbody", { id }))));
    $("main").replaceChildren(h("dl", { class: "tiles", id: "tiles" }), h("section", { class: "card", id: "troubles", "aria-label": "Troubles", hidden: true }),
      card("jobs", "Jobs", "Job", "State", "Workers", "Where", "Why"), card("nodes", "Nodes", "Node", "State", "Slots", "Labels", "Why", ""),
      card("findings", "Doctor", "", "About", "Where", "Found", "To do"));
    $("findings").append(emptyRow("not examined yet; nothing is changed by it"));
    const button = h("button", { id: "examine", class: "push", onclick: () => this.examine(button) }, "Examine the fleet");
    document.querySelector("[aria-label=Doctor] .head").append(button);
  }

  async examine(button) {
    button.disabled = true;
    text(button, "Examining…");
    const told = await tried(get("/api/fleet/findings"));
    button.disabled = false;
    text(button, "Examine the fleet");
    if (told === null) return;
    $("findings").replaceChildren(...told.findings.map((one) => h("tr", { class: "finding" },
      h("td", {}, h("span", { class: `pill ${one.advice ? "warn" : "good"}` }, one.advice ? "to do" : "OK")), h("td", {}, one.about), h("td", {}, one.where),
      h("td", { class: "wide" }, one.said), h("td", { class: "wide" }, one.advice))));
    const todo = told.findings.filter((one) => one.advice).length;
    toast(todo ? `${todo} of ${told.findings.length} findings are to do` : "all is well", todo ? "warn" : "good");
  }

  draw(seen) {
    this.seen = seen;
    const { jobs = [], nodes = [], troubles = [] } = seen;
    document.title = "elastic: fleet";
    $("top").replaceChildren(h("h1", {}, "Fleet"), h("span", { class: "pill info" }, seen.leader ? `leader ${seen.leader}` : "no leader"),
      h("span", { class: `live push ${this.live ? "good" : "warn"}`, id: "connection" }, this.live ? "live" : "connecting"),
      ...(seen.problem ? [h("p", { class: "because bad" }, seen.problem)] : []));
    const up = nodes.filter((node) => node.up);
    const running = jobs.filter((job) => job.state !== "ended");
    const sum = (numbers) => numbers.reduce((total, count) => total + count, 0);
    $("tiles").replaceChildren(...[["Jobs", running.length, `${jobs.length - running.length} ended`], ["Waiting", jobs.filter((job) => job.state === "waits").length, "in the queue"],
      ["Nodes", up.length, `${nodes.length - up.length} away`], ["Slots taken", sum(up.map(taken)), `of ${sum(up.map((node) => node.slots))}`]]
      .map(([name, value, more]) => h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, String(value)), h("dd", { class: "more" }, more))));
    $("troubles").hidden = troubles.length === 0;
    $("troubles").replaceChildren(h("h2", { class: "warn" }, "Look at this"), h("ul", {}, ...troubles.map((one) => h("li", {}, `${one.because}; ${one.advice}`))));
    const shown = [...running, ...jobs.filter((job) => job.state === "ended").slice(-50).reverse()];
    this.rows("jobs", shown, (job) => this.jobRow(job), "no jobs");
    this.rows("nodes", nodes, (node) => this.nodeRow(node), "no nodes");
  }

  // A row whose words are the same stays the same element, so that a click and the focus are not lost.
  rows(id, things, make, otherwise) {
    const before = this.shown[id] ?? new Map();
    const now = new Map(things.map((thing) => JSON.stringify(thing)).map((words, at) => [words, before.get(words) ?? make(things[at])]));
    const active = document.activeElement?.dataset?.focus;
    arrange($(id), [...now.values()], emptyRow(otherwise));
    if (active) document.querySelector(`[data-focus="${CSS.escape(active)}"]`)?.focus();
    this.shown[id] = now;
  }

  jobRow(job) {
    const ended = job.state === "ended";
    const level = ended ? (job.exit_code === 0 ? "good" : "bad") : STATE_LEVEL[job.state] ?? "warn";
    return h("tr", { "data-job": job.job }, h("td", {}, h("a", { href: `/?job=${encodeURIComponent(job.job)}`, "data-focus": `job ${job.job}` }, job.job)),
      h("td", {}, h("span", { class: `pill ${level}` }, ended ? `ended, exit ${job.exit_code}` : job.state)), h("td", {}, String(job.workers)),
      h("td", {}, Object.entries(job.slots ?? {}).map(([node, count]) => `${count} on ${node}`).join(", ")), h("td", { class: "wide" }, String(job.because ?? "").split("\n")[0]));
  }

  nodeRow(node) {
    const state = !node.up ? ["bad", "away"] : node.because ? ["warn", "leaves"] : ["good", "up"];
    const button = h("button", { "data-focus": `node ${node.node}`, onclick: () => this.drain(node) }, node.because ? "Take back…" : "Drain…");
    return h("tr", { "data-node": node.node }, h("td", {}, node.node), h("td", {}, h("span", { class: `pill ${state[0]}` }, state[1])), h("td", {}, `${taken(node)} of ${node.slots}`),
      h("td", {}, (node.labels ?? []).join(" ")), h("td", { class: "wide" }, node.because ?? ""), h("td", {}, session.may_act ? button : ""));
  }

  async drain(node) {
    const over = Boolean(node.because);
    const answer = await ask(over ? { title: `Take ${node.node} back?`, detail: "It may have jobs again.", confirm: "Take back" }
      : { title: `Drain ${node.node}?`, detail: "Its workers leave between two steps; nothing is computed twice. It gets no job until it is taken back.", confirm: "Drain", danger: true });
    if (answer === null) return;
    const said = await tried(post(`/api/nodes/${encodeURIComponent(node.node)}/drain`, { over }));
    if (said !== null) toast(said, "good");
  }
}

// -------------------------------------------------------------------------------------------------- the start

place({ key: null }); // it stays out of bookmarks and of what is sent to others
let session = null;

try {
  session = await get("/api/session");
  const job = new URLSearchParams(location.search).get("job");
  const page = session.mode === "job" ? new JobPage(session.job, false) : job ? new JobPage(job, true) : new FleetPage();
  await page.start();
} catch (error) {
  $("main").replaceChildren(h("p", { class: "bad" }, error instanceof Refused ? error.message : `This page cannot be shown: ${error}`));
}
