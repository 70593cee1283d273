/* Links into the tabs: #learn/chapter/recording, #race/settings. All other hashes name a conversation. */
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

  Object.assign(window.duochat, { linked, linkButton });
})();
