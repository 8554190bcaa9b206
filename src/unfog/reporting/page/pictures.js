// Pictures through time: one slider, and any two of them by wiper, flip, side by side, or their difference.

import {html} from "./vendor/lit.js";
import {View, count, keep, radios, range, route, select} from "./util.js";
import {chooser, decoded, has, paint, said} from "./channels.js";

const KEPT = 16; // sheets of channels; the oldest go first
const MODES = {one: "one", wiper: "wiper", flip: "flip", side: "side by side", difference: "difference"};

class Pictures extends View {
	static properties = ["sources", "name", "a", "b", "mode", "flipped", "cut", "view"];

	constructor() {
		super();
		Object.assign(this, {sources: [], name: "picture", flipped: false, cut: 50, mode: "one", a: null, b: null, view: "", sheets: new Map()});
	}

	connectedCallback() {
		super.connectedCallback();
		this.view = route().query.get(`${this.name}-view`) || "";
		const parts = (route().query.get(this.name) || "").split("_");
		if (parts.length < 3) return;
		this.mode = MODES[parts[0]] ? parts[0] : "one";
		[this.a, this.b] = parts.slice(1).map((part) => part.split("-").map(Number));
	}

	get drawn() {
		return this.sources.filter((one) => one.steps.length);
	}

	// [number of the source, step]; without a choice the newest, and beside it the oldest or the next source's.
	chosen(side) {
		const last = this.drawn.length - 1, given = side === "a" ? this.a : this.b;
		const s = Math.min(given?.[0] ?? (side === "b" && last ? 1 : 0), last), steps = this.drawn[s].steps;
		const step = given?.[1] ?? (side === "b" && !last ? steps[0] : steps.at(-1));
		return [s, steps.reduce((near, one) => (Math.abs(one - step) < Math.abs(near - step) ? one : near), steps[0])];
	}

	choose(side, s, step) {
		this[side] = [s, step];
		// One slider for all: the other run follows to the step nearest to this one.
		if (side === "a" && this.drawn.length > 1) this.b = [this.chosen("b")[0], step];
		this.note();
	}

	note() {
		keep({[`${this.name}-view`]: this.view, [this.name]: [this.mode, this.chosen("a").join("-"), this.chosen("b").join("-")].join("_")});
	}

	// The channels of a picture; null until they are there, or where there are none.
	sheet(side) {
		const [s, step] = this.chosen(side), source = this.drawn[s];
		if (!source.channels?.includes(step)) return null;
		const key = `${source.label} ${s} ${step}`;
		if (!this.sheets.has(key)) {
			this.sheets.set(key, null);
			if (this.sheets.size > KEPT) this.sheets.delete(this.sheets.keys().next().value);
			const come = (sheet) => { this.sheets.set(key, {...sheet, views: new Map()}); this.requestUpdate(); };
			source.sheet(step).then(decoded).then(come).catch(() => this.sheets.delete(key));
		}
		return this.sheets.get(key);
	}

	// A picture in the chosen view, where it has such channels.
	viewed(side) {
		const shown = this.picture(side), sheet = this.view && this.sheet(side);
		if (!sheet || !has(sheet, this.view)) return shown;
		if (!sheet.views.has(this.view)) sheet.views.set(this.view, paint(sheet, this.view));
		return {url: sheet.views.get(this.view), label: `${shown.label}, ${said(sheet, this.view)}`};
	}

	render() {
		if (!this.drawn.length) return html`<p class="empty">No pictures yet: the first preview is drawn early in the run.</p>`;
		const a = this.viewed("a"), b = this.viewed("b"), two = this.mode !== "one", sheet = this.sheet("a");
		const both = {wiper: `left: ${a.label}; right: ${b.label}`, difference: `${a.label}, less ${b.label}: black where they are equal`}[this.mode];
		return html`<div class="pictures">
			<div class="bar">${this.slider("a")}
				${radios(this.name, "Compare", MODES, this.mode, (mode) => { this.mode = mode; this.note(); })}
				${two ? this.slider("b") : ""}
				${sheet ? chooser(sheet, has(sheet, this.view || "0") ? this.view : "", (view) => { this.view = view; this.note(); }) : ""}
				${this.mode === "wiper" ? html`<label>cut ${range(this.cut, 0, 100, (cut) => (this.cut = cut))}</label>` : ""}
				${this.mode === "flip" ? html`<button aria-pressed=${this.flipped} @click=${() => (this.flipped = !this.flipped)}>Flip: ${this.flipped ? b.label : a.label}</button>` : ""}
			</div>
			<div class="stage ${this.mode}" @pointermove=${this.wipe}>
				${this.shown(this.mode === "flip" && this.flipped ? b : a, "", both)}
				${two && this.mode !== "flip" ? this.shown(b, "over") : ""}
			</div></div>`;
	}

	slider(side) {
		const [s, step] = this.chosen(side), {steps, label} = this.drawn[s], i = steps.indexOf(step);
		const runs = this.drawn.length > 1 ? select(this.drawn.map((one, n) => [n, one.label]), s, (n) => this.choose(side, Number(n), step), `Run of picture ${side}`) : "";
		return html`<div class="slider">${runs}<label>${side === "a" ? "step" : "against step"} <b>${count(step)}</b>
			${range(i, 0, steps.length - 1, (at) => this.choose(side, s, steps[at]), {said: `step ${step} of ${label}`, off: steps.length < 2})}</label></div>`;
	}

	picture(side) {
		const [s, step] = this.chosen(side), source = this.drawn[s];
		return {url: source.url(step), label: `${this.drawn.length > 1 ? `${source.label}, ` : ""}step ${count(step)}`};
	}

	shown({url, label}, kind = "", caption = label) {
		return html`<figure class=${kind}><img src=${url} alt="Samples of ${label}" @load=${this.size}><figcaption>${caption}</figcaption></figure>`;
	}

	// Small pictures are enlarged by whole numbers, so that their pixels stay square.
	size({target}) {
		target.width = target.naturalWidth * Math.max(1, Math.floor(480 / target.naturalWidth));
		target.classList.toggle("exact", target.naturalWidth <= 1072);
	}

	wipe(event) {
		if (this.mode !== "wiper" || !event.buttons) return;
		const box = this.querySelector(".stage img").getBoundingClientRect();
		this.cut = Math.round(Math.min(100, Math.max(0, (100 * (event.clientX - box.left)) / box.width)));
	}

	updated() {
		const over = this.querySelector(".over img");
		if (over) over.style.clipPath = this.mode === "wiper" ? `inset(0 0 0 ${this.cut}%)` : "";
	}
}
customElements.define("unfog-pictures", Pictures);
