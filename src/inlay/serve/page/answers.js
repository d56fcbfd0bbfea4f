// Answers of every kind: bars for labels and choices, a number, tagged words, a piece of text.

import { element, percent } from "/page/element.js";

export function answer(kind, said, before = null) {
  if (kind === "regression") return numbers(said, before);
  if (kind === "tags") return tags(said);
  if (!Array.isArray(said)) return text(said, before);
  return bars(said, before);
}

function bars(said, before) {
  const old = new Map((before ?? []).map((entry) => [entry.label, entry.score]));
  const rows = said.map((entry) => {
    const name = entry.label ?? `(no label: ${entry.said})`;
    if (entry.score === null || entry.score === undefined) return element("tr", {}, element("th", { scope: "row" }, name));
    const was = old.get(entry.label);
    const moved = was === undefined || was === null ? null : element("span", { class: "moved" }, ` was ${percent(was)}`);
    return element("tr", {},
      element("th", { scope: "row" }, name),
      element("td", {}, element("div", { class: "track", "aria-hidden": "true" }, element("div", { "--share": entry.score }))),
      element("td", { class: "score" }, percent(entry.score), moved));
  });
  return element("table", { class: "bars" }, element("tbody", {}, ...rows));
}

function numbers(said, before) {
  const was = before ? element("span", { class: "moved" }, ` was ${before.value.toFixed(4)}`) : null;
  return element("p", { class: "big" }, said.value.toFixed(4), was);
}

function text(said, before) {
  const was = before ? element("span", { class: "moved" }, ` was “${before.text}”`) : null;
  const sure = said.score === undefined || said.score === null ? null : element("span", { class: "moved" }, ` ${percent(said.score)}`);
  return element("p", { class: "big" }, said.text || "(no answer)", sure, was);
}

function tags(said) {
  return element("ul", { class: "tags" }, ...said.map((entry) =>
    element("li", { class: entry.label === "O" ? null : "said" }, entry.word, element("small", {}, `${entry.label} ${percent(entry.score)}`))));
}
