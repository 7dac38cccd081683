"""The form of an answer as a grammar of llguidance, and the checks of it that need no model. No torch here."""

import json
import re
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from trunkattn.engine.forms.ends import check_ends
from trunkattn.engine.forms.limits import FormLimits, check_form, check_size, schemas_within
from trunkattn.engine.forms.numbers import separate_bounds
from trunkattn.engine.forms.schema import explain, rewrite
from trunkattn.engine.sampling_params import StructuredOutputsParams
from trunkattn.names import install_command
from trunkattn.validate import shown

_LONGEST_REASON: Final = 300
_IN_WORDS: Final = MappingProxyType({"NoExtensionBias": "there is a place in it that nothing can follow"})
_TOO_WIDE: Final = re.compile(r"[Rr]ow has \d+ items; max is \d+")
# If only one text can follow, llguidance forces the tokens that the tokenizer makes of it. A text that is the name of a
# special token would become that token: an answer that must contain the name of end-of-sequence would end there.
_EVERY_TOKEN: Final = '\n%llguidance {"no_forcing": true}'


def library() -> Any:
    """The module llguidance, which is imported when the first form is asked for. Raises ImportError."""
    try:
        import llguidance
    except ImportError as error:
        raise ImportError(
            f"structured_outputs needs the package llguidance; {install_command('structured')}"
        ) from error
    return llguidance


class FormGrammar(NamedTuple):
    """The form that a request asks for.

    Attributes:
        name: the parameter that gives it, such as "json" or "regex".
        value: the value of that parameter.
        grammar: the form as a grammar.
        schema: the JSON schema that the grammar contains; None if it has none.
    """

    name: str
    value: Any
    grammar: str
    schema: Any = None

    def refusal(self, reason: str | None) -> str:
        """The message that the form cannot be compiled."""
        if reason is not None and self.schema is not None:
            reason = explain(self.schema, reason)
        reason = _in_words(reason or "")
        return f"structured_outputs: {self.name}={shown(self.value)}: expected a valid {self.name}; {reason}"


def grammar_of(form: StructuredOutputsParams, limits: FormLimits) -> FormGrammar:
    """The form as llguidance compiles it.

    Raises:
        ImportError: llguidance is missing.
        ValueError: the form is over a limit, or its schema is not JSON.
    """
    schema = None if form.json is None else _schema(form.json, limits)
    check_form(form, schema, limits)
    found = _rules_of(form, schema)
    return found._replace(grammar=library().LLMatcher.grammar_from_lark(found.grammar + _EVERY_TOKEN))


def _rules_of(form: StructuredOutputsParams, schema: Any) -> FormGrammar:
    """The form in llguidance's Lark syntax."""
    if form.json is not None:
        rewrite(schema)
        separate_bounds(schema)
        check_ends(schema)
        return FormGrammar("json", form.json, f"start: %json {json.dumps(schema)}", schema)
    if form.json_object:
        return FormGrammar("json_object", True, 'start: %json {"type": "object"}')
    if form.regex is not None:
        rules = json.loads(library().LLMatcher.grammar_from_regex(form.regex))
        return FormGrammar("regex", form.regex, rules["grammars"][0]["lark_grammar"])
    if form.choice is not None:  # one token of the grammar: llguidance limits the alternatives of a rule
        return FormGrammar("choice", form.choice, f"start: CHOICE\nCHOICE: {' | '.join(map(_quoted, form.choice))}")
    for within in schemas_within(str(form.grammar)):
        check_ends(within)
    return FormGrammar("grammar", form.grammar, str(form.grammar))


def _quoted(text: str) -> str:
    """A text in Lark's quotes. JSON has the same escapes, but it does not escape DEL, and Lark requires that."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def check_grammar(form: StructuredOutputsParams, limits: FormLimits) -> None:
    """Raises the errors of `StructuredOutputs.start` that can be found without a tokenizer."""
    found = grammar_of(form, limits)
    failure = library().LLMatcher.validate_grammar(found.grammar)
    if failure:
        raise ValueError(found.refusal(_short(failure)))


def reason_of(matcher: Any) -> str:
    """The error of a matcher in one short line, without the state that llguidance appends."""
    return _in_words(_short(matcher.get_error().partition("<state>")[0]))


def _in_words(reason: str) -> str:
    """What llguidance says, in words where a reader of its grammars alone would understand it."""
    if _TOO_WIDE.search(reason):
        return "too much may follow in one place of it, such as the names of about 500 properties that are not required"
    return _IN_WORDS.get(reason, reason)


def _short(reason: str) -> str:
    return shown(" ".join(reason.split()), most=_LONGEST_REASON)[1:-1]


def _schema(given: Any, limits: FormLimits) -> Any:
    """A schema as plain JSON values."""
    check_size(given, limits)
    try:
        return json.loads(given if isinstance(given, str) else json.dumps(dict(given)), parse_constant=_no_constant)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs: json={shown(given)}: expected a JSON schema; {error}") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
