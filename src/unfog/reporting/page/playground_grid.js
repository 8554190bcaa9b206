// A grid of drawings over two settings: a row for each value of one, a column for each value of the other.

import {html} from "./vendor/lit.js";
import {View, options, table} from "./util.js";
import {tile} from "./playground_sheets.js";
import {tell} from "./playground_conditions.js";
import {send} from "./playground_pictures.js";

export const ENDED = ["done", "cancelled", "failed"]; // states of a drawing that change no more
const MOST_CELLS = 30;

// Words of a field, as numbers where they are.
export function values(text) {
	return text.split(/[\s,;]+/).filter(Boolean).map((one) => (Number.isFinite(Number(one)) ? Number(one) : one));
}

const GIVEN = "given ", PICTURE = "picture "; // before the name of a condition, and of one that is an image

// Values of a setting or condition; those of a condition may have spaces and semicolons.
function valuesOf(name, text, isText) {
	if (isText) return text.split(";").map((one) => one.trim()).filter(Boolean); // a caption may have commas
	return name.startsWith(GIVEN) ? text.split(",").map((one) => one.trim()).filter(Boolean) : values(text);
}

function changed(settings, name, value) {
	if (name.startsWith(PICTURE)) return settings;
	if (!name.startsWith(GIVEN)) return name ? {...settings, [name]: value} : settings;
	return {...settings, given: tell(settings.given, name.slice(GIVEN.length), value)};
}

class Grid extends View {
	static properties = ["data", "run", "settings", "conditions", "sheets", "inputs", "grid", "failed", "axes"]; // inputs: gives what an edit sends

	constructor() {
		super();
		this.axes = {a: "seed", b: "steps"};
	}

	connectedCallback() {
		super.connectedCallback();
		this.listen("draw", (event) => {
			const cell = this.grid?.cells.find((one) => one.job === event.job);
			if (!cell) return;
			Object.assign(cell, event);
			this.requestUpdate();
		});
	}

	async draw(event) {
		event.preventDefault();
		const of = new FormData(event.target), axes = ["a", "b"].map((axis) => [of.get(axis), this.valuesIn(of, axis)]).filter(([name, list]) => name && list.length);
		const [rows, columns] = axes.length > 1 ? axes : [["", [""]], axes[0] || ["", []]];
		if (!columns[1].length || rows[1].length * columns[1].length > MOST_CELLS) return void (this.failed = `Give values for one or two settings, ${MOST_CELLS} cells at most.`);
		Object.assign(this, {grid: {rows, columns, cells: []}, failed: ""});
		const inputs = await this.inputs(), sent = new Map();
		for (const file of [...rows[1], ...columns[1]].filter((one) => one instanceof File)) await this.attempt(async () => sent.set(file, (await send(this.data, file)).upload));
		const pictures = (...axes) => Object.fromEntries(axes.filter(([name]) => name.startsWith(PICTURE)).map(([name, file]) => [name.slice(PICTURE.length), {upload: sent.get(file)}]));
		for (const row of rows[1]) {
			for (const column of columns[1]) {
				const cell = {row, column, job: null, state: "waiting"};
				this.grid.cells.push(cell);
				await this.ask(cell, changed(changed({...this.settings, n: 1}, rows[0], row), columns[0], column), {...inputs, pictures: {...inputs.pictures, ...pictures([rows[0], row], [columns[0], column])}});
				this.requestUpdate();
			}
		}
	}

	async ask(cell, settings, inputs) {
		try {
			Object.assign(cell, await this.data.post("api/draw", {run: Number(this.run), settings, ...inputs}));
			if (ENDED.includes(cell.state)) return;
			const told = await this.data.get(`api/draw/${cell.job}`); // its events may have been quicker than the answer
			if (ENDED.includes(told.state)) Object.assign(cell, told);
		} catch (error) {
			Object.assign(cell, {state: "failed", error: error.message});
		}
	}

	valuesIn(form, axis) {
		const name = form.get(axis), given = form.getAll(`${axis}-values`);
		return name.startsWith(PICTURE) ? given.filter((file) => file.size) : valuesOf(name, given[0], this.isText(name));
	}

	isText(name) {
		return (this.conditions || []).some((one) => one.kind === "text" && GIVEN + one.name === name) || name === "negative";
	}

	// A caption alone, and of other settings the name too.
	caption(name, value) {
		if (name.startsWith(PICTURE)) return value.name;
		return name.startsWith(GIVEN) && this.isText(name) ? value : `${name.replace(GIVEN, "")} ${value}`;
	}

	render() {
		const negative = (this.conditions || []).some((one) => one.kind === "text") ? ["negative"] : [];
		const names = [["", "none"], "seed", "steps", "sampler", "checkpoint", "guidance", "ema", "strength", "grid", ...negative, ...(this.conditions || []).map((one) => [(one.image ? PICTURE : GIVEN) + one.name, one.name])], {grid} = this;
		// The names change with the run, and a list without the chosen one shows another.
		const pictured = (id) => names.some(([name]) => name.startsWith(PICTURE) && name === this.axes[id]);
		const files = (id) => html`<input type="file" accept="image/*" multiple name="${id}-values">`, words = (id, list) => html`<input name="${id}-values" .defaultValue=${list}>`;
		const axis = (id, label, name, list) => html`<label>${label} <select name=${id} @change=${(e) => (this.axes = {...this.axes, [id]: e.target.value})}>${options(names, name)}</select></label> <label>values ${pictured(id) ? files(id) : words(id, list)}</label>`;
		return html`<section><form class="bar" @submit=${(e) => this.draw(e)}>${axis("a", "down", "seed", "0 1 2")} ${axis("b", "across", "steps", "5 10 20")}<button>Draw the grid</button>${grid ? html`<button type="button" @click=${() => grid.cells.filter((one) => one.job && !ENDED.includes(one.state)).forEach((one) => this.attempt(() => this.data.post(`api/draw/${one.job}/cancel`, {})))}>Cancel</button>` : ""}</form>
			<p class="error" role="alert">${this.failed}</p>${grid ? this.cells(grid) : ""}</section>`;
	}

	cells({rows: [down, rows], columns: [across, columns], cells}) {
		const cell = (one, label) => (one?.state === "done" ? tile(this.sheets, `${one.job}/pictures.webp`, 0, 1, label)
			: html`<span class=${one?.state === "failed" ? "error" : "soft"}>${one?.error || one?.state}</span>`);
		const filled = rows.map((row, y) => [down ? this.caption(down, row) : "all", ...columns.map((column, x) => cell(cells[y * columns.length + x], `${this.caption(down, row)}, ${this.caption(across, column)}`))]);
		return table("Grid of two settings", ["settings", ...columns.map((value) => this.caption(across, value))], filled, "grid");
	}
}
customElements.define("unfog-grid", Grid);
