"""Names between Hugging Face, PEFT's models and PEFT's folders; the verb that writes such a folder."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardopt import checkpoint
from shardopt.cli import main
from shardopt.errors import MismatchError, OptionError


class Adapted(torch.nn.Module):
    """A layer as PEFT has it: the one that it was, and adapters by name."""

    def __init__(self, layer, *adapters):
        super().__init__()
        self.base_layer = layer
        self.lora_A = torch.nn.ModuleDict({name: torch.nn.Linear(6, 2, bias=False) for name in adapters})
        self.lora_B = torch.nn.ModuleDict({name: torch.nn.Linear(2, 6, bias=False) for name in adapters})


def block():
    return torch.nn.ModuleDict({name: torch.nn.Linear(6, 6) for name in ("q_proj", "k_proj", "v_proj")})


def base_model():
    return torch.nn.ModuleDict({"layers": torch.nn.ModuleList([block(), block()]), "lm_head": torch.nn.Linear(6, 3)})


def adapted(*adapters):
    """Adapters at q_proj of the first layer, and at v_proj of the second one."""
    inner = base_model()
    inner["layers"][0]["q_proj"] = Adapted(inner["layers"][0]["q_proj"], *adapters)
    inner["layers"][1]["v_proj"] = Adapted(inner["layers"][1]["v_proj"], *adapters)
    return torch.nn.ModuleDict({"base_model": torch.nn.ModuleDict({"model": inner})})


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder of the base model, and its tensors."""
    (tmp_path / "hf").mkdir()
    tensors = base_model().state_dict()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    return tmp_path / "hf", tensors


LORA = checkpoint.Strictness(missing=re.compile(r"\.lora_[AB]\."))


@pytest.mark.parametrize("names", [("default",), ("first", "second")], ids=str)
def test_a_base_model_goes_under_the_names_of_peft(folder, names):
    model = adapted(*names)
    rename = checkpoint.peft_rename(model, adapter=names[-1])
    report = checkpoint.load(folder[0], {"model": model}, rename=rename, strict=LORA)
    assert len(report.missing) == 4 * len(names)
    loaded = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): value
        for name, value in model.state_dict().items()
        if "lora_" not in name
    }
    assert loaded.keys() == folder[1].keys()
    assert all(torch.equal(loaded[name], value) for name, value in folder[1].items())


def test_an_adapter_goes_to_peft_and_back(tmp_path, folder, capsys):
    model = adapted("default")
    checkpoint.save(tmp_path / "c", {"model": model})
    (tmp_path / "more.json").write_text('{"lora_dropout": 0.5}')
    line = ["export-peft", str(tmp_path / "c"), str(tmp_path / "peft"), "--lora-alpha", "4", "--base-model", "b"]
    assert main([*line, "--config", str(tmp_path / "more.json")]) == 0
    assert "PeftModel.from_pretrained" in capsys.readouterr().out
    written = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert [written[name] for name in ("lora_alpha", "base_model_name_or_path", "lora_dropout", "r")] == [
        4,
        "b",
        0.5,
        2,
    ]
    stored = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert "base_model.model.layers.0.q_proj.lora_A.weight" in stored and len(stored) == 4

    again = adapted("default")
    rename = checkpoint.peft_rename(again)
    checkpoint.load(folder[0], {"model": again}, rename=rename, strict=LORA)
    checkpoint.load(tmp_path / "peft", {"model": again}, rename=rename, select="lora_")
    for name, value in model.state_dict().items():
        expected = (
            value if "lora_" in name else folder[1][name.removeprefix("base_model.model.").replace(".base_layer", "")]
        )
        assert torch.equal(again.state_dict()[name], expected), name


class TrainedWhole(torch.nn.Module):
    """A layer that PEFT trains whole: what it was, and the trained copy by the adapter's name."""

    def __init__(self, layer):
        super().__init__()
        self.original_module = layer
        self.modules_to_save = torch.nn.ModuleDict({"default": torch.nn.Linear(6, 3)})


def with_whole_head():
    model = adapted("default")
    inner = model["base_model"]["model"]
    inner["lm_head"] = TrainedWhole(inner["lm_head"])
    return model


def test_a_layer_trained_whole_goes_to_peft_and_back(tmp_path, folder):
    model = with_whole_head()
    checkpoint.save(tmp_path / "c", {"model": model})
    checkpoint.export_peft(tmp_path / "c", tmp_path / "peft", {"lora_alpha": 4})
    written = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert written["modules_to_save"] == ["lm_head"]
    stored = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    trained = model["base_model"]["model"]["lm_head"].modules_to_save["default"]
    assert torch.equal(stored["base_model.model.lm_head.weight"], trained.weight)
    assert torch.equal(stored["base_model.model.lm_head.bias"], trained.bias) and len(stored) == 6

    again = with_whole_head()
    rename = checkpoint.peft_rename(again)
    beside = checkpoint.Strictness(missing=re.compile(r"\.lora_[AB]\.|\.modules_to_save\."))
    checkpoint.load(folder[0], {"model": again}, rename=rename, strict=beside)
    checkpoint.load(tmp_path / "peft", {"model": again}, rename=rename, select=r"lora_|modules_to_save")
    head = again["base_model"]["model"]["lm_head"]
    assert torch.equal(head.original_module.weight, folder[1]["lm_head.weight"])
    assert torch.equal(head.modules_to_save["default"].weight, trained.weight)
    assert torch.equal(head.modules_to_save["default"].bias, trained.bias)

    loaded = with_whole_head()  # the rules may stay in the script of a run that resumes
    checkpoint.load(tmp_path / "c", {"model": loaded}, rename=checkpoint.peft_rename(loaded), strict=beside)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["lora_magnitude_vector", "lora_embedding_A", "trainable_tokens_delta"])
def test_other_kinds_of_adapters_are_not_left_out_in_silence(tmp_path, name):
    key = f"base_model.model.layers.0.q_proj.{name}.default"
    checkpoint.save(tmp_path / "c", {"model": {**adapted("default").state_dict(), key: torch.ones(6)}})
    with pytest.raises(MismatchError, match=name):
        checkpoint.export_peft(tmp_path / "c", tmp_path / "peft", {"lora_alpha": 4})
    assert not (tmp_path / "peft").exists()


def test_rules_may_stay_in_the_script(tmp_path, folder):
    """What the run has saved has PEFT's names already."""
    model = adapted("default")
    checkpoint.save(tmp_path / "c", {"net": model})
    again = adapted("default")
    checkpoint.load(tmp_path / "c", {"net": again}, rename=checkpoint.peft_rename(again, key="net"), strict=LORA)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in model.state_dict().items())


def test_wrappers_leave_no_trace_in_the_rules():
    model = adapted("default")
    expected = checkpoint.peft_rename(model)
    layers = model["base_model"]["model"]["layers"]
    layers[0]["q_proj"] = torch.nn.ModuleDict({"_checkpoint_wrapped_module": layers[0]["q_proj"]})
    assert checkpoint.peft_rename(model) == expected


def test_what_has_no_adapter_is_refused(folder):
    with pytest.raises(OptionError, match=r"lora_A\.default"):
        checkpoint.peft_rename(base_model())
    with pytest.raises(OptionError, match=r"lora_A\.other"):
        checkpoint.peft_rename(adapted("default"), adapter="other")
    model = adapted("default")
    with pytest.raises(MismatchError, match="lora_A"):  # without the regex the adapters have to be there
        checkpoint.load(folder[0], {"model": model}, rename=checkpoint.peft_rename(model))


@pytest.mark.parametrize(
    ("config", "status", "said"),
    [
        (None, 1, "--lora-alpha: found nothing; required a number"),
        ("[1]", 2, "--config: found a list; required a JSON object"),
        ("{", 2, "--config: found Expecting property name"),
    ],
)
def test_a_verb_without_what_it_needs_writes_nothing(tmp_path, capsys, config, status, said):
    checkpoint.save(tmp_path / "c", {"model": adapted("default")})
    line = ["export-peft", str(tmp_path / "c"), str(tmp_path / "peft")]
    if config is not None:
        (tmp_path / "config.json").write_text(config)
        line += ["--config", str(tmp_path / "config.json")]
    assert main(line) == status
    assert said in capsys.readouterr().err and not (tmp_path / "peft").exists()
    assert main([*line[:3], "--lora-alpha", "2", "--model", "other"]) == 1
