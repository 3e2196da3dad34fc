"""What clients may ask of the form of an answer: `response_format`, and vLLM's `structured_outputs` and `guided_*`.

It does not know grammars. The one trick: whatever the spelling, it becomes one `StructuredOutputsParams`, together with
the name of the field that asked for it, which is what an error must name.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..decoding.grammar import StructuredOutputsParams
from ..errors import OptionError
from .refusals import Refusal

PREFIX = "structured_outputs: "
MOST_CHOICES = 1024
Schema = dict[str, Any] | bool


class Strict(BaseModel):
    """Types as in JSON, no NaN, no field that is not listed."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class JsonSchema(Strict):
    """OpenAI's wrapping of a schema. ``strict`` may say what it likes: answers always follow the schema."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Strict):
    """vLLM's ``structured_outputs``; names as in `StructuredOutputsParams`."""

    json_: Annotated[Schema | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES)] | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None


class Structured(Strict):
    """The fields of a request that are about the form of its answer."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES)] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    def wish(self) -> tuple[str, StructuredOutputsParams] | None:
        """What the answer must look like, and the field that says so. Raises Refusal for two of them or a bad one."""
        found: dict[str, dict[str, Any]] = {}
        if self.response_format is not None and self.response_format.type != "text":
            found["response_format"] = _of_format(self.response_format)
        if self.structured_outputs is not None:
            found["structured_outputs"] = self.structured_outputs.model_dump(by_alias=True, exclude_none=True)
        for kind in ("json", "regex", "choice", "grammar"):
            if (value := getattr(self, f"guided_{kind}")) is not None:
                found[f"guided_{kind}"] = {kind: value}
        if len(found) > 1:
            raise Refusal(400, f"{' and '.join(found)}: give one of them", param=next(iter(found)))
        pattern = self.guided_whitespace_pattern
        if not found:
            if pattern is not None:
                message = "guided_whitespace_pattern goes with guided_json"
                raise Refusal(400, message, param="guided_whitespace_pattern")
            return None
        ((name, given),) = found.items()
        try:
            if pattern is not None:
                given["whitespace_pattern"] = pattern
            return name, StructuredOutputsParams(**given)
        except OptionError as error:
            raise blame(name, error) from None


def _of_format(wanted: ResponseFormat) -> dict[str, Any]:
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        place = "response_format.json_schema"
        raise Refusal(400, f"{place}: type json_schema needs a schema", param=place)
    return {"json": wanted.json_schema.schema_}


def blame(name: str, error: OptionError) -> Refusal:
    """What was wrong with a wish, told in the words of whoever asked."""
    return Refusal(400, f"{name}: {str(error).removeprefix(PREFIX)}", param=name)
