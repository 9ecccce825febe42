
// ---- Markdown ----

// The library only reads Markdown. The elements are made here, so text of a model never becomes HTML.
// Entities stay apart from text, and indented text is no code: models write fences.
const markdown = markdownit({ html: false }).disable(["text_join", "code"]);
markdown.validateLink = address => /^(https?:\/\/|mailto:)/i.test(address);

const TAGS = {
  paragraph: "p", blockquote: "blockquote", bullet_list: "ul", ordered_list: "ol", list_item: "li",
  table: "table", thead: "thead", tbody: "tbody", tr: "tr", th: "th", td: "td", em: "em", strong: "strong", s: "s",
};

/** Split Markdown into its outermost blocks, each with its source, its place there, and its tokens. */
function blocksOf(source) {
  const lines = [0];
  for (let end = source.indexOf("\n"); end >= 0; end = source.indexOf("\n", end + 1)) lines.push(end + 1);
  const blocks = [], startOf = line => lines[line] ?? source.length;
  let depth = 0, tokens = [];
  for (const token of markdown.parse(source, {})) {
    tokens.push(token);
    depth += token.nesting;
    if (depth) continue;
    const [start, end] = tokens[0].map.map(startOf);
    const lineAt = line => startOf(line) - start;
    blocks.push({ source: source.slice(start, end), start, tokens, lineAt });
    tokens = [];
  }
  return blocks;
}

/** Return text without Markdown as a block. */
function plainBlock(source) {
  const mark = (type, nesting) => ({ type, nesting, attrGet: () => null });
  const tokens = [mark("paragraph_open", 1), { type: "text", content: source, nesting: 0 }, mark("paragraph_close", -1)];
  return { source, start: 0, tokens, lineAt: () => 0 };
}

/** Makes the elements of a block. */
class BlockMaker {
  /** `show` adds a text to an element. It gets the text's place in the source, and whether the source has it unchanged. */
  constructor(block, show) {
    this.block = block;
    this.show = show;
    this.at = 0;  // the place in the block's source that follows the text so far
    this.parents = [document.createDocumentFragment()];
  }

  element() {
    this.block.tokens.forEach(token => this.add(token));
    return this.parents[0].firstChild ?? make("p");
  }

  add(token) {
    if (token.map) this.at = Math.max(this.at, this.block.lineAt(token.map[0]));
    const kind = token.type.replace(/_(open|close)$/, "");
    if (token.nesting > 0) this.enter(this.elementOf(kind, token));
    else if (token.nesting < 0) this.leave(kind);
    else if (kind === "inline") token.children.forEach(child => this.add(child));
    else if (kind === "softbreak" || kind === "hardbreak") this.write("\n");
    else if (kind === "text_special") this.write(token.content, token.markup);
    else if (kind === "code_inline") this.within(make("code", { dir: "ltr" }), token.content);
    else if (kind === "image") this.within(this.link(token.attrGet("src"), "Image: "), token.content || token.attrGet("src"), "link");
    else if (kind === "fence") this.code(token);
    else if (kind === "hr") this.parents.at(-1).append(make("hr"));
    else this.write(token.content);  // text
  }

  elementOf(kind, token) {
    if (token.hidden) return null;  // a paragraph of a list without blank lines
    if (kind === "link") return this.link(token.attrGet("href"));
    if (kind === "heading") return make(`h${Math.min(6, Number(token.tag[1]) + 2)}`);  // below those of the page
    const element = make(TAGS[kind]), start = token.attrGet("start"), side = /text-align:(\w+)/.exec(token.attrGet("style"));
    if (start !== null) element.start = start;
    if (side) element.style.textAlign = side[1];
    return element;
  }

  link(href, ...content) {
    return make("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...content);
  }

  enter(element) {
    const parent = this.parents.at(-1);
    if (element) parent.append(element.tagName === "TABLE" ? make("div", { class: "table" }, element) : element);
    this.parents.push(element ?? parent);
  }

  leave(kind) {
    this.parents.pop();
    if (kind === "link") this.skipAddress();
  }

  /** Write a text into an element of its own. */
  within(element, text, kind) {
    this.enter(element);
    this.write(text);
    this.leave(kind);
  }

  code(token) {
    const [language] = token.info.trim().split(/\s+/), code = make("code");
    const bar = make("div", { class: "bar" }, make("span", { class: "quiet" }, language), make("button", { type: "button", class: "copy" }, "Copy"));
    this.parents.at(-1).append(make("div", { class: "code", dir: "ltr" }, bar, make("pre", {}, code)));
    this.at = this.block.lineAt(token.map[0] + 1);
    this.parents.push(code);
    this.write(token.content.replace(/\n$/, ""));
    this.parents.pop();
  }

  /** Go past the address of a link or an image in the source. */
  skipAddress() {
    const address = /\]\((?:\\.|[^()\\]|\([^()]*\))*\)/y;
    address.lastIndex = this.at;
    if (address.test(this.block.source)) this.at = address.lastIndex;
  }

  /** Write a text, and find out where it stands in the source. */
  write(text, source = text) {
    const found = this.block.source.indexOf(source, this.at);
    if (found >= 0) {
      this.at = found + source.length;
      this.put(text, found, source === text);
    } else {  // the source has more characters in between, such as the marks of a quotation
      for (const character of text) {
        const place = this.block.source.indexOf(character, this.at);
        if (place >= 0) this.at = place + 1;
        this.put(character, Math.max(0, this.at - 1));
      }
    }
  }

  put(text, place, isSource = true) {
    if (text) this.show(this.parents.at(-1), text, this.block.start + place, isSource);
  }
}

/** Change an element into another one. Equal parts stay, because they may be selected or have the focus. */
function morph(old, wanted) {
  if (old.nodeName !== wanted.nodeName) return old.replaceWith(wanted);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== wanted.data) old.data = wanted.data;
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (name !== "tabindex" && !wanted.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const { name, value } of wanted.attributes) {
    if (name !== "tabindex" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  const children = [...old.childNodes], others = [...wanted.childNodes];  // some of which leave `wanted` below
  others.forEach((child, at) => children[at] ? morph(children[at], child) : old.append(child));
  children.slice(others.length).forEach(child => child.remove());
}
