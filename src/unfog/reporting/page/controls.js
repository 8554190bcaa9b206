// Controls: requests to a running run, forms made from the settings' own fields, and the output of commands.

import {html, nothing} from "./vendor/lit.js";
import {View, announce, command, finder, options, route, select} from "./util.js";

// What a command of the server prints, as it comes, and a way to stop it; or the log of a run. `path` is its address.
class Task extends View {
	static properties = ["data", "path", "size", "told"]; // size: bytes of a log, from events

	connectedCallback() {
		super.connectedCallback();
		this.listen("task", (event) => this.path === `api/tasks/${event.id}` && this.load());
		this.listen("refresh", () => this.load());
		this.load();
	}

	updated(changes) {
		if (changes.get("path") || (changes.has("size") && this.size)) this.load(); // another command took the place of one, or the log has grown
		const log = this.querySelector("pre");
		if (log) log.scrollTop = log.scrollHeight;
	}

	async load() {
		const before = this.told?.running;
		try {
			this.told = await this.data.get(this.path);
		} catch (error) {
			this.told = {...this.told, running: false, output: `${this.told?.output || ""}\n${error.message}`};
		}
		if (before && !this.told.running) announce(`The command ended with status ${this.told.status}`);
		clearTimeout(this.again);
		if (this.told.running && this.isConnected) this.again = setTimeout(() => this.load(), 2000); // also where an event was missed
	}

	render() {
		if (!this.told) return html`<p class="soft">Starting …</p>`;
		const {running, status, output, run, command: line} = this.told;
		return html`<section class="task"><div class="bar">${command(line)}<span class="soft">${running ? "running" : status === 0 ? "done" : line ? `ended with status ${status}` : ""}</span>
			${running ? html`<button @click=${() => this.data.post(`${this.path}/stop`, {}).catch((error) => announce(error.message))}>Stop</button>` : ""}
			${run && route().ids[0] !== String(run) ? html`<a class="button" href="#/run/${run}">See its curves</a>` : ""}</div>
			<pre tabindex="0" role="log" aria-label="Output">${output}</pre></section>`;
	}
}
customElements.define("unfog-task", Task);

// One button that shows its command before it is pressed.
class Ask extends View {
	static properties = ["data", "path", "body", "label", "line", "said", "failed", "task"];

	press() {
		Object.assign(this, {said: "…", failed: ""});
		return this.attempt(async () => {
			const answer = await this.data.post(this.path, this.body || {});
			this.task = answer.task;
			this.said = answer.task === undefined ? answer.message || "asked" : "";
			announce(`${this.label}: ${this.said || "started"}`);
		});
	}

	render() {
		return html`<div class="ask"><button @click=${this.press}>${this.label}</button> ${command(this.line)} <span class="said" role=${this.failed ? "alert" : nothing}>${this.failed || this.said}</span></div>
			${this.task === undefined ? "" : html`<unfog-task .data=${this.data} .path=${`api/tasks/${this.task}`}></unfog-task>`}`;
	}
}
customElements.define("unfog-ask", Ask);

// A form of settings: the common ones first, the rest behind a search. Only what was changed is sent.
class Form extends View {
	static properties = ["data", "kind", "path", "extra", "current", "actions", "fields", "find", "line", "failed", "task", "given"];

	constructor() {
		super();
		Object.assign(this, {kind: "train", find: "", given: {}, extra: {}, actions: [], fields: null});
	}

	async firstUpdated() {
		await this.attempt(async () => (this.fields = await this.data.get(`api/settings?command=${this.kind}`)));
		this.check();
	}

	updated(changes) {
		if (changes.has("extra") && this.fields) this.check(); // other images, or another name
	}

	body() {
		return {...this.extra, settings: this.given};
	}

	// The server checks with the rules of the command line, and answers the command.
	check() {
		clearTimeout(this.soon);
		this.soon = setTimeout(async () => {
			const said = await this.attempt(() => this.data.post(`${this.path}?dry=1`, this.body()));
			this.line = said?.command;
			if (said) this.failed = "";
		}, 300);
	}

	set(name, value) {
		const {[name]: _, ...rest} = this.given;
		this.given = value === "" ? rest : {...rest, [name]: value};
		this.check();
	}

	send(path) {
		return this.attempt(async () => {
			this.task = (await this.data.post(path, this.body())).task;
			announce("Started");
		});
	}

	render() {
		if (!this.fields) return html`<p class="soft">${this.failed || "Reading the settings …"}</p>`;
		const fits = finder(this.find), matches = (f) => this.find.trim() && fits(`${f.name} ${f.flag} ${f.help} ${f.words}`), found = (f) => (!f.common && f.name in this.given) || matches(f);
		const rest = this.fields.filter(found), common = this.fields.filter((f) => f.common && !rest.includes(f));
		return html`<form @submit=${(e) => { e.preventDefault(); this.send(this.path); }}>
			<div class="fields">${common.map((f) => this.field(f))}</div>
			<p><label>All other settings <input type="search" placeholder="captions, lr, ema …" .value=${this.find} @input=${(e) => (this.find = e.target.value)}></label>
				<span class="soft" role="status">${this.find ? `${rest.length} found` : `${this.fields.length - common.length} more`}</span></p>
			<div class="fields">${rest.slice(0, 40).map((f) => this.field(f))}</div>
			<div class="bar"><button class="accent" ?disabled=${Boolean(this.failed)}>${this.kind === "resume" ? "Resume" : "Train"}</button>
				${this.actions.map(([label, path]) => html`<button type="button" @click=${() => this.send(path)}>${label}</button>`)}${command(this.line)}</div>
			<p class="error" role="alert">${this.failed}</p></form>
			${this.task === undefined ? "" : html`<unfog-task .data=${this.data} .path=${`api/tasks/${this.task}`}></unfog-task>`}`;
	}

	field(f) {
		const id = `f-${this.kind}-${f.name}`, value = this.given[f.name] ?? "", set = (e) => this.set(f.name, e.target.value);
		// Of a resume, what the run has: what is left empty stays so.
		const held = this.current?.[f.name], usual = held === undefined ? f.default : [held].flat().map((one) => (one === true ? "on" : one === false ? "off" : one)).join(" ");
		const words = f.type === "switch" ? ["on", "off"] : f.choices || [], closed = f.type === "switch" || (words.length && f.type === "choice" && !/network|method/.test(f.name));
		return html`<div class="field"><label for=${id}>${f.name} ${value === "" ? "" : html`<span class="changed">changed</span>`}</label>
			${closed ? html`<select id=${id} aria-describedby="${id}-h" @change=${set}>${options([["", usual || "default"], ...words], value)}</select>`
				: html`<input id=${id} aria-describedby="${id}-h" placeholder=${usual || ""} .value=${value} list=${words.length ? `${id}-l` : nothing} @change=${set}>
					${words.length ? html`<datalist id="${id}-l">${options(words)}</datalist>` : ""}`}
			<p id="${id}-h" class="help">${f.help}</p></div>`;
	}
}
customElements.define("unfog-form", Form);

// Start a run on one of the sources that the server was given.
class Start extends View {
	static properties = ["data", "about", "source", "name", "failed"];

	async firstUpdated() {
		await this.attempt(async () => {
			this.about = await this.data.get("api/state");
			this.source = this.about.sources[0]?.id;
		});
	}

	render() {
		if (!this.about) return html`<p class="empty" role="status">${this.failed || "Asking the server …"}</p>`;
		if (!this.about.sources.length) return html`<p class="empty">No source of images is known. Start the server with <code>unfog serve RUNS --source PHOTOS</code>.</p>`;
		return html`<h1>Start a run</h1><p><label>Images ${select(this.about.sources.map((one) => [one.id, one.name]), this.source, (id) => (this.source = Number(id)))}</label>
			<label>Name of the run <input placeholder="after the images" @change=${(e) => (this.name = e.target.value.trim())}></label></p>
			<unfog-form .data=${this.data} .kind=${"train"} .path=${"api/train"} .extra=${{source: this.source, name: this.name}} .actions=${[["Check images and settings", "api/doctor"], ["Plan time and memory", "api/plan"]]}></unfog-form>`;
	}
}
customElements.define("unfog-start", Start);
