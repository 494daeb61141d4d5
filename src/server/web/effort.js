/*
 * A bound on the work of Markdown. marked looks for the end of every mark in the rest of its paragraph, so that its time
 * grows with the square of a text like "**a **a **a ": 40 kB took 20 s. Here every mark counts the length of that rest,
 * and a text that costs too much throws. The caller then shows it as it is.
 */
const MOST = 5e6; // characters; about 0.2 s
const MARKS = {
  escape: /^\\/,
  tag: /^</,
  link: /^!?\[/,
  reflink: /^!?\[/,
  emStrong: /^[*_]/,
  codespan: /^`/,
  del: /^~/,
  autolink: /^</,
};
let work = 0;

/* To be called before each text. */
export function begin() {
  work = 0;
}

function counted(mark) {
  return src => {
    if (mark.test(src) && (work += src.length) > MOST) throw new Error("too much work");
    return false; // marked's own rule goes on
  };
}

/* For marked.use. */
export const tokenizer = Object.fromEntries(Object.entries(MARKS).map(([name, mark]) => [name, counted(mark)]));
