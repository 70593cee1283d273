"""The page: Gradio Blocks with the chat, the picture and the tabs, and `launch`, which serves it.

Gradio carries values; `assets/page/*.js` draws them. Every handler answers with a value also when it fails, so the
page never waits for something that will not come.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before the import: Gradio asks outside hosts otherwise

import gradio as gr

from duochat.api.guard import LOOPBACK, Access
from duochat.api.serve import check_address, run
from duochat.api.service import beside, make_app
from duochat.app import assets, web
from duochat.app.drawer import Controls, options_from, remembered
from duochat.app.hardware import Hardware
from duochat.app.jobs import sentence
from duochat.app.kept import options_of
from duochat.app.learn import Lessons
from duochat.app.picker import Models
from duochat.app.race import Races
from duochat.app.room import Room
from duochat.app.store import Store
from duochat.app.view import Live
from duochat.chat.chat import Options
from duochat.chat.worker import Worker

Serve = Callable[[dict[str, Any]], Any]  # does what a page asks for; see `part`
QUEUE_SLEEP = 0.02  # seconds between two looks of Gradio's queue; its own 1 ms costs a tenth of a core, all the time
QUIET = {"show_progress": "hidden", "api_visibility": "private"}
LIVE = {**QUIET, "concurrency_limit": None, "trigger_mode": "multiple"}
PART = """
const call = async (name, action) => {{
  const answer = await server.serve_part({{ name, action }});
  if (answer == null) throw new Error("The server does not answer: see whether it still runs.");
  return answer;
}};
const calls = new Proxy({{}}, {{ get: (_, name) => (action = {{}}) => call(name, action) }});
duochat.{name}(element, {{ props, trigger, watch, server: calls }}); /* events: {events} */
"""


class Page:
    """The Blocks of the page and their handlers."""

    def __init__(self, room: Room, models: Models) -> None:
        self.room, self.models, self.live = room, models, Live(room.view)
        self.blocks = gr.Blocks(title="DuoChat", analytics_enabled=False, fill_width=True)
        with self.blocks:
            self._build()
        self.blocks._queue.sleep_when_free = QUEUE_SLEEP

    def _build(self) -> None:
        room, models = self.room, self.models
        with gr.Sidebar(width=272, elem_id="side-bar"):
            served = [models.state, models.models, models.local, models.use, models.cancel, models.forecast]
            served += [room.conversations, room.rename, room.move, room.delete, room.restore, room.export, room.import_]
            self.side = self.part("side", serve=served)
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Chat", id="chat", elem_id="chat-tab"), gr.Row(elem_id="desk"):
                served = [room.stop, room.choose, room.undo, room.remove, room.share, room.view.look]
                self.chat = self.part("chat", "'ask' 'open'", serve=served)
                self.part("picture", serve=[room.view.picture])
            self._build_tabs()
        with gr.Sidebar(position="right", open=False, width=340, elem_id="settings"):
            self.controls = Controls(room.defaults, models.settings.context_length)
        asked = self.chat.ask(self.ask, self.controls.inputs, self.chat, **LIVE)
        asked.failure(None, js="() => duochat.chat_.failed()")
        self.chat.open(self.open, None, [self.chat, *self.controls.inputs, self.controls.preset], **LIVE)

    def part(self, name: str, events: str = "", serve: Sequence[Serve] = ()) -> gr.HTML:
        """See `part`; a user's conversations are served to that user only."""
        return part(name, events, serve, self.room.allow)

    def _build_tabs(self) -> None:
        engine = self.models.engine
        tabs = {"Race": Races(engine), "Learn": Lessons(engine, self.room.store)}
        tabs["Hardware"] = Hardware(engine, self.room.view.machine)
        for title, tab in tabs.items():
            name = title.lower()
            with gr.Tab(title, id=name, elem_id=f"{name}-tab"):
                self.part(name, serve=served(tab))

    # -- events ------------------------------------------------------------------------------------------------------

    async def ask(self, event: gr.EventData, request: gr.Request, *values: Any) -> str:
        """Send, retry, edit or continue; says where the answer can be heard."""
        action = {**(event._data or {}), "user": request.username or ""}
        try:
            self.room.allow(action)
            options = options_from(values, self.models.settings.context_length)
            said = self._heard(await asyncio.to_thread(self.room.ask, action, options))
        except Exception as fault:  # noqa: BLE001  whatever it was, the page hears of it and goes on
            said = {"refused": sentence(fault)}
        return wire({"ticket": action.get("ticket"), **said})

    def open(self, event: gr.EventData, request: gr.Request) -> tuple[Any, ...]:
        """Where a conversation can be heard, and its settings."""
        action = {**(event._data or {}), "user": request.username or ""}
        conversation, context_length = str(action.get("conversation") or ""), self.models.settings.context_length
        try:
            self.room.allow(action)
            options = self._options(conversation, action.get("settings"))
            said, fields = self._heard(conversation), self.controls.updates(options, context_length)
        except Exception as fault:  # noqa: BLE001
            said = {"conversation": conversation, "gone": True, "refused": sentence(fault)}
            fields = [gr.skip() for _ in (*self.controls.inputs, self.controls.preset)]
        return wire(said), *fields

    def _heard(self, conversation: str) -> dict[str, Any]:
        if conversation:
            self.room.store.require(conversation)
        return {"conversation": conversation, "live": self.live.key(conversation)}

    def _options(self, conversation: str, kept: Any) -> Options:
        """What a conversation was last asked with; for a new one what the browser remembers."""
        if found := self.room.store.get(conversation):
            return options_of(found.settings, self.room.defaults)
        return remembered(kept, self.models.settings.context_length, self.room.defaults)


def part(name: str, events: str = "", serve: Sequence[Serve] = (), allow: Serve = lambda action: None) -> gr.HTML:
    """A gr.HTML that a script of the page draws: duochat.<name>(element, tools).

    serve: what the script may call, as `await tools.server.<function's name>(action)`. allow: called before with the
    action, raises DuoChatError when the user may not ask for it.
    """
    return gr.HTML(
        value="", html_template="<div></div>", js_on_load=PART.format(name=name, events=events), elem_id=name,
        apply_default_css=False, server_functions=[dispatcher(serve, allow)],
    )  # fmt: skip


def served(tab: Any) -> list[Serve]:
    """All public methods of a tab: what the page can ask of it."""
    return [getattr(tab, name) for name in vars(type(tab)) if not name.startswith("_")]


def dispatcher(serve: Sequence[Serve], allow: Serve) -> Callable[..., Any]:
    """One function for all that a part serves: Gradio makes each an attribute of the component, where names clash."""
    known = {do.__name__: do for do in serve}

    def serve_part(call: dict[str, Any], request: gr.Request) -> Any:
        """call: {"name", "action"}. Gives what the function gives, {} for nothing, or {"refused": sentence}."""
        action = {**(call.get("action") or {}), "user": user_of(request)}
        try:
            allow(action)
            return known[call["name"]](action) or {}
        except Exception as fault:  # noqa: BLE001  whatever it was, the page hears of it and goes on
            return {"refused": sentence(fault)}

    return serve_part


def user_of(request: Any) -> str:
    """Who is signed in, "" without a password: Gradio tells its events so, but not the functions that it serves."""
    app = request.scope["app"]
    names = (f"access-token-{app.cookie_id}", f"access-token-unsecure-{app.cookie_id}")
    return next((app.tokens[token] for name in names if (token := request.cookies.get(name)) in app.tokens), "")


_serial = itertools.count(1)


def wire(value: dict[str, Any]) -> str:
    """JSON as one string, each differing from the one before: Gradio sends structured values as patches, which its
    client cannot always apply, and a value that stays the same goes unnoticed."""
    return json.dumps({"serial": next(_serial), **value})


def launch(
    settings: Any, host: str = "127.0.0.1", port: int = 7860, auth: Sequence[tuple[str, str]] = (),
    open_browser: bool = False, worker: Worker | None = None, store: Store | None = None,
    api_key: str = "", cors: Sequence[str] = (),
) -> None:  # fmt: skip
    """Serve the page until interrupted.

    auth: users and their passwords, required when host is not loopback. worker: what answers, by default a Worker of
    the settings. api_key, cors: see `Access`. Raises DuoChatError when the address cannot be used.
    """
    check_address(host, port, auth, "--auth user:password")
    worker = worker or Worker(settings)
    room = Room(worker, store or Store(), Options.of(settings))
    page, head = Page(room, Models(worker, settings, host in LOOPBACK)), assets.head(Path(gr.__file__).parent)
    app = gr.mount_gradio_app(
        web.make_app(host, head, page.live.routes()), page.blocks, "/", server_name=host, server_port=port,
        auth=list(auth) or None, footer_links=[], run_history=False, show_error=False, ssr_mode=False,
        enable_monitoring=False, pwa=False, mcp_server=False, theme=theme(),
    )  # fmt: skip
    api = make_app(worker, Access(host, api_key, bool(auth), cors))
    gc.freeze()  # what stands now lasts: to look through it again takes a quarter of a second of an answer's stream
    try:
        run(beside(app, api), host, port, open_browser=open_browser)
    finally:
        page.models.close()
        room.close()
        worker.close()


def theme() -> gr.themes.Base:
    """System fonts: nothing is fetched from a font server."""
    sans = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "Liberation Sans", "sans-serif")
    mono = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "Liberation Mono", "monospace")
    return gr.themes.Base(font=sans, font_mono=mono, primary_hue="blue", neutral_hue="stone", radius_size="lg")
