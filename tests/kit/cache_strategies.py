"""Hypothesis strategies for cache keys: tenants and hostile texts."""

from hypothesis import strategies as st

from fairlane.names import TENANT_PATTERN

tenants = st.from_regex(TENANT_PATTERN, fullmatch=True)


# Separators, NULs, other tenants' names and halves of characters among them.
hostile = st.one_of(
    st.text(),
    st.text(alphabet=":|/\0{}'\"\\\n\r acme\ud800\u202e"),
    tenants,
    st.builds("cache:retrieval:{}:{}".format, tenants, st.text()),
)
