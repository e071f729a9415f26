"""Local quotas that must not be asked."""

from stream_processors.dispatcher.admission.quotas import Exceeded


class NobodyIsAsked:
    """Stands in for the local quotas where Redis must answer."""

    async def take(self, charges: object) -> list[Exceeded | None]:
        raise AssertionError("Redis was there")

    async def give_back(self, charges: object) -> None:
        raise AssertionError("Redis was there")

    async def hand_over(self, charges: object) -> None:
        raise AssertionError("Redis was there")
