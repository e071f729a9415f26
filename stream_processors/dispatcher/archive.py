"""Settled replies, looked up in the recorder's projection."""

from fairlane.records import InferenceReply


class NoArchive:
    """Nothing can be looked up."""

    async def find(self, tenant: str, request_id: str) -> InferenceReply | None:  # noqa: ARG002 - the protocol's
        return None
