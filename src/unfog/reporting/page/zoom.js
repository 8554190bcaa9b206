// The part of the axis that all charts of the page show together: zoomed, moved, and kept in the address.

import {keep, route} from "./util.js";

export const charts = new Set(); // those on the page
let range = null; // [low, high] of x that is shown, null for all
let pending = 0, noting = 0;
let cursor = null; // x of the cursor, which all charts show

export function zoomed() {
	return range;
}

export function pointed() {
	return cursor;
}

// Put the cursor of all charts at x; null for none.
export function point(x) {
	cursor = x;
	for (const chart of charts) chart.tell();
}

// Show this part of x in all charts; null for all of it.
export function zoom(part, note = true) {
	range = part && part[1] > part[0] ? part : null;
	pending ||= requestAnimationFrame(() => {
		pending = 0;
		for (const chart of charts) chart.redraw();
		dispatchEvent(new Event("zoomed"));
	});
	clearTimeout(noting);
	// Browsers limit how often the address may change.
	if (note) noting = setTimeout(() => keep({zoom: range ? range.map((v) => Number(v.toPrecision(8))).join("_") : null}), 400);
}

export function zoomFromAddress() {
	const parts = (route().query.get("zoom") || "").split("_").map(Number);
	zoom(parts.length === 2 && parts.every(Number.isFinite) ? parts : null, false);
}

// Zoom by a factor around the middle, or around `at`.
export function zoomBy(factor, at) {
	const [low, high] = extent();
	const [from, to] = visible();
	const middle = at ?? (from + to) / 2;
	const a = Math.max(low, middle - (middle - from) * factor), b = Math.min(high, middle + (to - middle) * factor);
	zoom(a <= low && b >= high ? null : [a, b]);
}

export function pan(share) {
	const [low, high] = extent();
	if (!range) return;
	const width = range[1] - range[0];
	const from = Math.min(Math.max(low, range[0] + share * width), high - width);
	zoom([from, from + width]);
}

function extent() {
	let low = Infinity, high = -Infinity;
	for (const chart of charts) {
		for (const {x} of chart.series) if (x.length) [low, high] = [Math.min(low, x[0]), Math.max(high, x[x.length - 1])];
	}
	return low <= high ? [low, high] : [0, 1];
}

// What is shown of x.
export function visible() {
	return range || extent();
}
