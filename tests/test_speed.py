"""What the lanes cost, told of fake lanes whose costs are known."""

from fakes import FakeDrafter, FakeTarget, costs

from duochat.bench import speed
from duochat.engine.engine import Engine
from duochat.engine.sampling import Sampling


def lanes(drafter):
    target = FakeTarget(eos=(), context_length=700, delay=lambda: 2e-3)
    target.measure = lambda widths, context: {w: 1e-3 * w + 1e-6 * context for w in widths}
    target.describe = lambda: {"target_backend": "fake", "target_weight_bytes": 8_000_000}
    if drafter:
        drafter.describe = lambda: {"draft_backend": "fake"}
    return Engine(target, drafter, costs())


def test_forwards_by_width_and_context_and_what_each_decoder_takes():
    told = "\n".join(speed.study(lanes(FakeDrafter()), speed.cut([5, 6, 7]), Sampling()))
    rows = {line.split("  ")[0]: line.split() for line in told.splitlines() if line}
    assert "target_backend fake" in told
    assert rows["context 128"][2:5] == ["1.13", "2.13", "4.13"]
    assert rows["context 512"][2:5] == ["1.51", "2.51", "4.51"]
    assert "context 2048" not in rows  # longer than the target's
    assert list(rows)[-4:] == ["autoregressive", "speculative", "duodecoding", "duotree"]
    first, each, gap = map(float, rows["autoregressive"][1:])
    assert 2 <= each < 4
    assert 2 <= first < 6
    assert 0 < gap < 1
    assert float(rows["duotree"][2]) < each


def test_without_a_draft_plain_decoding_alone_is_timed():
    told = [*speed.study(lanes(None), speed.cut([5, 6, 7]), Sampling())][-1]
    assert "autoregressive" in told
    assert "duotree" not in told


def test_weights_are_told_beside_a_copy(monkeypatch):
    target = lanes(None).target
    monkeypatch.setattr(speed, "copy_bandwidth", lambda: 16e9)
    assert "take 0.50 ms; width 1 takes 3.02 times that" in speed.weights(target, 8_000_000)
    assert speed.weights(target, 0) == ""
    target.shares_cores = True
    assert speed.weights(target, 8_000_000) == ""


def test_a_short_prompt_is_repeated():
    assert speed.cut(range(3))[:5] == [0, 1, 2, 0, 1]
    assert len(speed.cut(range(3))) == len(speed.cut(range(1000))) == speed.PROMPT
