"""Methods of decoding by the names that results carry, and the drafters that they mean.

`none` is plain decoding and `dflash` a block of DFlash or MMFlash. `mtpN` and `assistantN` draft
chains of N tokens; `eagle3` a chain of the default length, `eagle3-chainN` of N. `eagle3-treeN`
verifies a tree of N nodes, the anchor among them.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmflash_jax.drafters import Eagle3

# Where `benchmarks.full_size make` writes each kind of draft: an MTP head beside its target.
FOLDERS = {"dflash": "draft", "mtp": "target", "assistant": "assistant", "eagle3": "eagle3"}
EAGLE3 = ("eagle3", "eagle3-tree16")
ALL = {
    "Qwen35": ("none", "dflash", "mtp3", "mtp7", "mtp15", *EAGLE3),
    "Gemma4": ("none", "dflash", "assistant5", "assistant15", *EAGLE3),
}
"""What `all` means for each target: the methods of the model cards, and EAGLE-3's chain."""
TOP_K, DEPTH = 4, 5
"""Nodes that a level of a tree runs, and its levels."""
_NAMES = re.compile(r"(none|dflash)|(mtp|assistant|eagle3-chain|eagle3-tree)([1-9]\d*)|(eagle3)")


@dataclass(frozen=True)
class Method:
    """A method of decoding.

    kind: "none", or a key of FOLDERS.
    tokens: drafted tokens; None where the draft says how many.
    is_tree: whether they form a tree.
    """

    name: str
    kind: str
    tokens: int | None = None
    is_tree: bool = False

    def shaped(self, drafter: Any) -> Any:
        """A drafter of this kind that drafts as many tokens, as a chain or as a tree."""
        if isinstance(drafter, Eagle3) and self.is_tree:
            return drafter.shaped(tokens=self.tokens, top_k=TOP_K, depth=DEPTH)
        if self.tokens is None:
            return drafter
        return dataclasses.replace(drafter, draft_tokens=self.tokens)


def read_method(name: str) -> Method:
    """The method of that name.

    Raises:
        ValueError: there is none.
    """
    match = _NAMES.fullmatch(name)
    if match is None or name == "eagle3-tree1":
        raise ValueError(
            f"{name!r} is no method; there are none, dflash, mtpN, assistantN, eagle3, "
            "eagle3-chainN and eagle3-treeN with N from 1 on, for trees from 2 on"
        )
    if match[3] is None:
        return Method(name, name)
    is_tree = match[2] == "eagle3-tree"
    kind = match[2].split("-")[0]
    return Method(name, kind, int(match[3]) - is_tree, is_tree)


def read_methods(names: Sequence[str], target: str) -> list[Method]:
    """Methods in order, each once; `all` stands for those of the target's family.

    Plain decoding comes first: the others are compared with it.

    Raises:
        ValueError: a name means nothing.
    """
    named = [one for name in names for one in (ALL[target] if name == "all" else (name,))]
    methods = [read_method(name) for name in dict.fromkeys(named)]
    return sorted(methods, key=lambda method: method.kind != "none")
