"""Start the page: python app.py [--config FILE] [--target REF] [--draft REF] [--host HOST] [--port PORT]."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from duochat import DuoChatError, terminal


def main(arguments: Sequence[str]) -> int:
    """Serve the page until Ctrl-C."""
    parser = terminal.Parser(prog="python app.py", description="DuoChat in the browser.")
    terminal.add_pair(parser)
    terminal.add_server(parser)
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.add_argument(
        "--auth", metavar="USER:PASSWORD", action="append", default=[],
        help="ask for these, needed on any other address; again for another user, each with a list of their own",
    )  # fmt: skip
    args = parser.parse_args(arguments)

    from duochat.api.serve import begin

    auth = [credentials(text) for text in args.auth]
    settings, worker = begin(args, auth, "--auth user:password")  # the models are loaded while Gradio is imported

    from duochat.app import page

    page.launch(settings, settings.host, settings.port, auth, args.open, worker, api_key=args.api_key, cors=args.cors)
    return 0


def credentials(text: str) -> tuple[str, str]:
    """User and password from "user:password". Raises DuoChatError when one is missing."""
    user, _, password = text.partition(":")
    if not user or not password:
        raise DuoChatError("--auth needs user:password, neither of them empty.")
    return user, password


if __name__ == "__main__":
    sys.exit(terminal.run(main))
