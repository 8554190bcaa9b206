// The loss by noise level as a map over time: steps to the right, noise upwards, colour for the loss.

import {html} from "./vendor/lit.js";
import {View, number, download, select} from "./util.js";
import {lower, place} from "./curves.js";
import {zoomed} from "./zoom.js";

// Dark blue to yellow, even in lightness, readable by people who see no red or green (after cividis).
const RAMP = [[0, 34, 78], [53, 69, 108], [102, 105, 112], [148, 142, 119], [200, 182, 97], [254, 232, 56]];
const KINDS = {loss_by_level: "training", held_out_by_level: "held-out", held_out_noise_error: "held-out, error of the predicted noise"};
const HEIGHT = 210;

function shade(share) {
	const at = Math.min(Math.max(share, 0), 1) * (RAMP.length - 1), i = Math.min(Math.floor(at), RAMP.length - 2);
	return RAMP[i].map((low, c) => Math.round(low + (RAMP[i + 1][c] - low) * (at - i)));
}

class Levels extends View {
	static properties = ["store", "version", "over", "kind", "at"];

	constructor() {
		super();
		Object.assign(this, {over: "step", kind: "", at: null});
		this.again = () => this.requestUpdate();
	}

	connectedCallback() {
		super.connectedCallback();
		addEventListener("zoomed", this.again);
		this.sizes = new ResizeObserver(this.again);
	}

	disconnectedCallback() {
		super.disconnectedCallback();
		removeEventListener("zoomed", this.again);
		this.sizes.disconnect();
	}

	firstUpdated() {
		this.sizes.observe(this);
	}

	// Rows that hold a list, within the zoom: {xs, cells: one array for each level}.
	read() {
		const names = this.store.levels(this.kinds.includes(this.kind) ? this.kind : this.kinds[0]);
		const rows = names.map((name) => this.store.series(this.over, name)), first = rows[0] || {x: []};
		const [low, high] = zoomed() || [-Infinity, Infinity];
		const from = lower(first.x, low), xs = first.x.slice(from).filter((x) => x <= high);
		const cells = rows.map((row) => {
			const start = lower(row.x, xs[0]);
			if (row.x[start] === xs[0] && row.x[start + xs.length - 1] === xs.at(-1)) return row.y.slice(start, start + xs.length);
			const where = new Map(row.x.map((x, i) => [x, row.y[i]])); // a level without images has gaps
			return xs.map((x) => where.get(x) ?? NaN);
		});
		return {xs, cells};
	}

	get kinds() {
		return Object.keys(KINDS).filter((kind) => this.store?.levels(kind).length);
	}

	render() {
		if (!this.store || !this.kinds.length) return "";
		const {xs, cells} = (this.held = this.read()), n = cells.length;
		const values = cells.flatMap((row) => row.filter((v) => v > 0)).map(Math.log).sort((a, b) => a - b);
		this.scale = [values[Math.floor(values.length * 0.01)] ?? 0, values[Math.ceil(values.length * 0.99) - 1] ?? 1];
		const here = this.at && xs.length ? this.at : null;
		const column = here ? Math.min(here[0], xs.length - 1) : xs.length - 1;
		const profile = cells.map((row) => row[column]);
		const hardest = profile.indexOf(Math.max(...profile.filter(Number.isFinite)));
		const said = here ? `At ${place(this.over, xs[column])}, noise level ${here[1] + 1} of ${n} (1 is clean): loss ${number(cells[here[1]][column])}.`
			: xs.length ? `At ${place(this.over, xs[column])} the loss is highest, ${number(profile[hardest])}, at noise level ${hardest + 1} of ${n} (1 is clean), and lowest, ${number(Math.min(...profile.filter(Number.isFinite)))}.` : "";
		return html`<figure class="chart levels"><div class="chart-head"><h3>Loss by noise level over time</h3><span class="tools">
				${this.kinds.length > 1 ? select(this.kinds.map((kind) => [kind, KINDS[kind]]), this.kind, (kind) => (this.kind = kind), "Which loss") : ""}
				<button class="quiet" aria-label="Download the map as PNG" @click=${() => this.querySelector(".map").toBlob((blob) => download("loss-by-noise-level.png", blob))}>PNG</button>
				<button class="quiet" aria-label="Download the map as CSV" @click=${() => this.save()}>CSV</button></span></div>
			<ul class="legend"><li>${number(Math.exp(this.scale[0]))}</li><li><canvas class="ramp" width="96" height="8"></canvas></li><li>${number(Math.exp(this.scale[1]))}</li><li class="faint">clean below, noisy above</li></ul>
			<canvas class="map" height=${HEIGHT} tabindex="0" role="img" aria-label="${said} Arrow keys move over the map."
				@pointermove=${this.point} @pointerleave=${() => (this.at = null)} @keydown=${this.press}></canvas>
			<figcaption><span role="status">${said}</span></figcaption></figure>`;
	}

	updated() {
		const canvas = this.querySelector(".map"), ramp = this.querySelector(".ramp");
		if (!canvas?.clientWidth) return;
		const legend = ramp.getContext("2d");
		for (let x = 0; x < 96; x++) {
			legend.fillStyle = `rgb(${shade(x / 95)})`;
			legend.fillRect(x, 0, 1, 8);
		}
		const width = (canvas.width = canvas.clientWidth), {xs, cells} = this.held, n = cells.length;
		if (!xs.length) return;
		const image = new ImageData(width, n), [low, high] = this.scale, span = xs.at(-1) - xs[0] || 1;
		for (let px = 0; px < width; px++) {
			const i = Math.min(lower(xs, xs[0] + (span * px) / width), xs.length - 1);
			for (let level = 0; level < n; level++) {
				const value = cells[level][i];
				if (value > 0) image.data.set([...shade((Math.log(value) - low) / (high - low || 1)), 255], 4 * ((n - 1 - level) * width + px));
			}
		}
		const small = new OffscreenCanvas(width, n), ctx = canvas.getContext("2d");
		small.getContext("2d").putImageData(image, 0, 0);
		ctx.imageSmoothingEnabled = false;
		ctx.drawImage(small, 0, 0, width, n, 0, 0, width, HEIGHT);
		if (!this.at) return;
		ctx.strokeStyle = "#fff";
		ctx.strokeRect(((xs[Math.min(this.at[0], xs.length - 1)] - xs[0]) / span) * width - 3, ((n - 1 - this.at[1]) * HEIGHT) / n + 1, 6, HEIGHT / n - 2);
	}

	point(event) {
		const {xs, cells} = this.held, box = event.target.getBoundingClientRect();
		const x = xs[0] + ((event.clientX - box.left) / box.width) * (xs.at(-1) - xs[0]);
		this.at = [Math.min(lower(xs, x), xs.length - 1), Math.min(cells.length - 1, Math.max(0, Math.floor((1 - (event.clientY - box.top) / box.height) * cells.length)))];
	}

	press(event) {
		const moves = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1]}, move = moves[event.key];
		if (!move || !this.held.xs.length) return;
		event.preventDefault();
		const [i, level] = this.at || [this.held.xs.length - 1, 0];
		this.at = [Math.min(Math.max(0, i + move[0]), this.held.xs.length - 1), Math.min(Math.max(0, level + move[1]), this.held.cells.length - 1)];
	}

	save() {
		const {xs, cells} = this.held;
		const lines = xs.map((x, i) => [x, ...cells.map((row) => (Number.isFinite(row[i]) ? row[i] : ""))].join(","));
		download("loss-by-noise-level.csv", `${[[this.over, ...cells.map((_, i) => `level ${i + 1}`)].join(","), ...lines].join("\n")}\n`, "text/csv");
	}
}
customElements.define("unfog-levels", Levels);
