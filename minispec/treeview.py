"""A draft tree drawn in the terminal: the accepted path marked, every edge with its probability."""

import math

from .tokenizer import Tokenizer
from .tree import DraftTree
from .verify import Accepted


def draw_tree(tree: DraftTree, accepted: Accepted, tokenizer: Tokenizer) -> str:
    """One line a node: token, the drafter's probability for it, `*` where it was accepted."""
    token_N, logprob_N = tree.token_N.tolist(), tree.logprob_N.tolist()
    children = tree.children()
    path = set(accepted.path)
    lines: list[str] = []

    def text(token: int) -> str:
        return repr(tokenizer.token_bytes(token).decode(errors="replace"))

    def walk(node: int, lead: str, branch: str) -> None:
        mark = "*" if node in path else " "
        edge = "" if node == 0 else f"  {math.exp(logprob_N[node]):.2f}"
        lines.append(f"{mark} {lead}{branch}{text(token_N[node])}{edge}")
        inner = lead + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
        for child in children[node]:
            walk(child, inner, "└─ " if child == children[node][-1] else "├─ ")

    walk(0, "", "")
    lines.append(f"  accepted {len(accepted.path) - 1}, then {text(accepted.bonus)}")
    return "\n".join(lines)
