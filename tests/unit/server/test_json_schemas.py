"""Which JSON Schemas of tenants can be used, and what is said of a value that does not satisfy one."""

import pytest

from fairlane_server.json_schemas import check_schema, unmet

SCHEMA = '{"type": "object", "properties": {"age": {"type": "integer"}}, "additionalProperties": false}'


@pytest.mark.parametrize(
    "schema",
    [
        "no json",
        "[]",
        '{"type": "text"}',
        '{"pattern": "(?=a)"}',
        '{"$ref": "https://example.org/schema.json"}',
        '{"$ref": "file:///etc/passwd"}',
        '{"$ref": "#/nowhere"}',
        '{"a":' * 3_000 + "1" + "}" * 3_000,
        '{"not":' * 300 + "{}" + "}" * 300,
    ],
)
def test_a_schema_that_cannot_be_used_is_refused(schema: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        check_schema(schema)


def test_a_schema_that_can_be_used_is_accepted() -> None:
    check_schema(SCHEMA)
    check_schema('{"$defs": {"a": {"type": "string"}}, "$ref": "#/$defs/a"}')


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"age": 3}, None),
        ({"age": "secret"}, "properties/age/type"),
        ({"secret": 3}, "additionalProperties"),
        (["secret"], "type"),
    ],
)
def test_what_a_value_does_not_satisfy_is_named_without_the_value(value: object, place: str | None) -> None:
    assert unmet(value, SCHEMA) == place


def test_the_place_has_a_bounded_length() -> None:
    name = "n" * 1_000
    assert unmet({name: 1}, f'{{"properties": {{"{name}": {{"type": "string"}}}}}}') == f"properties/{'n' * 189}"


def test_a_chain_of_references_that_doubles_at_each_step_is_checked_at_once() -> None:
    defs = ",".join(
        f'"a{at}": {{"allOf": [{{"$ref": "#/$defs/a{at + 1}"}}, {{"$ref": "#/$defs/a{at + 1}"}}]}}' for at in range(60)
    )
    check_schema(f'{{"$defs": {{{defs}, "a60": {{}}}}, "$ref": "#/$defs/a0"}}')
    check_schema('{"$ref": "#"}')
