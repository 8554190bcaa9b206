// A chart of curves: drawn by uPlot, zoomed together with all others, and readable without seeing it.

import {html, nothing} from "./vendor/lit.js";
import {View, COLOURS, count, number, download, scroller} from "./util.js";
import {charts, pan, visible, zoom, zoomBy} from "./range.js";
import {lower, thin, logTicks, ranking, sentence, place} from "./curves.js";

const HEIGHT = 210;
function colour(name) {
	return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

class Chart extends View {
	static properties = ["heading", "over", "note", "series", "marks", "several", "zero", "log", "table"];

	constructor() {
		super();
		Object.assign(this, {heading: "", over: "step", series: [], marks: [], shown: null, seen: true, table: false});
	}

	connectedCallback() {
		super.connectedCallback();
		charts.add(this);
		this.sizes = new ResizeObserver(() => this.redraw());
		// What cannot be seen is drawn when it is scrolled to.
		this.watcher = new IntersectionObserver((entries) => {
			this.seen = entries.at(-1).isIntersecting;
			if (this.seen && this.stale) this.redraw();
		}, {rootMargin: "200px"});
	}

	disconnectedCallback() {
		super.disconnectedCallback();
		charts.delete(this);
		this.sizes.disconnect();
		this.watcher.disconnect();
		this.plot?.destroy();
		this.plot = null;
	}

	// A curve that is not positive throughout has no logarithm. Found once for each curve, as it takes all of its points.
	get usesLog() {
		return this.log && this.series.some((one) => one.y.length) && this.series.every((one) => (one.positive ??= one.y.every((v) => v > 0)));
	}

	render() {
		const solid = this.series.filter((one) => !one.faint);
		return html`<figure class="chart">
			<div class="chart-head"><h3>${this.heading}</h3>
				<span class="tools">
					<button class="quiet" @click=${() => this.saveImage()} aria-label="Download ${this.heading} as PNG">PNG</button>
					<button class="quiet" @click=${() => this.saveTable()} aria-label="Download ${this.heading} as CSV">CSV</button>
					<button class="quiet" aria-expanded=${this.table} @click=${() => (this.table = !this.table)} aria-label="Show ${this.heading} as a table">table</button>
				</span></div>
			<ul class="legend">${this.series.map((one, i) => html`<li class=${one.faint ? "faint" : ""}>
				<svg width="22" height="8" aria-hidden="true"><path d="M0 4h22" stroke=${this.paint(one, i)} stroke-width="2.5" stroke-opacity=${one.faint ? 0.35 : 1} stroke-dasharray=${(one.dash || []).join(" ") || nothing} /></svg>
				${one.label} <b></b></li>`)}<li class="at"></li></ul>
			<div class="plot" tabindex="0" role="slider" aria-label="${this.heading}: place on the axis" aria-valuemin="0" aria-valuemax="100" aria-valuenow="100" aria-valuetext="end"
				@keydown=${this.press} @wheel=${this.wheel}></div>
			<figcaption>${this.several ? ranking(solid) : solid.map((one) => `${sentence(one.label, this.over, one.x, one.y)} `)}${this.note || nothing}</figcaption>
			${this.table ? this.rows() : nothing}
		</figure>`;
	}

	paint(one, i) {
		return one.colour || COLOURS[i % COLOURS.length];
	}

	// Up to fifty evenly spaced points of the part that is shown.
	rows() {
		const main = this.series.filter((one) => !one.faint);
		const xs = [...new Set(main.flatMap((one) => this.within(one).map((i) => one.x[i])))].sort((a, b) => a - b);
		const every = Math.ceil(xs.length / 50) || 1;
		const picked = xs.filter((_, i) => i % every === 0 || i === xs.length - 1);
		const at = (one, x) => {
			const i = lower(one.x, x);
			return i < one.x.length && one.x[i] === x ? number(one.y[i]) : "";
		};
		return scroller(`Table of ${this.heading}`, html`<table>
			<thead><tr><th scope="col">${this.over}</th>${main.map((one) => html`<th scope="col">${one.label}</th>`)}</tr></thead>
			<tbody>${picked.map((x) => html`<tr><td>${place(this.over, x)}</td>${main.map((one) => html`<td>${at(one, x)}</td>`)}</tr>`)}</tbody></table>`);
	}

	within(one) {
		const [low, high] = visible();
		const found = [];
		for (let i = lower(one.x, low); i < one.x.length && one.x[i] <= high; i++) found.push(i);
		return found;
	}

	firstUpdated() {
		this.sizes.observe(this.querySelector(".plot"));
		this.watcher.observe(this);
	}

	updated() {
		const shape = JSON.stringify([this.usesLog, this.series.map((one, i) => [one.label, this.paint(one, i), !!one.low, one.faint])]);
		if (shape !== this.shape) {
			this.shape = shape;
			this.plot?.destroy();
			this.plot = null;
		}
		this.redraw();
	}

	// The points that the pixels can show, of all curves over one common x.
	points(width) {
		const [low, high] = visible();
		const picked = this.series.map((one) => thin(one.x, one.y, low, high, width / 2));
		const all = Float64Array.from(picked.flatMap((rows, s) => rows.map((i) => this.series[s].x[i]))).sort();
		const xs = Array.from(all.filter((x, i) => x !== all[i - 1]));
		const value = this.usesLog ? (v) => (v > 0 ? Math.log10(v) : null) : (v) => v;
		const data = [xs];
		this.series.forEach((one, s) => {
			const columns = one.low ? [one.y, one.low, one.high] : [one.y];
			for (const from of columns) {
				const column = new Array(xs.length); // undefined: this curve has no point here, and its line passes
				let j = 0;
				for (const i of picked[s]) {
					while (xs[j] < one.x[i]) j++;
					column[j] = value(from[i]);
				}
				data.push(column);
			}
		});
		return [data, low, high];
	}

	redraw() {
		const box = this.querySelector(".plot");
		this.stale = !this.seen;
		if (!box || !this.seen || !box.clientWidth) return;
		const [data, low, high] = this.points(box.clientWidth);
		let least = Infinity, most = -Infinity;
		for (const column of data.slice(1)) {
			for (const v of column) {
				if (v === undefined || v === null) continue;
				if (v < least) least = v;
				if (v > most) most = v;
			}
		}
		if (!(least <= most)) [least, most] = [0, 1];
		const spread = most - least || Math.abs(most) || 1;
		this.limits = {x: [low, high > low ? high : low + 1], y: [this.zero && least >= 0 && !this.usesLog ? 0 : least - 0.06 * spread, most + 0.06 * spread]};
		if (!this.plot) this.build(box, data);
		else {
			if (this.plot.width !== box.clientWidth) this.plot.setSize({width: box.clientWidth, height: HEIGHT});
			this.plot.setData(data);
		}
		this.tell();
	}

	build(box, data) {
		const soft = colour("--soft"), rule = colour("--rule"), font = "11px system-ui, sans-serif";
		const log = this.usesLog, series = [{}], bands = [];
		this.series.forEach((one, i) => {
			const paint = this.paint(one, i), few = one.x.length < 25;
			series.push({stroke: one.faint ? `${paint}48` : paint, width: one.faint ? 1 : 1.75, dash: one.dash, points: {show: few, size: 5, fill: paint}});
			if (!one.low) return;
			series.push({stroke: `${paint}00`, points: {show: false}}, {stroke: `${paint}00`, points: {show: false}});
			bands.push({series: [series.length - 1, series.length - 2], fill: `${paint}2e`});
		});
		const axis = {stroke: soft, font, grid: {stroke: rule, width: 1}, ticks: {stroke: rule, width: 1, size: 4}};
		const text = (v) => (this.over === "seconds" ? place("seconds", v) : v >= 1e6 ? number(v) : count(v));
		this.plot = new uPlot({
			width: box.clientWidth, height: HEIGHT, series, bands, legend: {show: false}, padding: [8, 22, 0, 0],
			scales: {x: {time: false, range: () => this.limits.x}, y: {range: () => this.limits.y}},
			axes: [
				{...axis, size: 30, space: 70, values: (u, splits) => splits.map((v) => (Number.isInteger(v) || this.over === "seconds" ? text(v) : number(v)))},
				{...axis, size: 52, values: (u, splits) => splits.map((v) => number(log ? 10 ** v : v)),
					...(log ? {splits: (u, i, low, high) => logTicks(10 ** low, 10 ** high).map(Math.log10)} : {})},
			],
			cursor: {drag: {x: true, y: false, setScale: false}, sync: {key: "unfog"}, points: {size: 6}},
			hooks: {
				setSelect: [(u) => {
					if (u.select.width < 4) return;
					zoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
					u.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
				}],
				setCursor: [() => this.tell()],
				draw: [(u) => this.drawMarks(u)],
				ready: [(u) => u.over.addEventListener("dblclick", () => zoom(null))],
			},
		}, data, box);
	}

	// Marks of events: triangles for troubles, discs for the rest, so that form and not colour tells them apart.
	drawMarks(u) {
		const {ctx, bbox} = u, unit = devicePixelRatio, bottom = bbox.top + bbox.height;
		for (const mark of this.marks) {
			if (mark.x < this.limits.x[0] || mark.x > this.limits.x[1]) continue;
			const x = u.valToPos(mark.x, "x", true);
			ctx.strokeStyle = ctx.fillStyle = colour(mark.trouble ? "--bad" : "--soft");
			ctx.beginPath();
			if (mark.trouble) {
				ctx.globalAlpha = 0.35;
				ctx.moveTo(x, bbox.top);
				ctx.lineTo(x, bottom);
				ctx.stroke();
				ctx.globalAlpha = 1;
				ctx.beginPath();
				ctx.moveTo(x - 5 * unit, bottom);
				ctx.lineTo(x + 5 * unit, bottom);
				ctx.lineTo(x, bottom - 8 * unit);
			} else ctx.arc(x, bottom - 3 * unit, 2.5 * unit, 0, 7);
			ctx.fill();
		}
	}

	// Write the values at the cursor into the legend; those of the end where there is no cursor.
	tell() {
		const u = this.plot;
		if (!u) return;
		const here = u.cursor.left >= 0, at = here ? u.posToVal(u.cursor.left, "x") : Infinity;
		const values = this.querySelectorAll(".legend b");
		const said = this.series.map((one, s) => {
			let i = Math.min(lower(one.x, at), one.x.length - 1);
			if (i > 0 && Math.abs(one.x[i - 1] - at) < Math.abs(one.x[i] - at)) i -= 1;
			const text = i >= 0 ? number(one.y[i]) : "–";
			if (values[s]) values[s].textContent = text;
			return `${one.label} ${text}`;
		});
		const mark = here ? this.near(at) : null, line = this.querySelector(".at");
		line.textContent = here ? `at ${place(this.over, at)}${mark ? ` ${mark.trouble ? "▲" : "●"} ${mark.kind}${mark.cause ? `: ${mark.cause}` : ""}${mark.remedy ? ` Remedy: ${mark.remedy}` : ""}` : ""}` : "";
		const box = this.querySelector(".plot"), [low, high] = this.limits.x;
		box.setAttribute("aria-valuenow", here ? Math.round((100 * (at - low)) / (high - low)) : 100);
		box.setAttribute("aria-valuetext", here ? `${line.textContent}; ${said.join(", ")}` : `end: ${said.join(", ")}`);
	}

	near(at) {
		const reach = (8 * (this.limits.x[1] - this.limits.x[0])) / Math.max(1, this.plot.bbox.width / devicePixelRatio);
		const close = this.marks.filter((mark) => Math.abs(mark.x - at) <= reach);
		return close.find((mark) => mark.trouble) || close[0];
	}

	goTo(x) {
		this.plot.setCursor({left: this.plot.valToPos(x, "x"), top: HEIGHT / 3});
	}

	press(event) {
		const u = this.plot;
		if (!u || event.ctrlKey || event.metaKey || event.altKey) return;
		const xs = u.data[0], here = u.cursor.left >= 0 ? u.posToVal(u.cursor.left, "x") : this.limits.x[1];
		const seen = xs.filter((x) => x >= this.limits.x[0] && x <= this.limits.x[1]);
		const at = Math.min(lower(seen, here - 1e-9 * Math.abs(here)), seen.length - 1);
		const move = (i) => seen.length && this.goTo(seen[Math.min(Math.max(0, i), seen.length - 1)]);
		const marks = this.marks.map((mark) => mark.x).sort((a, b) => a - b);
		const small = 1e-6 * (this.limits.x[1] - this.limits.x[0]);
		const actions = {
			ArrowLeft: () => (event.shiftKey ? pan(-0.2) : move(at - 1)), ArrowRight: () => (event.shiftKey ? pan(0.2) : move(at + 1)),
			PageDown: () => move(at - Math.ceil(seen.length / 10)), PageUp: () => move(at + Math.ceil(seen.length / 10)),
			Home: () => move(0), End: () => move(seen.length - 1), "+": () => zoomBy(0.5, here), "-": () => zoomBy(2, here), 0: () => zoom(null),
			Escape: () => u.setCursor({left: -10, top: -10}),
			e: () => this.jump(marks.find((x) => x > here + small)), E: () => this.jump(marks.findLast((x) => x < here - small)),
		};
		if (!actions[event.key]) return;
		event.preventDefault();
		actions[event.key]();
	}

	jump(x) {
		if (x === undefined) return;
		const [low, high] = this.limits.x;
		if (x < low || x > high) zoom([x - (high - low) / 2, x + (high - low) / 2]);
		requestAnimationFrame(() => this.goTo(x));
	}

	wheel(event) {
		if (!event.ctrlKey && !event.metaKey && !event.altKey) return; // a plain wheel scrolls the page
		event.preventDefault();
		const left = event.clientX - this.plot.over.getBoundingClientRect().left;
		zoomBy(Math.exp(event.deltaY / 300), this.plot.posToVal(left, "x"));
	}

	saveImage() {
		const canvas = this.querySelector("canvas");
		if (!canvas) return;
		const out = document.createElement("canvas"), unit = devicePixelRatio, line = 18 * unit;
		[out.width, out.height] = [canvas.width, canvas.height + line * 2];
		const ctx = out.getContext("2d");
		ctx.fillStyle = colour("--paper");
		ctx.fillRect(0, 0, out.width, out.height);
		ctx.drawImage(canvas, 0, line * 2);
		ctx.fillStyle = colour("--ink");
		ctx.font = `${13 * unit}px system-ui, sans-serif`;
		ctx.fillText(this.heading, 8 * unit, line);
		let x = 8 * unit;
		this.series.forEach((one, i) => {
			ctx.fillStyle = this.paint(one, i);
			ctx.fillText(one.label, x, line * 1.9);
			x += ctx.measureText(one.label).width + 16 * unit;
		});
		out.toBlob((blob) => download(`${this.heading}.png`, blob));
	}

	saveTable() {
		const quoted = (label) => `"${label.replaceAll('"', '""')}"`;
		const lines = [["series", this.over, "value", "low", "high"].join(",")];
		for (const one of this.series.filter((s) => !s.faint || !this.series.some((o) => o !== s && o.label === s.label))) {
			for (const i of this.within(one)) lines.push([quoted(one.label), one.x[i], one.y[i], one.low?.[i] ?? "", one.high?.[i] ?? ""].join(","));
		}
		download(`${this.heading}.csv`, `${lines.join("\n")}\n`, "text/csv");
	}
}
customElements.define("unfog-chart", Chart);

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

// Draw all charts anew, in the colours of the theme that was just chosen.
export function repaint() {
	for (const chart of charts) {
		chart.plot?.destroy();
		chart.plot = null;
		chart.redraw();
	}
}
