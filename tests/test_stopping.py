"""What ends a text, inside an accepted run as well as between two; and what the seed decides."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from toys import Replay, write_pair

from minispec.config import EngineConfig
from minispec.drafting import TreeConfig
from minispec.engine import Engine, Generation, GenerationParams, eos_token_ids, pick_rule
from minispec.sampling import SamplingParams
from minispec.stats import Report, RoundStats
from minispec.tree import DraftTree

PROMPT = "Hello, how are you?"
STEPS = 4  # drafts a round, so that a round of replayed text emits 5
LONG = 40  # tokens of plain text that the tests cut


class Exact(Replay):
    """Proposes the text first, for a vocabulary of 512."""

    def expand(self, tree: DraftTree, node_F: Tensor, k: int) -> tuple[Tensor, Tensor]:
        right_F = [self.pick(self.length + depth + 1) for depth in tree.depth_N[node_F].tolist()]
        token_FK = torch.tensor([[(token + i) % 512 for i in range(k)] for token in right_F])
        return token_FK, -torch.arange(1.0, k + 1).expand(len(right_F), k)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"), seed=3)


@pytest.fixture(scope="module")
def engine(folders: tuple[Path, Path]) -> Engine:
    """The whole pair, its chain of 4 drafted by the head; tests may replace the proposer."""
    target, head = folders
    made = Engine(
        EngineConfig(str(target), str(head), "eagle3", "chain", TreeConfig(num_steps=STEPS))
    )
    assert made.eos_token_ids == (2,)
    made.eos_token_ids = ()
    return made


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[int]:
    """The first tokens of the greedy text."""
    tokens = finish(engine, speculate=False, max_new_tokens=LONG).token_ids
    assert len(set(tokens[:12])) > 6, "a text that repeats itself would test little"
    return tokens


def finish(
    engine: Engine,
    *,
    speculate: bool,
    prompt: str = PROMPT,
    sampling: SamplingParams | None = None,
    **params: object,
) -> Generation:
    """Generate to the end."""
    sampling = sampling or SamplingParams()
    generation = engine.generate(
        engine.encode(prompt),
        sampling,
        GenerationParams(**params),  # type: ignore[arg-type]
        pick_rule(None, sampling),
        speculate=speculate,
    )
    pieces = [emitted.text for emitted in generation]
    assert "".join(pieces) == generation.text
    return generation


def replaying(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, text: list[int], prompt: str = PROMPT
) -> None:
    """Let the engine draft its own greedy text, so that whole runs are accepted."""
    monkeypatch.setattr(engine, "proposer", Exact(engine.encode(prompt) + text))


def check_both(engine: Engine, **params: object) -> Generation:
    """Drafted text, ids and reason must be those of plain decoding; returns the drafted."""
    drafted = finish(engine, speculate=True, **params)  # type: ignore[arg-type]
    alone = finish(engine, speculate=False, **params)  # type: ignore[arg-type]
    assert drafted.token_ids == alone.token_ids
    assert drafted.text == alone.text
    assert drafted.finish_reason == alone.finish_reason
    assert drafted.report.new_tokens == alone.report.new_tokens == len(drafted.token_ids)
    return drafted


def plain_text(engine: Engine, tokens: list[int]) -> str:
    return b"".join(map(engine.tokenizer.token_bytes, tokens)).decode(errors="replace")


# end-of-text ids


def first_seen(tokens: list[int]) -> list[int]:
    """Positions at which a token stands for the first time."""
    return [at for at, token in enumerate(tokens) if token not in tokens[:at]]


@pytest.mark.parametrize("depth", range(2 * STEPS + 3))
def test_eos_inside_an_accepted_run(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, plain: list[int], depth: int
) -> None:
    """Every place in two whole rounds: the token of the prompt, each draft, each bonus."""
    # start the text `back` tokens earlier, so that a token at this depth is new in it
    at = next(at for at in first_seen(plain) if at >= depth)
    prompt_ids = engine.encode(PROMPT) + plain[: at - depth]
    monkeypatch.setattr(engine, "proposer", Exact(prompt_ids + plain[at - depth :]))
    monkeypatch.setattr(engine, "eos_token_ids", (plain[at],))
    rule = pick_rule(None, SamplingParams())
    params = GenerationParams(max_new_tokens=30)
    for speculate in (True, False):
        generation = engine.generate(prompt_ids, SamplingParams(), params, rule, speculate)
        rounds = [emitted.tokens for emitted in generation]
        assert generation.token_ids == plain[at - depth : at + 1]
        assert generation.finish_reason == "stop"
        assert generation.report.new_tokens == depth + 1
        assert sum(rounds, []) == generation.token_ids
        assert generation.text == plain_text(engine, generation.token_ids[:-1])
        assert len(generation.report.rounds) == (-(-depth // (STEPS + 1)) if speculate else depth)


def test_several_eos_ids(monkeypatch: pytest.MonkeyPatch, engine: Engine, plain: list[int]) -> None:
    replaying(monkeypatch, engine, plain)
    early, late = first_seen(plain)[3], first_seen(plain)[6]
    monkeypatch.setattr(engine, "eos_token_ids", (511, plain[late], plain[early]))
    assert check_both(engine, max_new_tokens=30).token_ids == plain[: early + 1]


def test_ignore_eos(monkeypatch: pytest.MonkeyPatch, engine: Engine, plain: list[int]) -> None:
    replaying(monkeypatch, engine, plain)
    monkeypatch.setattr(engine, "eos_token_ids", (plain[2],))
    generation = check_both(engine, max_new_tokens=20, ignore_eos=True)
    assert generation.token_ids == plain[:20]
    assert generation.finish_reason == "length"


def test_the_last_token_allowed_may_be_the_eos(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, plain: list[int]
) -> None:
    replaying(monkeypatch, engine, plain)
    at = first_seen(plain)[5]
    monkeypatch.setattr(engine, "eos_token_ids", (plain[at],))
    assert check_both(engine, max_new_tokens=at + 1).finish_reason == "stop"


@pytest.mark.parametrize(
    ("config", "wanted"),
    [(None, (2,)), ({}, (2,)), ({"eos_token_id": 7}, (7,)), ({"eos_token_id": [7, 9]}, (7, 9))],
    ids=str,
)
def test_eos_ids_come_from_generation_config(
    tmp_path: Path, config: dict[str, object] | None, wanted: tuple[int, ...]
) -> None:
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert eos_token_ids(str(tmp_path), (2,), 512) == wanted


# lengths


@pytest.mark.parametrize("replay", [False, True], ids=["head", "replay"])
@pytest.mark.parametrize("count", range(1, 13))
def test_max_new_tokens(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, plain: list[int], count: int, replay: bool
) -> None:
    if replay:
        replaying(monkeypatch, engine, plain)
    generation = check_both(engine, max_new_tokens=count)
    assert generation.token_ids == plain[:count]
    assert generation.finish_reason == "length"


CONTEXT = 40


@pytest.fixture(scope="module")
def narrow(folders: tuple[Path, Path]) -> Engine:
    """A context of 40 positions, with trees that keep all their nodes."""
    shape = TreeConfig(num_steps=STEPS, topk=3, num_draft_nodes=31)
    target, head = map(str, folders)
    made = Engine(EngineConfig(target, head, "eagle3", "eagle2", shape, context=CONTEXT))
    made.eos_token_ids = ()
    return made


@pytest.mark.parametrize("replay", [False, True], ids=["head", "replay"])
@pytest.mark.parametrize("length", [1, 2, 20, CONTEXT - 7, *range(CONTEXT - 4, CONTEXT)])
def test_context_limit(
    monkeypatch: pytest.MonkeyPatch, narrow: Engine, length: int, replay: bool
) -> None:
    prompt = ("abcdefgh" * 5)[:length]
    if replay:
        tokens = finish(narrow, speculate=False, prompt=prompt).token_ids
        replaying(monkeypatch, narrow, tokens, prompt)
    generation = check_both(narrow, prompt=prompt)
    assert length + len(generation.token_ids) == CONTEXT
    assert generation.finish_reason == "context"


def test_the_tree_shrinks_towards_the_limit(narrow: Engine) -> None:
    """No node stands where no token can be emitted."""
    prompt = narrow.encode("abcdefgh" * 4)
    params, rule = GenerationParams(), pick_rule(None, SamplingParams())
    generation = narrow.generate(prompt, SamplingParams(), params, rule)
    room = CONTEXT - len(prompt)
    for emitted in generation:
        if emitted.round is not None:
            assert int(emitted.round.tree.depth_N.max()) == min(STEPS, room - 1)
        room -= len(emitted.tokens)
    assert room == 0


@pytest.mark.parametrize("less", [-1, 0, 1])
def test_max_new_tokens_beside_the_room_left(narrow: Engine, less: int) -> None:
    """Exactly as many as fit is a matter of the flag, not of the context."""
    room = CONTEXT - 30
    generation = check_both(narrow, prompt="x" * 30, max_new_tokens=room - less)
    assert len(generation.token_ids) == min(room, room - less)
    assert generation.finish_reason == ("context" if less < 0 else "length")


# stop strings


LETTERS = "abcabdabcdefghijxyzxyzklmnop"


@pytest.fixture
def spelling(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, plain: list[int]
) -> Callable[[str], None]:
    """Make the greedy text read as wanted, by giving its tokens other bytes."""

    def spell(text: str) -> None:
        # token t of the plain text stands for letter t: the stream is told by its place
        letters = iter(text)

        class Spelling:
            vocab_size = engine.tokenizer.vocab_size

            def encode(self, text: str) -> list[int]:
                return engine.tokenizer.encode(text)

            def token_bytes(self, token: int) -> bytes:
                return next(letters).encode()

        tokenizer = Spelling()
        made = Generation.__init__

        def restart(self: Generation, *args: object) -> None:
            nonlocal letters
            letters = iter(text)
            made(self, *args)  # type: ignore[arg-type]
            self.stream.tokenizer = tokenizer

        monkeypatch.setattr(Generation, "__init__", restart)

    return spell


STOPS: list[tuple[tuple[str, ...], str, int]] = [
    # stop strings, the text before the stop, tokens up to the one that completes it
    (("bd",), "abca", 6),  # within a run of drafts
    (("dab",), "abcab", 8),  # across two rounds
    (("a",), "", 1),  # the token that the prompt gave
    (("abd", "abdabc"), "abc", 6),  # one is the other's beginning
    (("abcd", "bcde"), "abcabd", 10),  # overlapping
    (("cdefg", "def"), "abcabdabc", 12),  # the one that begins later is complete first
    (("cd", "bcd"), "abcabda", 10),  # complete together: the longer goes
    (("xyzk",), "abcabdabcdefghijxyz", 23),  # a beginning that comes twice
    (("zz", "ghij"), "abcabdabcdef", 16),
]


@pytest.mark.parametrize("replay", [False, True], ids=["head", "replay"])
@pytest.mark.parametrize(("stop", "text", "count"), STOPS, ids=[str(stop) for stop, *_ in STOPS])
def test_stop_strings(
    monkeypatch: pytest.MonkeyPatch,
    engine: Engine,
    plain: list[int],
    spelling: Callable[[str], None],
    replay: bool,
    stop: tuple[str, ...],
    text: str,
    count: int,
) -> None:
    spelling(LETTERS)
    if replay:
        replaying(monkeypatch, engine, plain)
    generation = check_both(engine, stop=stop, max_new_tokens=len(LETTERS))
    assert generation.text == text
    assert generation.token_ids == plain[:count]
    assert generation.finish_reason == "stop"


@pytest.mark.parametrize("count", range(1, 11))
def test_a_stop_string_that_is_never_complete(
    monkeypatch: pytest.MonkeyPatch,
    engine: Engine,
    plain: list[int],
    spelling: Callable[[str], None],
    count: int,
) -> None:
    """What was held back, in case the string went on, is part of the text at the end."""
    spelling(LETTERS)
    replaying(monkeypatch, engine, plain)
    generation = check_both(engine, stop=("abdabcdX", "cX"), max_new_tokens=count)
    assert generation.text == LETTERS[:count]
    assert generation.finish_reason == "length"


def test_held_back_text_comes_out_before_an_eos(
    monkeypatch: pytest.MonkeyPatch,
    engine: Engine,
    plain: list[int],
    spelling: Callable[[str], None],
) -> None:
    spelling(LETTERS)
    replaying(monkeypatch, engine, plain)
    at = next(at for at in first_seen(plain) if at >= 5)
    monkeypatch.setattr(engine, "eos_token_ids", (plain[at],))
    generation = check_both(engine, stop=(LETTERS[: at + 3],), max_new_tokens=20)
    assert generation.text == LETTERS[:at]
    assert generation.finish_reason == "stop"


# the report


def test_accepted_length_is_counted_after_the_cut(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, plain: list[int]
) -> None:
    replaying(monkeypatch, engine, plain)
    at = next(at for at in first_seen(plain) if at >= 7)  # not the last of a round
    monkeypatch.setattr(engine, "eos_token_ids", (plain[at],))
    report = finish(engine, speculate=True, max_new_tokens=30).report
    whole, rest = divmod(at, STEPS + 1)
    assert rest > 0
    assert report.emitted == [STEPS + 1] * whole + [rest]
    assert report.mean_accepted_length == at / (whole + 1)
    assert report.new_tokens == at + 1
    assert report.prompt_tokens == len(engine.encode(PROMPT))


def test_plain_decoding_has_accepted_length_one(engine: Engine) -> None:
    report = finish(engine, speculate=False, max_new_tokens=6).report
    assert report.emitted == [1] * 5
    assert report.mean_accepted_length == 1.0
    assert report.acceptance_by_depth == []


def stats(accepted: int, offered: int) -> RoundStats:
    return RoundStats(8, accepted, offered, 0.1, 0.2, 0.3)


@pytest.mark.parametrize(
    ("rounds", "rates"),
    [
        ([], []),
        ([stats(0, 0)], []),
        ([stats(0, 1)], [0.0]),
        ([stats(2, 2)], [1.0, 1.0]),  # all of a tree of two levels: no third was offered
        ([stats(2, 3)], [1.0, 1.0, 0.0]),
        # depth 1: all four offered, three accept; depth 2: three get there, two are offered
        # more, one accepts; depth 3: one gets there and refuses
        ([stats(0, 1), stats(1, 1), stats(1, 2), stats(2, 3)], [0.75, 0.5, 0.0]),
        ([stats(0, 0), stats(1, 1)], [1.0]),  # a round without drafts says nothing
    ],
)
def test_acceptance_by_depth(rounds: list[RoundStats], rates: list[float]) -> None:
    report = Report()
    for done in rounds:
        report.add(done, done.accepted + 1)
    assert report.acceptance_by_depth == rates


def test_a_report_without_rounds_is_a_table_too() -> None:
    report = Report(prompt_tokens=3, new_tokens=1)
    assert report.mean_accepted_length is None
    assert report.tokens_per_second is None
    assert "new tokens            1 in" in report.table()


def test_offered_counts_depths_that_were_tried(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, plain: list[int]
) -> None:
    """Replayed text: a whole round offers and accepts 4, the last what there is room for."""
    replaying(monkeypatch, engine, plain)
    rounds = finish(engine, speculate=True, max_new_tokens=9).report.rounds
    assert [(done.offered, done.accepted, done.nodes) for done in rounds] == [(4, 4, 5), (2, 2, 3)]


# seeds


WARM = 1.0


@pytest.mark.parametrize("speculate", [False, True], ids=["plain", "drafted"])
def test_the_seed_decides_the_text(engine: Engine, speculate: bool) -> None:
    texts = [
        finish(
            engine,
            speculate=speculate,
            sampling=SamplingParams(WARM, seed=seed),
            max_new_tokens=16,
        ).token_ids
        for seed in (1, 1, 2, 3)
    ]
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts}) == 3


@pytest.mark.parametrize("speculate", [False, True], ids=["plain", "drafted"])
def test_what_ran_before_changes_nothing(
    folders: tuple[Path, Path], engine: Engine, speculate: bool
) -> None:
    sampling = SamplingParams(WARM, seed=5)
    target, head = map(str, folders)
    fresh = Engine(EngineConfig(target, head, "eagle3", "chain", TreeConfig(num_steps=STEPS)))
    fresh.eos_token_ids = ()
    alone = finish(fresh, speculate=speculate, sampling=sampling, max_new_tokens=16)
    finish(engine, speculate=True, prompt="Another one", sampling=sampling, max_new_tokens=23)
    finish(engine, speculate=False, prompt="A third", max_new_tokens=5)
    after = finish(engine, speculate=speculate, sampling=sampling, max_new_tokens=16)
    assert after.token_ids == alone.token_ids


def test_a_generation_that_is_dropped_leaves_no_trace(engine: Engine, plain: list[int]) -> None:
    params, rule = GenerationParams(), pick_rule(None, SamplingParams())
    started = iter(engine.generate([9, 8, 7], SamplingParams(), params, rule))
    for _ in range(3):
        next(started)
    assert check_both(engine, max_new_tokens=12).token_ids == plain[:12]
