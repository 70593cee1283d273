/* What the browser remembers: in a private window nothing. */
(() => {
  "use strict";

  /** What is typed into a new chat and what waits to be sent belong to this tab, all else to the browser. */
  const shelf = (key) => (key === "draft." || key.startsWith("queue.") ? sessionStorage : localStorage);
  const remember = (key, value) => {
    try {
      if (value) shelf(key).setItem(`duochat.${key}`, value);
      else shelf(key).removeItem(`duochat.${key}`);
    } catch {
      /* private window: nothing is remembered */
    }
  };
  const recall = (key) => {
    try {
      return shelf(key).getItem(`duochat.${key}`) || "";
    } catch {
      return "";
    }
  };

  /** The values of the settings' fields, for the next new chat. */
  const keepSettings = (...values) => remember("settings", JSON.stringify(values));

  Object.assign(window.duochat, { remember, recall, keepSettings });
})();
