"""The benchmark of searches in a short version: that it runs on real parts and finds what is there, not how fast."""

from itertools import pairwise

import pytest

from benchmarks import retrieval
from benchmarks.result import Figure
from benchmarks.retrieval import make_corpus
from deploy.models.prepare import DEFAULT_MODELS_DIR
from fairlane.settings import Settings
from fairlane_server.retrieval import pgvector_store
from fairlane_server.retrieval.static_embedder import StaticEmbedder


def test_sizes_follow_zipfs_law_and_add_up() -> None:
    found = retrieval.sizes(50, 100_000)
    assert (len(found), sum(found)) == (50, 100_000)
    assert found[0] == pytest.approx(50 * found[-1], rel=0.01)
    assert all(larger >= smaller for larger, smaller in pairwise(found))


@pytest.mark.model
def test_it_runs_and_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TENANTS", 4), ("PASSAGES", 800), ("QUERIES", 40), ("RECALL_QUERIES", 40)):
        monkeypatch.setattr(retrieval, name, value)
    monkeypatch.setattr(retrieval, "ROUNDS", 2)
    monkeypatch.setattr(retrieval, "ROUND_QUERIES", 20)
    monkeypatch.setattr(pgvector_store, "INDEX_FROM_PASSAGES", 300)

    # Held against each other in a test of its own.
    async def no_figures() -> list[Figure]:
        return []

    monkeypatch.setattr(retrieval, "embedder_figures", no_figures)

    result = retrieval.run()

    values = {figure.name: figure.value for figure in result.figures}
    assert values["recall@10, largest tenant"] >= retrieval.RECALL_AIM
    assert values["recall@10, smallest tenant (without an index)"] >= retrieval.RECALL_AIM
    alone = [values[name] for name in values if "nearest" in name or "words" in name]
    assert values["questions answered by the 10 best of both"] > max(alone)
    assert values["disk"] > 1
    assert 0 < values["retrieval of a request, 50 %"] <= values["retrieval of a request, 99 %"]
    assert values["searches per second"] > 0


@pytest.mark.model
def test_the_same_seed_makes_the_same_passages() -> None:
    settings = Settings()
    embedder = StaticEmbedder(DEFAULT_MODELS_DIR / settings.retrieval_embedder_path)
    one, other = (make_corpus(embedder, 50) for _ in range(2))
    assert [passage.text for passage in one.passages] == [passage.text for passage in other.passages]
    assert len({passage.text for passage in one.passages}) == 50
