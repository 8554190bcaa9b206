// Blind comparison: pairs of pictures from the same noise, in random order; counts are kept with the run.

import {html} from "./vendor/lit.js";
import {View, announce, select, sidesOf, table} from "./util.js";
import {tile} from "./playground_sheets.js";

class Blind extends View {
	static properties = ["data", "run", "detail", "sheets", "settings", "a", "b", "pairs", "at", "counts", "failed"];

	constructor() {
		super();
		Object.assign(this, {pairs: null, at: 0, counts: [], failed: ""});
	}

	connectedCallback() {
		super.connectedCallback();
		this.listen("draw", (event) => this.pairs && [this.first.job, this.second.job].includes(event.job) && this.follow(event));
		this.attempt(async () => (this.counts = await this.data.get(`api/blind?run=${this.run}`)));
	}

	begin() {
		const steps = this.detail.checkpoints;
		return this.attempt(async () => {
			const [first, second] = await Promise.all([this.a ?? steps[0], this.b ?? steps.at(-1)].map((checkpoint) =>
				this.data.post("api/draw", {run: Number(this.run), settings: {...this.settings, checkpoint, ema: null, strength: null, repeats: null}})));
			if (first.job === second.job) throw new Error("choose two different checkpoints");
			Object.assign(this, {first, second, failed: "", at: 0});
			const order = [...Array(first.settings.n).keys()];
			for (let i = order.length - 1; i > 0; i--) {
				const j = Math.floor(Math.random() * (i + 1));
				[order[i], order[j]] = [order[j], order[i]];
			}
			this.pairs = order.map((picture) => ({picture, swapped: Math.random() < 0.5}));
			announce("The pictures are being drawn");
		});
	}

	follow(event) {
		for (const side of ["first", "second"]) if (this[side].job === event.job) this[side] = {...this[side], ...event};
		if (event.state === "failed") this.failed = event.error;
		this.requestUpdate();
	}

	get ready() {
		return this.pairs && this.first.state === "done" && this.second.state === "done";
	}

	vote(side) {
		const {picture, swapped} = this.pairs[this.at];
		const choice = side === "neither" ? side : (side === "left") === swapped ? "second" : "first";
		return this.attempt(async () => {
			this.counts = await this.data.post("api/blind", {first: this.first.job, second: this.second.job, picture, choice});
			this.at += 1;
			if (this.at === this.pairs.length) announce("All pairs are judged");
		});
	}

	key(event) {
		const side = {1: "left", 2: "right", 0: "neither"}[event.key];
		if (!side || !this.ready || this.at >= this.pairs.length) return;
		event.preventDefault();
		this.vote(side);
	}

	select(side, usual) {
		return html`<label>checkpoint ${select(this.detail.checkpoints, this[side] ?? usual, (step) => (this[side] = Number(step)))}</label>`;
	}

	side(left) {
		const {picture, swapped} = this.pairs[this.at], job = left === swapped ? this.second : this.first;
		const label = `${left ? "Left" : "Right"} picture of pair ${this.at + 1}`;
		return tile(this.sheets, `${job.job}/pictures.webp`, picture, job.settings.n, label, Math.max(1, Math.floor(256 / Math.max(...sidesOf(this.detail.settings["data.size"])))));
	}

	render() {
		const steps = this.detail.checkpoints, judged = this.pairs && this.at >= this.pairs.length;
		if (steps.length < 2) return html`<p class="soft">A comparison needs two checkpoints; this run has ${steps.length}.</p>`;
		return html`<section class="blind" @keydown=${(e) => this.key(e)}><div class="bar">${this.select("a", steps[0])} against ${this.select("b", steps.at(-1))}
			<button @click=${() => this.begin()}>Draw ${this.settings.n} pairs</button></div>
			<p class="error" role="alert">${this.failed}</p>
			${this.pairs && !this.ready && !this.failed ? html`<p class="soft">Drawing: ${this.first.state}, ${this.second.state} …</p>` : ""}
			${this.ready && !judged ? html`<p>Pair ${this.at + 1} of ${this.pairs.length}: which is better?</p>
				<div class="pair">${this.side(true)}${this.side(false)}</div>
				<div class="bar">${Object.entries({left: "Left (1)", right: "Right (2)", neither: "Neither (0)"}).map(([side, label]) => html`<button @click=${() => this.vote(side)}>${label}</button>`)}</div>` : ""}
			${judged ? html`<p>All ${this.pairs.length} pairs are judged.</p>` : ""}
			${this.counts.length && (!this.pairs || judged) ? this.table() : ""}</section>`;
	}

	table() {
		const name = (side) => Object.entries(side).map(([key, value]) => `${key} ${value}`).join(", ");
		const rows = this.counts.map((one) => [name(one.first), name(one.second), one.first_wins, one.second_wins, one.ties, one.interval.map((share) => `${Math.round(100 * share)}%`).join(" to ")]);
		return html`${table("Votes", ["first", "second", "first better", "second better", "neither", "share of the first"], rows)}
			<p class="soft">Votes, kept in blind-comparisons.jsonl of the run. The interval is Wilson's, at 95%, without ties.</p>`;
	}
}
customElements.define("unfog-blind", Blind);
