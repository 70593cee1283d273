"""The benchmark's figures against values computed by hand, and its method on fake models."""

import argparse
import html
import json
import re
import time
from dataclasses import replace

import pytest
from fakes import VOCAB, FakeDrafter, FakeTarget, costs

from duochat import DuoChatError
from duochat.bench import (
    ablations,
    bench,
    contest,
    contestants,
    figures,
    goals,
    machine,
    metrics,
    report,
    report_page,
    tasks,
)
from duochat.bench.metrics import Run
from duochat.engine.costs import Costs
from duochat.engine.lanes import Answer, Cancelled, Candidates
from duochat.engine.rounds import Batch, Draft, Round
from duochat.engine.sampling import Sampling
from duochat.engine.tree import Tree

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


def traits(*names, **kinds):
    """What a report must know of contestants."""
    kinds = dict.fromkeys(names, "decoder") | kinds
    return {name: {"kind": kind, "decoder": name, "budget": None} for name, kind in kinds.items()}


def found(total_s=2.1):
    return metrics.of_rounds(answer(), total_s)


def run(tokens=None, **other):
    values = {"task": "qa", "question": "1", "turn": 0, "repeat": 0, "decoder": "duotree", "prompt_tokens": 10}
    values |= {"first_s": 1.0, "total_s": 2.1, **found(), **other}
    return Run(**values | ({"tokens": tokens} if tokens is not None else {}))


def test_counts():
    f = found()
    assert f["tokens"] == [100, 0, 1, 50, 4, 5]
    assert f["finish"] == "stop"
    assert f["forwards"] == 3
    assert [f[k] for k in ("drafted", "accepted", "rejected", "ignored", "pending")] == [7, 4, 2, 1, 6]
    assert (f["hits"], f["outcomes"]) == (1, 2)
    assert f["budget"] == pytest.approx(10 / 3)


def test_busy_time_counts_between_first_and_last_token_only():
    """First token at 1.0, last at 2.0. GPU: 1.1-1.5 and 1.6-2.0. CPU: 1.0-1.05, 1.2-1.4, 1.45-1.7."""
    f = found()
    assert f["gpu_busy_s"] == pytest.approx(0.8)
    assert f["cpu_busy_s"] == pytest.approx(0.5)
    assert f["overlap_s"] == pytest.approx(0.2 + 0.05 + 0.1)


def test_time_split_adds_up_to_the_whole():
    split = found()["split_s"]
    expected = {"prefill": 1.0, "verify": 0.7, "transfer": 0.1, "wait": 0.14, "bookkeeping": 0.06, "hidden": 0.1}
    assert split == pytest.approx(expected)
    assert sum(split.values()) == pytest.approx(2.1)
    assert found()["draft_s"] == pytest.approx({"decode": 0.95, "choosing": 0.05})
    assert found()["gap_s"] == pytest.approx(0.03)  # median of 0.1 - 0.04 and 0.1 - 0.1


def test_acceptance_by_position_and_rank():
    """The siblings 2 and 3 are one test, at the third place of their round."""
    f = found()
    assert f["depths"] == [[2, 2], [2, 2], [0, 1]]
    assert f["ranks"] == [1, 3, 1]
    assert f["ngram"] == 1
    assert metrics.by_rank([run(), run()]) == [1 / 5, 3 / 5, 1 / 5]


def test_seconds_by_width():
    assert found()["widths"] == {"4": [2, pytest.approx(0.8)]}
    assert metrics.by_width([run(), run()]) == {"4": pytest.approx(0.4)}


def test_tpot_leaves_the_first_token_out():
    assert run().tpot_s == pytest.approx(1.1 / 5)
    assert run(tokens=[7], total_s=1.0).tpot_s == 0


def test_run_survives_json():
    one = run()
    assert Run.from_dict(json.loads(json.dumps(one.to_dict()))) == one


# ---------------------------------------------------------------- figures over requests


def timed(decoder, question, tokens, seconds, task="qa", turn=0, repeat=0):
    return Run(task, question, turn, repeat, decoder, 10, list(range(tokens)), "stop", seconds / 10, seconds)


def test_speed_is_a_mean_over_questions_and_a_ratio_of_totals():
    runs = [timed("a", "1", 100, 1.0), timed("a", "2", 10, 1.0)]
    s = metrics.summary(runs)
    assert s["tokens_per_s"] == pytest.approx(55)
    assert s["tokens_per_s_total"] == pytest.approx(55)
    s = metrics.summary([*runs, timed("a", "2", 10, 3.0, turn=1)])  # question 2: 20 tokens in 4 s
    assert s["tokens_per_s"] == pytest.approx((100 + 5) / 2)
    assert s["tokens_per_s_total"] == pytest.approx(120 / 5)


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
    assert metrics.percentile([1.0, 2.0], 50) == 1.5


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
    assert s["overlap"] == pytest.approx(0.35 / 1.1)
    assert sum(s["split"].values()) == pytest.approx(1)


def test_every_figure_is_described():
    s = report.build([timed("autoregressive", "1", 9, 1.0)], traits("autoregressive"), {}, {})
    assert s["decoders"]["autoregressive"]["all"].keys() == report.FIGURES.keys()
    assert s.keys() <= report.SECTIONS.keys()


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
        return {"target_dtype": self.dtype, "target_device": "fake", "draft_threads": 1}


QUESTIONS = [
    tasks.Question("chat", "1", ("tell me of the sea", "and of the shore")),
    tasks.Question("qa", "2", ("who is there",)),
    tasks.Question("qa", "3", ("what is that",)),
]
ABOUT = {"settings": {"target": "t", "draft": "d", "max_tokens": 24, "temperature": 0.0, "seeds": [0],
                      "reproducible": False},
         "machine": {"cpu": "c", "cores": 1, "cpu_load": 0.0, "gpus": [], "versions": {}}}  # fmt: skip


def measure(tmp_path, engine=None, names=("autoregressive", "duotree"), plan=None, everybody=None, **args):
    args = argparse.Namespace(
        **{"json": tmp_path / "out.json", "html": tmp_path / "out.html", "resume": False, "simulate": False} | args
    )
    plan = plan or contest.Plan(QUESTIONS, max_tokens=24)
    about = {key: dict(value) for key, value in ABOUT.items()}
    engine = engine or Engine()
    ours = everybody or [contestants.Decoder(name, engine) for name in names]
    status = bench.measure(args, plan, engine, Tokenizer(), ours, about)
    return status, json.loads(args.json.read_text())


def test_all_decoders_on_fakes(tmp_path, capsys):
    status, results = measure(tmp_path, names=bench.DECODERS)
    assert status == 0
    assert results["equal"] is results["strict"] is results["complete"] is True
    assert len(results["runs"]) == 4 * 4
    assert {e["all"]["requests"] for e in results["decoders"].values()} == {4}
    for r in results["runs"]:
        assert r["drafted"] == r["accepted"] + r["rejected"] + r["ignored"]
        assert sum(r["split_s"].values()) == pytest.approx(r["total_s"])
        assert len(r["tokens"]) <= 24
    out = capsys.readouterr().out
    assert "Every decoder gave the tokens of plain decoding." in out
    assert json.loads(out.splitlines()[-1])["decoders"].keys() == results["decoders"].keys()


def test_the_page_needs_nothing_else_and_says_all_the_tables_say(tmp_path):
    _, results = measure(tmp_path, names=bench.DECODERS)
    written = (tmp_path / "out.html").read_text()
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", written)
    for _, headers, rows in report.tables(results):
        for cell in (*headers, *(cell for row in rows for cell in row)):
            assert html.escape(cell) in written
    titles = [figure.layout.title.text for figure in figures.all_figures(results)]
    assert len(titles) == 6
    assert all(json.dumps(title)[1:-1] in written for title in titles)


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


def test_looks_differ_in_more_than_colour():
    looks = figures.styles([str(i) for i in range(9)]).values()
    assert len({look["colour"] for look in looks}) == 9
    assert len({(look["pattern"], look["dash"], look["marker"]) for look in looks}) == 9


def test_a_decoder_that_changes_a_token_is_reported_and_fails(tmp_path, monkeypatch, capsys):
    honest = contestants.decode

    def broken(context, request, *lanes, **options):
        for r in honest(context, request, *lanes, **options):
            if request.decoder == "duotree" and r.index == 2:
                r = replace(r, tokens=((r.tokens[0] + 1) % VOCAB, *r.tokens[1:]))
            yield r

    monkeypatch.setattr(contestants, "decode", broken)
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
    honest = contestants.decode
    monkeypatch.setattr(contestants, "decode", lambda c, request, *lanes, **o: (
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
            return contestants.Timed(
                0.1, 0.2, {"tokens": [7, 8] if self.name == "autoregressive" else [9], "finish": "stop"}
            )

    b = contest.Bench([Contestant(n) for n in ("autoregressive", "b", "c")], Tokenizer(), 1000,
                    contest.Plan(QUESTIONS, Sampling(seed=5), repeat=2))  # fmt: skip
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
    decoder = contestants.Decoder("duotree", engine)
    for _ in range(2):
        decoder.answer([5, 6, 7], Sampling(), 4, lambda: False)
    begins = [i for i, context in enumerate(seen) if context == [5, 6, 7]]
    assert len(begins) == 2
    assert all(seen[i - 1] == [0] for i in begins)


def test_an_interrupted_benchmark_keeps_what_is_done_and_goes_on(tmp_path):
    def both():
        return [contestants.Decoder(name, Engine()) for name in ("autoregressive", "duotree")]

    plan = contest.Plan(QUESTIONS, max_tokens=24)
    b = contest.Bench(both(), Tokenizer(), 1000, plan)
    assert [len(b.runs) for _ in b.run(lambda: len(b.runs) >= 5)] == [4]
    assert len(b.runs) == 5
    about = {**ABOUT, "settings": {"max_tokens": 24}}
    path = tmp_path / "out.json"
    bench.save(path, report.build(b.runs, bench.traits(b), about, b.timelines))

    again = contest.Bench(both(), Tokenizer(), 1000, plan)
    bench.resume(again, path, {"max_tokens": 24})
    assert again.runs == b.runs
    for _ in again.run():
        pass
    assert again.runs[:5] == b.runs
    assert len({r.key for r in again.runs}) == len(again.runs) == 8
    with pytest.raises(DuoChatError, match="another max_tokens"):
        bench.resume(again, path, {"max_tokens": 12})
    path.write_text("{}")
    with pytest.raises(DuoChatError, match="no result"):
        bench.resume(again, path, {"max_tokens": 24})


def test_a_cancelled_answer_is_no_run():
    decoder = contestants.Decoder("duotree", Engine())
    with pytest.raises(Cancelled):
        decoder.answer([5, 6, 7], Sampling(), 4, lambda: True)


def test_plain_decoding_always_takes_part_and_names_are_checked():
    assert bench.chosen_decoders("duotree") == ["autoregressive", "duotree"]
    assert bench.chosen("task", "all", tasks.TASKS) == list(tasks.TASKS)
    with pytest.raises(DuoChatError, match="no decoder 'magic': choose from autoregressive"):
        bench.chosen_decoders("magic")


def test_emptying_the_caches_is_not_timed():
    engine = Engine()
    engine.target = FakeTarget(delay=lambda: 0.05 if engine.target.calls == 1 else 0.0)
    timed = contestants.Decoder("autoregressive", engine).answer([5, 6, 7], Sampling(), 4, lambda: False)
    assert timed.total_s < 0.04


# ---------------------------------------------------------------- ablations


def variant(name, engine, temperature=0.0):
    return next(v for v in ablations.variants(engine, temperature) if v.name == name)


def slow_engine(kind="noisy"):
    engine = Engine(kind)
    engine.target = FakeTarget(eos=(), delay=lambda: 4e-3)
    engine.target.shares_cores = True
    return engine


def rounds_of(name, engine=None, temperature=0.0):
    sampling = Sampling(temperature, seed=3)
    return variant(name, engine or slow_engine(), temperature).answer([5, 6, 7], sampling, 40, lambda: False).rounds


def test_no_ablation_changes_the_text():
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature, seed=1)
        answers = {
            v.name: v.answer([5, 6, 7], sampling, 30, lambda: False).figures["tokens"]
            for v in (contestants.Decoder("autoregressive", Engine()), *ablations.variants(Engine(), temperature))
        }
        assert len({tuple(tokens) for tokens in answers.values()}) == 1
        assert all(name in ablations.__doc__ or "-budget-" in name for name in [*answers][1:])
        assert ("tree-other-noise" in answers) == (temperature > 0)


def test_a_fixed_budget_holds():
    assert max(len(r.pending) for r in rounds_of("tree-budget-2", slow_engine("perfect"))) == 2


def test_one_sequence_is_a_chain():
    drafted = [d for r in rounds_of("paper-one-sequence") for d in r.drafted]
    assert drafted
    assert {d.rank for d in drafted} == {1}


def test_in_turns_no_batch_begins_beside_a_forward():
    rounds = rounds_of("tree-in-turns")
    batches = [b for r in rounds for b in r.batches]
    assert batches
    late = sum(r.started + 1e-3 < b.started < r.ended - 1e-3 for r in rounds for b in batches)
    assert late <= len(batches) / 10  # a thread may be held up between its choice and its clock


def test_without_prefetch_siblings_of_verified_tokens_are_left_alone():
    """root - a - b, and beside them a sibling of each: s (of a) and t (of b). Verified: a and b."""
    tree = Tree([1, 2])
    tree.grow(tree.root, Candidates((10, 11), (0.9, 0.1)))
    a, s = tree.root.children
    tree.grow(a, Candidates((12, 13), (0.9, 0.1)))
    b, t = a.children
    schedule = ablations.NoPrefetch(Costs.of({1: 8e-3, 16: 9e-3}, {1: 1e-3, 8: 1e-3}), 2)
    assert schedule.pending(tree) == [a, b]
    assert set(schedule.frontier(tree, verifying=True)) == {b}
    tree.grow(b, Candidates((14,), (0.9,)))
    assert set(schedule.frontier(tree, verifying=True)) == {b.children[0]}
    tree.grow(b.children[0], Candidates((), ()))
    assert schedule.frontier(tree, verifying=True) == []
    assert set(schedule.frontier(tree, verifying=False)) == {s, t}


def test_without_ngram_and_without_calibration():
    repeated = slow_engine("wrong")

    def verify(context, tree, *_):
        time.sleep(3e-3)
        return Answer([4] * (len(tree) + 1), [1.0] * (len(tree) + 1), [])

    repeated.target.verify = verify
    origins = {d.origin for r in rounds_of("tree-no-ngram", repeated) for d in r.drafted}
    assert origins == {"model"}
    assert "ngram" in {d.origin for r in rounds_of("tree-no-calibration", repeated) for d in r.drafted}
    firsts = [d for r in rounds_of("tree-no-calibration") for d in r.drafted if d.parent == -1 and d.origin == "model"]
    assert any(d.reach == pytest.approx(d.prob) for d in firsts)


def test_other_noise_reaches_the_draft_alone():
    engine, seen = Engine(), []
    expand = engine.drafter.expand
    engine.drafter.expand = lambda c, n, sampling, x: seen.append(sampling) or expand(c, n, sampling, x)
    rounds_of("tree-other-noise", engine, temperature=1.0)
    rounds_of("tree-no-noise", engine, temperature=1.0)
    assert {s.seed for s in seen if s.temperature} - {0} == {3 ^ 0x5EED}
    assert any(s.temperature == 0 and s.seed == 3 for s in seen)


def test_ablations_are_reported_against_their_decoder(tmp_path, capsys):
    engine = Engine()
    names = ("autoregressive", "duotree", "duodecoding")
    everybody = [*(contestants.Decoder(n, engine) for n in names), *ablations.variants(engine, 0.0)]
    _, results = measure(tmp_path, engine, everybody=everybody)
    entry = results["decoders"]["tree-budget-4"]
    assert (entry["kind"], entry["decoder"], entry["budget"]) == ("ablation", "duotree", 4)
    runs = [Run.from_dict(raw) for raw in results["runs"]]
    varied, base = ([r for r in runs if r.decoder == name] for name in ("tree-budget-4", "duotree"))
    assert entry["over_base"] == metrics.speedup(varied, base)
    assert "Ablations" in capsys.readouterr().out
    assert "fixed draft budget" in (tmp_path / "out.html").read_text()


# ---------------------------------------------------------------- simulation


def test_the_simulation_is_reported_with_its_error(tmp_path, capsys):
    engine = slow_engine("perfect")
    engine.target.measure = lambda widths, context: {1: 5e-3}
    engine.drafter.measure = lambda sizes, threads: {1: 1e-3}
    _, results = measure(tmp_path, engine, names=bench.DECODERS, simulate=True)
    found = results["simulation"]
    assert found["requests"] == 2  # tasks
    firsts = [r for r in results["runs"] if r["decoder"] == "duotree" and r["turn"] == 0 and r["question"] in "12"]
    speed = sum(len(r["tokens"]) for r in firsts) / sum(r["total_s"] for r in firsts)
    assert found["measured"]["duotree"] == pytest.approx(speed)
    assert found["error"]["duotree"] == pytest.approx(found["predicted"]["duotree"] / speed - 1)
    assert {"7B bf16 on H100, 64 CPU cores"} <= {row["name"] for row in found["elsewhere"]}
    out = capsys.readouterr().out
    assert "Simulation of this machine" in out
    assert "Simulation of other hardware" in out


# ---------------------------------------------------------------- goals


def test_goals_against_hand_computed_values():
    """Plain: 10 tokens a second in both tasks; duotree 20 and 40; duodecoding 16 and 16; generate 2 and 1."""
    speeds = {"autoregressive": (10, 10), "duotree": (20, 40), "duodecoding": (16, 16), "generate": (2, 1)}
    runs = [
        replace(timed(name, "1", 11, 11 / speed, task), gap_s=2e-4, forwards=11, gpu_busy_s=0.9 * 0.9 * 11 / speed)
        for name, pair in speeds.items()
        for task, speed in zip(("qa", "code"), pair, strict=True)
    ]
    about = {"machine": {"lanes": {"target_weight_bytes": 8e9}}}
    probed = {"copy_bytes_per_s": 1e11, "width_1_s": 0.1, "width_32_s": 0.12,
              "ttft_s": {"autoregressive": 0.2, "duotree": 0.2, "speculative": 0.4}}  # fmt: skip
    rows = goals.table(report.build(runs, traits(*speeds, generate="peer"), about, {}), probed)
    found = {row.what: (row.measured, row.reached) for row in rows}
    expected = [
        ("plain decoding: time per token / weight bytes per copy bandwidth", 0.099 / 0.08, True),
        ("forward at width 32 / width 1", 1.2, False),
        ("host gap between two target forwards, ms, slowest decoder", 0.2, True),
        ("duotree / plain decoding, mean of the tasks", 3.0, True),
        ("duotree / plain decoding, best task", 4.0, True),
        ("duotree / duodecoding", (20 / 16 + 40 / 16) / 2, True),
        ("duotree / generate", (10 + 40) / 2, True),
        ("duotree / assisted", None, None),
        ("duotree: GPU idle between first and last token, %", 10.0, False),
        ("TTFT, 128-token prompt: duotree / plain decoding", 1.0, True),
        ("TTFT, 128-token prompt: duotree / speculative", 0.5, True),
    ]
    for what, measured, reached in expected:
        assert found.pop(what) == (measured if measured is None else pytest.approx(measured), reached)
    assert found == {}
    _, headers, cells = report.goals({"goals": [row.to_dict() for row in rows]})
    printed = report.grid(headers, cells)
    assert "not measured" in printed
    assert printed.count("missed") == 2


# ---------------------------------------------------------------- peers


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target and a draft as tiny GGUF files, and both lanes loaded from them."""
    from toy_models import write_gguf

    from duochat import config
    from duochat.chat.worker import load_chat

    folder = tmp_path_factory.mktemp("pair")
    path = write_gguf(folder / "toy.gguf", quantized=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DUOCHAT_CACHE", str(folder / "cache"))
        settings = config.load(target=str(path), draft=str(path), context_length=128)
        yield settings, load_chat(settings, lambda *_: None)


def test_all_peers_give_the_tokens_of_plain_decoding(pair):
    from duochat.bench.peers import WAYS, Loader

    settings, talk = pair
    load = Loader(settings, talk.engine, 128, lambda *_: None)
    context = talk.tokenizer.prompt([{"role": "user", "content": "a b c a b"}])
    plain = contestants.Decoder("autoregressive", talk.engine).answer(context, Sampling(), 24, lambda: False)
    assert tuple(WAYS) == contestants.PEERS
    for name in WAYS:
        peer = load(name)
        assert peer.name == name
        timed = peer.answer(context, Sampling(), 24, lambda: False)
        assert timed.figures["tokens"] == plain.figures["tokens"], name
        assert timed.figures["finish"] == plain.figures["finish"]
        assert 0 < timed.first_s <= timed.total_s
        with pytest.raises(Cancelled):
            peer.answer(context, Sampling(), 24, lambda: True)


def test_llama_cpp_needs_a_gguf_file(pair, tmp_path):
    from duochat.bench.peers import Loader
    from duochat.models import fetch, target_folder

    settings, talk = pair
    folder = target_folder(fetch(settings.target))
    load = Loader(replace(settings, target=str(folder)), talk.engine, 128, lambda *_: None)
    with pytest.raises(DuoChatError, match="GGUF"):
        load("llama.cpp")


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


def test_peak_memory_begins_anew():
    machine.reset_peaks()
    before = machine.peaks()["host_bytes"]
    block = bytearray(64 << 20)
    during = machine.peaks()["host_bytes"]
    del block
    machine.reset_peaks()
    assert during - before > 50 << 20
    assert machine.peaks()["host_bytes"] < during - (30 << 20)
