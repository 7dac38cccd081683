"""The demo's conversations, and the prefix tree that their tokens form."""

from collections import Counter

import pytest
from transformers import AutoTokenizer

from trunkattn.cli.demo.workload import DemoWorkload, load_demo

from ..smollm2 import gguf_file

SMOLLM2_CONTEXT = 8192


@pytest.fixture(scope="module")
def workload() -> DemoWorkload:
    return load_demo()


@pytest.fixture(scope="module")
def prompts(workload: DemoWorkload) -> list[list[int]]:
    """Token ids of each conversation, by the chat template of the demo's model."""
    gguf = gguf_file()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in workload.chats]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def shared_tokens(a: list[int], b: list[int]) -> int:
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


def test_there_are_thirty_two_customers_in_two_departments(workload: DemoWorkload) -> None:
    assert len(workload.chats) == len(set(workload.customers)) == 32
    assert Counter(workload.departments) == {"Tools and garden": 16, "Kitchen and home": 16}


def test_a_chat_is_shop_then_department_then_question(workload: DemoWorkload) -> None:
    for chat, department in zip(workload.chats, workload.departments, strict=True):
        assert [message["role"] for message in chat] == ["system", "user"]
        system = chat[0]["content"]
        assert system.startswith("You are the assistant of Fernbrook Stores")
        assert 0 < system.index("# Delivery") < system.index(f"# Advice on {department.lower()}")
        assert chat[1]["content"].endswith("?")


def test_prompts_share_the_shop_and_then_the_department(workload: DemoWorkload, prompts: list[list[int]]) -> None:
    shop: set[int] = set()
    department: set[int] = set()
    for i, a in enumerate(prompts):
        for j in range(i):
            shared = department if workload.departments[i] == workload.departments[j] else shop
            shared.add(shared_tokens(a, prompts[j]))
    assert len(shop) == 1, "the two departments part at one token"
    assert min(shop) >= 2000
    assert 150 <= min(department) - min(shop) <= 300


def test_prompts_leave_room_for_answers(prompts: list[list[int]]) -> None:
    assert max(map(len, prompts)) + 512 < SMOLLM2_CONTEXT
