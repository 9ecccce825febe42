// ---- Asking ----

/** Return the messages of a request: the system prompt, all questions that have an answer, and the new one. */
function messagesFor(turn) {
  const messages = chosen.system.trim() ? [{ role: "system", content: chosen.system }] : [];
  for (const each of talk.turns.slice(0, talk.turns.indexOf(turn))) {
    const content = textOf(each, "content");
    if (content) messages.push({ role: "user", content: each.question }, { role: "assistant", content });
  }
  return [...messages, { role: "user", content: turn.question }];
}

/** Return a request for an answer of one model: a member, or the ensemble with its own options. */
function bodyFor(turn, model = chosen.model, begun = "") {
  const all = membersOf(model), use = inUse(), isOfAdafuse = usesAdafuse();
  const own = all.length > 1 && {
    ...(use.length < all.length && { use }),
    ...(chosen.strategy && use.length > 1 && { strategy: chosen.strategy }),
    ...(isOfAdafuse && chosen.branches && { branching_factor: Number(chosen.branches) }),
    ...(isOfAdafuse && chosen.words && { max_words: Number(chosen.words) }),
  };
  return {
    model,
    messages: [...messagesFor(turn), ...(begun ? [{ role: "assistant", content: begun }] : [])],
    ...(begun && { continue_final_message: true }),
    stream: true,
    stream_options: { include_usage: true },
    ...(chosen.tokens && { max_tokens: Number(chosen.tokens) }),
    ...(chosen.temperature && { temperature: Number(chosen.temperature) }),
    ...(chosen.seed && { seed: Number(chosen.seed) }),
    ...(chosen["stop-at"] && { stop: [chosen["stop-at"]] }),
    adafuse: { rounds: true, ...own },
  };
}

const request = (body, signal) => ({ method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });

/** Ask the server, and show the answer while it grows. An answer that has begun goes on. */
async function ask(turn) {
  const view = views.get(turn) ?? showTurn(turn), mine = talk;
  const { signal } = running = new AbortController();
  view.root.setAttribute("aria-busy", "true");
  const note = text => {
    turn.note = text;
    showFoot(view);
    follow();
  };
  showRunning();
  views.forEach(showFoot);
  follow(true);
  try {
    if (!models.length) {
      note("The server is not ready. Your message is sent as soon as it is.");
      await Promise.race([connected(), aborted(signal)]);
      if (!models.length) throw new Problem("The server needs an API key.");
    }
    Object.assign(turn, { asked: describe(), members: inUse(), strategy: modelOf(chosen.model)?.strategy });
    const response = await insist("v1/chat/completions", request(bodyFor(turn, chosen.model, textOf(turn, "content")), signal), problem => note(`${problem.message} Your message is sent as soon as the server is ready.`));
    if (turn.note) note("");
    await readChunks(response, chunk => {
      take(view, chunk);
      showAnswerSoon(view);
      mine.isChanged = true;
      if (performance.now() > nextSave) save();
    });
    turn.status = "done";
    if (!textOf(turn, "content")) turn.note = "The members wrote no answer.";
  } catch (error) {
    turn.status = error.name === "AbortError" ? "stopped" : "failed";
    turn.note = turn.status === "stopped" ? STOPPED : explain(error);
    Object.assign(turn, { tooLong: error.tooLong ?? false, detail: error.detail ?? "" });
  }
  if (!mine.turns.includes(turn) || mine !== talk) return;  // the reader has left the conversation
  running = null;
  view.root.removeAttribute("aria-busy");
  mine.isChanged = true;
  showAnswer(view, true);
  showRunning();
  views.forEach(showFoot);
  follow();
  save();
}

function explain(error) {
  if (error instanceof Problem) return error.message;
  console.error(error);
  return "The page failed. Reload it.";
}

function send(question) {
  const turn = { question, time: Date.now(), parts: [], rounds: [], asked: null, status: "running", note: "", detail: "", tooLong: false, ending: null, seed: null, tokens: null, warnings: [] };
  talk.turns.push(turn);
  talk.isChanged = true;
  ask(turn);
}

/** Let an answer go on where a limit or the reader ended it. */
function goOn(turn) {
  if (running) return;
  const view = views.get(turn);
  if (!turn.rounds.length) for (const part of turn.parts) part.round = null;  // there was no room for them
  view.places = new Places(turn.rounds.length);
  view.written = turn.tokens ?? 0;
  Object.assign(turn, { status: "running", note: "", ending: null });
  ask(turn);
}

/** Ask each member alone what the ensemble was asked, and show its answer beside the ensemble's. */
async function askAlone(turn) {
  if (running) return;
  const view = views.get(turn), mine = talk, { signal } = running = new AbortController();
  turn.alone = Object.fromEntries(turn.members.map(name => [name, { text: "", note: "" }]));
  showRunning();
  views.forEach(showFoot);
  await Promise.all(turn.members.map(async name => {
    const own = turn.alone[name];
    try {
      const response = await insist("v1/chat/completions", request(bodyFor(turn, name), signal), () => {});
      await readChunks(response, chunk => {
        if (chunk.error) throw new Problem(sentence(chunk.error.message));
        for (const choice of chunk.choices ?? []) own.text += choice.delta?.content ?? "";
        own.text = own.text.trimStart();
        if (chunk.adafuse?.cut_by) own.note = `This answer was ended by ${chunk.adafuse.cut_by}.`;
        showAlone(view);
        follow();
      });
    } catch (error) {
      own.note = error.name === "AbortError" ? STOPPED : explain(error);
    }
  }));
  if (!mine.turns.includes(turn) || mine !== talk) return;
  running = null;
  talk.isChanged = true;
  showAlone(view);
  showRunning();
  views.forEach(showFoot);
  save();
}

/** Remove a question with its answer, and all that follow. */
function withdraw(turn) {
  closeRound();
  for (const each of talk.turns.splice(talk.turns.indexOf(turn))) {
    views.get(each).root.remove();
    views.delete(each);
  }
  talk.isChanged = true;
}

/** Let the reader change a question. Sending it replaces the question and all that follows. */
function edit(turn) {
  if (running) return;
  leaveEdit();
  editing = turn;
  for (const each of talk.turns.slice(talk.turns.indexOf(turn))) views.get(each).root.classList.add("replaced");
  find("text").value = turn.question;
  fit();
  find("text").focus();
}

function leaveEdit() {
  if (editing) find("text").value = "";
  editing = null;
  views.forEach(view => view.root.classList.remove("replaced"));
  fit();
}

function sendAgain(turn) {
  if (running) return;
  withdraw(turn);
  send(turn.question);
  find("text").focus();
}

/** Take the last question back into the text field, in front of what the reader wrote since. */
function takeBack(turn) {
  if (running) return;
  withdraw(turn);
  showWelcome();
  views.forEach(showFoot);
  find("text").value = [turn.question, find("text").value].filter(Boolean).join("\n");
  fit();
  save();
  find("text").focus();
}

function askAnew(turn) {
  startAnew();
  send(turn.question);
}

function submit() {
  const text = find("text"), question = text.value.trim();
  if (running || !question || !settingsValid()) return;
  if (talk.turns.includes(editing)) withdraw(editing);
  leaveEdit();
  text.value = "";
  fit();
  send(question);
  save();
  text.focus();
}

function showRunning() {
  if (document.activeElement === find("stop") && !running) find("text").focus();
  find("send").hidden = Boolean(running);
  find("stop").hidden = !running;
}

