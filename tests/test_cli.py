"""The command line: what it prints where, in every mode, and what each spelling means."""

import io
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import Replay, write_pair

from minispec.drafting import DraftSetup, TreeConfig
from minispec.engine import Emitted, Generation
from minispec.generate import engine_config, main, make_parser, sampling_params, with_dashes
from minispec.tree import DraftTree

PROMPT = "the cat sat on the mat. the cat sat on"
SHAPES = {
    "eagle3": ["--num-steps", "3", "--topk", "3", "--num-draft-nodes", "9"],
    "ngram": ["--proposer", "ngram", "--num-steps", "3"],
    "chain": ["--tree", "chain", "--num-steps", "3"],
    "static": ["--tree", "static", "--static-tree", "[0],[1],[0,0],[0,1],[0,0,0]"],
    "plain": ["--no-draft"],
}
ORACLE = ["--proposer", "oracle:Oracle", "--num-steps", "3", "--topk", "2"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    target, head = write_pair(tmp_path_factory.mktemp("pair"), seed=3)
    return str(target), str(head)


class Output:
    """What one run of the command line printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
        capsys.readouterr()
        self.code = main(argv)
        captured = capsys.readouterr()
        self.out, self.err = captured.out, captured.err
        assert self.code == 0, self.err


def argv_for(pair: tuple[str, str], shape: str = "eagle3", *more: str) -> list[str]:
    target, head = pair
    draft = ["--draft-model", head] if shape in ("eagle3", "chain", "static") else []
    flags = ORACLE if shape == "oracle" else SHAPES[shape]
    return ["--model", target, *draft, *flags, "-n", "24", *more]


def as_object(capsys: pytest.CaptureFixture[str], argv: list[str]) -> dict[str, Any]:
    """The object of --json, which has to be all of stdout and on one line."""
    output = Output(capsys, [*argv, "--json"])
    assert output.out.count("\n") == 1 and output.out.endswith("}\n")
    made = json.loads(output.out)
    assert isinstance(made, dict)
    return made


# output modes


def test_json_keys(capsys: pytest.CaptureFixture[str], pair: tuple[str, str]) -> None:
    made = as_object(capsys, argv_for(pair, "eagle3", PROMPT))
    assert set(made) == {
        "text", "token_ids", "prompt_token_ids", "prompt_tokens", "new_tokens", "rounds",
        "mean_accepted_length",
        "acceptance_by_depth", "tokens_per_second", "seconds", "finish_reason", "settings",
    }  # fmt: skip
    assert {"draft", "verify", "commit", "total"} <= set(made["seconds"])
    assert made["prompt_tokens"] == len(PROMPT)
    assert made["new_tokens"] == len(made["token_ids"]) == 24
    assert made["mean_accepted_length"] == pytest.approx(23 / made["rounds"])
    assert made["finish_reason"] == "length"
    assert all(0 <= rate <= 1 for rate in made["acceptance_by_depth"])
    phases = sum(made["seconds"][name] for name in ("prefill", "draft", "verify", "commit"))
    assert 0 < phases <= made["seconds"]["total"]
    assert made["tokens_per_second"] == pytest.approx(
        23 / (made["seconds"]["total"] - made["seconds"]["prefill"])
    )


def test_json_says_what_was_understood(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str]
) -> None:
    more = ["--temperature", "0.7", "--top-p", "0.9", "--seed", "4"]
    settings = as_object(capsys, argv_for(pair, "eagle3", PROMPT, *more))["settings"]
    wanted = {
        "model": pair[0], "draft_model": pair[1], "proposer": "eagle3", "tree": "eagle2",
        "num_steps": 3, "topk": 3, "num_draft_nodes": 9, "verify": "rejection",
        "temperature": 0.7, "top_k": None, "top_p": 0.9, "min_p": None, "seed": 4,
    }  # fmt: skip
    assert {key: settings[key] for key in wanted} == wanted


def test_json_of_plain_decoding_names_no_tree(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str]
) -> None:
    made = as_object(capsys, argv_for(pair, "plain", PROMPT))
    assert made["settings"]["proposer"] is made["settings"]["tree"] is None
    assert "num_steps" not in made["settings"]
    assert made["mean_accepted_length"] == 1.0
    assert made["rounds"] == 23
    assert made["acceptance_by_depth"] == []


@pytest.mark.parametrize("temperature", ["0", "0.8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_mode_gives_the_same_text(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str], shape: str, temperature: str
) -> None:
    argv = argv_for(pair, shape, PROMPT, "--temperature", temperature, "--context", "200")
    streamed = Output(capsys, argv)
    whole = Output(capsys, [*argv, "--no-stream"])
    made = as_object(capsys, argv)
    assert streamed.out == whole.out == PROMPT + made["text"] + "\n"
    assert made["text"]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_the_plain_text(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str], shape: str
) -> None:
    made, plain = (as_object(capsys, argv_for(pair, name, PROMPT)) for name in (shape, "plain"))
    assert made["token_ids"] == plain["token_ids"]
    assert made["text"] == plain["text"]


@pytest.mark.parametrize("mode", [[], ["--no-stream"], ["--json"]], ids=str)
def test_the_report_is_on_stderr(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str], mode: list[str]
) -> None:
    output = Output(capsys, argv_for(pair, "eagle3", PROMPT, *mode))
    for name in ("new tokens", "tokens per second", "mean accepted length", "ms a round"):
        assert name in output.err
        assert name not in output.out
    assert re.search(r"prompt tokens +38 in", output.err)
    assert re.search(r"new tokens +24 in", output.err)


def test_stats_has_a_line_a_round(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str]
) -> None:
    argv = argv_for(pair, "ngram", PROMPT)
    output = Output(capsys, [*argv, "--stats"])
    rounds = [
        json.loads(line.partition(": ")[2].rstrip("]"))
        for line in output.err.splitlines()
        if line.startswith("[round")
    ]
    made = as_object(capsys, argv)
    assert len(rounds) == made["rounds"]
    assert all(done["accepted"] <= done["offered"] < done["nodes"] for done in rounds)
    assert output.out == PROMPT + made["text"] + "\n"


def test_stop_string_on_the_command_line(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str]
) -> None:
    argv = argv_for(pair, "eagle3", PROMPT)
    text = as_object(capsys, argv)["text"]
    stop = text[3:5]
    made = as_object(capsys, [*argv, "--stop", "no such text", "--stop", stop])
    assert made["text"] == text[: text.index(stop)]
    assert made["finish_reason"] == "stop"


# trees

NODE = re.compile(r"^([* ]) ((?:│  |   )*)(?:├─ |└─ )?(['\"].*['\"])(?:  (\d\.\d\d))?$")


def read_trees(stderr: str) -> list[tuple[list[tuple[bool, int, str, str | None]], str]]:
    """-> for every drawn tree its nodes (marked, depth, token, probability) and its last line."""
    trees = []
    for block in re.split(r"\[round \d+\]\n", stderr)[1:]:
        nodes: list[tuple[bool, int, str, str | None]] = []
        for line in block.splitlines():
            found = NODE.match(line)
            if not found:
                trees.append((nodes, line))
                break
            mark, lead, token, prob = found.groups()
            at = line.index(token)
            nodes.append((mark == "*", (at - 2) // 3, token, prob))
    return trees


class Oracle(Replay):
    """Proposes the text that it was told first, other tokens beside it."""

    told: list[int] = []

    @classmethod
    def from_setup(cls, setup: DraftSetup) -> "Oracle":
        return cls(cls.told)

    def expand(self, tree: DraftTree, node_F: Tensor, k: int) -> tuple[Tensor, Tensor]:
        right_F = [self.pick(self.length + depth + 1) for depth in tree.depth_N[node_F].tolist()]
        token_FK = torch.tensor([[(token + i) % 512 for i in range(k)] for token in right_F])
        return token_FK, -torch.arange(1.0, k + 1).expand(len(right_F), k)


@pytest.mark.parametrize("shape", [*SHAPES][:-1] + ["oracle"])
def test_show_tree(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[str, str],
    shape: str,
) -> None:
    """Each round's marked path and bonus are the tokens that were printed."""
    emitted: list[Emitted] = []
    original = Generation.__iter__

    def spy(self: Generation) -> Any:
        for one in original(self):
            emitted.append(one)
            yield one

    monkeypatch.setattr(Generation, "__iter__", spy)
    if shape == "oracle":
        text = as_object(capsys, argv_for(pair, "plain", PROMPT))["token_ids"]
        monkeypatch.setattr(Oracle, "told", [*PROMPT.encode(), *text])
        monkeypatch.setitem(sys.modules, "oracle", SimpleNamespace(Oracle=Oracle))
    argv = argv_for(pair, shape, PROMPT)
    made = as_object(capsys, argv)
    emitted.clear()
    output = Output(capsys, [*argv, "--show-tree"])
    trees = read_trees(output.err)
    rounds = [one for one in emitted if one.round is not None]
    assert len(trees) == len(rounds) == made["rounds"]
    spelled = [repr(token_text(token)) for token in made["token_ids"]]
    at = 1  # the prompt's own token is the first root
    for (nodes, last), one in zip(trees, rounds):
        assert one.round is not None
        assert len(nodes) == len(one.round.tree)
        marked = [(depth, token) for mark, depth, token, _ in nodes if mark]
        assert [depth for depth, _ in marked] == list(range(len(marked)))  # a path from the root
        path = [token for _, token in marked]
        assert path[0] == spelled[at - 1]
        count = re.match(r"^  accepted (\d+), then (['\"].*['\"])$", last)
        assert count is not None
        assert int(count[1]) == len(path) - 1
        told = [*path[1:], count[2]]
        assert told[: len(one.tokens)] == spelled[at : at + len(one.tokens)]
        assert [prob is None for _, _, _, prob in nodes] == [i == 0 for i in range(len(nodes))]
        at += len(one.tokens)
        if shape == "oracle" and at < len(spelled):
            assert len(path) == 4 < len(nodes)  # three steps, each right; others stand beside them
    assert at == len(spelled)


def token_text(token: int) -> str:
    """Of the byte tokenizer."""
    return bytes([token]).decode(errors="replace") if token < 256 else ""


# spellings

SPELLINGS: dict[str, tuple[list[str], str, object]] = {
    # spelling -> (the words typed, the setting, its value)
    **{flag: ([flag, "folder"], "model", "folder") for flag in ("--model", "--model-path")},
    **{
        flag: ([flag, "folder"], "draft_model", "folder")
        for flag in ("--draft-model", "--draft", "--speculative-draft-model-path")
    },
    **{flag: ([flag, "text"], "prompt", "text") for flag in ("-p", "--prompt")},
    **{
        flag: ([flag, "7"], "max_new_tokens", 7)
        for flag in ("--max-new-tokens", "--max-tokens", "-n")
    },
    **{flag: ([flag, "0.5"], "temperature", 0.5) for flag in ("--temperature", "--temp")},
    "--top-p": (["--top-p", "0.5"], "top_p", 0.5),
    "--top-k": (["--top-k", "5"], "top_k", 5),
    "--min-p": (["--min-p", "0.5"], "min_p", 0.5),
    "--seed": (["--seed", "5"], "seed", 5),
    **{
        flag: ([flag, "7"], "num_steps", 7)
        for flag in (
            "--num-steps",
            "--speculative-num-steps",
            "--num-speculative-tokens",
            "--num-draft-tokens",
            "--depth",
        )
    },
    **{flag: ([flag, "7"], "topk", 7) for flag in ("--topk", "--speculative-eagle-topk")},
    **{
        flag: ([flag, "7"], "num_draft_nodes", 7)
        for flag in ("--num-draft-nodes", "--speculative-num-draft-tokens", "--total-token")
    },
    "--verify": (["--verify", "greedy"], "verify", "greedy"),
    "--no-stream": (["--no-stream"], "no_stream", True),
    "--stats": (["--stats"], "stats", True),
    "--json": (["--json"], "json", True),
    "--no-draft": (["--no-draft"], "no_draft", True),
    "--show-tree": (["--show-tree"], "show_tree", True),
    "--ignore-eos": (["--ignore-eos"], "ignore_eos", True),
    "--chat": (["--chat"], "chat", True),
    "--system": (["--system", "text"], "system", "text"),
    "--thinking": (["--thinking"], "thinking", True),
    "--no-thinking": (["--no-thinking"], "thinking", False),
    "--special-tokens": (["--special-tokens"], "special_tokens", True),
    "--static-tree": (["--static-tree", "[0]"], "static_tree", "[0]"),
    "--prompt-file": (["--prompt-file", "a_b.txt"], "prompt_file", "a_b.txt"),
}


def parse(argv: list[str]) -> dict[str, object]:
    return vars(make_parser().parse_args(with_dashes(argv)))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spelling(spelling: str) -> None:
    """Sets that setting and no other, with dashes or underscores, with a space or `=`."""
    typed, setting, value = SPELLINGS[spelling]
    wanted = parse([]) | {setting: value}
    assert parse(typed) == wanted
    flag, *rest = typed
    underscored = "--" + flag[2:].replace("-", "_") if flag.startswith("--") else flag
    assert parse([underscored, *rest]) == wanted
    if rest and flag.startswith("--"):
        assert parse([f"{underscored}={rest[0]}"]) == wanted


@pytest.mark.parametrize(
    ("argv", "renamed"),
    [
        (["--max_new_tokens", "5"], ["--max-new-tokens", "5"]),
        (["--prompt_file=a_b"], ["--prompt-file=a_b"]),
        (["--prompt", "snake_case"], ["--prompt", "snake_case"]),
        (["snake_case"], ["snake_case"]),
        (["-n", "5"], ["-n", "5"]),
        (["--top_k", "5", "--", "--not_a_flag"], ["--top-k", "5", "--", "--not_a_flag"]),
    ],
    ids=str,
)
def test_underscores(argv: list[str], renamed: list[str]) -> None:
    assert with_dashes(argv) == renamed


def test_depth_and_nodes_are_two_things() -> None:
    """`num draft tokens` is the depth in mlx-lm, and nodes with the root in SGLang."""
    args = make_parser().parse_args(
        ["--num-draft-tokens", "3", "--speculative-num-draft-tokens", "9"]
    )
    config = engine_config(args)
    assert config.tree_config == TreeConfig(num_steps=3, num_draft_nodes=9)


def test_sampling_and_tree_top_k_are_two_things() -> None:
    args = make_parser().parse_args(["--top-k", "40", "--topk", "2", "--temperature", "1"])
    assert sampling_params(args).top_k == 40
    assert engine_config(args).tree_config.topk == 2


def test_what_is_not_given_is_the_default() -> None:
    config = engine_config(make_parser().parse_args([]))
    assert config.tree_config == TreeConfig()
    assert (config.proposer, config.tree) == ("eagle3", "eagle2")
    assert config.model.endswith("demo/target") and str(config.draft_model).endswith("demo/head")


def test_help_tells_every_flag_and_the_true_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for spelling in SPELLINGS:
        assert spelling in shown
    for field in fields(TreeConfig):
        if isinstance(field.default, int):
            assert f"default {field.default}" in shown


# prompts


def test_prompt_from_everywhere(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[str, str],
    tmp_path: Path,
) -> None:
    text = "Zwölf Boxkämpfer\r\njagen 漢字\n"
    (tmp_path / "prompt.txt").write_bytes(text.encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    made = [
        as_object(capsys, argv_for(pair, "plain", *more))
        for more in (
            [text],
            ["--prompt", text],
            ["--prompt-file", str(tmp_path / "prompt.txt")],
            ["--prompt-file", "-"],
        )
    ]
    assert [one["prompt_tokens"] for one in made] == [len(text.encode())] * 4
    assert len({one["text"] for one in made}) == 1


def test_a_prompt_that_begins_with_a_dash(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str]
) -> None:
    made = [
        as_object(capsys, argv_for(pair, "plain", "--json", *more))
        for more in (["--prompt=--a_b"], ["-p", "-- a_b"])
    ]
    assert [one["prompt_tokens"] for one in made] == [5, 6]
    output = Output(capsys, argv_for(pair, "plain", "--no-stream", "--", "--a_b"))
    assert output.out.startswith("--a_b")


def test_in_a_process_of_its_own(pair: tuple[str, str]) -> None:
    """Stdin in, text out, report beside it; no warning of any library."""
    argv = argv_for(pair, "eagle3", "--prompt_file", "-", "--threads", "1", "--max_new_tokens", "5")
    done = subprocess.run(
        [sys.executable, "-m", "minispec.generate", *argv],
        cwd=Path(__file__).resolve().parents[1],
        input="Grüße".encode(),
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Grüße".encode()) and done.stdout.endswith(b"\n")
    *notes, table = done.stderr.decode().split("\n\n")
    assert [line[:10] for line in "".join(notes).splitlines()] == ["[drafter: "] * 3
    lines = table.strip().splitlines()
    assert len(lines) == 7 and all(line.startswith("  ") or "prompt" in line for line in lines)


# other people's classes

THIRD_PARTY = '''
"""A rule, a tree and a proposer that minispec has never heard of."""
import torch
from minispec.verify import Accepted

CALLS = []

class FirstOnly:
    """Accepts at most one draft: lossless at temperature 0, whatever the tree."""
    name = "first-only"
    lossless = True
    greedy_only = True

    def accept(self, tree, prob_NV, rng):
        CALLS.append("accept")
        best = prob_NV.argmax(-1).tolist()
        for child in tree.children()[0]:
            if int(tree.token_N[child]) == best[0]:
                return Accepted([0, child], best[child])
        return Accepted([0], best[0])

class Fan:
    """The root's children and no more."""
    uses = ("topk",)

    def __init__(self, config):
        self.topk = config.topk

    def max_nodes(self):
        return 1 + self.topk

    def max_drafted(self):
        return 0

    def build(self, proposer, tree, max_depth):
        CALLS.append("build")
        if max_depth < 1:
            return tree
        root = torch.zeros(1, dtype=torch.int64)
        return tree.grow(root, *proposer.expand(tree, root, self.topk))[0]

class Alphabet:
    """Proposes the first ids, always."""
    needs_draft_model = False

    @classmethod
    def from_setup(cls, setup):
        made = cls()
        made.vocab_size = setup.target.vocab_size
        return made

    def reset(self):
        CALLS.append("reset")

    def commit(self, token_T, taps_TD, anchor):
        CALLS.append("commit")

    def expand(self, tree, node_F, k):
        CALLS.append("expand")
        token_FK = torch.arange(k).expand(len(node_F), k)
        return token_FK, torch.full((len(node_F), k), -1.0)
'''


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    (tmp_path / "theirs.py").write_text(THIRD_PARTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "theirs"
    sys.modules.pop("theirs", None)


@pytest.mark.parametrize(
    ("more", "called"),
    [
        (["--verify", "theirs:FirstOnly"], {"accept"}),
        (["--tree", "theirs:Fan", "--topk", "5"], {"build"}),
        (["--proposer", "theirs:Alphabet"], {"reset", "commit", "expand"}),
        (
            ["--verify", "theirs:FirstOnly", "--tree", "theirs:Fan"]
            + ["--proposer", "theirs:Alphabet"],
            {"accept", "build", "reset", "commit", "expand"},
        ),
    ],
    ids=["rule", "tree", "proposer", "all three"],
)
def test_third_party_class(
    capsys: pytest.CaptureFixture[str],
    pair: tuple[str, str],
    theirs: str,
    more: list[str],
    called: set[str],
) -> None:
    plain = as_object(capsys, argv_for(pair, "plain", PROMPT))
    draft = [] if "theirs:Alphabet" in more else ["--draft-model", pair[1]]
    made = as_object(capsys, ["--model", pair[0], *draft, "-n", "24", PROMPT, *more])
    assert made["token_ids"] == plain["token_ids"]
    assert set(sys.modules[theirs].CALLS) == called
    if "--verify" in more:
        assert made["settings"]["verify"] == "first-only"


def test_third_party_tree_refuses_settings_that_it_does_not_use(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str], theirs: str
) -> None:
    argv = ["--model", pair[0], "--draft-model", pair[1], "--tree", "theirs:Fan"]
    assert main([*argv, "--num-steps", "3"]) == 2
    assert "theirs:Fan does not use it; it uses --topk" in capsys.readouterr().err


def test_third_party_greedy_rule_is_refused_above_zero(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str], theirs: str
) -> None:
    argv = argv_for(pair, "eagle3", "--verify", "theirs:FirstOnly", "--temperature", "1")
    assert main(argv) == 2
    assert "--verify theirs:FirstOnly" in capsys.readouterr().err
