// Views of the channels of a preview: one in a colour map, or three as red, green and blue, with their values.

import {html} from "./vendor/lit.js";
import {select} from "./util.js";

const GAP = 2, CELL = 128, LINE = 20, BAR = 10; // pixels, as in the grids of a run
const PLAIN = "grey", COLOURS = ["red", "green", "blue"], CHECKERS = [236, 200];

// Channels and colour map of a text such as "0:viridis" or "3,2,1".
export function parse(view) {
	const [before, colours = PLAIN] = view.split(":");
	return {channels: before.split(",").map(Number), colours};
}

// Whether a sheet has all channels and the colours of a view.
export function has(sheet, view) {
	const {channels, colours} = parse(view), inside = (c) => Number.isInteger(c) && c >= 0 && c < sheet.channels;
	return [1, 3].includes(channels.length) && channels.every(inside) && (colours === PLAIN || (channels.length === 1 && colours in sheet.maps));
}

// In words, with the values of the ends.
export function said(sheet, view) {
	const {channels, colours} = parse(view), ends = (c) => `${sheet.ends[c][0]} to ${sheet.ends[c][2]}`;
	const gaps = sheet.gaps ? ", checkered: unknown" : "";
	if (channels.length === 1) return `channel ${channels[0]} in ${colours}, ${ends(channels[0])}${gaps}`;
	return channels.map((c, i) => `${COLOURS[i]} channel ${c}: ${ends(c)}`).join(", ") + gaps;
}

// Decode the grey values of a sheet, once, and which of them are known.
export async function decoded(sheet) {
	const image = new Image();
	image.src = sheet.picture;
	await image.decode();
	const context = canvasOf(image.naturalWidth, image.naturalHeight);
	context.drawImage(image, 0, 0);
	const {data} = context.getImageData(0, 0, image.naturalWidth, image.naturalHeight);
	const grey = new Uint8ClampedArray(data.length / 4), known = new Uint8Array(grey.length);
	for (let i = 0; i < grey.length; i += 1) [grey[i], known[i]] = [data[4 * i], data[4 * i + 3] && 1];
	return {...sheet, picture: null, across: image.naturalWidth, grey, known, gaps: known.includes(0)};
}

// The colours of the 256 levels of a map, [256][3].
function table(sheet, name) {
	const anchors = (sheet.maps[name] || ["000000", "ffffff"]).map((one) => [0, 2, 4].map((i) => parseInt(one.slice(i, i + 2), 16)));
	return Array.from({length: 256}, (_, level) => {
		const at = (level * (anchors.length - 1)) / 255, low = Math.min(Math.floor(at), anchors.length - 2);
		return anchors[low].map((x, i) => Math.round(x + (at - low) * (anchors[low + 1][i] - x)));
	});
}

// A decoded sheet in a view, as the address of a picture.
export function paint(sheet, view) {
	const {images, height, width, captions} = sheet, {channels, colours} = parse(view), one = channels.length === 1;
	const across = captions.length || Math.ceil(Math.sqrt(images)), down = Math.ceil(images / across), scale = Math.max(1, Math.floor(CELL / Math.max(height, width)));
	const [w, h] = [width * scale + GAP, height * scale + GAP], head = captions.length ? LINE : 0;
	const context = canvasOf(across * w - GAP, head + down * h + (one ? BAR + LINE : 0)), palette = one && table(sheet, colours), tile = canvasOf(width, height);
	Object.assign(context, {fillStyle: "#fff", imageSmoothingEnabled: false});
	context.fillRect(0, 0, context.canvas.width, context.canvas.height);
	Object.assign(context, {fillStyle: "#404040", font: "12px system-ui, sans-serif", textBaseline: "middle", textAlign: "center"});
	captions.forEach((text, i) => context.fillText(text, i * w + w / 2, LINE / 2, w));
	for (let i = 0; i < images; i += 1) {
		const pixels = tile.createImageData(width, height), planes = channels.map((c) => plane(sheet, i * sheet.channels + c, sheet.grey));
		const known = channels.map((c) => plane(sheet, i * sheet.channels + c, sheet.known));
		const colour = (p) => (!known.some((read) => read(p)) ? checker(sheet, p) : one ? palette[planes[0](p)] : planes.map((read) => read(p)));
		for (let p = 0; p < width * height; p += 1) pixels.data.set([...colour(p), 255], 4 * p);
		tile.putImageData(pixels, 0, 0);
		context.drawImage(tile.canvas, (i % across) * w, head + Math.floor(i / across) * h, w - GAP, h - GAP);
	}
	if (one) bar(context, palette, sheet.ends[channels[0]], head + down * h);
	return context.canvas.toDataURL();
}

// Values of a tile by number of the pixel.
function plane({across, columns, width, height}, number, values) {
	const start = Math.floor(number / columns) * height * across + (number % columns) * width;
	return (p) => values[start + Math.floor(p / width) * across + (p % width)];
}

// The colour of an unknown pixel: grey squares, as `values.colour_map.checkers` draws them.
function checker({width, height}, p) {
	const side = Math.max(1, Math.ceil(Math.max(width, height) / 16));
	return Array(3).fill(CHECKERS[(Math.floor(Math.floor(p / width) / side) + Math.floor((p % width) / side)) % 2]);
}

// The colours, and below them the values that they stand for.
function bar(context, palette, ends, top) {
	const {width} = context.canvas;
	for (let x = 0; x < width; x += 1) {
		context.fillStyle = `rgb(${palette[Math.floor((256 * x) / width)].join()})`;
		context.fillRect(x, top, 1, BAR);
	}
	context.fillStyle = "#404040";
	["left", "center", "right"].forEach((textAlign, i) => Object.assign(context, {textAlign}).fillText(ends[i], (i * width) / 2, top + BAR + LINE / 2));
}

function canvasOf(width, height) {
	return Object.assign(document.createElement("canvas"), {width, height}).getContext("2d", {willReadFrequently: true});
}

// The choice of a view: what a run shows, a channel with its colours, or three channels.
export function chooser(sheet, view, choose) {
	const {channels, colours} = parse(view), all = Array.from({length: sheet.channels}, (_, c) => [c, `channel ${c}`]), three = view && channels.length === 3;
	const pick = (what) => choose(what === "rgb" ? "0,1,2" : what === "" ? "" : colours === PLAIN ? what : `${what}:${colours}`);
	const pairs = [["", "as the run"], ...all, ...(sheet.channels > 2 ? [["rgb", "red, green, blue"]] : [])];
	return html`<label>View ${select(pairs, three ? "rgb" : view && channels[0], pick)}</label>
		${view && !three ? html`<label>colours ${select([PLAIN, ...Object.keys(sheet.maps)], colours, (to) => choose(to === PLAIN ? `${channels[0]}` : `${channels[0]}:${to}`))}</label>` : ""}
		${three ? COLOURS.map((colour, i) => html`<label>${colour} ${select(all, channels[i], (c) => choose(channels.with(i, Number(c)).join()))}</label>`) : ""}`;
}
