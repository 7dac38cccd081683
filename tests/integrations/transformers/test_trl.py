"""TRL's own packing of trees on a CPU, with its attention and with ours: loss and gradients are equal.

It needs only TRL's files, which are read without importing its trainers.
"""

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from trunkattn.integrations.transformers import replace_tree_attention  # noqa: E402
from trunkattn.integrations.transformers.trl import tree_attention  # noqa: E402
from trunkattn.training.tree_formats import to_paths  # noqa: E402

from ...training.training_cases import TREE  # noqa: E402


def varlen(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *_: Any, **options: Any) -> Any:
    """What TRL calls FlashAttention-3 for, in plain PyTorch."""
    assert options["causal"]
    group = q.shape[1] // k.shape[1]
    outs = []
    for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        own_k, own_v = (tensor[c:d].repeat_interleave(group, 1).transpose(0, 1) for tensor in (k, v))
        seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        logits = (q[a:b].transpose(0, 1) @ own_k.mT * options["softmax_scale"]).masked_fill(~seen, -torch.inf)
        outs.append((logits.softmax(-1) @ own_v).transpose(0, 1))
    return torch.cat(outs)


@pytest.fixture
def packing() -> ModuleType:
    found = find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("trl is not installed: pip install --no-deps trl")
    path = Path(found.origin).parent / "experimental" / "async_grpo" / "packing.py"
    spec = spec_from_file_location("packing_of_trl", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_loss_of_a_tree_batch_is_that_of_trls_own_path(packing: Any) -> None:
    row = packing.TreeRow()
    for group, tokens in enumerate(([5, 6, 7, 8, 9], [5, 6, 7, 8, 3, 2], [5, 6, 7, 1], [4, 4, 4])):
        ids = torch.tensor(tokens)
        row.add({
            "input_ids": ids, "completion_mask": (torch.arange(len(ids)) >= 2).int(), "group_id": group,
            "old_log_probs": torch.zeros(len(ids)), "advantage": 1.0,
        })  # fmt: skip
    batch = row.pack()
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen)
    packing.register_tree_attention()
    model.set_attn_implementation(packing.TREE_ATTENTION)

    def step() -> list[torch.Tensor]:
        longest = batch["tree_max_seqlens"].tolist()
        arguments = {name: batch[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
        arguments |= {"tree_max_seqlen_q": longest[0], "tree_max_seqlen_k": longest[1]}
        tokens, positions = batch["input_ids"][None], batch["position_ids"][None]
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False, **arguments).logits[0]
        labels = batch["shift_labels"][batch["token_index"]]
        loss = torch.nn.functional.cross_entropy(logits[batch["token_index"]], labels)
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    expected = step()
    replace_tree_attention(packing)
    assert packing.tree_attention is tree_attention
    for ours, theirs in zip(step(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_five_arguments_are_the_tree() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, TREE.num_tokens, 8) for heads in (4, 2, 2))
    index, starts, ends = to_paths(TREE)
    flat = [tensor[0].transpose(0, 1) for tensor in (q, k, v)]
    expected = varlen(flat[0], flat[1][index], flat[2][index], starts, ends, softmax_scale=0.3, causal=True)
    arguments = {"tree_kv_index": index, "tree_cu_seqlens_q": starts, "tree_cu_seqlens_k": ends}
    for _ in range(2):
        out, none = tree_attention(
            torch.nn.Module(), q, k, v, None, **arguments, tree_max_seqlen_q=40, tree_max_seqlen_k=80, scaling=0.3
        )
        assert none is None
        torch.testing.assert_close(out[0], expected)
    with pytest.raises(ValueError, match="tree_cu_seqlens_k is no tensor: expected tree_kv_index, tree_cu_seqlens_q"):
        tree_attention(torch.nn.Module(), q, k, v, None, **(arguments | {"tree_cu_seqlens_k": None}))
    with pytest.raises(ValueError, match="tree and tree_kv_index are both given: expected one of them"):
        tree_attention(torch.nn.Module(), q, k, v, None, **arguments, tree=TREE)
    with pytest.raises(ValueError, match="cu_seqlens_k begins with 1"):  # not those of the batch before
        tree_attention(torch.nn.Module(), q, k, v, None, **(arguments | {"tree_cu_seqlens_k": ends + 1}))
    index.zero_()
    with pytest.raises(ValueError, match="kv_index holds other tokens than the segments above each one"):
        tree_attention(torch.nn.Module(), q, k, v, None, **arguments)


def test_a_trl_without_the_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ModuleNotFoundError, match="have: install one of them, or pass as packing"):
        replace_tree_attention()
