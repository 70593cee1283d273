"""Race: two decoders on one prompt, run one after the other, replayed side by side on one clock.

Nothing is estimated: times, speeds and texts are those of the two runs. `race.js` replays the record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from duochat import DuoChatError, __version__
from duochat.app import assets
from duochat.app.assets import NAMES
from duochat.app.frames import frame
from duochat.app.hardware import others
from duochat.app.jobs import Job, Jobs
from duochat.chat.answer import Answer
from duochat.chat.chat import Options
from duochat.chat.recording import Recording, checked_prompt, record
from duochat.chat.worker import Worker

FORMAT = "duochat-race"
WARM_UP = "Say hello."
MOST_TOKENS = 512


def run(engine: Worker, prompt: str, decoders: tuple[str, str], options: Options, job: Job) -> dict[str, Any]:
    """Both runs, one after the other: the record. Raises DuoChatError when a run fails."""
    runs, busy = [], []
    for number, decoder in enumerate(decoders, 1):
        head = {"run": number, "decoder": decoder}
        chosen = replace(options, decoder=decoder)
        _warm_up(engine, replace(chosen, max_tokens=4), job, head)
        busy.append(others())
        runs.append(record(engine, prompt, chosen, job.stop.is_set, partial(_note, job, head)))
    return record_of(runs[0], runs[1], max(*busy, others()))


def _warm_up(engine: Worker, options: Options, job: Job, head: dict[str, Any]) -> None:
    """Another prompt first: it wakes the devices and leaves neither run the prompt in a cache."""
    job.note = {**head, "phase": "warming up"}

    def seen(answer: Answer) -> None:
        if answer.phase in ("queued", "loading"):
            _note(job, head, answer)

    record(engine, WARM_UP, options, job.stop.is_set, seen)


def _note(job: Job, head: dict[str, Any], answer: Answer) -> None:
    told = {"tokens": answer.stats.completion_tokens, "phase": answer.phase, "progress": answer.progress}
    job.note = {**head, **told, "words": answer.doing}


def record_of(left: Recording, right: Recording, busy: float = 0.0) -> dict[str, Any]:
    """The JSON that is replayed, saved and shown. busy: share of the processor that other work took."""
    return {
        "format": FORMAT, "version": __version__, "prompt": left.prompt, "options": asdict(left.options),
        "hardware": dict(left.hardware), "runs": [lane(left), lane(right)],
        "busy": busy,
    }  # fmt: skip


def lane(recording: Recording) -> dict[str, Any]:
    """One side of a race. rate: tokens/s from the request to the last token, what a viewer sees."""
    decoder, answer = recording.options.decoder, recording.answer
    stats = answer.stats
    return {
        "decoder": decoder, "title": NAMES.get(decoder, decoder),
        "frame": frame(answer, recording.options), "text": answer.text, "tokens": stats.completion_tokens,
        "token_ids": answer.token_ids, "total": stats.last_token_at, "ttft": stats.first_token_at or 0.0,
        "rate": stats.tokens_per_s, "stats": stats.to_dict(),
    }  # fmt: skip


def to_html(record: Mapping[str, Any]) -> str:
    """The race as one file that needs nothing else."""
    return assets.saved("playRace", "DuoChat race", record)


class Races:
    """What the page's race tab can ask for."""

    def __init__(self, engine: Worker) -> None:
        self._engine = engine
        self._jobs = Jobs()

    def prepare(self, _action: dict[str, Any]) -> dict[str, Any]:
        """The ready prompts and the decoders to choose from."""
        return {"ready": assets.words("race"), "decoders": NAMES}

    def start(self, action: dict[str, Any]) -> dict[str, Any]:
        """action: {prompt, left, right, temperature, seed, max_tokens}; returns {ticket}. Raises DuoChatError."""
        prompt = checked_prompt(action.get("prompt"))
        decoders = (_decoder(action.get("left", "duotree")), _decoder(action.get("right", "autoregressive")))
        options = Options(
            temperature=float(action.get("temperature") or 0),
            seed=int(action.get("seed") or 0),
            max_tokens=min(MOST_TOKENS, max(1, int(action.get("max_tokens") or 128))),
        )
        options.sampling()
        return {"ticket": self._jobs.start(lambda job: run(self._engine, prompt, decoders, options, job))}

    def follow(self, action: dict[str, Any]) -> dict[str, Any]:
        """How far the race is, and at its end the record."""
        return self._jobs.look(action.get("ticket"))

    def halt(self, action: dict[str, Any]) -> None:
        self._jobs.stop(action.get("ticket"))

    def saved(self, action: dict[str, Any]) -> dict[str, Any]:
        """A race as a self-contained HTML file: the finished one of a ticket, or a saved record.

        Raises DuoChatError when there is none.
        """
        record = action.get("record") or self._jobs.look(action.get("ticket")).get("result")
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise DuoChatError("The race is not finished: wait for its end, then save it.")
        return {"html": to_html(record)}


def _decoder(name: Any) -> str:
    if name not in NAMES:
        raise DuoChatError(f"There is no decoder {name!r}: choose one of {', '.join(NAMES)}.")
    return name
