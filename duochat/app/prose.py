"""Markdown of an answer that is still being written -> HTML blocks, rendering only what is new.

The HTML is safe whatever the text says: raw HTML is shown as text, links go to http(s) and mailto only, an image
becomes a link (so that reading an answer asks no other host for anything). Formulas become `.math` elements with the
TeX source; the page's script typesets them.
"""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from functools import lru_cache

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from mdit_py_plugins.footnote import footnote_plugin
from mdit_py_plugins.tasklists import tasklists_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

MATH = (("$$", "$$", True), ("\\[", "\\]", True), ("\\(", "\\)", False), ("$", "$", False))
LONGEST_HIGHLIGHT = 60_000  # characters; colouring more would hold the page up
_formatter = HtmlFormatter(nowrap=True)


def _math(state: StateInline, silent: bool) -> bool:
    """Inline rule: a formula between any of the MATH delimiters, with no blank just inside single dollars."""
    for left, right, display in MATH:
        if not state.src.startswith(left, state.pos):
            continue
        start = state.pos + len(left)
        end = state.src.find(right, start, state.posMax)
        tex = state.src[start:end]
        if end <= start or (left == "$" and (tex != tex.strip() or state.src[end + 1 : end + 2].isdigit())):
            continue
        if not silent:
            token = state.push("math", "span", 0)
            token.content, token.meta = tex, {"display": display}
        state.pos = end + len(right)
        return True
    return False


def _think(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """Block rule: what a model writes between a line <think> and a line </think> is folded, also while it grows."""

    def line(number: int) -> str:
        return state.src[state.bMarks[number] : state.eMarks[number]].strip()

    if line(start) != "<think>":
        return False
    if not silent:
        last = next((n for n in range(start + 1, end) if line(n) == "</think>"), end)
        state.push("think_open", "details", 1).map = [start, last]
        whole, state.lineMax = state.lineMax, last  # no list or paragraph within runs past the end
        state.md.block.tokenize(state, start + 1, last)
        state.lineMax = whole
        state.push("think_close", "details", -1)
        state.line = min(last + 1, end)
    return True


def _draw_think(_tokens: list[Token], _index: int, _options: object, _env: object) -> str:
    return '<details class="think"><summary>Thinking</summary>'


def _draw_math(tokens: list[Token], index: int, _options: object, _env: object) -> str:
    token = tokens[index]
    kind = "math display" if token.meta["display"] else "math"
    return f'<span class="{kind}">{html.escape(token.content)}</span>'


def _draw_image(tokens: list[Token], index: int, _options: object, _env: object) -> str:
    token = tokens[index]
    source, words = html.escape(str(token.attrs.get("src", ""))), html.escape(token.content or "image")
    return f'<a class="image" href="{source}" target="_blank" rel="noopener noreferrer">{words}</a>'


def _draw_link(tokens: list[Token], index: int, _options: object, _env: object) -> str:
    target = html.escape(str(tokens[index].attrs.get("href", "")))
    return f'<a href="{target}" target="_blank" rel="noopener noreferrer">'


def _draw_note(tokens: list[Token], index: int, _options: object, _env: object) -> str:
    """The mark of a footnote, and the way back: links within the answer, which `links.js` follows."""
    note, at = tokens[index].meta["id"] + 1, tokens[index].meta.get("subId", 0)
    if tokens[index].type == "footnote_ref":
        return f'<sup><a href="#" role="doc-noteref" data-at="{note}.{at}" data-to="{note}">{note}</a></sup>'
    return f' <a href="#" role="doc-backlink" data-to="{note}.{at}" aria-label="Back to the text">↩</a>'


def _draw_note_open(tokens: list[Token], index: int, _options: object, _env: object) -> str:
    return f'<li data-at="{tokens[index].meta["id"] + 1}">'


def _draw_fence(tokens: list[Token], index: int, _options: object, env: dict[str, object]) -> str:
    token = tokens[index]
    language = token.info.split()[0] if token.info.split() else ""
    code = html.escape(token.content) if env.get("open") else colour(token.content, language)
    return f'<pre data-language="{html.escape(language)}"><code>{code}</code></pre>'


@lru_cache(maxsize=64)
def colour(code: str, language: str) -> str:
    """HTML of the code with Pygments' short classes; plain when the language is unknown or the code too long."""
    if len(code) > LONGEST_HIGHLIGHT:
        return html.escape(code)
    try:
        return highlight(code, get_lexer_by_name(language, stripnl=False), _formatter)
    except ClassNotFound:
        return html.escape(code)


def _parser(footnotes: bool) -> MarkdownIt:
    """footnotes: of a whole text only, where it is known which are explained."""
    md = MarkdownIt("commonmark", {"html": False, "breaks": True, "linkify": True})
    md.enable(["table", "strikethrough", "linkify"]).use(tasklists_plugin)
    if footnotes:
        md.use(footnote_plugin)
    md.linkify.set({"fuzzy_link": False})  # an address names its scheme: "readme.md" is a file
    md.block.ruler.before("fence", "think", _think)
    md.inline.ruler.before("escape", "math", _math)
    md.validateLink = lambda url: url.lower().startswith(("http://", "https://", "mailto:"))  # others stay text
    drawers = {
        "math": _draw_math, "image": _draw_image, "link_open": _draw_link, "fence": _draw_fence,
        "think_open": _draw_think, "footnote_ref": _draw_note, "footnote_anchor": _draw_note,
        "footnote_open": _draw_note_open,
    }  # fmt: skip
    for name, draw in drawers.items():
        md.renderer.rules[name] = draw
    return md


_growing, _whole = _parser(False), _parser(True)


def render(text: str) -> list[str]:
    """HTML of each top-level block of a finished text."""
    return [
        _whole.renderer.render(group, _whole.options, {}) for group in _groups(_whole.parse(text.replace("\r", "")))
    ]


@dataclass
class Stream:
    """The blocks of one growing text. Blocks before the last one cannot change any more and are not parsed again."""

    settled: int = 0  # blocks that are final
    start: int = 0  # index in the text where the first block that is not final begins
    env: dict[str, object] = field(default_factory=dict)

    def blocks(self, text: str, finished: bool = False) -> tuple[int, list[str]]:
        """(index of the first block given, HTML of that block and all later ones).

        text: the whole text so far, an extension of the text of the call before.
        """
        first, tail = self.settled, text.replace("\r", "")[self.start :]
        groups = _groups(_growing.parse(tail, self.env))
        drawn = [self._draw(group, tail, finished or group is not groups[-1]) for group in groups]
        self._settle(groups, tail)
        return first, drawn

    def _draw(self, group: list[Token], tail: str, complete: bool) -> str:
        is_open = not complete and group[0].type == "fence" and not _closed(group[0], tail)
        return _growing.renderer.render(group, _growing.options, {**self.env, "open": is_open})

    def _settle(self, groups: list[list[Token]], tail: str) -> None:
        """The last block may change; the one right above it too, while the last one's first line is not complete."""
        starts = [group[0].map[0] if group[0].map else 0 for group in groups]
        lines = tail.split("\n")
        final = len(groups) - 1
        if final > 0 and len(lines) - 1 <= starts[final] and lines[starts[final] - 1].strip():
            final -= 1
        if final > 0:
            self.start += sum(len(line) + 1 for line in lines[: starts[final]])
            self.settled += final


def _groups(tokens: list[Token]) -> list[list[Token]]:
    """The tokens of each top-level block."""
    groups: list[list[Token]] = []
    depth = 0
    for token in tokens:
        if depth == 0:
            groups.append([])
        groups[-1].append(token)
        depth += token.nesting
    return groups


def _closed(fence: Token, tail: str) -> bool:
    lines = tail.rstrip("\n").split("\n")
    last = lines[-1].strip()
    return (
        len(lines) - 1 > (fence.map[0] if fence.map else 0)
        and last.startswith(fence.markup)
        and not last.strip(fence.markup[0])
    )
