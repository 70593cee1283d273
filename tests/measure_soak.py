"""500 requests to one engine, a tenth cancelled in the middle: python tests/measure_soak.py [torch|llama] [REQUESTS]

The first fifty prompts are asked again as the last fifty. Prints memory after fifty and at the end (flat is asked), the
rate of the last fifty over the first fifty (0.95 to 1.05), and how many of a sample differ from plain decoding (0).
"""

import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from duochat import config
from duochat.bench import tasks
from duochat.chat.answer import Answer
from duochat.chat.chat import Options
from duochat.chat.worker import Worker

PART, TOKENS = 50, 32


def ask(worker, number, prompt, cancel=0, decoder="duotree"):
    """The answer and its seconds; cancel: after how many tokens the client goes away, 0 = never."""
    options = Options(decoder=decoder, max_tokens=TOKENS, temperature=(0.0, 0.7, 1.0)[number % 3], seed=number)
    answer, began = Answer(), time.perf_counter()
    steps = worker.reply([{"role": "user", "content": prompt}], options)
    for step in steps:
        answer.add(step)
        if cancel and len(answer.token_ids) >= cancel:
            steps.close()
    return answer.token_ids, time.perf_counter() - began


def memory(worker):
    """MiB of the engine's process."""
    return psutil.Process(worker._child.process.pid).memory_info().rss / 2**20


def main(backend="auto", requests="500"):
    worker = Worker(config.load(backend=backend))
    for _ in worker.loading():
        pass
    prompts = [question.turns[0] for question in tasks.load()]
    dice, seconds, written, used, sample = random.Random(7), [], [], [], []
    for n in range(int(requests)):
        place = n if n < int(requests) - PART else n - int(requests) + PART
        prompt = prompts[place % len(prompts)]
        cancelled = PART <= n < int(requests) - PART and dice.random() < 0.125
        tokens, took = ask(worker, place, prompt, dice.randrange(1, TOKENS // 2) if cancelled else 0)
        seconds.append(took)
        written.append(len(tokens))
        used.append(memory(worker))
        sample += [(place, prompt, tokens)] if n % 20 == 3 and not cancelled else []
    differ = sum(ask(worker, place, prompt, 0, "autoregressive")[0] != tokens for place, prompt, tokens in sample)
    first, last = (sum(written[part]) / sum(seconds[part]) for part in (slice(PART), slice(-PART, None)))
    print(
        f"memory {used[0]:.0f} MiB after 1, {used[PART - 1]:.0f} after {PART}, {used[-1]:.0f} at the end, "
        f"most {max(used[PART:]):.0f}"
    )
    print(f"first {PART} {first:.1f} tokens/s, last {last:.1f}: {last / first:.3f}")
    print(f"{differ} of {len(sample)} answers differ from plain decoding's")
    worker.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
