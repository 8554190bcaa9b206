// Up to eight runs laid over one another: curves, pictures at the same step, and the settings that differ.

import {html} from "./vendor/lit.js";
import {View, COLOURS, DASHES, count, number, state, swatch, table, text} from "./util.js";

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
		this.listen("rows", () => (this.version += 1)); // all of a record that was seen in a sample
	}

	updated(changed) {
		if (changed.has("ids") && String(changed.get("ids")) !== String(this.ids)) this.load();
	}

	load() {
		return this.paced(async () => {
			const one = async (id) => {
				const detail = await this.data.run(id, this.ids.length);
				return {id, detail, label: detail.name, store: await this.data.update(id)};
			};
			this.runs = await Promise.all(this.ids.map(one));
			this.version += 1;
		});
	}

	render() {
		if (!this.runs) return html`<p class="empty" role="status">${this.failed || "Reading the runs …"}</p>`;
		const sources = this.runs.map(({id, detail, label}) => ({label, steps: detail.previews, url: (step) => this.data.picture(id, "preview", step), channels: detail.channels, sheet: (step) => this.data.channels(id, step)}));
		return html`<h1>Comparison</h1>
			<ul class="chosen">${this.runs.map((run, i) => html`<li>${swatch(COLOURS[i], DASHES[i])} <a href="#/run/${run.id}">${run.label}</a> ${state(run.detail.status.state)} <span class="soft">${count(run.detail.status.step)} steps${Number.isFinite(run.detail.status.best) ? `, ${run.detail.status.metric} ${number(run.detail.status.best)}` : ""}</span></li>`)}</ul>
			<section><h2>Curves</h2><unfog-panels .data=${this.data} .runs=${this.runs} .version=${this.version}></unfog-panels></section>
			<section><h2>Samples</h2><unfog-pictures .sources=${sources}></unfog-pictures></section>
			<section><h2>Settings that differ</h2>${this.difference()}</section>`;
	}

	difference() {
		const names = [...new Set(this.runs.flatMap((run) => Object.keys(run.detail.settings || {})))].sort();
		const differing = names.filter((name) => new Set(this.runs.map((run) => JSON.stringify(run.detail.settings?.[name]))).size > 1);
		if (!differing.length) return html`<p class="empty">None: these runs have the same settings.</p>`;
		const rows = differing.map((name) => [name, ...this.runs.map((run) => text(run.detail.settings?.[name]))]);
		return table("Settings that differ", ["setting", ...this.runs.map((run) => run.label)], rows);
	}
}
customElements.define("unfog-compare", Compare);
