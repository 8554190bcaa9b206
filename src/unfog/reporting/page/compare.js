// Up to eight runs laid over one another: curves, pictures at the same step, and the settings that differ.

import {html, nothing} from "./vendor/lit.js";
import {View, COLOURS, DASHES, count, number, scroller, state, text} from "./util.js";

class Compare extends View {
	static properties = ["data", "ids", "runs", "failed", "version"];

	constructor() {
		super();
		Object.assign(this, {ids: [], runs: null, failed: "", version: 0});
	}

	connectedCallback() {
		super.connectedCallback();
		this.listen("run", (event) => this.ids.includes(String(event.id)) && this.load());
		this.listen("refresh", () => this.load());
	}

	updated(changed) {
		if (changed.has("ids") && String(changed.get("ids")) !== String(this.ids)) this.load();
	}

	load() {
		return this.paced(async () => {
			const one = async (id) => {
				const detail = await this.data.run(id);
				return {id, detail, rows: detail.rows, label: detail.name, store: await this.data.update(id, detail.rows)};
			};
			this.runs = await Promise.all(this.ids.map(one));
			this.version += 1;
		});
	}

	render() {
		if (!this.runs) return html`<p class="empty" role="status">${this.failed || "Reading the runs …"}</p>`;
		const sources = this.runs.map(({id, detail, label}) => ({label, steps: detail.previews, url: (step) => this.data.picture(id, "preview", step)}));
		return html`<h1>Comparison</h1>
			<ul class="chosen">${this.runs.map((run, i) => html`<li><svg width="26" height="8" aria-hidden="true"><path d="M0 4h26" stroke=${COLOURS[i]} stroke-width="2.5" stroke-dasharray=${DASHES[i].join(" ") || nothing} /></svg>
				<a href="#/run/${run.id}">${run.label}</a> ${state(run.detail.status.state)} <span class="soft">${count(run.detail.status.step)} steps${Number.isFinite(run.detail.status.best) ? `, ${run.detail.status.metric} ${number(run.detail.status.best)}` : ""}</span></li>`)}</ul>
			<section><h2>Curves</h2><unfog-panels .data=${this.data} .runs=${this.runs} .version=${this.version}></unfog-panels></section>
			<section><h2>Samples</h2><unfog-pictures .sources=${sources}></unfog-pictures></section>
			<section><h2>Settings that differ</h2>${this.difference()}</section>`;
	}

	difference() {
		const names = [...new Set(this.runs.flatMap((run) => Object.keys(run.detail.settings || {})))].sort();
		const differing = names.filter((name) => new Set(this.runs.map((run) => JSON.stringify(run.detail.settings?.[name]))).size > 1);
		if (!differing.length) return html`<p class="empty">None: these runs have the same settings.</p>`;
		return scroller("Settings that differ", html`<table><thead><tr><th scope="col">setting</th>${this.runs.map((run) => html`<th scope="col">${run.label}</th>`)}</tr></thead>
			<tbody>${differing.map((name) => html`<tr><th scope="row">${name}</th>${this.runs.map((run) => html`<td>${text(run.detail.settings?.[name])}</td>`)}</tr>`)}</tbody></table>`);
	}
}
customElements.define("unfog-compare", Compare);
