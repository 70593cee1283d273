"""The command `serve`: the API without the page. Both servers share how they begin and run."""

from __future__ import annotations

import argparse
import signal
import socket
import sys
import threading
import webbrowser

import uvicorn
from starlette.types import ASGIApp

from duochat import DuoChatError, config, terminal
from duochat.api.guard import LOOPBACK, Access
from duochat.api.service import make_app
from duochat.chat.worker import Worker


def add_arguments(parser: argparse.ArgumentParser) -> None:
    terminal.add_pair(parser)
    terminal.add_server(parser)


def main(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    settings, worker = begin(args, args.api_key, "--api-key KEY")
    access = Access(settings.host, args.api_key, origins=args.cors)
    try:
        run(make_app(worker, access), settings.host, settings.port, path="/v1")
    finally:
        worker.close()
    return 0


def begin(args: argparse.Namespace, lock: object, remedy: str) -> tuple[config.Settings, Worker]:
    """What the arguments set, and an engine that loads it and shows so. Raises DuoChatError, see `check_address`."""
    settings = config.load(args.config, target=args.target, draft=args.draft, host=args.host, port=args.port)
    check_address(settings.host, settings.port, lock, remedy)
    worker = Worker(settings)
    threading.Thread(target=terminal.show_loading, args=[worker.loading()], daemon=True).start()
    return settings, worker


def check_address(host: str, port: int, lock: object, remedy: str) -> None:
    """Raises DuoChatError when the address is open to others without a lock, or taken."""
    if host not in LOOPBACK and not lock:
        raise DuoChatError(f"Binding to {host} lets others in: add {remedy}.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as fault:
            raise DuoChatError(
                f"Port {port} on {host} cannot be used ({fault.strerror}): choose another with --port."
            ) from fault


def run(app: ASGIApp, host: str, port: int, path: str = "", open_browser: bool = False) -> None:
    """Serve until interrupted. What the caller cleans up it cleans up after a SIGTERM too: uvicorn raises it again."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    server = uvicorn.Server(
        uvicorn.Config(app, host=host.strip("[]"), port=port, log_level="warning", timeout_graceful_shutdown=2)
    )
    url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}{path}"
    print(f"DuoChat is at {url}", flush=True)
    if open_browser:
        threading.Timer(1.0, webbrowser.open, (url,)).start()
    server.run()
