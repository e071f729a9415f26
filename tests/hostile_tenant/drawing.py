"""Names to try, drawn at random: an attacker's own, those of others, and what lies just beside both."""

import re
from collections.abc import Callable, Mapping, Sequence
from random import Random

from tests.hostile_tenant.oracle import Action, Actor, Kind, Need, Oracle
from tests.hostile_tenant.world import INTERNAL_TOPICS, World

OWN_PART, OTHERS_PART = 0.3, 0.3
"""Parts of the names that are drawn as they are; the rest is borderline."""
MOST_CHARACTERS = 400

# Letters that look like another one, or that fold, normalise or compose to it.
_ALIKE = {
    "a": "\u0430\uff41\u00e4",
    "c": "\u0441\uff43\u00e7",
    "e": "\u0435\uff45\u00e9",
    "i": "\u0456\u0131\u00ec",
    "o": "\u043e\u03bf\u00f6",
    "p": "\u0440\uff50",
    "s": "\u0455\u017f\uff53",
    "t": "\uff54\u0442",
    "k": "\u212a",
    ".": "\u2024\uff0e\u3002",
    "-": "\u2010\u2212\uff0d",
    "_": "\uff3f\u203f",
    "2": "\uff12\u00b2",
}
_INVISIBLE = ("\0", "\u200b", "\u200d", "\u00ad", "\ufeff", "\u0301", "\u202e", "\n", " ", "\t")
_ENDINGS = (
    *("2", "-2", "_2", "_", ".", "-", ".x", "..", ".search", "-search", "*", ".*", "$", "/", "%00", "\u00b2"),
    *("\0", "\n", " ", ".high", ".1", "#", "?", "\\", "'--"),
)
_WHOLE = ("", "*", ".", "..", "kafka-cluster", "_", "null", ".*", "^.*$", "requests.*", "User:*", "\0")
_SEPARATORS = re.compile(r"[._-]")


class Names:
    """Draws names for each actor."""

    def __init__(self, world: World, oracle: Oracle) -> None:
        self._world = world
        self._oracle = oracle
        self._owned: dict[tuple[Actor, Kind], Sequence[str]] = {}

    def draw(self, rng: Random, actor: Actor, kind: Kind) -> str:
        """Any name of this kind, of at most MOST_CHARACTERS."""
        known = self._world.names[kind]
        chance = rng.random()
        owned = self.owned(actor, kind)
        if owned and chance < OWN_PART:
            return rng.choice(owned)
        if chance < OWN_PART + OTHERS_PART:
            return rng.choice(known)
        base = rng.choice(owned if owned and rng.random() < 0.5 else known)
        return self._borderline(rng, base)[:MOST_CHARACTERS]

    def draw_existing(self, rng: Random, actor: Actor, kind: Kind) -> str:
        """A name of something that exists."""
        owned = self.owned(actor, kind)
        return rng.choice(owned if owned and rng.random() < OWN_PART else self._world.names[kind])

    def owned(self, actor: Actor, kind: Kind) -> Sequence[str]:
        """The existing names that the actor has some right on."""
        key = actor, kind
        if key not in self._owned:
            self._owned[key] = [
                name
                for name in self._world.names[kind]
                if self._oracle.permits(actor, (Need(Action.DESCRIBE, kind, name),))
            ]
        return self._owned[key]

    def _borderline(self, rng: Random, name: str) -> str:
        change = rng.choice(_CHANGES)
        changed = change(rng, name, self._world.prefixes)
        if rng.random() < 0.2:
            changed = rng.choice(_CHANGES)(rng, changed, self._world.prefixes)
        return changed


Change = Callable[[Random, str, Sequence[str]], str]


def _shorter(rng: Random, name: str, _prefixes: Sequence[str]) -> str:
    return name[: rng.randrange(len(name))] if name else name


def _longer(rng: Random, name: str, _prefixes: Sequence[str]) -> str:
    return name + rng.choice(_ENDINGS)


def _much_longer(rng: Random, name: str, _prefixes: Sequence[str]) -> str:
    return name + rng.choice("ax2.") * rng.choice((200, 249, MOST_CHARACTERS))


def _other_case(rng: Random, name: str, _prefixes: Sequence[str]) -> str:
    return rng.choice((str.upper, str.title, str.capitalize, str.swapcase))(name)


def _look_alike(rng: Random, name: str, _prefixes: Sequence[str]) -> str:
    places = [at for at, letter in enumerate(name) if letter in _ALIKE]
    if not places:
        return name + rng.choice(_INVISIBLE)
    at = rng.choice(places)
    return name[:at] + rng.choice(_ALIKE[name[at]]) + name[at + 1 :]


def _invisible(rng: Random, name: str, _prefixes: Sequence[str]) -> str:
    at = rng.randrange(len(name) + 1)
    return name[:at] + rng.choice(_INVISIBLE) + name[at:]


def _other_pipeline(rng: Random, name: str, prefixes: Sequence[str]) -> str:
    prefix = rng.choice(prefixes)
    return name.removeprefix(prefix) if prefix and name.startswith(prefix) else (prefix or "staging.") + name


def _other_separator(rng: Random, name: str, _prefixes: Sequence[str]) -> str:
    found = [*_SEPARATORS.finditer(name)]
    if not found:
        return f".{name}"
    at = rng.choice(found).start()
    return name[:at] + rng.choice((".", "_", "-", "", "..")) + name[at + 1 :]


def _lost_head(rng: Random, name: str, _prefixes: Sequence[str]) -> str:
    return name[rng.randrange(len(name) + 1) :]


def _doubled_part(rng: Random, name: str, _prefixes: Sequence[str]) -> str:
    parts = name.split(".")
    at = rng.randrange(len(parts))
    return ".".join([*parts[:at], parts[at], *parts[at:]])


def _special(rng: Random, _name: str, _prefixes: Sequence[str]) -> str:
    return rng.choice((*INTERNAL_TOPICS, *_WHOLE))


_CHANGES: tuple[Change, ...] = (
    *(_shorter, _longer, _longer, _much_longer, _other_case, _look_alike, _invisible),
    *(_other_pipeline, _other_separator, _lost_head, _doubled_part, _special),
)

CHANGES: Mapping[str, Change] = {change.__name__.removeprefix("_"): change for change in dict.fromkeys(_CHANGES)}
"""Every way in which a borderline name is made of another one."""
