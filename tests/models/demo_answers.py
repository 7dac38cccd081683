"""Greedy answers of the demo's 32 requests against transformers' own `generate` on each prompt alone, in float32.

    python -m tests.models.demo_answers            # writes benchmarks/results/equality-cpu.json

Every packing policy, chunked prefill, forced preemption and a prefix-cache hit. Answers have a fixed length (end-of-
sequence is ignored), so each holds the natural answer and what follows it. Where an answer leaves the reference, the
gap between the reference's two largest logits at that token is reported: float32 sums in another order can only swap
tokens whose logits nearly tie. The reference, which takes longest, and the model's safetensors are kept in out/.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.lib.report import write_result
from benchmarks.lib.smollm2 import save_folder
from trunkattn import LLM, SamplingParams
from trunkattn.cli.demo.workload import load_demo

OUT = Path("out")
MODEL = OUT / "SmolLM2-135M-Instruct"
MAX_TOKENS = 64
PAGE_SIZE = 8
POLICIES = ("per_query", "relay", "cascade", "fasttree", "pat", "optimal", "auto")
FEW_PAGES = 500  # the batch needs about 700


@dataclass(frozen=True)
class Scenario:
    """An engine, and how often it runs the batch; only the last run is compared."""

    name: str
    options: dict[str, Any]
    runs: int = 1


SCENARIOS = (
    *(Scenario(f"policy {policy}", {"policy": policy}) for policy in POLICIES),
    Scenario("chunked prefill, 256 tokens a step", {"max_num_batched_tokens": 256}),
    Scenario(f"preemption, {FEW_PAGES} pages", {"num_pages": FEW_PAGES}),
    Scenario("prefix-cache hit", {}, runs=2),
)


@dataclass
class Reference:
    """transformers' own answers, and its model, loaded when it is needed."""

    prompts: list[list[int]]
    answers: list[list[int]] = field(default_factory=list)
    _model: Any = None

    @property
    def model(self) -> Any:
        if self._model is None:
            self._model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, local_files_only=True).eval()
        return self._model

    def load_or_compute(self) -> None:
        """Answers from out/ if they are of these prompts and versions; what is missing is computed, and kept."""
        versions = [version("torch"), version("transformers")]
        key = hashlib.sha256(json.dumps([self.prompts, MAX_TOKENS, versions]).encode()).hexdigest()
        path = OUT / "equality-reference.json"
        kept = json.loads(path.read_text()) if path.is_file() else {}
        self.answers = kept["answers"] if kept.get("key") == key else []
        for number in range(len(self.answers), len(self.prompts)):
            print(f"transformers on prompt {number + 1} of {len(self.prompts)}", flush=True)
            self.answers.append(self._generate(self.prompts[number]))
            path.write_text(json.dumps({"key": key, "answers": self.answers}))

    def _generate(self, prompt: list[int]) -> list[int]:
        token_ids = torch.tensor([prompt])
        generated = self.model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
        return generated[0, len(prompt) :].tolist()

    def difference(self, position: int, answer: Sequence[int]) -> dict[str, Any] | None:
        """Where an answer leaves the reference, and how near the two largest logits are there; None if it does not."""
        expected = self.answers[position]
        if answer == expected:
            return None
        at = next(i for i, (own, other) in enumerate(zip(answer, expected, strict=True)) if own != other)
        with torch.inference_mode():
            token_ids = torch.tensor([[*self.prompts[position], *expected[:at]]])
            logits = self.model(token_ids, logits_to_keep=1).logits[0, -1]
        first, second = logits.topk(2)[0].tolist()
        return {"request": position, "token": at, "top_2_logit_gap": first - second, "top_logit": first}


def run(scenario: Scenario, reference: Reference) -> dict[str, Any]:
    """One scenario: how many answers are equal, and what makes it the scenario that it says it is."""
    started = time.perf_counter()
    llm = LLM(MODEL, page_size=PAGE_SIZE, **scenario.options)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    for _ in range(scenario.runs):
        outputs = llm.generate(reference.prompts, params)
    found = [reference.difference(i, output.outputs[0].token_ids) for i, output in enumerate(outputs)]
    differences = [difference for difference in found if difference is not None]
    return {
        **asdict(scenario),
        "equal": len(outputs) - len(differences),
        "of": len(outputs),
        "differences": differences,
        "preemptions": llm.stats.preemptions,
        "fewest_cached_tokens": min(output.num_cached_tokens for output in outputs),
        "kv_tokens_read": llm.stats.kv_tokens_read,
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    OUT.mkdir(exist_ok=True)
    if not (MODEL / "model.safetensors").is_file():
        save_folder(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    chats = load_demo().chats
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    reference = Reference(prompts)
    reference.load_or_compute()
    rows = []
    for scenario in SCENARIOS:
        row = run(scenario, reference)
        rows.append(row)
        facts = f"{row['preemptions']} preemptions, at least {row['fewest_cached_tokens']} tokens cached"
        print(f"{row['equal']} of {row['of']}  {scenario.name} ({facts}, {row['seconds']} s)", flush=True)
        for difference in row["differences"]:
            print(f"    {difference}", flush=True)
    figures = {"model": MODEL.name, "dtype": "float32", "page_size": PAGE_SIZE, "max_tokens": MAX_TOKENS}
    print(write_result("equality-cpu", {**figures, "scenarios": rows}, "transformers"))


if __name__ == "__main__":
    main()
