// The page: which view the address names, the theme, the banner when the server is gone, and "Keep this view".

import {html, nothing} from "./vendor/lit.js";
import {View, alive, announce, download, route, select} from "./util.js";
import {FileData, ServerData} from "./data.js";
import {repaint} from "./chart.js";
import {zoomFromAddress} from "./zoom.js";
import {keptPage} from "./saved_page.js";
import "./loss_by_level.js";
import "./pictures.js";
import "./panels.js";
import "./runs.js";
import "./run.js";
import "./compare.js";
import "./controls.js";

// Read or write what the browser keeps; some keep nothing for files.
function stored(name, value) {
	try {
		return value === undefined ? localStorage.getItem(name) : localStorage.setItem(name, value);
	} catch {
		return "";
	}
}

class Page extends View {
	static properties = ["data", "connected", "theme", "busy", "notifies"];

	constructor() {
		super();
		const embedded = document.getElementById("embedded")?.textContent;
		this.data = embedded ? new FileData(JSON.parse(embedded)) : new ServerData();
		if (embedded && !location.hash) location.hash = this.data.embedded.view || "#/run/0";
		this.connected = true;
		this.data.on("connection", ({connected}) => {
			this.connected = connected;
			announce(connected ? "The server answers again" : "The server does not answer");
		});
		this.data.on("run", (run) => this.tell(run));
		this.states = new Map();
		this.notifies = this.data.steers && isSecureContext && "Notification" in window && Notification.permission === "granted" && stored("unfog-notify") === "on";
		addEventListener("hashchange", () => this.moved());
		this.applyTheme(stored("unfog-theme") || "");
		zoomFromAddress();
	}

	// A message of the system when a run ends, also while the tab is hidden: the stream of events then stays open.
	tell({id, name, state, detail}) {
		const before = this.states.get(id);
		this.states.set(id, state);
		if (this.notifies && alive(before) && state !== before && state !== "running") new Notification(`${name}: ${state}`, {body: detail, tag: String(id)});
	}

	async notify() {
		this.notifies = !this.notifies && (await Notification.requestPermission()) === "granted";
		stored("unfog-notify", this.notifies ? "on" : "off");
	}

	moved() {
		const {path} = route();
		if (path !== this.path) {
			zoomFromAddress();
			this.requestUpdate();
		}
	}

	applyTheme(theme) {
		this.theme = document.documentElement.dataset.theme = theme;
		stored("unfog-theme", theme);
		repaint();
	}

	render() {
		const {path, view, ids} = route(), server = this.data.steers;
		this.path = path;
		const link = (to, label, of = "") => html`<a href="#/${to}${of}" aria-current=${view === to ? "page" : nothing}>${label}</a>`;
		return html`<a class="skip" href="#main" @click=${(e) => { e.preventDefault(); document.getElementById("main").focus(); }}>Skip to the content</a>
			<header class="top"><a class="brand" href="#/">Unfog</a>
				<nav aria-label="Views">${server || this.data.embedded?.runs.length > 1 ? link("", "Runs") : ""}${server ? link("start", "Start a run") : ""}${server ? link("draw", "Draw", view === "run" && ids.length ? `/${ids[0]}` : "") : ""}</nav><span class="grow"></span>
				${view === "run" || view === "compare" ? html`<button class="quiet" ?disabled=${this.busy} @click=${this.keepView}>${this.busy ? "Writing …" : "Keep this view"}</button>` : ""}
				${server && isSecureContext && "Notification" in window ? html`<button class="quiet" aria-pressed=${Boolean(this.notifies)} @click=${this.notify}>Tell me when runs end${this.notifies ? " ✓" : ""}</button>` : ""}
				<label class="theme"><span class="hidden">Theme</span>${select([["", "auto"], "light", "dark"], this.theme, (theme) => this.applyTheme(theme))}</label></header>
			${this.connected ? "" : html`<div class="banner" role="alert"><b>The server does not answer.</b> What you see was true a moment ago. The page tries again by itself, also after a restart. If that takes long, open the address that unfog serve has printed last.</div>`}
			<main id="main" tabindex="-1">${this.view(view, ids)}</main>
			<footer class="soft">${server ? "" : `Written by Unfog, ${this.data.embedded.written}. This file needs no server.`}</footer>`;
	}

	view(view, ids) {
		const {data} = this;
		if (view === "run" && ids.length) return html`${[ids[0]].map((id) => html`<unfog-run .data=${data} .run=${id}></unfog-run>`)}`;
		if (view === "compare" && ids.length) return html`<unfog-compare .data=${data} .ids=${ids.slice(0, 8)}></unfog-compare>`;
		if (view === "start" && data.steers) return html`<unfog-start .data=${data}></unfog-start>`;
		if (view === "draw" && data.steers) return customElements.get("unfog-playground") ? html`<unfog-playground .data=${data} .run=${ids[0] ?? null}></unfog-playground>` : this.fetch();
		return html`<unfog-runs .data=${data}></unfog-runs>`;
	}

	// Fetched only when it is opened.
	fetch() {
		if (this.data.moved) return location.reload(); // its modules would be loaded once more from the new address
		if (!this.asked) document.head.append(Object.assign(document.createElement("script"), {type: "module", src: "static/playground.js"}));
		this.asked ||= customElements.whenDefined("unfog-playground").then(() => this.requestUpdate());
		return html`<p>Loading …</p>`;
	}

	async keepView() {
		this.busy = true;
		try {
			const {ids} = route();
			download(`${document.title.replace(/ · Unfog$/, "")}.html`, await keptPage(this.data, ids), "text/html");
			announce("The view was written to a file");
		} catch (error) {
			announce(error.message);
			alert(`The view could not be written: ${error.message}`);
		}
		this.busy = false;
	}

	updated() {
		this.data.staysOpen = this.notifies;
		const {view} = route();
		if (this.data.steers && view !== "run") document.title = `${{compare: "Comparison", start: "Start a run", draw: "Draw"}[view] || "Runs"} · Unfog`;
	}
}
customElements.define("unfog-page", Page);
