// ---- The state ----

const FIELDS = ["strategy", "tokens", "temperature", "seed", "stop-at", "branches", "words", "system"];  // elements of the settings
const settings = { model: "", without: [], ...Object.fromEntries(FIELDS.map(name => [name, ""])), plain: false, unmarked: false };
const chosen = { ...settings, ...stored.get("chosen", {}) };
let key = stored.get("key", "");
let models = [];
let talk = newTalk();  // the open conversation
let open = null;  // the turn and the place of the round that is shown
let editing = null;  // the turn whose question the reader changes
let running = null;  // the AbortController of the request that runs
let nextSave = 0;

function save() {
  const began = performance.now();
  stored.set("known", known);
  stored.set("chosen", chosen);
  stored.set("text", find("text").value);
  stored.set("talk", talk.id);
  if (talk.isChanged) keep(talk);
  nextSave = performance.now() + Math.max(1000, 20 * (performance.now() - began));
}
