"""The examples of docs/openai.md, run as they stand there, print what stands there."""

import contextlib
import io
import re
from collections.abc import Iterator

import pytest

from deploy.local.layout import PROJECT_ROOT
from fairlane.records import InferenceRequest, PassageReference
from tests.kit.openai_kit import KEY, Script, ScriptedSubmitter, ScriptedWaiting, build, serving

DOCUMENT = (PROJECT_ROOT / "docs" / "openai.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
URL = "http://127.0.0.1:8080"


class Librarian(ScriptedSubmitter):
    """Finds a passage for whoever wants one."""

    async def submit(self, tenant: str, request: InferenceRequest) -> ScriptedWaiting:
        if request.retrieval is not None:
            found = PassageReference(f"{request.retrieval.collection}/france.md#0", 0.03)
            self.scripts.append(Script(outcome={"passages": (found,)}))
        return await super().submit(tenant, request)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(build(Librarian())) as url:
        yield url


def test_every_example_says_what_it_prints() -> None:
    assert len(EXAMPLES) == DOCUMENT.count("```python")


# The client is left to the garbage collector, as in a script.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize(("code", "output"), EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_prints_what_the_document_says(code: str, output: str, url: str) -> None:
    assert URL in code
    assert f'api_key="{KEY}"' in code
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code.replace(URL, url), "openai.md", "exec"), {})  # noqa: S102 - ours
    assert printed.getvalue() == output
