"""Text to ids and back: sentencepiece (the demo) or Kimi's own tiktoken ranks.

Every id has bytes, so text is put together byte by byte and half a UTF-8 character is never
shown. No code of a checkpoint runs.
"""

import base64
import codecs
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import sentencepiece
import tiktoken

from .models.interface import UserError

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
KIMI_SPECIAL_SLOTS = 256


class Tokenizer(Protocol):
    """Ids run from 0 to vocab_size - 1."""

    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Plain text to ids; nothing is put in front, and no text becomes a control token."""

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

    def encode(self, text: str) -> list[int]:
        return self.model.encode(text)

    def token_bytes(self, token: int) -> bytes:
        if token >= self.vocab_size or self.model.is_control(token):
            return b""
        piece = self.model.id_to_piece(token)
        if self.model.is_byte(token):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()


class KimiTokenizer:
    """tiktoken.model: base ranks, then 256 special slots, which no text turns into."""

    def __init__(self, path: Path) -> None:
        ranks = read_ranks(path)
        self.model = tiktoken.Encoding(
            "kimi", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens={}
        )
        self.base_size = len(ranks)
        self.vocab_size = self.base_size + KIMI_SPECIAL_SLOTS

    def encode(self, text: str) -> list[int]:
        return self.model.encode_ordinary(text)

    def token_bytes(self, token: int) -> bytes:
        return b"" if token >= self.base_size else self.model.decode_single_token_bytes(token)


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
