// Arithmetic of curves: smoothing, thinning to pixels, ticks of a logarithmic axis, and a curve in one sentence.

import {number, count, duration} from "./util.js";

// Average over the past with weights that fall by half in 0.7 `width`, in units of x, so that runs which log at other
// intervals are smoothed alike. Computed from all points, before any are left out.
export function smooth(x, y, width) {
	if (!(width > 0)) return y;
	const out = new Float64Array(y.length);
	let sum = 0, weight = 0;
	for (let i = 0; i < y.length; i++) {
		const decay = i ? Math.exp(-(x[i] - x[i - 1]) / width) : 0;
		sum = sum * decay + y[i];
		weight = weight * decay + 1;
		out[i] = sum / weight;
	}
	return out;
}

// Index of the first x that is not below `value`.
export function lower(x, value) {
	let low = 0, high = x.length;
	while (low < high) {
		const middle = (low + high) >> 1;
		if (x[middle] < value) low = middle + 1;
		else high = middle;
	}
	return low;
}

// Indices of first, lowest, highest and last point of each of `bins` parts of [low, high]: the line looks the same,
// and no spike is lost. One point on either side stays, so that the line reaches the edges.
export function thin(x, y, low, high, bins) {
	const from = Math.max(0, lower(x, low) - 1), to = Math.min(x.length, lower(x, high) + 1);
	const kept = [];
	if (to - from <= 4 * bins) {
		for (let i = from; i < to; i++) kept.push(i);
		return kept;
	}
	const width = (high - low) / bins || 1;
	for (let i = from; i < to; ) {
		const first = i, end = low + width * (Math.floor((x[i] - low) / width) + 1);
		let least = i, most = i;
		for (i++; i < to && x[i] < end; i++) {
			if (y[i] < y[least]) least = i;
			else if (y[i] > y[most]) most = i;
		}
		const [a, b] = least < most ? [least, most] : [most, least];
		kept.push(first);
		if (a !== first) kept.push(a);
		if (b !== a && b !== first) kept.push(b);
		if (i - 1 !== b && i - 1 !== first) kept.push(i - 1);
	}
	return kept;
}

// Round values between low and high, about as many as `most`.
export function ticks(low, high, most) {
	const rough = (high - low) / Math.max(1, most), size = 10 ** Math.floor(Math.log10(rough));
	const step = [1, 2, 2.5, 5, 10].map((digit) => digit * size).find((one) => one >= 0.999 * rough), first = Math.ceil(low / step);
	return Array.from({length: Math.min(50, Math.floor(high / step) - first + 1)}, (_, i) => (first + i) * step);
}

// Round values between low and high, which are positive: 3 to 9 of them where a decade or more is seen.
export function logTicks(low, high) {
	const decades = [];
	for (let d = Math.floor(Math.log10(low)); d <= Math.ceil(Math.log10(high)); d++) decades.push(d);
	for (const digits of [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 5, 7], [1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9]]) {
		const ticks = decades.flatMap((d) => digits.map((digit) => digit * 10 ** d)).filter((t) => t >= low && t <= high);
		if (ticks.length >= 3) return ticks.filter((_, i) => i % Math.ceil(ticks.length / 7) === 0);
	}
	return ticks(low, high, 4);
}

export function place(over, value) {
	return over === "seconds" ? duration(value) : over === "energy" ? number(value) : `${over === "step" ? "step" : over} ${count(value)}`;
}

// What a reader of the chart would say of a curve.
export function sentence(label, over, x, y) {
	const n = x.length;
	if (!n) return `${label} has not been recorded yet.`;
	if (n === 1) return `${label}: ${number(y[0])} at ${place(over, x[0])}.`;
	let least = 0, most = 0;
	for (let i = 1; i < n; i++) {
		if (y[i] < y[least]) least = i;
		if (y[i] > y[most]) most = i;
	}
	const spread = y[most] - y[least], change = y[n - 1] - y[0];
	const how = Math.abs(change) <= 0.05 * spread || spread <= 1e-6 * Math.abs(y[0]) ? "stayed near" : change < 0 ? "fell from" : "rose from";
	const ends = how === "stayed near" ? number(y[0]) : `${number(y[0])} to ${number(y[n - 1])}`;
	const extreme = spread ? `; lowest ${number(y[least])} at ${place(over, x[least])}, highest ${number(y[most])} at ${place(over, x[most])}` : "";
	return `${label} ${how} ${ends} up to ${place(over, x[n - 1])}${extreme}.`;
}

// The same of several runs: where each stands, and which is lowest.
export function ranking(curves) {
	const ends = curves.filter((one) => one.y.length).map((one) => [one.label, one.y.at(-1)]).sort((a, b) => a[1] - b[1]);
	return ends.length ? `At the end, from low to high: ${ends.map(([label, value]) => `${label} ${number(value)}`).join(", ")}.` : "";
}
