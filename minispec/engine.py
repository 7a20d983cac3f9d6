"""The engine: loads a pair, runs rounds until something ends the text, streams what is certain.

Everything about stopping lives here: end-of-text ids, stop strings, the token limit, the end of
the context. Knows no rule and no tree shape beyond their seams.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .chat import PromptForm, turn_ends
from .config import EngineConfig, load, pick_device, pick_dtypes
from .drafting import BUILDERS, PROPOSERS, Builder, DraftSetup, Proposer
from .kv import RowCache
from .models.config import need_eos
from .models.interface import UserError
from .models.weights import load_target, read_json
from .round import Decoder, Round
from .sampling import SamplingParams
from .stats import Clock, Report
from .tokenizer import RESERVED, TextStream, Tokenizer, load_tokenizer
from .verify import RULES, Rule


@dataclass(frozen=True)
class GenerationParams:
    """When a text ends. None for `max_new_tokens` means as far as the context goes.

    `chat` ends it where a chat turn ends, too. A stop string that is the name of a special token
    stands for that token as well, which would show no text to find.
    """

    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    chat: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise UserError(f"--max-new-tokens {self.max_new_tokens}: must be at least 1")
        if "" in self.stop:
            raise UserError("--stop '': an empty stop string would end every text at once")


@dataclass(frozen=True)
class Emitted:
    """What one round added: tokens after the cut, text that is certain now, the round itself."""

    tokens: list[int]
    text: str
    round: Round | None  # None for the token that the prompt gave


class Generation:
    """A text in the making: iterate over it to make it, then read what it became.

    `finish_reason` is None until the end, then "stop" (an end-of-text id or a stop string),
    "length" (max_new_tokens) or "context" (the model has no more positions). `token_ids` ends
    with the token that completed the stop; `text` ends before it.
    """

    def __init__(
        self, engine: "Engine", decoder: Decoder, prompt: list[int], params: GenerationParams
    ) -> None:
        self.engine = engine
        self.decoder = decoder
        self.prompt = prompt
        self.params = params
        self.limit = engine.context - len(prompt)
        self.limit_reason = "context"
        if params.max_new_tokens is not None and params.max_new_tokens <= self.limit:
            self.limit, self.limit_reason = params.max_new_tokens, "length"
        eos = engine.eos_token_ids + (turn_ends(engine.tokenizer) if params.chat else ())
        special = engine.tokenizer.special
        named = tuple(special[stop] for stop in params.stop if stop in special)
        self.eos = named if params.ignore_eos else eos + named
        self.stream = TextStream(engine.tokenizer, params.stop)
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.report = Report(prompt_tokens=len(prompt))

    def __iter__(self) -> Iterator[Emitted]:
        report, clock = self.report, Clock(self.engine.device)
        anchor = self.decoder.prefill(self.prompt)
        report.prefill_seconds = report.total_seconds = clock.lap()
        yield self._emit([anchor.token], None)
        while self.finish_reason is None:
            clock.lap()
            # a round emits its depth plus the bonus: near the end the tree shrinks
            room = self.limit - len(self.token_ids)
            done = self.decoder.round(anchor, max_depth=room - 1)
            anchor = done.anchor
            emitted = self._emit(done.tokens, done)
            report.add(done.stats, len(emitted.tokens))
            report.total_seconds += clock.lap()
            yield emitted

    def _emit(self, tokens: list[int], done: Round | None) -> Emitted:
        """Take tokens up to the first that ends the text."""
        kept: list[int] = []
        text = ""
        for token in tokens:
            kept.append(token)
            self.token_ids.append(token)
            if token in self.eos:
                self.finish_reason = "stop"
            else:
                text += self.stream.push(token)
                if self.stream.stopped:
                    self.finish_reason = "stop"
                elif len(self.token_ids) == self.limit:
                    self.finish_reason = self.limit_reason
            if self.finish_reason is not None:
                text += self.stream.finish()
                break
        self.report.new_tokens += len(kept)
        self.text += text
        return Emitted(kept, text, done)


class Engine:
    """A target, its tokenizer, its cache and, unless plain, a drafter.

    `note` is called with one line for each thing that loading found out.
    """

    def __init__(
        self, config: EngineConfig, note: Callable[[str], None] = lambda line: None
    ) -> None:
        self.device = pick_device(config.device)
        dense, expert = pick_dtypes(config.dtype, self.device)
        self.builder: Builder | None = None
        self.proposer: Proposer | None = None
        if config.proposer is not None:  # names and shapes first: a typing error costs no loading
            proposer_class = load("--proposer", config.proposer, PROPOSERS)
            self.builder = load("--tree", config.tree, BUILDERS)(config.tree_config)
            # a proposer may offer to check its files: a wrong head costs no loading either
            check = getattr(proposer_class, "check_draft_model", None)
            if check is not None:
                check(config.model, config.draft_model, config.aux_layers)
        self.target = load_target(config.model, self.device, dense, expert, config.context)
        self.context = config.context or self.target.max_positions
        self.tokenizer = load_tokenizer(config.model, self.target.vocab_size)
        raw = read_json(Path(config.model) / "config.json")
        self.model_type = str(raw.get("model_type"))
        check_special_ids(config.model, raw, self.target.config.eos_token_id, self.tokenizer)
        self.eos_token_ids = eos_token_ids(
            config.model, self.target.config.eos_token_id, self.tokenizer.vocab_size
        )
        spare = self.target.vocab_size - self.tokenizer.vocab_size
        if spare:
            note(f"the tokenizer names all but the last {spare} ids, which are never chosen")
        nodes = 1
        if self.builder is not None:
            nodes = self.builder.max_nodes()
            window = self.builder.max_drafted()
            setup = DraftSetup(
                self.target, config.draft_model, self.device, dense, self.context, window,
                config.aux_layers, note,
            )  # fmt: skip
            self.proposer = proposer_class.from_setup(setup)
        self.cache = RowCache(
            self.target.num_layers,
            self.context + nodes,
            self.target.cache_width,
            dense,
            self.device,
        )

    def encode(self, prompt: str, form: PromptForm | None = None) -> list[int]:
        """Prompt text, plain or in a form -> ids.

        Raises UserError if it is empty, leaves no room for a token or asks for what the model or
        its tokenizer lacks.
        """
        ids = (form or PromptForm()).ids(prompt, self.tokenizer, self.model_type)
        if not ids:
            raise UserError("--prompt: the prompt is empty; give at least one token of text")
        if len(ids) >= self.context:
            raise UserError(
                f"--prompt: the prompt has {len(ids)} tokens; the context has {self.context}, one "
                "of which must be free; shorten the prompt or raise --context"
            )
        return ids

    def generate(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        params: GenerationParams,
        rule: Rule,
        speculate: bool = True,
    ) -> Generation:
        """Start a text; nothing runs until it is iterated. One at a time: the cache is shared.

        `speculate=False` decodes plainly with the same weights, for comparisons.
        """
        proposer = self.proposer if speculate else None
        vocab_size = self.tokenizer.vocab_size
        decoder = Decoder(
            self.target, self.cache, proposer, self.builder, rule, sampling, vocab_size
        )
        return Generation(self, decoder, prompt, params)


def eos_token_ids(folder: str, from_config: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """generation_config.json has the last word on what ends a text, config.json the first."""
    path = Path(folder) / "generation_config.json"
    ids = read_json(path).get("eos_token_id") if path.is_file() else None
    return from_config if ids is None else need_eos(ids, vocab_size, str(path))


def check_special_ids(
    folder: str, raw: dict[str, Any], eos: tuple[int, ...], tokenizer: Tokenizer
) -> None:
    """Raise UserError where config.json and the tokenizer cannot be of one checkpoint."""
    reserved = {token for name, token in tokenizer.special.items() if name.startswith(RESERVED)}
    wrong = [("eos_token_id", token) for token in eos
             if token >= tokenizer.vocab_size or token in reserved]  # fmt: skip
    placeholder = raw.get("media_placeholder_token_id")
    if placeholder is not None and placeholder != tokenizer.special.get("<|media_pad|>"):
        wrong.append(("media_placeholder_token_id", placeholder))
    for key, token in wrong:
        raise UserError(
            f"{folder}: key '{key}' of config.json is {token!r}, which is another token or none in "
            f"the tokenizer's {tokenizer.vocab_size} ids; put in the tokenizer of this checkpoint"
        )


def pick_rule(name: str | None, sampling: SamplingParams) -> Rule:
    """The rule asked for, or the default: greedy at temperature 0, rejection above."""
    rule = load("--verify", name or ("greedy" if sampling.greedy else "rejection"), RULES)()
    if rule.greedy_only and not sampling.greedy:
        raise UserError(
            f"--verify {name}: holds at --temperature 0 only, which is {sampling.temperature}; "
            "use --verify rejection"
        )
    return rule
