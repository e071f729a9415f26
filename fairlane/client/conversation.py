"""Conversations: each turn is sent with its new messages only."""

from collections.abc import Awaitable, Callable
from typing import cast

from fairlane.client.handle import AsyncHandle, Handle, HandleT
from fairlane.client.requests import RequestFields, build_request, new_request_id
from fairlane.client.text_stream import AsyncTextStream, TextStream
from fairlane.errors import FairlaneError
from fairlane.outcomes import Outcome
from fairlane.records import InferenceReply, InferenceRequest, Message

_PER_TURN = ("messages", "prompt", "request_id", "stream")


class _Turns:
    """Shared part of both conversations, without waiting."""

    def __init__(self, system: str | None, fields: RequestFields) -> None:
        for name in _PER_TURN:
            if fields.get(name) is not None:
                raise ValueError(f"{name}: is another one for each turn; give it the text alone")
        self._fields = fields
        self._system = () if system is None else (Message("system", system),)
        self._id = fields.get("conversation_id") or new_request_id()
        self._after = fields.get("conversation_after")
        self._next("a first look for mistakes")

    @property
    def conversation_id(self) -> str:
        """Its name, with which the same tenant can continue it later and elsewhere."""
        return self._id

    @property
    def after(self) -> str | None:
        """The request id of the last turn that was answered: the next one comes after it."""
        return self._after

    def _next(self, text: str) -> InferenceRequest:
        fields = {
            **self._fields,
            "messages": (*self._system, Message("user", text)),
            "conversation_id": self._id,
            "conversation_after": self._after,
        }
        return build_request(**cast("RequestFields", fields))

    def _followed(self, handle: HandleT) -> HandleT:
        """The same; once it is answered the next turn comes after it."""

        def answered() -> None:
            try:
                reply = handle.replied.get()
            except FairlaneError:
                return
            # A very long turn has no record of it in the reply: none can come after it.
            if reply.outcome == Outcome.OK and reply.turn is not None:
                self._after = handle.request_id

        handle.replied.when_done(answered)
        return handle


class Conversation(_Turns):
    """A conversation for threads, one turn at a time. Made by :meth:`Client.conversation`."""

    def __init__(
        self,
        submit: Callable[[InferenceRequest], Handle],
        stream: Callable[[InferenceRequest, float | None, Callable[[InferenceRequest], Handle]], TextStream],
        system: str | None,
        fields: RequestFields,
    ) -> None:
        super().__init__(system, fields)
        self._submit = submit
        self._open = stream

    def ask(self, text: str, timeout: float | None = None) -> InferenceReply:
        """Say this, and wait for the answer up to ``timeout`` seconds; see :meth:`Handle.result` for what it raises.

        A turn that was not answered is not part of the conversation. One that is answered after the timeout is.
        """
        return self.submit(text).result(timeout)

    def submit(self, text: str) -> Handle:
        """Send a message; the answer arrives at the handle. A turn sent before that answer does not include it."""
        return self._follow(self._next(text))

    def stream(self, text: str, timeout: float | None = None) -> TextStream:
        """Say this and iterate the answer as it is made; see :meth:`Client.stream`."""
        return self._open(self._next(text), timeout, self._follow)

    def _follow(self, request: InferenceRequest) -> Handle:
        return self._followed(self._submit(request))


class AsyncConversation(_Turns):
    """A conversation for asyncio; see :class:`Conversation`. Made by :meth:`AsyncClient.conversation`."""

    def __init__(
        self,
        submit: Callable[[InferenceRequest], Awaitable[AsyncHandle]],
        stream: Callable[
            [InferenceRequest, float | None, Callable[[InferenceRequest], Awaitable[AsyncHandle]]], AsyncTextStream
        ],
        system: str | None,
        fields: RequestFields,
    ) -> None:
        super().__init__(system, fields)
        self._submit = submit
        self._open = stream

    async def ask(self, text: str, timeout: float | None = None) -> InferenceReply:
        """Say this, and wait for the answer; see :meth:`Conversation.ask`."""
        return await (await self.submit(text)).result(timeout)

    async def submit(self, text: str) -> AsyncHandle:
        """Say this; see :meth:`Conversation.submit`."""
        return await self._follow(self._next(text))

    def stream(self, text: str, timeout: float | None = None) -> AsyncTextStream:
        """Say this and iterate the answer as it is made; nothing is sent before the stream is entered or iterated."""
        return self._open(self._next(text), timeout, self._follow)

    async def _follow(self, request: InferenceRequest) -> AsyncHandle:
        return self._followed(await self._submit(request))
