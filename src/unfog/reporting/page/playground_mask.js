// A mask painted over an image: brush, eraser, undo, zoom; by mouse, pen, touch and keyboard. Of the kind "mask" each pixel has one
// of several labels; of "hole" the painted pixels are missing from the picture; else they are drawn anew.

import {html, nothing} from "./vendor/lit.js";
import {View, announce, range} from "./util.js";

const MOST_UNDO = 50;
const MOVES = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};

class Mask extends View {
	static properties = ["url", "width", "height", "brush", "erase", "zoom", "at", "painted", "kind", "labels", "colours", "label"];

	constructor() {
		super();
		Object.assign(this, {brush: 3, erase: false, zoom: 0, at: null, painted: 0, kind: "edit", label: 1, past: [], future: [], fingers: new Map()});
	}

	get canvas() {
		return this.querySelector("canvas");
	}

	firstUpdated() {
		this.brush = Math.max(1, Math.round(Math.min(this.width, this.height) / 8));
		this.paint();
	}

	updated(changes) {
		const labels = String(this.labels);
		// At first, and for another run, whose sides or labels are others.
		if (this.bits?.length !== this.width * this.height || labels !== this.known) {
			Object.assign(this, {bits: new Uint8Array(this.width * this.height), known: labels, label: 1, past: [], future: []});
			this.count();
		}
		if (changes.has("url")) this.loaded = this.load(this.url);
		this.canvas.style.width = `${this.width * this.shownZoom}px`;
		this.paint();
	}

	// Show the image at an address, unless another one was asked for meanwhile, or it cannot be had.
	async load(url) {
		this.image = null;
		if (!url) return;
		const image = Object.assign(new Image(), {src: url});
		if (!(await image.decode().then(() => true, () => false)) || url !== this.url) return;
		this.image = image;
		if (this.kind === "edit") Object.assign(this, {width: image.naturalWidth, height: image.naturalHeight});
		else this.readBits();
		this.paint();
	}

	// Take the labels of a mask from its colours, or the hole from what is transparent.
	readBits() {
		const {width, height, bits} = this, canvas = Object.assign(document.createElement("canvas"), {width, height}), context = canvas.getContext("2d");
		context.drawImage(this.image, 0, 0, width, height);
		const {data} = context.getImageData(0, 0, width, height), known = new Map((this.colours || []).map((colour, i) => [parseInt(colour.slice(1), 16), i]));
		for (let i = 0; i < bits.length; i++) bits[i] = this.kind === "hole" ? Number(data[4 * i + 3] < 128) : known.get(65536 * data[4 * i] + 256 * data[4 * i + 1] + data[4 * i + 2]) || 0;
		this.count();
	}

	get mostZoom() {
		return Math.max(2, Math.round(960 / Math.max(this.width, this.height)));
	}

	get shownZoom() {
		return this.zoom || Math.max(1, Math.floor((this.clientWidth || 280) / this.width));
	}

	paint() {
		const {canvas, bits, width, height} = this;
		if (!canvas || !bits) return;
		const context = canvas.getContext("2d", {willReadFrequently: true});
		context.fillStyle = "#888";
		context.fillRect(0, 0, width, height);
		if (this.image) context.drawImage(this.image, 0, 0, width, height);
		const pixels = context.getImageData(0, 0, width, height), labels = this.kind === "mask" && this.colours.map((colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)));
		for (let i = 0; i < bits.length; i++) {
			if (labels) pixels.data.set(labels[bits[i]], 4 * i);
			if (labels || !bits[i]) continue;
			// A checkered red, which stands out from any picture.
			const dark = (i % width + Math.floor(i / width)) % 2;
			pixels.data.set([dark ? 190 : 255, dark ? 0 : 90, dark ? 60 : 110, 255], 4 * i);
		}
		context.putImageData(pixels, 0, 0);
		if (this.at) {
			context.strokeStyle = this.kind === "mask" ? "#fff" : "#000";
			context.strokeRect(this.at[0] - this.brush / 2 + 0.5, this.at[1] - this.brush / 2 + 0.5, this.brush, this.brush);
		}
	}

	change(make) {
		this.past.push(this.bits.slice());
		if (this.past.length > MOST_UNDO) this.past.shift();
		this.future = [];
		make();
		this.count();
	}

	step(from, to) {
		if (!from.length) return announce("Nothing is left");
		to.push(this.bits);
		this.bits = from.pop();
		this.count();
		announce(`${this.painted} pixels are painted`);
	}

	count() {
		this.painted = this.bits.reduce((sum, bit) => sum + (bit > 0), 0);
		this.paint();
	}

	// A round dot; lines are dots a pixel apart.
	dot(x, y) {
		const {width, height, brush, bits} = this, radius = brush / 2, low = -Math.floor((brush - 1) / 2), high = Math.ceil((brush - 1) / 2);
		for (let dy = low; dy <= high; dy++) {
			for (let dx = low; dx <= high; dx++) {
				const px = x + dx, py = y + dy;
				if (px < 0 || py < 0 || px >= width || py >= height || (brush > 2 && Math.hypot(dx, dy) > radius)) continue;
				bits[py * width + px] = this.erase ? 0 : this.label;
			}
		}
	}

	place(event) {
		const box = this.canvas.getBoundingClientRect();
		return [event.clientX - box.left, event.clientY - box.top].map((part) => Math.floor((part * this.width) / box.width));
	}

	down(event) {
		event.preventDefault();
		this.canvas.focus();
		this.canvas.setPointerCapture(event.pointerId);
		this.fingers.set(event.pointerId, [event.clientX, event.clientY]);
		if (this.fingers.size > 1) return this.pinch();
		this.last = this.place(event);
		this.change(() => this.dot(...this.last));
	}

	// Two fingers zoom and move the picture. The dot that the first of them made is taken back.
	pinch() {
		if (this.last) this.bits = this.past.pop();
		this.last = null;
		this.count();
		this.pinched = {...this.spread(), zoom: this.shownZoom};
	}

	spread() {
		const [[ax, ay], [bx, by]] = [...this.fingers.values()];
		return {far: Math.hypot(ax - bx, ay - by), middle: [(ax + bx) / 2, (ay + by) / 2]};
	}

	move(event) {
		if (this.fingers.has(event.pointerId)) this.fingers.set(event.pointerId, [event.clientX, event.clientY]);
		if (this.fingers.size > 1 && this.pinched) {
			const {far, middle} = this.spread(), before = this.pinched;
			this.zoom = Math.min(this.mostZoom, Math.max(1, Math.round((before.zoom * far) / before.far)));
			this.querySelector(".scroll").scrollBy(before.middle[0] - middle[0], before.middle[1] - middle[1]);
			before.middle = middle;
			return;
		}
		if (!this.last) return;
		// All places since the last event, so that a quick stroke has no gaps.
		for (const one of event.getCoalescedEvents?.().length ? event.getCoalescedEvents() : [event]) {
			const to = this.place(one), [x, y] = this.last, far = Math.max(Math.abs(to[0] - x), Math.abs(to[1] - y), 1);
			for (let i = 1; i <= far; i++) this.dot(Math.round(x + ((to[0] - x) * i) / far), Math.round(y + ((to[1] - y) * i) / far));
			this.last = to;
		}
		this.paint();
	}

	up(event) {
		this.fingers.delete(event.pointerId);
		if (!this.fingers.size) this.pinched = null;
		if (!this.last) return;
		this.last = null;
		this.count();
	}

	key(event) {
		const move = MOVES[event.key], {width, height} = this, middle = [width >> 1, height >> 1];
		if (move) {
			const [x, y] = this.at || middle, far = event.ctrlKey ? 8 : 1;
			this.at = [Math.min(width - 1, Math.max(0, x + move[0] * far)), Math.min(height - 1, Math.max(0, y + move[1] * far))];
			if (event.shiftKey) this.change(() => this.dot(...this.at));
			else announce(`column ${this.at[0] + 1}, row ${this.at[1] + 1}, ${this.said(this.bits[this.at[1] * width + this.at[0]])}`);
		} else if (event.key === " " || event.key === "Enter") this.change(() => this.dot(...(this.at || middle)));
		else if (event.key === "e") this.erase = !this.erase;
		else if (this.kind === "mask" && /^[0-9]$/.test(event.key) && Number(event.key) < this.labels.length) this.choose(Number(event.key));
		else if (event.key === "[" || event.key === "]") this.brush = Math.max(1, this.brush + (event.key === "]" ? 1 : -1));
		else if ("zZ".includes(event.key)) event.shiftKey ? this.step(this.future, this.past) : this.step(this.past, this.future);
		else return;
		event.preventDefault();
	}

	said(bit) {
		return this.kind === "mask" ? `label ${this.labels[bit]}` : bit ? "painted" : "kept";
	}

	choose(label) {
		Object.assign(this, {label, erase: false});
		announce(`The brush paints label ${this.labels[label]}`);
	}

	fill(make) {
		this.change(() => this.bits.forEach((bit, i) => (this.bits[i] = make(bit))));
	}

	// PNG of the mask, white where it is painted; of labels their numbers, of a hole the picture without it.
	async blob() {
		await this.loaded;
		if (this.url && !this.image && this.kind !== "edit") throw new Error("the picture is not there any more; upload it again");
		const {width, height, bits} = this, canvas = Object.assign(document.createElement("canvas"), {width, height});
		const context = canvas.getContext("2d"), white = this.kind === "mask" ? 1 : 255, hole = this.kind === "hole";
		if (hole) context.drawImage(this.image, 0, 0, width, height);
		const pixels = hole ? context.getImageData(0, 0, width, height) : context.createImageData(width, height);
		for (let i = 0; i < bits.length; i++) {
			if (hole) pixels.data[4 * i + 3] = bits[i] ? 0 : 255;
			else pixels.data.set([white * bits[i], white * bits[i], white * bits[i], 255], 4 * i);
		}
		context.putImageData(pixels, 0, 0);
		return new Promise((done) => canvas.toBlob(done, "image/png"));
	}

	render() {
		const {past, future, erase, kind, painted} = this, all = this.width * this.height, labels = kind === "mask";
		const swatch = (colour) => html`<svg width="12" height="12" aria-hidden="true"><rect width="12" height="12" rx="2" fill=${colour} /></svg>`;
		const note = labels ? `${painted} of ${all} pixels have another label than ${this.labels[0]}` : painted ? `${painted} of ${all} pixels are ${kind === "hole" ? "filled in" : "drawn anew"}, the others stay` : `Paint over what is to be ${kind === "hole" ? "filled in" : "drawn anew"}.`;
		const button = (label, press, pressed = nothing, off = false) => html`<button type="button" aria-pressed=${pressed} ?disabled=${off} @click=${press}>${label}</button>`;
		return html`<div class="mask"><div class="bar" role="toolbar" aria-label="Mask">
			${labels ? html`<span class="chips" role="group" aria-label="Label that the brush paints">${this.labels.map((name, i) => html`<button type="button" aria-pressed=${i === this.label && !erase} @click=${() => this.choose(i)}>${swatch(this.colours[i])} ${name}</button>`)}</span>`
				: html`${button("Brush", () => (this.erase = false), !erase)}${button("Eraser", () => (this.erase = true), erase)}`}
			<label>size ${range(this.brush, 1, Math.max(2, Math.round(Math.min(this.width, this.height) / 2)), (brush) => (this.brush = brush))}</label>
			<label>zoom ${range(this.shownZoom, 1, this.mostZoom, (zoom) => (this.zoom = zoom))}</label>
			${button("Undo", () => this.step(this.past, this.future), nothing, !past.length)}${button("Redo", () => this.step(this.future, this.past), nothing, !future.length)}
			${button("Clear", () => this.fill(() => 0))}${labels ? button("Fill", () => this.fill(() => this.label)) : button("Invert", () => this.fill((bit) => 1 - bit))}</div>
			<div class="scroll"><canvas width=${this.width} height=${this.height} tabindex="0" role="application" aria-label=${`Image to paint a mask on: arrows move, space paints, shift and arrows draw, ${labels ? "digits choose the label" : "e switches the eraser"}, brackets change the size, z undoes`}
				@pointerdown=${(e) => this.down(e)} @pointermove=${(e) => this.move(e)} @pointerup=${(e) => this.up(e)} @pointercancel=${(e) => this.up(e)} @keydown=${(e) => this.key(e)}></canvas></div>
			<p class="soft">${note}</p></div>`;
	}
}
customElements.define("unfog-mask", Mask);
