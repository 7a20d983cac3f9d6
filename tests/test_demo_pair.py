"""The shipped pair: its size, its form on disk, and speculation that leaves its text alone."""

import json
from functools import cache

import pytest

from minispec.config import EngineConfig
from minispec.drafting import BUILDERS, PROPOSERS, TreeConfig
from minispec.engine import Engine, Generation, GenerationParams, pick_rule
from minispec.generate import DEMO
from minispec.sampling import SamplingParams

PROMPTS = [
    json.loads(line)["prompt"] for line in (DEMO / "heldout_prompts.jsonl").read_text().splitlines()
]
SHAPES = {"eagle2": TreeConfig(), "chain": TreeConfig(num_steps=4), "static": TreeConfig()}


@cache
def demo_engine(proposer: str, tree: str) -> Engine:
    head = str(DEMO / "head") if proposer == "eagle3" else None
    return Engine(EngineConfig(str(DEMO / "target"), head, proposer, tree, SHAPES[tree]))


def run(
    engine: Engine,
    prompt: str,
    tokens: int,
    speculate: bool,
    sampling: SamplingParams | None = None,
) -> Generation:
    sampling = sampling or SamplingParams()
    params = GenerationParams(max_new_tokens=tokens)
    rule = pick_rule(None, sampling)
    generation = engine.generate(engine.encode(prompt), sampling, params, rule, speculate)
    for _ in generation:
        pass
    return generation


def test_files_are_small() -> None:
    sizes = {
        folder: [file.stat().st_size for file in (DEMO / folder).iterdir()]
        for folder in ("target", "head")
    }
    assert max(sizes["target"] + sizes["head"]) < 16e6
    assert sum(sizes["target"]) < 25e6
    assert sum(sizes["head"]) < 7e6


def test_form_is_kimis() -> None:
    config = json.loads((DEMO / "target" / "config.json").read_text())
    index = json.loads((DEMO / "target" / "model.safetensors.index.json").read_text())
    names = index["weight_map"]
    assert config["model_type"] == "kimi_k25"
    assert config["text_config"]["quantization_config"]["format"] == "pack-quantized"
    assert all(name.startswith("language_model.") for name in names)
    assert "language_model.model.layers.1.mlp.experts.15.down_proj.weight_packed" in names


@pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS[12]], ids=["story", "book"])
@pytest.mark.parametrize("tree", BUILDERS)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_greedy_text_is_plain_greedy_text(proposer: str, tree: str, prompt: str) -> None:
    engine = demo_engine(proposer, tree)
    drafted = run(engine, prompt, 64, speculate=True)
    assert drafted.token_ids == run(engine, prompt, 64, speculate=False).token_ids
    if proposer == "eagle3":
        assert drafted.report.mean_accepted_length > 1.5


def test_all_heldout_prompts() -> None:
    engine = demo_engine("eagle3", "eagle2")
    lengths: dict[bool, list[float]] = {True: [], False: []}
    for number, prompt in enumerate(PROMPTS):
        drafted = run(engine, prompt, 48, speculate=True)
        assert drafted.text == run(engine, prompt, 48, speculate=False).text
        lengths[number < 10].append(drafted.report.mean_accepted_length)
    assert sum(lengths[True]) / 10 >= 3.0  # stories
    assert sum(lengths[False]) / 10 >= 2.0  # book prose


def test_sampled_text_repeats_with_its_seed() -> None:
    engine = demo_engine("eagle3", "eagle2")
    warm = SamplingParams(temperature=0.8, top_p=0.95, seed=3)
    first = run(engine, PROMPTS[1], 40, True, warm)
    assert run(engine, PROMPTS[1], 40, True, warm).text == first.text
    other = SamplingParams(temperature=0.8, top_p=0.95, seed=4)
    assert run(engine, PROMPTS[1], 40, True, other).text != first.text
    assert first.report.mean_accepted_length > 1.5
