"""The demo's conversations: 32 customers of one shop, in two departments.

Their prompts form the prefix tree that the demo shows: all begin with the shop's guide, half of them continue with each
department's notes, and only the question is a customer's own.
"""

import json
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class DemoWorkload:
    """One conversation per customer. Each of the three tuples has one entry per customer.

    Attributes:
        chats: messages as chat templates expect them, `{"role": ..., "content": ...}`: the system message (shop, then
            department) and the customer's question.
        customers: first names.
        departments: name of the department that each customer asks.
    """

    chats: tuple[list[dict[str, str]], ...]
    customers: tuple[str, ...]
    departments: tuple[str, ...]


def load_demo() -> DemoWorkload:
    """Reads the demo's text from the package."""
    folder = files("trunkattn.cli.demo") / "data"
    shop = (folder / "shop.md").read_text(encoding="utf-8")
    notes = {
        department["name"]: department["text"]
        for department in json.loads((folder / "departments.json").read_text(encoding="utf-8"))
    }
    questions = json.loads((folder / "questions.json").read_text(encoding="utf-8"))
    chats = tuple(
        [
            {"role": "system", "content": f"{shop}\n{notes[question['department']]}"},
            {"role": "user", "content": question["question"]},
        ]
        for question in questions
    )
    return DemoWorkload(
        chats=chats,
        customers=tuple(question["customer"] for question in questions),
        departments=tuple(question["department"] for question in questions),
    )
