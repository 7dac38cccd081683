"""Options of how answers are sampled. No torch here."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from trunkattn.cli.options.from_dataclass import fields_of
from trunkattn.cli.options.kinds import (
    SAMPLING,
    flag_option,
    integer,
    integer_option,
    number_option,
    text_option,
    texts_option,
)

if TYPE_CHECKING:
    from trunkattn.engine import SamplingParams, StructuredOutputsParams


@dataclass(frozen=True)
class SamplingOptions:
    """How answers are sampled. An option with the name of a field of `SamplingParams` sets that field, which checks its
    value; `sampling_params` makes the others. The names are vLLM's.
    """

    max_tokens: Annotated[int, integer_option(SAMPLING, "Most tokens of an answer.")] = 128
    temperature: Annotated[
        float, number_option(SAMPLING, "0: always the most likely token. 1: sample from the model's own distribution.")
    ] = 0.0
    top_p: Annotated[
        float, number_option(SAMPLING, "Keep the fewest most likely tokens whose probabilities sum to this.")
    ] = 1.0
    top_k: Annotated[int, integer_option(SAMPLING, "Keep this many most likely tokens; 0 keeps all.")] = 0
    min_p: Annotated[
        float, number_option(SAMPLING, "Drop tokens less likely than this share of the most likely one's probability.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, number_option(SAMPLING, "Above 1: make tokens of the prompt and the answer less likely.")
    ] = 1.0
    presence_penalty: Annotated[
        float, number_option(SAMPLING, "From -2 to 2: taken from the logits of tokens that the answer has.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, number_option(SAMPLING, "From -2 to 2: taken as many times as the answer has the token.")
    ] = 0.0
    n: Annotated[int, integer_option(SAMPLING, "Answers per prompt; the prompt is computed once.", "--n", "-n")] = 1
    seed: Annotated[int | None, integer_option(SAMPLING, "The same seed gives the same answers.")] = None
    min_tokens: Annotated[int, integer_option(SAMPLING, "Nothing ends an answer before this many tokens.")] = 0
    stop: Annotated[
        list[str] | None,
        texts_option(SAMPLING, "A text that ends an answer.", metavar="TEXT"),
    ] = None
    include_stop_str_in_output: Annotated[
        bool, flag_option(SAMPLING, "--include-stop-str-in-output", "Keep the text that ended an answer.")
    ] = False
    bad_words: Annotated[list[str] | None, texts_option(SAMPLING, "A text that no answer has.")] = None
    logit_bias: Annotated[
        list[str] | None,
        texts_option(SAMPLING, "ID=NUMBER: add the number to the logit of a token id.", metavar="ID=NUMBER"),
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None,
        text_option(SAMPLING, "The only token ids of an answer. Repeat it.", metavar="ID", parser=integer),
    ] = None
    logprobs: Annotated[
        int | None,
        integer_option(SAMPLING, "Report the log-probabilities of this many most likely tokens at each step."),
    ] = None
    prompt_logprobs: Annotated[
        int | None, integer_option(SAMPLING, "With --json: the same for each token of the prompt.")
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        integer_option(SAMPLING, "Keep this many last tokens of a prompt; -1: as many as the model accepts."),
    ] = None
    ignore_eos: Annotated[
        bool,
        flag_option(SAMPLING, "--ignore-eos", "Continue after the end-of-sequence token."),
    ] = False
    keep_special_tokens: Annotated[
        bool, flag_option(SAMPLING, "--keep-special-tokens", "Show special tokens in the text.")
    ] = False
    json_schema: Annotated[
        Path | None,
        text_option(SAMPLING, "A file with a JSON schema that answers follow.", metavar="PATH"),
    ] = None
    regex: Annotated[str | None, text_option(SAMPLING, "A regular expression that answers match.")] = None
    choice: Annotated[list[str] | None, texts_option(SAMPLING, "An answer to choose from.")] = None
    grammar: Annotated[
        Path | None,
        text_option(SAMPLING, "A file with a Lark grammar that answers follow.", metavar="PATH"),
    ] = None

    def sampling_params(self) -> "SamplingParams":
        """The parameters of these options.

        Raises:
            TypeError, ValueError: `name=value: expected ...`, of the option with that name.
        """
        from trunkattn.engine import SamplingParams, StructuredOutputsParams

        given = fields_of(SamplingParams, self)
        given["logit_bias"] = _biases(self.logit_bias) if self.logit_bias else None
        forms = {
            "json": _read("json_schema", self.json_schema),
            "regex": self.regex,
            "choice": self.choice,
            "grammar": _read("grammar", self.grammar),
        }
        forms = {name: form for name, form in forms.items() if form is not None}
        if forms:
            given["structured_outputs"] = form = StructuredOutputsParams(**forms)  # type: ignore[arg-type]
            _check_form(form)
        return SamplingParams(**given, skip_special_tokens=not self.keep_special_tokens)


def _biases(texts: list[str]) -> dict[int, float]:
    """Texts of ID=NUMBER as numbers by token id."""
    found: dict[int, float] = {}
    for text in texts:
        token_id, _, bias = text.partition("=")
        try:
            number, value = int(token_id), float(bias)
        except ValueError:
            raise ValueError(f"logit_bias={text!r}: expected ID=NUMBER, such as 42=-1.5") from None
        if number in found:
            raise ValueError(f"logit_bias={text!r}: expected each token id once")
        found[number] = value
    return found


def _check_form(form: "StructuredOutputsParams") -> None:
    """Raises ValueError, of the option that gave it, if a form of answers cannot be compiled."""
    from trunkattn.engine.forms.grammar import check_grammar
    from trunkattn.engine.forms.limits import FormLimits

    try:
        check_grammar(form, FormLimits())
    except ValueError as error:
        message = re.sub(r"^structured_outputs(: |\.)", "", str(error))
        raise ValueError(re.sub(r"^json\b", "json_schema", message)) from error


def _read(name: str, path: Path | None) -> str | None:
    """The text of an option's file."""
    try:
        return None if path is None else path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}={str(path)!r}: expected a UTF-8 text file ({error})") from error
