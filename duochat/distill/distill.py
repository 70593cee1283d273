"""`python -m duochat distill`: make a small, fast draft model for a target out of the target alone.

The target writes chat, students learn its distribution on it, each is measured and exported as GGUF. One worker process
per GPU (or one on the CPU) works by the clock; workers share files, never wait on each other for more than a moment,
and go on from their last checkpoint after a crash or in a second run with the same --work folder.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from torch import nn

from duochat import DuoChatError
from duochat.bench import tasks
from duochat.distill import evaluate, gguf_file
from duochat.distill.student import deepened, fuse, sizes, student_of
from duochat.distill.texts import Text, Texts
from duochat.distill.training import Head, Plan, Student, train
from duochat.distill.writing import row_bytes, written
from duochat.models import gguf, weights

log = logging.getLogger("distill")
RESTARTS = 3
TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}
GPU_LENGTHS, GPU_ROWS = {512: 0.7, 1152: 0.3}, 6144  # of the text, with its share of the time; of a batch at most
CPU_BATCHES = "8x128:0.8,2x192:0.2"
SHORT, FEW, MOST = ("chat", "math", "code"), 2, 40  # evaluation prompts: tasks and number of our own; of a folder's
COVERED = (8192, 16384, 24576, 32768)  # sizes of a draft's vocabulary whose share of the answers is told


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--target",
        required=True,
        metavar="GGUF",
        help="its GGUF file, of the llama, qwen2 or qwen3 architecture",
    )
    add("--out", type=Path, required=True, help="where the first student goes, as GGUF")
    add("--work", type=Path, help="folder for text, checkpoints and reports (default: beside --out)")
    add("--minutes", type=float, default=20.0, help="the whole run's budget: text, training, measuring")
    add(
        "--students",
        default="320x5",
        help="width x layers[x inner width][@rate],… one after the other; ';' parts workers",
    )
    add("--start", metavar="GGUF,...", help="earlier students to go on from, each for the student of its width")
    add("--mix", default="q8_0", help="quantisation of --out, such as q4_1,token_embd=q8_0")
    add("--vocabulary", type=int, default=24576, help="tokens that --out proposes, the target's most frequent; 0 = all")
    add("--prompts", type=Path, help="folder of evaluation prompts in Spec-Bench's format")
    add("--limit", type=int, help=f"evaluation prompts a task ({MOST}; of our own {FEW})")
    add("--answer-tokens", type=int, default=128, help="tokens of each answer that is measured")
    add("--text-share", type=float, default=0.4, help="part of the budget in which the target writes")
    add("--batches", help="rows x length:share of the writing, the later ones long (default: as many rows as fit)")
    add("--batch-tokens", type=int, help="tokens a training step (GPU: 49152)")
    add("--rate", type=float, default=0.01, help="Muon's learning rate; half of it suits --start")
    add("--hard", type=float, default=0.25, help="weight of the target's most likely token beside its distribution")
    add("--seed", type=int, default=0)
    add("--no-compile", action="store_true", help="without torch.compile and CUDA graphs")


def main(args: argparse.Namespace) -> None:
    _tell_progress()
    args.work = args.work or args.out.with_suffix(".work")
    args.work.mkdir(parents=True, exist_ok=True)
    groups, plans, seconds = _groups(args), _plans(args), args.minutes * 60
    config = gguf_file.Source.open(Path(args.target)).config
    for plan in plans:
        plan.config(config)  # refuses what does not fit before the work
    log.info("%.0f s of writing, then training till %.0f s: see --minutes", args.text_share * seconds, seconds)
    options = {name: value for name, value in vars(args).items() if not callable(value)}
    common = options | {"deadline": time.time() + seconds, "workers": len(groups)}
    _supervise([common | {"worker": k, "students": group} for k, group in enumerate(groups)])
    _finish(args, [plan.name for plan in plans])


def _groups(args: argparse.Namespace) -> list[str]:
    """The students of each worker; without ';' they are dealt out in turn, to one worker a GPU."""
    if ";" in args.students:
        return args.students.split(";")
    students = args.students.split(",")
    workers = min(max(1, torch.cuda.device_count()), len(students))
    return [",".join(students[k::workers]) for k in range(workers)]


def _tell_progress() -> None:
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO, stream=sys.stderr)
    logging.getLogger("gguf").setLevel(logging.WARNING)


def _supervise(parts: Sequence[dict]) -> None:
    """Run a worker on each part, the arguments that are its own; one that dies starts again from its checkpoint,
    uncompiled."""
    fresh, running, deaths = dict(enumerate(parts)), {}, Counter[int]()
    while fresh or running:
        for k, part in fresh.items():
            running[k] = get_context("spawn").Process(target=_work, args=(part,))
            running[k].start()
        time.sleep(0.5)
        fresh = {}
        for k in [k for k, process in running.items() if not process.is_alive()]:
            if (status := running.pop(k).exitcode) == 0:
                continue
            deaths[k] += 1
            log.error("worker %d died (status %d)", k, status)
            if deaths[k] <= RESTARTS and (time.time() < parts[k]["deadline"] - 15 or deaths[k] == 1):
                fresh[k] = parts[k] | {"no_compile": True}


def _work(part: dict) -> None:
    _tell_progress()
    Worker(argparse.Namespace(**part)).run()


def _finish(args: argparse.Namespace, names: list[str]) -> None:
    """Join the workers' reports, and put the first student that came through at --out."""
    reports = [json.loads(path.read_text()) for path in sorted(args.work.glob("report-*.json"))]
    students = {name: figures for report in reports for name, figures in report.pop("students").items()}
    _write_json(args.work / "report.json", {"students": students, "workers": reports})
    made = [args.work / f"{name}.gguf" for name in names if (args.work / f"{name}.gguf").exists()]
    if not made:
        raise DuoChatError(f"No student came through: see the log above, then run again with --work {args.work}.")
    shutil.copyfile(made[0], args.out)
    for name, figures in students.items():
        told = {kind: figures[kind]["mean"] for kind in ("untrained", *TEMPERATURES) if kind in figures}
        log.info("%s  %s", name, told)
    log.info("wrote %s", args.out)


def _write_json(path: Path, value: object) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1))
    part.replace(path)


class Worker:
    """One device's share of the run: write text, then train, measure and export its students, one after the other."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.id, self.work, self.began = args, args.worker, args.work, time.time()
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", self.id % torch.cuda.device_count()) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        torch.manual_seed(args.seed + self.id)
        self.compiled = cuda and not args.no_compile
        if self.compiled:
            torch._dynamo.config.suppress_errors = True  # an uncompiled run is better than none
            torch._dynamo.config.recompile_limit = 64
        self.batch_tokens = args.batch_tokens or (49152 if cuda else 1024)
        name = torch.cuda.get_device_name(self.device) if cuda else "cpu"
        self.report: dict = {"worker": self.id, "device": name, "students": {}}

    def run(self) -> None:
        self.source = gguf_file.Source.open(Path(self.args.target))
        cuda = self.device.type == "cuda"
        target = weights.loaded(self.source.header, self.device, torch.bfloat16 if cuda else torch.float32)
        self._say("target loaded, %.0f s", time.time() - self.began)
        mine = list(TEMPERATURES)[self.id :: self.args.workers]
        kinds = sorted(TEMPERATURES, key=lambda kind: kind not in mine)  # the others' are waited for last
        self.answered = {kind: self._answers(target, kind, kind in mine) for kind in kinds}
        if self.compiled:  # now, for it takes some seconds for each size of a batch
            fuse(target)
        self._write_text(target)
        students = [(plan, self._begun(target, plan)) for plan in _plans(self.args)]
        del target
        torch.cuda.empty_cache()
        self._await([self.work / f"text-{k}.done" for k in range(self.args.workers)])
        paths = sorted(self.work.glob("text-*-*.npz"))  # of all workers; one that is late is not waited for
        texts = Texts(map(Text.load, paths), self.batch_tokens, self.device, self.args.seed + self.id)
        self.frequent = self._most_frequent(texts)
        head = Head(self.source.config.vocab_size, self.frequent, self.args.hard, self.device)
        for done, (plan, model) in enumerate(students):
            student = Student(plan, model, head, gguf_file.coarse(model, self.args.mix), self.compiled)
            left = (self.args.deadline - time.time()) / (len(students) - done)
            seconds = max(1.0, left - max(0.05 * left, 12.0 if cuda else 0.0))  # the rest is for measuring
            self._say("train on %.1f M tokens for %.0f s", texts.total / 1e6, seconds)
            told = train(student, texts, seconds, self.work / f"checkpoint-{plan.name}.pt")
            self.report["students"][plan.name]["training"] = told
            try:
                self._measure_and_export(student)
            except Exception:
                log.exception("student %s could not be measured or exported; the others go on", plan.name)
        self._say("done")

    def _say(self, text: str, *values: object) -> None:
        log.info(f"[{self.id}] {text}", *values)

    # Text ------------------------------------------------------------------------------------------------------------

    def _write_text(self, target: nn.Module) -> None:
        done = self.work / f"text-{self.id}.done"
        if done.exists():
            return
        seconds = (self.args.deadline - self.began) * self.args.text_share
        until = time.monotonic() + max(0, seconds - (time.time() - self.began))
        made = len(list(self.work.glob(f"text-{self.id}-*.npz")))
        seed = self.args.seed + 1000 * self.id + made
        texts = written(target, self.source, self._batches(target), seed, until, self.compiled)
        total, began, saved = 0, time.monotonic(), []
        with ThreadPoolExecutor(1) as disk:  # the device writes on meanwhile
            for number, text in enumerate(texts, start=made):
                saved.append(disk.submit(text.save, self.work / f"text-{self.id}-{number:04d}.npz"))
                total += text.tokens.size
                speed, share = total / (time.monotonic() - began), text.answers.mean() * 100
                self._say("text %.2f M tokens  %.0f tokens/s  %.0f %% answers", total / 1e6, speed, share)
        for one in saved:
            one.result()
        self.report["text_tokens_per_s"] = round(speed)
        done.touch()

    def _batches(self, target: nn.Module) -> list[tuple[int, int, float]]:
        """(rows, length, share of the time): what was asked for, else what half of the free memory holds."""
        if self.args.batches or self.device.type != "cuda":
            return _parsed(self.args.batches or CPU_BATCHES)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        rows = {n: min(GPU_ROWS, int(free / 2 / row_bytes(target.config, n))) for n in GPU_LENGTHS}
        self._say("%s rows x tokens fill half of the %.0f GB that are free of %.0f", rows, free / 1e9, total / 1e9)
        return [(max(1, rows[n]), n, share) for n, share in GPU_LENGTHS.items()]

    def _most_frequent(self, texts: Texts) -> list[int]:
        """The tokens that a draft is to propose, the most frequent in the target's answers first; none = all."""
        counts, most = texts.counts(self.source.config.vocab_size), self.args.vocabulary
        ranking = np.argsort(-counts, kind="stable")
        covered = {size: round(float(counts[ranking[:size]].sum() / counts.sum()), 4) for size in COVERED}
        self.report |= {"text_tokens": texts.total, "covered": covered}
        self._say("the most frequent tokens are of the answers %s", covered)
        return ranking[:most].tolist() if 0 < most < len(counts) else []

    def _await(self, paths: Sequence[Path]) -> None:
        """Wait for files of other workers, at most half a minute or a tenth of what is left."""
        patience = time.monotonic() + min(30, max(0, self.args.deadline - time.time()) * 0.1)
        while not all(path.exists() for path in paths) and time.monotonic() < patience:
            time.sleep(0.2)

    def _answers(self, target: nn.Module, kind: str, mine: bool) -> list[evaluate.Answered]:
        """The target's answers to the evaluation prompts, written once by one of the workers."""
        path, began = self.work / f"answers-{kind}.json", time.monotonic()
        if not mine:
            self._await([path])
        if not path.exists():
            length, temperature = self.args.answer_tokens, TEMPERATURES[kind]
            answers = evaluate.answers(target, self.source, _asked(self.args), length, temperature, self.compiled)
            _write_json(path, [vars(one) for one in answers])
            self._say("%s answers to %d prompts, %.0f s", kind, len(answers), time.monotonic() - began)
        return [evaluate.Answered(**one) for one in json.loads(path.read_text())]

    # Students --------------------------------------------------------------------------------------------------------

    def _begun(self, target: nn.Module, plan: Plan) -> nn.Module:
        """A student cut out of the target, or an earlier one of its width."""
        config = plan.config(target.config)
        earlier = [weights.loaded(gguf.read(Path(p))) for p in (self.args.start or "").split(",") if p]
        start = next((deepened(m, config) for m in earlier if m.config.hidden_size == plan.width), None)
        model = (start or student_of(target, config)).to(self.device).requires_grad_()
        count, asked = sum(p.numel() for p in model.parameters()), self.answered["greedy"]
        told = evaluate.agreement(model, asked[:: max(1, len(asked) // 64)])
        about = {"shape": sizes(config), "weights": count, "rate": plan.rate, "untrained": told}
        self.report["students"][plan.name] = about
        self._say("student %s: %s, %.1f M weights, untrained %s", plan.name, sizes(config), count / 1e6, told["mean"])
        return model

    def _measure_and_export(self, student: Student) -> None:
        name, figures, frequent = student.plan.name, self.report["students"][student.plan.name], self.frequent
        proposed = len(frequent) or self.source.config.vocab_size
        figures |= {"loss": student.loss, "mix": self.args.mix, "vocabulary": proposed}
        for mix, path in (("f16", f"{name}.f16.gguf"), (self.args.mix, f"{name}.gguf")):
            write = (student.model, self.source, self.work / path, mix, f"DuoChat draft {name}", frequent)
            figures["bytes"] = gguf_file.write_student(*write)
        model = weights.loaded(gguf.read(self.work / f"{name}.gguf"), self.device)
        for kind, answered in self.answered.items():
            figures[kind] = evaluate.agreement(model, answered, TEMPERATURES[kind] > 0, frequent)
            self._say("%s %s %s", name, kind, figures[kind]["mean"])
        _write_json(self.work / f"report-{self.id}.json", self.report)


def _plans(args: argparse.Namespace) -> list[Plan]:
    return [Plan.parse(text, args.rate) for text in args.students.replace(";", ",").split(",")]


def _asked(args: argparse.Namespace) -> list[tasks.Question]:
    """The evaluation prompts: those of all tasks that the folder has, or a few short ones of ours."""
    if args.prompts is None:
        return tasks.load(SHORT, args.limit or FEW)
    there = dict.fromkeys(question.task for question in tasks.read(args.prompts))
    return tasks.load(list(there), args.limit or MOST, args.prompts)


def _parsed(batches: str) -> list[tuple[int, int, float]]:
    """`2048x512:0.75,...` as (rows, length, share)."""
    try:
        parts = [(size.split("x"), share) for size, share in (part.split(":") for part in batches.split(","))]
        return [(int(rows), int(length), float(share)) for (rows, length), share in parts]
    except ValueError as error:
        raise DuoChatError(f"--batches {batches!r} is not rows x length:share, such as {CPU_BATCHES}.") from error
