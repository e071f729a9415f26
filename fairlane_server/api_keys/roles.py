"""What the holder of a key or a token may do."""

from enum import StrEnum


class Role(StrEnum):
    """What an identity may do, for its own tenant: a viewer and an operator read, a tenant and an admin also send work.
    Keys are managed by the command line alone."""

    ADMIN = "admin"
    OPERATOR = "operator"
    TENANT = "tenant"
    VIEWER = "viewer"


class Scope(StrEnum):
    """What a key may be narrowed to. A key without scopes may do all that its role may."""

    INFERENCE = "inference"
    RESULTS = "results"
    FILES = "files"
    BATCHES = "batches"
