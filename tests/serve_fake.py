"""Serve the page on a fake engine: python tests/serve_fake.py PORT [RATE] [STORE]."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fake_engine import FakeEngine

from duochat import config
from duochat.app.store import Store
from duochat.app.ui import launch

if __name__ == "__main__":
    port, rate = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 60.0
    settings = config.load()
    store = Store(Path(sys.argv[3]) if len(sys.argv) > 3 else Path(tempfile.mkdtemp()) / "conversations.db")
    launch(settings, port=port, worker=FakeEngine(rate), store=store)
