// ---- Events ----

const NARROW = matchMedia("(max-width: 60em)");

/** Return the text that a button copies: its block of code, or its answer as the members wrote it. */
function textToCopy(button) {
  const code = button.closest(".code")?.querySelector("code");
  if (code) return code.textContent;
  const [turn] = [...views].find(([, view]) => view.root.contains(button));
  return textOf(turn, "content");
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // the page came over plain HTTP, or the reader forbids it
    const box = document.body.appendChild(make("textarea", { class: "hidden" }));
    box.value = text;
    box.select();
    document.execCommand("copy");
    box.remove();
    button.focus();
  }
  find("said").textContent = button.textContent = "Copied";
  await pause(2);
  button.textContent = "Copy";
  find("said").textContent = "";
}

function fit() {
  const text = find("text");
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}

const spanAt = event => event.target.closest?.(".span");

function openSpan(span) {
  const [turn] = [...views].find(([, view]) => view.root.contains(span));
  showSettings(false);
  openRound(turn, Number(span.dataset.round));
  find("round").focus();
}

/** Move the focus from a span to another one of the same answer. */
function moveFrom(span, pressed) {
  const spans = [...span.closest(".answer").querySelectorAll('.span[role="button"]')], place = spans.indexOf(span);
  const back = getComputedStyle(span).direction === "rtl" ? "ArrowRight" : "ArrowLeft";
  const next = { Home: 0, End: spans.length - 1, ArrowLeft: place + 1, ArrowRight: place + 1, [back]: place - 1 }[pressed];
  spans[next]?.focus();
  return next !== undefined;
}

find("log").addEventListener("click", event => {
  const span = spanAt(event);
  if (span && !span.closest("a") && getSelection().isCollapsed) openSpan(span);
  const button = event.target.closest?.(".copy");
  if (button) copy(textToCopy(button), button);
});
find("log").addEventListener("keydown", event => {
  const span = spanAt(event);
  if (!span || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Enter" || event.key === " ") openSpan(span);
  else if (!moveFrom(span, event.key)) return;
  event.preventDefault();
});
find("log").addEventListener("focusin", event => {
  const span = spanAt(event);
  if (!span) return;
  for (const each of span.closest(".answer").querySelectorAll('.span[tabindex="0"]')) each.tabIndex = -1;
  span.tabIndex = 0;
});
let lastTop = 0;
find("log").addEventListener("scroll", () => {
  const { scrollTop } = find("log"), isNear = isNearEnd(find("log"));
  following = isNear || (following && scrollTop >= lastTop);  // text that grows moves nothing up
  lastTop = scrollTop;
  find("newest").hidden = isNear;
}, { passive: true });
new ResizeObserver(() => follow()).observe(find("log"));
find("newest").addEventListener("click", () => follow(true));
document.addEventListener("keydown", event => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (editing) leaveEdit();
  else if (open) closeRound();
  else if (!find("talks").hidden) toggleTalks(false);
});
find("form").addEventListener("submit", event => {
  event.preventDefault();
  submit();
});
find("text").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
find("text").addEventListener("input", fit);
find("stop").addEventListener("click", () => running?.abort());
find("new").addEventListener("click", startAnew);
find("previous").addEventListener("click", () => step(-1));
find("next").addEventListener("click", () => step(1));
find("close").addEventListener("click", closeRound);
find("more").addEventListener("click", () => showSettings(find("settings").hidden));
find("model").addEventListener("change", event => {
  chosen.model = event.target.value;
  showMembers();
  showWhetherSet();
  save();
});
find("members").addEventListener("change", event => {
  const { value, checked } = event.target;
  chosen.without = chosen.without.filter(name => name !== value).concat(checked ? [] : [value]);
  showMembers();
  find("members").querySelectorAll("input").forEach(box => box.value === value && box.focus());
  save();
});
for (const name of FIELDS) {
  find(name).value = chosen[name];
  find(name).addEventListener("change", event => {
    chosen[name] = event.target.value;
    showWhetherSet();
    if (name === "system" && talk.turns.length) talk.isChanged = true;
    save();
  });
}
find("no-key").addEventListener("click", () => find("key").close());
find("key").querySelector("form").addEventListener("submit", event => {
  event.preventDefault();
  find("key").close("given");
});
addEventListener("pagehide", save);

const showMarks = () => find("log").classList.toggle("unmarked", chosen.unmarked);
for (const name of ["plain", "unmarked"]) {
  find(name).checked = chosen[name];
  find(name).addEventListener("change", event => {
    chosen[name] = event.target.checked;
    showMarks();
    views.forEach(view => showAnswer(view, true));
    save();
  });
}
find("list").addEventListener("click", () => toggleTalks(find("talks").hidden));
find("talks-close").addEventListener("click", () => toggleTalks(false));
find("talks-list").addEventListener("click", event => {
  const id = event.target.closest("button")?.dataset.id;
  if (!id) return;
  if (event.target.closest(".forget")) return askToForget("Delete this conversation?", () => [id]);
  openTalk(id);
  if (NARROW.matches) toggleTalks(false);
  find("text").focus();
});
find("save").addEventListener("click", event => {
  const { form } = event.target.dataset;
  if (form) saveAs(form);
});
find("forget-all").addEventListener("click", () => askToForget("Delete all conversations?", () => [...kept.names(TITLE), talk.id]));
find("keep").addEventListener("click", () => find("sure").close());
addEventListener("storage", followOtherTabs);

find("text").value = stored.get("text", "");
fit();
showMarks();
showWhetherSet();
openTalk(stored.get("talk", ""));
connected();
