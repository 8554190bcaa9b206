// Where the page's data comes from: a server that watches runs, or one file in which a run is embedded.
// Both have the same methods, and views know no others.

// Columns of numbers: see "Binary columns" in docs/serve.md.
export function decode(buffer) {
	const length = new DataView(buffer).getUint32(0, true);
	const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
	const Kind = header.bits === 32 ? Float32Array : Float64Array, size = header.rows * Kind.BYTES_PER_ELEMENT;
	const read = (name, i) => [name, new Kind(buffer, 4 + length + i * size, header.rows)];
	return {...header, columns: new Map(header.columns.map(read))};
}

const EXACT = 100000; // rows of all runs that are shown together; if there are more, the server thins them

// The metrics of one run, which grow at their end.
export class Store {
	constructor() {
		this.clear();
	}

	clear() {
		Object.assign(this, {rows: 0, offset: 0, identity: "", sampled: false, thinned: false, version: (this.version || 0) + 1, held: new Map()});
	}

	// Take what another holds in the place of all rows: some lines of a record, or blocks of them.
	take({held, rows}, sampled) {
		Object.assign(this, {held, rows, sampled, thinned: !sampled, offset: 0, version: this.version + 1});
	}

	add(block) {
		if (block.reset && this.rows) this.clear();
		const rows = this.rows + block.rows;
		for (const name of new Set([...this.held.keys(), ...block.columns.keys()])) {
			let column = this.held.get(name);
			if (!column || column.length < rows) {
				// Room for twice as many, so that a tick costs no more than its new rows.
				const larger = new Float64Array(Math.max(256, rows * (column ? 2 : 1))).fill(NaN);
				if (column) larger.set(column.subarray(0, this.rows));
				this.held.set(name, (column = larger));
			}
			if (block.columns.has(name)) column.set(block.columns.get(name), this.rows);
		}
		Object.assign(this, {rows, offset: block.offset, identity: block.identity, version: this.version + 1});
	}

	get names() {
		return [...new Set([...this.held.keys()].map((name) => name.replace(/\.(min|max|mean|last)$/, "")))];
	}

	column(name) {
		return this.held.get(name)?.subarray(0, this.rows);
	}

	// Finite points of a column over another: {x, y}, with {low, high} where the rows were thinned.
	series(over, name) {
		const pick = (of, ...kinds) => kinds.map((kind) => this.column(of + kind)).find(Boolean);
		const xs = pick(over, "", ".last", ".mean", ".max"), ys = pick(name, "", ".mean", ".last");
		const lows = this.column(`${name}.min`), highs = this.column(`${name}.max`);
		const found = {x: [], y: [], low: lows && [], high: highs && []};
		for (let i = 0; xs && ys && i < this.rows; i++) {
			if (!Number.isFinite(ys[i]) || !Number.isFinite(xs[i])) continue;
			found.x.push(xs[i]);
			found.y.push(ys[i]);
			found.low?.push(lows[i]);
			found.high?.push(highs[i]);
		}
		return found;
	}

	// Names of the columns of a list, clean to noisy; [] if there is none.
	levels(name) {
		const found = [];
		while (this.names.includes(`${name}.${found.length}`)) found.push(`${name}.${found.length}`);
		return found;
	}
}

const hex = (bytes) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");

async function signed(key, text) {
	const [secret, message] = [key, text].map((one) => new TextEncoder().encode(one));
	const known = await crypto.subtle.importKey("raw", secret, {name: "HMAC", hash: "SHA-256"}, false, ["sign"]);
	return hex(new Uint8Array(await crypto.subtle.sign("HMAC", known, message)));
}

export class ServerData {
	constructor(base = "./") {
		Object.assign(this, {base, steers: true, connected: true, trusted: true, key: null, seen: "", stores: new Map(), listeners: new Map()});
		document.addEventListener("visibilitychange", () => (document.hidden && !this.staysOpen ? this.close() : this.open()));
		this.open();
		if (crypto.subtle) this.get("api/key").then(({key}) => (this.key = key)).catch(() => {});
	}

	// One stream for all views, closed while the tab is hidden, unless it shall notify of ends: browsers allow six connections in all tabs together.
	async open() {
		if (this.stream || this.opening || (document.hidden && !this.staysOpen)) return;
		this.opening = true;
		try {
			await this.prove();
		} catch {
			return this.lose();
		} finally {
			this.opening = false;
		}
		const stream = (this.stream = new EventSource(this.url(`api/stream?after=${this.seen}`)));
		stream.onopen = () => {
			this.set(true);
			for (const store of this.stores.values()) store.stale = true; // events may have been missed
			this.emit("refresh", {});
		};
		// The browser would reconnect by itself, to any program that listens there.
		stream.onerror = () => this.lose();
		for (const kind of ["runs", "run", "task", "draw"]) {
			stream.addEventListener(kind, ({data, lastEventId}) => {
				const detail = data ? JSON.parse(data) : {};
				this.seen = lastEventId;
				if (kind === "run") this.store(detail.id).stale = true;
				this.emit(kind, detail);
			});
		}
	}

	close() {
		this.stream?.close();
		this.stream = null;
		this.trusted = !this.key;
	}

	// The server is gone, or the network is.
	lose() {
		this.close();
		this.set(false);
		clearTimeout(this.again);
		this.again = setTimeout(() => this.open(), 2000);
	}

	// After a break any program may listen at the port. It gets no secret unless it proves that it has the key of this folder.
	async prove() {
		if (!this.trusted) await (this.proving ||= this.check().finally(() => (this.proving = null)));
	}

	async check() {
		const nonce = hex(crypto.getRandomValues(new Uint8Array(16)));
		const {start, proof} = await (await fetch(`/hello?nonce=${nonce}`)).json();
		if (proof !== (await signed(this.key, `proof ${location.port || 80} ${nonce} ${start}`))) throw new Error("another program");
		// A server that was started anew has another secret.
		const path = `/${(await signed(this.key, `address ${start}`)).slice(0, 32)}/`;
		this.moved ||= path !== location.pathname;
		if (path !== location.pathname) history.replaceState(null, "", path + location.hash);
		this.trusted = true;
	}

	set(connected) {
		if (this.connected === connected) return;
		this.connected = connected;
		this.emit("connection", {connected});
	}

	on(kind, callback) {
		if (!this.listeners.has(kind)) this.listeners.set(kind, new Set());
		this.listeners.get(kind).add(callback);
		return () => this.listeners.get(kind).delete(callback);
	}

	emit(kind, detail) {
		for (const callback of [...(this.listeners.get(kind) || [])]) callback(detail);
	}

	// For a request that is sent now, or a picture; without one until the server is known again.
	url(path) {
		return this.trusted ? this.base + path : "data:,";
	}

	async ask(path, options) {
		let answer;
		try {
			await this.prove();
			answer = await fetch(this.url(path), options);
		} catch {
			this.lose();
			throw new Error("the server does not answer");
		}
		if (answer.ok) return answer;
		const said = await answer.json().catch(() => ({}));
		throw new Error(said.error || `the server answers ${answer.status}`);
	}

	async get(path) {
		return (await this.ask(path)).json();
	}

	async post(path, body) {
		const headers = {"Content-Type": "application/json"};
		return (await this.ask(path, {method: "POST", headers, body: JSON.stringify(body)})).json();
	}

	runs() {
		return this.get("api/runs");
	}

	// What is known of a run; `among`: how many are shown together, for a view with curves.
	async run(id, among = 0) {
		const run = await this.get(`api/runs/${id}`), store = this.store(id);
		if (among) store.long = run.rows * among > EXACT;
		if (among && run.sampled && !store.rows) await this.sample(id, store);
		return run;
	}

	async events(id) {
		return (await this.get(`api/runs/${id}/events?from=0`)).events;
	}

	store(id) {
		const key = String(id);
		if (!this.stores.has(key)) this.stores.set(key, new Store());
		return this.stores.get(key);
	}

	// Lines at even distances of a long run, whose record the server has yet to read; then all, one run after another.
	async sample(id, store) {
		store.take(await this.part(id, "step", {sample: 1}, 4000), true);
		this.queue = (this.queue || Promise.resolve()).then(() => this.update(id, true)).catch(() => store.clear()).then(() => this.emit("rows", {}));
	}

	// Fetch the rows that are new since the last call.
	async update(id, whole = false) {
		const store = this.store(id);
		if (store.sampled && !whole) return store;
		if (store.busy) return store.busy.then(() => store);
		if (store.long && store.thinned && (!store.stale || performance.now() < store.next)) return store;
		const fetched = store.long ? this.thinned(id, store) : this.newer(id, store);
		store.busy = fetched.finally(() => (store.busy = null));
		return store.busy.then(() => store);
	}

	async newer(id, store) {
		const query = `from=${store.offset}&identity=${encodeURIComponent(store.identity)}`;
		const block = decode(await (await this.ask(`api/runs/${id}/metrics?${query}`)).arrayBuffer());
		if (store.sampled || store.thinned) store.clear();
		store.add(block);
	}

	// Bins of a run that is too long to be sent whole; not at every line that it logs.
	async thinned(id, store) {
		Object.assign(store, {stale: false, next: performance.now() + 10000});
		store.take(await this.part(id, "step"), false);
	}

	// The rows with `over` from low to high, or all, thinned if there are many.
	async part(id, x, limits = {}, points = 2000) {
		const store = new Store();
		const query = new URLSearchParams({x, ...limits, points});
		store.add(decode(await (await this.ask(`api/runs/${id}/thinned?${query}`)).arrayBuffer()));
		return store;
	}

	// All channels of a preview: see channels.js.
	channels(id, step) {
		return this.get(`api/runs/${id}/channels/${step}.json`);
	}

	picture(id, kind, step) {
		return this.url(kind === "contact" ? `api/runs/${id}/contact-sheet.webp` : `api/runs/${id}/preview/${step}${kind === "denoising" ? ".denoising" : ""}.webp`);
	}
}

export class FileData {
	constructor(embedded) {
		Object.assign(this, {embedded, steers: false, connected: true, stores: new Map()});
		for (const run of embedded.runs) {
			const raw = atob(run.metrics);
			const store = new Store();
			store.add(decode(Uint8Array.from(raw, (letter) => letter.charCodeAt(0)).buffer));
			this.stores.set(String(run.id), store);
		}
	}

	find(id) {
		const run = this.embedded.runs.find((one) => String(one.id) === String(id));
		if (!run) throw new Error("this file does not hold that run");
		return run;
	}

	on() {
		return () => {};
	}

	async runs() {
		return this.embedded.runs.map((run) => ({...run.status, id: run.id, name: run.name}));
	}

	async run(id) {
		return this.find(id);
	}

	async events(id) {
		return this.find(id).events;
	}

	store(id) {
		return this.stores.get(String(id)) || new Store();
	}

	async update(id) {
		return this.store(id);
	}

	async channels(id, step) {
		return this.find(id).pictures[`channels/${step}`];
	}

	picture(id, kind, step) {
		return this.find(id).pictures[kind === "contact" ? "contact" : `${kind}/${step}`] || "";
	}
}
