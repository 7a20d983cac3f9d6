"""Does speculation pay on the demo pair? Each prompt with and without it, one after the other.

    python bench/demo_pair.py            greedy, the 20 held-out prompts, 128 tokens each

Prints a line a prompt and, at the end, medians with their spread; checks that the two texts are
equal. Writes bench/results/demo_pair.json.
"""

import argparse
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from common import card, save, spread, table

from minispec.config import EngineConfig
from minispec.drafting import BUILDERS, TreeConfig
from minispec.engine import Engine, Generation, GenerationParams, pick_rule
from minispec.generate import DEMO
from minispec.sampling import SamplingParams

DEFAULT = TreeConfig()


@dataclass(frozen=True)
class Row:
    """One prompt."""

    kind: str
    accepted_length: float
    plain_tok_s: float
    speculative_tok_s: float
    ratio: float
    equal: bool


HEADER = [field.name for field in dataclasses.fields(Row)]


def run(engine: Engine, prompt: list[int], tokens: int, speculate: bool) -> Generation:
    """One greedy text."""
    sampling = SamplingParams()
    params = GenerationParams(max_new_tokens=tokens, ignore_eos=True)
    rule = pick_rule(None, sampling)
    generation = engine.generate(prompt, sampling, params, rule, speculate=speculate)
    for _ in generation:
        pass
    return generation


def measure(engine: Engine, kind: str, prompt: str, tokens: int, repeats: int) -> Row:
    """Plain and speculative in turn, `repeats` times; medians of the speeds."""
    ids = engine.encode(prompt)
    speeds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(repeats):
        texts = {on: run(engine, ids, tokens, on) for on in (False, True)}
        for on, generation in texts.items():
            speeds[on].append(generation.report.tokens_per_second or 0.0)
    plain, fast = (spread(speeds[on])["median"] for on in (False, True))
    accepted = texts[True].report.mean_accepted_length or 0.0
    equal = texts[True].token_ids == texts[False].token_ids
    return Row(kind, accepted, plain, fast, fast / plain, equal)


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
    rows: list[Row] = []
    for entry in prompts:
        rows.append(measure(engine, entry["kind"], entry["prompt"], args.tokens, args.repeats))
        print(table(HEADER, [dataclasses.astuple(rows[-1])]), flush=True)
    kinds = sorted({row.kind for row in rows})
    names = ("tree", "tokens", "repeats", "num_steps", "topk", "num_draft_nodes")
    figures = {
        "settings": {name: getattr(args, name) for name in names},
        "texts_equal": sum(row.equal for row in rows),
        "prompts": len(rows),
        "accepted_length": {
            kind: spread([row.accepted_length for row in rows if row.kind == kind])
            for kind in kinds
        },
        "speed_ratio": {
            "all": spread([row.ratio for row in rows]),
            **{kind: spread([row.ratio for row in rows if row.kind == kind]) for kind in kinds},
        },
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    print(table(HEADER, map(dataclasses.astuple, rows)))
    for name in ("accepted_length", "speed_ratio"):
        print(name, json.dumps(figures[name]))
    save(args.save_as, card(engine.device), figures)


if __name__ == "__main__":
    main()
