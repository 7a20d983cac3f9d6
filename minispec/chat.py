"""A prompt's form: plain text, or one user turn in Kimi's chat template, as token ids.

A block is <|im_ROLE|> role <|im_middle|> content <|im_end|>, nothing between blocks and no [BOS];
then the assistant's block is opened, to which Kimi-K2.5 adds <think>, or <think></think> for an
answer at once. Follows the public chat templates of Kimi-K2, K2-Thinking and K2.5, without tools
or history. The blocks are joined as ids, so what a user types can never close one. A
chat_template.jinja beside the weights is not run: no code of a checkpoint is.
"""

from dataclasses import dataclass

from .models.interface import UserError
from .tokenizer import Tokenizer

THINKS = {"kimi_k25": True, "kimi_k2": False, "deepseek_v3": False}  # the template by model_type
TURN = ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>")
ENDS = ("<|im_end|>", "[EOS]")
MEDIA = ("<|media_pad|>", "<|media_begin|>", "<|kimi_k25_video_placeholder|>")


@dataclass(frozen=True)
class PromptForm:
    """How a prompt becomes ids. `thinking` None is what the model's template does by default."""

    chat: bool = False
    system: str | None = None
    thinking: bool | None = None
    special_tokens: bool = False

    def __post_init__(self) -> None:
        if self.chat and self.special_tokens:
            raise UserError(
                "--special-tokens: --chat puts the control tokens in itself; drop one of the two"
            )
        thinking = "--thinking" if self.thinking else "--no-thinking"
        for flag, value in (("--system", self.system), (thinking, self.thinking)):
            if value is not None and not self.chat:
                raise UserError(f"{flag}: is part of the chat template; add --chat or drop {flag}")
        try:
            (self.system or "").encode()  # see read_prompt() of generate.py
        except UnicodeEncodeError as error:
            raise UserError(f"--system: must be UTF-8 text ({error})") from None

    def ids(self, prompt: str, tokenizer: Tokenizer, model_type: str) -> list[int]:
        """Token ids of a prompt. Raises UserError for what this tokenizer or model lacks."""
        refuse_media("--prompt", prompt, tokenizer)
        refuse_media("--system", self.system or "", tokenizer)
        if not self.chat:
            if self.special_tokens and not tokenizer.special:
                raise UserError("--special-tokens: the tokenizer of this model names none; drop it")
            return tokenizer.encode(prompt, self.special_tokens)
        if model_type not in THINKS:
            raise UserError(
                f"--chat: model_type {model_type!r} has no template here ({', '.join(THINKS)} "
                "have); write the prompt out, with --special-tokens"
            )
        if self.thinking is not None and not THINKS[model_type]:
            raise UserError(
                f"--thinking and --no-thinking: the template of model_type {model_type!r} has no "
                "such switch, Kimi-K2.5's has; drop it"
            )
        thinks = ("<think>", "</think>") if THINKS[model_type] else ()
        for name in (*TURN, *thinks):
            if name not in tokenizer.special:
                raise UserError(
                    f"--chat: the tokenizer of this model has no chat token {name}; drop --chat"
                )
        special, ids = tokenizer.special, []

        def opening(role: str) -> list[int]:
            return [special[f"<|im_{role}|>"], *tokenizer.encode(role), special["<|im_middle|>"]]

        for role, text in (("system", self.system), ("user", prompt)):
            if text is not None:
                ids += [*opening(role), *tokenizer.encode(text), special["<|im_end|>"]]
        marks = thinks[: 2 if self.thinking is False else 1]
        return [*ids, *opening("assistant"), *(special[mark] for mark in marks)]

    def note(self, model_type: str) -> str:
        """What `--chat` rendered, in one line: templates differ in what they put in by default."""
        thinking = "left to the model"
        if THINKS[model_type]:
            thinking = "off" if self.thinking is False else "on"
        system = "as given" if self.system is not None else "none, for none was given"
        return f"chat: template of {model_type}; thinking {thinking}; system message {system}"


def turn_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that end an assistant's turn, whatever the checkpoint's configs say."""
    return tuple(tokenizer.special[name] for name in ENDS if name in tokenizer.special)


def refuse_media(flag: str, text: str, tokenizer: Tokenizer) -> None:
    """Raise if `text` holds a place for an image or a video, and the tokenizer knows such."""
    if any(name in tokenizer.special for name in MEDIA):
        for name in MEDIA:
            if name in text:
                raise UserError(
                    f"{flag}: holds {name}, the place of an image or a video; minispec runs text "
                    "only; take it out"
                )
