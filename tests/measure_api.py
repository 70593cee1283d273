"""What the API costs beside the engine, on a fake one: python tests/measure_api.py [REQUESTS]

In turns the engine is asked directly and over HTTP, from another process: the whole time of answers of one token
(overhead a request), and the rate of streams of 1,000 tokens at 500 a second.
"""

import http.client
import json
import multiprocessing
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import uvicorn
from fake_chat import chat_that_says

from duochat import config
from duochat.api.guard import Access
from duochat.api.service import make_app
from duochat.chat.chat import Options

PORT, TOKENS = 8190, 1000


class Fake:
    """Says "xxx…", so many tokens a second (0: at once)."""

    def __init__(self, rate):
        self.chat = chat_that_says("x" * TOKENS, rate=rate)
        self.known = {"state": "ready", "settings": config.load()}

    def reply(self, messages, options, cancelled=lambda: False, _party=""):
        return self.chat.reply(messages, options, cancelled)

    def status(self):
        return self.known


def serve(rate):
    uvicorn.run(make_app(Fake(rate), Access()), port=PORT, log_level="error", timeout_keep_alive=60)


def over_http(to, tokens):
    """Seconds until the answer's last byte."""
    body = {"model": "duochat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": tokens}
    began = time.perf_counter()
    to.request("POST", "/v1/chat/completions", json.dumps(body | {"stream": tokens > 1}))
    answer = to.getresponse().read()
    assert answer.count(b"x") >= tokens
    return time.perf_counter() - began


def directly(engine, tokens):
    began = time.perf_counter()
    steps = list(engine.reply([{"role": "user", "content": "Hi"}], Options(max_tokens=tokens)))
    assert "".join(step.text for step in steps) == "x" * tokens
    return time.perf_counter() - began


def both(rate, tokens, count):
    """Medians of the two ways."""
    process = multiprocessing.get_context("spawn").Process(target=serve, args=[rate])
    process.start()
    engine, to = Fake(rate), http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
    try:
        while True:
            try:
                over_http(to, tokens)
                break
            except ConnectionRefusedError:
                to.close()
                time.sleep(0.2)
        times = [(directly(engine, tokens), over_http(to, tokens)) for _ in range(count)]
    finally:
        process.terminate()
        process.join()
    return [statistics.median(way) for way in zip(*times, strict=True)]


def main():
    count = int(sys.argv[1]) if sys.argv[1:] else 300
    alone, served = (1000 * seconds for seconds in both(0, 1, count))
    print(f"a request: {alone:.2f} ms directly, {served:.2f} over HTTP, {served - alone:+.2f}")
    alone, served = (TOKENS / seconds for seconds in both(500, TOKENS, max(3, count // 60)))
    print(f"a stream: {alone:.1f} tokens/s directly, {served:.1f} over HTTP, {100 * (served / alone - 1):+.2f} %")


if __name__ == "__main__":
    main()
