"""The form of answers that a request asks for, by `response_format` or by `structured_outputs`."""

from trunkattn.engine.sampling_params import StructuredOutputsParams
from trunkattn.server.bodies.protocol import ResponseFormat, Sampling
from trunkattn.server.errors import BadRequest, bad_request


def form_of(body: Sampling) -> StructuredOutputsParams | None:
    """The form that a body asks for; None: any text. Raises BadRequest if it gives several forms, or an
    incomplete one."""
    form = None if body.response_format is None else _of_response_format(body.response_format)
    wanted = body.structured_outputs
    if wanted is None:
        return form
    if form is not None:
        raise BadRequest("response_format is given with structured_outputs: expected one of them", "response_format")
    with bad_request("structured_outputs"):
        return StructuredOutputsParams(wanted.json_, wanted.regex, wanted.choice, wanted.grammar, wanted.json_object)


def field_of_form(body: Sampling) -> str:
    """The field that says what form the answer has."""
    return "response_format" if body.structured_outputs is None else "structured_outputs"


def _of_response_format(wanted: ResponseFormat) -> StructuredOutputsParams | None:
    if wanted.json_schema is not None and wanted.type != "json_schema":
        message = f"response_format.type={wanted.type!r}: expected 'json_schema' where a json_schema is given"
        raise BadRequest(message, "response_format.type")
    if wanted.schema_ is not None and wanted.type != "json_object":
        message = f"response_format.type={wanted.type!r}: expected 'json_object' where a schema stands beside it"
        raise BadRequest(message, "response_format.type")
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return StructuredOutputsParams(json=wanted.schema_ or {"type": "object"})
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise BadRequest("response_format.json_schema.schema is missing: expected a JSON schema", "response_format")
    return StructuredOutputsParams(json=wanted.json_schema.schema_)
