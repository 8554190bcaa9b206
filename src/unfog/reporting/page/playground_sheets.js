// Pictures of drawings: sheets with all pictures of a step, fetched once, and the canvas that shows one.

import {html} from "./vendor/lit.js";
import {View} from "./util.js";

const KEPT = 300; // sheets; the oldest go first
const LOADING = 4; // at once, of drawings under way; steps that come faster are left out

export class Sheets {
	constructor(data) {
		Object.assign(this, {data, held: new Map(), loading: 0});
	}

	// The decoded image at an address below api/draw/. If it cannot be had, it is asked for again the next time.
	get(path) {
		if (!this.held.has(path)) {
			if (this.loading >= LOADING && path.includes("&at=")) return Promise.reject(new Error("busy"));
			this.loading += 1;
			const image = new Image();
			image.src = this.data.url(`api/draw/${path}`);
			const loaded = image.decode().then(() => image).finally(() => (this.loading -= 1));
			loaded.catch(() => this.held.delete(path));
			this.held.set(path, loaded);
			if (this.held.size > KEPT) this.held.delete(this.held.keys().next().value);
		}
		return this.held.get(path);
	}
}

// One picture of a sheet: `path` of the sheet, number `index` of `count` pictures in rows of `columns`.
export function tile(sheets, path, index, count, label, scale, columns) {
	return html`<unfog-tile .sheets=${sheets} .path=${path} .index=${index} .count=${count} .label=${label} .scale=${scale} .columns=${columns}></unfog-tile>`;
}

class Tile extends View {
	static properties = ["sheets", "path", "index", "count", "columns", "label", "scale"];

	render() {}

	firstUpdated() {
		this.canvas = document.createElement("canvas");
		this.canvas.setAttribute("role", "img");
		this.append(this.canvas);
	}

	async updated() {
		const {path, index, count, canvas} = this, columns = this.columns || Math.ceil(Math.sqrt(count));
		canvas.setAttribute("aria-label", this.label);
		if (!path) return;
		const turn = (this.turn = (this.turn || 0) + 1);
		let image;
		try {
			image = await this.sheets.get(path);
		} catch {
			return; // not there yet; the next event brings it
		}
		if (turn < this.painted) return; // a later one was quicker
		this.painted = turn;
		const width = image.naturalWidth / columns, height = image.naturalHeight / Math.ceil(count / columns);
		if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, {width, height});
		const zoom = this.scale || Math.max(1, Math.floor(112 / width));
		canvas.style.width = `${width * zoom}px`;
		canvas.getContext("2d").drawImage(image, (index % columns) * width, Math.floor(index / columns) * height, width, height, 0, 0, width, height);
		this.dispatchEvent(new CustomEvent("painted", {bubbles: true, detail: path}));
	}
}
customElements.define("unfog-tile", Tile);
