// The playground: draw from a run and see every step, scrub training time and denoising time, edit, compare, look back.

import {html, nothing} from "./vendor/lit.js";
import {View, announce, command, count, keep, radios, range, route, select, sidesOf} from "./util.js";
import {Sheets, tile} from "./playground_sheets.js";
import {ENDED, values} from "./playground_grid.js";
import {fields, rareWords, told} from "./playground_conditions.js";
import {send} from "./playground_pictures.js";
import "./playground_noise_levels.js";
import "./playground_mask.js";
import "./playground_blind_comparison.js";

const USUAL = {n: 8, seed: 0};
const VIEWS = {x0: "guess of the image", x: "noisy state"};
const WAIT = 250; // ms that a slider rests before it draws
const two = (x) => +x.toPrecision(2);

// Drawings of an answer, which may be old: newer drawings stay, and those that have ended.
function joined(known, answer) {
	const last = answer.at(-1)?.job ?? 0, ended = new Map(known.filter((one) => ENDED.includes(one.state)).map((one) => [one.job, one]));
	return [...answer.map((one) => (ENDED.includes(one.state) ? one : ended.get(one.job) || one)), ...known.filter((one) => one.job > last)];
}

class Playground extends View {
	static properties = ["data", "run", "runs", "detail", "form", "edit", "about", "jobs", "job", "shown", "view", "position", "pane", "failed", "past", "future", "rare", "pictures"];

	constructor() {
		super();
		Object.assign(this, {runs: [], form: {...USUAL}, jobs: [], shown: 0, view: "x0", position: null, failed: "", past: [], future: [], pane: "draw", edit: null, rare: {}, pictures: {}});
	}

	connectedCallback() {
		super.connectedCallback();
		this.sheets ||= new Sheets(this.data);
		this.listen("draw", (event) => this.progress(event));
		this.listen("refresh", () => this.load(true));
		this.listen("runs", () => this.data.runs().then((runs) => (this.runs = runs)).catch(() => {}));
		this.listen("run", (event) => String(event.id) === String(this.run) && this.loadRun());
		this.start();
	}

	async start() {
		await this.attempt(async () => {
			this.runs = await this.data.runs();
			this.run ||= this.runs[0]?.id;
			this.form = {...USUAL, ...JSON.parse(route().query.get("form") || "{}")};
		});
		await this.load();
	}

	updated(changes) {
		if (changes.has("run") && this.run && String(this.detail?.id) !== String(this.run)) this.loadRun();
		if (changes.has("form") || changes.has("detail")) this.findRare();
	}

	loadRun() {
		return this.attempt(async () => {
			const before = this.detail?.checkpoints.length;
			this.detail = await this.data.run(this.run);
			if (before && this.detail.checkpoints.length > before) announce(`A checkpoint of step ${this.detail.checkpoints.at(-1)} is there`);
		});
	}

	load(again = false) {
		const turn = (this.asked = (this.asked || 0) + 1);
		return this.attempt(async () => {
			const about = await this.data.get("api/draw");
			if (turn < (this.answered || 0)) return; // a later question was answered first
			this.answered = turn;
			Object.assign(this, {about, jobs: again ? about.jobs : joined(this.jobs, about.jobs)});
			if (again && this.job && !this.jobs.some((one) => one.job === this.job.job)) this.job = {...this.job, state: "failed", error: "the server was started anew; draw again"};
			else if (again && this.job) await this.update(this.job.job);
			else if (!this.job && this.jobs.length) {
				const last = this.jobs.findLast((one) => String(one.run) === String(this.run));
				if (last && !this.job) await this.open(last.job, () => this.job);
			}
		});
	}

	// An event of a drawing: the newest step is shown at once, unless somebody looks at another one.
	progress(event) {
		const known = this.jobs.find((one) => one.job === event.job);
		if (known) this.jobs = this.jobs.map((one) => (one.job === event.job ? {...one, ...event} : one));
		else this.load();
		if (event.job !== this.job?.job) return;
		const ended = ENDED.includes(event.state), before = this.job.state, steps = this.job.kept_steps || [];
		const next = event.done > 0 && !steps.some((one) => one.number === event.step) ? [...steps, {number: event.step, share: event.share}] : steps;
		this.job = {...this.job, ...event, kept_steps: next};
		if (ended && (!ENDED.includes(before) || this.job.copies?.state === "waiting")) {
			if (!ENDED.includes(before)) announce(event.state === "failed" ? `The drawing failed: ${event.error}` : event.state === "done" ? "The drawing is done" : "The drawing was cancelled");
			this.update(event.job);
			this.load();
		}
	}

	// Show the newest state of a drawing, unless another was begun, or this one ended, while the server answered.
	update(number) {
		return this.open(number, (job) => this.job?.job !== number || (ENDED.includes(this.job.state) && !ENDED.includes(job.state)));
	}

	// Show a drawing, unless the answer of the server came too late: it is given to `late`.
	open(number, late = () => false) {
		return this.attempt(async () => {
			const job = await this.data.get(`api/draw/${number}`);
			if (late(job)) return;
			this.job = job;
			this.shown = Math.min(this.shown, job.settings.n - 1);
			this.failed = "";
		});
	}

	get settings() {
		const needless = this.edit ? (this.edit.masked ? [] : ["repeats"]) : ["strength", "repeats"];
		return Object.fromEntries(Object.entries(this.form).filter(([name, value]) => !needless.includes(name) && value !== "" && value !== null && value !== undefined && !Number.isNaN(value)));
	}

	// What is sent besides the settings: pictures of conditions; the image and the painted mask of an edit.
	async inputs() {
		const pictures = {};
		for (const field of this.querySelectorAll("unfog-condition")) {
			const file = await field.file();
			if (file) pictures[field.condition.name] = file;
		}
		if (!this.edit) return {pictures};
		const {upload, job, picture, masked} = this.edit, image = upload ? {upload} : {job, picture}, mask = this.querySelector("fieldset unfog-mask");
		if (!masked || !mask?.painted) return {pictures, image};
		const sent = await send(this.data, await mask.blob());
		return {pictures, image, mask: {upload: sent.upload}};
	}

	// What is asked for anew is seen as it comes; a slider keeps the step that is looked at.
	submit(event) {
		event.preventDefault();
		this.position = null;
		this.draw();
	}

	draw() {
		clearTimeout(this.later);
		this.failed = "";
		keep({form: JSON.stringify(this.settings)});
		return this.attempt(async () => {
			const body = {run: Number(this.run), settings: this.settings, ...(await this.inputs())};
			if (!body.mask) delete body.settings.repeats;
			const job = await this.data.post("api/draw", body);
			if (this.job?.job !== job.job) this.past = [...this.past, this.job?.job].filter(Boolean).slice(-100);
			Object.assign(this, {job, future: [], shown: Math.min(this.shown, job.settings.n - 1)});
			if (!this.jobs.some((one) => one.job === job.job)) this.jobs = [...this.jobs, job];
			if (!ENDED.includes(job.state)) this.update(job.job); // its events may have been quicker than this answer
			announce(ENDED.includes(job.state) ? "This was drawn before" : "Drawing");
		});
	}

	soon() {
		clearTimeout(this.later);
		this.later = setTimeout(() => this.draw(), WAIT);
	}

	set(name, value, now = false) {
		this.form = {...this.form, [name]: value};
		if (now) this.soon();
	}

	// Ask which words of the captions are rare, once the typing rests.
	findRare() {
		const text = (this.detail?.conditions || []).find((one) => one.kind === "text"), {form, run} = this;
		const asked = text ? {prompt: told(form.given, text.name), negative: form.negative || ""} : {};
		const key = JSON.stringify([run, asked]);
		if (key === this.askedRare) return;
		this.askedRare = key;
		clearTimeout(this.rarely);
		this.rarely = setTimeout(async () => {
			const found = await Promise.all(Object.entries(asked).map(async ([name, words]) => [name, words ? await this.data.get(`api/draw/rare-words?run=${run}&text=${encodeURIComponent(words)}`).catch(() => []) : []]));
			if (key === this.askedRare) this.rare = Object.fromEntries(found);
		}, WAIT);
	}

	cancel(number) {
		return this.attempt(() => this.data.post(`api/draw/${number}/cancel`, {}));
	}

	// Look back, and forward again: drawings are kept, so nothing is drawn anew.
	back(from, to) {
		const number = this[from].at(-1);
		if (number === undefined) return;
		this[to] = [...this[to], this.job?.job].filter(Boolean);
		this[from] = this[from].slice(0, -1);
		this.reuse(number);
	}

	async reuse(number) {
		clearTimeout(this.later); // what a slider has asked for is of the settings before
		await this.open(number);
		if (!this.job) return;
		this.form = {...USUAL, ...this.job.settings};
		this.pictures = Object.fromEntries((this.job.given_pictures || []).map((name) => [name, {job: this.job.job}]));
	}

	upload(file) {
		if (!file) return null;
		return this.attempt(async () => {
			const sent = await send(this.data, file);
			this.edit = {upload: sent.upload, masked: false, found: sent.settings};
			announce("The picture was uploaded");
		}, "The picture cannot be used: ");
	}

	// Settings from inside a PNG that was saved here.
	adopt({run, settings}) {
		const known = this.runs.find((one) => one.name === run);
		if (known) this.run = known.id;
		this.form = {...USUAL, ...settings};
		Object.assign(this, {edit: null, pictures: {}});
		announce("The settings of the picture are in the form");
	}

	take(masked) {
		this.edit = {job: this.job.job, picture: this.shown, masked};
		if (masked) this.pane = "draw";
		announce(masked ? "Paint over what is to be drawn anew" : "Variations start from this picture");
	}

	// The step of a drawing to show: the chosen one, or the newest; null for the finished pictures.
	step(job) {
		const steps = job.kept_steps || [], at = this.position;
		if (job.pictures && (at === null || at >= steps.length)) return null;
		return steps[at] || {number: job.step, share: job.share};
	}

	// The sheet with all pictures of that step.
	sheet(job, view = this.view) {
		const step = this.step(job);
		if (!step) return `${job.job}/pictures.webp`;
		if (job.state === "waiting" || (!job.done && !job.kept_steps?.length)) return "";
		// While it is drawn, a later batch changes the same step.
		return `${job.job}/steps/${step.number}.webp?what=${view}${job.pictures ? "" : `&at=${job.done}${job.state[0]}`}`;
	}

	where(job) {
		const step = this.step(job);
		return step ? `step ${step.number + 1}, noise ${Math.round(100 * step.share)}%` : "finished";
	}

	setting(label, control, kind = "") {
		return html`<label class="setting ${kind}"><span>${label}</span>${control}</label>`;
	}

	render() {
		if (!this.runs.length) return html`<h1>Draw</h1><p class="empty">${this.failed || "No run is here yet. Start one, and draw from its first checkpoint."}</p>`;
		return html`<h1>Draw</h1><div class="playground"><form class="controls" aria-label="Settings of the drawing" @submit=${this.submit}>${this.detail ? this.controls() : html`<p class="soft">Reading the run …</p>`}</form>
			<div class="result"><p class="error" role="alert">${this.failed}</p>
				<div class="bar" role="group" aria-label="What to do">${Object.entries({draw: "Pictures", grid: "Grid of two settings", blind: "Blind comparison"}).map(([pane, label]) => html`<button aria-pressed=${pane === this.pane} @click=${() => (this.pane = pane)}>${label}</button>`)}
					<span class="grow"></span><button ?disabled=${!this.past.length} @click=${() => this.back("past", "future")}>Undo</button><button ?disabled=${!this.future.length} @click=${() => this.back("future", "past")}>Redo</button></div>
				<unfog-grid ?hidden=${this.pane !== "grid"} .data=${this.data} .run=${this.run} .settings=${this.settings} .conditions=${this.detail?.conditions || []} .sheets=${this.sheets} .inputs=${() => this.inputs()}></unfog-grid>
				${this.pane === "grid" ? "" : this.detail && this.pane === "blind" ? html`${[this.run].map(() => html`<unfog-blind .data=${this.data} .run=${this.run} .detail=${this.detail} .sheets=${this.sheets} .settings=${this.settings}></unfog-blind>`)}` : this.drawing()}
				${this.history()}</div></div>`;
	}

	// A number of the form; null where it is left empty.
	field(name, label, {usual = "", min = nothing, max = nothing, step = 1} = {}) {
		const read = (e) => (e.target.value === "" ? null : Number(e.target.value));
		return this.setting(label, html`<input type="number" inputmode="decimal" min=${min} max=${max} step=${step} .value=${String(this.form[name] ?? "")} placeholder=${usual} @input=${(e) => this.set(name, read(e))}>`);
	}

	choice(name, label, names, usual) {
		return this.setting(label, select([["", `${usual} (run's)`], ...names], this.form[name], (value) => this.set(name, value || null)));
	}

	controls() {
		const {detail, form, about} = this, {settings, checkpoints, classes, ema, conditions = []} = detail, of = (name) => settings[name];
		const at = Math.max(0, form.checkpoint ? checkpoints.indexOf(form.checkpoint) : checkpoints.length - 1), interval = form.guidance_interval || [];
		const open = (run) => {
			Object.assign(this, {run, form: {...form, checkpoint: null, ema: null, label: null, given: null, negative: null, guide: null}, job: null, pictures: {}});
			location.hash = `#/draw/${run}`;
		};
		return html`${this.setting("Run", select(this.runs.map((one) => [one.id, one.name]), this.run, open))}
			${detail.status.state === "running" ? html`<p class="soft">This run is training: its newest whole checkpoint draws, at low priority.</p>` : ""}
			${checkpoints.length ? this.setting(html`Training time <b>${form.checkpoint ? "" : "newest, "}step ${count(checkpoints[at])}</b>`,
				range(at, 0, checkpoints.length - 1, (i) => this.set("checkpoint", i === checkpoints.length - 1 ? null : checkpoints[i], true), {said: `checkpoint of step ${checkpoints[at]}`, off: checkpoints.length < 2}), "wide") : html`<p class="empty">No checkpoint yet.</p>`}
			${ema ? html`${this.setting(html`EMA width <b>${form.ema ?? "the run's"}</b>`, range(form.ema ?? ema.widths?.[0] ?? 0.1, 0.01, 0.28, (width) => this.set("ema", width, true), {step: 0.01}), "wide")}
				${form.ema ? html`<button type="button" class="quiet" @click=${() => this.set("ema", null, true)}>Use the run's EMA</button>` : ""}` : ""}
			${classes.length ? this.setting("Class", select([["", "all in turn"], ...classes], form.label?.[0], (name) => this.set("label", name === "" ? null : [name]))) : ""}
			${fields(conditions.filter((one) => !one.image), form.given, (given, now) => this.set("given", given, now), this.rare.prompt)}
			${conditions.filter((one) => one.image).map((one) => html`<unfog-condition .data=${this.data} .run=${this.run} .size=${of("data.size")} .condition=${one} .value=${this.pictures[one.name] || null} .sheets=${this.sheets} .jobs=${this.jobs} @chosen=${(e) => (this.pictures = {...this.pictures, [one.name]: e.detail})}></unfog-condition>`)}
			${conditions.some((one) => one.kind === "text") && of("label_dropout") > 0 ? this.setting("Negative prompt", html`<input placeholder="none; needs a guidance other than 1" maxlength="4096" .value=${form.negative || ""} @input=${(e) => this.set("negative", e.target.value || null)}>${rareWords(this.rare.negative || [])}`, "wide") : ""}
			${this.field("n", "Pictures", {min: 1, max: about?.most_images || 64})}
			<div class="setting"><label for="seed">Seed</label><span class="inline"><input id="seed" type="number" step="1" .value=${String(form.seed ?? 0)} @input=${(e) => this.set("seed", Number(e.target.value))}><button type="button" aria-label="Another seed" @click=${() => this.set("seed", Math.floor(Math.random() * 1e6), true)}>⚄</button></span></div>
			${this.choice("sampler", "Sampler", about?.samplers || [], of("sampler.kind"))}
			${this.field("steps", "Steps", {min: 1, max: 1000, usual: of("sampler.steps")})}
			${(classes.length || conditions.length) && of("label_dropout") > 0 ? html`${this.field("guidance", "Guidance", {step: 0.1, usual: of("guidance")})}
				<div class="setting"><span>Guided where noise is</span><span class="inline">${[0, 1].map((i) => html`<input type="number" min="0" max="1" step="0.05" aria-label=${`${i ? "Highest" : "Lowest"} share of noise with guidance`} .value=${String(interval[i] ?? "")} placeholder=${of("guidance_interval")?.[i] ?? i} @input=${(e) => this.setInterval(i, e.target.value)}>`)}</span></div>` : this.choice("guide", "Guide", ["auto", "none"], of("guide"))}
			<details ?open=${Boolean(form.levels)}><summary>Levels, interpolation, weights</summary>${this.choice("grid", "Grid of levels", (about?.grids || []).filter((one) => one !== "tuned"), of("sampler.grid"))}
				${this.setting("Levels (falling shares of noise)", html`<input .value=${(form.levels || []).join(" ")} placeholder="1 0.8 0.5 0.2" @change=${(e) => this.setLevels(values(e.target.value))}>`, "wide")}
				${form.levels?.length > 1 ? html`<unfog-shares .shares=${form.levels} @moved=${(e) => this.set("levels", e.detail, true)}></unfog-shares>` : ""}
				${this.field("to_seed", "To seed (interpolation)", {usual: "none"})}
				${this.choice("weights", "Weights", ["raw"], "EMA")}</details>
			${this.editing()}
			<div class="bar"><button class="accent">Draw</button>${this.job && !ENDED.includes(this.job.state) ? html`<button type="button" @click=${() => this.cancel(this.job.job)}>Cancel</button>` : ""}</div>`;
	}

	// Levels take the place of steps and grid.
	setLevels(levels) {
		this.form = {...this.form, ...(levels.length ? {levels, steps: null, grid: null} : {levels: null})};
	}

	setInterval(i, value) {
		const usual = this.detail.settings.guidance_interval || [0, 1], both = [...(this.form.guidance_interval || usual)];
		both[i] = value === "" ? usual[i] : Number(value);
		this.set("guidance_interval", both);
	}

	editing() {
		const {edit} = this, [width, height] = sidesOf(this.detail.settings["data.size"]);
		if (!edit) return this.setting("Start from a picture (its settings are read, too)", html`<input type="file" accept="image/*" @change=${(e) => this.upload(e.target.files[0])}>`, "wide");
		const url = edit.upload ? this.data.url(`api/upload/${edit.upload}.png?run=${this.run}`) : this.data.url(`api/draw/${edit.job}/${edit.picture}.png`);
		return html`<fieldset><legend>Start from ${edit.upload ? "an upload (cropped)" : `picture ${edit.picture + 1} of drawing ${edit.job}`}</legend>
			${edit.found ? html`<p>This picture was drawn here. <button type="button" @click=${() => this.adopt(edit.found)}>Take its settings</button></p>` : ""}
			${edit.masked ? html`<unfog-mask .url=${url} .width=${width} .height=${height}></unfog-mask>` : html`<img class="exact start" src=${url} alt="The picture to start from">`}
			<label class="check"><input type="checkbox" .checked=${edit.masked} @change=${(e) => (this.edit = {...edit, masked: e.target.checked})}> paint a mask (inpainting)</label>
			${this.field("strength", "Strength", {min: 0, max: 1, step: 0.05, usual: edit.masked ? 1 : 0.6})}
			${edit.masked ? this.field("repeats", "Repeats", {min: 1, max: 50, usual: 10}) : ""}
			<button type="button" class="quiet" @click=${() => (this.edit = null)}>Start from noise again</button></fieldset>`;
	}

	drawing() {
		const {job} = this;
		if (!job) return html`<p class="empty">Press Draw. Every step is shown when it is computed, and kept.</p>`;
		const steps = job.kept_steps || [], last = steps.length - (job.pictures ? 0 : 1), at = this.position ?? last, n = job.settings.n;
		const taken = job.pictures ? job.of : job.done; // what was drawn before a restart of the server has no count
		return html`<section aria-label="Drawing ${job.job}"><div class="bar"><span class="state ${job.state}">${job.state}</span>
				${job.state === "drawing" && !job.of ? html`<span class="soft">the network is being loaded; the first drawing takes longest</span>` : ""}
				${job.of ? html`<progress max=${job.of} value=${taken} aria-label="Steps done"></progress><span class="soft">${taken} of ${job.of} steps${this.lag && !ENDED.includes(job.state) ? `, seen ${this.lag} ms after it was computed` : ""}</span>` : ""}
				${job.error ? html`<span class="error" role="alert">${job.error}</span> <button @click=${() => this.draw()}>Draw again</button>` : ""}
				${radios("drawn-view", "Show", VIEWS, this.view, (view) => (this.view = view))}</div>
			${steps.length > 1 ? this.setting(html`Denoising time <b>${this.where(job)}</b>`, range(Math.min(at, last), 0, last, (i) => (this.position = i === last && job.pictures ? null : i), {said: this.where(job)}), "wide scrub") : ""}
			<div class="drawn" @painted=${(e) => { if (e.detail.includes("&at=") && job.computed) this.lag = Math.max(0, Math.round(Date.now() - 1000 * job.computed)); }}>${[...Array(n).keys()].map((i) => html`<button class="cell" aria-pressed=${i === this.shown} aria-label="Select picture ${i + 1}" @click=${() => (this.shown = i)}>${tile(this.sheets, this.sheet(job), i, n, `Picture ${i + 1}, ${this.where(job)}`)}${this.verdict(i)}</button>`)}</div>
			${this.selected(job)}
			${job.command ? html`<details class="copies"><summary>As a command, as Python</summary>${command(job.command)}<pre tabindex="0">${job.python}</pre><button @click=${() => navigator.clipboard.writeText(job.python).then(() => announce("The Python was copied"))}>Copy the Python</button></details>` : ""}</section>`;
	}

	verdict(index) {
		const found = this.job.copies?.pictures?.[index];
		return found ? html`<span class=${found.copy ? "error" : "soft"}>${found.copy ? "a copy" : "no copy"}</span>` : "";
	}

	// One picture in full: the noisy state beside the guess, and what can be done with it.
	selected(job) {
		const i = this.shown, {copies, kept} = job, found = copies?.pictures?.[i], size = Math.max(...sidesOf(job.size || 32)), scale = Math.max(1, Math.floor(224 / size)), at = this.sheet(job);
		if (!at) return "";
		const finished = at.endsWith("pictures.webp"), both = finished ? [[at, "finished picture"]] : Object.keys(VIEWS).reverse().map((view) => [this.sheet(job, view), VIEWS[view]]);
		const given = job.given || [], said = (job.settings.given || []).join(", ");
		return html`<div class="selected"><h2>Picture ${i + 1}</h2>${said ? html`<p class="soft">${said}</p>` : ""}<div class="pair">${given.map((name, k) => html`<figure>${tile(this.sheets, `${job.job}/given.webp`, k, given.length, `${name}, as the network was given it`, scale, given.length)}<figcaption>given: ${name}</figcaption></figure>`)}${both.map(([path, label]) => html`<figure>${tile(this.sheets, path, i, job.settings.n, `Picture ${i + 1}, ${label}, ${this.where(job)}`, scale)}<figcaption>${label}${finished ? "" : `, ${this.where(job)}`}</figcaption></figure>`)}
				${found ? html`<figure>${[...Array(copies.shown).keys()].map((k) => tile(this.sheets, `${job.job}/nearest.webp`, i * copies.shown + k, job.pictures * copies.shown, `Training image ${k + 1} nearest to picture ${i + 1}`, Math.max(1, Math.floor(96 / size)), copies.shown))}<figcaption>nearest training images</figcaption></figure>` : ""}
				${job.edit?.mask && job.pictures > 1 ? html`<figure>${tile(this.sheets, `${job.job}/disagreement.webp`, 0, 1, "Where the fillings disagree: bright is most", scale)}<figcaption>where the ${job.pictures} fillings disagree</figcaption></figure>` : ""}</div>
			${kept ? html`<p class=${kept.equal ? "kept" : "error"}>${kept.equal ? `✓ Checked: all ${count(kept.pixels)} kept pixels are equal to the bit in every filling.` : "✕ Kept pixels differ: this is a bug."}</p>` : ""}
			${found ? html`<p>This is ${found.copy ? "" : "not "}a copy: the nearest of ${count(copies.searched)} training images is at ${two(found.ratio)} of the distance of the next ones (1: no nearer). A copy is below ${two(copies.limit)}${copies.limit < copies.usual ? `, not ${copies.usual}, as your images are alike` : ""}. For comparison: ${copies.unseen.count} ${copies.unseen.what} are at ${two(copies.unseen.ratio)}.</p>` : ""}
			${copies?.state === "failed" ? html`<p class="error">${copies.error}</p>` : ""}
			${job.pictures ? html`<div class="bar">${job.has_channels ? "" : html`<button @click=${() => this.take(false)}>Variations</button><button @click=${() => this.take(true)}>Paint into it</button>`}
				<button ?disabled=${Boolean(copies) || job.has_channels} @click=${() => this.attempt(async () => (this.job = await this.data.post(`api/draw/${job.job}/copies`, {})))}>${copies?.state === "waiting" ? "Searching …" : "Is it a copy?"}</button>
				<a class="button" href=${this.data.url(`api/draw/${job.job}/${i}.png`)} download>Save as PNG</a>
				${job.values ? html`<a class="button" href=${this.data.url(`api/draw/${job.job}/values.npy`)} download>Save the values of all as .npy</a>` : ""}</div>` : ""}
			${job.has_channels ? html`<details><summary>Other channels</summary>${[job.job].map((number) => html`<unfog-pictures .name=${"drawn-channels"} .sources=${this.channels(number)}></unfog-pictures>`)}</details>` : ""}
			${job.kept_steps?.length ? html`<details><summary>Levels of this drawing</summary><p class="soft">${job.kept_steps.map((one) => one.share.toFixed(3)).join(" ")} (share of noise at each step; ${job.calls ?? "–"} network calls, ${job.seconds ?? "–"} s on ${job.device})</p><button @click=${() => this.setLevels(job.kept_steps.map((one) => Number(one.share.toFixed(3))))}>Take these levels, to change them</button></details>` : ""}</div>`;
	}

	// All pictures of a drawing on arrays, in any view of their channels.
	channels(number) {
		if (this.viewed?.number !== number) this.viewed = {number, sources: [{label: `drawing ${number}`, steps: [number], url: () => this.data.url(`api/draw/${number}/pictures.webp`), channels: [number], sheet: () => this.data.get(`api/draw/${number}/channels.json`)}]};
		return this.viewed.sources;
	}

	history() {
		const {about} = this, worker = about?.worker, mine = this.jobs.slice(-60).reverse();
		const line = (one) => [...Object.entries(one.settings).map(([name, value]) => (name === "given" ? value.join(", ") : `${name} ${value}`)), ...(one.given_pictures || []).map((name) => `${name}: a picture`), one.edit?.mask ? "painted" : one.edit?.image ? "from a picture" : ""].filter(Boolean).join(", ");
		return html`<details class="history" open><summary>History (${this.jobs.length})</summary><ol>${mine.map((one) => html`<li><button class="quiet" aria-current=${one.job === this.job?.job} @click=${() => { if (this.job) this.past = [...this.past, this.job.job]; this.reuse(one.job); this.pane = "draw"; }}>${one.job}: ${one.run_name}, ${line(one)}</button> <span class="soft">${one.state}</span>
				${ENDED.includes(one.state) ? "" : html`<button class="quiet" aria-label="Cancel drawing ${one.job}" @click=${() => this.cancel(one.job)}>cancel</button>`}</li>`)}</ol></details>
			${worker ? html`<p class="soft">${worker.pid ? `The worker is process ${worker.pid}, ${worker.nice ? "at low priority as a run trains here" : "at usual priority"}.` : "The worker is not running; it starts with the next drawing."} Drawing has taken ${worker.seconds} s of this machine so far${about.training ? ", which the training run shared" : ""}. <button class="quiet" @click=${() => this.data.post("api/worker/stop", {}).then(() => this.load())}>End the worker</button></p>` : ""}`;
	}
}
document.head.append(Object.assign(document.createElement("link"), {rel: "stylesheet", href: "static/playground.css"}));
customElements.define("unfog-playground", Playground);
