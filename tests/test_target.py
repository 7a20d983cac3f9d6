"""The target against independent code: Hugging Face's float64 logits, the INT4 format, YaRN."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toys import CPU, toy_pair

from minispec.kernels.int4_moe import (
    PackedExperts,
    int4_moe_cpu,
    int4_moe_reference,
    pack_int4,
    repack_for_cpu,
    unpack_int4,
)
from minispec.kernels.matmul import matmul_cpu, matmul_reference
from minispec.kv import RowCache
from minispec.models.interface import Step
from minispec.models.layers import RopeScaling, rope_inv_freq, yarn_mscale
from minispec.models.weights import load_target
from minispec.round import tree_step
from minispec.tree import DraftTree

SQUARE = Path(__file__).parent / "goldens" / "kimi_square"
# Hugging Face's float64 run takes its cosines from float32 angles, ours from float64 ones:
# at position 40 that is an angle error of about 2e-6
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(SQUARE / "expected.safetensors")


def square(dtype: torch.dtype, expert_dtype: torch.dtype):
    """The golden checkpoint, every layer's input tapped, and a cache for it."""
    target = load_target(SQUARE, CPU, dtype, expert_dtype, None)
    target.tap_boundaries = tuple(range(target.num_layers))
    return target, RowCache(target.num_layers, 128, target.cache_width, dtype, CPU)


def test_prefill_equals_hugging_face(golden: dict[str, torch.Tensor]) -> None:
    target, cache = square(torch.float64, torch.float64)
    output = target.forward(Step.chunk(golden["ids"], 0), cache)
    assert (output.logits_TV - golden["logits"]).abs().max() < TOLERANCE
    for layer, tap_TD in enumerate(output.taps_TD.chunk(target.num_layers, dim=-1)):
        assert (tap_TD - golden["layer_inputs"][layer]).abs().max() < TOLERANCE


def test_prompt_chunks_and_single_tokens_equal_hugging_face(golden) -> None:
    target, cache = square(torch.float64, torch.float64)
    logits, start = [], 0
    for size in (1, 16, 7, 1, 1, 15):
        token_T = golden["ids"][start : start + size]
        logits.append(target.forward(Step.chunk(token_T, cache.length), cache).logits_TV)
        cache.commit(list(range(size)))
        start += size
    assert start == len(golden["ids"])
    assert (torch.cat(logits) - golden["logits"]).abs().max() < TOLERANCE


def test_tree_step_equals_hugging_face(golden: dict[str, torch.Tensor]) -> None:
    target, cache = square(torch.float64, torch.float64)
    length = len(golden["ids"])
    target.forward(Step.chunk(golden["ids"], 0), cache)
    cache.commit(list(range(length)))
    parents = golden["tree_parents"]
    depth = [0]
    for parent in parents.tolist()[1:]:
        depth.append(depth[parent] + 1)
    zeros = torch.zeros(len(depth))
    tree = DraftTree(golden["tree_tokens"], parents, torch.tensor(depth), zeros, zeros)
    output = target.forward(tree_step(tree, length), cache)
    assert (output.logits_TV - golden["tree_logits"]).abs().max() < TOLERANCE


def test_float32_is_close(golden: dict[str, torch.Tensor]) -> None:
    target, cache = square(torch.float32, torch.float32)
    output = target.forward(Step.chunk(golden["ids"], 0), cache)
    error = (output.logits_TV - golden["logits"]).norm() / golden["logits"].norm()
    assert error < 1e-5  # measured 1.2e-6


def test_int4_words() -> None:
    rows = torch.tensor([[-8, -7, -6, -5, -4, -3, -2, -1], [-8, -7, -1, 0, 1, 2, 6, 7]])
    words = pack_int4(rows)
    assert [word % 2**32 for word in words.flatten().tolist()] == [0x76543210, 0xFEA98710]
    code_ND = torch.randint(-8, 8, (6, 64))
    scale_NG = torch.rand(6, 2).to(torch.bfloat16)
    dense_ND = unpack_int4(pack_int4(code_ND), scale_NG, torch.float32)
    assert torch.equal(dense_ND, code_ND * scale_NG.float().repeat_interleave(32, dim=1))


@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
@pytest.mark.parametrize("inner", [32, 96])
def test_cpu_experts_equal_the_reference(tokens: int, inner: int) -> None:
    torch.manual_seed(tokens)
    experts, width = 6, 64
    target = PackedExperts(
        pack_int4(torch.randint(-8, 8, (experts, 2 * inner, width))),
        (torch.rand(experts, 2 * inner, width // 32) * 0.05).to(torch.bfloat16),
        pack_int4(torch.randint(-8, 8, (experts, width, inner))),
        (torch.rand(experts, width, inner // 32) * 0.05).to(torch.bfloat16),
    )
    x_TD = torch.randn(tokens, width)
    expert_TK = torch.rand(tokens, experts).topk(2).indices  # expert 5 may be empty
    weight_TK = torch.rand(tokens, 2)
    wanted = int4_moe_reference(x_TD.double(), target, expert_TK, weight_TK.double())
    given = int4_moe_cpu(x_TD, repack_for_cpu(target), expert_TK, weight_TK)
    # six roundings to bfloat16 (input, gate, up, silu, their product, output), 2^-9 each
    assert (given - wanted).norm() / wanted.norm() < 6 * 2**-9
    # a token's experts do not depend on who shares the step
    alone = int4_moe_cpu(x_TD[:1], repack_for_cpu(target), expert_TK[:1], weight_TK[:1])
    assert torch.equal(alone, given[:1])


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 63])
def test_rows_of_a_product_do_not_depend_on_their_number(rows: int) -> None:
    torch.manual_seed(rows)
    weight_ND, x_TD = torch.randn(96, 160), torch.randn(rows, 160)
    given = matmul_cpu(x_TD, weight_ND)
    for row in range(rows):
        assert torch.equal(matmul_cpu(x_TD[row : row + 1], weight_ND)[0], given[row])
    torch.testing.assert_close(given, matmul_reference(x_TD, weight_ND), atol=1e-4, rtol=1e-5)


def test_yarn_frequencies() -> None:
    kimi = RopeScaling(64.0, 4096, 32.0, 1.0)
    given = rope_inv_freq(64, 50000.0, kimi)[[0, 7, 8, 9, 14, 19, 20, 31]]
    wanted = [1, 9.377786e-2, 6.687403e-2, 4.377666e-2, 4.465849e-3, 1.583750e-4]
    wanted += [1.807023e-5, 4.382206e-7]
    torch.testing.assert_close(given, torch.tensor(wanted, dtype=torch.float64), rtol=1e-6, atol=0)
    thinking = rope_inv_freq(64, 50000.0, RopeScaling(64.0, 4096, 1.0, 1.0))[[9, 19, 20]]
    wanted = [4.768861e-2, 1.621760e-3, 1.807023e-5]
    torch.testing.assert_close(
        thinking, torch.tensor(wanted, dtype=torch.float64), rtol=1e-6, atol=0
    )
    assert abs(192**-0.5 * yarn_mscale(64, 1.0) ** 2 - 0.1446796) < 1e-7


def test_a_row_sees_its_ancestors_only() -> None:
    """Another token in a cousin's place leaves a row's logits untouched, bit for bit."""
    target, _ = toy_pair(0)
    cache = RowCache(target.num_layers, 64, target.cache_width, torch.float32, CPU)
    target.forward(Step.chunk(torch.arange(3, 13), 0), cache)
    cache.commit(list(range(10)))
    tree, left = DraftTree.root(50, CPU).grow(
        torch.tensor([0]), torch.tensor([[60, 61]]), torch.zeros(1, 2)
    )
    tree, _ = tree.grow(left, torch.tensor([[70], [71]]), torch.zeros(2, 1))
    before = target.forward(tree_step(tree, 10), cache).logits_TV
    tree.token_N[2] = 99  # the right child; nodes 0, 1 and 3 are not below it
    after = target.forward(tree_step(tree, 10), cache).logits_TV
    assert torch.equal(before[[0, 1, 3]], after[[0, 1, 3]])
    assert not torch.equal(before[[2, 4]], after[[2, 4]])
