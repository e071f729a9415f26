"""How often the ingestion of a document was put off."""

from deploy.migrations.statements import execute

revision = "0025"
down_revision = "0024"

# With a default, so that a gateway and an ingest process of the revision before can go on while they are replaced.
STATEMENTS = (
    "ALTER TABLE document_uploads ADD COLUMN retries integer NOT NULL DEFAULT 0",
    "COMMENT ON COLUMN document_uploads.retries IS 'how often it was given back, as while the embedder is unavailable'",
)


def upgrade() -> None:
    """Add the column; the right to change it is applied after the revisions."""
    execute(*STATEMENTS)
