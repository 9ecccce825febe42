
// ---- Conversations that the browser keeps ----

// Each has two entries: one with its title and the time of its last question, and one with all of it.
// So tabs share no list.
const TITLE = "title.", TALK = "talk.";

/** Return a conversation without questions. A turn is a question with its answer and its rounds. */
function newTalk() {
  const id = Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
  return { id, turns: [], isChanged: false, isKept: false };
}

/** Return the titles and times of the conversations, the latest first. */
function keptTalks() {
  return kept.names(TITLE).map(id => ({ id, ...kept.get(TITLE + id, {}) })).sort((left, right) => right.time - left.time);
}

/** Keep a conversation in the browser. If there is no room, it leaves out rounds, those of old conversations first. */
function keep(talk) {
  const { id, turns } = talk;
  talk.isChanged = false;
  talk.isKept = turns.length > 0;
  if (!talk.isKept) return kept.remove(TITLE + id, TALK + id);
  const content = { system: chosen.system, turns }, write = () => kept.set(TALK + id, content);
  const titled = kept.set(TITLE + id, { title: turns[0].question.slice(0, 100), time: turns.at(-1).time });
  const others = keptTalks().filter(each => each.id !== id).reverse();
  let fits = titled && write();
  for (const other of titled && !fits ? others : []) {
    fits ||= withoutRounds(other.id) && write();
  }
  if (!fits) {
    content.turns = turns.map(turn => ({ ...turn, rounds: [] }));
    fits = write();
  }
  find("full").hidden = fits;
  showTalks();
}

/** Drop the rounds of a conversation that is kept. Return whether there were any. */
function withoutRounds(id) {
  const content = kept.get(TALK + id, { turns: [] }), had = content.turns.some(turn => turn.rounds.length);
  return had && kept.set(TALK + id, { ...content, turns: content.turns.map(turn => ({ ...turn, rounds: [] })) });
}

/** Open a conversation, or a new one if the browser does not keep it. */
function openTalk(id) {
  leaveTalk();
  const content = kept.get(TALK + id, null);
  talk = content ? { id, turns: content.turns, isChanged: false, isKept: true } : newTalk();
  if (content) showSystem(content.system ?? "");
  for (const turn of talk.turns) {
    if (turn.status === "running") Object.assign(turn, { status: "failed", note: LOST });
  }
  showTalk();
  showTalks();
}

/** Hand the open conversation to the reader as a file. */
function saveAs(form) {
  const { system } = chosen, turns = talk.turns.map(turn => ({ ...turn, answer: textOf(turn, "content") }));
  const alone = turn => Object.entries(turn.alone ?? {}).map(([name, { text }]) => `### ${name} alone\n\n${text}`);
  const parts = [...(system ? [`## System\n\n${system}`] : []), ...turns.flatMap(turn => [`## Question\n\n${turn.question}`, `## Answer (${turn.asked})\n\n${turn.answer}`, ...alone(turn)])];
  const text = form === "md" ? `${parts.join("\n\n")}\n` : JSON.stringify({ system, turns }, null, 2);
  const link = make("a", { href: URL.createObjectURL(new Blob([text])), download: `conversation.${form}` });
  link.click();
  URL.revokeObjectURL(link.href);
}

/** Stop what runs in the open conversation, and keep it. */
function leaveTalk() {
  leaveEdit();
  running?.abort();
  running = null;
  for (const turn of talk.turns) {
    if (turn.status === "running") Object.assign(turn, { status: "stopped", note: STOPPED });
  }
  if (talk.isChanged) keep(talk);
  closeRound();
  showRunning();
}

function startAnew() {
  leaveTalk();
  talk = newTalk();
  showTalk();
  showTalks();
  save();
  find("text").focus();
}

/** Delete conversations for good. */
function forget(ids) {
  const isOpen = ids.includes(talk.id);
  if (isOpen) talk.isChanged = false;  // else leaving it would keep it again
  for (const id of ids) kept.remove(TITLE + id, TALK + id);
  find("full").hidden = true;
  if (isOpen) startAnew();
  showTalks();
}

/** Ask whether to delete conversations, and do it. */
function askToForget(question, ids) {
  const dialog = find("sure");
  find("sure-question").textContent = question;
  dialog.returnValue = "";
  dialog.addEventListener("close", () => {
    if (dialog.returnValue !== "delete") return;
    forget(ids());
    (find("talks").hidden ? find("text") : find("talks-close")).focus();
  }, { once: true });
  dialog.showModal();
}

function showTalks() {
  const items = keptTalks(), format = new Intl.DateTimeFormat(navigator.languages, { dateStyle: "medium", timeStyle: "short" });
  find("talks-list").replaceChildren(...items.map(({ id, title, time }) => make("li", {},
    make("button", { type: "button", class: "talk", "data-id": id, ...(id === talk.id && { "aria-current": "true" }) },
      make("span", { dir: "auto" }, title), make("span", { class: "quiet" }, format.format(time))),
    make("button", { type: "button", class: "forget", "data-id": id, "aria-label": `Delete ${title}`, title: "Delete" }, "✕"))));
  find("none").hidden = items.length > 0;
  find("save").hidden = !talk.turns.length;
  find("forget-all").hidden = items.length === 0;
}

/** Show the list of conversations, or hide it. */
function toggleTalks(shown) {
  find("talks").hidden = !shown;
  find("list").setAttribute("aria-expanded", String(shown));
  if (shown) showTalks();
  (shown ? find("talks-list").querySelector('[aria-current="true"]') ?? find("talks-close") : find("list")).focus();
}

/** Follow what another tab has changed. */
function followOtherTabs({ key: name, storageArea }) {
  if (storageArea !== localStorage) return;
  if (talk.isKept && !kept.names(TITLE).includes(talk.id)) forget([talk.id]);
  else if (name === kept.full(TALK + talk.id) && !running) {
    leaveEdit();
    talk.turns = kept.get(TALK + talk.id, { turns: [] }).turns;
    closeRound();
    showTalk();
  }
  showTalks();
}
