/* What was saved as a page of its own, a race or one answer: no server, no network. */
(() => {
  "use strict";
  const { make, decoderName, Origins, Picture, Tip } = window.duochat;

  /** Draw the record in this document. show: the function that does it. */
  function openSaved(show) {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const dress = () => document.body.classList.toggle("dark", dark.matches);
    dress();
    dark.addEventListener("change", dress);
    const record = document.getElementById("record").textContent;
    window.duochat[show](document.getElementById("saved"), JSON.parse(record));
  }

  /** One answer: the question, the text with its tint, and the picture of how it was made. */
  function showAnswer(element, { prompt, text, blocks, frame, options }) {
    const body = make("div.dc-body", { dir: "auto" }, ...blocks.map((html) => make("div.dc-block", { html })));
    const place = make("div.dc-picture");
    const layer = make("div.dp.dc-tips");
    const how = [decoderName(options.decoder), `temperature ${options.temperature}`, `seed ${options.seed}`];
    element.append(
      make(
        "div.dc-saved",
        {},
        make(
          "div",
          {},
          make("article.dc-message.mine", {}, make("div.dc-body", { text: prompt })),
          make("article.dc-message.theirs", {}, body),
          make("p.dc-note", {}, `${how.join(" · ")} · saved from DuoChat`),
        ),
        place,
      ),
      layer,
    );
    const picture = new Picture(place);
    const before = () => text.slice(0, text.length - picture.answer.text.length);
    if (window.CSS?.highlights) picture.origins = new Origins(picture, new Tip(layer), () => body, before);
    picture.update(frame);
  }

  Object.assign(window.duochat, { openSaved, showAnswer });
})();
