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

import random
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

DATA = Path(__file__).resolve().parent / "stories"
PRONOUNS = {"she": ("she", "her", "her", "herself"), "he": ("he", "him", "his", "himself")}
PEOPLE = {"n": "", "m": "m.", "s": "s.", "e": "e."}
FIRST_PERSON = {
    "n": "I", "he": "I", "him": "me", "his": "my", "himself": "myself", "n's": "my",
    "they": "we", "their": "our",
}  # fmt: skip
AN = re.compile(r"\b([Aa]) (?=[aei]|o(?!n(?:e|ce)\b)|u(?!ni|se)|hour|honest)")
SAID_I = re.compile(r"\b(said|cried|called|shouted|yelled|exclaimed|asked|answered|replied) I\b")
START = re.compile(r'^"?[a-z]')
Item = TypeVar("Item")


class Slot(NamedTuple):
    """A hole in a line: one of some options or, when there are none, a fact."""

    options: "list[Line]"
    key: str  # the fact, or the name under which the chosen word is kept
    capital: bool


Line = list[str | Slot]


class Beat(NamedTuple):
    """A step of a plot: the lines to choose from; a line that is a str names a scene."""

    lines: list[str | Line]
    chance: float
    paragraph: bool
    loose: bool


class Grammar:
    """The template files, parsed once for one split."""

    def __init__(self, split: str) -> None:
        heldout = split == "heldout"
        entries = [x.split(":", 1) for x in self.read("words.txt").splitlines() if ":" in x]
        self.words: dict[str, list[Line]] = {name: [] for name, _ in entries if name != "place"}
        self.places: list[list[str]] = []
        for name, body in entries:
            for item in [body] if name == "place" else body.split(","):
                text = item.strip().lstrip("*")
                # the held-out split prefers the items that only it may use
                times = 1 if "*" not in item else 3 if heldout else 0
                if name == "place":
                    self.places += [text.split("; ")] * times
                else:
                    self.words[name] += [self.parse(text)] * times
        self.scenes = {title: beats for title, _, beats in self.load("scenes.txt")}
        self.plots = [x for x in self.load("plots.txt") if ("heldout" in x[1]) == heldout]

    @staticmethod
    def read(name: str) -> str:
        return re.sub(r"^#.*\n", "", (DATA / name).read_text("ascii"), flags=re.M)

    def load(self, name: str) -> list[tuple[str, list[str], list[Beat]]]:
        """The plots or scenes of a file: title, flags, beats."""
        found = []
        for part in re.split(r"^== ", self.read(name), flags=re.M)[1:]:
            head, body = part.strip().split("\n", 1)
            title, _, flags = head.rstrip("] ").partition(" [")
            beats = [self.beat(block.splitlines()) for block in re.split(r"\n\s*\n", body.strip())]
            found.append((title, flags.split(), beats))
        return found

    def beat(self, lines: list[str]) -> Beat:
        marks = lines.pop(0).strip("[] ").split() if lines[0][0] == "[" else []
        chance = next((int(mark) / 100 for mark in marks if mark.isdigit()), 1.0)
        parsed = [line[1:].strip() if line[0] == "@" else self.parse(line) for line in lines]
        return Beat(parsed, chance, "/" in marks, "~" in marks)

    def parse(self, text: str) -> Line:
        """Turn a line into literals and slots."""
        stack: list[list[Line]] = [[[]]]  # the options of every bracket that is open
        for token in re.findall(r"[(|)]|\{[^}]*\}|[^(|){]+", text.strip()):
            if token == "(":
                stack.append([[]])
            elif token == "|":
                stack[-1].append([])
            elif token == ")":
                options = stack.pop()
                stack[-1][-1].append(Slot(options, "", False))
            elif token[0] == "{":
                key = token[1].lower() + token[2:-1]
                name, mark, _ = key.partition("#")
                words = self.words.get(name, [])  # none: a fact
                kept = key if mark or name not in self.words else ""
                stack[-1][-1].append(Slot(words, kept, token[1].isupper()))
            else:
                stack[-1][-1].append(token)
        ((line,),) = stack  # or a bracket is missing
        return line


class Teller:
    """Tells one story: its random numbers, its facts and the words it keeps to."""

    def __init__(self, rules: Grammar, seed: int) -> None:
        self.rules, self.random = rules, random.Random(seed).random
        self.told: list[str] = []
        self.last: dict[int, int] = {}  # the option taken last, by the id of the options
        _, flags, self.beats = self.choose(rules.plots)
        self.first_person = "first" in flags
        facts = self.facts = {"they": "they", "their": "their"}
        for who, dot in PEOPLE.items():
            sex = self.choose(("she", "he"))
            facts.update(zip([dot + x for x in PRONOUNS["he"]], PRONOUNS[sex]))
            if who in "se":
                facts[who] = self.fresh("stranger" if who == "s" else "elder_" + sex)
                continue
            human = "girl" if sex == "she" else "boy"
            child = self.random() < 0.6
            if who == "n" and {"kid", "beast"} & set(flags):
                child = "kid" in flags
            facts[who] = self.fresh(human if child else "beastname")
            facts[dot + "kind"] = human if child else self.fresh("species")
        facts |= {"name": facts["n"], "n's": facts["n"] + "'s"}
        if self.first_person:
            facts |= FIRST_PERSON
        for i in ("", "2"):
            whole = self.fresh("object")
            facts["thing" + i], facts["bare" + i] = whole.replace("~", ""), whole.split("~")[1]
            place = self.choose([x for x in rules.places if x[0] != facts.get("place")])
            facts["place" + i], facts["at" + i] = place[:2]
            if not i:
                spots = place[2:]
                for fact in ("d1", "d2", "d3"):
                    facts[fact] = spots.pop(int(self.random() * len(spots)))

    def choose(self, items: Sequence[Item]) -> Item:
        """One of the items, each as likely as the others."""
        return items[int(self.random() * len(items))]

    def fresh(self, name: str) -> str:
        """A word from a list that is not yet a fact of the story."""
        while True:
            word = self.fill(self.choose(self.rules.words[name]))
            if word.split("~")[-1] not in self.facts.values():
                return word

    def fill(self, line: Line) -> str:
        """The text of a line with its slots filled."""
        text = ""
        for part in line:
            if isinstance(part, str):
                text += part
                continue
            options, key, capital = part
            word = self.facts.get(key) if options else self.facts[key]
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

    def play(self, beats: list[Beat]) -> None:
        """Add the text of some beats to what was told; a blank line is a new paragraph."""
        order = list(beats)
        for i in range(len(order) - 1):
            if order[i].loose and order[i + 1].loose and self.random() < 0.5:
                order[i], order[i + 1] = order[i + 1], order[i]
        for lines, chance, paragraph, _ in order:
            if chance < 1.0 and self.random() >= chance:
                continue
            if paragraph or self.random() < 0.2:
                self.told.append("\n\n")
            line = self.choose(lines)
            if isinstance(line, str):
                self.play(self.rules.scenes[line])
            else:
                text = START.sub(lambda m: m[0].upper(), self.fill(line))
                if self.told and text[0] == '"' == self.told[-1][-1]:  # the next one speaks
                    self.told.append("\n\n")
                self.told.append(text)


grammar = cache(Grammar)


def story(seed: int, split: str = "train") -> str:
    """One story, the same for the same seed; the two splits share no plot."""
    teller = Teller(grammar(split), seed)
    teller.play(teller.beats)
    text = re.sub(r"\s*\n\s*", "\n\n", " ".join(teller.told)).strip()
    if teller.first_person:
        text = SAID_I.sub(r"I \1", text)
    return AN.sub(r"\1n ", text)
