"""Does speculation pay on the demo pair? Each prompt with and without it, one after the other.

    python bench/demo_pair.py            greedy, the 20 held-out prompts, 128 tokens each

Prints a line a prompt and, at the end, medians with their spread; checks that the two texts are
equal. Writes bench/results/demo_pair.json.
"""

import argparse
import json
from pathlib import Path

import torch
from common import card, save, spread, table

from minispec.config import EngineConfig
from minispec.drafting import BUILDERS, TreeConfig
from minispec.engine import Engine, Generation, GenerationParams, pick_rule
from minispec.generate import DEMO
from minispec.sampling import SamplingParams

DEFAULT = TreeConfig()


def run(engine: Engine, prompt: list[int], tokens: int, speculate: bool) -> Generation:
    """One greedy text."""
    sampling = SamplingParams()
    params = GenerationParams(max_new_tokens=tokens, ignore_eos=True)
    rule = pick_rule(None, sampling)
    generation = engine.generate(prompt, sampling, params, rule, speculate=speculate)
    for _ in generation:
        pass
    return generation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path, default=DEMO / "heldout_prompts.jsonl")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3, help="the median of these counts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tree", default="eagle2", choices=list(BUILDERS))
    parser.add_argument("--num-steps", type=int, default=DEFAULT.num_steps)
    parser.add_argument("--topk", type=int, default=DEFAULT.topk)
    parser.add_argument("--num-draft-nodes", type=int, default=DEFAULT.num_draft_nodes)
    parser.add_argument("--save-as", default="demo_pair", help="name of the results file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = TreeConfig(args.num_steps, args.topk, args.num_draft_nodes)
    engine = Engine(
        EngineConfig(str(DEMO / "target"), str(DEMO / "head"), "eagle3", args.tree, shape)
    )
    prompts = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    run(engine, engine.encode(prompts[0]["prompt"]), 16, True)  # warm-up
    rows: list[dict[str, object]] = []
    for number, entry in enumerate(prompts):
        ids = engine.encode(entry["prompt"])
        speeds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(args.repeats):
            texts = {on: run(engine, ids, args.tokens, on) for on in (False, True)}
            for on, generation in texts.items():
                speeds[on].append(generation.report.tokens_per_second or 0.0)
        fast, plain = (spread(speeds[on])["median"] for on in (True, False))
        rows.append(
            {
                "prompt": number,
                "kind": entry["kind"],
                "accepted_length": texts[True].report.mean_accepted_length,
                "plain_tok_s": plain,
                "spec_tok_s": fast,
                "ratio": fast / plain,
                "equal": texts[True].token_ids == texts[False].token_ids,
            }
        )
        print(table(list(rows[0]), [rows[-1].values()]), flush=True)
    kinds = sorted({str(row["kind"]) for row in rows})
    lengths = {
        kind: spread([float(row["accepted_length"]) for row in rows if row["kind"] == kind])
        for kind in kinds
    }
    figures = {
        "settings": {"tree": args.tree, "tokens": args.tokens, "repeats": args.repeats}
        | {name: getattr(args, name) for name in ("num_steps", "topk", "num_draft_nodes")},
        "texts_equal": sum(bool(row["equal"]) for row in rows),
        "prompts": len(rows),
        "accepted_length": lengths,
        "mean_accepted_length": {
            kind: sum(float(r["accepted_length"]) for r in rows if r["kind"] == kind)
            / sum(r["kind"] == kind for r in rows)
            for kind in kinds
        },
        "speed_ratio": spread([float(row["ratio"]) for row in rows]),
        "rows": rows,
    }
    print(table(list(rows[0]), (row.values() for row in rows)))
    save(args.save_as, card(engine.device), figures)


if __name__ == "__main__":
    main()
