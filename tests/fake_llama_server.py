#!/usr/bin/env python3
"""A llama-server that knows no model: it says what it was asked, and is quickest with drafts of 4 tokens, p 0.5."""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

OPTIONS = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
if os.environ.get("FAULT") == "start":
    sys.exit("no such device")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send({"status": "ok", "pid": os.getpid(), "options": OPTIONS})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if os.environ.get("FAULT") == "answer":
            print("the device is lost", flush=True)
            os._exit(1)
        best = OPTIONS.get("--spec-draft-n-max") == "4" and OPTIONS.get("--spec-draft-p-min") == "0.5"
        clock = {"prompt_ms": 20.0, "predicted_ms": 100.0 if best else 200.0}
        self.send({"tokens": [*asked["prompt"], asked["seed"], 2], "timings": clock, "asked": asked})

    def send(self, told):
        body = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


HTTPServer((OPTIONS["--host"], int(OPTIONS["--port"])), Handler).serve_forever()
