"""The benchmark of answers from documents in a short version: the whole pipeline with the real model."""

import pytest

from benchmarks import grounded
from deploy.demo.documents import load_questions

pytestmark = [pytest.mark.full, pytest.mark.broker, pytest.mark.model, pytest.mark.timeout(300)]

ASKED = 4


def test_a_short_run_answers_from_the_documents_and_tells_nobody_else() -> None:
    result = grounded.run(load_questions()[5 : 5 + ASKED])

    figures = {figure.name: figure.value for figure in result.figures}
    assert len(result.runs) == ASKED
    assert figures["questions whose document was found"] == 1
    assert figures["the same of the other tenant"] == 1
    assert figures["answered right with retrieval"] >= 0.5
    assert figures["known without retrieval"] <= 0.25
    assert figures["known to another tenant with documents of its own"] == 0
    assert figures["refused to a tenant without it"] == 1
