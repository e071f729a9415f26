"""Roles of users and keys, and scopes of keys."""

from enum import StrEnum


class Role(StrEnum):
    """What an identity may do, for its own tenant: viewers and operators read; tenants and admins also send work. Only
    the command line manages keys."""

    ADMIN = "admin"
    OPERATOR = "operator"
    TENANT = "tenant"
    VIEWER = "viewer"


class Scope(StrEnum):
    """Restriction of a key. A key without scopes may do all that its role may."""

    INFERENCE = "inference"
    RESULTS = "results"
    FILES = "files"
    BATCHES = "batches"
