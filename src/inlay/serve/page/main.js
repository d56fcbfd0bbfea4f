// Puts the page together: the models, one panel or two, and the address.

import { models, Refused } from "/page/api.js";
import { Panel } from "/page/panel.js";
import { save } from "/page/save.js";
import { read, write } from "/page/state.js";

const place = document.getElementById("panels");
const compare = document.getElementById("compare");
let state = read();
let known = [];
let panels = [];

const changed = () => write(state);

function build() {
  compare.checked = state.compare;
  const [first, second] = state.panels;
  if (state.compare && !second.model) Object.assign(second, structuredClone(first));
  panels = (state.compare ? [first, second] : [first]).map((own, i) => new Panel("ab"[i], known, own, changed));
  place.classList.toggle("two", state.compare);
  place.replaceChildren(...panels.map((panel) => panel.root));
}

compare.addEventListener("change", () => {
  state.compare = compare.checked;
  if (!state.compare) state.panels[1].model = "";
  build();
  changed();
});
document.getElementById("save").addEventListener("click", save);
window.addEventListener("hashchange", () => { state = read(); build(); });

try {
  const all = await models();
  known = all.filter((model) => model.parent !== null);
  document.getElementById("host").textContent = `${all.find((model) => model.parent === null)?.id ?? ""}, ${known.length} models`;
  if (known.length) build();
  else document.getElementById("trouble").textContent = "No model is loaded.";
} catch (error) {
  if (!(error instanceof Refused)) throw error;
  document.getElementById("trouble").textContent = error.message;
}
