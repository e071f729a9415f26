"""What OpenAI's own client, as it is, finds at Fairlane: one suite over the routes alone and over the whole gateway."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass(frozen=True)
class Service:
    """Where it is, and what there is.

    Attributes:
        url: without ``/v1``.
        key: of a tenant.
        model: generates, the same for the same greedy request.
        embedder: embeds.
    """

    url: str
    key: str
    model: str
    embedder: str

    def client(self, **options: Any) -> openai.OpenAI:
        """One that does not retry by itself unless it is told to."""
        given: dict[str, Any] = {"api_key": self.key, "base_url": f"{self.url}/v1", "max_retries": 0} | options
        return openai.OpenAI(**given)


class OpenAISuite:
    """Subclasses have a fixture ``service``."""

    @pytest.fixture
    def client(self, service: Service) -> Iterator[openai.OpenAI]:
        with service.client() as client:
            yield client

    def test_chat(self, service: Service, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(
            model=service.model, messages=QUESTION, max_completion_tokens=16, temperature=0, user="u", store=False
        )

        assert answer.id.startswith("chatcmpl-")
        assert answer.object == "chat.completion"
        assert answer.model == service.model
        [choice] = answer.choices
        assert choice.message.role == "assistant"
        assert choice.message.content
        assert choice.finish_reason in ("stop", "length")
        assert answer.usage is not None
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 0
        assert answer.model_extra is not None
        assert answer.id == f"chatcmpl-{answer.model_extra['fairlane']['request_id']}"

    def test_an_answer_is_a_message_of_the_next_turn(self, service: Service, client: openai.OpenAI) -> None:
        first = client.chat.completions.create(model=service.model, messages=QUESTION, max_tokens=8)
        parts: ChatCompletionMessageParam = {"role": "user", "content": [{"type": "text", "text": "And of Italy?"}]}
        messages: list[Any] = [
            {"role": "developer", "content": "Be brief."},
            *QUESTION,
            first.choices[0].message,
            parts,
        ]
        assert client.chat.completions.create(model=service.model, messages=messages, max_tokens=8).choices

    def test_a_stream_says_what_the_answer_says(self, service: Service, client: openai.OpenAI) -> None:
        whole = client.chat.completions.create(model=service.model, messages=QUESTION, max_tokens=16, temperature=0)
        chunks = list(
            client.chat.completions.create(
                model=service.model,
                messages=QUESTION,
                max_tokens=16,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )

        *texts, finish, usage = chunks
        assert texts[0].choices[0].delta.role == "assistant"
        assert all(chunk.choices[0].delta.role is None for chunk in texts[1:])
        assert "".join(chunk.choices[0].delta.content or "" for chunk in texts) == whole.choices[0].message.content
        assert [chunk.choices[0].finish_reason for chunk in texts] == [None] * len(texts)
        assert finish.choices[0].finish_reason == whole.choices[0].finish_reason
        assert finish.choices[0].delta.content is None
        assert usage.choices == []
        assert usage.usage is not None
        assert whole.usage is not None
        assert usage.usage.completion_tokens == whole.usage.completion_tokens
        assert len({chunk.id for chunk in chunks}) == 1
        assert all(chunk.usage is None for chunk in chunks[:-1])

    def test_a_stream_without_usage_ends_with_its_reason(self, service: Service, client: openai.OpenAI) -> None:
        *_, last = client.chat.completions.create(
            model=service.model, messages=QUESTION, max_tokens=8, temperature=0, stream=True
        )
        assert last.choices[0].finish_reason in ("stop", "length")
        assert last.usage is None

    def test_asyncio(self, service: Service) -> None:
        async def run() -> None:
            async with openai.AsyncOpenAI(api_key=service.key, base_url=f"{service.url}/v1", max_retries=0) as client:
                whole, stream, vectors = await asyncio.gather(
                    client.chat.completions.create(model=service.model, messages=QUESTION, max_tokens=8, temperature=0),
                    client.chat.completions.create(
                        model=service.model, messages=QUESTION, max_tokens=8, temperature=0, stream=True
                    ),
                    client.embeddings.create(model=service.embedder, input="Paris"),
                )
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
                assert text == whole.choices[0].message.content
                assert len(vectors.data) == 1
                with pytest.raises(openai.NotFoundError):
                    await client.chat.completions.create(model="no-such-model", messages=QUESTION)

        asyncio.run(run())

    def test_the_clients_own_stream_helper(self, service: Service, client: openai.OpenAI) -> None:
        with client.chat.completions.stream(
            model=service.model, messages=QUESTION, max_tokens=8, temperature=0
        ) as stream:
            events = [event for event in stream if event.type == "content.delta"]
        assert events[-1].snapshot == "".join(event.delta for event in events) != ""

    def test_completions(self, service: Service, client: openai.OpenAI) -> None:
        whole = client.completions.create(
            model=service.model, prompt="The capital of France", max_tokens=8, temperature=0
        )
        assert whole.id.startswith("cmpl-")
        assert whole.object == "text_completion"
        assert whole.choices[0].finish_reason in ("stop", "length")
        chunks = client.completions.create(
            model=service.model, prompt=["The capital of France"], max_tokens=8, temperature=0, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text

    def test_embeddings(self, service: Service, client: openai.OpenAI) -> None:
        decoded = client.embeddings.create(model=service.embedder, input=["Paris", "Rome"])
        floats = client.embeddings.create(model=service.embedder, input=["Paris", "Rome"], encoding_format="float")
        raw = client.embeddings.create(model=service.embedder, input="Paris", encoding_format="base64")

        assert [item.index for item in decoded.data] == [0, 1]
        # The client says that it is a list, and hands on what came.
        text: object = raw.data[0].embedding
        assert isinstance(text, str)
        for one, other in zip(decoded.data, floats.data, strict=True):
            assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert decoded.usage.prompt_tokens == decoded.usage.total_tokens > 0

    def test_as_many_dimensions_as_there_are(self, service: Service, client: openai.OpenAI) -> None:
        size = len(client.embeddings.create(model=service.embedder, input="Paris").data[0].embedding)
        again = client.embeddings.create(model=service.embedder, input="Paris", dimensions=size)
        assert len(again.data[0].embedding) == size
        with pytest.raises(openai.BadRequestError) as raised:
            client.embeddings.create(model=service.embedder, input="Paris", dimensions=size - 1)
        assert raised.value.param == "dimensions"

    def test_models(self, service: Service, client: openai.OpenAI) -> None:
        names = [model.id for model in client.models.list()]
        assert {service.model, service.embedder} <= set(names)
        assert names == sorted(names)
        assert client.models.retrieve(service.model).object == "model"
        champion = f"{service.model}@champion"
        assert client.models.retrieve(champion).id == champion
        for unknown in ("no-such-model", f"{service.model}/no-such", f"{service.model}@no-such", "no-such@champion"):
            with pytest.raises(openai.NotFoundError) as raised:
                client.models.retrieve(unknown)
            assert raised.value.code == "model_not_found"

    def test_nobody_is_refused_before_any_work(self, service: Service) -> None:
        for key in ("nobody", "sk-" + "x" * 60):
            with (
                service.client().with_options(api_key=key) as client,
                pytest.raises(openai.AuthenticationError) as raised,
            ):
                # A body that is none either: who asks comes first.
                client.chat.completions.create(model="", messages=[])
            assert raised.value.type == "authentication_error"

    def test_a_model_that_is_not_there(self, service: Service, client: openai.OpenAI) -> None:
        for stream in (False, True):
            with pytest.raises(openai.NotFoundError) as raised:
                client.chat.completions.create(model="no-such-model", messages=QUESTION, stream=stream)
            assert raised.value.param == "model"
            assert raised.value.code == "model_not_found"

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"n": 2}, "n"),
            ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"logit_bias": {"1": 2}}, "logit_bias"),
            ({"temperature": 3}, "temperature"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"extra_body": {"best": 1}}, "best"),
            ({"extra_body": {"fairlane": {"priority": "now"}}}, "fairlane.priority"),
            ({"extra_body": {"fairlane": {"tenant": "globex"}}}, "fairlane.tenant"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
        ],
    )
    def test_what_cannot_be_done_is_refused(
        self, service: Service, client: openai.OpenAI, fields: dict[str, Any], param: str | None
    ) -> None:
        given: dict[str, Any] = {"model": service.model, "messages": QUESTION} | fields
        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(**given)
        assert raised.value.type == "invalid_request_error"
        assert raised.value.param == (param or "messages[0].content")
        assert "capital" not in str(raised.value)

    def test_headers(self, service: Service, client: openai.OpenAI) -> None:
        raw = client.chat.completions.with_raw_response.create(model=service.model, messages=QUESTION, max_tokens=4)
        answer = raw.parse()
        assert answer.id == f"chatcmpl-{raw.headers['x-request-id']}"
        assert answer._request_id == raw.headers["x-request-id"]

    def test_a_key_makes_one_run_of_two_calls(self, service: Service, client: openai.OpenAI, unique: str) -> None:
        def ask(key: str, max_tokens: int = 4) -> str:
            headers = {"Idempotency-Key": key}
            return client.chat.completions.create(
                model=service.model, messages=QUESTION, max_tokens=max_tokens, extra_headers=headers
            ).id

        with service.client(max_retries=8) as patient:
            # Its reply may take a moment to be found; until then it counts as in flight, and the client comes back.
            client, first = patient, ask(unique)
            assert ask(unique) == first
            assert ask(f"{unique}-other") != first
            with pytest.raises(openai.UnprocessableEntityError):
                ask(unique, max_tokens=5)
