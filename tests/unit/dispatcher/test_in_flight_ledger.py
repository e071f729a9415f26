"""The sums of a pool by partition, however work comes and goes and whichever partitions are asked for."""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from stream_processors.dispatcher.scheduling.in_flight import ANY_PARTITION, InFlightLedger

PARTITIONS = 4
CONSUMERS = (
    (),
    (frozenset({0}),),
    (frozenset({1, 2}), frozenset({0})),
    (frozenset({0, 3}), frozenset({1, 2})),
    (frozenset(range(PARTITIONS)),),
)
OWNED = (None, frozenset[int](), frozenset({0}), frozenset({1, 2}), frozenset(range(PARTITIONS)))


@dataclass
class Plain:
    """The same sums, added up anew each time."""

    work: list[tuple[int, int, bool]] = field(default_factory=list)

    def within(self, partitions: frozenset[int] | None) -> tuple[int, int, int, int]:
        counted = [
            (tokens, is_own)
            for partition, tokens, is_own in self.work
            if partitions is None or partition in partitions or partition == ANY_PARTITION
        ]
        own = [tokens for tokens, is_own in counted if is_own]
        return sum(tokens for tokens, _ in counted), len(counted), sum(own), len(own)

    def loads(self) -> Counter[int]:
        loads: Counter[int] = Counter()
        for partition, tokens, _ in self.work:
            loads[partition] += tokens
        return loads


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("comes"), st.integers(ANY_PARTITION, PARTITIONS - 1), st.integers(0, 9), st.booleans()),
        st.tuples(st.just("goes"), st.integers(0, 100)),
        st.tuples(st.just("within"), st.sampled_from(OWNED)),
        st.tuples(st.just("chosen"), st.sampled_from(CONSUMERS), st.sampled_from((2, PARTITIONS)), st.booleans()),
    ),
    max_size=120,
)


@given(steps=STEPS)
def test_the_sums_kept_are_the_sums_there_are(steps: list[tuple[object, ...]]) -> None:
    books, plain = InFlightLedger(), Plain()
    for step in steps:
        match step:
            case ("comes", int(partition), int(tokens), bool(is_own)):
                books.count(partition, tokens, 1, is_own=is_own)
                plain.work.append((partition, tokens, is_own))
            case ("goes", int(number)) if plain.work:
                partition, tokens, is_own = plain.work.pop(number % len(plain.work))
                books.count(partition, -tokens, -1, is_own=is_own)
            case ("within", partitions):
                assert partitions is None or isinstance(partitions, frozenset)
                held = books.within(partitions)
                found = held.tokens, held.items, held.own_tokens, held.own_items
                assert found == plain.within(partitions)
            case ("chosen", consumers, int(count), bool(is_new_round)):
                assert isinstance(consumers, tuple)
                existing = [partitions for one in consumers if (partitions := one & set(range(count)))]
                existing = existing or [frozenset({partition}) for partition in range(count)]
                loads = plain.loads()
                if is_new_round:
                    books.start_round()
                chosen = books.choose(count, consumers)
                owner = next(partitions for partitions in existing if chosen in partitions)
                assert sum(loads[one] for one in owner) == min(
                    sum(loads[one] for one in partitions) for partitions in existing
                )
                if is_new_round:
                    assert loads[chosen] == min(loads[one] for one in owner)
                assert books.choose(count, (owner,)) == chosen, "in one round"


def test_equals_take_turns() -> None:
    books = InFlightLedger()
    for _ in range(2_000):
        chosen = books.choose(3, None)
        books.count(chosen, 10, 1, is_own=True)
        books.count(chosen, -10, -1, is_own=True)
    assert [books.choose(3, None) for _ in range(3)] == [2, 0, 1]
