"""Start the page: python app.py [--config FILE] [--target REF] [--draft REF] [--host HOST] [--port PORT]."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # Gradio reads it at import, and would ask outside hosts

from duochat import DuoChatError, terminal

if TYPE_CHECKING:
    from duochat.chat.worker import Worker


def main(arguments: Sequence[str]) -> int:
    """Serve the page until Ctrl-C."""
    parser = terminal.Parser(prog="python app.py", description="DuoChat in the browser.")
    terminal.add_pair(parser)
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1, this machine only)")
    parser.add_argument("--port", type=int, help="port to listen on (default: 7860)")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.add_argument("--auth", metavar="USER:PASSWORD", help="ask for these; needed on any other address")
    args = parser.parse_args(arguments)

    from duochat import config

    settings = config.load(args.config, target=args.target, draft=args.draft, host=args.host, port=args.port)
    auth = credentials(args.auth)

    from duochat.app import web
    from duochat.chat.worker import Worker

    web.check_address(settings.host, settings.port, auth)
    worker = Worker(settings)  # loads the models while Gradio is imported
    threading.Thread(target=show_loading, args=[worker], daemon=True).start()

    from duochat.app import page

    page.launch(settings, settings.host, settings.port, auth, open_browser=args.open, worker=worker)
    return 0


def credentials(text: str | None) -> tuple[str, str] | None:
    """User and password from "user:password". Raises DuoChatError when one is missing."""
    if text is None:
        return None
    user, _, password = text.partition(":")
    if not user or not password:
        raise DuoChatError("--auth needs user:password, neither of them empty.")
    return user, password


def show_loading(worker: Worker) -> None:
    """The engine's progress on the terminal, until it is ready or has failed (the page tells the reason too)."""
    bar = terminal.Bar()
    try:
        for step in worker.loading():
            if step.notice:
                bar(step.notice, *step.progress)
    except DuoChatError as fault:
        terminal.report(str(fault))
    finally:
        bar.close()


if __name__ == "__main__":
    sys.exit(terminal.run(main))
