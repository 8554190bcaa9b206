// Steering: requests to a running run, forms made from the settings' own fields, and the output of commands.

import {html, nothing} from "./vendor/lit.js";
import {View, announce, command, route} from "./util.js";

// A command that the server runs: its output as it comes, and a way to stop it.
class Task extends View {
	static properties = ["data", "task", "told"];

	connectedCallback() {
		super.connectedCallback();
		this.listen("task", (event) => event.id === this.task && this.load());
		this.listen("refresh", () => this.load());
		this.load();
	}

	updated(changes) {
		if (changes.get("task")) this.load(); // another command took the place of one
		const log = this.querySelector("pre");
		if (log) log.scrollTop = log.scrollHeight;
	}

	async load() {
		const before = this.told?.running;
		try {
			this.told = await this.data.get(`api/tasks/${this.task}`);
		} catch (error) {
			this.told = {...this.told, running: false, output: `${this.told?.output || ""}\n${error.message}`};
		}
		if (before && !this.told.running) announce(`The command ended with status ${this.told.status}`);
		clearTimeout(this.again);
		if (this.told.running && this.isConnected) this.again = setTimeout(() => this.load(), 2000); // also where an event was missed
	}

	render() {
		if (!this.told) return html`<p class="soft">Starting …</p>`;
		const {running, status, output, run} = this.told;
		return html`<section class="task"><div class="bar">${command(this.told.command)}<span class="soft">${running ? "running" : status === 0 ? "done" : `ended with status ${status}`}</span>
			${running ? html`<button @click=${() => this.data.post(`api/tasks/${this.task}/stop`, {}).catch((error) => announce(error.message))}>Stop</button>` : nothing}
			${run && route().ids[0] !== String(run) ? html`<a class="button" href="#/run/${run}">See its curves</a>` : nothing}</div>
			<pre tabindex="0" role="log" aria-label="Output">${output}</pre></section>`;
	}
}
customElements.define("unfog-task", Task);

// One button that shows its command before it is pressed.
class Ask extends View {
	static properties = ["data", "path", "body", "label", "line", "said", "task"];

	async press() {
		this.said = "…";
		try {
			const answer = await this.data.post(this.path, this.body || {});
			this.task = answer.task;
			this.said = answer.task === undefined ? answer.message || "asked" : "";
			announce(`${this.label}: ${this.said || "started"}`);
		} catch (error) {
			this.said = error.message;
			announce(error.message);
		}
	}

	render() {
		return html`<div class="ask"><button @click=${this.press}>${this.label}</button> ${command(this.line)} <span class="said">${this.said}</span></div>
			${this.task === undefined || this.task === null ? nothing : html`<unfog-task .data=${this.data} .task=${this.task}></unfog-task>`}`;
	}
}
customElements.define("unfog-ask", Ask);

// A form of settings: the common ones first, the rest behind a search. Only what was changed is sent.
class Form extends View {
	static properties = ["data", "kind", "path", "extra", "current", "actions", "fields", "find", "checked", "task", "given"];

	constructor() {
		super();
		Object.assign(this, {kind: "train", find: "", given: {}, extra: {}, actions: [], checked: {}, fields: null});
	}

	async firstUpdated() {
		try {
			this.fields = await this.data.get(`api/settings?command=${this.kind}`);
		} catch (error) {
			this.checked = {error: error.message};
		}
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
			try {
				this.checked = await this.data.post(`${this.path}?dry=1`, this.body());
			} catch (error) {
				this.checked = {error: error.message};
			}
		}, 300);
	}

	set(name, value) {
		const {[name]: _, ...rest} = this.given;
		this.given = value === "" ? rest : {...rest, [name]: value};
		this.check();
	}

	async send(path) {
		try {
			this.task = (await this.data.post(path, this.body())).task;
			announce("Started");
		} catch (error) {
			this.checked = {error: error.message};
		}
	}

	render() {
		if (!this.fields) return html`<p class="soft">${this.checked.error || "Reading the settings …"}</p>`;
		const words = this.find.toLowerCase().split(/\s+/).filter(Boolean);
		const fits = (f) => words.every((word) => `${f.name} ${f.flag} ${f.help}`.toLowerCase().includes(word));
		const common = this.fields.filter((f) => f.common), rest = this.fields.filter((f) => !f.common && (f.name in this.given || (words.length && fits(f))));
		return html`<form @submit=${(e) => { e.preventDefault(); this.send(this.path); }}>
			<div class="fields">${common.map((f) => this.field(f))}</div>
			<p><label>All other settings <input type="search" placeholder="lr, ema, augment …" .value=${this.find} @input=${(e) => (this.find = e.target.value)}></label>
				<span class="soft" role="status">${words.length ? `${rest.length} found` : `${this.fields.length - common.length} more`}</span></p>
			<div class="fields">${rest.slice(0, 40).map((f) => this.field(f))}</div>
			<div class="bar"><button class="accent" ?disabled=${Boolean(this.checked.error)}>${this.kind === "resume" ? "Resume" : "Train"}</button>
				${this.actions.map(([label, path]) => html`<button type="button" @click=${() => this.send(path)}>${label}</button>`)}${command(this.checked.command)}</div>
			<p class="error" role="alert">${this.checked.error || nothing}</p></form>
			${this.task === undefined ? nothing : html`<unfog-task .data=${this.data} .task=${this.task} id="task-${this.task}"></unfog-task>`}`;
	}

	field(f) {
		const id = `f-${this.kind}-${f.name}`, value = this.given[f.name] ?? "", set = (e) => this.set(f.name, e.target.value);
		// Of a resume, what the run has: what is left empty stays so.
		const held = this.current?.[f.name], usual = held === undefined ? f.default : [held].flat().map((one) => (one === true ? "on" : one === false ? "off" : one)).join(" ");
		const words = f.type === "switch" ? ["on", "off"] : f.choices || [], closed = f.type === "switch" || (words.length && f.type === "choice" && !/network|method/.test(f.name));
		return html`<div class="field"><label for=${id}>${f.name} ${value === "" ? nothing : html`<span class="changed">changed</span>`}</label>
			${closed ? html`<select id=${id} aria-describedby="${id}-h" @change=${set}><option value="" ?selected=${value === ""}>${usual || "default"}</option>${words.map((w) => html`<option ?selected=${w === value}>${w}</option>`)}</select>`
				: html`<input id=${id} aria-describedby="${id}-h" placeholder=${usual || ""} .value=${value} list=${words.length ? `${id}-l` : nothing} @change=${set}>
					${words.length ? html`<datalist id="${id}-l">${words.map((w) => html`<option value=${w}></option>`)}</datalist>` : nothing}`}
			<p id="${id}-h" class="help">${f.help}</p></div>`;
	}
}
customElements.define("unfog-form", Form);

// Start a run on one of the sources that the server was given.
class Start extends View {
	static properties = ["data", "about", "source", "name", "failed"];

	async firstUpdated() {
		try {
			this.about = await this.data.get("api/state");
			this.source = this.about.sources[0]?.id;
		} catch (error) {
			this.failed = error.message;
		}
	}

	render() {
		if (!this.about) return html`<p class="empty" role="status">${this.failed || "Asking the server …"}</p>`;
		if (!this.about.sources.length) return html`<p class="empty">No source of images is known. Start the server with <code>unfog serve RUNS --source PHOTOS</code>.</p>`;
		return html`<h1>Start a run</h1><p><label>Images <select @change=${(e) => (this.source = this.about.sources[e.target.selectedIndex].id)}>
			${this.about.sources.map((one) => html`<option ?selected=${one.id === this.source}>${one.name}</option>`)}</select></label>
			<label>Name of the run <input placeholder="after the images" @change=${(e) => (this.name = e.target.value.trim())}></label></p>
			<unfog-form .data=${this.data} .kind=${"train"} .path=${"api/train"} .extra=${{source: this.source, name: this.name}} .actions=${[["Check images and settings", "api/doctor"], ["Plan time and memory", "api/plan"]]}></unfog-form>`;
	}
}
customElements.define("unfog-start", Start);
