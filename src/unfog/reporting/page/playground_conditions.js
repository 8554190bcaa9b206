// Fields for the conditions of a run, one for each kind.

import {html} from "./vendor/lit.js";
import {range, select} from "./util.js";

// The value of a condition among words such as "age=60"; "" if it is open.
export function told(given, name) {
	return (given || []).find((word) => word.startsWith(`${name}=`))?.slice(name.length + 1) ?? "";
}

// The words with another value of a condition; null if all are open.
export function tell(given, name, value) {
	const others = (given || []).filter((word) => !word.startsWith(`${name}=`)), words = value === "" ? others : [...others, `${name}=${value}`];
	return words.length ? words : null;
}

const short = (number) => String(Number(number.toPrecision(4)));

// A step of a slider that people would choose: 1, 0.1, …, with at least 50 of them.
function stepOf(low, high) {
	return high > low ? 10 ** Math.floor(Math.log10((high - low) / 50)) : 1;
}

// Words of a text that the training captions have at most once.
export function rareWords(words) {
	return html`<span class="soft" role="status">${words.length ? html`Seldom or never in the training captions: ${words.map((one) => html`<mark>${one}</mark> `)}` : ""}</span>`;
}

// `set` is called with the new words, and with true if the pictures follow at once; `rare` are rare words of a caption.
export function fields(conditions, given, set, rare = []) {
	return conditions.map((one) => {
		const value = told(given, one.name), change = (next, now = false) => set(tell(given, one.name, next), now);
		const shown = value === "" ? "any" : value === ";" ? "none of them" : value;
		const clear = value === "" ? "" : html`<button type="button" class="quiet" aria-label="clear ${one.name}" @click=${() => change("", true)}>clear</button>`;
		return (CONTROLS[one.kind] || unknown)(one, value, change, html`<span>${one.name} <b>${shown}</b> ${clear}</span>`, rare);
	});
}

const CONTROLS = {
	number({name, low: [low], high: [high]}, value, change, label) {
		const number = Number(value), step = stepOf(low, high), outside = value !== "" && (number < low || number > high);
		const at = value === "" ? (low + high) / 2 : Math.min(high, Math.max(low, number));
		return html`<div class="setting wide condition" role="group" aria-label=${name}>${label}<span class="inline">${range(at, low, high, (x) => change(String(Number(x.toPrecision(6))), true), {step: "any", label: name, said: value === "" ? "any" : value})}
			<input type="number" inputmode="decimal" step=${step} aria-label="${name}, a number" placeholder="${short(low)} to ${short(high)}" .value=${value} @input=${(e) => change(e.target.value)}></span>
			${outside ? html`<span class="soft" role="status">The training images have ${short(low)} to ${short(high)}.</span>` : ""}</div>`;
	},
	category({name, categories}, value, change) {
		return html`<label class="setting condition"><span>${name}</span>${select([["", "any"], ...categories.map((one) => [one, one])], value, (next) => change(next, true), name)}</label>`;
	},
	several({name, categories}, value, change, label) {
		const chosen = value.split(";").filter(Boolean), toggle = (one) => (chosen.includes(one) ? chosen.filter((each) => each !== one) : [...chosen, one]).join(";") || ";";
		return html`<div class="setting wide condition" role="group" aria-label=${name}>${label}<span class="chips">${categories.map((one) => html`<button type="button" aria-pressed=${chosen.includes(one)} @click=${() => change(toggle(one), true)}>${one}</button>`)}
			<button type="button" aria-pressed=${value === ";"} @click=${() => change(";", true)}>none</button></span></div>`;
	},
	vector({name, low, high}, value, change, label) {
		const usual = low.map((_, i) => short((low[i] + high[i]) / 2)).join(";");
		return html`<div class="setting wide condition" role="group" aria-label=${name}>${label}<input aria-label="${name}, ${low.length} numbers with ; between them" placeholder=${usual} .value=${value} @change=${(e) => change(e.target.value.trim(), true)}></div>`;
	},
	text({name}, value, change, label, rare) {
		return html`<div class="setting wide condition" role="group" aria-label="Prompt"><span>Prompt</span><input aria-label="Prompt, a caption of ${name}" placeholder="one caption; several: Grid" maxlength="4096" .value=${value} @input=${(e) => change(e.target.value)}>${rareWords(rare)}</div>`;
	},
};

function unknown({name, kind}) {
	return html`<p class="soft">${name}: the page has no field for the kind ${kind}; <code>unfog sample --given</code> takes it.</p>`;
}
