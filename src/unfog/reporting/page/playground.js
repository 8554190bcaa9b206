// The playground: draw from a run and see every step, scrub training time and denoising time, edit, compare, look back.

import {html, nothing} from "./vendor/lit.js";
import {View, announce, command, count, keep, route} from "./util.js";
import {Sheets} from "./playground_sheets.js";
import {ENDED, values} from "./playground_grid.js";
import "./playground_levels.js";
import "./playground_mask.js";
import "./playground_blind.js";

const USUAL = {n: 8, seed: 0};
const VIEWS = {x0: "guess of the image", x: "noisy state"};
const WAIT = 250; // ms that a slider rests before it draws
const NUMBERS = ["n", "seed", "to_seed", "steps", "guidance", "strength", "repeats", "checkpoint", "ema"];

class Playground extends View {
	static properties = ["data", "run", "runs", "detail", "form", "edit", "about", "jobs", "job", "shown", "view", "position", "pane", "error", "past", "future"];

	constructor() {
		super();
		Object.assign(this, {runs: [], form: {...USUAL}, jobs: [], shown: 0, view: "x0", position: null, error: "", past: [], future: [], pane: "draw", edit: null});
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
		try {
			this.runs = await this.data.runs();
			if (!this.run && this.runs.length) this.run = this.runs[0].id;
			const kept = route().query.get("form");
			if (kept) this.form = {...USUAL, ...JSON.parse(kept)};
		} catch (error) {
			this.error = error.message;
		}
		await this.load();
	}

	updated(changes) {
		if (changes.has("run") && this.run && String(this.detail?.id) !== String(this.run)) this.loadRun();
	}

	async loadRun() {
		const before = this.detail?.checkpoints.length;
		try {
			this.detail = await this.data.run(this.run);
			if (before && this.detail.checkpoints.length > before) announce(`A checkpoint of step ${this.detail.checkpoints.at(-1)} is there`);
		} catch (error) {
			this.error = error.message;
		}
	}

	async load(again = false) {
		try {
			this.about = await this.data.get("api/draw");
			this.jobs = this.about.jobs;
			if (again && this.job && !this.jobs.some((one) => one.job === this.job.job)) this.job = {...this.job, state: "failed", error: "the server was started anew; draw again"};
			else if (again && this.job) await this.open(this.job.job, true);
			else if (!this.job && this.jobs.length) {
				const last = this.jobs.findLast((one) => String(one.run) === String(this.run));
				if (last && !this.job) await this.open(last.job);
			}
		} catch (error) {
			this.error = error.message;
		}
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
			this.open(event.job, true);
			this.load();
		}
	}

	// Show a drawing; with `still`, only if no other one was begun while the server answered.
	async open(number, still = false) {
		try {
			const job = await this.data.get(`api/draw/${number}`);
			if (still && (this.job?.job !== number || (ENDED.includes(this.job.state) && !ENDED.includes(job.state)))) return;
			this.job = job;
			this.shown = Math.min(this.shown, job.settings.n - 1);
			this.error = "";
		} catch (error) {
			this.error = error.message;
		}
	}

	get settings() {
		const needless = this.edit ? (this.edit.masked ? [] : ["repeats"]) : ["strength", "repeats"];
		return Object.fromEntries(Object.entries(this.form).filter(([name, value]) => !needless.includes(name) && value !== "" && value !== null && value !== undefined && !Number.isNaN(value)));
	}

	// What is sent for an edit: the image, and the mask as it is painted now.
	async edited() {
		if (!this.edit) return {};
		const {upload, job, picture, masked} = this.edit, image = upload ? {upload} : {job, picture}, mask = this.querySelector("unfog-mask");
		if (!masked || !mask?.painted) return {image};
		const sent = await this.send(await mask.blob());
		return {image, mask: {upload: sent.upload}};
	}

	async send(blob) {
		return (await this.data.ask("api/upload", {method: "POST", headers: {"Content-Type": "image/png"}, body: blob})).json();
	}

	async draw() {
		clearTimeout(this.later);
		this.error = "";
		keep({form: JSON.stringify(this.settings)});
		try {
			const body = {run: Number(this.run), settings: this.settings, ...(await this.edited())};
			if (!body.mask) delete body.settings.repeats;
			const job = await this.data.post("api/draw", body);
			if (this.job?.job !== job.job) this.past = [...this.past, this.job?.job].filter(Boolean).slice(-100);
			Object.assign(this, {job, future: [], shown: Math.min(this.shown, job.settings.n - 1)});
			if (!this.jobs.some((one) => one.job === job.job)) this.jobs = [...this.jobs, job];
			if (!ENDED.includes(job.state)) this.open(job.job, true); // its events may have been quicker than this answer
			announce(ENDED.includes(job.state) ? "This was drawn before" : "Drawing");
		} catch (error) {
			this.error = error.message;
			announce(error.message);
		}
	}

	soon() {
		clearTimeout(this.later);
		this.later = setTimeout(() => this.draw(), WAIT);
	}

	set(name, value, now = false) {
		this.form = {...this.form, [name]: value};
		if (now) this.soon();
	}

	async cancel(number) {
		await this.data.post(`api/draw/${number}/cancel`, {}).catch((error) => (this.error = error.message));
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
		await this.open(number);
		if (this.job) this.form = {...USUAL, ...this.job.settings};
	}

	async upload(file) {
		if (!file) return;
		try {
			let blob = file;
			if (file.type !== "image/png") {
				const image = await createImageBitmap(file), canvas = Object.assign(document.createElement("canvas"), {width: image.width, height: image.height});
				canvas.getContext("2d").drawImage(image, 0, 0);
				blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
			}
			const sent = await this.send(blob);
			this.edit = {upload: sent.upload, masked: false, found: sent.settings};
			announce("The picture was uploaded");
		} catch (error) {
			this.error = `The picture cannot be used: ${error.message}`;
		}
	}

	// Settings from inside a PNG that was saved here.
	adopt({run, settings}) {
		const known = this.runs.find((one) => one.name === run);
		if (known) this.run = known.id;
		this.form = {...USUAL, ...settings};
		this.edit = null;
		announce("The settings of the picture are in the form");
	}

	take(masked) {
		this.edit = {job: this.job.job, picture: this.shown, masked};
		if (masked) this.pane = "draw";
		announce(masked ? "Paint over what is to be drawn anew" : "Variations start from this picture");
	}

	// The sheet to show of a drawing: the chosen step, the newest one, or the finished pictures.
	sheet(job, view = this.view) {
		const steps = job.kept_steps || [], finished = job.pictures > 0, at = this.position;
		if (finished && (at === null || at >= steps.length)) return `${job.job}/pictures.webp`;
		if (job.state === "waiting" || (!job.done && !steps.length)) return "";
		const number = at === null || !steps[at] ? job.step : steps[at].number;
		// While it is drawn, a later batch changes the same step.
		return `${job.job}/steps/${number}.webp?what=${view}${finished ? "" : `&at=${job.done}${job.state[0]}`}`;
	}

	tile(job, index, options = {}) {
		return html`<unfog-tile .sheets=${this.sheets} .path=${options.path ?? this.sheet(job)} .index=${index} .count=${options.count ?? job.settings.n} .columns=${options.columns} .scale=${options.scale} .label=${options.label ?? `Picture ${index + 1}, ${this.where(job)}`}></unfog-tile>`;
	}

	where(job) {
		const steps = job.kept_steps || [];
		if (job.pictures && (this.position === null || this.position >= steps.length)) return "finished";
		const step = this.position === null ? {number: job.step, share: job.share} : steps[this.position] || {number: job.step, share: job.share};
		return `step ${step.number + 1}, noise ${Math.round(100 * step.share)}%`;
	}

	render() {
		if (!this.runs.length) return html`<h1>Draw</h1><p class="empty">${this.error || "No run is here yet. Start one, and draw from its first checkpoint."}</p>`;
		return html`<h1>Draw</h1><div class="playground"><form class="controls" aria-label="Settings of the drawing" @submit=${(e) => { e.preventDefault(); this.draw(); }}>${this.detail ? this.controls() : html`<p class="soft">Reading the run …</p>`}</form>
			<div class="result">${this.error ? html`<p class="error" role="alert">${this.error}</p>` : nothing}
				<div class="bar" role="group" aria-label="What to do">${Object.entries({draw: "Pictures", grid: "Grid of two settings", blind: "Blind comparison"}).map(([pane, label]) => html`<button aria-pressed=${pane === this.pane} @click=${() => (this.pane = pane)}>${label}</button>`)}
					<span class="grow"></span><button ?disabled=${!this.past.length} @click=${() => this.back("past", "future")}>Undo</button><button ?disabled=${!this.future.length} @click=${() => this.back("future", "past")}>Redo</button></div>
				<unfog-grid ?hidden=${this.pane !== "grid"} .data=${this.data} .run=${this.run} .settings=${this.settings} .sheets=${this.sheets} .inputs=${() => this.edited()}></unfog-grid>
				${this.pane === "grid" ? nothing : this.detail && this.pane === "blind" ? html`${[this.run].map(() => html`<unfog-blind .data=${this.data} .run=${this.run} .detail=${this.detail} .sheets=${this.sheets} .settings=${this.settings}></unfog-blind>`)}` : this.drawing()}
				${this.history()}</div></div>`;
	}

	field(name, label, options = {}) {
		const {usual, min, max, step = 1, kind = "number"} = options, value = this.form[name] ?? "";
		const read = (e) => (NUMBERS.includes(name) ? (e.target.value === "" ? null : Number(e.target.value)) : e.target.value);
		return html`<label class="setting"><span>${label}</span><input type=${kind} inputmode="decimal" min=${min ?? nothing} max=${max ?? nothing} step=${step} .value=${String(value)} placeholder=${usual ?? ""} @input=${(e) => this.set(name, read(e))}></label>`;
	}

	choice(name, label, names, usual) {
		return html`<label class="setting"><span>${label}</span><select @change=${(e) => this.set(name, e.target.value || null)}><option value="">${usual} (run's)</option>${names.map((one) => html`<option value=${one} ?selected=${one === this.form[name]}>${one}</option>`)}</select></label>`;
	}

	controls() {
		const {detail, form, about} = this, {settings, checkpoints, classes, ema} = detail, of = (name) => settings[name];
		const at = form.checkpoint ? checkpoints.indexOf(form.checkpoint) : checkpoints.length - 1, interval = form.guidance_interval || [];
		const running = detail.status.state === "running", labels = form.label || [];
		return html`<label class="setting"><span>Run</span><select @change=${(e) => { this.run = e.target.value; this.form = {...this.form, checkpoint: null, ema: null, label: null}; this.job = null; location.hash = `#/draw/${this.run}`; }}>${this.runs.map((one) => html`<option value=${one.id} ?selected=${String(one.id) === String(this.run)}>${one.name}</option>`)}</select></label>
			${running ? html`<p class="soft">This run is training. The newest whole checkpoint is used, and drawing runs at low priority.</p>` : nothing}
			${checkpoints.length ? html`<label class="setting wide"><span>Training time <b>${form.checkpoint ? `step ${count(form.checkpoint)}` : `newest, step ${count(checkpoints.at(-1))}`}</b></span>
				<input type="range" min="0" max=${checkpoints.length - 1} .value=${String(Math.max(0, at))} aria-valuetext="checkpoint of step ${checkpoints[Math.max(0, at)]}" ?disabled=${checkpoints.length < 2} @input=${(e) => { const i = Number(e.target.value); this.set("checkpoint", i === checkpoints.length - 1 ? null : checkpoints[i], true); }}></label>` : html`<p class="empty">No checkpoint yet.</p>`}
			${ema ? html`<label class="setting wide"><span>EMA width <b>${form.ema ?? "the run's"}</b></span><input type="range" min="0.01" max="0.28" step="0.01" .value=${String(form.ema ?? ema.widths?.[0] ?? 0.1)} @input=${(e) => this.set("ema", Number(e.target.value), true)}></label>
				${form.ema ? html`<button type="button" class="quiet" @click=${() => this.set("ema", null, true)}>Use the run's EMA</button>` : nothing}` : nothing}
			${classes.length ? html`<label class="setting"><span>Class</span><select @change=${(e) => this.set("label", e.target.value === "" ? null : [e.target.value])}><option value="">all in turn</option>${classes.map((name) => html`<option value=${name} ?selected=${labels.includes(name)}>${name}</option>`)}</select></label>` : nothing}
			${this.field("n", "Pictures", {min: 1, max: about?.most_images || 64})}
			<div class="setting"><label for="seed">Seed</label><span class="inline"><input id="seed" type="number" step="1" .value=${String(form.seed ?? 0)} @input=${(e) => this.set("seed", Number(e.target.value))}><button type="button" aria-label="Another seed" @click=${() => this.set("seed", Math.floor(Math.random() * 1e6), true)}>⚄</button></span></div>
			${this.choice("sampler", "Sampler", about?.samplers || [], of("sampler.kind"))}
			${this.field("steps", "Steps", {min: 1, max: 1000, usual: of("sampler.steps")})}
			${classes.length && of("label_dropout") > 0 ? html`${this.field("guidance", "Guidance", {step: 0.1, usual: of("guidance")})}
				<div class="setting"><span>Guided where noise is</span><span class="inline">${[0, 1].map((i) => html`<input type="number" min="0" max="1" step="0.05" aria-label=${i ? "Highest share of noise with guidance" : "Lowest share of noise with guidance"} .value=${String(interval[i] ?? "")} placeholder=${of("guidance_interval")?.[i] ?? i} @input=${(e) => this.setInterval(i, e.target.value)}>`)}</span></div>` : nothing}
			<details ?open=${Boolean(form.levels)}><summary>Levels, interpolation, weights</summary>${this.choice("grid", "Grid of levels", (about?.grids || []).filter((one) => one !== "tuned"), of("sampler.grid"))}
				<label class="setting wide"><span>Levels (falling shares of noise)</span><input .value=${(form.levels || []).join(" ")} placeholder="1 0.8 0.5 0.2" @change=${(e) => { this.set("levels", values(e.target.value).length ? values(e.target.value) : null); if (this.form.levels) this.form = {...this.form, steps: null, grid: null}; }}></label>
				${form.levels?.length > 1 ? html`<unfog-shares .shares=${form.levels} @moved=${(e) => this.set("levels", e.detail, true)}></unfog-shares>` : nothing}
				${this.field("to_seed", "To seed (interpolation)", {usual: "none"})}
				<label class="setting"><span>Weights</span><select @change=${(e) => this.set("weights", e.target.value || null)}><option value="">EMA</option><option value="raw" ?selected=${form.weights === "raw"}>raw</option></select></label></details>
			${this.editing()}
			<div class="bar"><button class="accent">Draw</button>${this.job && !ENDED.includes(this.job.state) ? html`<button type="button" @click=${() => this.cancel(this.job.job)}>Cancel</button>` : nothing}</div>`;
	}

	setInterval(i, value) {
		const usual = this.detail.settings.guidance_interval || [0, 1], both = [...(this.form.guidance_interval || usual)];
		both[i] = value === "" ? usual[i] : Number(value);
		this.set("guidance_interval", both);
	}

	editing() {
		const {edit} = this, size = this.detail.settings["data.size"];
		if (!edit) return html`<label class="setting wide"><span>Start from a picture (its settings are read, too)</span><input type="file" accept="image/*" @change=${(e) => this.upload(e.target.files[0])}></label>`;
		const url = edit.upload ? this.data.url(`api/upload/${edit.upload}.png?run=${this.run}`) : this.data.url(`api/draw/${edit.job}/${edit.picture}.png`);
		return html`<fieldset><legend>Start from ${edit.upload ? "an upload" : `picture ${edit.picture + 1} of drawing ${edit.job}`}</legend>
			${edit.found ? html`<p>This picture was drawn here. <button type="button" @click=${() => this.adopt(edit.found)}>Take its settings</button></p>` : nothing}
			${edit.masked ? html`<unfog-mask .url=${url} .size=${size}></unfog-mask>` : html`<img class="exact start" src=${url} alt="The picture to start from">`}
			<label class="check"><input type="checkbox" .checked=${edit.masked} @change=${(e) => (this.edit = {...edit, masked: e.target.checked})}> paint a mask (inpainting)</label>
			${this.field("strength", "Strength", {min: 0, max: 1, step: 0.05, usual: edit.masked ? 1 : 0.6})}
			${edit.masked ? this.field("repeats", "Repeats", {min: 1, max: 50, usual: 10}) : nothing}
			<button type="button" class="quiet" @click=${() => (this.edit = null)}>Start from noise again</button></fieldset>`;
	}

	drawing() {
		const {job} = this;
		if (!job) return html`<p class="empty">Press Draw. Every step is shown as it is computed, and kept.</p>`;
		const steps = job.kept_steps || [], last = steps.length - (job.pictures ? 0 : 1), at = this.position ?? last, n = job.settings.n;
		return html`<section aria-label="Drawing ${job.job}"><div class="bar"><span class="state ${job.state}">${job.state}</span>
				${job.state === "drawing" && !job.of ? html`<span class="soft">the network is being loaded; the first drawing takes longest</span>` : nothing}
				${job.of ? html`<progress max=${job.of} value=${job.done} aria-label="Steps done"></progress><span class="soft">${job.done} of ${job.of} steps${this.lag && !ENDED.includes(job.state) ? `, seen ${this.lag} ms after it was computed` : ""}</span>` : nothing}
				${job.error ? html`<span class="error" role="alert">${job.error}</span> <button @click=${() => this.draw()}>Draw again</button>` : nothing}
				<fieldset class="choice"><legend class="hidden">Show</legend>${Object.entries(VIEWS).map(([view, label]) => html`<label><input type="radio" name="drawn-view" .checked=${view === this.view} @change=${() => (this.view = view)}><span>${label}</span></label>`)}</fieldset></div>
			${steps.length > 1 ? html`<label class="setting wide scrub"><span>Denoising time <b>${this.where(job)}</b></span><input type="range" min="0" max=${last} .value=${String(Math.min(at, last))} aria-valuetext=${this.where(job)} @input=${(e) => { const i = Number(e.target.value); this.position = i === last && job.pictures ? null : i; }}></label>` : nothing}
			<div class="drawn" @painted=${(e) => { if (e.detail.includes("&at=") && job.computed) this.lag = Math.max(0, Math.round(Date.now() - 1000 * job.computed)); }}>${[...Array(n).keys()].map((i) => html`<button class="cell" aria-pressed=${i === this.shown} aria-label="Select picture ${i + 1}" @click=${() => (this.shown = i)}>${this.tile(job, i)}${this.verdict(i)}</button>`)}</div>
			${this.selected(job)}
			${job.command ? html`<details class="copies"><summary>As a command, as Python</summary>${command(job.command)}<pre tabindex="0">${job.python}</pre><button @click=${() => navigator.clipboard.writeText(job.python).then(() => announce("The Python was copied"))}>Copy the Python</button></details>` : nothing}</section>`;
	}

	verdict(index) {
		const found = this.job.copies?.pictures?.[index];
		return found ? html`<span class=${found.copy ? "error" : "soft"}>${found.copy ? "a copy" : "no copy"}</span>` : nothing;
	}

	// One picture in full: the noisy state beside the guess, and what can be done with it.
	selected(job) {
		const i = this.shown, {copies, kept} = job, found = copies?.pictures?.[i], size = job.size || 32, scale = Math.max(1, Math.floor(224 / size)), at = this.sheet(job);
		if (!at) return nothing;
		const finished = at.endsWith("pictures.webp"), both = finished ? [[at, "finished picture"]] : Object.keys(VIEWS).reverse().map((view) => [this.sheet(job, view), VIEWS[view]]);
		return html`<div class="selected"><h2>Picture ${i + 1}</h2><div class="pair">${both.map(([path, label]) => html`<figure>${this.tile(job, i, {path, scale, label: `Picture ${i + 1}, ${label}, ${this.where(job)}`})}<figcaption>${label}${finished ? "" : `, ${this.where(job)}`}</figcaption></figure>`)}
				${found ? html`<figure>${[...Array(copies.shown).keys()].map((k) => this.tile(job, i * copies.shown + k, {path: `${job.job}/nearest.webp`, count: job.pictures * copies.shown, columns: copies.shown, scale: Math.max(1, Math.floor(96 / size)), label: `Training image ${k + 1} nearest to picture ${i + 1}`}))}<figcaption>nearest training images</figcaption></figure>` : nothing}
				${job.edit?.mask && job.pictures > 1 ? html`<figure>${this.tile(job, 0, {path: `${job.job}/disagreement.webp`, count: 1, scale, label: "Where the fillings disagree: bright is most"})}<figcaption>where the ${job.pictures} fillings disagree</figcaption></figure>` : nothing}</div>
			${kept ? html`<p class=${kept.equal ? "kept" : "error"}>${kept.equal ? `✓ Checked: all ${count(kept.pixels)} kept pixels are equal to the bit in every filling.` : "✕ Kept pixels differ: this is a bug."}</p>` : nothing}
			${found ? html`<p>${found.copy ? "This is a copy" : "This is no copy"}: the nearest of ${count(copies.searched)} training images is at distance ${found.distances[0]} (of 255), ${found.ratio} of the distance of the next ones; below ${copies.limit} counts as a copy. ${copies.unseen.count} ${copies.unseen.what} are at ${copies.unseen.distances[1]} (${copies.unseen.distances[0]} to ${copies.unseen.distances[2]}), ratio ${copies.unseen.ratios[1]}. It is nearer than ${Math.round(100 * found.nearer_than)}% of them.</p>` : nothing}
			${copies?.state === "failed" ? html`<p class="error">${copies.error}</p>` : nothing}
			${job.pictures ? html`<div class="bar"><button @click=${() => this.take(false)}>Variations</button><button @click=${() => this.take(true)}>Paint into it</button>
				<button ?disabled=${Boolean(copies)} @click=${() => this.data.post(`api/draw/${job.job}/copies`, {}).then((told) => (this.job = told)).catch((error) => (this.error = error.message))}>${copies?.state === "waiting" ? "Searching …" : "Is it a copy?"}</button>
				<a class="button" href=${this.data.url(`api/draw/${job.job}/${i}.png`)} download>Save as PNG</a></div>` : nothing}
			${job.kept_steps?.length ? html`<details><summary>Levels of this drawing</summary><p class="soft">${job.kept_steps.map((one) => one.share.toFixed(3)).join(" ")} (share of noise at each step; ${job.calls ?? "–"} network calls, ${job.seconds ?? "–"} s on ${job.device})</p><button @click=${() => (this.form = {...this.form, levels: job.kept_steps.map((one) => Number(one.share.toFixed(3))), steps: null, grid: null})}>Take these levels, to change them</button></details>` : nothing}</div>`;
	}

	history() {
		const {about} = this, worker = about?.worker, mine = this.jobs.slice(-60).reverse();
		const line = (one) => Object.entries(one.settings).map(([name, value]) => `${name} ${value}`).join(", ");
		return html`<details class="history" open><summary>History (${this.jobs.length})</summary><ol>${mine.map((one) => html`<li><button class="quiet" aria-current=${one.job === this.job?.job} @click=${() => { if (this.job) this.past = [...this.past, this.job.job]; this.reuse(one.job); this.pane = "draw"; }}>${one.job}: ${one.run_name}, ${line(one)}</button> <span class="soft">${one.state}</span>
				${ENDED.includes(one.state) ? nothing : html`<button class="quiet" aria-label="Cancel drawing ${one.job}" @click=${() => this.cancel(one.job)}>cancel</button>`}</li>`)}</ol></details>
			${worker ? html`<p class="soft">${worker.pid ? `The worker is process ${worker.pid}, ${worker.nice ? "at low priority as a run trains here" : "at usual priority"}.` : "The worker is not running; it starts with the next drawing."} Drawing has taken ${worker.seconds} s of this machine so far${about.training ? ", which the training run shared" : ""}. <button class="quiet" @click=${() => this.data.post("api/worker/stop", {}).then(() => this.load())}>End the worker</button></p>` : nothing}`;
	}
}
document.head.append(Object.assign(document.createElement("link"), {rel: "stylesheet", href: "static/playground.css"}));
customElements.define("unfog-playground", Playground);
