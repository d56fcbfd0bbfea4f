// element("td", { class: "score" }, "0.98"): texts are only ever texts, whatever a model or a label is called.

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("--")) made.style.setProperty(key, value);
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

export const percent = (share) => `${(100 * share).toFixed(1)} %`;
