"use strict";

const find = id => document.getElementById(id);
const LOOKS = JSON.parse(find("looks").textContent);
const NEAR = 60;  // pixels from the end at which the conversation follows the text

/** Make an element. Strings among its content become text, never HTML. */
function make(tag, attributes = {}, ...content) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "look") paint(element, value);
    else if (name === "click") element.addEventListener("click", value);
    else element.setAttribute(name, value);
  }
  element.append(...content);
  return element;
}

/** Return methods that read and write JSON in a storage of the browser, which may be switched off. */
function storeIn(storage) {
  const full = name => `adafuse.${name}`;
  return {
    full,
    get(name, otherwise) {
      try {
        return JSON.parse(storage().getItem(full(name))) ?? otherwise;
      } catch {
        return otherwise;
      }
    },
    /** Store a value. Return whether there was room for it. */
    set(name, value) {
      try {
        storage().setItem(full(name), JSON.stringify(value));
        return true;
      } catch {
        return false;
      }
    },
    remove(...names) {
      try {
        for (const name of names) storage().removeItem(full(name));
      } catch { /* there is nothing */ }
    },
    /** Return all names that begin with a text, without this text. */
    names(start) {
      try {
        return Object.keys(storage()).filter(name => name.startsWith(full(start))).map(name => name.slice(full(start).length));
      } catch {
        return [];
      }
    },
  };
}

const stored = storeIn(() => sessionStorage);  // until the tab is closed
const kept = storeIn(() => localStorage);  // until the reader deletes it

// ---- Members, and who wrote a span ----

const known = stored.get("known", []);  // names of members; their places give them colors and marks

/** Return the name, mark, color and line of a member. */
function lookOf(name) {
  if (!known.includes(name)) known.push(name);
  const place = known.indexOf(name), turn = Math.floor(place / LOOKS.marks.length);
  return {
    name,
    place,
    mark: LOOKS.marks[place % LOOKS.marks.length] + (turn ? turn + 1 : ""),
    color: `var(--color-${place % LOOKS.colors})`,
    stroke: LOOKS.strokes[place % LOOKS.strokes.length],
  };
}

function paint(element, look) {
  if (look.color) element.style.setProperty("--member", look.color);
  if (look.stroke) element.style.setProperty("--stroke", look.stroke);
}

/** Return the looks of a round's span: that of its shared kind, or those of its members in order. */
function looksOf({ shared, owner, candidates, winner }) {
  if (shared) return [LOOKS.shared[shared]];
  const { proposers } = candidates[winner];
  return (proposers.length || owner === null ? proposers : [owner]).map(lookOf).sort(inOrder);
}

/** Order looks as the legend does: members first. */
const inOrder = (left, right) => (left.place ?? known.length) - (right.place ?? known.length);

/** Return a mark and the name that it stands for, on one line. */
const named = look => `${look.mark}\u00a0${look.name}`;

/** Return how the span of a round looks, and who proposed it in words. */
function lookOfRound(round) {
  const looks = looksOf(round);
  if (!looks.length) return { mark: "", stroke: "solid", by: "no member" };
  return {
    ...looks.find(look => look.name === round.owner) ?? looks[0],
    mark: looks.map(look => look.mark).join(""),
    by: looks.map(named).join(", "),
  };
}

