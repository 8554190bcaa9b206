// One run: its state, what it needs, curves, samples, evaluations, data, choices, settings and events.

import {html} from "./vendor/lit.js";
import {View, alive, announce, bytes, command, count, duration, finder, number, scroller, state, table, text} from "./util.js";
import {smooth} from "./curves.js";
import {marksOf, troublesOf} from "./panels.js";

class Run extends View {
	static properties = ["data", "run", "detail", "events", "version", "failed", "find", "resuming"];

	constructor() {
		super();
		Object.assign(this, {detail: null, events: [], version: 0, failed: "", find: ""});
	}

	connectedCallback() {
		super.connectedCallback();
		this.listen("run", (event) => String(event.id) === this.run && this.load(event));
		this.listen("refresh", () => this.load());
		this.listen("rows", () => (this.version = this.store.version));
		this.load();
	}

	// What an event says has grown; all of it without one. Calls while one is under way become one more.
	async load(event) {
		const sizes = event && `${event.events} ${event.previews} ${event.state} ${!event.console}`;
		if (event && this.detail && sizes === this.sizes && !this.loading) {
			await this.data.update(this.run).catch(() => null);
			this.version = this.store.version;
			this.detail = {...this.detail, status: {...this.detail.status, ...event}};
			return;
		}
		if (event) this.sizes = sizes;
		return this.paced(async () => {
			const before = this.detail?.status.state, detail = await this.data.run(this.run, 1);
			[this.store, this.events] = await Promise.all([this.data.update(this.run), this.data.events(this.run)]);
			this.detail = detail;
			this.version = this.store.version;
			if (before && before !== detail.status.state) announce(`${detail.name} is ${detail.status.state}`);
		});
	}

	render() {
		const run = this.detail;
		if (!run) return html`<p class="empty" role="status">${this.failed ? `This run cannot be shown: ${this.failed}.` : "Reading the run …"}</p>`;
		const troubles = troublesOf(this.events).slice(-20), {status} = run, marks = marksOf(this.events);
		const sources = [{label: run.name, steps: run.previews, url: (step) => this.data.picture(this.run, "preview", step), channels: run.channels, sheet: (step) => this.data.channels(this.run, step)}];
		return html`<header class="run-head"><h1>${run.name}</h1><p class="line">${state(status.state)} <span class="soft">${status.detail}</span>
				${status.steps ? html`<progress max=${status.steps} value=${status.step} aria-label="Progress"></progress> ${count(status.step)} of ${count(status.steps)} steps` : ""}
				${status.seconds_left ? html`· ${duration(status.seconds_left)} left` : ""}</p>
				<nav class="inner" aria-label="On this page">${["Curves", "Samples", "Data", "Settings", "Events"].map((name) => html`<button class="quiet" @click=${() => this.goTo(name)}>${name}</button>`)}</nav></header>
			${this.ending(run)}
			<dl class="facts">${this.facts(run).map(([label, value, remark]) => html`<div><dt>${label}</dt><dd><b>${value}</b> <span class="soft">${remark}</span></dd></div>`)}</dl>
			${this.data.steers ? this.steering(run) : ""}
			${troubles.length || run.findings?.length ? html`<section><h2>Needs attention</h2>${this.findings(run)}${troubles.length ? this.eventTable(troubles, "Troubles") : ""}</section>` : ""}
			<section id="Curves"><h2>Curves</h2><unfog-panels .data=${this.data} .runs=${[{id: this.run, label: run.name, store: this.store, marks}]} .version=${this.version}></unfog-panels>
				<unfog-levels .store=${this.store} .version=${this.version}></unfog-levels></section>
			<section id="Samples"><h2>Samples</h2><unfog-pictures .sources=${sources}></unfog-pictures>
				${run.denoising?.length ? html`<h3>Denoising, step ${count(run.denoising.at(-1))}</h3>${scroller("Denoising", html`<img class="wide" src=${this.data.picture(this.run, "denoising", run.denoising.at(-1))} alt="Noisy images and what the network makes of them, by noise level">`)}` : ""}</section>
			${run.evaluations?.length ? html`<section><h2>Evaluations</h2>${run.evaluations.map((one) => this.evaluation(one))}</section>` : ""}
			<section id="Data"><h2>Data</h2>${this.dataReport(run.data)}${run.contact_sheet ? html`<details><summary>Contact sheet of the training images; --augment and --flip show</summary><img src=${this.data.picture(this.run, "contact")} alt="Some of the training images, as the network sees them" loading="lazy"></details>` : ""}</section>
			${run.choices?.length ? html`<section><h2>Chosen automatically</h2>${table("Chosen automatically", ["setting", "value", "reason"], run.choices.map((one) => [one.setting, text(one.value), one.reason]))}</section>` : ""}
			<section id="Settings"><h2>Settings</h2>${this.settings(run)}</section>
			<section id="Events"><h2>Events</h2>${this.events.length ? this.eventTable([...this.events].reverse().slice(0, 300), "Events") : html`<p class="empty">None yet.</p>`}
				${run.events_left_out ? html`<p class="soft">${count(run.events_left_out)} earlier events are in events.jsonl.</p>` : ""}</section>`;
	}

	updated() {
		if (this.detail) document.title = `${this.detail.name} · Unfog`;
	}

	// Why a run that does not run any more has ended, and how it goes on.
	ending({status, checkpoints, commands}) {
		const from = checkpoints?.length ? ` It goes on from its checkpoint of step ${count(checkpoints.at(-1))}:` : "";
		const why = {
			killed: `Its process is gone without a word: it was killed, memory ran out, or the machine went down${status.detail ? `. Last it did: ${status.detail}` : ""}.${from}`,
			failed: `It ended in an error; see below.${from}`,
			stopped: `It was stopped on request, at step ${count(status.step)}.${from}`,
		}[status.state];
		return why ? html`<p class="ending">${why} ${from && this.data.steers ? command(commands?.resume) : ""}</p>` : "";
	}

	goTo(name) {
		const section = document.getElementById(name);
		section.scrollIntoView({behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth"});
		section.tabIndex = -1;
		section.focus({preventScroll: true});
	}

	facts(run) {
		const last = (name) => this.store.column(name)?.at(-1) ?? this.store.column(`${name}.last`)?.at(-1);
		const facts = [], loss = this.store.series("step", "loss"), held = this.store.series("step", "held_out_loss"), speed = this.store.series("step", "images_per_second").y;
		if (Number.isFinite(last("images"))) facts.push(["images seen", count(last("images")), `${count(last("step"))} step${last("step") === 1 ? "" : "s"}`]);
		if (Number.isFinite(last("seconds"))) facts.push(["time", duration(last("seconds")), ""]);
		if (speed.length) facts.push(["images a second", number([...speed].sort((a, b) => a - b)[speed.length >> 1]), "median"]);
		if (loss.x.length) facts.push(["loss", number(smooth(loss.x, loss.y, 0.02 * (loss.x.at(-1) - loss.x[0])).at(-1)), "smoothed"]);
		if (held.x.length) {
			const best = held.y.reduce((least, y, i) => (y < held.y[least] ? i : least), 0);
			facts.push(["held-out loss", number(held.y.at(-1)), `lowest ${number(held.y[best])} at step ${count(held.x[best])}`]);
		}
		if (run.checkpoints?.length) facts.push(["checkpoints", count(run.checkpoints.length), `newest at step ${count(run.checkpoints.at(-1))}${run.checkpoint_bytes ? `, ${bytes(run.checkpoint_bytes)}` : ""}`]);
		if (run.status.memory) facts.push(["memory", bytes(run.status.memory), "of the process"]);
		if (run.status.free !== undefined) facts.push(["free on the disk", bytes(run.status.free), `the run takes ${bytes(run.status.bytes ?? NaN)}`]);
		for (const [kind, label] of [["step_refused", "steps skipped"], ["rolled_back", "roll-backs"]]) {
			const n = run.counts[kind];
			if (n) facts.push([label, count(n), kind === "step_refused" ? "not finite; weights untouched" : "to earlier weights, as it diverged"]);
		}
		return facts;
	}

	steering(run) {
		const ask = (label, path, line, body) => html`<unfog-ask .data=${this.data} .label=${label} .path=${path} .line=${line || ""} .body=${body}></unfog-ask>`;
		const c = run.commands || {}, base = `api/runs/${this.run}`, training = alive(run.status.state);
		return html`<section class="steering"><h2 class="hidden">Steer</h2>
			${training ? [["Save now", "save"], ["Preview now", "preview"], ["Stop", "stop"]].map(([label, what]) => ask(label, `${base}/ask`, c[what], {what})) : ""}
			${ask("Run the doctor", "api/doctor", c.doctor, {run: run.id})}
			${training ? "" : html`<details @toggle=${(e) => (this.resuming ||= e.target.open)}><summary>Resume, with changed settings if you like</summary>${this.resuming ? html`<unfog-form .data=${this.data} .kind=${"resume"} .current=${{...run.settings, "training.steps": run.status.steps || undefined}} .path=${`${base}/resume`}></unfog-form>` : ""}</details>`}
			${run.output ? html`<details><summary>Output of the run</summary><unfog-task .data=${this.data} .path=${run.output} .size=${run.output.endsWith("/log") ? run.status.console : undefined}></unfog-task></details>` : ""}
			<details><summary>Other commands</summary>${Object.entries(c).filter(([name]) => !/^(save|preview|stop|doctor)$/.test(name)).map(([, line]) => html`<p>${command(line)}</p>`)}</details></section>`;
	}

	findings(run) {
		return (run.findings || []).filter((one) => one.severity !== "fine").map((one) => html`<article class="finding"><p><b class=${one.severity}>${one.severity}</b> ${one.text}</p>
			${one.remedy ? html`<p class="soft">${one.remedy}</p>` : ""}${one.command && this.data.steers ? html`<unfog-ask .data=${this.data} .label=${"Do this"} .path=${`api/runs/${this.run}/resume`} .line=${one.command} .body=${{finding: one.id}}></unfog-ask>` : command(one.command)}</article>`);
	}

	eventTable(rows, name) {
		const kind = (row) => (row.trouble ? html`<span class="warning">▲ ${row.kind}</span>` : row.kind);
		const cells = rows.map((row) => [String(row.time).slice(0, 19).replace("T", " "), count(row.step), kind(row),
			html`${row.cause && row.trouble ? row.cause : row.details}${row.remedy ? html`<br><span class="soft">Remedy: ${row.remedy}</span>` : ""}`]);
		return table(name, ["time, UTC", "step", "kind", "details"], cells, "events");
	}

	// The metric of real images against each other: a value, or the range of random halves.
	real(m) {
		if (Number.isFinite(m.real_low) && Number.isFinite(m.real_high)) return `${number(m.real_low)} to ${number(m.real_high)}`;
		return m.real === null ? "" : number(m.real);
	}

	evaluation(one) {
		const interval = (m) => (Number.isFinite(m.low) && Number.isFinite(m.high) ? `${number(m.low)} to ${number(m.high)}` : "");
		const rows = (one.measured || []).map((m) => [m.metric, m.value === null ? "refused" : number(m.value), interval(m), this.real(m), count(m.n), count(m.n_reference), m.features, m.resize]);
		return html`<h3>step ${count(one.step)}</h3>${one.here === false ? html`<p class="warning">Not checked: stored on another machine or by an earlier version of Unfog, or changed since</p>` : ""}${one.verdict ? html`<p>${one.verdict}</p>` : ""}<p class="soft">${text(one.drawn)}</p>
			${rows.length ? table(`Evaluation of step ${one.step}`, ["metric", "value", "95% interval", "real images", "n", "reference", "features", "resize"], rows) : ""}
			${Object.entries(Object.groupBy((one.measured || []).filter((m) => m.note), (m) => m.note)).map(([note, of]) => html`<p class="soft">${of.map((m) => m.metric).join(", ")}: ${note}</p>`)}
			${(one.tables || []).map((t) => html`<p>${t.title}</p>${table(t.title, t.heads, t.rows)}`)}
			${one.charts?.length ? html`<div class="charts">${one.charts.map((chart) => html`<img src=${chart.picture} alt=${`${chart.title}: generated images, real images, and the range of halves of these`}>`)}</div>` : ""}
			${(one.copies || []).map((copy) => html`<p class=${copy.severity}>copies of training images, by ${copy.by}: ${copy.evidence}${copy.remedy ? `; ${copy.remedy}` : ""}</p>
				${String(copy.picture).startsWith("data:") ? scroller("Copies", html`<img src=${copy.picture} alt="Generated images over the training images nearest to them">`) : ""}`)}`;
	}

	dataReport(data) {
		if (!data) return html`<p class="empty">No data report in this folder.</p>`;
		const {fields, classes, skipped, skipped_count} = data;
		const most = Math.max(1, ...Object.values(classes));
		return html`<table class="pairs">${Object.entries(fields).map(([key, value]) => html`<tr><th scope="row">${key.replaceAll("_", " ")}</th><td>${text(value)}</td></tr>`)}</table>
			${Object.keys(classes).length ? html`<details open><summary>${count(Object.keys(classes).length)} classes</summary><ul class="classes">${Object.entries(classes).slice(0, 200).map(([name, n]) => html`<li><span>${name}</span> <meter max=${most} value=${n} aria-label="images of ${name}"></meter> ${count(n)}</li>`)}</ul></details>` : ""}
			${skipped_count ? html`<details><summary>${count(skipped_count)} ${skipped_count === 1 ? "file" : "files"} left out</summary><ul>${skipped.map((one) => html`<li>${one}</li>`)}</ul></details>` : ""}`;
	}

	settings(run) {
		const changed = run.changed || {}, fits = finder(this.find);
		const rows = Object.entries(run.settings || {}).filter(([name, value]) => fits(`${name} ${value}`));
		const order = rows.sort(([a], [b]) => (b in changed) - (a in changed));
		return html`<p><input type="search" placeholder="Search settings" aria-label="Search settings" .value=${this.find} @input=${(e) => (this.find = e.target.value)}> <span class="soft" role="status">${count(rows.length)} shown</span></p>
			<div class="settings"><table class="pairs">${order.map(([name, value]) => html`<tr class=${name in changed ? "changed" : ""}><th scope="row">${name}</th><td>${text(value)}${name in changed ? html` <span class="soft">changed; default ${text(changed[name][0]) || "empty"}</span>` : ""}</td></tr>`)}</table></div>`;
	}
}
customElements.define("unfog-run", Run);
