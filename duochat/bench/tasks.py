"""The seven tasks and their prompts: our own files in `assets/prompts`, Spec-Bench's and HumanEval's alike.

A file holds JSON lines: {"question_id", "category", "turns": [...]}, or HumanEval's {"task_id", "prompt"}. The file's
name tells the task; where it does not, as in Spec-Bench's one file for all, each line's category does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from duochat import DuoChatError

PROMPTS = Path(__file__).resolve().parents[2] / "assets" / "prompts"
TASKS = ("chat", "translation", "summarization", "qa", "math", "rag", "code")

# Names of Spec-Bench's files and categories that differ from ours.
ALIASES = {
    **dict.fromkeys(("mt_bench", "writing", "roleplay", "reasoning", "coding", "extraction", "stem"), "chat"),
    **dict.fromkeys(("humanities", "multi-turn", "mt-bench"), "chat"),
    **dict.fromkeys(("math_reasoning", "gsm8k"), "math"),
    **dict.fromkeys(("humaneval", "human_eval"), "code"),
    **dict.fromkeys(("retrieval", "retrieval-augmented generation"), "rag"),
    **dict.fromkeys(("wmt", "wmt14"), "translation"),
    **dict.fromkeys(("cnndm", "summarisation"), "summarization"),
}
COMPLETE = "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{}\n```"


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation to be had: what the user says, turn by turn."""

    task: str
    id: str  # unique within the task
    turns: tuple[str, ...]


def load(tasks: Sequence[str] = TASKS, limit: int | None = None, folder: Path | None = None) -> list[Question]:
    """At most `limit` questions of each task, taken evenly from all of its own, the tasks in turn.

    Raises DuoChatError when a task has no questions, or when a file is not of the known form.
    """
    folder = folder or PROMPTS
    found: dict[str, list[Question]] = {task: [] for task in tasks}
    for question in read(folder):
        if question.task in found:
            found[question.task].append(question)
    if empty := [task for task, questions in found.items() if not questions]:
        raise DuoChatError(f"{folder} has no prompts for {', '.join(empty)}: leave the task out or add a file.")
    columns = []
    for questions in found.values():  # at even distances: sets are often sorted by subject or difficulty
        count = min(limit or len(questions), len(questions))
        columns.append([questions[i * len(questions) // count] for i in range(count)])
    return [question for row in zip_longest(*columns) for question in row if question]


def read(folder: Path) -> Iterator[Question]:
    """All questions of a folder's *.jsonl files."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise DuoChatError(f"{folder} holds no *.jsonl files: name a folder with prompts in Spec-Bench's format.")
    for path in files:
        yield from _questions(path, path.read_text(encoding="utf-8").splitlines())


def _questions(path: Path, lines: Iterable[str]) -> Iterator[Question]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield question(json.loads(line), path.stem, number)
        except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
            raise DuoChatError(
                f'{path} line {number} is no prompt: give {{"question_id", "category", "turns": [...]}}.'
            ) from None


def question(raw: dict[str, Any], stem: str, number: int) -> Question:
    """One line of a file. Raises KeyError, TypeError, ValueError or StopIteration when it is of another form."""
    name = str(raw.get("question_id", raw.get("task_id", number)))
    turns = [COMPLETE.format(raw["prompt"].rstrip())] if "turns" not in raw else raw["turns"]
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError("no turns")
    names = (ALIASES.get(told.lower(), told.lower()) for told in (stem, raw.get("category", "")))
    return Question(next(task for task in names if task in TASKS), name, tuple(turns))
