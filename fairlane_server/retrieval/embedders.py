"""The embedder of a deployment, from the settings: collections and queries must share one."""

from fairlane.names import is_name
from fairlane.settings import Settings
from fairlane_server.retrieval.embedder import Embedder, EmbedderError, QueryEmbedder


def embedder_for(settings: Settings) -> Embedder:
    """The embedder for ingestion; the caller closes it. Raises EmbedderError when a setting or the model is missing."""
    match settings.retrieval_embedder:
        case "static":
            from fairlane_server.retrieval.static_embedder import StaticEmbedder

            return StaticEmbedder(settings.models_dir / settings.retrieval_embedder_path)
        case "openai":
            from fairlane_server.retrieval.openai_embedder import OpenAiEmbedder, OpenAiServer

            return OpenAiEmbedder(OpenAiServer(*_server(settings)))
        case "pool":
            from fairlane.client.sync import Client
            from fairlane_server.retrieval.pool_embedder import PoolEmbedder, PoolModel

            return PoolEmbedder(Client(_tenant(settings), settings=settings), PoolModel(*_model(settings)))


def query_embedder_for(settings: Settings) -> QueryEmbedder:
    """The embedder for queries; the caller closes it. Otherwise like ``embedder_for``."""
    match settings.retrieval_embedder:
        case "static":
            from fairlane_server.retrieval.static_embedder import StaticEmbedder

            return StaticEmbedder(settings.models_dir / settings.retrieval_embedder_path)
        case "openai":
            from fairlane_server.retrieval.openai_embedder import OpenAiQueryEmbedder, OpenAiServer

            return OpenAiQueryEmbedder(OpenAiServer(*_server(settings)))
        case "pool":
            from fairlane.client.aio import AsyncClient
            from fairlane_server.retrieval.pool_embedder import PoolModel, PoolQueryEmbedder

            return PoolQueryEmbedder(AsyncClient(_tenant(settings), settings=settings), PoolModel(*_model(settings)))


def _model(settings: Settings) -> tuple[str, int]:
    return settings.retrieval_embedder_model, settings.retrieval_embedder_dimensions


def _server(settings: Settings) -> tuple[str, str, int, str | None]:
    if settings.retrieval_embedder_url is None:
        raise EmbedderError("RETRIEVAL_EMBEDDER_URL is needed with RETRIEVAL_EMBEDDER=openai")
    key = settings.retrieval_embedder_key
    return settings.retrieval_embedder_url, *_model(settings), key.get_secret_value() if key else None


def _tenant(settings: Settings) -> str:
    tenant = settings.retrieval_embedder_tenant
    if tenant is None or not is_name(tenant):
        raise EmbedderError("RETRIEVAL_EMBEDDER_TENANT must name a tenant with RETRIEVAL_EMBEDDER=pool")
    return tenant
