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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch

from duochat import DuoChatError
from duochat.distill import evaluate, gguf_file
from duochat.distill.student import deepened, student_of
from duochat.distill.texts import Text, Texts
from duochat.distill.training import Head, Plan, Student, Trainer, train
from duochat.distill.writing import row_bytes, written

log = logging.getLogger("distill")
RESTARTS = 3
TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}
GPU_LENGTHS, GPU_ROWS = {512: 0.7, 1152: 0.3}, 6144  # of the text, with its share of the time; of a batch at most
CPU_BATCHES = "8x128:0.8,2x192:0.2"
COVERED = (8192, 16384, 24576, 32768)  # sizes of a draft's vocabulary whose share of the answers is told


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", required=True, metavar="GGUF", help="the target's GGUF file, of the llama or qwen2 architecture")
    add("--out", type=Path, required=True, help="where the first student goes, as GGUF")
    add("--work", type=Path, help="folder for text, checkpoints and reports (default: beside --out)")
    add("--minutes", type=float, default=20.0, help="the whole run's budget: text, training, measuring")
    add("--students", default="320x5", help="width x layers[x inner width][@rate], commas between; ';' parts workers")
    add("--start", metavar="GGUF,...", help="earlier students to go on from, each for the student of its width")
    add("--mix", default="q8_0", help="quantisation of --out, such as q4_1,token_embd=q8_0")
    add("--vocabulary", type=int, default=24576, help="tokens that --out proposes, the target's most frequent; 0 = all")
    add("--prompts", type=Path, help="folder of evaluation prompts in Spec-Bench's format")
    add("--limit", type=int, default=40, help="evaluation prompts a task")
    add("--answer-tokens", type=int, default=128, help="tokens of each answer that is measured")
    add("--text-share", type=float, default=0.4, help="part of the budget in which the target writes")
    add("--batches", help="rows x length:share of the writing, the later ones long (default: as many rows as fit)")
    add("--batch-tokens", type=int, help="tokens a training step (GPU: 49152)")
    add("--rate", type=float, default=0.01, help="Muon's learning rate")
    add("--hard", type=float, default=0.25, help="weight of the target's most likely token beside its distribution")
    add("--seed", type=int, default=0)
    add("--no-compile", action="store_true", help="without torch.compile and CUDA graphs")


def main(args: argparse.Namespace) -> None:
    _tell_progress()
    args.work = args.work or args.out.with_suffix(".work")
    args.work.mkdir(parents=True, exist_ok=True)
    groups, seconds = _groups(args), args.minutes * 60
    plans = [Plan.parse(text) for group in groups for text in group.split(",")]
    shape = gguf_file.Source.open(Path(args.target)).shape
    for plan in plans:
        plan.shape(shape)  # refuses what does not fit before the work
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
    running = {k: _started(part) for k, part in enumerate(parts)}
    deaths = dict.fromkeys(running, 0)
    while running:
        time.sleep(0.5)
        for k in [k for k, process in running.items() if not process.is_alive()]:
            status = running.pop(k).exitcode
            if status == 0:
                continue
            deaths[k] += 1
            log.error("worker %d died (status %d)", k, status)
            if deaths[k] <= RESTARTS and (time.time() < parts[k]["deadline"] - 15 or deaths[k] == 1):
                running[k] = _started(parts[k] | {"no_compile": True})


def _started(part: dict) -> BaseProcess:
    process = get_context("spawn").Process(target=_work, args=(part,))
    process.start()
    return process


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
    """One device's share of the run: write text, train a group of students, measure and export them."""

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
        self.target = self.source.model()
        if self.device.type == "cuda":
            self.target = self.target.to(self.device, torch.bfloat16)
        self._say("target loaded, %.0f s", time.time() - self.began)
        self._answer()
        if self.compiled:  # now, for it takes some seconds for each size of a batch
            self.target.fuse()
        self._write_text()
        students = self._students()
        self._train(students)
        for student in students:
            try:
                self._measure_and_export(student)
            except Exception:
                log.exception("student %s could not be measured or exported; the others go on", student.plan.name)
        self._say("done")

    def _say(self, text: str, *values: object) -> None:
        log.info(f"[{self.id}] {text}", *values)

    # Text ------------------------------------------------------------------------------------------------------------

    def _write_text(self) -> None:
        done = self.work / f"text-{self.id}.done"
        if done.exists():
            return
        seconds = (self.args.deadline - self.began) * self.args.text_share
        until = time.monotonic() + max(0, seconds - (time.time() - self.began))
        made = len(list(self.work.glob(f"text-{self.id}-*.npz")))
        seed = self.args.seed + 1000 * self.id + made
        texts = written(self.target, self.source, self._batches(), seed, until, self.compiled)
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

    def _batches(self) -> list[tuple[int, int, float]]:
        """(rows, length, share of the time): what was asked for, else what half of the free memory holds."""
        if self.args.batches or self.device.type != "cuda":
            return _parsed(self.args.batches or CPU_BATCHES)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        rows = {n: min(GPU_ROWS, int(free / 2 / row_bytes(self.target.shape, n))) for n in GPU_LENGTHS}
        self._say("%s rows x tokens fill half of the %.0f GB that are free of %.0f", rows, free / 1e9, total / 1e9)
        return [(max(1, rows[n]), n, share) for n, share in GPU_LENGTHS.items()]

    def _texts(self) -> Texts:
        """The texts of all workers; one that is late is not waited for."""
        self._await([self.work / f"text-{k}.done" for k in range(self.args.workers)])
        paths = sorted(self.work.glob("text-*-*.npz"))
        return Texts(map(Text.load, paths), self.batch_tokens, self.device, self.args.seed + self.id)

    def _most_frequent(self, texts: Texts) -> list[int]:
        """The tokens that a draft is to propose, the most frequent in the target's answers first; none = all."""
        counts, most = texts.counts(self.source.shape.vocab), self.args.vocabulary
        np.save(self.work / f"answer-token-counts-{self.id}.npy", counts)
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

    # Evaluation prompts ----------------------------------------------------------------------------------------------

    def _answer(self) -> None:
        """The target's answers to the evaluation prompts at both temperatures, dealt out among the workers."""
        mine = list(TEMPERATURES)[self.id :: self.args.workers]
        for kind in mine:
            self._write_answers(kind)
        self._await([self._answers_path(kind) for kind in TEMPERATURES])
        for kind in TEMPERATURES:
            self._write_answers(kind)
        loaded = {kind: json.loads(self._answers_path(kind).read_text()) for kind in TEMPERATURES}
        self.answered = {kind: [evaluate.Answered(**one) for one in answers] for kind, answers in loaded.items()}

    def _write_answers(self, kind: str) -> None:
        path, began = self._answers_path(kind), time.monotonic()
        if path.exists():
            return
        asked = evaluate.prompts(self.args.prompts, self.args.limit)
        length, temperature = self.args.answer_tokens, TEMPERATURES[kind]
        answers = evaluate.answers(self.target, self.source, asked, length, temperature, self.compiled)
        _write_json(path, [vars(one) for one in answers])
        self._say("%s answers to %d prompts, %.0f s", kind, len(answers), time.monotonic() - began)

    def _answers_path(self, kind: str) -> Path:
        return self.work / f"answers-{kind}.json"

    # Training --------------------------------------------------------------------------------------------------------

    def _students(self) -> list[Student]:
        plans = [Plan.parse(text, self.args.rate) for text in self.args.students.split(",")]
        students = []
        earlier = [gguf_file.Source.open(Path(p)).model() for p in (self.args.start or "").split(",") if p]
        for plan in plans:
            shape = plan.shape(self.target.shape)
            start = next((deepened(m, shape) for m in earlier if m.shape.width == plan.width), None)
            model = (start or student_of(self.target, shape)).to(self.device).requires_grad_()
            student = Student(plan, model, gguf_file.coarse(model, self.args.mix))
            self.report["students"][plan.name] = self._described(student)
            students.append(student)
        return students

    def _described(self, student: Student) -> dict:
        shape, weights = student.model.shape, sum(p.numel() for p in student.model.parameters())
        asked = self.answered["greedy"]
        start = evaluate.agreement(student.model, asked[:: max(1, len(asked) // 64)])
        self._say(
            "student %s: %s, %.1f M weights, untrained %s", student.plan.name, shape, weights / 1e6, start["mean"]
        )
        return {"shape": vars(shape), "weights": weights, "rate": student.plan.rate, "untrained": start}

    def _train(self, students: list[Student]) -> None:
        del self.target
        torch.cuda.empty_cache()
        texts, start = self._texts(), self._resume(students)
        self.frequent = self._most_frequent(texts)
        head = Head(students[0].model.shape.vocab, self.frequent, self.args.hard, self.device)
        trainer = Trainer(students, head, self.compiled)
        left = self.args.deadline - time.time()
        reserve = max(0.05 * left, 12.0 * len(students) if self.device.type == "cuda" else 0.0)
        first, last = time.time(), time.time() + max(1.0, left - reserve)
        self._say("train on %.1f M tokens for %.0f s from %.0f %%", texts.total / 1e6, last - first, start * 100)

        def done() -> float:
            return min(1.0, start + (1 - start) * (time.time() - first) / (last - first))

        self.report["training"] = train(trainer, texts, done, 60.0, lambda share: self._save(students, share))
        self._save(students, 1.0)

    def _save(self, students: list[Student], share: float) -> None:
        part = self.work / f"checkpoint-{self.id}.part"
        torch.save({"share": share, "students": {s.plan.name: s.state() for s in students}}, part)
        part.replace(self.work / f"checkpoint-{self.id}.pt")

    def _resume(self, students: list[Student]) -> float:
        """Load the last checkpoint; returns the share of the training that it has behind it."""
        path = self.work / f"checkpoint-{self.id}.pt"
        if not path.exists():
            return 0.0
        saved = torch.load(path, map_location=self.device, weights_only=True)
        for student in students:
            if student.plan.name in saved["students"]:
                student.restore(saved["students"][student.plan.name])
        return saved["share"]

    # Result ----------------------------------------------------------------------------------------------------------

    def _export(self, student: Student, mix: str, name: str, frequent: Sequence[int] = ()) -> int:
        title = f"DuoChat draft {student.plan.name}"
        return gguf_file.write(student.model, self.source, self.work / name, mix, title, frequent)

    def _measure_and_export(self, student: Student) -> None:
        name, figures, frequent = student.plan.name, self.report["students"][student.plan.name], self.frequent
        proposed = len(frequent) or student.model.shape.vocab
        figures |= {"loss": student.loss, "mix": self.args.mix, "vocabulary": proposed}
        figures["bytes"] = self._export(student, self.args.mix, f"{name}.gguf", frequent)
        model = gguf_file.Source.open(self.work / f"{name}.gguf").model().to(self.device)
        for kind, answered in self.answered.items():
            figures[kind] = evaluate.agreement(model, answered, TEMPERATURES[kind] > 0, frequent)
            self._say("%s %s %s", name, kind, figures[kind]["mean"])
        _write_json(self.work / f"report-{self.id}.json", self.report)
        self._export(student, "f16", f"{name}.f16.gguf", frequent)


def _parsed(batches: str) -> list[tuple[int, int, float]]:
    """`2048x512:0.75,...` as (rows, length, share)."""
    try:
        parts = [(size.split("x"), share) for size, share in (part.split(":") for part in batches.split(","))]
        return [(int(rows), int(length), float(share)) for (rows, length), share in parts]
    except ValueError as error:
        raise DuoChatError(f"--batches {batches!r} is not rows x length:share, such as {CPU_BATCHES}.") from error
