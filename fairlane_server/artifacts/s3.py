"""Artifacts below a prefix of a bucket: ``s3://bucket/prefix``."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fairlane_server.artifacts.digest import MOST_FILES, ArtifactError, ListedFile
from fairlane_server.artifacts.source import ArtifactUnavailableError, ResolvedArtifact
from fairlane_server.s3_storage import s3_store

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import S3Store

_BLOCK_BYTES = 8 << 20
_TIMEOUT_S = 30.0


class S3Source:
    """References are ``s3://bucket/prefix``; the artifact is every object whose key begins with the prefix and a slash.

    Objects may be replaced under their keys: the digest of a version says whether they were.
    """

    def __init__(
        self, endpoint: str | None = None, block_bytes: int = _BLOCK_BYTES, timeout_s: float = _TIMEOUT_S
    ) -> None:
        """``endpoint`` is that of other storage than AWS; without it, what ``AWS_ENDPOINT_URL`` says. Files are read in
        blocks, each a request that may take ``timeout_s``: a file of any size can be read, at a least rate."""
        self._endpoint = endpoint
        self._block_bytes = block_bytes
        self._timeout_s = timeout_s

    def resolve(self, reference: str) -> ResolvedArtifact:
        import obstore

        store, prefix = self._place(reference)
        files: list[ListedFile] = []
        with _explained(reference):
            for page in obstore.list(store, prefix=prefix):
                files += [ListedFile(found["path"].removeprefix(f"{prefix}/"), found["size"]) for found in page]
                if len(files) > MOST_FILES:
                    raise ArtifactError(f"{reference} has more than {MOST_FILES} objects")
        if not files:
            raise ArtifactError(f"{reference}: there are no objects below it")
        # Some clients make an empty object in place of each folder.
        folders = {str(parent) for file in files for parent in PurePosixPath(file.path).parents}
        kept = [file for file in files if file.size_bytes or file.path not in folders]
        return ResolvedArtifact(reference, reference, tuple(sorted(kept, key=lambda file: file.path.encode())))

    def blocks(self, artifact: ResolvedArtifact, file: ListedFile) -> Iterator[bytes]:
        import obstore

        store, prefix = self._place(artifact.location)
        options: GetOptions = {}
        for start in range(0, file.size_bytes, self._block_bytes):
            options["range"] = (start, min(start + self._block_bytes, file.size_bytes))
            with _explained(artifact.location):
                found = obstore.get(store, f"{prefix}/{file.path}", options=options)
                block = bytes(found.bytes())
            if found.meta["size"] != file.size_bytes:
                raise ArtifactError(f"{artifact.location}: {file.path!r} changed its size after it was listed")
            # All blocks are of one object, should it be replaced meanwhile.
            options["if_match"] = found.meta["e_tag"]
            yield block

    def _place(self, reference: str) -> "tuple[S3Store, str]":
        parts = urlsplit(reference)
        prefix = parts.path.strip("/")
        if parts.scheme != "s3" or not parts.netloc or not prefix or parts.query or parts.fragment:
            raise ArtifactError(f"{reference}: names no folder of a bucket; s3://bucket/prefix does")
        try:
            return s3_store(parts.netloc, self._endpoint, self._timeout_s), prefix
        except ValueError as error:
            raise ArtifactError(f"{reference}: {error}") from None


@contextmanager
def _explained(reference: str) -> Iterator[None]:
    from obstore import exceptions

    try:
        yield
    except (exceptions.NotFoundError, FileNotFoundError):
        raise ArtifactError(f"{reference}: there is no such object") from None
    except exceptions.PreconditionError:
        raise ArtifactUnavailableError(f"{reference}: an object was replaced while it was read") from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
        raise ArtifactError(f"{reference}: the credentials of the environment may not do this") from None
    except (exceptions.BaseError, OSError) as error:
        raise ArtifactUnavailableError(f"{reference}: {type(error).__name__}") from None
