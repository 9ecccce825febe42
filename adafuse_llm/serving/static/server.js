// ---- The server ----

const STOPPED = "You stopped this answer.";
const LOST = "The connection to the server was lost before the answer was complete.";

/** A failure in words for the conversation. */
class Problem extends Error {
  constructor(message, { status = 0, wait = null, tooLong = false, detail = "" } = {}) {
    super(message);
    Object.assign(this, { status, wait, tooLong, detail });
  }
}

async function call(path, options = {}) {
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server cannot be reached. Check that it runs.");
  }
  if (response.ok) return response;
  throw problemOf(response, await response.json().catch(() => null));
}

/** Return a text of the server with a period at its end. */
const sentence = text => /[.!?]$/.test(text) ? text : `${text}.`;

/** Return what is wrong, without the advice that follows it in a text of the server. */
function withoutAdvice(text) {
  const [first] = /^.*?[.!?](?=\s+\p{Lu}|$)/su.exec(text);
  return first[0].toUpperCase() + first.slice(1);
}

function problemOf(response, body) {
  const { status } = response, error = body?.error ?? {}, after = response.headers.get("Retry-After");
  const wait = /^\d+$/.test(after ?? "") ? Number(after) : null;
  const told = sentence(typeof error.message === "string" ? error.message : `it answered with status ${status}`);
  const tooLong = error.code === "context_length_exceeded";
  const words = () => {
    if (status === 429) return `The server is busy. Send the message again ${wait === null ? "later" : `in ${wait} s`}.`;
    if (status === 503) return `The server is not ready: ${told}`;
    if (tooLong && talk.turns.length > 1) return "This conversation is too long for the members. Start a new one, or send a shorter message.";
    if (tooLong) return "This message is too long for the members. Send a shorter one.";
    return status < 500 ? `The server refused the message: ${told}` : `The server failed: ${told}`;
  };
  return new Problem(words(), { status, wait, tooLong, detail: tooLong ? withoutAdvice(told) : "" });
}

const pause = seconds => new Promise(resolve => setTimeout(resolve, 1000 * seconds));

/** Return a promise that fails when a signal stops the request. */
const aborted = signal => new Promise((_, reject) => {
  if (signal?.aborted) reject(signal.reason);
  signal?.addEventListener("abort", () => reject(signal.reason));
});

/** Wait until the server says that it is ready. */
async function untilReady(wait, signal) {
  for (;;) {
    await Promise.race([pause(Math.min(wait ?? 1, 5)), aborted(signal)]);
    try {
      await call("ready", { signal });
      return;
    } catch (problem) {
      if (problem.status !== 503) throw problem;
    }
  }
}

/** Call the server, again if it gets a key or becomes ready. */
async function insist(path, options, say) {
  for (;;) {
    try {
      return await call(path, options);
    } catch (problem) {
      if (problem.status === 401) await askForKey();
      else if (problem.status === 503) {
        say(problem);
        await untilReady(problem.wait, options.signal);
      } else throw problem;
    }
  }
}

/** Return a function that reads a text in pieces and calls `use` with the data of every event. */
function eventReader(use) {
  let rest = "", data = [];
  return piece => {
    rest += piece;
    for (;;) {
      const end = rest.search(/[\r\n]/);
      if (end < 0 || (rest[end] === "\r" && end === rest.length - 1)) return;  // a line feed may follow
      const line = rest.slice(0, end);
      rest = rest.slice(end + (rest.startsWith("\r\n", end) ? 2 : 1));
      if (line === "") {
        if (data.length) use(data.join("\n"));
        data = [];
      } else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
    }
  };
}

/** Read the chunks of a stream. Fail if the stream ends before the answer does. */
async function readChunks(response, use) {
  let ended = false;
  const read = eventReader(data => {
    if (data === "[DONE]") ended = true;
    else if (!ended) use(parsed(data));
  });
  const lost = new Problem(LOST);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    while (!ended) {
      const { value, done } = await reader.read().catch(error => {
        throw error.name === "AbortError" ? error : lost;
      });
      if (done) throw lost;
      read(value);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Problem("The server sent something that this page cannot read.");
  }
}

