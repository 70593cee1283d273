"""The benchmark's figures against values computed by hand, and its method on fake models."""

import argparse
import gc
import html
import json
import re
import threading
from dataclasses import asdict, replace
from pathlib import Path
from urllib.request import urlopen

import pytest
import toy_models
from fakes import VOCAB, FakeDrafter, FakeTarget, costs

from duochat import DuoChatError, config
from duochat.bench import (
    bench,
    contest,
    machine,
    metrics,
    peers,
    report,
    report_page,
    simulate,
    tasks,
)
from duochat.bench.metrics import Run
from duochat.engine.engine import Engine as Pair
from duochat.engine.lanes import Cancelled
from duochat.engine.rounds import Batch, Draft, Round
from duochat.engine.sampling import Sampling

# ---------------------------------------------------------------- figures of one request


def draft(id, parent, position, rank=1, origin="model"):
    return Draft(id, parent, position, token=id, prob=0.5, reach=0.5, rank=rank, origin=origin)


def answer():
    """Four rounds. Prefill gives 1 token; then 2 of 3 verified are accepted and a sibling pair is refuted; then a
    block is accepted and EOS ends the answer inside it; the draft works before, during and after."""
    prefill = Round(0, 10, 0.0, 1.0, (100,), "plain", batches=(Batch(0.2, 0.6, 1),), phase="prefill", budget=4.0)
    first = Round(
        1, 11, 1.1, 1.5, (0, 1, 50), "correction",
        drafted=(draft(0, -1, 11), draft(1, 0, 12, rank=2), draft(2, 1, 13), draft(3, 1, 13, rank=2)),
        batches=(Batch(0.9, 1.05, 1), Batch(1.2, 1.4, 2, sampling=0.05)),
        pending=(0, 1, 2), accepted=(0, 1), rejected=(2, 3), waited=0.04, transfer=0.1, budget=4.0, hit=False,
    )  # fmt: skip
    second = Round(
        2, 14, 1.6, 2.0, (4, 5), "accepted",
        drafted=(draft(4, -1, 14, origin="ngram"), draft(5, 4, 15), draft(6, 5, 16)),
        batches=(Batch(1.45, 1.7, 1),),
        pending=(4, 5, 6), accepted=(4, 5), ignored=(6,), waited=0.1, budget=2.0, hit=True, finish="stop",
    )  # fmt: skip
    return [prefill, first, second]


def run(**other):
    asked = {"task": "qa", "question": "1", "decoder": "duotree", "prompt_tokens": 10}
    return replace(Run.of_rounds(answer(), 1.0, 2.1), **asked | other)


def test_counts():
    f = run()
    assert f.tokens == [100, 0, 1, 50, 4, 5]
    assert f.finish == "stop"
    assert f.forwards == 3
    assert (f.drafted, f.accepted, f.rejected, f.ignored, f.pending) == (7, 4, 2, 1, 6)
    assert (f.hits, f.outcomes) == (1, 2)
    assert f.budget == pytest.approx(10 / 3)


def test_busy_time_counts_between_first_and_last_token_only():
    """First token at 1.0, last at 2.0. GPU: 1.1-1.5 and 1.6-2.0. CPU: 1.0-1.05, 1.2-1.4, 1.45-1.7."""
    assert run().gpu_busy_s == pytest.approx(0.8)
    assert run().cpu_busy_s == pytest.approx(0.5)


def test_host_time_between_forwards_leaves_waiting_out():
    assert run().gap_s == pytest.approx(0.03)  # median of 0.1 - 0.04 and 0.1 - 0.1


def test_acceptance_by_position():
    """The siblings 2 and 3 are one test, at the third place of their round."""
    assert run().depths == [[2, 2], [2, 2], [0, 1]]


def test_tpot_leaves_the_first_token_out():
    assert run().tpot_s == pytest.approx(1.1 / 5)
    assert run(tokens=[7], total_s=1.0).tpot_s == 0


def test_run_survives_json():
    one = run()
    assert Run.from_dict(json.loads(json.dumps(asdict(one)))) == one


# ---------------------------------------------------------------- figures over requests


def timed(decoder, question, tokens, seconds, task="qa", turn=0, repeat=0):
    asked = {"task": task, "question": question, "turn": turn, "repeat": repeat, "decoder": decoder}
    return Run(list(range(tokens)), "stop", seconds / 10, seconds, **asked)


def test_speed_is_a_mean_over_questions():
    runs = [timed("a", "1", 100, 1.0), timed("a", "2", 10, 1.0)]
    s = metrics.summary(runs)
    assert s["tokens_per_s"] == pytest.approx(55)
    s = metrics.summary([*runs, timed("a", "2", 10, 3.0, turn=1)])  # question 2: 20 tokens in 4 s
    assert s["tokens_per_s"] == pytest.approx((100 + 5) / 2)


def test_speedup_is_the_mean_over_tasks_of_the_ratio_of_mean_speeds():
    plain = [timed("p", "1", 10, 1.0), timed("p", "2", 10, 2.0), timed("p", "1", 10, 1.0, "code")]
    fast = [timed("f", "1", 10, 0.5), timed("f", "2", 10, 2.0), timed("f", "1", 10, 0.25, "code")]
    assert metrics.speedup(fast, plain) == pytest.approx(((20 + 5) / (10 + 5) + 4) / 2)
    assert metrics.speedup(fast[:1], plain) == pytest.approx(2)  # only questions that both answered
    assert metrics.speedup(fast, []) == 0


def test_latency_percentiles():
    runs = [timed("a", str(i), 11, float(i)) for i in range(1, 22)]
    s = metrics.summary(runs)
    assert s["ttft_median_s"] == pytest.approx(1.1)
    assert s["ttft_p95_s"] == pytest.approx(2.0)
    assert s["tpot_median_s"] == pytest.approx(0.9 * 11 / 10)


def test_drafting_and_devices():
    s = metrics.summary([run(), run()])
    assert s["mean_accepted_length"] == 2
    assert s["acceptance_rate"] == pytest.approx(4 / 6)
    assert s["drafted_per_round"] == pytest.approx(7 / 3)
    assert s["hit_rate"] == 0.5
    assert s["acceptance_by_position"] == [1, 1, 0]
    assert s["tested_by_position"] == [4, 4, 2]
    assert s["gpu_idle"] == pytest.approx(1 - 0.8 / 1.1)
    assert s["cpu_idle"] == pytest.approx(1 - 0.5 / 1.1)


def test_every_figure_is_described():
    s = report.build([timed("autoregressive", "1", 9, 1.0)], {"autoregressive": "decoder"}, {})
    assert s["decoders"]["autoregressive"]["all"].keys() == report.FIGURES.keys()


def test_differences_name_the_first_position():
    plain = [timed("p", "1", 10, 1.0), timed("p", "2", 10, 1.0)]
    other = [timed("f", "1", 10, 1.0), replace(timed("f", "2", 10, 1.0), tokens=[0, 1, 2, 99])]
    assert metrics.differences(other, plain) == [{"task": "qa", "question": "2", "turn": 0, "repeat": 0, "position": 3}]
    assert metrics.first_difference([1, 2], [1, 2, 3]) == 2


def test_interval_holds_the_speedup_and_shrinks_to_a_point_without_spread():
    plain = [timed("p", str(i), 10, 1.0) for i in range(8)]
    even = [timed("f", str(i), 10, 0.5) for i in range(8)]
    assert metrics.interval(even, plain) == pytest.approx((2, 2))
    uneven = [timed("f", str(i), 10, 0.3 + 0.1 * (i % 4)) for i in range(8)]
    low, high = metrics.interval(uneven, plain)
    assert low < metrics.speedup(uneven, plain) < high
    assert metrics.interval(uneven, plain) == (low, high)
    assert metrics.interval(uneven, []) == (0, 0)


# ---------------------------------------------------------------- loops

LOOP, STRAIGHT = [*range(40), *[1, 2, 3, 4, 5, 6, 7, 8, 9] * 5], list(range(85))


def test_an_answer_loops_when_much_of_it_was_said_before():
    assert metrics.repeated(LOOP) == pytest.approx(1 - (33 + 7 + 7) / 78)  # straight, across, and 7 new ones of 9
    assert metrics.repeated(STRAIGHT) == metrics.repeated([5, 5, 5]) == metrics.repeated([]) == 0
    sentence = list(range(20))  # said twice in 128 tokens it is no loop, said three times it is
    rest = list(range(100, 208))
    assert not run(tokens=[*sentence, *rest[:88], *sentence]).loops
    assert run(tokens=[*sentence, *rest[:68], *sentence, *sentence]).loops
    assert not run(tokens=[1, 2, 3, 4, 5, 6, 7] * 2 + rest).loops  # shorter than a passage


def looping(decoder, question, seconds, tokens=LOOP, task="qa"):
    return replace(timed(decoder, question, 1, seconds, task), tokens=tokens)


def test_means_with_and_without_answers_that_loop():
    """A request counts only where neither side loops: question 1 loops in both, 2 in ours alone, 4 in plain alone."""
    plain = [looping("p", "1", 8.5), *(looping("p", question, 8.5, STRAIGHT) for question in "23")]
    fast = [looping("f", "1", 0.85), looping("f", "2", 1.7), looping("f", "3", 4.25, STRAIGHT)]
    plain, fast = [*plain, looping("p", "4", 8.5)], [*fast, looping("f", "4", 0.85, STRAIGHT)]
    s = metrics.summary(fast, plain)
    assert (s["requests"], s["loops"], s["requests_without_loops"]) == (4, 2, 1)
    assert s["speedup"] == pytest.approx((100 + 50 + 20 + 100) / 40)
    assert s["speedup_without_loops"] == pytest.approx(2)
    assert s["tokens_per_s_without_loops"] == pytest.approx(20)
    assert metrics.summary(plain, plain)["loops"] == 2
    none = metrics.summary(fast[:2], plain[:2])
    assert (none["requests_without_loops"], none["speedup_without_loops"]) == (0, 0)


def test_loops_are_told_by_task_and_over_all():
    runs = [looping("autoregressive", "1", 8.5), looping("autoregressive", "1", 8.5, STRAIGHT, "code")]
    runs += [looping("duotree", "1", 0.85), looping("duotree", "1", 4.25, STRAIGHT, "code")]
    results = report.build(runs, {"autoregressive": "decoder", "duotree": "decoder"}, ABOUT | {"strict": True})
    assert report.without_loops(results).to_dict("index") == {
        "autoregressive": {"qa": "– (1)", "code": "1.00 (0)", "mean": "1.00 (1)"},
        "duotree": {"qa": "– (1)", "code": "2.00 (0)", "mean": "2.00 (1)"},
    }
    assert "duotree: 1 of 2 answers loop" in report.remarks(results)
    assert report.brief(results | {"strict": True})["decoders"]["duotree"]["speedup_without_loops"] == 2
    straight = [r for r in runs if r.task == "code"]
    assert report.without_loops(report.build(straight, {"autoregressive": "decoder"}, ABOUT)).empty


RESULTS = sorted((Path(__file__).parent.parent / "assets" / "results").glob("*.json"))
RESULTS = [path for path in RESULTS if "ties" not in path.name]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_of_earlier_versions_open_and_keep_their_figures(path):
    stored = json.loads(path.read_text())
    results = report.again(stored)
    for name, entry in stored["decoders"].items():
        for figure in ("speedup", "tokens_per_s", "acceptance_rate", "gpu_idle", "ttft_median_s", "speedup_interval"):
            if entry["all"][figure] is not None:
                assert results["decoders"][name]["all"][figure] == pytest.approx(entry["all"][figure]), figure
    assert len(report.tables(results)) >= 2
    assert report.text(results)


def test_of_the_recorded_answers_those_loop_that_go_round_in_circles():
    runs = json.loads((Path(__file__).parent / "old" / "h200-7b.json").read_text())["runs"]  # read by a person
    plain = [Run.from_dict(r) for r in runs if r["decoder"] == "autoregressive"]
    loops = {(r.question, r.turn) for r in plain if r.loops}
    assert loops == {("chat-1", 0), ("chat-1", 1), ("chat-7", 1), ("rag-1", 0), ("translation-7", 0)}


# ---------------------------------------------------------------- prompts


def lines(path, *objects):
    path.write_text("\n".join(json.dumps(o) for o in objects) + "\n")


def test_prompts_of_all_known_forms(tmp_path):
    lines(tmp_path / "question.jsonl",
          {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
          {"question_id": 401, "category": "math_reasoning", "turns": ["c"]})  # fmt: skip
    lines(tmp_path / "humaneval.jsonl", {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": ""})
    found = {(q.task, q.id): q.turns for q in tasks.load(("chat", "math", "code"), folder=tmp_path)}
    assert found[("chat", "81")] == ("a", "b")
    assert found[("math", "401")] == ("c",)
    assert "def f():" in found[("code", "HumanEval/0")][0]


def test_a_limit_takes_questions_evenly_and_tasks_in_turn(tmp_path):
    for task in ("qa", "math"):
        lines(tmp_path / f"{task}.jsonl", *({"question_id": i, "turns": ["x"]} for i in range(10)))
    found = tasks.load(("qa", "math"), 3, tmp_path)
    assert [(q.task, q.id) for q in found] == [("qa", "0"), ("math", "0"), ("qa", "3"), ("math", "3"), ("qa", "6"),
                                               ("math", "6")]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "word"), [('{"turns": []}', "line 1"), ("no json", "line 1"), ('{"turns": ["x"]}', "math")]
)
def test_unusable_prompts_are_named(tmp_path, content, word):
    (tmp_path / "qa.jsonl").write_text(content)
    with pytest.raises(DuoChatError, match=word):
        tasks.load(("qa", "math"), folder=tmp_path)


# ---------------------------------------------------------------- the method


class Tokenizer:
    """One token a word."""

    def prompt(self, messages):
        return [1, *(hash_of(word) for m in messages for word in m["content"].split()), 2]

    def decode(self, ids):
        return " ".join(str(i) for i in ids)


def hash_of(word):
    return 3 + sum(word.encode()) % (VOCAB - 3)


class Engine:
    """Fake lanes behind the engine's names."""

    fault, context_length = "", 1000

    def __init__(self, kind="noisy", dtype="float32"):
        self.target, self.drafter, self.costs, self.dtype = FakeTarget(), FakeDrafter(kind), costs(), dtype
        self.target.shares_cores = True

    def describe(self):
        backends = {"target_backend": "torch of glass", "draft_backend": "paper"}
        return {"target_dtype": self.dtype, "target_device": "fake", "draft_threads": 1, **backends}


QUESTIONS = [
    tasks.Question("chat", "1", ("tell me of the sea", "and of the shore")),
    tasks.Question("qa", "2", ("who is there",)),
    tasks.Question("qa", "3", ("what is that",)),
]
ABOUT = {"settings": {"target": "t", "draft": "d", "max_tokens": 24, "temperature": 0.0, "seeds": [0],
                      "reproducible": False},
         "machine": {"cpu": "c", "cores": 1, "cpu_load": 0.0, "gpus": [], "versions": {}}}  # fmt: skip


def plan_of(*rest, **options):
    return contest.Plan(QUESTIONS, *rest, tokenizer=Tokenizer(), context_length=1000, **options)


def measure(tmp_path, engine=None, names=("autoregressive", "duotree"), plan=None, everybody=None, pairs=(), **args):
    switches = dict.fromkeys(("resume", "simulate", "ties"), False)
    args = argparse.Namespace(**{"json": tmp_path / "out.json", "html": tmp_path / "out.html"} | switches | args)
    plan = plan or plan_of(max_tokens=24)
    about = {key: dict(value) for key, value in ABOUT.items()}
    engine = engine or Engine()
    ours = everybody or bench.entered(names, engine, dict(pairs))
    status = bench.measure(args, plan, engine, ours, about, dict(pairs))
    return status, json.loads(args.json.read_text())


def test_all_decoders_on_fakes(tmp_path, capsys):
    status, results = measure(tmp_path, names=bench.DECODERS)
    assert status == 0
    assert results["equal"] is results["strict"] is results["complete"] is True
    assert len(results["runs"]) == 4 * 4
    assert {e["all"]["requests"] for e in results["decoders"].values()} == {4}
    for r in results["runs"]:
        assert r["drafted"] == r["accepted"] + r["rejected"] + r["ignored"]
        assert len(r["tokens"]) <= 24
    out = capsys.readouterr().out
    assert "Every decoder gave the tokens of plain decoding." in out
    assert json.loads(out.splitlines()[-1])["decoders"].keys() == results["decoders"].keys()


def test_the_page_needs_nothing_else_and_says_all_the_tables_say(tmp_path):
    _, results = measure(tmp_path, names=bench.DECODERS)
    written = (tmp_path / "out.html").read_text()
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", written)
    for title, table in report.tables(results).items():
        for cell in (title, *table.columns, *table.index, *table.to_numpy().flat):
            assert html.escape(cell) in written
    assert all(meaning in written for meaning in report.FIGURES.values())
    for plot in (report_page.speedup_by_task(results), report_page.acceptance_by_position(results)):
        assert json.dumps(plot.layout.title.text)[1:-1] in written


def test_the_page_can_be_made_again_from_the_results(tmp_path):
    measure(tmp_path, names=bench.DECODERS)
    made = (tmp_path / "out.html").read_bytes()
    results = next(path for path in tmp_path.glob("*.json"))
    report_page.main(argparse.Namespace(results=results, html=tmp_path / "again.html"))
    assert (tmp_path / "again.html").read_bytes() == made
    for wrong in ("{}", "[]", "no JSON"):
        results.write_text(wrong)
        with pytest.raises(DuoChatError, match="no result of bench"):
            report_page.main(argparse.Namespace(results=results, html=tmp_path / "again.html"))


def test_looks_differ_in_more_than_colour(tmp_path):
    """A decoder has its colour in both plots; plain decoding is the line at 1, and a page of it alone has no bars."""
    _, results = measure(tmp_path, names=bench.DECODERS)
    bars, lines = (plot(results).data for plot in (report_page.speedup_by_task, report_page.acceptance_by_position))
    assert [bar.name for bar in bars] == ["speculative", "duodecoding", "duotree"]
    assert len({bar.marker.pattern.shape for bar in bars}) == len({bar.marker.color for bar in bars}) == 3
    assert len({(line.line.dash, line.marker.symbol) for line in lines}) == len(lines) > 1
    colours = {bar.name: bar.marker.color for bar in bars}
    assert all(line.line.color == colours[line.name] for line in lines)
    _, plain = measure(tmp_path, names=["autoregressive"])
    assert report_page.speedup_by_task(plain).data == report_page.acceptance_by_position(plain).data == ()


def test_a_decoder_that_changes_a_token_is_reported_and_fails(tmp_path, monkeypatch, capsys):
    honest = contest.decode

    def broken(context, request, *lanes, **options):
        for r in honest(context, request, *lanes, **options):
            if request.decoder == "duotree" and r.index == 2:
                r = replace(r, tokens=((r.tokens[0] + 1) % VOCAB, *r.tokens[1:]))
            yield r

    monkeypatch.setattr(contest, "decode", broken)
    status, results = measure(tmp_path)
    assert status == bench.UNEQUAL
    assert results["equal"] is False
    first = results["decoders"]["duotree"]["differing"][0]
    tokens = {r["decoder"]: r["tokens"] for r in results["runs"] if (r["question"], r["turn"]) == ("1", 0)}
    at = first["position"]
    assert tokens["duotree"][:at] == tokens["autoregressive"][:at]
    assert tokens["duotree"][at] != tokens["autoregressive"][at]
    assert "duotree: unequal in 4 of 4 answers" in capsys.readouterr().out


def test_in_bf16_a_difference_is_reported_and_does_not_fail(tmp_path, monkeypatch, capsys):
    honest = contest.decode
    monkeypatch.setattr(contest, "decode", lambda c, request, *lanes, **o: (
        replace(r, tokens=tuple((t + (request.decoder == "duotree")) % VOCAB for t in r.tokens))
        for r in honest(c, request, *lanes, **o)))  # fmt: skip
    status, results = measure(tmp_path, Engine(dtype="bfloat16"))
    assert status == 0
    assert results["equal"] is False
    assert results["strict"] is False
    assert "duotree: differs in 4 of 4 answers, the earliest at token 0" in capsys.readouterr().out


def test_order_turns_and_contexts_are_the_same_for_all():
    asked = []

    class Contestant:
        kind = "decoder"

        def __init__(self, name):
            self.name = name

        def answer(self, context, sampling, max_tokens, stopped):
            asked.append((self.name, tuple(context), sampling.seed))
            return Run([7, 8] if self.name == "autoregressive" else [9], "stop", 0.1, 0.2)

    everybody = [Contestant(n) for n in ("autoregressive", "b", "c")]
    b = contest.Bench(everybody, plan_of(Sampling(seed=5), repeat=2))
    for _ in b.run():
        pass
    asked = asked[3:]  # warm-up
    assert [name[0] for name, _, _ in asked[:12]] == [*"abc", *"bca", *"bca", *"cab"]
    for i in range(0, len(asked), 3):
        assert len({context for _, context, _ in asked[i : i + 3]}) == 1
    assert hash_of("7") in asked[3][1]  # the second turn goes on from plain decoding's answer
    assert hash_of("9") not in asked[3][1]
    assert [seed for _, _, seed in asked] == [5] * 12 + [6] * 12
    assert len(b.runs) == 24


def test_caches_are_emptied_before_each_answer():
    seen = []

    class Target(FakeTarget):
        def verify(self, context, *rest):
            seen.append(list(context))
            return super().verify(context, *rest)

    engine = Engine()
    engine.target = Target()
    decoder = contest.Decoder("duotree", engine)
    for _ in range(2):
        decoder.answer([5, 6, 7], Sampling(), 4, lambda: False)
    begins = [i for i, context in enumerate(seen) if context == [5, 6, 7]]
    assert len(begins) == 2
    assert all(seen[i - 1] == [0] for i in begins)


def test_an_interrupted_benchmark_keeps_what_is_done_and_goes_on(tmp_path):
    def both():
        return [contest.Decoder(name, Engine()) for name in ("autoregressive", "duotree")]

    plan = plan_of(max_tokens=24)
    b = contest.Bench(both(), plan)
    assert [len(b.runs) for _ in b.run(lambda: len(b.runs) >= 5)] == [4]
    assert len(b.runs) == 5
    about = {**ABOUT, "settings": {"max_tokens": 24}}
    path = tmp_path / "out.json"
    bench.save(path, report.build(b.runs, bench.kinds(b), about))

    again = contest.Bench(both(), plan)
    bench.resume(again, path, {"max_tokens": 24})
    assert again.runs == b.runs
    for _ in again.run():
        pass
    assert again.runs[:5] == b.runs
    assert len({(r.request, r.decoder) for r in again.runs}) == len(again.runs) == 8
    with pytest.raises(DuoChatError, match="another max_tokens"):
        bench.resume(again, path, {"max_tokens": 12})
    path.write_text("{}")
    with pytest.raises(DuoChatError, match="no result"):
        bench.resume(again, path, {"max_tokens": 24})


def test_contestants_do_not_influence_each_other():
    """A draft lane that gave threads up has them again when another contestant answers."""
    engine, told = Engine(), []
    engine.costs = replace(engine.costs, threads=6, reading=8)
    engine.drafter.set_threads = lambda threads, reading=0: told.append((threads, reading))
    one, other = (contest.Decoder(name, engine) for name in ("duotree", "duodecoding"))
    one.costs.hands.now = 3  # stalled
    for contestant in (other, one, other):
        contestant.answer([5, 6, 7], Sampling(), 4, lambda: False)
    assert [t for t in told if t in ((6, 8), (3, 8))] == [(6, 8), (3, 8), (6, 8)]


def test_the_draft_is_asked_in_its_own_thread_alone():
    engine, threads = Engine(), set()
    expand = engine.drafter.expand
    engine.drafter.expand = lambda *args: threads.add(threading.get_ident()) or expand(*args)
    contest.Decoder("duotree", engine).answer([5, 6, 7], Sampling(), 24, lambda: False)
    simulate.record(engine.drafter, [5, 6, 7], Run([8, 9, 10], "length", 0.1, 0.2))
    assert threads == {engine.drafter.thread.submit(threading.get_ident).result()}


def test_the_report_says_which_backends_served(tmp_path, capsys):
    _, results = measure(tmp_path)
    assert results["machine"]["lanes"]["target_backend"] == "torch of glass"
    for told in (capsys.readouterr().out, (tmp_path / "out.html").read_text()):
        assert "(torch of glass, float32, fake)" in told
        assert "(paper, 1 threads)" in told


def test_a_cancelled_answer_is_no_run():
    decoder = contest.Decoder("duotree", Engine())
    with pytest.raises(Cancelled):
        decoder.answer([5, 6, 7], Sampling(), 4, lambda: True)


def test_names_are_checked():
    assert contest.chosen("task", "all", tasks.TASKS) == list(tasks.TASKS)
    with pytest.raises(DuoChatError, match="no decoder 'magic': choose from autoregressive"):
        contest.chosen("decoder", "magic", bench.DECODERS)


def test_emptying_the_caches_is_not_timed():
    engine = Engine()
    engine.target = FakeTarget(delay=lambda: 0.05 if engine.target.calls == 1 else 0.0)
    timed = contest.Decoder("autoregressive", engine).answer([5, 6, 7], Sampling(), 4, lambda: False)
    assert timed.total_s < 0.04


# ---------------------------------------------------------------- simulation and drafts


def test_the_simulation_is_reported_beside_what_was_measured(tmp_path, capsys):
    engine = Engine("perfect")
    engine.target = FakeTarget(eos=(), delay=lambda: 4e-3)
    engine.target.shares_cores = True
    engine.target.measure = lambda widths, context: {1: 5e-3}
    engine.drafter.measure = lambda sizes, threads: {1: 1e-3}
    _, results = measure(tmp_path, engine, names=bench.DECODERS, simulate=True)
    found = results["simulation"]
    assert found["requests"] == 2  # tasks
    firsts = [r for r in results["runs"] if r["decoder"] == "duotree" and r["turn"] == 0 and r["question"] in "12"]
    speed = sum(len(r["tokens"]) for r in firsts) / sum(r["total_s"] for r in firsts)
    assert found["measured"]["duotree"] == pytest.approx(speed)
    error = 100 * (found["predicted"]["duotree"] / speed - 1)
    assert f"{error:+.1f} %" in capsys.readouterr().out


def test_drafts_are_compared_by_agreement_and_speed(tmp_path, capsys):
    """A perfect draft agrees always, one that is never right never; agreement can be had alone."""
    engine = Pair(FakeTarget(eos=(), delay=lambda: 2e-3), FakeDrafter(), costs())
    engine.target.shares_cores = True
    engine.describe = Engine().describe
    pairs = {name: Pair(engine.target, FakeDrafter(name), costs()) for name in ("perfect", "wrong")}
    for pair in pairs.values():
        pair.drafter.describe = lambda: {"draft_backend": "paper"}
    plan = plan_of(Sampling(0.7, seed=2), max_tokens=24)
    _, results = measure(tmp_path, engine, plan=plan, pairs=pairs)
    perfect, wrong = (results["drafts"][name] for name in ("perfect", "wrong"))
    assert (perfect["rank-1"], perfect["top-4"], perfect["lane"], wrong["rank-1"]) == (1, 1, "paper", 0)
    lengths = {name: entry["all"]["mean_accepted_length"] for name, entry in results["decoders"].items()}
    assert lengths["autoregressive"] == 1
    assert lengths["perfect duotree"] > 1.5 > lengths["wrong duotree"]
    assert "paper" in capsys.readouterr().out
    _, alone = measure(tmp_path, engine, names=["autoregressive"], plan=plan, pairs=pairs)
    assert alone["drafts"] == results["drafts"]
    assert list(alone["decoders"]) == ["autoregressive"]


# ---------------------------------------------------------------- peers


SERVER = Path(__file__).parent / "fake_llama_server.py"


@pytest.fixture
def started(tmp_path):
    """Makes the peers of a pair of files on the fake server."""
    engine = Pair(FakeTarget(eos={2}), FakeDrafter(), costs=costs())
    engine.describe = lambda: {"target_gpu_layers": 33}
    for name in ("target.gguf", "draft.gguf"):
        toy_models.write_gguf(tmp_path / name)

    def make(binary=SERVER, target="target.gguf", lengths=(4,), thresholds=(0.5,)):
        settings = config.load(target=str(tmp_path / target), draft=str(tmp_path / "draft.gguf"))
        return peers.Peers(settings, engine, str(binary), lengths, thresholds, [[5, 6], [7]], lambda *_: None)

    return make


def options(server):
    return json.load(urlopen(f"{server.url}/health"))["options"]


def test_a_peer_is_asked_as_we_are_and_reads_its_own_clock(started, monkeypatch):
    server = started()("llama-server")
    asked = []
    monkeypatch.setattr(server, "_ask", lambda body, ask=server._ask: asked.append(body) or ask(body))
    timed = server.answer([5, 6], Sampling(0.7, top_k=40, top_p=0.9, seed=3), 24, lambda: False)
    assert timed == Run([5, 6, 3, 2], "stop", 0.02, 0.22)
    wanted = {"prompt": [5, 6], "n_predict": 24, "seed": 3, "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.0}
    assert wanted.items() <= asked[0].items()
    assert asked[0]["cache_prompt"] is False
    assert {"-ngl": "33", "-c": "10000"}.items() <= options(server).items()
    with pytest.raises(Cancelled):
        server.answer([5], Sampling(), 24, lambda: True)
    server.close()


def test_the_best_settings_of_a_peers_draft_take_part(started):
    load = started(lengths=(2, 4), thresholds=(0.0, 0.5))
    server = load("llama-server-cpu-draft")
    told = options(server)
    assert (told["--spec-draft-n-max"], told["--spec-draft-p-min"], told["-ngld"]) == ("4", "0.5", "0")
    tried = load.tried["llama-server-cpu-draft"]
    assert max(tried, key=tried.get) == "4 tokens, p 0.5"
    assert len(tried) == 4
    assert started()("llama-server-gpu-draft").name == "llama-server-gpu-draft"


def test_servers_end_with_their_contestants(started):
    server = started()("llama-server")
    process = server._process
    assert process.poll() is None
    del server
    gc.collect()
    assert process.poll() is not None


@pytest.mark.parametrize("fault", ["start", "answer"])
def test_a_server_that_fails_is_a_sentence_with_its_last_words(started, monkeypatch, fault):
    monkeypatch.setenv("FAULT", fault)
    with pytest.raises(DuoChatError, match=r"no such device|the device is lost"):
        started()("llama-server").answer([5], Sampling(), 4, lambda: False)


def test_peers_need_the_server_and_gguf_files(started, tmp_path):
    with pytest.raises(DuoChatError, match="--llama-server"):
        started(binary="no-such-server")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DuoChatError, match="GGUF"):
        started(target="folder")


# ---------------------------------------------------------------- the machine


def test_the_machine_is_described_and_a_busy_one_is_named():
    found = machine.describe()
    assert found["cpu"]
    assert found["cores"] >= 1
    assert {"duochat", "python", "torch", "transformers"} <= found["versions"].keys()
    assert 0 <= found["cpu_load"] <= 1
    idle = found | {"cpu_load": 0.05, "gpus": []}
    assert machine.warning(idle) == ""
    card = {"name": "a card", "load": 0.5}
    assert "the CPU is 90 % busy and a card is 50 % busy" in machine.warning(idle | {"cpu_load": 0.9, "gpus": [card]})
