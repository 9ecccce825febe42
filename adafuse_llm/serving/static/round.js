// ---- A round ----

function openRound(turn, place) {
  markOpen(false);
  open = { turn, place };
  markOpen(true);
  find("round-title").textContent = `Round ${place}`;
  find("round-content").replaceChildren(...contentOf(turn.rounds[place]));
  find("round").hidden = false;
  find("round").scrollTop = 0;
  showSteps();
  spansOf(open)[0]?.scrollIntoView({ block: "nearest" });
}

/** Show whether there are rounds before and after the open one. */
function showSteps() {
  for (const [id, by] of [["previous", -1], ["next", 1]]) {
    find(id).setAttribute("aria-disabled", String(!open.turn.rounds[open.place + by]));
  }
}

function step(by) {
  if (open.turn.rounds[open.place + by]) openRound(open.turn, open.place + by);
}

function closeRound() {
  if (!open) return;
  const [span] = spansOf(open);
  markOpen(false);
  open = null;
  find("round").hidden = true;
  (span ?? find("text")).focus();
}

function spansOf({ turn, place }) {
  return [...(views.get(turn)?.root.querySelectorAll(`[data-round="${place}"]`) ?? [])];
}

function markOpen(isOpen) {
  for (const span of open ? spansOf(open) : []) span.classList.toggle("open", isOpen);
}

function contentOf(round) {
  const probabilities = probabilitiesOf(round), look = lookOfRound(round);
  const who = make("p", {}, make("span", { class: "key", look }, look.by), ` · ${Math.round(1000 * round.elapsed)} ms`);
  if (round.forced) {
    return [
      who,
      make("ol", {}, make("li", { class: "candidate won" }, make("code", { dir: "auto" }, quoted(round.candidates[0])))),
      make("p", { class: "quiet" }, "The grammar allows no other text here, or this text closes the response at the length limit. No member proposed or scored it."),
    ];
  }
  const most = probabilities ? FULL_TEXT : FULL_SPAN;
  const order = round.candidates.map((_, index) => index).sort((left, right) => scoreOf(round, left) - scoreOf(round, right) || left - right);
  return [
    who,
    make("h3", {}, count(round.candidates.length, "candidate")),
    make("ol", {}, ...order.map(index => candidateOf(round, index, most, probabilities))),
    ...marginsOf(round),
    make("h3", {}, "What this means"),
    termsOf(probabilities),
  ];
}

const scoreOf = (round, index) => round.candidates[index].score ?? Infinity;
// The number of a member, in nats, at which its bar is full: of a span per token, and of a whole text.
const FULL_SPAN = 5, FULL_TEXT = 50;

const digits = value => value === null || value === undefined ? "-" : Math.max(0, value).toFixed(3);

/** Return a span in quotes. Mark it if the response ends after it. */
function quoted(candidate) {
  const text = candidate.text ? JSON.stringify(candidate.text) : "";
  return candidate.stops ? `${text} (end)`.trim() : text;
}

function proposedBy({ proposers }, members) {
  if (members.length > 1 && members.every(name => proposers.includes(name))) return "proposed by all members";
  return `proposed by ${proposers.map(lookOf).map(named).join(", ") || "no member"}`;
}

function candidateOf(round, index, most, probabilities) {
  const candidate = round.candidates[index], won = index === round.winner;
  const members = [...new Set([...Object.keys(round.margins), ...Object.keys(candidate.nll)])];
  const rows = members.map(lookOf).flatMap(look => {
    const value = candidate.nll[look.name], bar = make("i", { look });
    bar.style.width = `${Math.min(100, 100 * Math.max(0, value ?? 0) / most).toFixed(1)}%`;
    return [
      make("dt", {}, make("span", { class: "mark", look }, look.mark), ` ${look.name}`),
      make("dd", { class: "track", "aria-hidden": "true" }, ...(value === undefined ? [] : [bar])),
      make("dd", { class: "value" }, digits(value)),
    ];
  });
  const origin = probabilities ? `probability ${(100 * probabilities[index]).toFixed(1)} %` : proposedBy(candidate, members);
  return make("li", { class: won ? "candidate won" : "candidate" },
    make("code", { dir: "auto" }, quoted(candidate)),
    make("div", { class: "quiet" }, ...(won ? [make("strong", {}, "✓ committed"), " · "] : []), origin),
    make("dl", { class: "scores" }, ...rows,
      make("dt", { class: "fused" }, "F"), make("dd", { class: "fused value" }, digits(candidate.score))));
}

function marginsOf(round) {
  const rows = Object.entries(round.margins).filter(([, values]) => values.length);
  if (!rows.length) return [];
  return [
    make("h3", {}, "Margin Δ, word by word"),
    make("dl", { class: "scores" }, ...rows.flatMap(([name, values]) => {
      const look = lookOf(name);
      return [
        make("dt", {}, make("span", { class: "mark", look }, look.mark), ` ${name}`), make("dd"),
        make("dd", { class: "value" }, values.map(value => value.toFixed(2)).join(", ")),
      ];
    })),
  ];
}

function termsOf(probabilities) {
  const terms = probabilities ? [
    ["The number of each member", `Negative log-likelihood of the whole text and the end of the response, in nats: how unlikely the member finds it. Lower is better. The bar is full at ${FULL_TEXT} nats.`],
    ["F", "The fused score: the weighted mean of the members' numbers. The text with the lowest F becomes the response."],
    ["Probability", "The softmax of −F over the given texts."],
  ] : [
    ["Candidate", "A span that one or more members proposed in this round."],
    ["The number of each member", `Negative log-likelihood per token, in nats: how unlikely the member finds the span. Lower is better. The bar is full at ${FULL_SPAN} nats.`],
    ["F", "The fused score: the weighted mean of the members' numbers. The span with the lowest F is committed."],
    ["Margin Δ", "How sure a member is at the start of a word: the probability of its most likely token minus that of the second."],
  ];
  return make("dl", { class: "terms" }, ...terms.flatMap(([term, words]) => [make("dt", {}, term), make("dd", {}, words)]));
}

