"""Run llama.cpp's own server tests against our API: python tests/run_llama_tests.py PATH/tools/server/tests

PATH is llama.cpp's source (the one of llama-cpp-python's source distribution will do); `pip install wget` is needed.
The tests leave out the model or invent one, and some leave out /v1: both are put right on the way in.
"""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import uvicorn

from duochat import config
from duochat.api.guard import Access
from duochat.api.service import make_app
from duochat.chat.worker import Worker

KEY = "sk-this-is-the-secret-key"
OPEN = """unit/test_basic.py::test_server_start_simple
unit/test_chat_completion.py::test_invalid_chat_completion_req
unit/test_chat_completion.py::test_chat_completion_with_timings_per_token
unit/test_chat_completion.py::test_logprobs
unit/test_chat_completion.py::test_logprobs_stream
unit/test_chat_completion.py::test_chat_completions_multiple_choices
unit/test_chat_completion.py::test_completion_with_invalid_grammar
unit/test_chat_completion.py::test_chat_template_continue_final_message_mutual_exclusion
unit/test_chat_completion.py::test_completion_with_response_format
unit/test_chat_completion.py::test_completion_with_json_schema""".splitlines()
LOCKED = """unit/test_security.py::test_access_public_endpoint
unit/test_security.py::test_incorrect_api_key
unit/test_security.py::test_openai_library_correct_api_key""".splitlines()


def completed(app):
    """The app with /v1 before each path, and the loaded model in each request."""

    async def asgi(scope, receive, send):
        if scope["type"] != "http":
            return await app(scope, receive, send)
        path = scope["path"] if scope["path"].startswith(("/v1", "/health")) else "/v1" + scope["path"]

        async def given():
            message = await receive()
            if message.get("body"):
                message["body"] = json.dumps(json.loads(message["body"]) | {"model": "duochat"}).encode()
            return message

        await app({**scope, "path": path}, given, send)

    return asgi


def run(folder, tests, engine, port, key=""):
    app = completed(make_app(engine, Access(key=key)))
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rA", "--no-header", *tests]
    done = subprocess.run(command, cwd=folder, env={**os.environ, "DEBUG_EXTERNAL": "1", "PORT": str(port)})
    server.should_exit = True
    thread.join()
    return done.returncode


def main():
    engine = Worker(config.load())
    try:
        for _ in engine.loading():
            pass
        codes = run(sys.argv[1], OPEN, engine, 8180), run(sys.argv[1], LOCKED, engine, 8181, KEY)
    finally:
        engine.close()
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
