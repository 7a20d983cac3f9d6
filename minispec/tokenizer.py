"""Text to ids and back: sentencepiece (the demo) or Kimi's own tiktoken ranks.

Every id has bytes, so text is put together byte by byte and half a UTF-8 character is never
shown. Knows no chat template (chat.py does), and no code of a checkpoint runs. Follows the public
description of Kimi-K2's tokenizer: its pattern, its special slots, its cuts of long text.
"""

import base64
import codecs
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import sentencepiece
import tiktoken

from .models.interface import UserError
from .models.weights import read_json

# Kimi-K2's pre-tokeniser, alternatives in order: Han runs; words with an optional leading sign
# and an English contraction (two forms, by case); up to three digits; signs; line ends; spaces.
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
KIMI_PIECE = 400_000  # Kimi's own encode() cuts a text here before its pattern sees it,
KIMI_RUN = 25_000  # and runs of spaces, or of anything else, here
KIMI_SPECIAL_SLOTS = 256
# What stands in the special slots of Kimi-K2.5, counted from the first
KIMI_NAMES = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>",
    6: "<|start_header_id|>", 7: "<|end_header_id|>", 9: "[EOT]", 10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>", 12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>", 14: "<|tool_call_argument_begin|>", 15: "<|tool_call_end|>",
    17: "<|im_middle|>", 18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>",
    21: "<|media_pad|>", 22: "<think>", 23: "</think>", 254: "[UNK]", 255: "[PAD]",
}  # fmt: skip
RESERVED = "<|reserved_token_"
# Special, yet part of what a reader wants to see: where thinking ends and a tool call begins.
SHOWN = {"<think>", "</think>", *(KIMI_NAMES[slot] for slot in range(11, 16))}


class Tokenizer(Protocol):
    """Ids run from 0 to vocab_size - 1; `special` are those that control the model, by name."""

    vocab_size: int
    special: dict[str, int]

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Text to ids; nothing is put in front.

        The name of a special token in the text is text like any other, unless `special`.
        """

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the text; b"" for control tokens."""


class SentencePieceTokenizer:
    """A sentencepiece model with byte fallback."""

    def __init__(self, path: Path) -> None:
        try:
            self.model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise UserError(f"{path}: not a sentencepiece model ({error})") from None
        self.vocab_size = self.model.vocab_size()
        self.special: dict[str, int] = {}

    def encode(self, text: str, special: bool = False) -> list[int]:
        return self.model.encode(text)

    def token_bytes(self, token: int) -> bytes:
        if token >= self.vocab_size or self.model.is_control(token):
            return b""
        piece = self.model.id_to_piece(token)
        if self.model.is_byte(token):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()


class KimiTokenizer:
    """tiktoken.model: base ranks, then 256 special slots.

    Their names are those of tokenizer_config.json, if it lies beside and names any.
    """

    def __init__(self, path: Path) -> None:
        ranks = read_ranks(path)
        self.base_size = len(ranks)
        self.vocab_size = self.base_size + KIMI_SPECIAL_SLOTS
        names = read_names(path.with_name("tokenizer_config.json"), self.base_size)
        slots = range(self.base_size, self.vocab_size)
        self.names = {token: names.get(token, f"{RESERVED}{token}|>") for token in slots}
        self.special = {name: token for token, name in self.names.items()}
        self.model = tiktoken.Encoding(
            "kimi", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens=self.special
        )

    def encode(self, text: str, special: bool = False) -> list[int]:
        names = self.special.keys() if special else ()
        made = (
            self.model.encode(piece, allowed_special=set(names), disallowed_special=())
            for piece in cut(text)
        )
        return [token for ids in made for token in ids]

    def token_bytes(self, token: int) -> bytes:
        if token < self.base_size:
            return self.model.decode_single_token_bytes(token)
        name = self.names.get(token)
        return name.encode() if name in SHOWN else b""


def cut(text: str) -> Iterator[str]:
    """A text in pieces, as Kimi's own encode() cuts it; short texts are one piece."""
    for start in range(0, len(text), KIMI_PIECE):
        piece = text[start : start + KIMI_PIECE]
        ends = [
            at
            for run in re.finditer(r"\s+|\S+", piece)
            for at in range(run.start() + KIMI_RUN, run.end(), KIMI_RUN)
        ]
        for begin, end in zip([0, *ends], [*ends, len(piece)]):
            yield piece[begin:end]


def read_names(path: Path, base_size: int) -> dict[int, str]:
    """tokenizer_config.json -> the names of special ids; Kimi-K2.5's if it has none."""
    key = "added_tokens_decoder"
    added = read_json(path).get(key) if path.is_file() else None
    if added is None:
        return {base_size + slot: name for slot, name in KIMI_NAMES.items()}
    try:
        names = {int(token): entry["content"] for token, entry in added.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(
            f"{path}: key '{key}' must map ids to objects that hold a 'content'"
        ) from None
    last = base_size + KIMI_SPECIAL_SLOTS - 1
    for token, name in names.items():
        if not base_size <= token <= last:
            raise UserError(
                f"{path}: names id {token} {name}, but the special ids of tiktoken.model are "
                f"{base_size} to {last}; put both files of one checkpoint in"
            )
        if not isinstance(name, str) or not name or list(names.values()).count(name) > 1:
            raise UserError(
                f"{path}: key '{key}' calls id {token} {name!r}; each needs a name of its own"
            )
    return names


def read_ranks(path: Path) -> dict[bytes, int]:
    """Lines of base64 token and rank. (tiktoken's own reader keeps stale copies under /tmp.)"""
    try:
        pairs = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError as error:
        raise UserError(f"{path}: not a tiktoken rank file ({error})") from None
    whole = sorted(ranks.values()) == list(range(len(pairs)))
    if not whole or not all(bytes([byte]) in ranks for byte in range(256)):
        raise UserError(f"{path}: must give every byte and every rank from 0 up exactly once")
    return ranks


def load_tokenizer(folder: str | Path, vocab_size: int) -> Tokenizer:
    """The tokenizer beside a checkpoint. Raises UserError if there is none or it does not fit."""
    kinds: dict[str, Callable[[Path], Tokenizer]] = {
        "tokenizer.model": SentencePieceTokenizer,
        "tiktoken.model": KimiTokenizer,
    }
    for name, kind in kinds.items():
        path = Path(folder) / name
        if path.is_file():
            tokenizer = kind(path)
            if tokenizer.vocab_size > vocab_size:
                raise UserError(
                    f"{path}: has {tokenizer.vocab_size} tokens, more than the vocab_size "
                    f"{vocab_size} of config.json"
                )
            return tokenizer
    raise UserError(f"{folder}: holds neither of the tokenizers {' and '.join(kinds)}")


class TextStream:
    """Tokens in, printable text out: whole characters only, and stop strings never shown."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.stopped = False
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # decoded, but maybe the beginning of a stop string

    def push(self, token: int) -> str:
        """The text that is certain now; sets `stopped` when a stop string is complete.

        The one that is complete first counts, of two that end together the longer.
        """
        assert not self.stopped, "a token after the stop"
        self._held += self._decoder.decode(self.tokenizer.token_bytes(token))
        starts = [(self._held.find(stop), len(stop)) for stop in self.stop]
        found = [(at + size, at) for at, size in starts if at >= 0]
        if found:
            self.stopped = True
            released, self._held = self._held[: min(found)[1]], ""
            return released
        return self._release(self._stop_prefix())

    def finish(self) -> str:
        """What was held back when the tokens end without a stop string."""
        if self.stopped:
            return ""
        self._held += self._decoder.decode(b"", final=True)
        return self._release(0)

    def _release(self, keep: int) -> str:
        cut = len(self._held) - keep
        released, self._held = self._held[:cut], self._held[cut:]
        return released

    def _stop_prefix(self) -> int:
        """How many last characters are the beginning of a stop string."""
        lengths = [
            size
            for stop in self.stop
            for size in range(1, len(stop))
            if self._held.endswith(stop[:size])
        ]
        return max(lengths, default=0)
