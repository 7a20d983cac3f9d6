"""Written checkpoints: files, index, names and dtypes of the public ones, memory, clean ends."""

import json
import re
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from minispec.kernels.int4_moe import unpack_int4
from minispec.models import synthetic
from minispec.models.checkpoint import K25_FILES, spread, write_checkpoint
from minispec.models.interface import Step
from minispec.models.synthetic import (
    FORMS,
    full_width_config,
    list_tensors,
    target_config,
    write_target,
)
from minispec.models.weights import load_target

INDEX = "model.safetensors.index.json"
CPU = torch.device("cpu")


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of all files; no name is in two files."""
    parts = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    joined = {name: tensor for part in parts for name, tensor in part.items()}
    assert len(joined) == sum(map(len, parts))
    return joined


def check_index(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    held = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            held |= dict.fromkeys(tensors.keys(), file.name)
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored(folder).values())


# files


@pytest.mark.parametrize("shards", [1, 2, 7, 64])
def test_exact_number_of_shards(tmp_path: Path, shards: int) -> None:
    config = target_config()
    write_target(tmp_path, config, shards=shards, files=K25_FILES)
    files = sorted(tmp_path.glob("*.safetensors"))
    names = [f"model-{number:05}-of-{shards:06}.safetensors" for number in range(1, shards + 1)]
    assert [file.name for file in files] == names
    assert {path.name for path in tmp_path.iterdir()} == {*names, INDEX, "config.json"}
    assert json.loads((tmp_path / "config.json").read_text()) == config
    check_index(tmp_path)
    largest = max(like.nbytes for like in list_tensors(config).values())
    sizes = [sum(tensor.nbytes for tensor in load_file(file).values()) for file in files]
    assert max(sizes) <= sum(sizes) / shards + largest


def test_shards_below_a_size(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((10,), i) for i in range(10)}
    write_checkpoint(tmp_path, {}, tensors.items(), shard_bytes=3 * (80 + 256))
    held = [set(load_file(file)) for file in sorted(tmp_path.glob("model-0000?-of-00004.*"))]
    assert held == [{"t0", "t1", "t2"}, {"t3", "t4", "t5"}, {"t6", "t7", "t8"}, {"t9"}]
    assert all(torch.equal(tensors[name], got) for name, got in stored(tmp_path).items())
    check_index(tmp_path)


def test_spread() -> None:
    assert spread([1] * 12, 4) == [3, 3, 3, 3]
    assert spread([100, 1, 1, 1, 1], 3) == [1, 2, 2]  # the large one alone, the rest evenly
    assert spread([1, 1, 1, 1, 100], 3) == [3, 1, 1]  # none is left empty
    assert spread([0, 0, 0], 2) == [2, 1]
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        sizes = (torch.rand(50, generator=generator).pow(4) * 1000).int().tolist()
        for shards in (1, 2, 13, 49, 50):
            lengths = spread(sizes, shards)
            assert len(lengths) == shards and min(lengths) > 0 and sum(lengths) == 50
    for shards in (0, 4):
        with pytest.raises(ValueError, match=f"3 tensors cannot fill {shards} files"):
            spread([1, 2, 3], shards)


@pytest.mark.parametrize("shard_bytes", [None, 1, 10**9])
def test_an_exception_leaves_nothing_half_written(tmp_path: Path, shard_bytes: int | None) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.zeros(4)
        yield "b", torch.zeros(4)
        raise KeyboardInterrupt

    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, {}, broken(), shard_bytes)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.model"]


def test_lengths_must_fit(tmp_path: Path) -> None:
    tensors = [("a", torch.zeros(1)), ("b", torch.zeros(1))]
    with pytest.raises(AssertionError, match="more tensors"):
        write_checkpoint(tmp_path, {}, tensors, lengths=[1])
    assert not list(tmp_path.iterdir())


def test_views_and_columns_are_stored_whole(tmp_path: Path) -> None:
    fused = torch.arange(24).view(6, 4)
    views = {"top": fused[:2], "rest": fused[2:], "columns": fused.t()}
    write_checkpoint(tmp_path, {}, views.items())
    assert (tmp_path / "model.safetensors").stat().st_size < 2 * fused.nbytes + 512
    got = stored(tmp_path)
    assert all(torch.equal(got[name], view) for name, view in views.items())


# memory


class Meter:
    """Bytes of counted tensors alive, now and at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def count(self, tensor: Tensor) -> Tensor:
        self.change(tensor.nbytes)
        weakref.finalize(tensor, self.change, -tensor.nbytes)
        return tensor

    def change(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


@pytest.mark.parametrize("by_lengths", [True, False])
def test_one_shard_in_memory(tmp_path: Path, by_lengths: bool) -> None:
    meter, size = Meter(), 4000
    tensors = ((f"t{i}", meter.count(torch.zeros(size // 4))) for i in range(40))
    if by_lengths:
        write_checkpoint(tmp_path, {}, tensors, lengths=[5] * 8)
    else:
        write_checkpoint(tmp_path, {}, tensors, shard_bytes=5 * (size + 256))
    assert len(list(tmp_path.glob("*-of-00008.safetensors"))) == 8
    # one more, if it had to be made to see that it does not fit
    assert meter.most == (5 if by_lengths else 6) * size
    assert meter.now == 0


def test_a_target_is_never_whole_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter()
    draw = synthetic.draw
    monkeypatch.setattr(
        synthetic,
        "draw",
        lambda *args: ((name, meter.count(tensor)) for name, tensor in draw(*args)),
    )
    write_target(tmp_path, target_config(vocab_size=512), shards=16)
    sizes = [sum(t.nbytes for t in load_file(f).values()) for f in tmp_path.glob("*.safetensors")]
    assert meter.most == max(sizes) < sum(sizes) / 4


# forms


def kimi_names(prefix: str, layers: int, experts: int, expert_tensors: list[str]) -> set[str]:
    """The public listing of the text model's tensors, written out anew."""
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    projections = [f"{kind}_proj" for kind in ("gate", "up", "down")]
    for layer in range(layers):
        stem = f"model.layers.{layer}."
        names |= {f"{stem}{norm}_layernorm.weight" for norm in ("input", "post_attention")}
        names |= {
            f"{stem}self_attn.{name}.weight"
            for name in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa",
                         "kv_a_layernorm", "kv_b_proj", "o_proj")
        }  # fmt: skip
        if layer == 0:
            names |= {f"{stem}mlp.{name}.weight" for name in projections}
            continue
        names |= {f"{stem}mlp.gate.weight", f"{stem}mlp.gate.e_score_correction_bias"}
        names |= {f"{stem}mlp.shared_experts.{name}.weight" for name in projections}
        names |= {
            f"{stem}mlp.experts.{expert}.{name}.{tensor}"
            for expert in range(experts) for name in projections for tensor in expert_tensors
        }  # fmt: skip
    return {prefix + name for name in names}


PACKED = ["weight_packed", "weight_scale", "weight_shape"]
EXPECTED = {
    "k2.5": ("language_model.", PACKED),
    "k2-thinking": ("", PACKED),
    "bf16": ("", ["weight"]),
}


def is_vision(name: str) -> bool:
    return name.startswith(("vision_tower.", "mm_projector."))


@pytest.mark.parametrize("form", FORMS)
def test_names_and_dtypes_of_a_form(tmp_path: Path, form: str) -> None:
    config = target_config(form)
    write_target(tmp_path, config)
    tensors = stored(tmp_path)
    prefix, expert_tensors = EXPECTED[form]
    vision = {name for name in tensors if is_vision(name)}
    assert tensors.keys() - vision == kimi_names(prefix, 4, 16, expert_tensors)
    assert bool(vision) == (form == "k2.5")
    others = {"weight_packed": torch.int32, "weight_shape": torch.int32,
              "e_score_correction_bias": torch.float32}  # fmt: skip
    for name, tensor in tensors.items():
        assert tensor.dtype == others.get(name.rpartition(".")[2], torch.bfloat16), name
    stem = f"{prefix}model.layers.3.mlp.experts.15."
    for kind, out, width in (("gate", 32, 64), ("up", 32, 64), ("down", 64, 32)):
        if form == "bf16":
            assert tensors[f"{stem}{kind}_proj.weight"].shape == (out, width)
            continue
        packed, scale, shape = (tensors[f"{stem}{kind}_proj.{name}"] for name in PACKED)
        assert packed.shape == (out, width // 8) and scale.shape == (out, width // 32)
        assert shape.tolist() == [out, width]


def test_configs_of_the_forms() -> None:
    nested, flat, plain = (target_config(form, vocab_size=99) for form in FORMS)
    assert nested["model_type"] == "kimi_k25" and nested["text_config"]["vocab_size"] == 99
    assert "quantization_config" not in nested and "quantization_config" in nested["text_config"]
    assert flat == nested["text_config"] and flat["model_type"] == "kimi_k2"
    assert plain["model_type"] == "deepseek_v3" and "quantization_config" not in plain
    assert flat["architectures"] == plain["architectures"] == ["DeepseekV3ForCausalLM"]
    with pytest.raises(ValueError, match="form 'gguf' is not one of"):
        target_config("gguf")


def test_the_real_listing() -> None:
    """Kimi-K2.5 at its full size: the counts and the bytes of the public checkpoint."""
    config = full_width_config(8)
    config["text_config"] |= {
        "num_hidden_layers": 61, "n_routed_experts": 384, "vocab_size": 163840,
    }  # fmt: skip
    config["vision_config"] = {
        "vt_hidden_size": 1152, "vt_intermediate_size": 4304, "vt_num_hidden_layers": 27,
        "patch_size": 14, "init_pos_emb_height": 64, "init_pos_emb_width": 64,
        "merge_kernel_size": [2, 2],
    }  # fmt: skip
    listed = list_tensors(config)
    text = {name: like for name, like in listed.items() if not is_vision(name)}
    assert len(listed) == 208_550 and len(text) == 208_215
    assert sum(like.nbytes for like in text.values()) == 594_205_904_896
    assert len(spread([like.nbytes for like in listed.values()], 64)) == 64
    stem = "language_model.model.layers.60.mlp.experts.383."
    shapes = {
        "gate_proj.weight_packed": [2048, 896], "up_proj.weight_scale": [2048, 224],
        "down_proj.weight_packed": [7168, 256], "down_proj.weight_scale": [7168, 64],
    }  # fmt: skip
    assert {name: list(listed[stem + name].shape) for name in shapes} == shapes
    # MoonViT: 400 million parameters, and its projector
    assert 4e8 < sum(like.numel() for name, like in listed.items() if is_vision(name)) < 5e8
    assert listed["mm_projector.proj.2.weight"].shape == (7168, 4608)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, None])
def test_weight_shape(tmp_path: Path, dtype: torch.dtype | None) -> None:
    """All three kinds hold the same weights, and load."""
    write_target(tmp_path, target_config("k2-thinking"), weight_shape=dtype)
    tensors = stored(tmp_path)
    shapes = {name: tensor for name, tensor in tensors.items() if name.endswith("weight_shape")}
    assert len(shapes) == (0 if dtype is None else 3 * 16 * 3)
    for name, tensor in shapes.items():
        rows, words = tensors[name.replace("shape", "packed")].shape
        assert tensor.dtype == dtype and tensor.tolist() == [rows, 8 * words]
    model = load_target(tmp_path, CPU, torch.float32, torch.float32, None)
    first = tensors["model.layers.1.mlp.experts.0.gate_proj.weight_packed"]
    assert torch.equal(model.layers[1].mlp.experts.gate_up_packed_ENW[0, :32], first)


# values


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("one", 3), ("two", 3), ("other", 4)):
        write_target(tmp_path / name, target_config(), seed, shards=3)
    one, two, other = (
        [file.read_bytes() for file in sorted((tmp_path / name).glob("model*"))]
        for name in ("one", "two", "other")
    )
    assert one == two
    assert all(a != b for a, b in zip(one[:3], other[:3]))


class Rows:
    """The least cache there can be."""

    def __init__(self, layers: int, length: int, width: int) -> None:
        self.table = torch.zeros(layers, length, width)

    def write(self, layer: int, slot_T: Tensor, row_TC: Tensor) -> None:
        self.table[layer, slot_T] = row_TC

    def rows(self, layer: int, end: int) -> Tensor:
        return self.table[layer, :end]


def test_repeated_blocks_are_as_good_as_drawn_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 500 values instead of whole draws: spread, rank and logits stay."""
    monkeypatch.setattr(synthetic, "BLOCK", 500)
    write_target(tmp_path, target_config())
    tensors = stored(tmp_path)
    stem = "language_model.model.layers.2."
    first, second = (
        tensors[f"{stem}mlp.experts.{expert}.up_proj.weight_scale"] for expert in (0, 1)
    )
    assert not torch.equal(first, second)
    projection = tensors[f"{stem}self_attn.o_proj.weight"].float()
    values = torch.linalg.svdvals(projection)
    assert 0.8 < projection.square().mean().sqrt() * projection.shape[1] ** 0.5 < 1.2
    assert values[0] < 6 and len(projection.unique(dim=0)) == len(projection)
    packed = tensors[f"{stem}mlp.experts.3.gate_proj.weight_packed"]
    codes = unpack_int4(packed, torch.ones(32, 2), torch.float32)
    assert codes.min() == -7 and codes.max() == 7 and codes.mean().abs() < 0.5

    model = load_target(tmp_path, CPU, torch.float32, torch.float32, None)
    cache = Rows(model.num_layers, 64, model.cache_width)
    logits_TV = model.forward(Step.chunk(torch.arange(64), 0), cache).logits_TV
    assert 0.3 < logits_TV.std() < 3
    assert len(logits_TV.argmax(-1).unique()) > 20


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gib", [4.0, 8.0, 40.0])
def test_full_width_config(form: str, gib: float) -> None:
    config = full_width_config(gib, form)
    listed = list_tensors(config)
    size = sum(like.nbytes for like in listed.values())
    assert abs(size / 2**30 - gib) < 0.06 * gib
    routed = sum(like.nbytes for name, like in listed.items() if ".experts." in name)
    assert routed > size / 2
    text = config.get("text_config", config)
    assert text["hidden_size"] == 7168 and 8 <= text["n_routed_experts"] <= 384
    names = [name for name in listed if re.search(r"layers\.0\.mlp\.gate_proj", name)]
    assert len(names) == 1


def test_full_width_config_has_a_least_size() -> None:
    with pytest.raises(ValueError, match="0.1 GiB is too small"):
        full_width_config(0.1)
