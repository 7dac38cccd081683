"""`register`, and a look at what a model is asked for before it computes anything.

Models of transformers take any keyword, and some drop those that they do not know before they call their attention.
Without a tree its packed tokens are a row like any other, so that attention itself cannot tell. Attention weights that
are asked for would be missing without a word. A model that takes ours, or that was asked to, therefore gets a hook,
which raises before anything is computed. Under torch.compile it looks at no tree.
"""

import inspect
import sys
from functools import wraps
from typing import Any, NoReturn

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from trunkattn.integrations.transformers.attention import attend, check_positions, refuse
from trunkattn.integrations.transformers.keywords import come_to_attention
from trunkattn.integrations.transformers.masks import NAME, mask
from trunkattn.training.prefix_tree import check_is_tree


def register() -> None:
    """Lets models of transformers take `attn_implementation="trunkattn"`.

    Those that do refuse `output_attentions`, a `tree` that would not come to their attention, and one without its
    `position_ids`. Models whose layers look up their attention in a table of their own refuse to be made.
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    chosen, given = PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.set_attn_implementation
    if chosen.__globals__ is globals():
        return

    @wraps(chosen)
    def watched(model: PreTrainedModel, *arguments: Any, **options: Any) -> str:
        found = chosen(model, *arguments, **options)
        if found == NAME:
            _refuse_in_tables(type(model).__module__)
            _watch(model)
        return found

    @wraps(given)
    def asked(model: PreTrainedModel, attn_implementation: Any, *arguments: Any, **options: Any) -> None:
        given(model, attn_implementation, *arguments, **options)
        if _names_ours(attn_implementation):  # which a model with an attention of its own does not choose
            _watch(model)

    setattr(PreTrainedModel, chosen.__name__, watched)  # mypy takes no method for another
    setattr(PreTrainedModel, given.__name__, asked)


def _refuse_in_tables(module: str) -> None:
    """Adds our name to the tables of a module from which layers take the class of their attention by its name (Falcon,
    GPT-Neo, SAM). They would end in a bare KeyError; now they call what says why."""
    for table in vars(sys.modules.get(module, object)).values():
        if isinstance(table, dict) and "eager" in table:
            table.setdefault(NAME, _refuse_layer)


def _refuse_layer(config: Any, *arguments: Any, **options: Any) -> NoReturn:
    raise ValueError(
        f"layers of {type(config).__name__} take no attention but their own: attn_implementation={NAME!r} is none of "
        "theirs; use 'eager' for them"
    )


def _watch(model: PreTrainedModel) -> None:
    if look_at_keywords not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(look_at_keywords, with_kwargs=True)


def _names_ours(attn_implementation: Any) -> bool:
    """Whether a name, or one of those that sub-models are given, is that of our attention."""
    if isinstance(attn_implementation, dict):
        return any(map(_names_ours, attn_implementation.values()))
    return bool(attn_implementation == NAME)


def look_at_keywords(model: PreTrainedModel, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Raises if a model is asked for attention weights, or called with a tree that its attention would not get, or with
    positions of other tokens.

    Raises:
        ValueError, TypeError: naming the argument, and what was expected.
    """
    if keywords.get("output_attentions") and model.config._attn_implementation == NAME:
        refuse(output_attentions=True)
    tree = keywords.get("tree")
    if tree is None or torch.compiler.is_compiling():
        return
    check_is_tree(tree)
    name = type(model).__name__
    if model.config._attn_implementation != NAME:
        found = f"{name} has attn_implementation={model.config._attn_implementation!r}"
        raise ValueError(f"tree is given and {found}, which takes none: expected {NAME!r}")
    if not come_to_attention(model):
        raise ValueError(
            f"tree is given and {name} hands no such keyword on to its attention, which would let its branches see "
            "each other: expected a batch without it"
        )
    signature = inspect.signature(type(model).forward)
    if "position_ids" not in signature.parameters:
        return
    position_ids = signature.bind_partial(model, *arguments, **keywords).arguments.get("position_ids")
    if position_ids is None:
        raise ValueError("position_ids is None and tree is given: expected tree.pack().position_ids[None]")
    check_positions(model, tree, False, {"position_ids": position_ids})
