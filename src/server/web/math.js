/*
 * TeX in Markdown, as a marked extension: $$…$$ and \[…\] on lines of their own, $…$, \(…\) and the others in text.
 * Creates a placeholder, which render.js fills by KaTeX. "$5 and $6" is not a formula.
 */
const LONGEST = 4000; // maximum length of a formula; bounds the search for its end

const PAIRS = [
  ["$$", "$$", "display"],
  ["\\[", "\\]", "display"],
  ["\\(", "\\)", "inline"],
];

function between(src) {
  for (const [open, close, kind] of PAIRS) {
    if (!src.startsWith(open)) continue;
    const end = src.slice(open.length, LONGEST).indexOf(close);
    if (end <= 0) return null;
    return {
      raw: src.slice(0, open.length + end + close.length),
      tex: src.slice(open.length, open.length + end),
      kind,
    };
  }
  return null;
}

function dollars(src) {
  const m = /^\$(?![\s$])((?:\\[^\n]|[^$\\\n]){1,500}?)\$(?![\d$])/.exec(src);
  return m && !/\s$/.test(m[1]) ? { raw: m[0], tex: m[1], kind: "inline" } : null;
}

const escape = s => s.replace(/[&<>"']/g, c => "&#" + c.charCodeAt(0) + ";");
const renderer = t =>
  t.kind === "display"
    ? `<div data-math="display">${escape(t.tex)}</div>`
    : `<span data-math="${t.kind}">${escape(t.tex)}</span>`;

export const math = [
  {
    name: "mathBlock",
    level: "block",
    start: src => {
      const m = /(?:^|\n)(?=\$\$|\\\[)/.exec(src);
      return m ? m.index + m[0].length : undefined;
    },
    tokenizer(src) {
      const t = between(src);
      if (!t || t.kind !== "display") return undefined;
      const rest = /^[ \t]*(?:\n+|$)/.exec(src.slice(t.raw.length));
      return rest ? { type: "mathBlock", raw: t.raw + rest[0], tex: t.tex, kind: t.kind } : undefined;
    },
    renderer,
  },
  {
    name: "mathInline",
    level: "inline",
    start: src => {
      const at = src.search(/\$|\\[([]/);
      return at < 0 ? undefined : at;
    },
    tokenizer(src) {
      const t = between(src) ?? dollars(src);
      return t
        ? { type: "mathInline", raw: t.raw, tex: t.tex, kind: t.kind === "display" ? "wide" : "inline" }
        : undefined;
    },
    renderer,
  },
];
