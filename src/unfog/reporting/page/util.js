// Numbers as text, the state in the URL hash, downloads, and the base class of all elements.

import {html, nothing, render} from "./vendor/lit.js";

// An element whose `render` is called again after one of its `properties` was set. It renders into the page itself, not
// into a shadow, so that one style sheet and the labels of forms reach everywhere. `updated` gets name -> value before.
export class View extends HTMLElement {
	static properties = [];

	constructor() {
		super();
		this.changes = new Map();
		const kind = this.constructor;
		if (Object.hasOwn(kind, "observed")) return;
		kind.observed = kind.properties;
		for (const name of kind.observed) {
			Object.defineProperty(kind.prototype, name, {
				get() {
					return this[`_${name}`];
				},
				set(value) {
					const before = this[`_${name}`];
					if (before === value) return;
					if (!this.changes.has(name)) this.changes.set(name, before);
					this[`_${name}`] = value;
					this.requestUpdate();
				},
			});
		}
	}

	connectedCallback() {
		this.requestUpdate();
	}

	// Call back on an event of the data layer for as long as this element is on the page.
	listen(kind, callback) {
		(this.offs ||= []).push(this.data.on(kind, callback));
	}

	// Do some work; why it fails is said on the page, in the property `failed`, which is shown as an alert.
	async attempt(work, before = "") {
		try {
			return await work();
		} catch (error) {
			this.failed = `${before}${error.message}`;
		}
	}

	// Load at most once a second; what is asked for meanwhile is done once, after it, and what failed is tried again.
	async paced(work) {
		this.more = this.loading;
		if (this.loading) return;
		this.loading = true;
		try {
			await work();
			this.failed = "";
		} catch (error) {
			this.failed = error.message;
			this.more = true;
		}
		setTimeout(() => {
			this.loading = false;
			if (this.more && this.isConnected) this.load();
		}, 1000);
	}

	disconnectedCallback() {
		for (const off of this.offs || []) off();
		this.offs = [];
	}

	// Render once, after all that is being set now.
	requestUpdate() {
		if (this.waiting || !this.isConnected) return;
		this.waiting = true;
		queueMicrotask(() => {
			this.waiting = false;
			if (!this.isConnected) return;
			const changes = this.changes;
			this.changes = new Map();
			render(this.render(), this, {host: this});
			if (!this.rendered) this.firstUpdated();
			this.rendered = true;
			this.updated(changes);
		});
	}

	firstUpdated() {}

	updated() {}
}

export const COLOURS = ["#2f7fd0", "#d9822b", "#1f9d76", "#b565b0", "#c8503c", "#6f8f1f", "#2a9db0", "#8a8f98"];
// Runs differ by dashes as well: colours alone exclude people.
export const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3], [4, 2], [12, 4], [1, 4], [9, 3, 2, 3, 2, 3]];

const whole = new Intl.NumberFormat("en-US", {maximumFractionDigits: 0}); // made once, as that is slow

export function count(value) {
	return Number.isFinite(value) ? whole.format(value) : "–";
}

// [width, height] of a size as settings have it: 64, or "96x64".
export function sidesOf(size) {
	const [width, height = width] = String(size).split("x").map(Number);
	return [width, height];
}

export function number(value) {
	if (typeof value !== "number" || !Number.isFinite(value)) return "–";
	const size = Math.abs(value);
	if (size === 0) return "0";
	if (size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
	if (size >= 1e6) return `${Number((value / 1e6).toPrecision(4))}M`;
	return size >= 1e4 ? count(value) : String(Number(value.toPrecision(4)));
}

export function duration(seconds) {
	if (!Number.isFinite(seconds)) return "–";
	const s = Math.max(0, Math.round(seconds));
	if (s < 60) return `${s} s`;
	if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
	if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
	return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export function bytes(n) {
	if (!Number.isFinite(n)) return "–";
	for (const [size, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) if (n >= size) return `${(n / size).toFixed(1)} ${unit}`;
	return `${n} B`;
}

// Any JSON value as a line of text.
export function text(value) {
	if (value === null || value === undefined) return "–";
	if (typeof value === "boolean") return value ? "yes" : "no";
	if (typeof value === "number") return Number.isInteger(value) ? value.toLocaleString("en-US") : String(Number(value.toPrecision(6)));
	if (Array.isArray(value)) return value.map(text).join(", ");
	if (typeof value === "object") return Object.entries(value).map(([key, one]) => `${key} ${text(one)}`).join(", ");
	return String(value);
}

export function route() {
	const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
	const [view, ids] = path.split("/");
	return {path, view: view || "", ids: (ids || "").split(",").filter(Boolean), query: new URLSearchParams(query || "")};
}

// Change parts of the hash's query; null removes one.
export function keep(changes) {
	const {path, query} = route();
	for (const [name, value] of Object.entries(changes)) {
		if (value === null || value === "" || value === undefined) query.delete(name);
		else query.set(name, value);
	}
	const after = query.toString();
	history.replaceState(null, "", `#/${path}${after ? `?${after}` : ""}`);
	dispatchEvent(new Event("hashchange"));
}

export function download(name, content, type) {
	const link = document.createElement("a");
	link.href = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], {type}));
	link.download = name.replace(/[^\w.-]+/g, "-");
	link.click();
	setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// Say something to screen readers, in the page's one live region.
export function announce(message) {
	const region = document.getElementById("live");
	if (region) region.textContent = message;
}

// A part that scrolls by itself, by keys too.
export function scroller(label, content) {
	return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}>${content}</div>`;
}

// The line of a curve, as legends show it.
export function swatch(colour, dash, faint) {
	return html`<svg width="24" height="8" aria-hidden="true"><path d="M0 4h24" stroke=${colour} stroke-width="2.5" stroke-opacity=${faint ? 0.35 : 1} stroke-dasharray=${dash?.join(" ") || nothing} /></svg>`;
}

// Options of a select from [value, label] pairs, or values that are their labels.
export function options(pairs, chosen) {
	return pairs.map((pair) => {
		const [value, label] = Array.isArray(pair) ? pair : [pair, pair];
		return html`<option value=${value} ?selected=${String(value) === String(chosen)}>${label}</option>`;
	});
}

export function select(pairs, chosen, choose, label = nothing) {
	return html`<select aria-label=${label} @change=${(e) => choose(e.target.value)}>${options(pairs, chosen)}</select>`;
}

// Radio buttons that look like one control, of value -> label.
export function radios(name, legend, labels, chosen, choose) {
	return html`<fieldset class="choice"><legend class="hidden">${legend}</legend>${Object.entries(labels).map(([value, label]) => html`<label><input type="radio" name=${name} .checked=${value === chosen} @change=${() => choose(value)}><span>${label}</span></label>`)}</fieldset>`;
}

// A range input.
export function range(value, min, max, choose, {step = 1, said = nothing, off = false, label = nothing} = {}) {
	return html`<input type="range" min=${min} max=${max} step=${step} .value=${String(value)} aria-label=${label} aria-valuetext=${said} ?disabled=${off} @input=${(e) => choose(Number(e.target.value))}>`;
}

// Whether a text has all words that are searched for.
export function finder(search) {
	const words = search.toLowerCase().split(/\s+/).filter(Boolean);
	return (text) => words.every((word) => text.toLowerCase().includes(word));
}

// A table that scrolls by itself; the first cell of a row is its heading.
export function table(label, heads, rows, kind = "") {
	return scroller(label, html`<table class=${kind}><thead><tr>${heads.map((head) => html`<th scope="col">${head}</th>`)}</tr></thead>
		<tbody>${rows.map(([first, ...rest]) => html`<tr><th scope="row">${first}</th>${rest.map((cell) => html`<td>${cell}</td>`)}</tr>`)}</tbody></table>`);
}

const SIGNS = {running: "▶", "standing still": "‖", finished: "✓", exported: "✓", mirror: "○", stopped: "■", failed: "✕", killed: "✕", "not begun": "○", queued: "○"};

export const alive = (word) => /^(running|standing)/.test(word); // whether its process exists

export function state(word) {
	const known = SIGNS[word] ? word.replace(" ", "-") : "stopped";
	return html`<span class="state ${known}"><span aria-hidden="true">${SIGNS[word] || "■"}</span> ${word}</span>`;
}

export function command(line) {
	if (!line) return nothing;
	const copy = async (event) => {
		const button = event.currentTarget;
		try {
			await navigator.clipboard.writeText(line);
			button.textContent = "copied";
			announce("The command was copied");
		} catch {
			getSelection().selectAllChildren(button.previousElementSibling);
			button.textContent = "selected";
		}
		setTimeout(() => (button.textContent = "copy"), 1500);
	};
	return html`<span class="command"><code>${line}</code><button class="quiet" aria-label="Copy the command ${line}" @click=${copy}>copy</button></span>`;
}
