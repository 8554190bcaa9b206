// "Keep this view": one HTML file that opens without a server, made of the page itself and what it shows.

const MOST_ROWS = 4000; // of each run; of longer ones the server gives bins

function base64(bytes) {
	let text = "";
	for (let i = 0; i < bytes.length; i += 32768) text += String.fromCharCode(...bytes.subarray(i, i + 32768));
	return btoa(text);
}

// Columns as data.js decodes them. Of lists the means suffice: a map shows no extremes.
function pack(store) {
	const columns = new Map([...store.held.keys()].filter((name) => !/\.\d+\.(min|max|last)$/.test(name)).map((name) => [name, store.column(name)]));
	const {rows} = store;
	let header = JSON.stringify({columns: [...columns.keys()], rows, from: 0, offset: 0, identity: "", reset: true, bits: 32});
	header = header.padEnd(header.length + ((8 - ((4 + header.length) % 8)) % 8));
	const out = new Uint8Array(4 + header.length + columns.size * rows * 4);
	new DataView(out.buffer).setUint32(0, header.length, true);
	out.set(new TextEncoder().encode(header), 4);
	[...columns.values()].forEach((column, i) => new Float32Array(out.buffer, 4 + header.length + i * rows * 4, rows).set(column));
	return base64(out);
}

async function asData(url) {
	if (!url || url.startsWith("data:")) return url;
	const answer = await fetch(url);
	return answer.ok ? `data:${answer.headers.get("Content-Type")};base64,${base64(new Uint8Array(await answer.arrayBuffer()))}` : "";
}

async function keptRun(data, id) {
	const detail = await data.run(id), long = data.steers && detail.rows > MOST_ROWS;
	const store = long ? await data.part(id, "step", {}, 1000) : await data.update(id);
	// At most twelve previews, with the first and the last, as in the report.
	const all = detail.previews || [], previews = all.length <= 12 ? all : Array.from({length: 12}, (_, i) => all[Math.round((i * (all.length - 1)) / 11)]);
	const pictures = {}, denoising = (detail.denoising || []).slice(-1);
	for (const step of previews) pictures[`preview/${step}`] = await asData(data.picture(id, "preview", step));
	const channels = (detail.channels || []).filter((step) => previews.includes(step));
	for (const step of channels) pictures[`channels/${step}`] = await data.channels(id, step);
	for (const step of denoising) pictures[`denoising/${step}`] = await asData(data.picture(id, "denoising", step));
	if (detail.contact_sheet) pictures.contact = await asData(data.picture(id, "contact"));
	return {...detail, id, previews, channels, denoising, pictures, commands: {}, events: await data.events(id), metrics: pack(store)};
}

// The page without data: of a file its own scripts and styles, of a server what it makes of the modules.
async function shell(data) {
	if (data.steers) return (await data.ask("static/shell.html")).text();
	const head = document.head.cloneNode(true), holder = document.getElementById("embedded").cloneNode(false);
	head.querySelector("[http-equiv=refresh]")?.remove();
	const live = document.getElementById("live").cloneNode(false);
	return `<!doctype html>\n<html lang="en">\n${head.outerHTML}\n<body>\n<unfog-page></unfog-page>\n${live.outerHTML}\n${holder.outerHTML}\n</body>\n</html>\n`;
}

export async function keptPage(data, ids) {
	const runs = [];
	for (const id of ids) runs.push(await keptRun(data, id));
	const written = new Date().toISOString().slice(0, 16).replace("T", " ");
	const text = JSON.stringify({written: `${written} UTC`, view: location.hash, runs}).replaceAll("<", "\\u003c");
	const [before, after] = (await shell(data)).split('id="embedded"></script>');
	return `${before}id="embedded">${text}</script>${after}`;
}
