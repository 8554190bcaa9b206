// A chart of curves on a canvas: zoomed together with all others, and readable without seeing it.

import {html, nothing} from "./vendor/lit.js";
import {View, COLOURS, count, number, download, swatch, table} from "./util.js";
import {charts, pan, point, pointed, visible, zoom, zoomBy} from "./zoom.js";
import {lower, thin, ticks, logTicks, ranking, sentence, place} from "./curves.js";

const HEIGHT = 210, LEFT = 52, RIGHT = 22, TOP = 8, BOTTOM = 30; // pixels of the canvas, and around the curves in it
let palette = {};

// Colours of the theme. Kept, as asking for them while other charts are drawn makes the browser compute styles anew.
function colour(name) {
	return (palette[name] ||= getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
}

class Chart extends View {
	static properties = ["heading", "over", "note", "series", "marks", "several", "zero", "log", "table"];

	constructor() {
		super();
		Object.assign(this, {heading: "", over: "step", series: [], marks: [], seen: true, table: false});
	}

	connectedCallback() {
		super.connectedCallback();
		charts.add(this);
		this.sizes = new ResizeObserver(([{contentRect}]) => {
			this.width = contentRect.width;
			this.redraw();
		});
		// What cannot be seen is drawn when it is scrolled to.
		this.watcher = new IntersectionObserver((entries) => {
			this.seen = entries.at(-1).isIntersecting;
			if (this.seen) this.stale ? this.redraw() : this.tell();
		}, {rootMargin: "200px"});
	}

	disconnectedCallback() {
		super.disconnectedCallback();
		charts.delete(this);
		this.sizes.disconnect();
		this.watcher.disconnect();
	}

	render() {
		const solid = this.series.filter((one) => !one.faint);
		const tool = (name, label, press) => html`<button class="quiet" aria-label=${label} aria-expanded=${name === "table" ? this.table : nothing} @click=${press}>${name}</button>`;
		return html`<figure class="chart">
			<div class="chart-head"><h3>${this.heading}</h3><span class="tools">
				${tool("PNG", `Download ${this.heading} as PNG`, this.saveImage)}${tool("CSV", `Download ${this.heading} as CSV`, this.saveTable)}${tool("table", `Show ${this.heading} as a table`, () => (this.table = !this.table))}</span></div>
			<ul class="legend">${this.series.map((one, i) => html`<li class=${one.faint ? "faint" : ""}>
				${swatch(this.paint(one, i), one.dash, one.faint)} ${one.label} <b></b></li>`)}<li class="at"></li></ul>
			<div class="plot" tabindex="0" role="slider" aria-label="${this.heading}: place on the axis" aria-valuemin="0" aria-valuemax="100" aria-valuenow="100" aria-valuetext="end"
				@keydown=${this.press} @wheel=${this.wheel} @dblclick=${() => zoom(null)} @pointerdown=${this.drag} @pointermove=${this.drag} @pointerup=${this.drag} @pointercancel=${this.drag} @pointerleave=${this.drag}>
				<canvas></canvas><i class="part"></i><i class="cursor"></i>${this.series.map((one, i) => html`<svg class="dot" width="8" height="8"><circle cx="4" cy="4" r="3.5" fill=${this.paint(one, i)} /></svg>`)}</div>
			<figcaption>${this.several ? ranking(solid) : solid.map((one) => `${sentence(one.label, this.over, one.x, one.y)} `)}${this.note}</figcaption>
			${this.table ? this.rows(solid) : ""}
		</figure>`;
	}

	paint(one, i) {
		return one.colour || COLOURS[i % COLOURS.length];
	}

	// Up to fifty evenly spaced points of the part that is shown.
	rows(solid) {
		const xs = this.places(solid), every = Math.ceil(xs.length / 50) || 1;
		const at = (one, x) => {
			const i = lower(one.x, x);
			return one.x[i] === x ? number(one.y[i]) : "";
		};
		const picked = xs.filter((_, i) => i % every === 0 || i === xs.length - 1);
		return table(`Table of ${this.heading}`, [this.over, ...solid.map((one) => one.label)], picked.map((x) => [place(this.over, x), ...solid.map((one) => at(one, x))]));
	}

	// All x of some rows of each curve, in order: of those in the part that is shown, or others.
	places(series, rows = series.map((one) => this.within(one))) {
		return [...new Set(series.flatMap((one, s) => Array.from(rows[s], (i) => one.x[i])))].sort((a, b) => a - b);
	}

	within(one) {
		const [low, high] = visible(), found = [];
		for (let i = lower(one.x, low); i < one.x.length && one.x[i] <= high; i++) found.push(i);
		return found;
	}

	firstUpdated() {
		this.sizes.observe(this.querySelector(".plot"));
		this.watcher.observe(this);
	}

	updated() {
		this.redraw();
	}

	redraw() {
		this.stale = !this.seen;
		if (!this.seen || !this.width) return;
		const canvas = this.querySelector("canvas"), ctx = canvas.getContext("2d"), unit = devicePixelRatio, [low, high] = visible();
		// A curve that is not positive throughout has no logarithm. Found once for each curve, as it takes all of its points.
		this.scale = this.log && this.series.some((one) => one.y.length) && this.series.every((one) => (one.positive ??= one.y.every((v) => v > 0))) ? Math.log10 : (v) => v;
		const picked = (this.picked = this.series.map((one) => thin(one.x, one.y, low, high, this.width / 2))); // what the pixels can show
		this.limits = {x: [low, high > low ? high : low + 1], y: this.height(picked)};
		const {x, y} = this.limits;
		this.pixels = {x: (this.width - LEFT - RIGHT) / (x[1] - x[0]), y: (HEIGHT - TOP - BOTTOM) / (y[1] - y[0])}; // of 1
		const [width, height] = [this.width, HEIGHT].map((size) => Math.round(size * unit));
		if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, {width, height});
		ctx.setTransform(unit, 0, 0, unit, 0, 0);
		ctx.clearRect(0, 0, this.width, HEIGHT);
		this.drawAxes(ctx);
		ctx.save();
		ctx.beginPath();
		ctx.rect(LEFT, 0, this.width - LEFT - RIGHT, HEIGHT - BOTTOM + 1);
		ctx.clip();
		this.series.forEach((one, s) => this.drawCurve(ctx, one, this.paint(one, s), picked[s]));
		ctx.restore();
		this.drawMarks(ctx);
		this.tell();
	}

	// Limits of the scaled y of the picked points.
	height(picked) {
		let least = Infinity, most = -Infinity;
		this.series.forEach((one, s) => {
			for (const column of one.low ? [one.y, one.low, one.high] : [one.y]) {
				for (const i of picked[s]) {
					const v = this.scale(column[i]);
					if (v < least && v > -Infinity) least = v;
					if (v > most) most = v;
				}
			}
		});
		if (!(least <= most)) [least, most] = [0, 1];
		const spread = most - least || Math.abs(most) || 1;
		return [this.zero && least >= 0 ? 0 : least - 0.06 * spread, most + 0.06 * spread];
	}

	// Pixels of a place, and the place at a pixel.
	left(x) {
		return LEFT + (x - this.limits.x[0]) * this.pixels.x;
	}

	top(y) {
		return TOP + (this.limits.y[1] - this.scale(y)) * this.pixels.y;
	}

	placeOf({clientX, currentTarget}) {
		const [low, high] = this.limits.x;
		return Math.min(high, Math.max(low, low + (clientX - currentTarget.getBoundingClientRect().left - LEFT) / this.pixels.x));
	}

	drawAxes(ctx) {
		const {x: [left, right], y: [bottom, top]} = this.limits, end = HEIGHT - BOTTOM;
		const text = (v) => (this.over === "seconds" ? place("seconds", v) : Number.isInteger(v) && v < 1e6 ? count(v) : number(v));
		Object.assign(ctx, {font: "11px system-ui, sans-serif", fillStyle: colour("soft"), strokeStyle: colour("rule"), lineWidth: 1, textAlign: "center", textBaseline: "top"});
		ctx.beginPath();
		for (const v of ticks(left, right, (this.width - LEFT - RIGHT) / 80)) {
			const x = Math.round(this.left(v)) + 0.5;
			ctx.moveTo(x, TOP);
			ctx.lineTo(x, end + 4);
			ctx.fillText(text(v), x, end + 8);
		}
		Object.assign(ctx, {textAlign: "right", textBaseline: "middle"});
		for (const v of this.scale === Math.log10 ? logTicks(10 ** bottom, 10 ** top) : ticks(bottom, top, 5)) {
			const y = Math.round(this.top(v)) + 0.5;
			ctx.moveTo(LEFT - 4, y);
			ctx.lineTo(this.width - RIGHT, y);
			ctx.fillText(number(v), LEFT - 8, y);
		}
		ctx.stroke();
	}

	// The band of a curve, its line, and discs where there are few points. What is not finite a path leaves out.
	drawCurve(ctx, one, paint, rows) {
		const along = (column, order = rows) => order.forEach((i) => ctx.lineTo(this.left(one.x[i]), this.top(column[i])));
		if (one.low) {
			ctx.beginPath();
			along(one.high);
			along(one.low, rows.toReversed());
			ctx.fillStyle = `${paint}2e`;
			ctx.fill();
		}
		Object.assign(ctx, {strokeStyle: one.faint ? `${paint}48` : paint, fillStyle: paint, lineWidth: one.faint ? 1 : 1.75, lineJoin: "round"});
		ctx.setLineDash(one.dash || []);
		ctx.beginPath();
		along(one.y);
		ctx.stroke();
		if (one.x.length >= 25) return;
		ctx.beginPath();
		for (const i of rows) {
			const x = this.left(one.x[i]), y = this.top(one.y[i]);
			ctx.moveTo(x, y);
			ctx.arc(x, y, 2.5, 0, 7);
		}
		ctx.fill();
	}

	// Marks of events: triangles for troubles, discs for the rest, so that their form distinguishes them, not only colour.
	drawMarks(ctx) {
		const bottom = HEIGHT - BOTTOM, [low, high] = this.limits.x;
		for (const mark of this.marks.filter(({x}) => x >= low && x <= high)) {
			const x = this.left(mark.x);
			ctx.strokeStyle = ctx.fillStyle = colour(mark.trouble ? "bad" : "soft");
			ctx.beginPath();
			if (mark.trouble) {
				ctx.globalAlpha = 0.35;
				ctx.moveTo(x, TOP);
				ctx.lineTo(x, bottom);
				ctx.stroke();
				ctx.globalAlpha = 1;
				ctx.beginPath();
				ctx.moveTo(x - 5, bottom);
				ctx.lineTo(x + 5, bottom);
				ctx.lineTo(x, bottom - 8);
			} else ctx.arc(x, bottom - 3, 2.5, 0, 7);
			ctx.fill();
		}
	}

	// Write the values at the cursor into the legend; those of the end if there is no cursor.
	tell() {
		if (!this.limits || !this.seen) return;
		const [low, high] = this.limits.x, found = pointed(), here = found !== null && found >= low && found <= high, at = here ? found : Infinity;
		const values = this.querySelectorAll(".legend b"), dots = this.querySelectorAll(".dot");
		const move = (element, shown, x, y) => {
			element.classList.toggle("shown", shown);
			if (shown) element.style.transform = `translate(${x}px, ${y}px)`;
		};
		const said = this.series.map((one, s) => {
			let i = Math.min(lower(one.x, at), one.x.length - 1);
			if (i > 0 && Math.abs(one.x[i - 1] - at) < Math.abs(one.x[i] - at)) i -= 1;
			const text = i >= 0 ? number(one.y[i]) : "–";
			if (values[s]) values[s].textContent = text;
			if (dots[s]) move(dots[s], here && one.x[i] >= low && one.x[i] <= high, this.left(one.x[i]) - 4, this.top(one.y[i]) - 4);
			return `${one.label} ${text}`;
		});
		move(this.querySelector(".cursor"), here, this.left(at), TOP);
		const mark = here ? this.near(at) : null, line = this.querySelector(".at"), box = this.querySelector(".plot");
		line.textContent = here ? `at ${place(this.over, at)}${mark ? ` ${mark.trouble ? "▲" : "●"} ${mark.kind}${mark.cause ? `: ${mark.cause}` : ""}${mark.remedy ? ` Remedy: ${mark.remedy}` : ""}` : ""}` : "";
		box.setAttribute("aria-valuenow", here ? Math.round((100 * (at - low)) / (high - low)) : 100);
		box.setAttribute("aria-valuetext", `${here ? `${line.textContent};` : "end:"} ${said.join(", ")}`);
	}

	near(at) {
		const close = this.marks.filter((mark) => Math.abs(this.left(mark.x) - this.left(at)) <= 8);
		return close.find((mark) => mark.trouble) || close[0];
	}

	press(event) {
		if (!this.limits || event.ctrlKey || event.metaKey || event.altKey) return;
		const [low, high] = this.limits.x, here = pointed() ?? high, marks = this.marks.map((mark) => mark.x).sort((a, b) => a - b), small = 1e-6 * (high - low);
		// Over points that are drawn, as the next row of a long run is less than a pixel away.
		const move = (by, share = 0) => {
			const xs = this.places(this.series, this.picked), last = xs.length - 1;
			const at = Math.min(lower(xs, here - 1e-9 * Math.abs(here)), last) + by + share * Math.ceil(xs.length / 10);
			if (xs.length) point(xs[Math.min(Math.max(0, at), last)]);
		};
		const actions = {
			ArrowLeft: () => (event.shiftKey ? pan(-0.2) : move(-1)), ArrowRight: () => (event.shiftKey ? pan(0.2) : move(1)),
			PageDown: () => move(0, -1), PageUp: () => move(0, 1), Home: () => move(-Infinity), End: () => move(Infinity),
			"+": () => zoomBy(0.5, here), "-": () => zoomBy(2, here), 0: () => zoom(null), Escape: () => point(null),
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
		point(x);
	}

	wheel(event) {
		if (!this.limits || (!event.ctrlKey && !event.metaKey && !event.altKey)) return; // a plain wheel scrolls the page
		event.preventDefault();
		zoomBy(Math.exp(event.deltaY / 300), this.placeOf(event));
	}

	// The pointer moves the cursor; dragged, it marks a part, which is zoomed to at its end.
	drag(event) {
		if (!this.limits || (event.type === "pointerdown" && event.button)) return;
		const x = this.placeOf(event), {type, currentTarget: box, pointerId} = event, part = this.querySelector(".part");
		if (type === "pointerdown") {
			this.from = x;
			box.setPointerCapture(pointerId);
		}
		const [a, b] = [this.from ?? x, x].sort((one, two) => one - two), left = this.left(a), width = this.left(b) - left;
		if (type === "pointerup" && width >= 4) zoom([a, b]);
		if (type !== "pointerdown" && type !== "pointermove") this.from = undefined;
		part.classList.toggle("shown", this.from !== undefined);
		Object.assign(part.style, {left: `${left}px`, width: `${width}px`});
		point(type === "pointerleave" && event.pointerType === "mouse" ? null : x); // a finger leaves it behind
	}

	saveImage() {
		const canvas = this.querySelector("canvas"), out = document.createElement("canvas"), unit = devicePixelRatio, line = 18 * unit;
		[out.width, out.height] = [canvas.width, canvas.height + line * 2];
		const ctx = out.getContext("2d");
		ctx.fillStyle = colour("paper");
		ctx.fillRect(0, 0, out.width, out.height);
		ctx.drawImage(canvas, 0, line * 2);
		ctx.fillStyle = colour("ink");
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
	palette = {};
	for (const chart of charts) chart.redraw();
}
