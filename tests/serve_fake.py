"""Serve the page on a fake engine, to look at it without models: python tests/serve_fake.py 7860."""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fake_engine import FakeEngine

from duochat import config
from duochat.app.store import Store
from duochat.app.ui import launch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--rate", type=float, default=60.0, help="tokens per second")
    parser.add_argument("--store", type=Path, help="file of the conversations (default: a temporary one)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--auth", help="user:password")
    args = parser.parse_args()
    store = Store(args.store or Path(tempfile.mkdtemp()) / "conversations.db")
    auth = tuple(args.auth.split(":", 1)) if args.auth else None
    launch(config.load(max_tokens=4000), args.host, args.port, auth, worker=FakeEngine(args.rate), store=store)


if __name__ == "__main__":
    main()
