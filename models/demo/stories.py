"""Seeded children's stories from a small text grammar: the training text of the demo models.

``story(seed)`` returns one story of about 150-500 words as ASCII paragraphs with a blank line
between them, the same for the same seed on every machine.  ``split="heldout"`` uses only the
plots marked held-out and often the names, things and places marked so; "train" uses none of them.

The templates are text files in the folder ``stories``; a line that begins with # is a comment.

words.txt   ``name: item, item`` adds to a word list; an item that begins with * is for the
            held-out split only.  In ``object`` the short name of the thing follows the ~.
            ``place: the wood; in the wood; the log; ...`` is one place: its name, how one is
            there, and at least three things seen there.
plots.txt   ``== title [flags]`` opens a plot.  Flags: heldout; kid or beast (the hero must be
            one); first (told by the hero).  Beats follow, with a blank line between them.  One
            line of a beat is used; ``@scene`` as a line plays a scene.  A beat may begin with
            a line ``[...]`` holding its chance in per cent, ``/`` (starts a paragraph) or ``~``
            (may trade places with a neighbour marked so).
scenes.txt  scenes that plots share, written in the same way.

In a line, (a|b|) is a choice and {slot} is filled in: with a word from a list; with ``#x`` after
the list's name, the same word all through the story; or with a fact of the story.  Facts are
{n} the hero, {m} a friend, {s} a stranger, {e} an elder, their pronouns {he} {him} {his}
{himself} (for others {m.he} and so on), {they} {their} the hero and the friend, {n's}, {name}
(for use in speech), {kind}, {m.kind}, {thing}, {bare}, {thing2}, {bare2}, {place}, {at}, {d1},
{d2}, {d3}, {place2}, {at2}.  {He} is capitalised, as is the start of each line; a turns into an.
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
FACTS = {dot + word for dot in PEOPLE.values() for word in PRONOUNS["he"]} | set(PEOPLE) | set(
    "n's name kind m.kind they their thing bare thing2 bare2 place at d1 d2 d3 place2 at2".split())
FIRST = {"n": "I", "he": "I", "him": "me", "his": "my", "himself": "myself", "n's": "my",
         "they": "we", "their": "our"}
AN = re.compile(r"\b([Aa]) (?=[aei]|o(?!n(?:e|ce)\b)|u(?!ni|se)|hour|honest)")
SAID_I = re.compile(r"\b(said|cried|called|shouted|yelled|exclaimed|asked|answered|replied) I\b")
START = re.compile(r'^"?[a-z]')


class Slot(NamedTuple):
    """A hole in a line: one of some options or, when there are none, a fact."""

    options: list[list[Part]]
    key: str  # the fact, or the name under which the chosen word is kept
    capital: bool


Part = Union[str, Slot]


class Beat(NamedTuple):
    """A step of a plot: the lines to choose from; a line that is a str names a scene."""

    lines: list[Union[str, list[Part]]]
    chance: float
    paragraph: bool
    loose: bool


class Grammar:
    """The template files, parsed once for one split."""

    def __init__(self, split: str) -> None:
        if split not in ("train", "heldout"):
            raise ValueError(f"unknown split: {split}")
        heldout = split == "heldout"
        entries = [x.partition(":") for x in self.read("words.txt").splitlines() if ":" in x]
        self.words: dict[str, list[list[Part]]] = {name: [] for name, _, _ in entries}
        self.places: list[list[str]] = []
        for name, _, body in entries:
            for item in [body] if name == "place" else body.split(","):
                text = item.strip().lstrip("*")
                own = "*" in item
                # The held-out split prefers the items that only it may use.
                for _ in range((3 if heldout else 0) if own else 1):
                    if name == "place":
                        self.places.append(text.split("; "))
                    else:
                        self.words[name].append(self.parse(text))
        self.scenes = {title: beats for title, _, beats in self.load("scenes.txt")}
        self.plots = [x for x in self.load("plots.txt") if ("heldout" in x[1]) == heldout]

    @staticmethod
    def read(name: str) -> str:
        return re.sub(r"^#.*\n", "", (DATA / name).read_text("ascii"), flags=re.M)

    def load(self, name: str) -> list[tuple[str, list[str], list[Beat]]]:
        """The plots or scenes of a file: title, flags, beats."""
        found = []
        for part in re.split(r"^== ", self.read(name), flags=re.M)[1:]:
            head, _, body = part.partition("\n")
            title, _, flags = head.rstrip("] ").partition(" [")
            blocks = [x.strip().splitlines() for x in re.split(r"\n\s*\n", body) if x.strip()]
            found.append((title, flags.split(), [self.beat(x) for x in blocks]))
        return found

    def beat(self, lines: list[str]) -> Beat:
        marks = lines.pop(0).strip("[] ").split() if lines[0].startswith("[") else []
        chance = next((int(x) / 100 for x in marks if x.isdigit()), 1.0)
        parsed = [x[1:].strip() if x[0] == "@" else self.parse(x.strip()) for x in lines]
        return Beat(parsed, chance, "/" in marks, "~" in marks)

    def parse(self, text: str) -> list[Part]:
        """Turn a line into literals and slots."""
        stack: list[list[list[Part]]] = [[[]]]
        for token in re.findall(r"[(|)]|\{[^}]*\}|[^(|){]+", text):
            if token == "(":
                stack.append([[]])
            elif token == "|":
                stack[-1].append([])
            elif token == ")":
                options = stack.pop()
                stack[-1][-1].append(Slot(options, "", False))
            else:
                stack[-1][-1].append(self.slot(token[1:-1]) if token[0] == "{" else token)
        if len(stack) != 1 or len(stack[0]) != 1:
            raise ValueError(f"brackets do not match in: {text}")
        return stack[0][0]

    def slot(self, key: str) -> Slot:
        low = key[0].lower() + key[1:]
        name, mark, _ = low.partition("#")
        if low in FACTS:
            return Slot([], low, low != key)
        if name not in self.words:
            raise ValueError(f"unknown slot: {{{key}}}")
        return Slot(self.words[name], low if mark else "", low != key)


grammar = lru_cache(None)(Grammar)


class Teller:
    """Tells one story: its random numbers, its facts and the words it keeps to."""

    def __init__(self, rules: Grammar, seed: int) -> None:
        self.rules, self.random = rules, random.Random(seed).random
        self.last: dict[int, int] = {}
        self.title, self.flags, self.beats = self.choose(rules.plots)
        facts = self.facts = {"they": "they", "their": "their"}
        for who, dot in PEOPLE.items():
            sex = self.choose(("she", "he"))
            facts.update(zip([dot + x for x in PRONOUNS["he"]], PRONOUNS[sex]))
            if who in "se":
                facts[who] = self.fresh("stranger" if who == "s" else "elder_" + sex)
                continue
            child = self.random() < 0.6
            if who == "n" and ("kid" in self.flags or "beast" in self.flags):
                child = "kid" in self.flags
            human = "girl" if sex == "she" else "boy"
            facts[who] = self.fresh(human if child else "beastname")
            facts[dot + "kind"] = human if child else self.fresh("species")
        facts.update({"name": facts["n"], "n's": facts["n"] + "'s"})
        if "first" in self.flags:
            facts.update(FIRST)
        for i in ("", "2"):
            whole = self.fresh("object")
            facts["thing" + i], facts["bare" + i] = whole.replace("~", ""), whole.split("~")[1]
            place = self.choose([x for x in rules.places if x[0] != facts.get("place")])
            facts["place" + i], facts["at" + i] = place[:2]
            if not i:
                spots = place[2:]
                for d in ("d1", "d2", "d3"):
                    facts[d] = spots.pop(int(self.random() * len(spots)))

    def choose(self, items: Any) -> Any:
        """One of the items, each as likely as the others."""
        return items[int(self.random() * len(items))]

    def fresh(self, name: str) -> str:
        """A word from a list that is not yet a fact of the story."""
        while True:
            word = self.fill(self.choose(self.rules.words[name]))
            if word.split("~")[-1] not in self.facts.values():
                return word

    def fill(self, line: list[Part]) -> str:
        """The text of a line with its slots filled."""
        text = ""
        for part in line:
            if isinstance(part, str):
                text += part
                continue
            options, key, capital = part
            word = self.facts.get(key) if key else None
            if word is None:
                # squared: a list's first words are the common ones, as in any language
                index = int(self.random() ** 2 * len(options))
                if self.last.get(id(options)) == index:  # not the same twice running
                    index = (index + 1) % len(options)
                self.last[id(options)] = index
                word = self.fill(options[index])
                if key:
                    self.facts[key] = word
            text += word[:1].upper() + word[1:] if capital else word
        return text

    def play(self, beats: list[Beat], out: list[str]) -> None:
        """Add the text of some beats; a blank line stands for a new paragraph."""
        order = list(beats)
        for i in range(len(order) - 1):
            if order[i].loose and order[i + 1].loose and self.random() < 0.5:
                order[i], order[i + 1] = order[i + 1], order[i]
        for lines, chance, paragraph, _ in order:
            if chance < 1.0 and self.random() >= chance:
                continue
            if paragraph or self.random() < 0.2:
                out.append("\n\n")
            line = self.choose(lines)
            if isinstance(line, str):
                self.play(self.rules.scenes[line], out)
            else:
                text = START.sub(lambda m: m[0].upper(), self.fill(line))
                if out and text[0] == '"' == out[-1][-1]:  # the next one speaks
                    out.append("\n\n")
                out.append(text)

    def tell(self) -> str:
        out: list[str] = []
        self.play(self.beats, out)
        text = re.sub(r"\s*\n\s*", "\n\n", " ".join(out)).strip()
        if "first" in self.flags:
            text = SAID_I.sub(r"I \1", text)
        return AN.sub(r"\1n ", text)


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
