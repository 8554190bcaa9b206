// Panels of charts over several runs: which charts there are, their axis, smoothing, scale and zoom.

import {html} from "./vendor/lit.js";
import {View, COLOURS, DASHES, keep, range, route, select} from "./util.js";
import {smooth} from "./curves.js";
import {zoomBy, zoom, zoomed} from "./zoom.js";

// [title, columns with the labels of their curves, unit, from zero, how to read it]
const CHARTS = [
	["Loss", {loss: "loss", held_out_loss: "held-out"}, false, "Held-out: the same images, noise and noise levels each time."],
	["Fréchet distance", {fid: "fid"}, true], ["Kernel distance", {kid: "kid"}, true], ["Sliced Wasserstein distance", {sliced: "sliced"}, true],
	["Power spectrum", {spectrum: "distance", spectrum_real: "real images, at most"}, true],
	["Histogram", {histogram: "distance, in deviations", histogram_real: "real images, at most"}, true],
	["Correlation of channels", {correlation: "largest difference", correlation_real: "real images, at most"}, true],
	["Precision and recall", {precision: "precision", recall: "recall"}, true], ["Density and coverage", {density: "density", coverage: "coverage"}, true],
	["Gradient norm", {gradient_norm: "gradient norm"}, false, "Before clipping."],
	["Learning rate", {lr: "learning rate"}, true], ["Speed", {images_per_second: "images a second"}, true],
	["Waiting for data", {data_wait: "share of the time"}, true], ["Skipped steps", {refused: "skipped", overflows: "overflows"}, true],
	["Memory, MiB", {memory_mib: "process", memory_device_mib: "GPU, peak"}, true], ["Free on the disk, MiB", {disk_free_mib: "free"}, true],
];
const ELSEWHERE = /^(step|images|seconds|energy.*|drawn)$|_error$|\.\d+$/;
const NOISY = new Set(["loss", "gradient_norm", "images_per_second", "data_wait"]); // smoothed; the rest is measured rarely
const RARE = new Set(["refused", "overflows"]); // not worth a chart if there were none
const AXES = {step: "steps", images: "images", seconds: "time", energy: "energy"};

// Charts that these stores have numbers for; columns that nobody described get one each.
function present(stores) {
	const names = new Set(stores.flatMap((store) => store.names));
	const known = new Set(CHARTS.flatMap(([, columns]) => Object.keys(columns)));
	const others = [...names].filter((name) => !known.has(name) && !ELSEWHERE.test(name)).sort();
	const memory = others.map((name) => [name.replaceAll("_", " "), {[name]: name.replaceAll("_", " ")}, /memory|bytes/.test(name)]);
	return [...CHARTS, ...memory].filter(([, columns]) => Object.keys(columns).some((name) => names.has(name)));
}

class Panels extends View {
	static properties = ["data", "runs", "version"]; // runs: [{id, label, store, marks}]

	constructor() {
		super();
		Object.assign(this, {runs: [], cached: new Map(), parts: new Map(), refine: () => this.soon()});
	}

	connectedCallback() {
		super.connectedCallback();
		addEventListener("zoomed", this.refine);
	}

	disconnectedCallback() {
		removeEventListener("zoomed", this.refine);
	}

	// Of runs that came thinned, fetch the part that is zoomed to, with as much again on either side.
	soon() {
		clearTimeout(this.timer);
		this.timer = setTimeout(async () => {
			const {over} = this.settings(), range = zoomed();
			for (const run of range && this.data.steers ? this.runs.filter((one) => one.store.long) : []) {
				const held = this.partOf(run, over, range), width = range[1] - range[0], [low, high] = [range[0] - width, range[1] + width];
				if (held && held.high - held.low < 6 * width) continue;
				const store = await this.data.part(run.id, over, {low, high}).catch(() => null);
				if (store) this.parts.set(run.id, {over, low, high, store});
			}
			this.requestUpdate();
		}, 200);
	}

	// What is held of a run besides all of it thinned, if the range is in it.
	partOf(run, over, range) {
		const part = this.parts.get(run.id);
		return range && part?.over === over && part.low <= range[0] && part.high >= range[1] ? part : null;
	}

	settings() {
		const {query} = route(), share = Number(query.get("smooth") ?? 1);
		const axes = Object.keys(AXES).filter((name) => name === "step" || this.runs.some(({store}) => store.names.includes(name)));
		const over = axes.includes(query.get("x")) ? query.get("x") : "step";
		return {over, axes, share: Number.isFinite(share) ? share : 1, log: query.get("log") !== "0"};
	}

	render() {
		const {over, axes, share, log} = this.settings();
		// Only the curves that are shown are kept: a long run has many points.
		if (this.shown !== `${over} ${share}`) this.cached.clear();
		this.shown = `${over} ${share}`;
		const set = (changes) => { keep(changes); this.requestUpdate(); };
		const charts = present(this.runs.map((run) => run.store)).map((chart) => [...chart, this.curves(chart[1], over, share)]).filter((chart) => chart.at(-1).length);
		if (!charts.length) return html`<p class="empty">Nothing has been logged yet: the first line is written after the first step.</p>`;
		return html`<div class="bar tools-bar" role="group" aria-label="Settings of the charts">
			<label>over ${select(axes.map((name) => [name, AXES[name]]), over, (x) => { set({x, zoom: null}); zoom(null, false); })}</label>
			<label>smoothing ${range(share, 0, 10, (smooth) => set({smooth}), {step: 0.5, said: `${share}% of the run`})} ${share}%</label>
			<label><input type="checkbox" .checked=${log} @change=${(e) => set({log: e.target.checked ? null : "0"})}> log</label>
			<span class="group"><button aria-label="Zoom in" @click=${() => zoomBy(0.5)}>+</button><button aria-label="Zoom out" @click=${() => zoomBy(2)}>−</button><button @click=${() => zoom(null)}>all</button></span>
			${this.runs.some(({store}) => store.sampled) ? html`<b role="status">Some lines of a long record; all of them are being read …</b>` : ""}
			<span class="soft hint">drag, or Ctrl and wheel: zoom · double click: all · arrow keys on a chart: read values · e: next event</span></div>
		<div class="charts">${charts.map(([title, , zero, ...rest]) => html`<unfog-chart .heading=${title} .over=${over} .series=${rest.at(-1)}
			.marks=${this.marks(over)} .several=${this.runs.length > 1} .zero=${zero} .log=${log && !zero} .note=${rest.length > 1 && this.runs.length === 1 ? rest[0] : ""}></unfog-chart>`)}</div>`;
	}

	curves(columns, over, share) {
		const names = Object.entries(columns), several = this.runs.length > 1, found = [];
		this.runs.forEach((run, r) => names.forEach(([name, label], n) => {
			const look = {colour: COLOURS[(several ? r : n) % 8], dash: several ? DASHES[(r + 4 * n) % 8] : DASHES[n], label: several ? `${run.label}${n ? `, ${label}` : ""}` : label};
			found.push(...this.curve(run, name, over, share, look, several));
		}));
		return found;
	}

	// The curve of a column; where it is smoothed, the raw one pale beneath it. Kept until the run has grown.
	curve(run, name, over, share, look, several) {
		const store = this.partOf(run, over, zoomed())?.store || run.store, {label} = run;
		const key = `${label} ${name} ${over} ${share} ${several} ${look.colour}`, held = this.cached.get(key);
		if (held && held.version === store.version && held.store === store) return held.curves;
		const raw = store.series(over, name), curves = [];
		if (RARE.has(name) && raw.y.every((value) => value === 0)) return curves;
		const errors = store.names.includes(`${name}_error`) && store.series(over, `${name}_error`);
		if (raw.x.length && errors && errors.x.length) this.addErrors(raw, errors);
		if (raw.x.length > 20 && NOISY.has(name) && share > 0) {
			const width = (share / 100) * (raw.x.at(-1) - raw.x[0]);
			if (!several) curves.push({...raw, ...look, faint: true, label: `${look.label}, raw`, dash: []});
			curves.push({x: raw.x, y: smooth(raw.x, raw.y, width), ...look});
		} else if (raw.x.length) curves.push({...raw, ...look});
		this.cached.set(key, {version: store.version, store, curves});
		return curves;
	}

	// A band of two standard errors: about 95%.
	addErrors(raw, errors) {
		const at = new Map(errors.x.map((x, i) => [x, errors.y[i]]));
		raw.low = raw.y.map((y, i) => y - 2 * (at.get(raw.x[i]) ?? 0));
		raw.high = raw.y.map((y, i) => y + 2 * (at.get(raw.x[i]) ?? 0));
	}

	// Events have a step; over another axis they stand where the run was at that step.
	marks(over) {
		return this.runs.flatMap(({store, marks, label}) => {
			const steps = store.series("step", over), several = this.runs.length > 1;
			const at = (step) => {
				const i = steps.x.findIndex((x) => x >= step);
				return over === "step" ? step : steps.y[i < 0 ? steps.y.length - 1 : i];
			};
			return (marks || []).map((mark) => ({...mark, x: at(mark.step), kind: several ? `${label}: ${mark.kind}` : mark.kind})).filter((mark) => Number.isFinite(mark.x));
		});
	}
}
customElements.define("unfog-panels", Panels);

// Events that are worth a mark: troubles, starts and changes; not the regular ones.
export function marksOf(events) {
	const regular = /^(choice|data|preview|evaluated|measured|checkpoint|length)$/;
	return events.filter((event) => event.step !== null && !regular.test(event.kind)).map((event) => ({...event, kind: event.kind.replaceAll("_", " ")}));
}

// Events with a trouble; of warnings that differ in their figures alone, the latest.
export function troublesOf(events) {
	const found = new Map();
	for (const one of events.filter((event) => event.trouble)) {
		const key = one.kind === "warning" ? one.cause.replace(/\d[\d.,]*/g, "") : one;
		found.delete(key);
		found.set(key, one);
	}
	return [...found.values()];
}
