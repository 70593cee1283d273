"""Serve the page on a fake engine, to look at it without models: python tests/serve_fake.py 7860."""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--rate", type=float, default=60.0, help="tokens per second")
    parser.add_argument("--store", type=Path, help="file of the conversations (default: a temporary one)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--auth", help="user:password", action="append", default=[])
    parser.add_argument("--reached", type=Path, help="file for the hosts that this process looks up or connects to")
    parser.add_argument("--ended", type=Path, help="file for the time at which the engine finished its last answer")
    args = parser.parse_args()
    if args.reached:
        sys.addaudithook(lambda event, details: note(args.reached, event, details))
        note(args.reached, "socket.getaddrinfo", ("hooked",))
    from fake_engine import FakeEngine

    from duochat import config
    from duochat.app.page import launch
    from duochat.app.store import Store

    store = Store(args.store or Path(tempfile.mkdtemp()) / "conversations.db")
    auth = [tuple(text.split(":", 1)) for text in args.auth]
    launch(
        config.load(max_tokens=4000),
        args.host,
        args.port,
        auth,
        worker=FakeEngine(args.rate, ended=args.ended),
        store=store,
    )


def note(file: Path, event: str, details: tuple) -> None:
    """Add the host of a look-up or an internet connection to the file."""
    if event == "socket.getaddrinfo":
        host = details[0]
    elif event == "socket.connect" and isinstance(details[1], tuple):
        host = details[1][0]
    else:
        return
    with file.open("a") as out:
        print(host, file=out)


if __name__ == "__main__":
    main()
