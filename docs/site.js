// The picture of a finished run, with two sliders: time of training, and time of denoising. Without this script, the
// picture shows all cells at once.

"use strict";

const NAME = "finished-run";

function slider(words, last, show) {
	const label = document.createElement("label"), value = document.createElement("b"), range = document.createElement("input");
	Object.assign(range, {type: "range", min: 0, max: last, value: last});
	label.append(`${words} `, value, range);
	range.addEventListener("input", show);
	return {label, value, range};
}

async function bringToLife(sheet) {
	const about = await (await fetch(sheet.src.replace(/webp$/, "json"))).json(), [width, height] = about.size;
	sheet.loading = "eager";
	await sheet.decode();
	const cell = document.createElement("canvas"), parts = [about.steps, about.noise].map((list) => list.length - 1);
	Object.assign(cell, {width, height});
	cell.setAttribute("role", "img");
	const show = () => {
		const [row, column] = [training, denoising].map((one) => Number(one.range.value));
		const said = [`step ${about.steps[row]} of ${about.steps.at(-1)}`, `${Math.round(100 * about.noise[column])}% noise`];
		cell.getContext("2d").drawImage(sheet, column * (width + about.gap), row * (height + about.gap), width, height, 0, 0, width, height);
		cell.setAttribute("aria-label", `Samples of ${said.join(", at ")}`);
		[training, denoising].forEach((one, i) => {
			one.value.textContent = said[i];
			one.range.setAttribute("aria-valuetext", said[i]);
		});
	};
	const training = slider("training", parts[0], show), denoising = slider("denoising", parts[1], show);
	const figure = document.createElement("div");
	figure.className = "finished-run";
	figure.append(cell, training.label, denoising.label);
	show();
	(sheet.closest("a") || sheet).replaceWith(figure);
}

for (const sheet of document.querySelectorAll(`img[src$="${NAME}.webp"]`)) bringToLife(sheet).catch(() => {});
