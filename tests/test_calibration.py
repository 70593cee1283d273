"""What drafting costs the target, measured through the decoding loop."""

import time

import pytest
from fakes import EOS, FakeDrafter, FakeTarget, costs

from duochat.bench import forecast
from duochat.engine.backends import _quicker
from duochat.engine.calibration import _filled, contention
from duochat.engine.costs import Costs, Curve


class Disturbed(FakeTarget):
    """Answers in 10 ms; in 15 ms beside a draft at work."""

    drafter = None

    def verify(self, *args):
        time.sleep(0.01)
        if self.drafter.working:
            time.sleep(0.005)
        return super().verify(*args)


class Working(FakeDrafter):
    working = False

    def expand(self, *args):
        self.working = True
        time.sleep(0.002)
        try:
            return super().expand(*args)
        finally:
            self.working = False

    def set_threads(self, threads, reading=0):
        self.threads = threads


@pytest.mark.flaky(reruns=2)  # measures time
def test_contention_is_the_speed_that_drafting_takes_from_the_target():
    target, drafter = Disturbed(), Working("random")
    target.drafter = drafter
    assert contention(target, drafter, costs()) == pytest.approx(1 / 3, abs=0.1)
    assert drafter.threads == costs().threads


@pytest.mark.flaky(reruns=2)  # measures time
def test_lanes_that_do_not_meet_have_none():
    target = FakeTarget(delay=lambda: 0.004)
    assert contention(target, Working("random"), costs()) < 0.15


def test_a_draft_that_fails_costs_nothing():
    drafter = Working("random", fail_at=2)
    assert contention(FakeTarget(eos=(EOS,), delay=lambda: 0.004), drafter, costs()) == 0.0


def test_it_is_kept_for_the_next_start():
    known = costs()
    known.contention, known.shared = 0.25, True
    again = Costs.from_dict(known.to_dict())
    assert (again.contention, again.shared) == (0.25, True)


class Steady:
    """A target whose forwards take what their fill says."""

    shares_cores, context_length, fills, fill = False, 4096, (8, 32), 0

    def __init__(self, **seconds):
        self.seconds = seconds

    def measure(self, widths, context, repeats=5):
        return dict.fromkeys(widths, self.seconds[f"fill{self.fill}"] * (1 + context / 10000.0))


@pytest.mark.parametrize(("seconds", "fill"), [((7.0, 7.0), 32), ((6.0, 7.0), 8), ((12.0, 20.0), 0)])
def test_forwards_are_filled_up_to_what_brings_the_most(seconds, fill):
    target = Steady(fill8=seconds[0], fill32=seconds[1])
    natural = Curve({1: 4.0, 2: 5.0, 32: 12.0}, {1: 0.1, 2: 0.2, 32: 0.3})
    rows, found = _filled(target, natural)
    assert (rows, target.fill) == (fill, 0)
    assert list(found.seconds) == ([1, fill] if fill else [1, 2, 32])
    assert found(1) == (pytest.approx(seconds[fill == 32] * 1.0256) if fill else 4.0)


def test_llama_cpp_is_compared_again_until_the_lane_in_c_has_won(tmp_path):
    """So a first start on a busy machine costs that session alone."""
    file, loaded = tmp_path / "draft.gguf", []
    file.touch()

    class Lane:
        def __init__(self, *times):
            self.times, self.closed = list(times), False

        def describe(self):
            return {"draft_file": file.name}

        def close(self):
            self.closed = True

    def start(own, other):
        lanes = Lane(*own), Lane(*other)
        load = lambda: loaded.append(1) or lanes[1]  # noqa: E731
        found = _quicker("drafter", (file,), lanes[0], load, lambda lane: lane.times.pop(0))
        assert [lane.closed for lane in lanes] == [lane is not found and len(lane.times) < 3 for lane in lanes]
        return "native" if found is lanes[0] else "llama.cpp"

    assert start((5, 5, 5), (2, 2, 2)) == "llama.cpp"
    assert start((5, 1, 5), (2, 2, 2)) == "native"
    assert start((5, 5, 5), (2, 2, 2)) == "native"
    assert len(loaded) == 2


def test_caches_are_displaced_before_each_forward_but_those_by_itself():
    done = []

    class Target(FakeTarget):
        def verify(self, context, tree, *rest):
            done.append(1 + len(tree))
            return super().verify(context, tree, *rest)

    Target().measure((1, 2), 8, repeats=2, before=lambda: done.append(0))
    assert done == [1] + [0, 1, 0, 2] * 3 + [1] * 3


def test_a_forecast_displaces_what_lanes_that_take_turns_hold(monkeypatch, tmp_path):
    asked = []

    class Lane:
        def measure(self, sizes, *_, before):
            asked.append(before())
            return dict.fromkeys(sizes, 0.01)

        def close(self):
            pass

    monkeypatch.setattr(forecast.native, "unfit", lambda path: "")
    monkeypatch.setattr(forecast.native, "NativeTarget", lambda *_: Lane())
    monkeypatch.setattr(forecast.native, "load", lambda *_, vocabulary: asked.append(vocabulary) or Lane())
    for target, displaced in ((True, 800), (False, 1600), (False, 0)):
        forecast._in_c(tmp_path / "toy.gguf", target, 1, displaced)
    assert asked == [100, "half", 200, "auto", 0]
