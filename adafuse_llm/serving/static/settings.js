// ---- Models, members and settings ----

const modelOf = id => models.find(model => model.id === id)?.adafuse;
const membersOf = id => modelOf(id)?.members ?? [];

/** Return the members that decode. */
function inUse() {
  const all = membersOf(chosen.model), used = all.filter(name => !chosen.without.includes(name));
  return all.length > 1 && used.length ? used : all;
}

function showModels() {
  const select = find("model");
  select.replaceChildren(...models.map(({ id, adafuse }) => {
    const size = adafuse?.members?.length ?? 0;
    return make("option", { value: id }, size > 1 ? `${id} (${size} members)` : `${id} alone`);
  }));
  for (const model of models) (model.adafuse?.members ?? []).forEach(lookOf);
  if (!models.some(model => model.id === chosen.model)) chosen.model = models[0].id;
  select.value = chosen.model;
  select.hidden = false;
  showMembers();
}

/** Show the members: as the legend of the spans, and for the choice of those that decode. */
function showMembers() {
  const all = [...new Set(models.flatMap(model => model.adafuse?.members ?? []))], used = inUse();
  const alone = membersOf(chosen.model).length < 2;
  const labels = all.map(name => {
    const look = lookOf(name);
    const box = make("input", { type: "checkbox", value: name });
    box.checked = used.includes(name);
    box.disabled = alone || (used.length === 1 && box.checked);
    return make("label", {}, box, make("span", { class: "key", look }, make("span", { class: "mark" }, look.mark), ` ${name}`));
  });
  const shared = Object.entries(LOOKS.shared).map(([kind, look]) => {
    const entry = make("span", { class: "shared", id: `shared-${kind}` }, make("span", { class: "key", look }, `${look.mark} ${look.name}`));
    entry.hidden = !shownShared.has(kind) && (kind !== "agreed" || all.length < 2);
    return entry;
  });
  find("members").replaceChildren(make("legend", { class: "hidden" }, "Members that decode"), ...labels, ...shared);
  find("members").hidden = false;
}

const shownShared = new Set();

/** Show the legend of spans that belong to no single member, as soon as there is one. */
function showLegend(kind) {
  shownShared.add(kind);
  const entry = find(`shared-${kind}`);
  if (entry) entry.hidden = false;
}

/** Return the chosen model in words. */
function describe() {
  const unused = membersOf(chosen.model).filter(name => !inUse().includes(name));
  return unused.length ? `${chosen.model} without ${unused.join(", ")}` : chosen.model;
}

function settingsValid() {
  const wrong = FIELDS.map(find).find(input => !input.checkValidity());
  if (wrong) {
    showSettings(true);
    wrong.reportValidity();
  }
  return !wrong;
}

/** Show a system prompt, which the next request has. */
function showSystem(text) {
  chosen.system = find("system").value = text;
  showWhetherSet();
}

/** Return whether the strategy whose options are in the settings writes the answers. */
const usesAdafuse = () => (chosen.strategy || modelOf(chosen.model)?.strategy) === "adafuse" && inUse().length > 1;

/** Show at the button whether a setting differs from the server's. */
function showWhetherSet() {
  for (const label of document.querySelectorAll(".of-adafuse")) label.hidden = !usesAdafuse();
  const isSet = FIELDS.some(name => chosen[name].trim() && !find(name).closest(".of-adafuse[hidden]"));
  find("more").classList.toggle("set", isSet);
  find("more").title = isSet ? "Some settings are in use" : "";
}

function showSettings(shown) {
  find("settings").hidden = !shown;
  find("more").setAttribute("aria-expanded", String(shown));
}

function status(text, ...actions) {
  find("status").hidden = !text;
  find("status").replaceChildren(text, ...actions);
}

// ---- The key ----

/** Ask for the API key. The promise resolves when there is one. */
function askForKey() {
  const dialog = find("key"), secret = find("secret");
  find("wrong").hidden = !key;
  secret.value = "";
  dialog.showModal();
  return new Promise((resolve, reject) => {
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "given";
      dialog.returnValue = "";
      if (!given) return reject(new Problem("The server needs an API key.", { status: 401 }));
      key = secret.value.trim();
      secret.value = "";
      stored.set("key", key);
      find("text").focus();
      resolve();
    }, { once: true });
  });
}

let connecting = null;

/** Ask the server for its models. The promise resolves when they are known, or if there is no key. */
function connected() {
  connecting ??= connect().finally(() => { connecting = null; });
  return connecting;
}

async function connect() {
  for (;;) {
    try {
      const response = await insist("v1/models", {}, () => status("The members are loading."));
      models = parsed(await response.text()).data;
      showModels();
      showWelcome();
      showWhetherSet();
      return status("");
    } catch (problem) {
      if (problem.status === 401) return status(problem.message, make("button", { type: "button", click: connected }, "Enter the key"));
      status(`${explain(problem)} This page tries again.`);
      await pause(3);
    }
  }
}

