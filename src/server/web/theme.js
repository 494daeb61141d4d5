/* Runs before the first paint, so that the chosen theme does not flash. */
"use strict";
try {
  const theme = localStorage.getItem("steel.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  /* no storage: the system's theme */
}
