// What the page asks its own server; nothing is asked of any other host.

export class Refused extends Error {}

async function asked(path, body, signal) {
  const how = body === undefined ? { signal } : {
    method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  };
  let response;
  try {
    response = await fetch(path, how);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server cannot be reached.");
  }
  let said = null;
  try {
    said = await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error; // a new question came while the answer to this one was on its way
  }
  if (response.ok && said !== null) return said;
  const later = response.headers.get("retry-after");
  throw new Refused((said?.error || `The server answered ${response.status}.`) + (later ? ` (again in ${later} s)` : ""));
}

export const models = () => asked("/v1/models").then((found) => found.data);
export const classify = (model, inputs, signal) => asked("/v1/classify", { model, inputs }, signal);
export const explain = (model, input, off, pin, signal) => asked("/v1/explain", { model, input, off, pin }, signal);
