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

function bodyFor(turn) {
  const ensemble = membersOf(chosen.model).length > 1, use = inUse();
  return {
    model: chosen.model,
    messages: messagesFor(turn),
    stream: true,
    stream_options: { include_usage: true },
    ...(chosen.tokens && { max_tokens: Number(chosen.tokens) }),
    ...(chosen.temperature && { temperature: Number(chosen.temperature) }),
    adafuse: { rounds: true, ...(ensemble && use.length < membersOf(chosen.model).length && { use }) },
  };
}

/** Ask the server, and show the answer while it grows. */
async function ask(turn) {
  const view = showTurn(turn), mine = talk;
  const { signal } = running = new AbortController();
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
    const options = { method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(bodyFor(turn)) };
    const response = await insist("v1/chat/completions", options, problem => note(`${problem.message} Your message is sent as soon as the server is ready.`));
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
  const turn = { question, time: Date.now(), parts: [], rounds: [], asked: null, status: "running", note: "", detail: "", tooLong: false, ending: null, seed: null, tokens: null };
  talk.turns.push(turn);
  talk.isChanged = true;
  ask(turn);
}

/** Remove the last question and its answer. */
function withdraw(turn) {
  closeRound();
  views.get(turn).root.remove();
  views.delete(turn);
  talk.turns.pop();
  talk.isChanged = true;
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

