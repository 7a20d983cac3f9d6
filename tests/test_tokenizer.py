"""Text to ids and back, and the stream that shows only text that is certain."""

import base64
import io
import random
from pathlib import Path

import pytest
import regex
import sentencepiece
from toys import write_byte_tokenizer

from minispec.models.interface import UserError
from minispec.tokenizer import (
    KIMI_PATTERN,
    KimiTokenizer,
    SentencePieceTokenizer,
    TextStream,
    Tokenizer,
    cut,
    load_tokenizer,
)

TEXTS = [
    "Once upon a time",
    " leading and trailing ",
    "  two  spaces   three",
    "line\nbreaks\n\nand\ttabs\r\n",
    "café, naïve, Ωμέγα",
    "漢字かな交じり文",
    "👩‍👩‍👧 and 🏳️‍🌈",
    "\n",
    " ",
    "</s><s><unk>",
    "\x00\x01",
]


class Pieces:
    """A tokenizer whose ids are places in a list of bytes."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.vocab_size = len(pieces)
        self.special: dict[str, int] = {}

    def encode(self, text: str, special: bool = False) -> list[int]:
        raise NotImplementedError

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]


def stream(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], str, TextStream]:
    """Push pieces up to the stop -> (what each push gave, what the end gave, the stream)."""
    made = TextStream(Pieces(pieces), stop)
    given = []
    for token in range(len(pieces)):
        given.append(made.push(token))
        if made.stopped:
            break
    return given, made.finish(), made


def every_split(raw: bytes, seed: int) -> list[bytes]:
    """Cut bytes at random places."""
    dice = random.Random(seed)
    cuts = sorted({0, len(raw), *(dice.randrange(len(raw) + 1) for _ in range(len(raw) // 2))})
    return [raw[a:b] for a, b in zip(cuts, cuts[1:])]


# whole characters


@pytest.mark.parametrize("character", ["é", "漢", "👍", "\U0010ffff"])
def test_a_character_comes_with_its_last_byte(character: str) -> None:
    raw = character.encode()
    given, rest, _ = stream([bytes([byte]) for byte in raw])
    assert given == [""] * (len(raw) - 1) + [character]
    assert rest == ""


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("seed", range(3))
def test_any_split_of_the_bytes_gives_the_text(text: str, seed: int) -> None:
    given, rest, _ = stream(every_split(text.encode(), seed))
    assert "".join(given) == text
    assert rest == ""


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"ab\xf0\x9f\x91", "ab\ufffd"),  # the beginning of an emoji
        (b"\xe6\xbc", "\ufffd"),
        (b"a\xffb", "a\ufffdb"),  # no UTF-8 at all, in the middle
        (b"\xc3(", "\ufffd("),
        (b"\xff", "\ufffd"),
    ],
)
def test_invalid_bytes_become_the_replacement_character(raw: bytes, text: str) -> None:
    given, rest, _ = stream([bytes([byte]) for byte in raw])
    assert "".join(given) + rest == text


# stop strings


def reference(text: str, stop: tuple[str, ...]) -> str:
    """Read letter by letter: the text before the first stop string that is complete."""
    for end in range(1, len(text) + 1):
        found = [one for one in stop if text[:end].endswith(one)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@pytest.mark.parametrize("seed", range(150))
def test_stop_strings_against_a_reference(seed: int) -> None:
    """Small alphabets make overlaps; the result must not depend on how tokens cut the text."""
    dice = random.Random(seed)
    text = "".join(dice.choice("ab漢") for _ in range(dice.randrange(1, 14)))
    stop = tuple(
        "".join(dice.choice("ab漢") for _ in range(dice.randrange(1, 5)))
        for _ in range(dice.randrange(1, 4))
    )
    wanted = reference(text, stop)
    for split in range(4):
        given, rest, made = stream(every_split(text.encode(), split), stop)
        assert "".join(given) + rest == wanted, (text, stop)
        assert made.stopped == (wanted != text or any(text.endswith(one) for one in stop))


@pytest.mark.parametrize("pieces", [[b"abcd"], [b"a", b"b", b"c", b"d"]], ids=["one", "four"])
def test_the_stop_string_that_is_complete_first_counts(pieces: list[bytes]) -> None:
    """Not the one that begins first, which a token of several letters would show first."""
    given, rest, _ = stream(pieces, ("bcd", "c"))
    assert "".join(given) + rest == "ab"


@pytest.mark.parametrize("seed", range(30))
def test_nothing_certain_is_held_back(seed: int) -> None:
    """After every token, what is held is the longest ending that may become a stop string."""
    dice = random.Random(seed)
    text = "".join(dice.choice("ab") for _ in range(12))
    stop = ("abab", "bba")
    made = TextStream(Pieces([letter.encode() for letter in text]), stop)
    shown = ""
    for token in range(len(text)):
        shown += made.push(token)
        if made.stopped:
            break
        seen = text[: token + 1]
        held = max(
            size
            for size in range(5)
            if any(one[:size] == seen[len(seen) - size :] and size < len(one) for one in stop)
        )
        assert shown == seen[: len(seen) - held]


def test_bytes_after_the_stop_are_never_shown() -> None:
    given, rest, made = stream([b"abcd\xf0\x9f"], ("cd",))
    assert made.stopped
    assert (given, rest) == (["ab"], "")


def test_half_a_character_before_the_end_is_held() -> None:
    given, rest, _ = stream([b"ab", b"\xe6\xbc"], ("b漢",))
    assert given == ["a", ""]
    assert rest == "b\ufffd"


def test_control_tokens_add_nothing() -> None:
    given, rest, _ = stream([b"a", b"", b"b"])
    assert given == ["a", "", "b"]
    assert rest == ""


# sentencepiece


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    """A model of 400 pieces, trained as the demo's is: byte fallback, nothing normalised."""
    words = ["once upon a time", "there was", "a little fox", "and the fox", "said hello\n"]
    dice = random.Random(0)
    lines = [" ".join(dice.choice(words) for _ in range(6)) for _ in range(300)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_digits=True,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("pieces") / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return SentencePieceTokenizer(path)


def back(tokenizer: Tokenizer, ids: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


@pytest.mark.parametrize("text", [text for text in TEXTS if "\x00" not in text])
def test_sentencepiece_round_trip(pieces: SentencePieceTokenizer, text: str) -> None:
    ids = pieces.encode(text)
    assert back(pieces, ids) == text
    assert all(0 <= token < pieces.vocab_size for token in ids)


def test_sentencepiece_ids(pieces: SentencePieceTokenizer) -> None:
    assert pieces.vocab_size == 340
    assert [pieces.token_bytes(token) for token in (0, 1, 2)] == [b"", b"", b""]
    for byte in range(256):
        token = pieces.model.piece_to_id(f"<0x{byte:02X}>")
        assert pieces.token_bytes(token) == bytes([byte])
    assert 1 not in pieces.encode("hello") and 2 not in pieces.encode("hello</s>")
    assert len(pieces.encode(" once")) < 5  # words are pieces, not bytes


def test_sentencepiece_streams_byte_tokens(pieces: SentencePieceTokenizer) -> None:
    made = TextStream(pieces)
    shown = [made.push(token) for token in pieces.encode("a漢👍")]
    assert [text for text in shown if text] == ["a", "漢", "👍"]
    assert made.finish() == ""


def test_sentencepiece_ids_of_a_padded_vocabulary(pieces: SentencePieceTokenizer) -> None:
    """A target may have more ids than its tokenizer, and may draw one."""
    assert [pieces.token_bytes(token) for token in (340, 512)] == [b"", b""]


# Kimi's tokenizer

WORDS = ["he", "ll", "hell", "lo", "hello", " w", "or", " wor", "ld", " world", "12", "123"]
SPECIAL = ["<|im_end|>", "[BOS]", "[EOS]", "<|reserved_token_270|>"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """256 bytes and a few merges."""
    write_byte_tokenizer(tmp_path)
    with (tmp_path / "tiktoken.model").open("a") as file:
        for rank, word in enumerate(WORDS, start=256):
            file.write(f"{base64.b64encode(word.encode()).decode()} {rank}\n")
    return tmp_path


def test_kimi_ids(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, 1024)
    assert isinstance(tokenizer, KimiTokenizer)
    assert tokenizer.base_size == 268
    assert tokenizer.vocab_size == 268 + 256
    assert tokenizer.encode("hello world") == [
        256 + WORDS.index(word) for word in ("hello", " world")
    ]
    assert [tokenizer.token_bytes(token) for token in (268, 300, 523)] == [b"", b"", b""]


@pytest.mark.parametrize("text", TEXTS)
def test_kimi_round_trip(folder: Path, text: str) -> None:
    tokenizer = load_tokenizer(folder, 1024)
    assert back(tokenizer, tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", SPECIAL)
def test_a_special_token_in_the_text_is_text(folder: Path, name: str) -> None:
    tokenizer = load_tokenizer(folder, 1024)
    ids = tokenizer.encode(f"a{name}b")
    assert max(ids) < 268
    assert back(tokenizer, ids) == f"a{name}b"


def test_a_changed_rank_file_is_read_anew(tmp_path: Path) -> None:
    """tiktoken's own reader would give what once stood at this path."""
    write_byte_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path, 1024).vocab_size == 512
    with (tmp_path / "tiktoken.model").open("a") as file:
        file.write(f"{base64.b64encode(b'he').decode()} 256\n")
    assert load_tokenizer(tmp_path, 1024).vocab_size == 513


@pytest.mark.parametrize(
    "line", ["aGU= 255", "aGU= 300", "aGU=", "aGU= one", "a 256", "YQ== 256"], ids=str
)
def test_a_rank_file_with_a_fault(tmp_path: Path, line: str) -> None:
    write_byte_tokenizer(tmp_path)
    with (tmp_path / "tiktoken.model").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match="tiktoken.model"):
        load_tokenizer(tmp_path, 1024)


def split(text: str) -> list[str]:
    """What the pattern cuts a text into; `regex` reads the same set operations as tiktoken."""
    return regex.findall(KIMI_PATTERN, text, flags=regex.V1)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("漢字 kanji漢字", ["漢字", " kanji", "漢字"]),  # a Han run never joins a word
        ("日本語です", ["日本語", "です"]),  # kana are letters, not Han
        ("我们12个", ["我们", "12", "个"]),
        ("don't we'll", ["don't", " we'll"]),
        ("DON'T I'M", ["DON'T", " I'M"]),
        ("it's 'quoted'", ["it's", " '", "quoted", "'"]),
        ("rock'n", ["rock", "'n"]),  # no contraction: the sign leads the next word
        ("1234567", ["123", "456", "7"]),
        ("3.14", ["3", ".", "14"]),
        ("a1b22", ["a", "1", "b", "22"]),
        ("CamelCase HTTPServer", ["Camel", "Case", " HTTPServer"]),
        ("(word) #tag", ["(word", ")", " #", "tag"]),
        ("x == y;\n\nz", ["x", " ==", " y", ";\n\n", "z"]),
        ("a  b", ["a", " ", " b"]),
        ("a \n b", ["a", " \n", " b"]),
        ("end   ", ["end", "   "]),
        ("tab\there", ["tab", "\there"]),
        ("ab漢cd", ["ab", "漢", "cd"]),  # Han is in none of the word classes
        ("CAN'T can'T", ["CAN'T", " can'T"]),
        ("they'd've", ["they'd", "'ve"]),  # one contraction a word; the next leads its own
        ("ǅungla", ["ǅungla"]),  # a title-case letter opens a word
        ("e\u0301a", ["e\u0301a"]),  # marks belong to words
        ("٣٤٥٦", ["٣٤٥", "٦"]),  # any script's digits
        ("x²³", ["x", "²³"]),
        ("wow!!\r\n\r\nyes", ["wow", "!!\r\n\r\n", "yes"]),
        ("a\r\n\r\n  b", ["a", "\r\n\r\n", " ", " b"]),
        (" \n\t\n x", [" \n\t\n", " x"]),
        ("a\u00a0b\u3000c", ["a", "\u00a0b", "\u3000c"]),
        ("_snake_case", ["_snake", "_case"]),
        ("👍ok", ["👍ok"]),  # any one sign may lead a word
        ("👍👍ok", ["👍👍", "ok"]),
    ],
)
def test_kimi_pattern(text: str, parts: list[str]) -> None:
    assert split(text) == parts


@pytest.mark.parametrize("text", TEXTS)
def test_kimi_pattern_loses_nothing(text: str) -> None:
    assert "".join(split(text)) == text


@pytest.mark.parametrize("word", ["漢字", "abc", "123", "ab's"])
def test_tiktoken_cuts_as_the_pattern_does(tmp_path: Path, word: str) -> None:
    """A merge across a cut is never made: the Rust engine reads the pattern as we do."""
    write_byte_tokenizer(tmp_path)
    raw = word.encode()
    with (tmp_path / "tiktoken.model").open("a") as file:
        for rank, end in enumerate(range(2, len(raw) + 1), start=256):
            file.write(f"{base64.b64encode(raw[:end]).decode()} {rank}\n")
    tokenizer = load_tokenizer(tmp_path, 1024)
    whole = 256 + len(raw) - 2
    assert tokenizer.encode(word) == [whole]
    # the word twice: one token each only where the pattern cuts between them
    parts = split(word + word)
    assert (tokenizer.encode(word + word) == [whole, whole]) == (parts == [word, word]) or (
        len(parts) == 1
    )


def cut_letter_by_letter(text: str, longest: int = 25_000, whole: int = 400_000) -> list[str]:
    """As the public description has it: count letters of one kind, cut before one too many."""
    pieces = []
    for start in range(0, len(text), whole):
        piece, count, was_space = "", 0, None
        for letter in text[start : start + whole]:
            count = count + 1 if letter.isspace() == was_space else 1
            was_space = letter.isspace()
            if count > longest:
                pieces.append(piece)
                piece, count = "", 1
            piece += letter
        pieces.append(piece)
    return pieces


LONG = {
    "short": "a b\n",
    "a word at the limit": "a" * 25_000 + " b",
    "a word past the limit": "a" * 25_001 + " b",
    "twice past": "ab" + " " * 50_003 + "c" * 50_001,
    "other spaces": "x\u3000" + "\u3000\x1f\x85" * 9_000 + "y",
    "400,000": "abcd " * 80_000,
    "400,001": "abcd " * 80_000 + "x",
    "a long word across 400,000": "ab " * 130_000 + "c" * 60_000,
}


@pytest.mark.parametrize("case", LONG)
def test_long_text_is_cut_as_described(case: str) -> None:
    text = LONG[case]
    pieces = list(cut(text))
    assert pieces == cut_letter_by_letter(text)
    assert "".join(pieces) == text
    assert (len(pieces) > 1) == (case not in ("short", "a word at the limit", "400,000"))


def test_no_token_stands_across_a_cut(folder: Path) -> None:
    """`hello` whose cut falls behind `he` is two tokens, and one anywhere else."""
    tokenizer = load_tokenizer(folder, 1024)
    hello, he = (256 + WORDS.index(word) for word in ("hello", "he"))
    near = tokenizer.encode("." * 24_998 + "hello")
    across = tokenizer.encode("." * 24_998 + "hello", special=True)
    assert near == across and he in near and hello not in near
    assert hello in tokenizer.encode("." * 24_995 + "hello")
    assert back(tokenizer, near) == "." * 24_998 + "hello"


def test_a_special_token_across_a_cut_is_text(folder: Path) -> None:
    """As in Kimi's own encode(), which cuts first."""
    tokenizer = load_tokenizer(folder, 1024)
    end = tokenizer.special["<|im_end|>"]
    assert end in tokenizer.encode("a" * 24_990 + "<|im_end|>", special=True)
    assert end not in tokenizer.encode("a" * 24_991 + "<|im_end|>", special=True)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Every two bytes of the alphabet below are a token: a cut elsewhere shows in the ids."""
    folder = tmp_path_factory.mktemp("pairs")
    write_byte_tokenizer(folder)
    alphabet = sorted(set("aB漢'st1. \n\té".encode()))
    made = [bytes([one, other]) for one in alphabet for other in alphabet]
    with (folder / "tiktoken.model").open("a") as file:
        for rank, token in enumerate(made, start=256):
            file.write(f"{base64.b64encode(token).decode()} {rank}\n")
    return load_tokenizer(folder, 1024)


@pytest.mark.parametrize("seed", range(100))
def test_tiktoken_cuts_random_text_as_the_pattern_does(pairs: Tokenizer, seed: int) -> None:
    dice = random.Random(seed)
    text = "".join(dice.choice("aB漢'st1. \n\té") for _ in range(40))
    assert pairs.encode(text) == [token for part in split(text) for token in pairs.encode(part)]


def test_a_tokenizer_of_the_real_size(tmp_path: Path) -> None:
    """163,584 ranks: ids of special tokens are the public ones."""
    ranks = [bytes([one]) for one in range(256)]
    ranks += [bytes([one, two]) for one in range(256) for two in range(256)]
    ranks += [bytes([one, two, 46]) for one in range(256) for two in range(256)]
    ranks += [bytes([one, two, 47]) for one in range(256) for two in range(256)]
    lines = [f"{base64.b64encode(token).decode()} {n}" for n, token in enumerate(ranks[:163_584])]
    (tmp_path / "tiktoken.model").write_text("\n".join(lines))
    tokenizer = load_tokenizer(tmp_path, 163_840)
    assert tokenizer.vocab_size == 163_840
    names = ["[BOS]", "<|im_end|>", "<|reserved_token_163589|>", "</think>", "[PAD]"]
    assert tokenizer.encode("".join(names), special=True) == [
        163584, 163586, 163589, 163607, 163839,
    ]  # fmt: skip
    assert back(tokenizer, tokenizer.encode("héllo 漢字")) == "héllo 漢字"


# which tokenizer


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tokenizer.model and tiktoken.model"):
        load_tokenizer(tmp_path, 512)


@pytest.mark.parametrize("vocab_size", [512, 600])
def test_a_padded_vocabulary_fits(tmp_path: Path, vocab_size: int) -> None:
    write_byte_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path, vocab_size).vocab_size == 512


def test_a_tokenizer_that_is_too_large(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    with pytest.raises(UserError, match="512.*511"):
        load_tokenizer(tmp_path, 511)
