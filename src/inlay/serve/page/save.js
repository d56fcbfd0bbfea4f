// The page as it is now in one file: no scripts, no links, nothing to fetch.

import { element } from "/page/element.js";

export async function save() {
  const copy = document.documentElement.cloneNode(true);
  const css = await (await fetch("/page/style.css")).text();
  const live = document.querySelectorAll("textarea, select, input");
  copy.querySelectorAll("textarea, select, input").forEach((field, i) => {
    const value = live[i].value;
    if (field.tagName === "TEXTAREA") field.replaceWith(element("p", { class: "answer" }, value));
    else if (field.tagName === "SELECT") field.replaceWith(element("p", { class: "answer" }, value));
    else {
      field.toggleAttribute("checked", live[i].checked);
      field.setAttribute("value", value);
      field.setAttribute("disabled", "");
    }
  });
  for (const gone of copy.querySelectorAll("script, link, template, noscript, .skip, .actions")) gone.remove();
  for (const button of copy.querySelectorAll("button")) button.replaceWith(element("span", {}, button.textContent));
  copy.querySelector("head").append(element("style", {}, css));
  const file = new Blob([`<!doctype html>\n${copy.outerHTML}\n`], { type: "text/html" });
  const link = element("a", { href: URL.createObjectURL(file), download: "inlay.html" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
