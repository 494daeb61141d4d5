/* Runs before the page is drawn, so that a chosen theme does not flash in the other one's colours. */
"use strict";
try {
  const theme = localStorage.getItem("steel.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  /* no storage: the system's theme */
}
