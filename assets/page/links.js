/* Links within an answer, and into the tabs: #learn/chapter/recording, #race/settings. All other hashes name a conversation. */
(() => {
  "use strict";
  const { press, toast } = window.duochat;

  /** What a link to this tab says, in parts; undefined when the address is none. */
  const linked = (tab) => {
    const [room, ...parts] = location.hash.slice(1).split("/").map(decodeURIComponent);
    return room === tab && parts.length ? parts : undefined;
  };

  /** A button that copies a link to what is shown. */
  const linkButton = (tab, ...parts) => {
    const hash = `#${[tab, ...parts].map(encodeURIComponent).join("/")}`;
    const node = press("Copy a link to this", async () => {
      const address = location.href.split("#")[0] + hash;
      try {
        await navigator.clipboard.writeText(address);
        toast("The link is copied.");
      } catch {
        toast(address, null, 20);
      }
    });
    return node;
  };

  /* A footnote and the way back: both are in the same answer. */
  document.addEventListener("click", (e) => {
    const link = e.target.closest?.(".dc-body a[data-to]");
    if (!link) return;
    e.preventDefault();
    const goal = link.closest(".dc-body").querySelector(`[data-at="${link.dataset.to}"]`);
    goal.tabIndex = 0;
    goal.focus();
    goal.scrollIntoView({ block: "nearest" });
  });

  Object.assign(window.duochat, { linked, linkButton });
})();
