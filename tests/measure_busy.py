"""Ten seconds of another program in the middle of a long answer: python tests/measure_busy.py [torch|llama] [TOKENS]

The same answer is written four times: undisturbed, disturbed, by plain decoding undisturbed and disturbed. The text is
the same, so that times over the same tokens compare. Prints the rate from 200 rounds after the disturbance on over the
undisturbed one (0.97 asked), and the rate while it lasts over plain decoding's (0.95 asked).
"""

import multiprocessing
import sys
import time
from itertools import accumulate
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from duochat import config
from duochat.chat.loading import load_chat
from duochat.engine.decoding import Request
from duochat.engine.sampling import Sampling

BUSY = 10.0  # seconds
SAMPLING = Sampling(temperature=1.0, seed=1)  # a colder answer of this length loops


def spin(until):
    while time.monotonic() < until:
        pass


def answer(engine, prompt, decoder, tokens, disturbed_from=None):
    """The rounds; disturbed_from: tokens after which another process takes a core."""
    other, rounds, written = None, [], 0
    for r in engine.decode(prompt, Request(SAMPLING, tokens, decoder)):
        rounds.append(r)
        written += len(r.tokens)
        if other is None and disturbed_from is not None and written >= disturbed_from:
            other = multiprocessing.Process(target=spin, args=(time.monotonic() + BUSY,))
            other.start()
    if other:
        other.join()
    return rounds


def times(rounds):
    """When each token came."""
    return [r.ended for r in rounds for _ in r.tokens]


def rate(when, first, last):
    return (last - first) / (when[last] - when[first])


def main(backend="auto", tokens="2000"):
    settings = config.load(backend=backend, context_length=int(tokens) + 100)
    chat = load_chat(settings, lambda *_: None)
    engine = chat.engine
    engine.target.eos = frozenset()  # the answer goes on
    prompt = chat.tokenizer.prompt([{"role": "user", "content": "Tell me a long story about a lighthouse."}])
    answer(engine, prompt, "duotree", 100)
    quiet = answer(engine, prompt, "duotree", int(tokens))
    begins = len(times(quiet)) // 4
    busy = answer(engine, prompt, "duotree", int(tokens), begins)
    plain = answer(engine, prompt, "autoregressive", begins + 200)
    plain_busy = answer(engine, prompt, "autoregressive", begins + 200, begins)
    texts = [[t for r in rounds for t in r.tokens] for rounds in (quiet, busy, plain, plain_busy)]
    assert all(text == texts[0][: len(text)] for text in texts), "the texts differ"
    report(quiet, busy, plain, plain_busy, begins)


def report(quiet, busy, plain, plain_busy, begins):
    alone, when, slow, slow_busy = map(times, (quiet, busy, plain, plain_busy))
    over = next(i for i, t in enumerate(when) if t > when[begins] + BUSY)
    first = next(r for r, n in enumerate(accumulate(len(r.tokens) for r in busy)) if n > over)
    settled = sum(len(r.tokens) for r in busy[: first + 200])
    end = len(alone) - 1
    shortly = min(over, begins + len(slow_busy) - 1 - begins)
    print(f"undisturbed {rate(alone, 1, end):.1f} tokens/s, plain {rate(slow, 1, len(slow) - 1):.1f}")
    print(
        f"from 200 rounds after on: {rate(when, settled, end) / rate(alone, settled, end):.3f} of undisturbed "
        f"(tokens {settled} to {end}); before: {rate(when, 1, begins) / rate(alone, 1, begins):.3f}"
    )
    print(
        f"while it lasts: {rate(when, begins, shortly) / rate(slow_busy, begins, shortly):.3f} of plain so disturbed "
        f"(tokens {begins} to {shortly}), {rate(when, begins, over) / rate(alone, begins, over):.3f} of undisturbed"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
