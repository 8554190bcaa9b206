// Conditions that are images: a file, or painted here: a mask with its labels, the hole of a picture by a brush.

import {html} from "./vendor/lit.js";
import {View, announce, sidesOf} from "./util.js";
import {tile} from "./playground_sheets.js";

const PAINTED = ["mask", "hole"]; // kinds that can be painted; a mask without a file, too
const HINTS = {
	mask: "a file with the labels of the run, or painted here",
	image: "a file, brought to the size of the run",
	degrade: "a small picture, or a larger one that is made smaller",
	grey: "a picture; its brightness is taken",
	hole: "a picture; its transparent or painted pixels are filled in",
};

// Send a file as PNG, which the server takes. A PNG is sent unchanged, with its labels and transparency.
export async function send(data, file) {
	let blob = file;
	if (file.type !== "image/png") {
		const image = await createImageBitmap(file), canvas = Object.assign(document.createElement("canvas"), {width: image.width, height: image.height});
		canvas.getContext("2d").drawImage(image, 0, 0);
		blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
	}
	return (await data.ask("api/upload", {method: "POST", headers: {"Content-Type": "image/png"}, body: blob})).json();
}

// The field of one condition. `value` is {upload}, {job} of an earlier drawing, {painting} of a mask without a file, or null; the event "chosen" has the next one.
class Picture extends View {
	static properties = ["data", "run", "size", "condition", "value", "sheets", "jobs", "failed"];

	choose(value) {
		if (!value) {
			this.turn = (this.turn || 0) + 1; // a file that is on its way comes too late
			this.querySelector("input[type=file]").value = "";
		}
		this.dispatchEvent(new CustomEvent("chosen", {detail: value}));
	}

	// The address of an upload as the network is given it.
	view(upload) {
		return `api/upload/${upload}.png?run=${this.run}&given=${encodeURIComponent(this.condition.name)}`;
	}

	take(file) {
		this.failed = "";
		if (!file) return null;
		const turn = (this.turn = (this.turn || 0) + 1);
		return this.attempt(async () => {
			const {upload} = await send(this.data, file);
			await this.data.ask(this.view(upload)); // which says what does not suit the run
			if (turn !== this.turn) return; // another file was chosen, or none
			this.choose({upload});
			announce(`The picture of ${this.condition.name} was uploaded`);
		}, `${this.condition.name}: `);
	}

	// What a drawing is asked with: the file, or what is painted now; null where the condition is open.
	async file() {
		const {value, condition} = this, mask = this.querySelector("unfog-mask");
		if (!value) return null;
		if (!value.painting || !mask || (condition.kind === "hole" && !mask.painted)) return value.job ? {job: value.job} : value.upload ? {upload: value.upload} : null;
		const {upload} = await send(this.data, await mask.blob());
		return condition.kind === "mask" ? {upload, painted: true} : {upload};
	}

	render() {
		const {condition: {name, kind}, value, failed} = this, paints = PAINTED.includes(kind) && !value?.job && (kind === "mask" || value?.upload);
		const paint = (e) => this.choose(e.target.checked ? {...value, painting: true} : value.upload ? {upload: value.upload} : null);
		const clear = value ? html`<button type="button" class="quiet" aria-label="clear ${name}" @click=${() => this.choose(null)}>clear</button>` : "";
		return html`<div class="setting wide condition" role="group" aria-label=${name}><span>${name} <b>${!value ? "any" : value.job ? `as in drawing ${value.job}` : value.painting ? "painted" : "a file"}</b> ${clear}</span>
			<input type="file" accept="image/*" aria-label="${name}, ${HINTS[kind]}" @change=${(e) => this.take(e.target.files[0])}>
			<span class="soft">${HINTS[kind]}</span>
			${paints ? html`<label class="check"><input type="checkbox" .checked=${Boolean(value?.painting)} @change=${paint}> ${kind === "mask" ? "paint the mask" : "paint the hole"}</label>` : ""}
			${this.shown()}<p class="error" role="alert">${failed || ""}</p></div>`;
	}

	shown() {
		const {condition: {name, kind, categories, colours}, value, size} = this;
		if (!value) return "";
		if (value.job) {
			const of = this.jobs.find((one) => one.job === value.job), names = of?.given_pictures || [], at = names.indexOf(name);
			return at < 0 ? "" : tile(this.sheets, `${value.job}/given.webp`, at, names.length, `${name} of drawing ${value.job}`, 0, names.length);
		}
		const url = value.upload ? this.data.url(this.view(value.upload)) : "", [width, height] = sidesOf(size);
		if (!value.painting) return html`<img class="exact start" src=${url} alt="${name}, as the run takes it">`;
		return html`<unfog-mask .url=${url} .width=${width} .height=${height} .kind=${kind} .labels=${categories} .colours=${colours}></unfog-mask>`;
	}
}
customElements.define("unfog-condition", Picture);
