"""What a pair is expected to give before it is here: sizes from a header or a name, times, and the sentence."""

from dataclasses import replace

import pytest

pytest.importorskip("llama_cpp")

from fakes import costs
from toy_models import write_gguf

from duochat import config
from duochat.bench import forecast, speeds
from duochat.bench.forecast import Forecast, Model
from duochat.bench.speeds import Lane
from duochat.engine.costs import Costs
from duochat.engine.llama import devices, probe
from duochat.engine.llama.probe import Shape
from duochat.models import gguf

CPU, GPU = Lane(0, 2), Lane(999, 2)
ALL_Q8 = dict.fromkeys(probe.KINDS, "Q8_0")


@pytest.mark.parametrize(
    ("reference", "shape", "scale", "kind", "share"),
    [
        ("hf:Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf", 8, 1, "Q4_K", 1),
        ("hf:ggml-org/gemma-3-12b-it-GGUF/gemma-3-12b-it-Q4_K_M.gguf", 14, 12 / 14, "Q4_K", 1),
        ("hf:ggml-org/gemma-3-270m-it-GGUF/gemma-3-270m-it-Q8_0.gguf", 0.3, 0.9, "Q8_0", 1),
        ("hf:Qwen/Qwen3-30B-A3B-GGUF/Qwen3-30B-A3B-Q4_K_M.gguf", 3, 1, "Q4_K", 0.1),
    ],
)
def test_a_name_tells_size_and_kind(reference, shape, scale, kind, share):
    model = Model.of_name(reference)
    assert model.shape == forecast.SIZES[shape]
    assert (model.scale, model.share) == pytest.approx((scale, share))
    assert model.kinds["ffn_up"] == kind


def test_every_preset_of_gguf_files_can_be_forecast():
    for name, settings in config.presets().items():
        if name.endswith("-q4"):
            assert Model.of_name(settings.target), name
            assert Model.of_name(settings.draft), name
    assert Model.of_name("hf:Qwen/Qwen3-8B") is None
    assert forecast.of_pair(config.presets()["qwen3-8b"]) is None


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "qwen3moe"])
def test_a_header_tells_the_same_as_its_tensors(tmp_path, architecture):
    """The pretended model has the matrices of the file."""
    path = write_gguf(tmp_path / "toy.gguf", architecture)
    model, header = Model.of_file(path), gguf.read(path)
    for tensor in header.tensors:
        name = tensor.name.removesuffix(".weight").rpartition(".")[2]
        if name in model.shape.matrices:
            assert model.shape.matrices[name] == tensor.shape, tensor.name
            assert model.kinds[name] == "Q8_0"
    assert model.shape.layers == header.get("block_count")
    assert model.shape.tied == ("output.weight" not in {tensor.name for tensor in header.tensors})
    assert (model.share < 1) == (architecture == "qwen3moe")
    if architecture != "qwen3moe":
        assert model.scale == pytest.approx(1)


def test_a_mixture_reads_more_experts_for_more_rows(monkeypatch):
    """Of 64 experts with one for each token, two rows take two."""
    monkeypatch.setattr(speeds, "forwards", lambda *_: ({1: 1.0, 2: 1.0}, {1: 0.5, 2: 0.5}))
    dense = Model(Shape(), ALL_Q8)
    mixed = replace(dense, share=1 / 64, expert=0.5)
    lane = Lane(0, 1)
    monkeypatch.setattr(Lane, "widths", (1, 2))
    assert dense.curve(lane) == {1: 1.5, 2: 1.5}
    assert mixed.curve(lane)[1] == pytest.approx(1.5)
    assert mixed.curve(lane)[2] == pytest.approx(0.5 + 0.5 * (2 - 1 / 64) + 0.5)


def test_what_a_gpu_has_no_room_for_takes_the_cpus_time(monkeypatch):
    times = {CPU: 0.05, GPU: 0.01}
    monkeypatch.setattr(speeds, "forwards", lambda lane, *_: (dict.fromkeys(lane.widths, times[lane]),) * 2)
    model = Model(Shape(), ALL_Q8)
    for part, seconds in ((2.0, 0.02), (0.5, 0.06)):
        monkeypatch.setattr(speeds, "room", lambda part=part: part * model.size)
        assert forecast._beside(model, GPU)[1] == pytest.approx(seconds)
    assert forecast._beside(model, CPU)[1] == pytest.approx(0.1)


def test_lanes_that_share_cores_take_turns_on_the_quicker_backend(monkeypatch):
    monkeypatch.setattr(speeds, "forwards", lambda lane, *_: (dict.fromkeys(lane.widths, 0.01),) * 2)
    monkeypatch.setattr(speeds, "room", lambda: 2**40)
    settings, model = config.load(), Model(Shape(), ALL_Q8)
    for own, seconds in ((0.015, 0.015), (0.03, 0.02)):
        monkeypatch.setattr(forecast, "_in_c", lambda *_, own=own: {1: own, 8: 2 * own})
        for lane, expected in ((CPU, seconds), (GPU, 0.02)):
            monkeypatch.setattr(speeds, "lanes", lambda lane=lane: (lane, CPU))
            costs = forecast._costs(settings, model, model)
            assert costs.target.measured(1) == pytest.approx(expected)
            assert costs.draft.measured(1) == own
            assert costs.turns == costs.shared == (lane is CPU)


def test_a_model_without_attention_is_not_forecast(tmp_path):
    assert Model.of_file(write_gguf(tmp_path / "toy.gguf", "mamba")) is None


def test_fewer_layers_and_rows_stand_for_all(monkeypatch):
    """A layer takes 2 ms, a row of the output 1 µs."""
    asked = []

    def seconds(lane, shape, kinds):
        asked.append(shape)
        return {1: 2e-3 * shape.layers + 1e-6 * (shape.vocabulary if shape.vocabulary > 256 else 0)}

    monkeypatch.setattr(speeds, "_seconds", seconds)
    layers, output = speeds.forwards(CPU, Shape(4096, 12288, 40, 32, 8, 128, 200_000), ALL_Q8)
    assert (layers[1], output[1]) == (pytest.approx(0.08), pytest.approx(0.2))
    assert max(speeds.size(shape, ALL_Q8, outer) for shape in asked for outer in (False, True)) < 2 * speeds.ROOM


def test_a_lane_is_measured_once(monkeypatch, tmp_path):
    """A forward over more rows takes longer, and what was measured is remembered for the next start."""
    monkeypatch.setenv("DUOCHAT_CACHE", str(tmp_path))
    loads = []
    monkeypatch.setattr(speeds, "_load", lambda *a, load=speeds._load: loads.append(a) or load(*a))
    shape = Shape(256, 512, 2, vocabulary=512)
    first = speeds.forwards(CPU, shape, ALL_Q8)
    assert first == speeds.forwards(CPU, shape, ALL_Q8)
    assert len(loads) == 2
    assert 0 < first[0][1] < first[0][16]


def test_more_agreement_gives_more_tokens():
    plain, low = forecast.expected(costs(), 0.5)
    _, high = forecast.expected(costs(), 0.85)
    assert plain == pytest.approx(1 / 8.2e-3, rel=0.02)
    assert plain < low < high


def test_a_draft_as_slow_as_the_target_gains_nothing():
    even = Costs.of({1: 8e-3, 2: 16e-3, 4: 32e-3}, {1: 8e-3, 2: 9e-3})
    told = Forecast(*forecast.expected(even, 0.6), 0.6, assumed=True)
    assert told.sentence.endswith("plain decoding is as fast as drafting")
    worth = Forecast(*forecast.expected(costs(), 0.8), 0.8, assumed=False)
    assert worth.sentence == f"about {worth.plain:.3g} tokens/s, drafted {worth.drafted:.3g} (the draft agrees at 80 %)"
    assert "if the draft agrees" in replace(worth, assumed=True).sentence


def test_a_server_that_is_not_there_is_a_sentence(monkeypatch):
    """llama.cpp would end the process."""
    monkeypatch.setattr(devices.llama_cpp, "llama_supports_rpc", lambda: True)
    with pytest.raises(devices.DuoChatError, match=r"No rpc-server answers at 127.0.0.1:9 .*ggml-rpc-server"):
        devices.connect("127.0.0.1:9")
