"""Trains the demo pair on one GPU: corpus, target (pretraining, then INT4-aware), head.

    python -m minispec.models.demo.recipe --books FILE --work DIR --out DIR --stage all

Every stage goes on where an earlier run stopped; `--work` holds what that needs. `--out` gets
target/, head/ and demo_training.json (what was trained, on what, for how long, how good).
"""

import argparse
import datetime
import json
import math
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ...train import HeadOptions, train_head
from ..config import KimiConfig
from .corpus import BOS, EOS, HELD_OUT_KINDS, PAD, Mixture, Windows, build_corpus
from .export import config_json, export_target, write_json, write_shards
from .train_head import HeadPlan, frozen_target, new_head, run_head_stage, training_batches
from .train_target import (
    Phase,
    TrainableKimi,
    evaluate,
    make_optimizer,
    set_phase,
    train_phase,
    train_step,
)

STATE_SHARD_BYTES = 15_000_000
YARN = {
    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}
SIZES: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 320, "intermediate_size": 1280,
    "moe_intermediate_size": 160, "num_hidden_layers": 8, "num_attention_heads": 5,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.0, "q_lora_rank": 128,
    "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
    "rope_scaling": YARN, "initializer_range": 0.02,
}


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what comes out."""

    seed: int = 0
    sizes: dict[str, Any] = field(default_factory=lambda: dict(SIZES))
    story_tokens: int = 90_000_000
    heldout_tokens: int = 400_000
    story_share: float = 0.7
    eval_batches: int = 2  # the held-out books are 150k tokens
    # 64k tokens an update: at 256k, 120M tokens would be 460 updates only
    pretrain: Phase = Phase(
        name="pretrain", tokens=120_000_000, batch=128, sequence=512, peak_lr=2e-3,
        final_lr=2e-4, warmup=150, dropout=0.1, fake_quant=False, balance=3e-3,
    )
    # the whole context of 2048 positions, which pretraining saw the first 512 of
    qat: Phase = Phase(
        name="qat", tokens=20_000_000, batch=32, sequence=2048, peak_lr=3e-4,
        final_lr=0.0, warmup=20, dropout=0.1, fake_quant=True, balance=0.0,
    )
    head: HeadPlan = HeadPlan(
        intermediate=1024, draft_vocab=3072, aux_layer_ids=(2, 4, 5), tokens=60_000_000,
        batch=32, sequence=1024, story_share=0.7, depths=5, peak_lr=1e-3, warmup=100,
        eval_batches=4,
    )


def read_recipe(path: Path | None, args: argparse.Namespace) -> Recipe:
    """The defaults, changed by a JSON file of the same fields and by the token flags."""
    changes = json.loads(path.read_text()) if path else {}
    recipe = Recipe()
    for name, value in changes.items():
        if name == "sizes":
            value = recipe.sizes | value
        elif isinstance(value, dict):
            value = replace(getattr(recipe, name), **value)
        recipe = replace(recipe, **{name: value})
    for name, tokens in (
        ("pretrain", args.tokens), ("qat", args.qat_tokens), ("head", args.head_tokens)
    ):
        if tokens is not None:
            recipe = replace(recipe, **{name: replace(getattr(recipe, name), tokens=tokens)})
    return recipe


def add_to_report(work: Path, entries: dict[str, object]) -> dict[str, object]:
    """Extend work/demo_training.json."""
    path = work / "demo_training.json"
    report = (json.loads(path.read_text()) if path.exists() else {}) | entries
    write_json(path, report)
    return report


def describe_run(recipe: Recipe, device: torch.device) -> dict[str, object]:
    """Where and how this was run."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "triton": triton_version,
        "date": datetime.date.today().isoformat(),
        "command": "python -m minispec.models.demo.recipe " + " ".join(sys.argv[1:]),
        "recipe": asdict(recipe),
    }


def new_target(recipe: Recipe, device: torch.device) -> tuple[TrainableKimi, dict[str, Any]]:
    """-> (a freshly initialised target, its config.json)."""
    torch.manual_seed(recipe.seed)
    raw = config_json(recipe.sizes, BOS, EOS, PAD)
    return TrainableKimi(KimiConfig.from_json(raw, "the demo's target")).to(device), raw


def run_target_stage(
    recipe: Recipe, work: Path, device: torch.device, deadline: float, compiled: bool
) -> bool:
    """Pretrain, fine-tune on INT4 values, evaluate around it, export. False: out of time."""
    model, raw = new_target(recipe, device)
    if compiled:
        model.compile_layers()
    held_out = {
        kind: Windows(work / f"heldout_{kind}.bin", recipe.pretrain.sequence, 0, device)
        for kind in HELD_OUT_KINDS
    }
    state = sorted((work / "state").glob("*.safetensors"))
    if state and not (work / "pretrain.pt").exists():
        print("target: pretrained weights from state/", flush=True)
        model.load_state_dict({k: v for file in state for k, v in load_file(file).items()})
    else:
        phase = recipe.pretrain
        mixture = Mixture(work, "train", phase.sequence, recipe.story_share, device)
        done = train_phase(model, phase, mixture, work / "pretrain.pt", deadline)
        if done is None:
            return False
        add_to_report(work, {"pretrain": done})
    scores = {"before_qat": evaluate(model, held_out, recipe.eval_batches, recipe.pretrain.batch)}
    print(f"target: held-out perplexity {scores}", flush=True)
    mixture = Mixture(work, "train", recipe.qat.sequence, recipe.story_share, device)
    done = train_phase(model, recipe.qat, mixture, work / "qat.pt", deadline)
    if done is None:
        return False
    scores["after_qat"] = evaluate(model, held_out, recipe.eval_batches, recipe.pretrain.batch)
    print(f"target: held-out perplexity {scores}", flush=True)
    export_target(model, raw, work / "tokenizer.model", work / "target")
    parameters = sum(weight.numel() for weight in model.parameters())
    add_to_report(
        work, {"qat": done, "held_out_perplexity": scores, "parameters": parameters}
    )
    return True


def save_state(work: Path, out: Path) -> None:
    """Pretrained float weights as bfloat16 shards, from which another machine can go on.

    Copied to --work/state there, they stand in for pretraining.
    """
    state = torch.load(work / "pretrain.pt", map_location="cpu", weights_only=True)["model"]
    keep = ((name, t if "bias" in name else t.bfloat16()) for name, t in state.items())
    out.mkdir(parents=True, exist_ok=True)
    write_shards(keep, out, STATE_SHARD_BYTES, with_index=False)


def copy_out(work: Path, out: Path, folder: str) -> None:
    """A finished folder of --work and the report, for --out."""
    shutil.copytree(work / folder, out / folder, dirs_exist_ok=True)
    shutil.copy(work / "demo_training.json", out)


def timed(steps: int, device: torch.device, step: Any) -> float:
    """Seconds a call of `step(i)`."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic()

    begun = now()
    for index in range(steps):
        step(index)
    return (now() - begun) / steps


def smoke(recipe: Recipe, work: Path, device: torch.device, steps: int = 10) -> dict[str, Any]:
    """Throughput and memory of every kind of step at real size, on random weights."""
    result: dict[str, Any] = {}

    def measure(name: str, tokens: int, step: Any) -> None:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        first = timed(3, device, step) * 3
        speed = tokens / timed(steps, device, step)
        memory = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
        result[name] = {
            "tokens_per_s": round(speed), "gb": round(memory, 1),
            "first_3_steps_s": round(first, 1),
        }
        print(f"smoke: {name} {result[name]}", flush=True)

    for compiled in (False, True):
        model, raw = new_target(recipe, device)
        if compiled:
            model.compile_layers()
        for phase in (recipe.pretrain, recipe.qat):
            optimizer = make_optimizer(model)
            mixture = Mixture(work, "train", phase.sequence, recipe.story_share, device)
            set_phase(model, phase)

            def step(index: int) -> None:
                window_BT = mixture.batch(index, phase.batch)
                train_step(model, optimizer, window_BT, 1e-3, phase.balance)

            name = f"{phase.name}_{'compiled' if compiled else 'eager'}"
            measure(name, phase.batch * phase.sequence, step)
    held_out = Mixture(work, "heldout", recipe.qat.sequence, recipe.story_share, device).kinds
    result["perplexity"] = evaluate(model, held_out, 1, recipe.qat.batch)
    export_target(model, raw, work / "tokenizer.model", work / "target")
    plan = recipe.head
    target = frozen_target(work / "target", plan, device)
    again = evaluate(target, held_out, 1, recipe.qat.batch)
    result["perplexity_of_export"] = again
    mixture = Mixture(work, "train", plan.sequence, plan.story_share, device)
    special = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    head, _, _ = new_head(target, plan, mixture, special)
    batches = training_batches(target, mixture, plan.batch)
    options = HeadOptions(depths=plan.depths, updates=1)
    # each call makes its own optimizer, which costs little beside the update
    measure("head", plan.batch * plan.sequence,
            lambda _: train_head(head, batches, options, math.inf))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo pair.")
    parser.add_argument("--books", type=Path, required=True, help="xz file of plain text")
    parser.add_argument("--work", type=Path, required=True, help="folder to go on from")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    stages = ("corpus", "target", "state", "head", "all", "smoke")
    parser.add_argument("--stage", choices=stages, required=True)
    parser.add_argument("--minutes-limit", type=float, default=math.inf,
                        help="save and stop training after this long; run again to go on")
    parser.add_argument("--tokens", type=int, help="of pretraining")
    parser.add_argument("--qat-tokens", type=int)
    parser.add_argument("--head-tokens", type=int)
    parser.add_argument("--recipe", type=Path, help="JSON file of changes to the recipe")
    parser.add_argument("--no-compile", action="store_true", help="train without torch.compile")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes_limit
    recipe = read_recipe(args.recipe, args)
    stage, work, out = args.stage, args.work, args.out
    args.out.mkdir(parents=True, exist_ok=True)
    story_tokens = 2_000_000 if stage == "smoke" else recipe.story_tokens
    work = work / "smoke" if stage == "smoke" else work
    if stage in ("corpus", "all", "smoke"):
        build_corpus(
            args.books, work, recipe.sizes["vocab_size"], story_tokens, recipe.heldout_tokens
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if stage == "smoke":
        write_json(out / "smoke.json", describe_run(recipe, device) | smoke(recipe, work, device))
    if stage in ("target", "all"):
        add_to_report(work, describe_run(recipe, device))
        if not run_target_stage(recipe, work, device, deadline, not args.no_compile):
            return
        copy_out(work, out, "target")
    if stage == "state":
        save_state(work, out / "state")
    if stage in ("head", "all"):
        begun = time.monotonic()
        done = run_head_stage(work, recipe.head, device, deadline, work / "head")
        add_to_report(work, {"head": done | {"seconds": round(time.monotonic() - begun, 1)}})
        copy_out(work, out, "head")


if __name__ == "__main__":
    main()
