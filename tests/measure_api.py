"""What the API costs beside the engine, on a fake one: python tests/measure_api.py [REQUESTS]

Request for request in turns, the engine asked directly and over HTTP by another process: the whole time of answers of
one token (overhead a request), and the rate of streams of 1,000 tokens at 500 a second.
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
from fake_chat import FakeSettings, prepare_fake

from duochat import config
from duochat.api.guard import Access
from duochat.api.service import make_app
from duochat.chat.chat import Options
from duochat.chat.worker import Worker

PORT = 8190


class Paced(Worker):
    """The fake of the tests, for which the API finds the settings of a real pair."""

    def status(self):
        return super().status() | {"settings": config.load(max_tokens=4000)}


def serve(rate):
    worker = Paced(FakeSettings(text="x" * 1000, rate=rate), prepare_fake)
    uvicorn.run(make_app(worker, Access()), port=PORT, log_level="error")


def over_http(to, tokens):
    """Seconds until the answer's last byte."""
    body = {
        "model": "duochat",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": tokens,
        "stream": tokens > 1,
    }
    began = time.perf_counter()
    to.request("POST", "/v1/chat/completions", json.dumps(body))
    answer = to.getresponse().read()
    assert b"x" in answer
    return time.perf_counter() - began


def directly(worker, tokens):
    began = time.perf_counter()
    steps = list(worker.reply([{"role": "user", "content": "Hi"}], Options(max_tokens=tokens)))
    assert steps[-1].finish == "length"
    return time.perf_counter() - began


def pairs(rate, tokens, count):
    """Medians of both ways, in turns."""
    process = multiprocessing.get_context("spawn").Process(target=serve, args=[rate])
    process.start()
    worker = Paced(FakeSettings(text="x" * 1000, rate=rate), prepare_fake)
    to = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
    try:
        while True:
            try:
                over_http(to, tokens), directly(worker, tokens)
                break
            except OSError:
                to.close()
                time.sleep(0.2)
        times = [(directly(worker, tokens), over_http(to, tokens)) for _ in range(count)]
    finally:
        process.terminate()
        worker.close()
    return [statistics.median(way) for way in zip(*times, strict=True)]


def main():
    count = int(sys.argv[1]) if sys.argv[1:] else 300
    alone, served = pairs(0, 1, count)
    print(f"a request: {1000 * alone:.2f} ms directly, {1000 * served:.2f} over HTTP, {1000 * (served - alone):+.2f}")
    alone, served = (999 / seconds for seconds in pairs(500, 999, max(3, count // 60)))
    print(f"a stream: {alone:.1f} tokens/s directly, {served:.1f} over HTTP: {100 * (served / alone - 1):+.2f} %")


if __name__ == "__main__":
    main()
