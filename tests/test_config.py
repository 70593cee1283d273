"""Settings: defaults, layers, and one sentence for each thing that can be wrong."""

import math

import pytest

from duochat import DuoChatError, config
from duochat.config import Settings, load


def write(folder, text):
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_default_names_a_pair():
    settings = load()
    assert settings.target
    assert settings.draft
    assert (settings.temperature, settings.decoder, settings.host, settings.port) == (0.0, "duotree", "127.0.0.1", 7860)


def test_overrides_win_and_none_does_not(tmp_path):
    path = write(tmp_path, "temperature: 0.7\nseed: 3\n")
    settings = load(path, seed=5, temperature=None)
    assert (settings.temperature, settings.seed) == (0.7, 5)


def test_a_file_without_a_pair_gets_the_default_one(tmp_path):
    settings = load(write(tmp_path, "seed: 3"))
    assert (settings.target, settings.draft) == (load().target, load().draft)
    assert settings.description == "", "the default pair's description and memory are not another file's"


def test_paths_in_a_file_are_relative_to_it(tmp_path):
    settings = load(write(tmp_path, "target: models/t\ndraft: ../d.gguf"))
    assert settings.target == str(tmp_path / "models" / "t")
    assert settings.draft == str(tmp_path.parent / "d.gguf")


def test_an_empty_file_is_fine(tmp_path):
    assert load(write(tmp_path, "# nothing\n")) == Settings(target=load().target, draft=load().draft)


def test_every_preset_loads_and_says_what_it_needs():
    presets = config.presets()
    assert next(iter(presets)) == "default"
    for name, settings in presets.items():
        assert settings.description, name
        assert settings.target_gib > 0, name
        assert settings.draft_gib > 0, name


def test_unknown_key_names_key_file_and_what_was_meant(tmp_path):
    path = write(tmp_path, "temprature: 0.7")
    with pytest.raises(DuoChatError, match=r"'temprature'.*mine.yaml.*temperature"):
        load(path)


def test_a_value_out_of_range_names_the_file(tmp_path):
    with pytest.raises(DuoChatError, match=r"mine.yaml: top_p is 2.*above 0 and up to 1"):
        load(write(tmp_path, "top_p: 2"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -1.0),
        ("top_k", -1),
        ("top_k", 1.5),
        ("max_tokens", 0),
        ("max_tokens", 10**9),
        ("max_tokens", True),
        ("seed", -1),
        ("context_length", 1),
        ("draft_budget", 0),
        ("draft_budget", "many"),
        ("draft_threads", 0),
        ("port", 0),
        ("port", 65536),
        ("decoder", "fast"),
        ("device", "tpu"),
        ("dtype", "int8"),
        ("compile", "yes"),
        ("stop", [""]),
        ("stop", 3),
        ("target", ""),
        ("draft", 7),
        ("system", 7),
    ],
)
def test_values_out_of_range_are_refused_in_one_sentence(name, value):
    with pytest.raises(DuoChatError) as fault:
        load(**{name: value})
    assert str(fault.value).startswith(f"{name} is {value!r}: ")
    assert str(fault.value).count("\n") == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("draft_budget", "auto"),
        ("draft_budget", 1),
        ("draft_threads", 8),
        ("temperature", 1),
        ("top_p", 1),
        ("stop", "x"),
    ],
)
def test_values_in_range_are_taken(name, value):
    load(**{name: value})


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("backend", "llama", "jax"),
        ("gpu_layers", 0, -1),
        ("gpu_layers", "auto", "all"),
        ("tensor_overrides", ["exps=CPU"], [1]),
        ("devices", ["CUDA0"], [""]),
        ("split", "3,1", 3),
        ("flash_attention", "auto", "yes"),
        ("flash_attention", False, 0),
        ("cache_type", "q8_0", "q2_k"),
        ("rpc", ["10.0.0.2:50052"], ["10.0.0.2"]),
        ("rpc", ["[::1]:50052"], [":50052"]),
        ("models_folder", "", 1),
    ],
)
def test_settings_of_the_llama_lane(name, good, bad):
    load(**{name: good})
    with pytest.raises(DuoChatError, match=f"{name} is "):
        load(**{name: bad})


def test_a_decoder_is_named_once():
    """The names, titles and descriptions stand in config; what the decoders do stands in the engine."""
    from duochat.engine import schedules

    assert config.DECODERS.keys() == schedules.DECODERS.keys()
    assert all(about.title and about.about.endswith(".") for about in config.DECODERS.values())


def test_automatic_is_one_value_from_the_file_to_the_engine():
    from duochat.chat.chat import Options
    from duochat.engine.decoding import Request

    assert load().draft_budget == Options.of(load()).draft_budget == Request().draft_budget == "auto"
    assert Options(draft_budget=None).draft_budget == "auto", "so older records say it"


RANGES = {"temperature": (0, 100), "top_k": (0, 2**31 - 1), "top_p": (1e-9, 1), "min_p": (0, 1), "seed": (0, 2**63 - 1)}
RANGES |= {"repetition_penalty": (1e-9, 10), "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2)}


@pytest.mark.parametrize("name", RANGES)
def test_a_range_is_the_same_for_settings_options_and_sampling(name):
    from duochat.chat.chat import Options
    from duochat.engine.sampling import Sampling

    kinds = (lambda **v: load(**v), lambda **v: Options(**v).check(4096), lambda **v: Sampling(**v))
    low, high = RANGES[name]
    for make in kinds:
        make(**{name: low}), make(**{name: high})
        for wrong in (low - 1, high + 1):
            with pytest.raises(DuoChatError, match=rf"{name} is .*: give a (whole )?number (from|above) "):
                make(**{name: wrong})


def test_one_stop_string_is_a_list_of_one(tmp_path):
    assert load(write(tmp_path, 'stop: "###"')).stop == ("###",)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "not valid YAML .line"),
        ("- 1\n- 2", "holds no settings"),
        ("just words", "holds no settings"),
        ("1: 2", "Unknown key 1"),
        ("quantize: 8bit", "Unknown key 'quantize'.*it is gone.*GGUF"),
    ],
)
def test_what_is_no_config(tmp_path, text, says):
    with pytest.raises(DuoChatError, match=says):
        load(write(tmp_path, text))


def test_a_file_in_another_encoding(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"system: \xff\xfe")
    with pytest.raises(DuoChatError, match="cannot be read"):
        load(path)


def test_a_missing_file_lists_the_presets(tmp_path):
    with pytest.raises(DuoChatError, match=r"no config file .*default"):
        load(tmp_path / "none.yaml")


def test_a_preset_by_name():
    assert load("qwen3-8b").target == "hf:Qwen/Qwen3-8B"
