// A grid of drawings over two settings: a row for each value of one, a column for each value of the other.

import {html, nothing} from "./vendor/lit.js";
import {View, scroller} from "./util.js";

export const ENDED = ["done", "cancelled", "failed"]; // states of a drawing that change no more
const MOST_CELLS = 30;

// Words of a field, as numbers where they are.
export function values(text) {
	return text.split(/[\s,;]+/).filter(Boolean).map((one) => (Number.isFinite(Number(one)) ? Number(one) : one));
}

class Grid extends View {
	static properties = ["data", "run", "settings", "sheets", "inputs", "grid", "said"]; // inputs: gives what an edit sends

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
		const of = new FormData(event.target), axes = ["a", "b"].map((axis) => [of.get(axis), values(of.get(`${axis}-values`))]).filter(([name, list]) => name && list.length);
		const [rows, columns] = axes.length > 1 ? axes : [["", [""]], axes[0] || ["", []]];
		if (!columns[1].length || rows[1].length * columns[1].length > MOST_CELLS) return void (this.said = `Give values for one or two settings, ${MOST_CELLS} cells at most.`);
		Object.assign(this, {grid: {rows, columns, cells: []}, said: ""});
		const inputs = await this.inputs();
		for (const row of rows[1]) {
			for (const column of columns[1]) {
				const cell = {row, column, job: null, state: "waiting"};
				this.grid.cells.push(cell);
				await this.ask(cell, {...this.settings, n: 1, [columns[0]]: column, ...(rows[0] ? {[rows[0]]: row} : {})}, inputs);
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

	render() {
		const names = ["seed", "steps", "sampler", "checkpoint", "guidance", "ema", "strength", "grid"], {grid} = this;
		const axis = (id, label, name, list) => html`<label>${label} <select name=${id}><option value="">none</option>${names.map((one) => html`<option ?selected=${one === name}>${one}</option>`)}</select></label> <label>values <input name="${id}-values" .defaultValue=${list}></label>`;
		return html`<section><form class="bar" @submit=${(e) => this.draw(e)}>${axis("a", "down", "seed", "0 1 2")} ${axis("b", "across", "steps", "5 10 20")}<button>Draw the grid</button>${grid ? html`<button type="button" @click=${() => grid.cells.filter((one) => one.job && !ENDED.includes(one.state)).forEach((one) => this.data.post(`api/draw/${one.job}/cancel`, {}).catch((error) => (this.said = error.message)))}>Cancel</button>` : nothing}</form>
			${this.said ? html`<p class="error" role="alert">${this.said}</p>` : nothing}
			${grid ? scroller("Grid of two settings", html`<table class="grid"><thead><tr><td></td>${grid.columns[1].map((value) => html`<th>${grid.columns[0]} ${value}</th>`)}</tr></thead><tbody>${grid.rows[1].map((row, y) => html`<tr><th>${grid.rows[0]} ${row}</th>${grid.columns[1].map((column, x) => {
				const cell = grid.cells[y * grid.columns[1].length + x];
				return html`<td>${cell?.state === "done" ? html`<unfog-tile .sheets=${this.sheets} .path=${`${cell.job}/pictures.webp`} .index=${0} .count=${1} .label=${`${grid.rows[0]} ${row}, ${grid.columns[0]} ${column}`}></unfog-tile>` : html`<span class=${cell?.state === "failed" ? "error" : "soft"}>${cell ? cell.error || cell.state : ""}</span>`}</td>`;
			})}</tr>`)}</tbody></table>`) : nothing}</section>`;
	}
}
customElements.define("unfog-grid", Grid);
