// The list of runs: live, searched, sorted, and a choice of up to eight to compare.

import {html} from "./vendor/lit.js";
import {View, count, number, duration, bytes, finder, state, keep, route} from "./util.js";

export const MOST = 8; // runs that are compared at once

const COLUMNS = [
	["name", "run", (run) => run.name],
	["state", "state", (run) => run.state],
	["step", "progress", (run) => (run.steps ? run.step / run.steps : run.step ? 1 : 0)],
	["left", "time left", (run) => run.seconds_left ?? Infinity],
	["best", "best", // the best first, whether that is the highest or the lowest
		(run) => (Number.isFinite(run.best) ? (run.higher ? -run.best : run.best) : Infinity)],
	["bytes", "disk", (run) => run.bytes ?? 0],
	["age", "last written", (run) => run.age ?? Infinity],
];

class Runs extends View {
	static properties = ["data", "runs", "failed", "chosen"];

	constructor() {
		super();
		Object.assign(this, {runs: null, failed: "", chosen: new Set((route().query.get("pick") || "").split(",").filter(Boolean).map(Number))});
	}

	connectedCallback() {
		super.connectedCallback();
		for (const kind of ["runs", "refresh"]) this.listen(kind, () => this.load());
		this.listen("run", (row) => this.replace(row));
		this.load();
	}

	load() {
		return this.paced(async () => (this.runs = await this.data.runs()));
	}

	// An event of a run holds its whole row.
	replace(row) {
		if (this.runs?.some((run) => run.id === row.id)) this.runs = this.runs.map((run) => (run.id === row.id ? {...run, ...row} : run));
		else this.load();
	}

	get shown() {
		const {query} = route(), fits = finder(query.get("find") || "");
		const [by, order] = [query.get("sort") || "age", query.get("order") === "down" ? -1 : 1];
		const value = (COLUMNS.find(([name]) => name === by) || COLUMNS[6])[2];
		const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", {numeric: true}) : a === b ? 0 : a < b ? -1 : 1);
		return (this.runs || []).filter((run) => fits(`${run.name} ${run.state} ${run.detail || ""}`)).sort((a, b) => order * compare(value(a), value(b)));
	}

	render() {
		if (!this.runs) return html`<p class="empty" role="status">${this.failed ? `The runs cannot be listed: ${this.failed}.` : "Reading the runs …"}</p>`;
		const {query} = route(), shown = this.shown, running = this.runs.filter((run) => run.state === "running").length;
		return html`<header class="bar"><h1>Runs</h1><p class="soft" role="status">${count(this.runs.length)} in this folder, ${running} running${shown.length < this.runs.length ? `, ${shown.length} shown` : ""}</p>
			<span class="grow"></span>
			<input type="search" placeholder="Search name or state" aria-label="Search runs" .value=${query.get("find") || ""} @input=${(e) => { keep({find: e.target.value}); this.requestUpdate(); }}>
			${this.chosen.size > 1 ? html`<a class="button accent" href="#/compare/${[...this.chosen].join(",")}">Compare ${this.chosen.size}</a>` : html`<span class="soft">tick up to ${MOST} to compare</span>`}</header>
		${!this.runs.length ? html`<div class="empty"><p>No runs yet.</p>${this.data.steers ? html`<p><a href="#/start">Start one</a>, or train in a terminal: it appears here by itself.</p>` : ""}</div>`
			: !shown.length ? html`<p class="empty">No run fits “${query.get("find")}”.</p>`
			: html`<table class="runs"><thead><tr><th><span class="hidden">compare</span></th>${COLUMNS.map(([name, label]) => this.heading(name, label, query))}</tr></thead>
				<tbody>${shown.map((run) => this.row(run))}</tbody></table>`}`;
	}

	heading(name, label, query) {
		const sorted = (query.get("sort") || "age") === name, down = query.get("order") === "down";
		return html`<th scope="col" class=${name} aria-sort=${sorted ? (down ? "descending" : "ascending") : "none"}>
			<button class="quiet" @click=${() => { keep({sort: name, order: sorted && !down ? "down" : null}); this.requestUpdate(); }}>${label}${sorted ? (down ? " ↓" : " ↑") : ""}</button></th>`;
	}

	row(run) {
		const steps = run.steps ? `${count(run.step)} / ${count(run.steps)}` : count(run.step);
		const chosen = this.chosen.has(run.id);
		return html`<tr><td><input type="checkbox" aria-label="Compare ${run.name}" .checked=${chosen} ?disabled=${!chosen && this.chosen.size >= MOST} @change=${() => this.choose(run.id)}></td>
			<th scope="row" class="name"><a href="#/run/${run.id}">${run.name}</a></th>
			<td class="state">${state(run.state)}${run.detail && run.detail !== "training" ? html` <span class="soft">${run.detail}</span>` : ""}</td>
			<td class="step">${run.steps ? html`<progress max=${run.steps} value=${run.step} aria-label="Progress of ${run.name}"></progress> ` : ""}<span>${steps}</span></td>
			<td class="left">${run.state === "running" ? duration(run.seconds_left ?? NaN) : ""}</td>
			<td class="best">${run.best === null || run.best === undefined ? "–" : html`${number(run.best)} <span class="soft">${run.metric}</span>`}</td>
			<td class="bytes">${run.bytes ? bytes(run.bytes) : ""}</td><td class="age">${Number.isFinite(run.age) ? `${duration(run.age)} ago` : ""}</td></tr>`;
	}

	choose(id) {
		if (!this.chosen.delete(id)) this.chosen.add(id);
		this.chosen = new Set(this.chosen);
		keep({pick: [...this.chosen].join(",")}); // so they are still chosen on the way back from a comparison
	}
}
customElements.define("unfog-runs", Runs);
