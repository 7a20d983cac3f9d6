"""The main job: `python -m minispec.generate "Once upon a time"`.

Turns flags into settings, streams the text to stdout and the report to stderr. Every mistake of
the user's ends in one line on stderr and exit code 2.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from .chat import PromptForm
from .config import EngineConfig, load
from .drafting import BUILDERS, PROPOSERS, TreeConfig
from .engine import Engine, Generation, GenerationParams, pick_rule
from .models.interface import UserError
from .sampling import SamplingParams
from .treeview import draw_tree
from .verify import RULES

DEMO = Path(__file__).resolve().parent / "models" / "demo"
DEMO_PROMPT = "Once upon a time"
TREE = TreeConfig()


class Parser(argparse.ArgumentParser):
    """argparse whose own complaints are one line too."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


def make_parser() -> Parser:
    """All flags, with the aliases that people know from other engines."""
    parser = Parser(
        prog="python -m minispec.generate",
        description="Generate text by speculative decoding; the text is that of plain decoding.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("prompt_words", nargs="?", metavar="PROMPT", help=f"the prompt; default {DEMO_PROMPT!r}")
    add("-p", "--prompt", help="the prompt, as a flag")
    add("--prompt-file", metavar="FILE", help="read the prompt from a file; - is stdin")
    raw = "the prompt as it stands; the default"
    add("--raw", dest="chat", action="store_false", default=False, help=raw)
    add(
        "--chat", action="store_true",
        help="the prompt as one turn in Kimi's chat template, built in: a chat_template.jinja is "
        "not run",
    )  # fmt: skip
    add("--system", metavar="TEXT", help="with --chat: the system message; default: none")
    add(
        "--thinking", action=argparse.BooleanOptionalAction,
        help="with --chat: Kimi-K2.5 thinks before it answers, or not; it does by default",
    )  # fmt: skip
    add(
        "--special-tokens", action="store_true",
        help="names of special tokens in the prompt, <|im_end|> say, stand for these tokens",
    )  # fmt: skip

    group = parser.add_argument_group("models")
    add = group.add_argument
    add("--model", "--model-path", metavar="DIR", help="target folder; default: the demo target")
    add(
        "--draft-model", "--draft", "--speculative-draft-model-path", metavar="DIR",
        help="EAGLE-3 head folder; default: the demo head, for the demo target",
    )  # fmt: skip
    add(
        "--aux-layers", metavar="I,J,K",
        help="target layers whose inputs the head reads, 2,30,58 say: I is what enters layer I, "
        "which is the output of layer I-1; default: those of the head's config",
    )  # fmt: skip
    add("--no-draft", action="store_true", help="plain decoding, one token a pass")
    add("--context", type=int, metavar="N", help="positions to hold; default: the model's limit")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N; default %(default)s")
    add("--dtype", default="auto", help="auto, float32 or bfloat16; default %(default)s")
    add("--threads", type=int, default=1, metavar="N", help="CPU threads; default 1: small models")

    group = parser.add_argument_group("speculation")
    add = group.add_argument
    add("--proposer", metavar="NAME", help=f"{', '.join(PROPOSERS)} or module:Class")
    add("--tree", metavar="NAME", help=f"{', '.join(BUILDERS)} or module:Class; default eagle2")
    add(
        "--num-steps", "--speculative-num-steps", "--num-speculative-tokens",
        "--num-draft-tokens", "--depth", type=int, metavar="N",
        help=f"draft steps, the deepest node of the tree; default {TREE.num_steps}",
    )  # fmt: skip
    add(
        "--topk", "--speculative-eagle-topk", type=int, metavar="N",
        help=f"children tried under each node; default {TREE.topk}",
    )  # fmt: skip
    add(
        "--num-draft-nodes", "--speculative-num-draft-tokens", "--total-token", type=int,
        metavar="N", help=f"nodes verified, the root counted; default {TREE.num_draft_nodes}",
    )  # fmt: skip
    add("--static-tree", metavar="PATHS", help="for --tree static: '[0],[1],[0,0]' or a file")
    add(
        "--verify", "--rejection-sample-method", metavar="NAME",
        help=f"{', '.join(RULES)} or module:Class",
    )  # fmt: skip

    group = parser.add_argument_group("sampling and stopping")
    add = group.add_argument
    add("--temperature", "--temp", type=float, default=0.0, help="0 is greedy, the default")
    add("--top-k", type=int, metavar="N", help="sample among the N likeliest")
    add("--top-p", type=float, metavar="P", help="sample among the fewest that hold P")
    add("--min-p", type=float, metavar="P", help="drop tokens below P times the likeliest")
    add("--seed", type=int, help="default 0")
    add(
        "--max-new-tokens", "--max-tokens", "-n", type=int, default=256, metavar="N",
        help="default %(default)s",
    )  # fmt: skip
    add("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; repeatable")
    add("--ignore-eos", action="store_true", help="go on past the end-of-text token")

    group = parser.add_argument_group("output")
    add = group.add_argument
    add("--no-stream", action="store_true", help="print the text once it is complete")
    add("--show-tree", action="store_true", help="draw each round's draft tree on stderr")
    add("--stats", "--verbose", action="store_true", help="report each round, too, on stderr")
    add("--json", action="store_true", help="one JSON object on stdout, and nothing else there")
    return parser


def read_prompt(args: argparse.Namespace) -> str:
    """From the one place that names it, else the demo's."""
    given = [
        name
        for name, value in (
            ("PROMPT", args.prompt_words),
            ("--prompt", args.prompt),
            ("--prompt-file", args.prompt_file),
        )
        if value is not None
    ]
    if len(given) > 1:
        raise UserError(f"{given[0]} and {given[1]}: give the prompt once")
    prompt, source = DEMO_PROMPT, "PROMPT"
    if args.prompt_file is not None:
        source = f"--prompt-file {args.prompt_file}"
        try:
            from_stdin = args.prompt_file == "-"
            raw = sys.stdin.buffer.read() if from_stdin else Path(args.prompt_file).read_bytes()
            prompt = raw.decode()
        except OSError as error:
            raise UserError(f"{source}: cannot be read ({error.strerror})") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{source}: must be UTF-8 text ({error})") from None
    elif given:
        source = given[0]
        prompt = args.prompt if args.prompt is not None else args.prompt_words
        try:
            prompt.encode()  # bytes of the command line that are not UTF-8 come as surrogates
        except UnicodeEncodeError as error:
            raise UserError(f"{source}: must be UTF-8 text ({error})") from None
    if not prompt:
        raise UserError(f"{source}: the prompt is empty; give at least one token of text")
    return prompt


def flag(name: str) -> str:
    """A setting as it is typed."""
    return "--" + name.replace("_", "-")


def tree_config(args: argparse.Namespace) -> TreeConfig:
    """Only what was given; a setting that the shape does not use is refused."""
    shape = args.tree or "eagle2"
    uses = load("--tree", shape, BUILDERS).uses
    names = [field.name for field in dataclasses.fields(TreeConfig)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    for name in given:
        if name not in uses:
            known = ", ".join(map(flag, uses))
            raise UserError(f"{flag(name)}: --tree {shape} does not use it; it uses {known}")
    return TreeConfig(**given)


def layer_numbers(typed: str) -> tuple[int, ...]:
    """--aux-layers; how many and which of them fit is for the head and the target to say."""
    parts = [part.strip() for part in typed.split(",")]
    numbers = [int(part) for part in parts if part.isdecimal() and len(part) < 10]
    if len(set(numbers)) < len(parts):
        raise UserError(
            f"--aux-layers {typed}: must be different layer numbers with commas between, as 2,30,58"
        )
    return tuple(numbers)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Model and drafter flags -> settings; contradictions are refused."""
    speculation = ("draft_model", "aux_layers", "proposer", "tree", "verify", "show_tree") + tuple(
        field.name for field in dataclasses.fields(TreeConfig)
    )
    model, draft, proposer = args.model, args.draft_model, args.proposer
    if args.no_draft:
        for name in speculation:
            value = getattr(args, name)
            if value is not None and value is not False:
                raise UserError(
                    f"--no-draft and {flag(name)}: plain decoding drafts nothing; drop one"
                )
    elif proposer is None:
        proposer = "eagle3"
    needs_head = proposer is not None and load("--proposer", proposer, PROPOSERS).needs_draft_model
    if draft is not None and not needs_head:
        raise UserError(f"--draft-model {draft}: --proposer {proposer} uses no draft model")
    if args.aux_layers is not None and not needs_head:
        raise UserError(f"--aux-layers {args.aux_layers}: --proposer {proposer} reads no layers")
    if needs_head and draft is None:
        if model is not None:
            raise UserError(
                f"--model {model}: needs a head for it: give --draft-model DIR, or --proposer "
                "ngram, or --no-draft"
            )
        draft = str(DEMO / "head")
    if args.context is not None and args.context < 2:
        raise UserError(f"--context {args.context}: must be at least 2")
    return EngineConfig(
        model=str(DEMO / "target") if model is None else model,
        draft_model=draft,
        proposer=proposer,
        tree=args.tree or "eagle2",
        tree_config=TreeConfig() if args.no_draft else tree_config(args),
        device=args.device,
        dtype=args.dtype,
        context=args.context,
        aux_layers=None if args.aux_layers is None else layer_numbers(args.aux_layers),
    )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Sampling flags -> settings; those that greedy decoding would ignore are refused."""
    sampling = SamplingParams(args.temperature, args.top_k, args.top_p, args.min_p, args.seed or 0)
    if sampling.greedy:
        for name in ("top_k", "top_p", "min_p", "seed"):
            if getattr(args, name) is not None:
                raise UserError(
                    f"{flag(name)} {getattr(args, name)}: no effect at --temperature 0; set a "
                    f"temperature or drop {flag(name)}"
                )
    return sampling


def settings(
    config: EngineConfig, form: PromptForm, sampling: SamplingParams, rule_name: str
) -> dict[str, object]:
    """What was understood, for --json."""
    speculation = config.proposer is not None
    tree = dataclasses.asdict(config.tree_config)
    uses = load("--tree", config.tree, BUILDERS).uses
    return {
        "model": config.model,
        "draft_model": config.draft_model,
        "proposer": config.proposer,
        "tree": config.tree if speculation else None,
        **({name: tree[name] for name in uses} if speculation else {}),
        "verify": rule_name,
        **dataclasses.asdict(form),
        **dataclasses.asdict(sampling),
        "device": config.device,
        "dtype": config.dtype,
    }


def as_json(generation: Generation, settings: dict[str, object]) -> str:
    """The one JSON object of --json."""
    report = generation.report
    return json.dumps(
        {
            "text": generation.text,
            "token_ids": generation.token_ids,
            "prompt_token_ids": generation.prompt,
            "prompt_tokens": report.prompt_tokens,
            "new_tokens": report.new_tokens,
            "rounds": len(report.rounds),
            "mean_accepted_length": report.mean_accepted_length,
            "acceptance_by_depth": report.acceptance_by_depth,
            "tokens_per_second": report.tokens_per_second,
            "seconds": report.seconds(),
            "finish_reason": generation.finish_reason,
            "settings": settings,
        }
    )


def run(args: argparse.Namespace) -> None:
    """Check everything that needs no weights, load, generate, report."""
    sampling = sampling_params(args)
    form = PromptForm(args.chat, args.system, args.thinking, args.special_tokens)
    params = GenerationParams(args.max_new_tokens, tuple(args.stop), args.ignore_eos, form.chat)
    config = engine_config(args)
    rule = pick_rule(args.verify, sampling)
    if args.threads < 1:
        raise UserError(f"--threads {args.threads}: must be at least 1")
    torch.set_num_threads(args.threads)
    prompt = read_prompt(args)
    notes: list[str] = []  # shown once the prompt went through: a mistake ends in one line alone
    engine = Engine(config, note=notes.append)
    generation = engine.generate(engine.encode(prompt, form), sampling, params, rule)
    if form.chat:
        print(f"[{form.note(engine.model_type)}]", file=sys.stderr)
        prompt = ""  # of a chat, what the assistant says is shown
    streaming = not (args.json or args.no_stream)
    for number, emitted in enumerate(generation):
        for line in notes if number == 0 else ():
            print(f"[{line}]", file=sys.stderr, flush=True)
        if streaming:
            print(emitted.text if number else prompt + emitted.text, end="", flush=True)
        if emitted.round is None:
            continue
        if args.stats:
            stats = dataclasses.asdict(emitted.round.stats)
            print(f"[round {number}: {json.dumps(stats)}]", file=sys.stderr)
        if args.show_tree:
            tree = draw_tree(emitted.round.tree, emitted.round.accepted, engine.tokenizer)
            print(f"\n[round {number}]\n{tree}", file=sys.stderr)
    if args.json:
        print(as_json(generation, settings(config, form, sampling, rule.name)))
    else:
        print("" if streaming else prompt + generation.text)
    print(f"\n{generation.report.table()}", file=sys.stderr)


def with_dashes(argv: Sequence[str]) -> list[str]:
    """`--max_new_tokens=5` -> `--max-new-tokens=5`; values and what follows a `--` stay."""
    flags = argv[: argv.index("--")] if "--" in argv else argv
    renamed = []
    for word in flags:
        name, equals, value = word.partition("=")
        is_flag = name.startswith("--") and " " not in name
        renamed.append(name.replace("_", "-") + equals + value if is_flag else word)
    return [*renamed, *argv[len(flags) :]]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line for a mistake of the user's."""
    try:
        run(make_parser().parse_args(with_dashes(sys.argv[1:] if argv is None else argv)))
    except UserError as error:
        print("error:", " ".join(str(error).splitlines()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, `head` say, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


if __name__ == "__main__":
    sys.exit(main())
