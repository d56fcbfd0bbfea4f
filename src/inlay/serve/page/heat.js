// The heat map, tokens × members at one place, and one token's places × members. Every cell also has its number.

import { element } from "/page/element.js";

const cell = (weight) => element("td", { "--weight": weight.toFixed(3) }, weight.toFixed(2));
const head = (first, members) => element("thead", {}, element("tr", {}, element("th", { scope: "col" }, first),
  ...members.map((name) => element("th", { scope: "col" }, name))));

export function tokensByMembers(table, { members, places, tokens, weights }, place, chosen, choose) {
  const rows = tokens.map((token, i) => element("tr", {},
    element("th", { scope: "row" }, element("button", {
      type: "button", "aria-pressed": String(i === chosen), "aria-label": `token ${i + 1}: ${token}`, "data-token": i, onclick: () => choose(i),
    }, token)),
    ...weights[place][i].map(cell)));
  table.replaceChildren(element("caption", {}, `Weights at ${places[place]}; choose a token to see all its places`),
    head("token", members), element("tbody", {}, ...rows));
}

export function placesByMembers(box, { members, places, tokens, weights }, token) {
  if (token < 0 || token >= tokens.length) return box.replaceChildren();
  const rows = places.map((name, place) => element("tr", {}, element("th", { scope: "row" }, name), ...weights[place][token].map(cell)));
  box.replaceChildren(element("h4", {}, `“${tokens[token].trim()}” at every place`),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `weights of ${tokens[token]} at every place` },
      element("table", { class: "heat" }, head("place", members), element("tbody", {}, ...rows))));
}
