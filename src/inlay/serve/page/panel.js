// One side of the page: a model, its texts, its answers, and a look inside where it is a fusion.

import { classify, explain, Refused } from "/page/api.js";
import { answer } from "/page/answers.js";
import { element } from "/page/element.js";
import { placesByMembers, tokensByMembers } from "/page/heat.js";

const WAIT = 250; // milliseconds after the last key

export class Panel {
  constructor(side, models, state, changed) {
    Object.assign(this, { side, models, state, changed, timer: 0, asking: null, seen: null });
    this.root = document.getElementById("panel").content.firstElementChild.cloneNode(true);
    this.find = (selector) => this.root.querySelector(selector);
    this.field = (name) => this.find(`[data-field="${name}"]`);
    this.find("h2").textContent = side === "a" ? "First" : "Second";
    this.root.setAttribute("aria-label", side === "a" ? "First model and text" : "Second model and text");
    for (const label of this.root.querySelectorAll("[data-for]")) {
      const id = `${side}-${label.dataset.for}`;
      label.htmlFor = id;
      this.field(label.dataset.for).id = id;
    }
    const scroll = this.find(".scroll");
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", "weights, tokens by members");
    this.field("model").append(...models.map((model) => element("option", { value: model.id }, model.id)));
    for (const name of ["model", "text", "pair", "choices"]) {
      this.field(name).addEventListener("input", () => this.edited(name));
    }
    this.field("place").addEventListener("input", (event) => this.set({ place: Number(event.target.value) }, false));
    this.show(state);
  }

  get model() { return this.models.find((model) => model.id === this.state.model) ?? this.models[0]; }

  show(state) {
    this.state = state;
    if (!this.models.some((model) => model.id === state.model)) state.model = this.models[0]?.id ?? "";
    for (const name of ["model", "text", "pair", "choices"]) this.field(name).value = state[name];
    this.shape();
    this.ask();
  }

  edited(name) {
    const value = this.field(name).value;
    if (name === "model") Object.assign(this.state, { off: [], pin: {}, place: 0, token: -1 });
    this.state[name] = value;
    if (name !== "model") Object.assign(this.state, { line: 0, token: -1 });
    this.shape();
    this.changed();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(), name === "model" ? 0 : WAIT);
  }

  set(part, again = true) {
    Object.assign(this.state, part);
    this.changed();
    if (again) this.ask();
    else this.draw();
  }

  // Which fields the model reads, and what they are called.
  shape() {
    const facts = this.model?.inlay;
    if (!facts) return;
    const spans = facts.kind === "spans", choice = facts.kind === "choice";
    const several = !spans && !choice;
    this.find('[data-for="text"]').textContent = spans ? "Question" : several ? "Text (several lines are several texts)" : "Text";
    this.find('[data-for="pair"]').textContent = spans ? "Context" : "Second text, line by line";
    this.field("pair").parentElement.hidden = !facts.pair;
    this.field("choices").parentElement.hidden = !choice;
    const made = facts.members.length ? `fusion of ${facts.members.join(", ")}` : facts.method;
    this.find(".about").textContent = `${facts.task} (${facts.kind}), ${made}${facts.labels.length ? `: ${facts.labels.join(", ")}` : ""}`;
  }

  inputs() {
    const { kind, pair } = this.model.inlay;
    const { text, pair: second, choices } = this.state;
    const lines = (value) => value.split("\n").map((line) => line.trim());
    if (kind === "spans") return text.trim() && second.trim() ? [{ text: text.trim(), pair: second }] : [];
    if (kind === "choice") {
      const given = lines(choices).filter(Boolean);
      return text.trim() && given.length > 1 ? [{ text: text.trim(), choices: given }] : [];
    }
    if (!pair) return lines(text).filter(Boolean);
    const others = lines(second);
    return lines(text).map((line, i) => ({ text: line, pair: others[i] ?? "" })).filter((each) => each.text && each.pair);
  }

  async ask() {
    this.asking?.abort();
    const asking = this.asking = new AbortController();
    const inputs = this.model ? this.inputs() : [];
    const { model, off, pin } = this.state;
    if (!inputs.length) return this.empty();
    const line = Math.min(Math.max(this.state.line, 0), inputs.length - 1);
    const fusion = this.model.inlay.members.length > 0;
    try {
      const [said, inside] = await Promise.all([
        classify(model, inputs, asking.signal),
        fusion ? explain(model, inputs[line], off, pin, asking.signal) : null,
      ]);
      this.find(".problem").textContent = "";
      this.seen = { inputs, line, said, inside };
      this.draw();
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof Refused)) throw error;
      this.empty(error.message);
    }
  }

  empty(problem = "") {
    this.seen = null;
    this.find(".problem").textContent = problem;
    this.find(".answers").replaceChildren();
    this.find(".inside").hidden = true;
  }

  draw() {
    if (!this.seen) return;
    const { inputs, line, said, inside } = this.seen;
    const changed = inside?.changed;
    this.find(".answers").replaceChildren(...said.results.map((result, i) => {
      const own = i === line && changed ? answer(said.kind, changed.answer, inside.answer) : answer(said.kind, result);
      const shown = typeof inputs[i] === "string" ? inputs[i] : [inputs[i].text, inputs[i].pair ?? ""].join(" / ").slice(0, 300);
      const look = inside && inputs.length > 1 && i !== line
        ? element("button", { type: "button", onclick: () => this.set({ line: i, token: -1 }) }, "Look inside") : null;
      return element("div", { class: inside && inputs.length > 1 && i === line ? "answer chosen" : "answer" },
        inputs.length > 1 ? element("p", { class: "line" }, element("span", {}, shown), look) : null, own);
    }));
    this.find(".inside").hidden = !inside;
    if (inside) this.look(inside);
  }

  look(inside) {
    const place = Math.min(Math.max(this.state.place, 0), inside.places.length - 1);
    const view = { members: inside.members, places: inside.places, tokens: inside.texts[0], weights: (inside.changed ?? inside).weights[0] };
    const slider = this.field("place");
    slider.max = String(inside.places.length - 1);
    slider.value = String(place);
    slider.setAttribute("aria-valuetext", inside.places[place]);
    slider.nextElementSibling.textContent = `${inside.places[place]} (${place + 1} of ${inside.places.length})`;
    const focused = document.activeElement?.dataset?.token;
    const here = this.root.contains(document.activeElement);
    tokensByMembers(this.find("table.heat"), view, place, this.state.token, (token) => this.set({ token: token === this.state.token ? -1 : token }, false));
    if (here && focused !== undefined) this.find(`[data-token="${focused}"]`)?.focus();
    placesByMembers(this.find(".token"), view, this.state.token);
    this.controls(inside.members);
  }

  // Off, free or pinned, for every member.
  controls(members) {
    const box = this.find(".members");
    const key = JSON.stringify(members);
    if (box.dataset.members !== key) {
      box.dataset.members = key;
      box.replaceChildren(box.firstElementChild, ...members.map((name) => this.control(name)));
    }
    members.forEach((name, i) => {
      const { off, pin } = this.state;
      const now = off.includes(name) ? "off" : name in pin ? "pinned" : "free";
      const row = box.children[i + 1];
      for (const radio of row.querySelectorAll("input[type=radio]")) radio.checked = radio.value === now;
      const weight = row.querySelector("input[type=number]");
      weight.disabled = now !== "pinned";
      if (now === "pinned" && document.activeElement !== weight) weight.value = pin[name];
    });
  }

  control(name) {
    const group = `${this.side}-member-${name}`;
    const weight = element("input", { type: "number", min: "0", max: "1", step: "0.05", value: "0.5", "aria-label": `weight of ${name}` });
    const change = () => {
      const how = row.querySelector("input[type=radio]:checked").value;
      const off = this.state.off.filter((other) => other !== name);
      const { [name]: gone, ...pin } = this.state.pin;
      if (how === "off") off.push(name);
      if (how === "pinned") pin[name] = Math.min(1, Math.max(0, Number(weight.value) || 0));
      this.set({ off, pin });
    };
    const radio = (value) => element("label", {}, element("input", { type: "radio", name: group, value, onchange: change }), value);
    weight.addEventListener("input", change);
    const row = element("div", { class: "member", role: "group", "aria-label": name },
      element("span", { class: "name" }, name), radio("free"), radio("off"), radio("pinned"), weight);
    return row;
  }
}
