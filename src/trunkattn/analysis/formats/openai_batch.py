"""OpenAI's batch files: the input, the output, or both in one folder, which are joined by `custom_id`."""

from collections.abc import Iterable, Iterator, Mapping

from trunkattn.analysis.formats.base import Entry, Fields, Format, Line, first, optional_text, require
from trunkattn.analysis.formats.bodies import ResponseFacts, facts_of_response, num_answers_of, prompts_of
from trunkattn.analysis.records import SkippedLine


def recognises(fields: Fields) -> bool:
    """Whether an object is a line of an input or an output file."""
    return "custom_id" in fields and ("body" in fields or "response" in fields)


def parse(lines: Iterable[Line]) -> Iterator[Entry | SkippedLine]:
    """Requests in the input's order, with the lengths of their answers where the output is there. Those that failed are
    left out."""
    inputs: dict[str, Entry | None] = {}  # None: of other work
    outputs: dict[str, tuple[int, ResponseFacts]] = {}
    failed: set[str] = set()
    for line in lines:
        try:
            require(line.fields, "custom_id")
            name = str(line.fields["custom_id"])
            if "body" in line.fields:
                if name in inputs:
                    raise ValueError("its custom_id comes a second time: expected one input for each")
                inputs[name] = _entry(line)
            elif _failed(line.fields):
                failed.add(name)
            elif first(line.fields, "response.body") is not None:
                outputs[name] = line.number, facts_of_response(line.fields["response"]["body"])
        except ValueError as error:
            yield SkippedLine(line.number, str(error))
    for name, entry in inputs.items():
        _, outcome = outputs.pop(name, (0, ResponseFacts(None, None, None, None)))
        if entry is not None and name not in failed:
            entry.num_prompt_tokens, entry.num_output_tokens, entry.answer, _ = outcome
            yield entry
    for number, _ in outputs.values():
        yield SkippedLine(
            number, "it has an answer without its prompt: put the batch's input file into the same folder"
        )


def _failed(fields: Fields) -> bool:
    """Whether a line tells of an error instead of an answer."""
    status = first(fields, "response.status_code")
    return bool(fields.get("error")) or (isinstance(status, int) and status >= 400)


def _entry(line: Line) -> Entry | None:
    """The generation that a line asks for; None for embeddings and other work."""
    body = line.fields["body"]
    if not isinstance(body, Mapping):
        raise ValueError("body: expected an object with messages or a prompt")
    if any(word in str(line.fields.get("url", "")) for word in ("embeddings", "moderations")):
        return None
    prompts = prompts_of(body)
    if len(prompts) > 1:
        raise ValueError(f"prompt has {len(prompts)} entries: expected one for each line of a batch")
    return Entry(line.number, prompts[0], num_answers=num_answers_of(body), model=optional_text(body, "model"))


FORMAT = Format("openai-batch", "OpenAI batch file", recognises, parse)
