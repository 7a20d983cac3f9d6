"""From the folder of an EAGLE-3 head to a head that is wired to its target.

Knows which tensors a head may leave out, and what it then shares with the target.
"""

from pathlib import Path

import torch

from .eagle3 import Eagle3, Eagle3Config, resolve_taps
from .interface import UserError
from .kimi_k25 import KimiK25
from .weights import Checkpoint

HEAD_SKIPPED = ("t2d",)  # the inverse of d2t


def load_head(
    folder: str | Path, target: KimiK25, device: torch.device, dtype: torch.dtype, context: int
) -> Eagle3:
    """An EAGLE-3 head folder -> head wired to `target`, whose taps it also sets.

    Raises UserError where the head's widths or vocabulary do not fit the target.
    """
    checkpoint = Checkpoint(folder, "--draft-model")
    where = str(checkpoint.config_path)
    config = Eagle3Config.from_json(checkpoint.config, where)
    width, vocab = target.config.hidden_size, target.config.vocab_size
    own_embedding = "embed_tokens.weight" in checkpoint.file_of
    if config.target_hidden_size != width:
        raise UserError(
            f"{where}: the head reads target states of width {config.target_hidden_size}; "
            f"the target's hidden_size is {width}"
        )
    if not own_embedding and config.hidden_size != width:
        raise UserError(
            f"{where}: hidden_size is {config.hidden_size} and the head has no embed_tokens; "
            f"it cannot share the target's, whose width is {width}"
        )
    if config.vocab_size != vocab:
        raise UserError(
            f"{where}: vocab_size is {config.vocab_size}; the target's vocabulary has {vocab}"
        )
    if config.draft_vocab_size < vocab and "d2t" not in checkpoint.file_of:
        raise UserError(
            f"{where}: draft_vocab_size is {config.draft_vocab_size} of {vocab}, but the head has "
            "no d2t tensor to map draft ids to target ids"
        )
    with torch.device(device):
        head = Eagle3(config, dtype, own_embedding)
    checkpoint.load(head.placements(), HEAD_SKIPPED)
    head.finish_loading(target.embed_tokens, context)
    target.tap_boundaries = resolve_taps(config.aux_layer_ids, target.num_layers)
    return head
