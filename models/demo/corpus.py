"""The demo models' corpus: seeded stories, public-domain children's books, and a tokenizer.

Stories come from the grammar in stories.py, so only a seed is needed; the books from one
xz file of plain text. Two whole books and the grammar's held-out plots are never trained on.
Written to the working folder, each file skipped where it exists: tokenizer.model (SentencePiece
unigram; Kudo, 2018) and uint16 token arrays {train,heldout}_{stories,books}.bin and
heldout_known.bin (unseen stories of the plots that were trained on), in which every document
ends with eos.

Shape suffixes: N tokens of an array, B sequences of a batch, T tokens of a sequence,
V vocabulary.
"""

import io
import json
import lzma
import math
import multiprocessing
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from torch import Tensor

from .stories import story

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
UNK = 3
KINDS = ("stories", "books")
HELD_OUT_KINDS = (*KINDS, "known")
FIRST_UNSEEN_SEED = 10_000_000
PROMPTS = "heldout_prompts.jsonl"
# first paragraph of a held-out book, and the first paragraph after it (None: the end)
HELD_OUT_BOOKS = (
    ("Heidi's Years of Learning and Travel", "The River Bank"),  # Heidi
    ("Mowgli's Brothers", None),  # The Jungle Book
)
DOCUMENT_WORDS = (1500, 3000)  # a book is cut at the first heading after 1500, at 3000 anyhow
SEEDS_PER_TASK = 500
SAMPLE_STORIES = 5000  # stories that the tokenizer sees, about as much text as the books


def read_paragraphs(books: Path) -> list[str]:
    """Paragraphs of the file, each on one line."""
    text = lzma.decompress(books.read_bytes()).decode()
    joined = (re.sub(r"\s*\n\s*", " ", part).strip() for part in re.split(r"\n\s*\n", text))
    return [part for part in joined if part]


def split_books(paragraphs: list[str]) -> tuple[list[str], list[str]]:
    """-> (training paragraphs, held-out paragraphs)."""
    held_out: set[int] = set()
    for first, after in HELD_OUT_BOOKS:
        end = len(paragraphs) if after is None else paragraphs.index(after)
        held_out |= set(range(paragraphs.index(first), end))
    train = [text for i, text in enumerate(paragraphs) if i not in held_out]
    return train, [paragraphs[i] for i in sorted(held_out)]


def documents(paragraphs: list[str]) -> Iterator[str]:
    """Chapter-sized runs of paragraphs, cut before a heading where there is one."""
    run: list[str] = []
    words = 0
    low, high = DOCUMENT_WORDS
    for paragraph in paragraphs:
        heading = len(paragraph) < 60 and paragraph[-1] not in ".,:;!?\"'"
        if words >= high or (words >= low and heading):
            yield "\n\n".join(run)
            run, words = [], 0
        run.append(paragraph)
        words += len(paragraph.split())
    if run:
        yield "\n\n".join(run)


def train_tokenizer(paragraphs: list[str], vocab_size: int, path: Path) -> None:
    """SentencePiece that gives every text back unchanged: bytes for the unknown, no normaliser."""
    sample = [line for seed in range(SAMPLE_STORIES) for line in story(seed).split("\n\n")]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sample + paragraphs),
        model_writer=model,
        model_type="unigram",
        vocab_size=vocab_size,
        character_coverage=1.0,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_digits=True,
        user_defined_symbols=["\n", "\n\n"],  # the trainer reads lines and never sees one
        pad_id=SPECIAL["pad_token_id"],
        bos_id=SPECIAL["bos_token_id"],
        eos_id=SPECIAL["eos_token_id"],
        unk_id=UNK,
        minloglevel=1,
    )
    path.write_bytes(model.getvalue())


def encode(texts: Iterable[str], model: bytes) -> bytes:
    """Documents -> uint16 ids, eos after each."""
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model)
    eos = SPECIAL["eos_token_id"]
    ids = [token for text in texts for token in (*tokenizer.encode(text), eos)]
    return np.array(ids, dtype=np.uint16).tobytes()


def encode_stories(first_seed: int, model: bytes, split: str) -> bytes:
    """Told where they are encoded, so that both run on all cores."""
    seeds = range(first_seed, first_seed + SEEDS_PER_TASK)
    return encode((story(seed, split) for seed in seeds), model)


def write_tokens(
    path: Path, task: Callable[..., bytes], items: Iterable[object], limit: float
) -> None:
    """Run the task over the items in order on all cores until there are `limit` tokens."""
    if path.exists():
        return
    partly = path.with_suffix(".part")
    written = 0
    # forked: nothing has touched the GPU yet, and the workers need no imports of their own
    with multiprocessing.get_context("fork").Pool() as pool, partly.open("wb") as file:
        for block in pool.imap(task, items):
            file.write(block)
            written += len(block) // 2
            if written >= limit:
                break
    partly.rename(path)
    print(f"corpus: {path.name}: {written:,} tokens", flush=True)


def build_corpus(
    books: Path, work: Path, vocab_size: int, story_tokens: int, heldout_tokens: int
) -> None:
    """Write tokenizer.model and the token arrays into `work`."""
    work.mkdir(parents=True, exist_ok=True)
    train, held_out = split_books(read_paragraphs(books))
    tokenizer_path = work / "tokenizer.model"
    if not tokenizer_path.exists():
        train_tokenizer(train, vocab_size, tokenizer_path)
        print(f"corpus: tokenizer.model: {tokenizer_path.stat().st_size:,} bytes", flush=True)
    model = tokenizer_path.read_bytes()
    for split, paragraphs in (("train", train), ("heldout", held_out)):
        parts = ([text] for text in documents(paragraphs))
        write_tokens(work / f"{split}_books.bin", partial(encode, model=model), parts, math.inf)
    for name, first, split, limit in (
        ("train_stories", 0, "train", story_tokens),
        ("heldout_stories", FIRST_UNSEEN_SEED, "heldout", heldout_tokens),
        ("heldout_known", FIRST_UNSEEN_SEED, "train", heldout_tokens),
    ):
        last = first + 1 + 2 * limit // 100  # a story has over 100 tokens
        seeds = range(first, last, SEEDS_PER_TASK)
        task = partial(encode_stories, model=model, split=split)
        write_tokens(work / f"{name}.bin", task, seeds, limit)
    write_prompts(held_out, work / PROMPTS)


def write_prompts(held_out: list[str], path: Path) -> None:
    """Openings of ten unseen stories and of ten paragraphs of prose, without their ends."""
    prose = [text for text in held_out if 60 < len(text.split()) < 200 and text[0] != '"']
    seeds = range(FIRST_UNSEEN_SEED, FIRST_UNSEEN_SEED + 70, 7)
    texts = [("story", story(seed, "heldout")) for seed in seeds]
    texts += [("book", text) for text in prose[5 :: len(prose) // 10][:10]]
    prompts = ({"kind": kind, "prompt": " ".join(text.split(" ")[:40])} for kind, text in texts)
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))


class Windows:
    """Shuffled windows of a token array, without end; the n-th is the same in every run.

    Each pass over the array cuts it at another offset.
    """

    def __init__(self, path: Path, length: int, seed: int, device: torch.device) -> None:
        token_N = np.fromfile(path, dtype=np.uint16)
        self.per_pass = (len(token_N) - 1) // length - 1
        if self.per_pass < 1:
            raise ValueError(f"{path}: {len(token_N)} tokens are too few for {length} a window")
        # int16: torch indexes it on every device, and ids stay far below 2**15
        self.token_N = torch.from_numpy(token_N.view(np.int16)).to(device)
        self.length, self.seed = length, seed
        self.starts = lru_cache(1)(self.shuffle)

    def shuffle(self, index: int) -> np.ndarray:
        """Where the windows of pass `index` begin."""
        rng = np.random.default_rng((self.seed, index))
        return rng.permutation(self.per_pass) * self.length + rng.integers(self.length)

    def take(self, first: int, count: int) -> Tensor:
        """Windows first .. first + count as int64 [count, length + 1]: inputs and next tokens."""
        places = (divmod(n, self.per_pass) for n in range(first, first + count))
        picked = [self.starts(index)[place] for index, place in places]
        start_B = torch.from_numpy(np.array(picked)).to(self.token_N.device)
        offset_T = torch.arange(self.length + 1, device=self.token_N.device)
        return self.token_N[start_B[:, None] + offset_T].long()


class Mixture:
    """Batches with a fixed share of stories; the rest of each is book prose."""

    def __init__(
        self, work: Path, split: str, length: int, story_share: float, device: torch.device
    ) -> None:
        self.kinds = {
            kind: Windows(work / f"{split}_{kind}.bin", length, seed, device)
            for seed, kind in enumerate(KINDS)
        }
        self.story_share = story_share

    def batch(self, step: int, size: int) -> Tensor:
        """The batch of a step, int64 [size, length + 1]."""
        stories = round(size * self.story_share)
        counts = (stories, size - stories)
        parts = [windows.take(step * n, n) for windows, n in zip(self.kinds.values(), counts)]
        return torch.cat(parts)

    def token_counts(self, vocab_size: int) -> Tensor:
        """How often each id is met under this mixture, as a share of all [V]."""
        share_V = torch.zeros(vocab_size)
        shares = (self.story_share, 1 - self.story_share)
        for share, windows in zip(shares, self.kinds.values()):
            count_V = torch.bincount(windows.token_N.int(), minlength=vocab_size).cpu()
            share_V += share * count_V / len(windows.token_N)
        return share_V
