"""Trains the demo pair on one GPU: corpus, target (pretraining, then INT4-aware), head.

    python -m minispec.models.demo.recipe --books FILE --work DIR --out DIR --stage all

The corpus and target stages go on where an earlier run stopped, from what is in `--work`. `--out`
gets target/, head/, heldout_prompts.jsonl and demo_training.json (what was trained, on what, for
how long, how good).
"""

import argparse
import datetime
import json
import math
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import target_json, write_json
from ..config import KimiConfig
from ..layers import RopeScaling
from .corpus import HELD_OUT_KINDS, PROMPTS, SPECIAL, Mixture, Windows, build_corpus
from .export import export_target
from .train_head import HeadPlan, run_head_stage
from .train_target import Phase, TrainableKimi, evaluate, train_phase

REPORT = "demo_training.json"
SIZES: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 320, "intermediate_size": 1280,
    "moe_intermediate_size": 160, "num_hidden_layers": 8, "num_attention_heads": 5,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.0, "q_lora_rank": 128,
    "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
    "rope_scaling": {"type": "yarn", **asdict(RopeScaling(4.0, 512))}, "initializer_range": 0.02,
}  # fmt: skip
# 64k tokens an update: at 256k, 60M tokens would be 230 updates only
PRETRAIN = Phase(
    name="pretrain", tokens=60_000_000, batch=128, sequence=512, peak_lr=2e-3, final_lr=2e-4,
    warmup=150, dropout=0.1, fake_quant=False, balance=3e-3,
)  # fmt: skip
# the whole context of 2048 positions, which pretraining saw the first 512 of
QAT = Phase(
    name="qat", tokens=20_000_000, batch=32, sequence=2048, peak_lr=3e-4, final_lr=0.0,
    warmup=20, dropout=0.1, fake_quant=True, balance=0.0,
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what comes out."""

    seed: int = 0
    sizes: dict[str, Any] = field(default_factory=SIZES.copy)
    story_tokens: int = 90_000_000
    heldout_tokens: int = 400_000
    story_share: float = 0.7
    eval_batches: int = 2  # the held-out books are 150k tokens
    pretrain: Phase = PRETRAIN
    qat: Phase = QAT
    head: HeadPlan = HeadPlan()


def read_recipe(args: argparse.Namespace) -> Recipe:
    """The defaults, changed by a JSON file of the same fields and by the token flags."""
    changes = json.loads(args.recipe.read_text()) if args.recipe else {}
    flags = {"pretrain": args.tokens, "qat": args.qat_tokens, "head": args.head_tokens}
    for name, tokens in flags.items():
        if tokens is not None:
            changes[name] = changes.get(name, {}) | {"tokens": tokens}
    recipe = Recipe()
    for name, value in changes.items():
        if name == "sizes":
            value = recipe.sizes | value
        elif isinstance(value, dict):
            value = replace(getattr(recipe, name), **value)
        recipe = replace(recipe, **{name: value})
    return recipe


def add_to_report(work: Path, **entries: object) -> None:
    """Extend the report in `work`."""
    path = work / REPORT
    write_json(path, (json.loads(path.read_text()) if path.exists() else {}) | entries)


def describe_run(recipe: Recipe, device: torch.device) -> dict[str, object]:
    """Where and how this was run."""
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "triton": next((found.version for found in metadata.distributions(name="triton")), None),
        "date": datetime.date.today().isoformat(),
        "command": "python -m minispec.models.demo.recipe " + " ".join(sys.argv[1:]),
        "recipe": asdict(recipe),
    }


def run_target_stage(
    recipe: Recipe, work: Path, device: torch.device, deadline: float, compiled: bool
) -> bool:
    """Pretrain, fine-tune on INT4 values, evaluate after each, export. False: out of time."""
    add_to_report(work, **describe_run(recipe, device))
    torch.manual_seed(recipe.seed)
    raw = target_json(recipe.sizes, SPECIAL)
    model = TrainableKimi(KimiConfig.from_json(raw, "the demo's target")).to(device)
    if compiled:
        for layer in model.layers:  # one graph serves all MoE layers, so compiling takes seconds
            layer.compile(dynamic=False)
    held_out = {
        kind: Windows(work / f"heldout_{kind}.bin", recipe.pretrain.sequence, 0, device)
        for kind in HELD_OUT_KINDS
    }
    scores = {}
    for phase, scored in ((recipe.pretrain, "before_qat"), (recipe.qat, "after_qat")):
        mixture = Mixture(work, "train", phase.sequence, recipe.story_share, device)
        state = work / f"{phase.name}.safetensors"
        done = train_phase(model, phase, mixture, state, deadline)
        if done is None:
            return False
        scores[scored] = evaluate(model, held_out, recipe.eval_batches, recipe.pretrain.batch)
        print(f"target: held-out perplexity {scores}", flush=True)
        add_to_report(work, **{phase.name: done, "held_out_perplexity": scores})
    export_target(model, raw, work / "tokenizer.model", work / "target")
    add_to_report(work, parameters=sum(weight.numel() for weight in model.parameters()))
    return True


def copy_out(work: Path, out: Path, folder: str) -> None:
    """A finished folder of --work, the report and the prompts, for --out."""
    shutil.copytree(work / folder, out / folder, dirs_exist_ok=True)
    for name in (REPORT, PROMPTS):
        if (work / name).exists():  # a --work of linked token arrays may lack the prompts
            shutil.copy(work / name, out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo pair.")
    add = parser.add_argument
    add("--books", type=Path, required=True, help="xz file of plain text")
    add("--work", type=Path, required=True, help="folder to go on from")
    add("--out", type=Path, required=True, help="folder for the results")
    add("--stage", choices=("corpus", "target", "head", "all"), required=True)
    limit = "save and stop training after this long; run again to go on"
    add("--minutes-limit", type=float, default=math.inf, help=limit)
    add("--tokens", type=int, help="of pretraining")
    add("--qat-tokens", type=int)
    add("--head-tokens", type=int)
    add("--recipe", type=Path, help="JSON file of changes to the recipe")
    add("--no-compile", action="store_true", help="train without torch.compile")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes_limit
    recipe = read_recipe(args)
    stage, work, out = args.stage, args.work, args.out
    out.mkdir(parents=True, exist_ok=True)
    if stage in ("corpus", "all"):
        vocab_size = recipe.sizes["vocab_size"]
        build_corpus(args.books, work, vocab_size, recipe.story_tokens, recipe.heldout_tokens)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if stage in ("target", "all"):
        if not run_target_stage(recipe, work, device, deadline, not args.no_compile):
            return
        copy_out(work, out, "target")
    if stage in ("head", "all"):
        torch.manual_seed(recipe.seed)
        add_to_report(work, head=run_head_stage(work, recipe.head, device, deadline))
        copy_out(work, out, "head")


if __name__ == "__main__":
    main()
