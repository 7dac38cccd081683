"""Whether a keyword that a model does not know comes to its attention, by the source code of its layers."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NamedTuple

from torch import nn

_ATTENDS: Final = "ALL_ATTENTION_FUNCTIONS"  # the table from which a layer takes the attention that it calls
_TAKES_OUT: Final = frozenset({"get", "pop"})  # what a layer that reads some keywords does with them
_LAST: Final = "loss_function"  # called after all layers


class _Forward(NamedTuple):
    """What a layer does in its `forward`: it hands keywords on that it does not know, and it calls an attention."""

    hands_on: bool
    attends: bool


def come_to_attention(model: nn.Module) -> bool:
    """Whether some layer of a model that calls an attention is given the keywords that the model does not know."""
    if type(model).forward is not nn.Module.forward:  # a list of layers has none, and its parent calls what it holds
        forward = _read(inspect.unwrap(type(model).forward))
        if not forward.hands_on or forward.attends:
            return forward.hands_on
    return any(map(come_to_attention, model.children()))


@lru_cache
def _read(forward: Callable[..., Any]) -> _Forward:
    """What a function does that is the `forward` of a layer. One without source code is taken to do all of it."""
    unknown = [each.name for each in inspect.signature(forward).parameters.values() if each.kind is each.VAR_KEYWORD]
    try:
        source = textwrap.dedent(inspect.getsource(forward))
    except (OSError, TypeError):
        return _Forward(bool(unknown), True)
    nodes = list(ast.walk(ast.parse(source)))
    elsewhere = {node.value for node in nodes if isinstance(node, ast.Attribute) and node.attr in _TAKES_OUT}
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == _LAST:
            elsewhere |= {each.value for each in node.keywords}
    named = {node.id for node in nodes if isinstance(node, ast.Name) and node not in elsewhere}
    return _Forward(not named.isdisjoint(unknown), _ATTENDS in source)
