// ---- A round ----

function openRound(turn, place) {
  markOpen(false);
  open = { turn, place };
  markOpen(true);
  find("round-title").textContent = `Round ${place}`;
  find("round-content").replaceChildren(...contentOf(turn, turn.rounds[place]));
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

/** Return what the scores of a round mean. */
function meaningOf(turn, probabilities) {
  const name = turn.strategy === "single" ? "adafuse" : turn.strategy;
  return LOOKS.meanings[probabilities ? "choices" : name] ?? LOOKS.meanings.other;
}

function contentOf(turn, round) {
  const { probabilities } = round, look = lookOfRound(round);
  const who = make("p", {}, make("span", { class: "key", look }, look.by), ` · ${Math.round(1000 * round.elapsed)} ms`);
  if (round.forced) {
    return [
      who,
      make("ol", {}, make("li", { class: "candidate won" }, make("code", { dir: "auto" }, quoted(round.candidates[0])))),
      make("p", { class: "quiet" }, "The grammar allows no other text here, so no member proposed or scored it."),
    ];
  }
  const most = probabilities ? FULL_TEXT : FULL_SPAN;
  const order = round.candidates.map((_, index) => index).sort((left, right) => scoreOf(round, left) - scoreOf(round, right) || left - right);
  return [
    who,
    make("h3", {}, count(round.candidates.length, "candidate")),
    make("ol", {}, ...order.map(index => candidateOf(turn, round, index, most, probabilities))),
    ...marginsOf(round),
    make("h3", {}, "What this means"),
    termsOf(meaningOf(turn, probabilities), probabilities),
  ];
}

const scoreOf = (round, index) => round.candidates[index].score ?? Infinity;
// The values in nats at which the bar of a member is full: per token of a span, and for a whole text.
const FULL_SPAN = 5, FULL_TEXT = 50;

const digits = value => value === null || value === undefined ? "-" : Math.max(0, value).toFixed(3);

/** Return a span in quotes. Mark it if the response ends after it. */
function quoted(candidate) {
  const text = candidate.text ? JSON.stringify(candidate.text) : "";
  return candidate.ends ? `${text} (end)`.trim() : text;
}

function proposedBy({ proposers }, members) {
  if (members.length > 1 && members.every(name => proposers.includes(name))) return "proposed by all members";
  return `proposed by ${proposers.map(lookOf).map(named).join(", ") || "no member"}`;
}

function candidateOf(turn, round, index, most, probabilities) {
  const candidate = round.candidates[index], won = index === round.winner;
  const asked = new Set([...Object.keys(round.margins), ...candidate.proposers, ...Object.keys(candidate.nll)]);
  const members = turn.members ?? [...asked];
  const rows = members.map(lookOf).flatMap(look => {
    const value = candidate.nll[look.name], bar = make("i", { look });
    bar.style.width = `${Math.min(100, 100 * Math.max(0, value ?? 0) / most).toFixed(1)}%`;
    return [
      make("dt", {}, make("span", { class: "mark", look }, look.mark), ` ${look.name}`),
      make("dd", { class: "track", "aria-hidden": "true" }, ...(value === undefined ? [] : [bar])),
      make("dd", { class: "value" }, asked.has(look.name) ? digits(value) : "not asked"),
    ];
  });
  const origin = probabilities ? `probability ${(100 * probabilities[index]).toFixed(1)} %` : proposedBy(candidate, members);
  return make("li", { class: won ? "candidate won" : "candidate" },
    make("code", { dir: "auto" }, quoted(candidate)),
    make("div", { class: "quiet" }, ...(won ? [make("strong", {}, "✓ committed"), " · "] : []), origin),
    make("dl", { class: "scores" }, ...rows,
      make("dt", { class: "fused" }, meaningOf(turn, probabilities).symbol), make("dd", { class: "fused value" }, digits(candidate.score))));
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

function termsOf({ symbol, number, score }, probabilities) {
  const terms = [
    ...(probabilities ? [] : [["Candidate", "A span that one or more members proposed in this round."]]),
    ["The number of each member", `${number} Lower is better. The bar is full at ${probabilities ? FULL_TEXT : FULL_SPAN} nats.`],
    [symbol, `${score} The candidate with the lowest ${symbol} wins.`],
    ...(probabilities ? [] : [["Margin Δ", "How sure a member is at the start of a word: the probability of its most likely token minus that of the second."]]),
  ];
  return make("dl", { class: "terms" }, ...terms.flatMap(([term, words]) => [make("dt", {}, term), make("dd", {}, words)]));
}

