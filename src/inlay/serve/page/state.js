// The page's state is in the address, after the #: a link shows another person the same.

const FIELDS = ["model", "text", "pair", "choices"];

export const fresh = () => ({ model: "", text: "", pair: "", choices: "", line: 0, place: 0, token: -1, off: [], pin: {} });

export function read() {
  const given = new URLSearchParams(location.hash.slice(1));
  const panels = ["a", "b"].map((side) => {
    const state = fresh();
    for (const field of FIELDS) state[field] = given.get(`${side}.${field}`) ?? "";
    for (const field of ["line", "place", "token"]) {
      const number = Number.parseInt(given.get(`${side}.${field}`) ?? "", 10);
      if (Number.isInteger(number)) state[field] = number;
    }
    state.off = given.getAll(`${side}.off`);
    for (const pinned of given.getAll(`${side}.pin`)) {
      const at = pinned.lastIndexOf(":");
      const weight = Number(pinned.slice(at + 1));
      if (at > 0 && weight >= 0 && weight <= 1) state.pin[pinned.slice(0, at)] = weight;
    }
    return state;
  });
  return { compare: given.get("compare") === "1", panels };
}

export function write({ compare, panels }) {
  const out = new URLSearchParams();
  if (compare) out.set("compare", "1");
  panels.slice(0, compare ? 2 : 1).forEach((state, i) => {
    const side = "ab"[i], usual = fresh();
    for (const field of [...FIELDS, "line", "place", "token"]) {
      if (state[field] !== usual[field]) out.set(`${side}.${field}`, state[field]);
    }
    for (const name of state.off) out.append(`${side}.off`, name);
    for (const [name, weight] of Object.entries(state.pin)) out.append(`${side}.pin`, `${name}:${weight}`);
  });
  history.replaceState(null, "", `#${out}`);
}
