"""The table of permissions in docs/identity.md is the one in code."""

from deploy.permissions_docs import PAGE, page


def test_the_documented_permissions_are_those_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run python -m deploy.permissions_docs"
