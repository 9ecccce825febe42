// ---- An answer while it grows ----

/** Finds the rounds that committed a shown text. Markers of reasoning, for example, are not shown. */
class Places {
  constructor(first = 0) {
    this.first = first;  // the number of the first round
    this.text = "";
    this.ends = [];
    this.at = 0;
    this.place = 0;  // of the round at `at`
  }

  add(round) {
    this.text += round.text;
    this.ends.push(this.text.length);
  }

  /** Split the next shown text into pieces, each with the place of its round. */
  split(shown) {
    const pieces = [];
    for (let index = 0; index < shown.length; index++) {
      for (const marker of ["<think>", "</think>"]) {
        if (this.text.startsWith(marker, this.at) && !shown.startsWith(marker, index)) this.at += marker.length;
      }
      const found = this.text.indexOf(shown[index], this.at);
      if (found >= 0) this.at = found + 1;
      while (this.ends[this.place] < Math.max(1, this.at)) this.place++;
      const last = pieces.at(-1), round = this.place < this.ends.length ? this.first + this.place : null;
      if (last && last.round === round) last.text += shown[index];
      else pieces.push({ round, text: shown[index] });
    }
    return pieces;
  }
}

/** Take what one chunk of the stream adds to an answer. */
function take(view, chunk) {
  if (chunk.error) throw new Problem(`The answer failed: ${sentence(chunk.error.message)}`);
  const { turn, places } = view, extra = chunk.adafuse ?? {};
  if (extra.round) {
    turn.rounds.push(extra.round);
    places.add(extra.round);
    if (open?.turn === turn) showSteps();
  }
  if (chunk.usage) turn.tokens = (view.written ?? 0) + chunk.usage.completion_tokens;
  if (extra.warnings) turn.warnings = extra.warnings;
  for (const choice of chunk.choices ?? []) {
    for (const [kind, text] of [["reasoning", choice.delta?.reasoning_content], ["content", choice.delta?.content]]) {
      const begun = turn.parts.at(-1)?.kind === kind || turn.parts.some(part => part.kind === kind);
      const shown = begun ? text : text?.trimStart();
      for (const piece of shown ? places.split(shown) : []) addPart(view, { kind, ...piece });
    }
    if (choice.finish_reason) {
      turn.ending = extra.finish_reason ?? choice.finish_reason;
      turn.cutBy = extra.cut_by;
      turn.seed = extra.seed ?? null;
      turn.confidence = extra.confidence ?? null;
      turn.strategy = extra.strategy ?? turn.strategy;
    }
  }
}

/** Add text to an answer: to its last part if both are of the same round, and otherwise as a new part. */
function addPart({ turn }, part) {
  const last = turn.parts.at(-1);
  if (last && last.kind === part.kind && last.round === part.round) last.text += part.text;
  else turn.parts.push(part);
}

const textOf = (turn, kind) => turn.parts.filter(part => part.kind === kind).map(part => part.text).join("");

// ---- The conversation on the screen ----

const views = new Map();  // by turn
const PAUSE = 100;  // milliseconds between two views of an answer that grows
const PAUSES = 4;  // at least so many times what a view takes

/** Show a question with its answer, as far as there is one. */
function showTurn(turn) {
  const folded = make("details", { class: "reasoning", hidden: "" }, make("summary", {}, "Reasoning"), make("div", { class: "answer", dir: "auto" }));
  const answer = make("div", { class: "answer", dir: "auto", role: "group", "aria-label": "Answer" });
  const pencil = make("button", { type: "button", "aria-label": "Edit this question", title: "Edit", click: () => edit(turn) }, "✎");
  const alone = make("div", { class: "alone" }), foot = make("div");
  const view = { turn, folded, answer, alone, foot, places: new Places(), shown: {}, timer: null, wait: 0, box: kind => kind === "reasoning" ? folded.lastChild : answer };
  view.root = make("article", { "aria-label": "Question and answer" }, make("div", { class: "asked" }, pencil, make("div", { class: "question", dir: "auto" }, turn.question)), folded, answer, alone, foot);
  views.set(turn, view);
  showAnswer(view);
  showAlone(view);
  find("log").querySelector(".welcome")?.remove();
  find("log").append(view.root);
  return view;
}

/** Show an answer soon. The longer this takes, the less often it happens. */
function showAnswerSoon(view) {
  view.timer ??= setTimeout(() => {
    const began = performance.now();
    showAnswer(view);
    if (views.get(view.turn) === view) follow();
    view.wait = PAUSES * (performance.now() - began);
  }, Math.max(PAUSE, view.wait));
}

/** Show the text of an answer so far. With `anew`, show unchanged blocks again, too. */
function showAnswer(view, anew = false) {
  clearTimeout(view.timer);
  view.timer = null;
  if (anew) view.shown = {};
  for (const kind of ["reasoning", "content"]) showText(view, kind);
  if (open?.turn === view.turn) markOpen(true);
}

/** Show the reasoning or the content of an answer: its blocks, with the texts of its parts. */
function showText(view, kind) {
  const parts = view.turn.parts.filter(part => part.kind === kind), box = view.box(kind), ends = [];
  const source = parts.map(part => part.text.replace(/\r\n?/g, "\n")).reduce((text, part) => {
    ends.push(text.length + part.length);
    return text + part;
  }, "");
  const blocks = chosen.plain ? [plainBlock(source)] : blocksOf(source), shown = view.shown[kind] ??= [];
  let at = 0, marked = -1;  // the part of a place in the source, and the last part with a mark
  const show = (parent, text, place, isSource) => {
    for (let from = 0; from < text.length;) {
      while (at < ends.length - 1 && ends[at] <= place + (isSource ? from : 0)) at++;
      const to = isSource && at < ends.length - 1 ? ends[at] - place : text.length;
      const piece = text.slice(from, to), [newlines] = /^(\s*\n)?/.exec(piece);
      if (newlines) parent.append(newlines);  // a mark stands on the line of its text
      if (piece !== newlines) {
        showPiece(view.turn, parent, parts[at], piece.slice(newlines.length), at > marked);
        marked = Math.max(marked, at);
      }
      from = to;
    }
  };
  blocks.forEach((block, number) => {
    const { source, start } = shown[number] ?? {};
    if (source !== block.source || start !== block.start) {
      const element = new BlockMaker(block, show).element(), old = box.childNodes[number];
      if (old) morph(old, element);
      else box.append(element);
      shown[number] = { source: block.source, start: block.start, marked };
    } else ({ marked } = shown[number]);
  });
  [...box.childNodes].slice(blocks.length).forEach(element => element.remove());
  shown.length = blocks.length;
  if (kind === "reasoning" && parts.length) view.folded.hidden = false;
  if (!box.querySelector('.span[tabindex="0"]')) box.querySelector('.span[role="button"]')?.setAttribute("tabindex", "0");
}

const looksOfRounds = new WeakMap();

/** Add text of a part to an element: to its last piece if that is of the same part, else as a new one. */
function showPiece(turn, parent, part, text, isFirst) {
  const round = turn.rounds[part.round], last = parent.lastChild;
  if (!round) return parent.append(make("span", {}, text));
  if (last?.dataset?.round === String(part.round)) {
    last.textContent += text;
    return;
  }
  if (!looksOfRounds.has(round)) looksOfRounds.set(round, lookOfRound(round));
  const look = looksOfRounds.get(round), isLink = parent.closest?.("a");  // a click follows it
  if (round.shared) showLegend(round.shared);
  parent.append(make("span", {
    class: "span", look, "data-mark": isFirst ? look.mark : "", "data-round": part.round, title: `Round ${part.round}: ${look.by}`,
    ...(isLink ? {} : { role: "button", tabindex: "-1" }),
  }, text));
}

/** Show what each member answered alone. */
function showAlone({ turn, alone }) {
  alone.replaceChildren(...Object.entries(turn.alone ?? {}).map(([name, { text, note }]) => {
    const look = lookOf(name);
    return make("section", { look, "aria-label": `${name} alone` }, make("h3", {}, make("span", { class: "key", look }, `${named(look)} alone`)),
      make("div", { class: "text", dir: "auto" }, text), ...(note ? [make("div", { class: "note" }, note)] : []));
  }));
}

/** Show below an answer how it goes on or ended, and what the reader can do. */
function showFoot(view) {
  const { turn, foot } = view, last = talk.turns.at(-1) === turn;
  const parts = [];
  if (turn.status === "running" && !turn.note) {
    const shapes = [0, 1, 2].map(place => make("span", { class: `mark c${place}`, "aria-hidden": "true" }, LOOKS.marks[place]));
    parts.push(make("div", { class: "waiting" }, ...shapes, make("span", { class: "reading" }, "The members are reading."), make("span", { class: "hidden" }, "The members are writing.")));
  }
  if (turn.note) {
    const detail = turn.detail ? [make("div", { class: "quiet" }, turn.detail)] : [];
    parts.push(make("div", { class: "note", dir: "auto" }, turn.note, ...detail));
  }
  for (const warning of turn.warnings ?? []) parts.push(make("div", { class: "note quiet" }, sentence(warning)));
  if (turn.status !== "running") {
    const copy = textOf(turn, "content") ? [make("button", { type: "button", class: "copy" }, "Copy")] : [];
    parts.push(make("div", { class: "foot" }, ...factsOf(turn), make("span", { class: "actions" }, ...copy, ...(last && !running ? actionsFor(turn) : []))));
  }
  foot.replaceChildren(...parts);
}

/** Return the buttons below the last answer, the best one first. */
function actionsFor(turn) {
  const button = (text, click, look = {}) => make("button", { type: "button", click: () => click(turn), ...look }, text);
  const isCut = turn.ending === "length" || turn.status !== "done";
  const more = isCut && textOf(turn, "content") && !turn.tooLong ? [button("Continue", goOn, { class: "main" })] : [];
  const alone = turn.members?.length > 1 && !turn.alone ? [button("Each member alone", askAlone)] : [];
  if (turn.status === "done") return [...more, ...alone, button("Answer again", sendAgain)];
  if (!turn.tooLong) return [...more, button("Send again", sendAgain)];
  const actions = [["Change the message", takeBack], ["Send again", sendAgain]];
  if (talk.turns.length > 1) actions.unshift(["Ask in a new conversation", askAnew]);
  return actions.map(([text, click], place) => button(text, click, place ? {} : { class: "main" }));
}

/** Count the spans of an answer by their marks. A span with several marks counts for each of them. */
function countMarks(turn) {
  const counts = new Map();
  for (const round of turn.parts.map(part => turn.rounds[part.round]).filter(Boolean)) {
    const looks = looksOf(round);
    for (const look of looks) {
      const entry = counts.get(look.name) ?? { look, spans: 0, joint: 0 };
      counts.set(look.name, { look, spans: entry.spans + 1, joint: entry.joint + (looks.length > 1) });
    }
  }
  return [...counts.values()].sort((left, right) => inOrder(left.look, right.look));
}

function showCount({ look, spans, joint }) {
  const also = joint ? ` (${joint} together with other members)` : "";
  const words = look.place === undefined ? `: ${look.name}` : ` by ${look.name}${also}`;
  return make("span", { title: count(spans, "span") + words },
    make("span", { class: "mark", look }, look.mark), ` ${spans}`,
    make("span", { class: "hidden" }, ` ${spans === 1 ? "span" : "spans"}${words}`));
}

/** Return what happened in an answer: its rounds and marks, its time and its ending. */
function factsOf(turn) {
  if (!turn.rounds.length) return [];
  const seconds = turn.rounds.reduce((sum, round) => sum + round.elapsed, 0);
  const facts = [...(turn.strategy ? [`strategy ${turn.strategy}`] : []), `${seconds.toFixed(2)} s`];
  if (turn.tokens) facts.push(count(turn.tokens, "token"), ...(seconds ? [`${(turn.tokens / seconds).toFixed(1)} tokens/s`] : []));
  if (turn.confidence != null) facts.push(`confidence ${(100 * turn.confidence).toFixed(1)} %`);
  if (turn.seed !== null) facts.push(`seed ${turn.seed}`);
  const ending = turn.cutBy ? `ended by ${turn.cutBy}` : LOOKS.endings[turn.ending] ?? turn.ending ?? "";
  facts.push(turn.status === "stopped" ? "stopped" : ending);
  return [make("span", {}, `${turn.asked}: ${count(turn.rounds.length, "round")}`), ...countMarks(turn).map(showCount), make("span", {}, facts.filter(Boolean).join(" · "))];
}

const count = (number, thing) => `${number} ${thing}${number === 1 ? "" : "s"}`;

function showWelcome() {
  find("log").querySelector(".welcome")?.remove();
  if (talk.turns.length) return;
  find("log").append(make("div", { class: "welcome" },
    make("h2", {}, "One answer, written by several models"),
    make("p", {}, "Every span of an answer has the color and the mark of the member that proposed it. Click a span to see what else was proposed, and the scores."),
    ...examples()));
}

const EXAMPLES = [
  ["Ask a question", "Why is the sky blue, and why is it red in the evening?"],
  ["Compare two things", "Compare a bicycle and a car for a way of five kilometers through a city, in a short table."],
  ["Summarize a text", "Summarize this text in one sentence:\n\n"],
];

/** Return buttons with first questions. The embedded members know only the passages in a question. */
function examples() {
  const { members, questions } = LOOKS.embedded, all = models.flatMap(model => model.adafuse?.members ?? []);
  if (!all.length) return [];
  const areEmbedded = all.every(name => members.includes(name));
  const buttons = (areEmbedded ? questions : EXAMPLES).map(([label, text]) => make("button", { type: "button", click: () => {
    find("text").value = text;
    fit();
    find("text").focus();
  } }, label));
  const note = "These are the three tiny members that come with the package. They answer from a text in your message and know nothing else.";
  return [...(areEmbedded ? [make("p", {}, note)] : []), make("p", { class: "examples" }, ...buttons)];
}

function showTalk() {
  views.clear();
  find("log").replaceChildren();
  showWelcome();
  for (const turn of talk.turns) showFoot(showTurn(turn));
  follow(true);
}

let following = true;  // whether the reader is at the end of the conversation

const isNearEnd = log => log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;

/** Scroll to the newest text, unless the reader has scrolled up or reads a round. */
function follow(always = false) {
  const log = find("log");
  following ||= always;
  if (always || (following && !open)) log.scrollTop = log.scrollHeight;
  find("newest").hidden = isNearEnd(log);
}

