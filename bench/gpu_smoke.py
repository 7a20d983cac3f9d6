"""Does the torch reference path run on a GPU, and how often is its text the plain text?

    python bench/gpu_smoke.py      the held-out prompts, 64 tokens, float32 and bfloat16

No timing claim: there are no GPU kernels yet. Writes bench/results/gpu_smoke.json.
"""

import argparse
import json
from pathlib import Path

import torch
from common import card, save, table
from demo_pair import run

from minispec.config import EngineConfig
from minispec.engine import Engine
from minispec.generate import DEMO


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path, default=DEMO / "heldout_prompts.jsonl")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    prompts = [json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines()]
    rows = []
    for dtype in ("float32", "bfloat16"):
        config = EngineConfig(
            str(DEMO / "target"), str(DEMO / "head"), "eagle3", device=args.device, dtype=dtype
        )
        engine = Engine(config)
        equal, lengths = 0, []
        for prompt in prompts:
            ids = engine.encode(prompt)
            drafted, plain = (run(engine, ids, args.tokens, on) for on in (True, False))
            equal += drafted.token_ids == plain.token_ids
            lengths.append(drafted.report.mean_accepted_length or 0.0)
        rows.append((dtype, len(prompts), equal, sum(lengths) / len(lengths)))
        header = ("dtype", "prompts", "equal_texts", "mean_accepted_length")
        print(table(header, rows), flush=True)
    figures = {"tokens": args.tokens, "rows": [dict(zip(header, row)) for row in rows]}
    save("gpu_smoke", card(torch.device(args.device)), figures)


if __name__ == "__main__":
    main()
