// The noise levels of a drawing on one axis, clean to noisy: each is moved between its neighbours by mouse or keys.

import {html} from "./vendor/lit.js";
import {View} from "./util.js";

const APART = 0.001; // at least, as levels must fall

class Shares extends View {
	static properties = ["shares"];

	move(i, share) {
		const high = i ? this.shares[i - 1] - APART : 1, low = (this.shares[i + 1] ?? 0) + APART;
		const moved = Number(Math.min(high, Math.max(low, share)).toFixed(3));
		if (moved === this.shares[i]) return;
		this.shares = this.shares.with(i, moved);
		this.dispatchEvent(new CustomEvent("moved", {detail: this.shares}));
	}

	drag(i, event) {
		if (!event.buttons) return;
		event.target.setPointerCapture(event.pointerId);
		const box = event.target.parentElement.getBoundingClientRect();
		this.move(i, (event.clientX - box.left) / box.width);
	}

	key(i, event) {
		const step = {ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1}[event.key];
		if (!step) return;
		event.preventDefault();
		this.move(i, this.shares[i] + step * (event.shiftKey ? 0.05 : 0.01));
	}

	render() {
		return html`<div class="shares" role="group" aria-label="Levels, as shares of noise">${this.shares.map((share, i) => html`<button type="button" role="slider" aria-label="Level ${i + 1} of ${this.shares.length}" aria-valuemin="0" aria-valuemax="1" aria-valuenow=${share}
			@pointerdown=${(e) => this.drag(i, e)} @pointermove=${(e) => this.drag(i, e)} @keydown=${(e) => this.key(i, e)}></button>`)}</div><p class="soft">clean … noise: drag a level, or arrow keys</p>`;
	}

	updated() {
		this.querySelectorAll("button").forEach((button, i) => (button.style.left = `${100 * this.shares[i]}%`));
	}
}
customElements.define("unfog-shares", Shares);
