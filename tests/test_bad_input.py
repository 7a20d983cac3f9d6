"""Every mistake of a user's is one line on stderr that names what is wrong, and exit code 2."""

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from toys import edit_json, write_byte_tokenizer, write_pair

from minispec.generate import main

INDEX = "model.safetensors.index.json"
NORM = "language_model.model.norm.weight"
PACKED = "language_model.model.layers.1.mlp.experts.3.down_proj.weight_packed"
Spoil = Callable[[Path, Path], object]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    target, head = write_pair(tmp_path_factory.mktemp("pair"))
    return str(target), str(head)


@pytest.fixture
def copies(pair: tuple[str, str], tmp_path: Path) -> tuple[Path, Path]:
    """A pair that a test may spoil."""
    for name, folder in zip(("target", "head"), pair):
        shutil.copytree(folder, tmp_path / name)
    return tmp_path / "target", tmp_path / "head"


def check_line(stdout: str, stderr: str, words: tuple[str, ...]) -> None:
    assert stdout == ""
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1 and stderr.endswith("\n")
    for word in words:
        assert word in stderr, f"{word!r} is not in {stderr!r}"


def refused(capsys: pytest.CaptureFixture[str], argv: list[str], *words: str) -> None:
    """Run the command line; it must fail with one line that holds all the words."""
    code = main(argv)
    captured = capsys.readouterr()
    check_line(captured.out, captured.err, words)
    assert code == 2


def run_pair(pair: tuple[str, str] | tuple[Path, Path], *more: str) -> list[str]:
    target, head = pair
    return ["--model", str(target), "--draft-model", str(head), "-n", "2", *more]


def test_the_unspoiled_pair_runs(
    capsys: pytest.CaptureFixture[str], copies: tuple[Path, Path]
) -> None:
    assert main(run_pair(copies, "--context", "256", "hello")) == 0
    assert capsys.readouterr().out.startswith("hello")


# checkpoints


def text_config(target: Path, **changes: object) -> None:
    """Change keys of the nested config; None deletes one."""
    text = json.loads((target / "config.json").read_text())["text_config"] | changes
    kept = {key: value for key, value in text.items() if value is not None}
    edit_json(target / "config.json", text_config=kept)


def quantization(target: Path, **changes: object) -> None:
    """Change how the weights are said to be packed."""
    raw = json.loads((target / "config.json").read_text())["text_config"]["quantization_config"]
    raw["config_groups"]["group_0"]["weights"] |= changes
    text_config(target, quantization_config=raw)


def change_tensors(file: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite a safetensors file, and the index beside it."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    if (file.parent / INDEX).is_file():
        edit_json(file.parent / INDEX, weight_map={name: file.name for name in tensors})


def shard(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def cut_file(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def move_in_index(target: Path, name: str) -> None:
    """Say that a tensor is in a file that does not hold it."""
    save_file({"other": torch.zeros(1)}, target / "other.safetensors")
    names = json.loads((target / INDEX).read_text())["weight_map"]
    edit_json(target / INDEX, weight_map=names | {name: "other.safetensors"})


def empty_folder(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def large_tokenizer(target: Path, head: Path) -> None:
    """511 ids in the model, 512 in the tokenizer."""

    def cut(tensors: dict[str, Tensor]) -> None:
        for name in ("model.embed_tokens", "lm_head"):
            key = f"language_model.{name}.weight"
            tensors[key] = tensors[key][:511].clone()

    change_tensors(shard(target), cut)
    text_config(target, vocab_size=511)
    edit_json(head / "config.json", vocab_size=511)


def wide(size: int) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({NORM: torch.ones(size)})


CHECKPOINTS: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "no target folder": (lambda t, h: shutil.rmtree(t), ("--model", "/target", "no such folder")),
    "no head folder": (lambda t, h: shutil.rmtree(h), ("--draft-model", "/head", "no such folder")),
    "empty target": (lambda t, h: empty_folder(t), ("--model", "/target", "empty")),
    "empty head": (lambda t, h: empty_folder(h), ("--draft-model", "/head", "empty")),
    "no config": (lambda t, h: (t / "config.json").unlink(), ("target/config.json", "missing")),
    "no head config": (lambda t, h: (h / "config.json").unlink(), ("head/config.json", "missing")),
    "config is not JSON": (
        lambda t, h: (t / "config.json").write_text('{"a": 1,}'),
        ("target/config.json", "JSON"),
    ),
    "config is not text": (
        lambda t, h: (t / "config.json").write_bytes(b"\xff\xfe{}"),
        ("target/config.json", "JSON"),
    ),
    "config is a list": (
        lambda t, h: (t / "config.json").write_text("[]"),
        ("target/config.json", "JSON object"),
    ),
    "text_config is a list": (
        lambda t, h: edit_json(t / "config.json", text_config=[1]),
        ("target/config.json", "text_config", "[1]"),
    ),
    "quantization is gone": (
        lambda t, h: text_config(t, quantization_config=None),
        ("target/config.json", "quantization_config"),
    ),
    "quantization is a word": (
        lambda t, h: text_config(t, quantization_config="int4"),
        ("target/config.json", "quantization_config", "int4"),
    ),
    "bits": (lambda t, h: quantization(t, num_bits=8), ("config.json", "num_bits", "8", "4 only")),
    "group size": (
        lambda t, h: quantization(t, group_size=128),
        ("config.json", "group_size", "128", "32"),
    ),
    "format": (
        lambda t, h: text_config(t, quantization_config={"format": "marlin", "config_groups": {}}),
        ("config.json", "format", "marlin", "pack-quantized"),
    ),
    "rope scaling type": (
        lambda t, h: text_config(t, rope_scaling={"type": "longrope", "factor": 4.0}),
        ("config.json", "rope_scaling", "longrope", "yarn"),
    ),
    "rope scaling is a word": (
        lambda t, h: text_config(t, rope_scaling="yarn"),
        ("config.json", "rope_scaling", "yarn"),
    ),
    "rope scaling without a factor": (
        lambda t, h: text_config(
            t, rope_scaling={"type": "yarn", "original_max_position_embeddings": 64}
        ),
        ("config.json", "rope_scaling", "factor", "missing"),
    ),
    "JSON too deep": (
        lambda t, h: (t / "config.json").write_text("[" * 100_000),
        ("config.json", "JSON"),
    ),
    "rope_theta of 1": (
        lambda t, h: text_config(t, rope_theta=1.0),
        ("config.json", "rope_theta", "1.0", "above 1"),
    ),
    "norm eps that is no number": (
        lambda t, h: text_config(t, rms_norm_eps=float("nan")),
        ("config.json", "rms_norm_eps", "nan", "positive"),
    ),
    "rope setting that is not computed": (
        lambda t, h: text_config(
            t,
            rope_scaling={
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "attn_factor": 2.0,
            },
        ),
        ("config.json", "rope_scaling", "attn_factor", "2.0"),
    ),
    "end of text beyond the vocabulary": (
        lambda t, h: (t / "generation_config.json").write_text('{"eos_token_id": [2, 99999]}'),
        ("generation_config.json", "eos_token_id", "99999", "512"),
    ),
    "another model's sliding window": (
        lambda t, h: text_config(t, sliding_window=4),
        ("config.json", "sliding_window", "4"),
    ),
    "weights of another width of float": (
        lambda t, h: change_tensors(
            shard(t), lambda tensors: tensors.update({NORM: tensors[NORM].to(torch.float8_e4m3fn)})
        ),
        (NORM, "float8_e4m3fn"),
    ),
    "weights that are not finite": (
        lambda t, h: change_tensors(
            shard(t), lambda tensors: tensors.update({NORM: tensors[NORM] * float("nan")})
        ),
        ("--model", "NaN", "weights"),
    ),
    "tensor twice": (
        lambda t, h: (
            (t / INDEX).unlink(),
            save_file({NORM: torch.ones(64)}, t / "again.safetensors"),
        ),
        (NORM, "already"),
    ),
    "index that leaves the folder": (
        lambda t, h: edit_json(
            t / INDEX,
            weight_map=dict.fromkeys(
                json.loads((t / INDEX).read_text())["weight_map"], "../target/" + shard(t).name
            ),
        ),
        (INDEX, "../target/", "not in the folder"),
    ),
    "head of two layers": (
        lambda t, h: edit_json(h / "config.json", num_hidden_layers=2),
        ("config.json", "num_hidden_layers", "2", "1"),
    ),
    "more experts chosen than there are": (
        lambda t, h: text_config(t, num_experts_per_tok=17),
        ("config.json", "num_experts_per_tok", "17", "16"),
    ),
    "tensor missing": (
        lambda t, h: change_tensors(shard(t), lambda tensors: tensors.pop(NORM)),
        ("/target", NORM, "missing"),
    ),
    "tensor missing in the head": (
        lambda t, h: change_tensors(shard(h), lambda tensors: tensors.pop("fc.weight")),
        ("/head", "fc.weight", "missing"),
    ),
    "tensor of another shape": (
        lambda t, h: change_tensors(shard(t), wide(63)),
        (".safetensors", NORM, "[63]", "[64]"),
    ),
    "tensor unused": (
        lambda t, h: change_tensors(
            shard(t), lambda tensors: tensors.update({"model.extra": torch.ones(1)})
        ),
        ("/target", "model.extra", "no place"),
    ),
    "whole numbers for a norm": (
        lambda t, h: change_tensors(
            shard(t), lambda tensors: tensors.update({NORM: tensors[NORM].int()})
        ),
        (".safetensors", NORM, "int32", "float32"),
    ),
    "packed codes of floating point": (
        lambda t, h: change_tensors(
            shard(t), lambda tensors: tensors.update({PACKED: tensors[PACKED].float()})
        ),
        (".safetensors", PACKED, "float32", "int32"),
    ),
    "packed codes of 64 bits": (
        lambda t, h: change_tensors(
            shard(t), lambda tensors: tensors.update({PACKED: tensors[PACKED].long()})
        ),
        (".safetensors", PACKED, "int64", "int32"),
    ),
    "shard missing": (lambda t, h: shard(t).unlink(), (INDEX, "model-00001-of-00001.safetensors")),
    "no weights": (lambda t, h: shard(h).unlink(), ("/head", ".safetensors")),
    "shard cut": (
        lambda t, h: cut_file(shard(t), 300_000),
        ("model-00001-of-00001.safetensors", "whole"),
    ),
    "shard cut in its header": (
        lambda t, h: cut_file(shard(t), 100),
        ("model-00001-of-00001.safetensors", "whole"),
    ),
    "shard of no bytes": (
        lambda t, h: cut_file(shard(h), 0),
        ("head/model.safetensors", "whole"),
    ),
    "index points elsewhere": (
        lambda t, h: move_in_index(t, NORM),
        ("other.safetensors", NORM, "index"),
    ),
    "index is not JSON": (lambda t, h: (t / INDEX).write_text("model"), (INDEX, "JSON")),
    "index has no map": (lambda t, h: (t / INDEX).write_text("{}"), (INDEX, "weight_map")),
    "index maps to a number": (
        lambda t, h: edit_json(t / INDEX, weight_map={NORM: 1}),
        (INDEX, "weight_map"),
    ),
    "no tokenizer": (
        lambda t, h: (t / "tiktoken.model").unlink(),
        ("/target", "tokenizer.model", "tiktoken.model"),
    ),
    "tokenizer larger than the vocabulary": (
        large_tokenizer,
        ("tiktoken.model", "512", "511", "vocab_size"),
    ),
    "ranks are no ranks": (
        lambda t, h: (t / "tiktoken.model").write_text("one two three\n"),
        ("tiktoken.model", "rank"),
    ),
    "a byte without a rank": (
        lambda t, h: (t / "tiktoken.model").write_text("YQ== 0\n"),
        ("tiktoken.model", "byte"),
    ),
    "sentencepiece file is none": (
        lambda t, h: (t / "tokenizer.model").write_text("hello"),
        ("tokenizer.model", "sentencepiece"),
    ),
    "generation_config is not JSON": (
        lambda t, h: (t / "generation_config.json").write_text("{"),
        ("generation_config.json", "JSON"),
    ),
    "head of another width": (
        lambda t, h: edit_json(h / "config.json", hidden_size=32),
        ("head/config.json", "hidden", "32", "64"),
    ),
    "head for wider states": (
        lambda t, h: edit_json(h / "config.json", target_hidden_size=128),
        ("head/config.json", "width", "128", "64"),
    ),
    "head of another vocabulary": (
        lambda t, h: edit_json(h / "config.json", vocab_size=1024),
        ("head/config.json", "vocab_size", "1024", "512"),
    ),
    "reduced vocabulary without d2t": (
        lambda t, h: change_tensors(shard(h), lambda tensors: tensors.pop("d2t")),
        ("head/config.json", "draft_vocab_size", "256", "d2t"),
    ),
    "d2t too high": (
        lambda t, h: change_tensors(
            shard(h), lambda tensors: tensors["d2t"].index_fill_(0, torch.tensor([5]), 10**6)
        ),
        ("d2t[5]", "1000000", "511"),
    ),
    "d2t negative": (
        lambda t, h: change_tensors(
            shard(h), lambda tensors: tensors["d2t"].index_fill_(0, torch.tensor([5]), -6)
        ),
        ("d2t[5]", "-6", "-1"),
    ),
    "unknown head": (
        lambda t, h: edit_json(h / "config.json", architectures=["MedusaModel"]),
        ("head/config.json", "architectures", "MedusaModel", "LlamaForCausalLMEagle3"),
    ),
    "head with another activation": (
        lambda t, h: edit_json(h / "config.json", hidden_act="gelu"),
        ("head/config.json", "hidden_act", "gelu", "silu"),
    ),
    "head with another order of norms": (
        lambda t, h: edit_json(h / "config.json", eagle_config={"use_mtp_layernorm": True}),
        ("head/config.json", "use_mtp_layernorm", "True", "False"),
    ),
    "taps beyond the layers": (
        lambda t, h: edit_json(
            h / "config.json", eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 3, 5]}
        ),
        ("eagle_aux_hidden_state_layer_ids", "5", "4"),
    ),
    "two taps": (
        lambda t, h: edit_json(
            h / "config.json", eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 3]}
        ),
        ("eagle_aux_hidden_state_layer_ids", "[2, 3]", "three"),
    ),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_spoiled_checkpoint(
    capsys: pytest.CaptureFixture[str], copies: tuple[Path, Path], case: str
) -> None:
    spoil, words = CHECKPOINTS[case]
    spoil(*copies)
    refused(capsys, run_pair(copies, "hello"), *words)


OTHER_VALUES: dict[str, Any] = {
    "hidden_act": "gelu",
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "model_type": "llama",
    "attention_bias": True,
    "norm_topk_prob": False,
    "n_group": 8,
    "num_nextn_predict_layers": 1,
    "hidden_size": "64",
    "num_attention_heads": -4,
    "vocab_size": 512.5,
    "rms_norm_eps": "small",
    "rope_theta": 0,
    "eos_token_id": "</s>",
    "first_k_dense_replace": "one",
    "moe_intermediate_size": 33,
}


@pytest.mark.parametrize("key", OTHER_VALUES)
def test_config_value_that_is_not_computed(
    capsys: pytest.CaptureFixture[str], copies: tuple[Path, Path], key: str
) -> None:
    value = OTHER_VALUES[key]
    text_config(copies[0], **{key: value})
    refused(capsys, run_pair(copies, "hello"), "target/config.json", key, str(value))


@pytest.mark.parametrize(
    "key",
    ["vocab_size", "hidden_size", "num_hidden_layers", "n_routed_experts", "kv_lora_rank"]
    + ["first_k_dense_replace", "routed_scaling_factor", "rms_norm_eps", "rope_theta"]
    + ["max_position_embeddings", "eos_token_id"],
)
def test_config_without(
    capsys: pytest.CaptureFixture[str], copies: tuple[Path, Path], key: str
) -> None:
    text_config(copies[0], **{key: None})
    refused(capsys, run_pair(copies, "hello"), "target/config.json", f"'{key}'", "missing")


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size"]
    + ["rms_norm_eps", "rope_theta", "architectures"],
)
def test_head_config_without(
    capsys: pytest.CaptureFixture[str], copies: tuple[Path, Path], key: str
) -> None:
    edit_json(copies[1] / "config.json", **{key: None})
    refused(capsys, run_pair(copies, "hello"), "head/config.json", key)


# prompts


@pytest.mark.parametrize("prompt", [["--prompt", ""], ["-p", ""], [""]], ids=str)
def test_empty_prompt(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str], prompt: list[str]
) -> None:
    refused(capsys, run_pair(pair, *prompt), "prompt is empty", "at least one token")


def test_empty_prompt_file(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "p.txt").touch()
    refused(capsys, run_pair(pair, "--prompt-file", str(tmp_path / "p.txt")), "p.txt", "empty")


@pytest.mark.parametrize(
    ("raw", "word"), [(b"", "empty"), (b"caf\xe9 au lait", "UTF-8")], ids=["empty", "latin-1"]
)
def test_prompt_on_stdin(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[str, str],
    raw: bytes,
    word: str,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
    refused(capsys, run_pair(pair, "--prompt-file", "-"), "--prompt-file -", word)


def test_prompt_file_that_is_not_utf8(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_bytes(b"caf\xe9 au lait")
    refused(capsys, run_pair(pair, "--prompt-file", str(tmp_path / "p.txt")), "p.txt", "UTF-8")


def test_prompt_on_the_command_line_that_is_not_utf8(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str]
) -> None:
    refused(capsys, run_pair(pair, "--prompt", "caf\udce9"), "--prompt", "UTF-8")


@pytest.mark.parametrize("file", ["none.txt", "."], ids=["missing", "folder"])
def test_prompt_file_that_cannot_be_read(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str], tmp_path: Path, file: str
) -> None:
    argv = run_pair(pair, "--prompt-file", str(tmp_path / file))
    refused(capsys, argv, f"--prompt-file {tmp_path / file}", "cannot be read")


@pytest.mark.parametrize(
    ("more", "names"),
    [
        (["hello", "--prompt", "hello"], ("PROMPT", "--prompt")),
        (["--prompt", "hello", "--prompt-file", "-"], ("--prompt", "--prompt-file")),
        (["hello", "--prompt-file", "p.txt"], ("PROMPT", "--prompt-file")),
        (["hello", "--prompt", ""], ("PROMPT", "--prompt")),
    ],
    ids=lambda value: " ".join(value),
)
def test_prompt_given_twice(
    capsys: pytest.CaptureFixture[str],
    pair: tuple[str, str],
    more: list[str],
    names: tuple[str, ...],
) -> None:
    refused(capsys, run_pair(pair, *more), *names, "once")


@pytest.mark.parametrize(("context", "length"), [(8, 8), (8, 9), (2, 2), (256, 300)])
def test_prompt_longer_than_the_context(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str], context: int, length: int
) -> None:
    argv = run_pair(pair, "x" * length, "--context", str(context))
    refused(capsys, argv, "--prompt", str(length), str(context), "--context", "shorten")


# flags

# what is typed, then words of the answer; these need no checkpoint
FLAGS: list[tuple[str, tuple[str, ...]]] = [
    ("--temperature -0.1", ("--temperature", "-0.1", "0 (greedy)")),
    ("--temperature nan", ("--temperature", "nan", "0 (greedy)")),
    ("--temperature inf", ("--temperature", "inf", "0 (greedy)")),
    ("--temperature 1e-40", ("--temperature", "1e-40", "0 (greedy)")),
    ("--temperature 1 --top-k 0", ("--top-k", "0", "1 or more")),
    ("--temperature 1 --top-k -1", ("--top-k", "-1", "1 or more")),
    ("--temperature 1 --top-p 0", ("--top-p", "0", "at most 1")),
    ("--temperature 1 --top-p 1.1", ("--top-p", "1.1", "at most 1")),
    ("--temperature 1 --top-p nan", ("--top-p", "nan", "at most 1")),
    ("--temperature 1 --min-p -0.1", ("--min-p", "-0.1", "below 1")),
    ("--temperature 1 --min-p 1", ("--min-p", "1.0", "below 1")),
    ("--temperature 1 --min-p nan", ("--min-p", "nan", "below 1")),
    ("--temperature 1 --seed -1", ("--seed", "-1", "from 0")),
    (f"--temperature 1 --seed {2**63}", ("--seed", str(2**63), "2^63 - 1")),
    ("--top-k 5", ("--top-k", "5", "--temperature 0")),
    ("--top-p 0.5", ("--top-p", "0.5", "--temperature 0")),
    ("--min-p 0.5", ("--min-p", "0.5", "--temperature 0")),
    ("--seed 5", ("--seed", "5", "--temperature 0")),
    ("--seed 0", ("--seed", "0", "--temperature 0")),
    ("--verify greedy --temperature 1", ("--verify", "greedy", "1.0", "rejection")),
    ("--max-new-tokens 0", ("--max-new-tokens", "0", "at least 1")),
    ("-n -3", ("--max-new-tokens", "-3", "at least 1")),
    ("--stop=", ("--stop", "''", "empty")),
    ("--threads 0", ("--threads", "0", "at least 1")),
    ("--threads -2", ("--threads", "-2", "at least 1")),
    ("--context 1", ("--context", "1", "at least 2")),
    ("--context 0", ("--context", "0", "at least 2")),
    ("--context -5", ("--context", "-5", "at least 2")),
    ("--num-steps 0", ("--num-steps", "0", "from 1 to 64")),
    ("--topk 0", ("--topk", "0", "from 1 to 64")),
    ("--num-draft-nodes 1", ("--num-draft-nodes", "1", "from 2 to 1024")),
    ("--num-steps 65", ("--num-steps", "65", "from 1 to 64")),
    ("--verify typical", ("--verify", "typical", "greedy", "rejection", "module:Class")),
    ("--tree wide", ("--tree", "wide", "eagle2", "chain", "static", "module:Class")),
    ("--proposer medusa", ("--proposer", "medusa", "eagle3", "ngram", "module:Class")),
    ("--verify no_such_module:Rule", ("--verify", "no_such_module:Rule", "imported")),
    ("--verify json:Rule", ("--verify", "json:Rule", "Rule")),
    ("--tree no_such_module:Tree", ("--tree", "no_such_module:Tree", "imported")),
    ("--proposer no_such_module:P", ("--proposer", "no_such_module:P", "imported")),
    ("--proposer :P", ("--proposer", ":P", "imported")),
    ("--tree .tree:Tree", ("--tree", ".tree:Tree", "imported")),
    ("--verify pathlib:Path", ("--verify", "pathlib:Path", "accept")),
    ("--tree pathlib:Path", ("--tree", "pathlib:Path", "build")),
    ("--proposer pathlib:Path --no-draft", ("--proposer", "--no-draft")),
    ("--proposer pathlib:Path", ("--proposer", "pathlib:Path", "expand")),
    ("--topk 3 --tree chain", ("--topk", "chain", "--num-steps")),
    ("--num-draft-nodes 9 --tree chain", ("--num-draft-nodes", "chain", "--num-steps")),
    ("--num-steps 2 --tree static", ("--num-steps", "static", "--static-tree")),
    ("--static-tree [0]", ("--static-tree", "eagle2", "--num-draft-nodes")),
    ("--static-tree [0] --tree chain", ("--static-tree", "chain", "--num-steps")),
    ("--draft-model d --proposer ngram", ("--draft-model", "d", "ngram")),
    ("--model m", ("--model", "m", "--draft-model", "ngram", "--no-draft")),
    ("--no-draft --draft-model d", ("--no-draft", "--draft-model", "drop one")),
    ("--no-draft --proposer ngram", ("--no-draft", "--proposer", "drop one")),
    ("--no-draft --tree chain", ("--no-draft", "--tree", "drop one")),
    ("--no-draft --verify greedy", ("--no-draft", "--verify", "drop one")),
    ("--no-draft --show-tree", ("--no-draft", "--show-tree", "drop one")),
    ("--no-draft --num-steps 3", ("--no-draft", "--num-steps", "drop one")),
    ("--no-draft --num-steps 0", ("--no-draft", "--num-steps", "drop one")),
    ("--no-draft --topk 3", ("--no-draft", "--topk", "drop one")),
    ("--no-draft --num-draft-nodes 3", ("--no-draft", "--num-draft-nodes", "drop one")),
    ("--no-draft --static-tree [0]", ("--no-draft", "--static-tree", "drop one")),
    ("--no-such-flag", ("--no-such-flag", "--help")),
    ("--no_such_flag", ("such", "--help")),
    ("--temperatur 1", ("--temperatur", "--help")),
    ("two prompts", ("prompts", "--help")),
    ("--max-new-tokens", ("--max-new-tokens", "expected one argument")),
    ("--max-new-tokens many", ("--max-new-tokens", "many", "int")),
    ("--max-new-tokens 1.5", ("--max-new-tokens", "1.5", "int")),
    ("--temperature warm", ("--temperature", "warm", "float")),
    ("--seed one", ("--seed", "one", "int")),
    ("--context long", ("--context", "long", "int")),
    ("--num-steps few", ("--num-steps", "few", "int")),
]


@pytest.mark.parametrize(("typed", "words"), FLAGS, ids=[typed for typed, _ in FLAGS])
def test_flag(capsys: pytest.CaptureFixture[str], typed: str, words: tuple[str, ...]) -> None:
    refused(capsys, typed.split(), *words)


# these are found once the engine is made
ENGINE_FLAGS: list[tuple[list[str], tuple[str, ...]]] = [
    (["--device", "tpu"], ("--device", "tpu", "cpu")),
    (["--device", "cuda"], ("--device", "cuda", "0 CUDA", "--device cpu")),
    (["--device", "cuda:7"], ("--device", "cuda:7", "0 CUDA", "--device cpu")),
    (["--device", "cuda:x"], ("--device", "cuda:x", "cuda:N")),
    (["--device", "cpu", "--dtype", "float16"], ("--dtype", "float16", "float32", "bfloat16")),
    (["--context", "257"], ("--context", "257", "256", "max_position_embeddings")),
    (["--context", str(10**20)], ("--context", str(10**20), "256", "max_position_embeddings")),
    *(
        (["--tree", "static", "--static-tree", paths], ("--static-tree", *words))
        for paths, *words in [
            ("[0],[0,0,0]", "[0, 0, 0]", "no parent", "[0, 0]"),
            ("[1,0]", "[1, 0]", "no parent"),
            ("[0],[-1]", "[-1]", "from 0 up"),
            ("[[]]", "[]", "from 0 up"),
            ("[0],[]", "[]", "from 0 up"),
            ("[]", "[]", "from 0 up"),
            ("[0],[0.5]", "[0.5]", "from 0 up"),
            ('[0],["1"]', "1", "from 0 up"),
            ("[0],1", "[0],1", "[0],[1],[0,0]"),
            ("[[[0]]]", "[[[0]]]", "[0],[1],[0,0]"),
            ("[0", "[0", "[0],[1],[0,0]"),
            ("no/such/file", "no/such/file", "no such file"),
            ("", "no such file"),
        ]
    ),
]


@pytest.mark.parametrize(
    ("more", "words"), ENGINE_FLAGS, ids=[" ".join(more) for more, _ in ENGINE_FLAGS]
)
def test_engine_flag(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[str, str],
    more: list[str],
    words: tuple[str, ...],
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    refused(capsys, run_pair(pair, *more, "hello"), *words)


@pytest.mark.parametrize("raw", [b"0 1", b"[\xff]", b"{}", b'{"a": 1}', b""], ids=str)
def test_static_tree_file(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str], tmp_path: Path, raw: bytes
) -> None:
    file = tmp_path / "tree.json"
    file.write_bytes(raw)
    argv = run_pair(pair, "--tree", "static", "--static-tree", str(file), "hello")
    refused(capsys, argv, f"--static-tree {file}", "rank paths")


@pytest.mark.parametrize(
    ("source", "word"),
    [("class Rule:\n  def", "mine.py"), ("import no_such_thing\n", "no_such_thing"), ("", "Rule")],
    ids=["syntax", "import", "empty"],
)
def test_module_that_does_not_import(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    source: str,
    word: str,
) -> None:
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    refused(capsys, ["--verify", "mine:Rule"], "--verify mine:Rule", "imported", word)
    sys.modules.pop("mine", None)


def test_a_message_of_two_lines_is_put_on_one(capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, ["one", "two\nlines"], "two lines", "--help")


def test_an_empty_model_name_is_not_the_demo(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As when a shell variable is not set."""
    monkeypatch.chdir(tmp_path)
    refused(capsys, ["--model", "", "--no-draft", "hello"], "--model", "empty")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--no-such-flag"], ("--no-such-flag",)),
        (["--model", "no/such/folder", "--no-draft"], ("--model", "no/such/folder")),
    ],
    ids=["flag", "folder"],
)
def test_in_a_process_of_its_own(more: list[str], words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "minispec.generate", *more]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    check_line(done.stdout, done.stderr, words)
    assert done.returncode == 2


def test_only_the_tokenizer_is_missing_from_a_written_target(
    capsys: pytest.CaptureFixture[str], copies: tuple[Path, Path]
) -> None:
    """The message tells the whole fix: with the file that it names the pair runs."""
    (copies[0] / "tiktoken.model").unlink()
    refused(capsys, run_pair(copies, "hello"), "tiktoken.model")
    write_byte_tokenizer(copies[0])
    assert main(run_pair(copies, "hello")) == 0
