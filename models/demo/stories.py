"""Seeded children's stories from a small text grammar: the training text of the demo models.

``story(seed)`` returns one story of about 120-450 words as ASCII paragraphs with a blank line
between them.  The same seed gives the same story on every machine.  ``split="heldout"`` uses
only the plots marked held-out, and often the names, things and places marked held-out; the
default ``split="train"`` never uses any of those.

The templates are text files in the folder ``stories``; a line that begins with # is a comment.

words.txt   ``name: item, item`` adds to a word list.  An item that begins with * is for the
            held-out split only.  In ``object`` the part of an item after ~ is its short name.
            ``place: the wood; in the wood; the fallen log; ...`` is one place: its name, how
            one is there, and at least three things seen there.
plots.txt   ``== title [flags]`` opens a plot.  Flags: heldout; kid or beast (the hero must be
            one); first (told by the hero).  Beats follow, with a blank line between them; a
            beat is one or more lines, one of which is used.  ``@scene`` as a line plays a scene.
            A beat may begin with a line ``[...]`` holding a number (its chance in per cent),
            ``/`` (starts a paragraph) or ``~`` (may trade places with neighbours marked so).
scenes.txt  scenes that plots share, written in the same way.

In a line, (a|b|) is a choice and {slot} is filled in: with a word from a list; with ``#x`` after
the list's name, the same word all through the story; or with a fact of the story.  Facts are
{n} the hero, {m} a friend, {s} a stranger and {e} an elder, their pronouns {he} {him} {his}
{himself} (for others {m.he} and so on), {n's}, {name} (for use in speech), {kind}, {m.kind},
{thing}, {bare}, {thing2}, {bare2}, {place}, {at}, {d1}, {d2}, {d3}, {place2}, {at2}.  A slot with
a capital, {He}, is capitalised, as is the start of each line; a turns into an where needed.
"""

from __future__ import annotations

import argparse
import random
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Union

DATA = Path(__file__).resolve().parent / "stories"
PRONOUNS = {"she": ("she", "her", "her", "herself"), "he": ("he", "him", "his", "himself")}
PEOPLE = {"n": "", "m": "m.", "s": "s.", "e": "e."}
FACTS = {p + x for p in PEOPLE.values() for x in PRONOUNS["he"]} | set(PEOPLE) | set(
    "n's name kind m.kind thing bare thing2 bare2 place at d1 d2 d3 place2 at2".split())
AN = re.compile(r"\b([Aa]) (?=[aei]|o(?!n(?:e|ce)\b)|u(?!ni|se)|hour|honest)")
SAID_I = re.compile(r"\b(said|cried|called|shouted|snapped|asked|answered|replied|wondered) I\b")
CAPITAL = re.compile(r'^"?[a-z]')


class Slot(NamedTuple):
    """A hole in a line: one of some alternatives or, when there are none, a fact."""

    options: list[list[Part]]
    key: str  # the fact, or the name under which the word chosen is kept
    capital: bool


Part = Union[str, Slot]


class Beat(NamedTuple):
    """One step of a plot: the lines to choose from; a line that is a str names a scene."""

    lines: list[Union[str, list[Part]]]
    chance: float
    paragraph: bool
    loose: bool


class Grammar:
    """The template files, parsed once for one split."""

    def __init__(self, split: str) -> None:
        if split not in ("train", "heldout"):
            raise ValueError(f"unknown split: {split}")
        self.heldout = split == "heldout"
        self.places: list[list[str]] = []
        self.words: dict[str, list[list[Part]]] = {}
        entries = [line.partition(":") for line in self.read("words.txt").splitlines() if ":" in line]
        for name, _, _ in entries:
            self.words[name] = []
        for name, _, body in entries:
            for item in [body] if name == "place" else body.split(","):
                own = item.strip().startswith("*")
                if own and not self.heldout:
                    continue
                text = item.strip().lstrip("*")
                for _ in range(3 if own else 1):  # the held-out split prefers what is its own
                    self.places.append(text.split("; ")) if name == "place" else (
                        self.words[name].append(self.parse(text)))
        self.scenes = {name: beats for name, _, beats in self.load("scenes.txt")}
        self.plots = [p for p in self.load("plots.txt") if ("heldout" in p[1]) == self.heldout]

    def read(self, name: str) -> str:
        return re.sub(r"^#.*\n", "", (DATA / name).read_text("ascii"), flags=re.M)

    def load(self, name: str) -> list[tuple[str, list[str], list[Beat]]]:
        """The plots or scenes of a file: title, flags, beats."""
        found = []
        for part in re.split(r"^== ", self.read(name), flags=re.M)[1:]:
            head, _, body = part.partition("\n")
            title, _, flags = head.rstrip("] ").partition(" [")
            blocks = [b.strip().splitlines() for b in re.split(r"\n\s*\n", body) if b.strip()]
            found.append((title.strip(), flags.split(), [self.beat(b) for b in blocks]))
        return found

    def beat(self, lines: list[str]) -> Beat:
        marks = lines.pop(0).strip("[] ").split() if lines[0].startswith("[") else []
        chance = next((int(x) / 100 for x in marks if x.isdigit()), 1.0)
        parsed = [x[1:].strip() if x[0] == "@" else self.parse(x.strip()) for x in lines]
        return Beat(parsed, chance, "/" in marks, "~" in marks)

    def parse(self, text: str) -> list[Part]:
        """Turn a line into literals and slots."""
        tokens = re.findall(r"[(|)]|\{[^}]*\}|[^(|){]+", text)
        stack: list[list[list[Part]]] = [[[]]]
        for token in tokens:
            if token == "(":
                stack.append([[]])
            elif token == ")":
                options = stack.pop()
                stack[-1][-1].append(Slot(options, "", False))
            elif token == "|":
                stack[-1].append([])
            else:
                stack[-1][-1].append(self.slot(token[1:-1]) if token[0] == "{" else token)
        if len(stack) != 1 or len(stack[0]) != 1:
            raise ValueError(f"brackets do not match in: {text}")
        return stack[0][0]

    def slot(self, key: str) -> Slot:
        low = key[0].lower() + key[1:]
        name, mark, _ = low.partition("#")
        if low not in FACTS and name not in self.words:
            raise ValueError(f"unknown slot: {{{key}}}")
        return Slot(self.words.get(name, []), low if mark or low in FACTS else "", low != key)


class Teller:
    """Tells one story: its random numbers, its facts and the words it keeps to."""

    def __init__(self, rules: Grammar, seed: int) -> None:
        self.rules, self.random = rules, random.Random(seed).random
        self.facts: dict[str, str] = {}
        self.last: dict[int, int] = {}
        self.title, self.flags, self.beats = self.choose(rules.plots)
        first = "first" in self.flags
        for who, dot in PEOPLE.items():
            sex = "she" if self.random() < 0.5 else "he"
            self.facts.update(zip((dot + x for x in PRONOUNS["he"]), PRONOUNS[sex]))
            child = self.random() < 0.6 if who == "m" or not {"kid", "beast"} & set(self.flags) else (
                "kid" in self.flags)
            if who in "nm":
                name = self.fresh(("girl" if sex == "she" else "boy") if child else "beastname")
                kind = ("girl" if sex == "she" else "boy") if child else self.fresh("species")
                self.facts.update({who: name, dot + "kind": kind})
            else:
                self.facts[who] = self.fresh({"s": "stranger", "e": "elder_" + sex}[who])
        self.facts["name"], self.facts["n's"] = self.facts["n"], self.facts["n"] + "'s"
        if first:
            self.facts.update(zip(("n", "he", "him", "his", "himself", "n's"),
                                  ("I", "I", "me", "my", "myself", "my")))
        for i in ("", "2"):
            whole = self.fresh("object")
            self.facts["thing" + i], self.facts["bare" + i] = whole.replace("~", ""), whole.split("~")[1]
            place = self.choose(rules.places)
            while place[0] == self.facts.get("place"):
                place = self.choose(rules.places)
            self.facts["place" + i], self.facts["at" + i] = place[:2]
            if not i:
                spots = place[2:]
                for d in ("d1", "d2", "d3"):
                    self.facts[d] = spots.pop(int(self.random() * len(spots)))

    def choose(self, items: list[Any]) -> Any:
        """One of the items, each as likely as the others."""
        return items[int(self.random() * len(items))]

    def fresh(self, name: str) -> str:
        """A word from a list that no fact of the story uses yet."""
        while True:
            word = self.fill(self.choose(self.rules.words[name]))
            if word not in self.facts.values() and word.split("~")[-1] not in self.facts.values():
                return word

    def fill(self, line: list[Part]) -> str:
        """The text of a line with its slots filled."""
        text = ""
        for part in line:
            if part.__class__ is str:
                text += part
                continue
            options, key, capital = part
            word = self.facts.get(key) if key else None
            if word is None:
                index = int(self.random() * len(options))
                if self.last.get(id(options)) == index:
                    index = (index + 1) % len(options)  # do not name the same thing twice running
                self.last[id(options)] = index
                word = self.fill(options[index])
                if key:
                    self.facts[key] = word
            text += word[:1].upper() + word[1:] if capital else word
        return text

    def play(self, beats: list[Beat], out: list[str]) -> None:
        """Add the text of some beats; an empty string in the list starts a paragraph."""
        order = list(beats)
        for i in range(len(order) - 1):  # one pass of neighbour swaps among loose beats
            if order[i].loose and order[i + 1].loose and self.random() < 0.5:
                order[i], order[i + 1] = order[i + 1], order[i]
        for lines, chance, paragraph, _ in order:
            if chance < 1.0 and self.random() >= chance:
                continue
            if paragraph or self.random() < 0.2:
                out.append("")
            line = self.choose(lines)
            if line.__class__ is str:
                self.play(self.rules.scenes[line], out)
            else:
                out.append(CAPITAL.sub(lambda m: m[0].upper(), self.fill(line)))

    def tell(self) -> str:
        out: list[str] = []
        self.play(self.beats, out)
        text = re.sub(r"(?: ?\n\n ?)+", "\n\n", " ".join(x or "\n\n" for x in out))
        if self.facts["n"] == "I":
            text = SAID_I.sub(r"I \1", text)
        return AN.sub(r"\1n ", text).strip()


grammar = lru_cache(None)(Grammar)


def story(seed: int, split: str = "train") -> str:
    """One story, the same for the same seed; the two splits share no plot."""
    return Teller(grammar(split), seed).tell()


def main() -> None:
    parser = argparse.ArgumentParser(description="Print seeded children's stories.")
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first story")
    parser.add_argument("--split", choices=("train", "heldout"), default="train")
    args = parser.parse_args()
    for seed in range(args.seed, args.seed + args.count):
        print(story(seed, args.split), end="\n\n***\n\n")


if __name__ == "__main__":
    main()
