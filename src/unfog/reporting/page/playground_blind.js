// Blind comparison: pairs of pictures from the same noise, side by side in random order; the counts are kept with the run.

import {html, nothing} from "./vendor/lit.js";
import {View, announce, count, scroller} from "./util.js";

class Blind extends View {
	static properties = ["data", "run", "detail", "sheets", "settings", "a", "b", "pairs", "at", "counts", "said"];

	constructor() {
		super();
		Object.assign(this, {pairs: null, at: 0, counts: [], said: ""});
	}

	connectedCallback() {
		super.connectedCallback();
		this.off = this.data.on("draw", (event) => this.pairs && [this.first.job, this.second.job].includes(event.job) && this.follow(event));
		this.data.get(`api/blind?run=${this.run}`).then((counts) => (this.counts = counts)).catch((error) => (this.said = error.message));
	}

	disconnectedCallback() {
		super.disconnectedCallback();
		this.off();
	}

	async begin() {
		const steps = this.detail.checkpoints;
		try {
			const [first, second] = await Promise.all([this.a ?? steps[0], this.b ?? steps.at(-1)].map((checkpoint) =>
				this.data.post("api/draw", {run: Number(this.run), settings: {...this.settings, checkpoint, ema: null, strength: null, repeats: null}})));
			if (first.job === second.job) throw new Error("choose two different checkpoints");
			Object.assign(this, {first, second, said: "", at: 0});
			const order = [...Array(first.settings.n).keys()];
			for (let i = order.length - 1; i > 0; i--) {
				const j = Math.floor(Math.random() * (i + 1));
				[order[i], order[j]] = [order[j], order[i]];
			}
			this.pairs = order.map((picture) => ({picture, swapped: Math.random() < 0.5}));
			announce("The pictures are being drawn");
		} catch (error) {
			this.said = error.message;
		}
	}

	follow(event) {
		for (const side of ["first", "second"]) if (this[side].job === event.job) this[side] = {...this[side], ...event};
		if (event.state === "failed") this.said = event.error;
		this.requestUpdate();
	}

	get ready() {
		return this.pairs && this.first.state === "done" && this.second.state === "done";
	}

	async vote(side) {
		const {picture, swapped} = this.pairs[this.at];
		const choice = side === "neither" ? side : (side === "left") === swapped ? "second" : "first";
		try {
			this.counts = await this.data.post("api/blind", {first: this.first.job, second: this.second.job, picture, choice});
			this.at += 1;
			if (this.at === this.pairs.length) announce("All pairs are judged");
		} catch (error) {
			this.said = error.message;
		}
	}

	key(event) {
		const side = {1: "left", 2: "right", 0: "neither"}[event.key];
		if (!side || !this.ready || this.at >= this.pairs.length) return;
		event.preventDefault();
		this.vote(side);
	}

	select(side, usual) {
		return html`<label>checkpoint <select @change=${(e) => (this[side] = Number(e.target.value))}>${this.detail.checkpoints.map((step) => html`<option value=${step} ?selected=${step === (this[side] ?? usual)}>${count(step)}</option>`)}</select></label>`;
	}

	side(left) {
		const {picture, swapped} = this.pairs[this.at], job = left === swapped ? this.second : this.first;
		const label = `${left ? "Left" : "Right"} picture of pair ${this.at + 1}`;
		return html`<unfog-tile .sheets=${this.sheets} .path=${`${job.job}/pictures.webp`} .index=${picture} .count=${job.settings.n} .label=${label} .scale=${Math.max(1, Math.floor(256 / this.detail.settings["data.size"]))}></unfog-tile>`;
	}

	render() {
		const steps = this.detail.checkpoints, judged = this.pairs && this.at >= this.pairs.length;
		if (steps.length < 2) return html`<p class="soft">A comparison needs two checkpoints; this run has ${steps.length}.</p>`;
		return html`<section class="blind" @keydown=${(e) => this.key(e)}><div class="bar">${this.select("a", steps[0])} against ${this.select("b", steps.at(-1))}
			<button @click=${() => this.begin()}>Draw ${this.settings.n} pairs</button></div>
			<p class="error" role="alert">${this.said}</p>
			${this.pairs && !this.ready && !this.said ? html`<p class="soft">Drawing: ${this.first.state}, ${this.second.state} …</p>` : nothing}
			${this.ready && !judged ? html`<p>Pair ${this.at + 1} of ${this.pairs.length}: which is better?</p>
				<div class="pair">${this.side(true)}${this.side(false)}</div>
				<div class="bar"><button @click=${() => this.vote("left")}>Left (1)</button><button @click=${() => this.vote("right")}>Right (2)</button><button @click=${() => this.vote("neither")}>Neither (0)</button></div>` : nothing}
			${judged ? html`<p>All ${this.pairs.length} pairs are judged.</p>` : nothing}
			${this.counts.length && (!this.pairs || judged) ? this.table() : nothing}</section>`;
	}

	table() {
		const name = (side) => Object.entries(side).map(([key, value]) => `${key} ${value}`).join(", ");
		return scroller("Votes", html`<table><caption class="soft">Votes, kept in blind-comparisons.jsonl of the run. The interval is Wilson's, at 95%, without ties.</caption>
			<thead><tr><th>first</th><th>second</th><th>first better</th><th>second better</th><th>neither</th><th>share of the first</th></tr></thead>
			<tbody>${this.counts.map((one) => html`<tr><td>${name(one.first)}</td><td>${name(one.second)}</td><td class="number">${one.first_wins}</td><td class="number">${one.second_wins}</td><td class="number">${one.ties}</td>
				<td class="number">${one.interval.map((share) => `${Math.round(100 * share)}%`).join(" to ")}</td></tr>`)}</tbody></table>`);
	}
}
customElements.define("unfog-blind", Blind);
