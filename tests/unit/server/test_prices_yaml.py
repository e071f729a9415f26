"""prices.yaml: what is accepted, and that every mistake is reported with its file, line, field and reason."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.money import NANOS_PER_UNIT, nanos_text
from fairlane.records import ModelPrices, Price
from fairlane_server.costs.price_book import LARGEST_PRICE, MOST_PRICES, check_prices
from fairlane_server.costs.prices_file import load_prices
from fairlane_server.models.models_file import load_models
from fairlane_server.yaml_config import ConfigError, YamlNode

PROJECT = Path(__file__).parents[3]
JANUARY_MS = 1_767_225_600_000

GOOD = """\
currency: EUR
prices:
  - model: words
    from: 2026-02-01T12:30:00Z
    version: "3"
    per_million_tokens: {input: 0.15, cached_input: 0.01875, output: 1}
    per_engine_second: "0.0001"
    per_image: 2.50
    per_cached_answer: 0
  - model: words
    from: 2026-01-01
    per_million_tokens: {input: 3}
  - model: pictures
    from: "2026-01-01"
    per_image: 0
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "prices.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_prices_are_read_exactly_as_they_are_written(tmp_path: Path) -> None:
    assert load_prices(write(tmp_path, GOOD), ["words", "pictures"]) == (
        ModelPrices(
            "words",
            "EUR",
            (
                Price(JANUARY_MS, None, input_nanos=3_000_000_000, cached_input_nanos=3_000_000_000),
                Price(
                    JANUARY_MS + 31 * 86_400_000 + 12 * 3_600_000 + 30 * 60_000,
                    "3",
                    input_nanos=150_000_000,
                    cached_input_nanos=18_750_000,
                    output_nanos=1_000_000_000,
                    engine_second_nanos=100_000,
                    image_nanos=2_500_000_000,
                ),
            ),
        ),
        ModelPrices("pictures", "EUR", (Price(JANUARY_MS),)),
    )


def test_the_shipped_prices_are_of_the_shipped_models_and_in_no_real_currency() -> None:
    models = [model.model for model in load_models(PROJECT / "deploy/models.yaml")]
    prices = load_prices(PROJECT / "deploy/prices.yaml", models)
    assert [one.model for one in prices] == models
    assert {one.currency for one in prices} == {"XTS"}, "of ISO 4217, for tests"
    assert (PROJECT / "deploy/prices.yaml").read_text(encoding="utf-8").startswith("# EXAMPLES")
    for one in prices:
        check_prices(one.model, one)


def test_a_file_without_prices_is_one(tmp_path: Path) -> None:
    assert load_prices(write(tmp_path, "currency: EUR\nprices: []\n"), []) == ()


def test_without_models_any_may_have_a_price(tmp_path: Path) -> None:
    assert [one.model for one in load_prices(write(tmp_path, GOOD))] == ["words", "pictures"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("currency: EUR\n", "", ":1: missing: currency"),
        ("currency: EUR", "currency: euro", r":1: currency: 'euro' does not match [A-Z]{3}"),
        ("currency: EUR", "currency: EUR\ncurrency: USD", ":2: currency: duplicate key, first on line 1"),
        ("currency: EUR", "currency: EUR\nsince: 1", ":2: since: unknown key; known here: currency, prices"),
        ("    from: 2026-01-01\n", "", ":10: prices[1]: missing: from"),
        ("model: pictures", "model: paintings", ":13: prices[2].model: unknown model 'paintings'; known: words, pict"),
        ("model: pictures", "model: ''", ":13: prices[2].model: must not be empty"),
        ('version: "3"', "version: 3", ":5: prices[0].version: must be a string, not 3 (quote it)"),
        ("from: 2026-01-01\n", "from: 2026-02-30\n", ":11: prices[1].from: day is out of range for month"),
        ('"2026-01-01"', '"2026-02-30"', ":14: prices[2].from: 2026-02-30: day is out of range for month"),
        ("12:30:00Z", "12:30:00", ":4: prices[0].from: must be a date or a UTC time, 2026-01-31 or"),
        ("12:30:00Z", "12:30:00+01:00", ":4: prices[0].from: must be a date or a UTC time"),
        ("from: 2026-01-01\n", "from: yesterday\n", ":11: prices[1].from: must be a date or a UTC time"),
        ("input: 3", "input: -3", ":12: prices[1].per_million_tokens.input: must be a decimal number from 0 on, such"),
        ("input: 3", "input: 1e-3", ":12: prices[1].per_million_tokens.input: must be a decimal number"),
        ("input: 3", "input: .nan", ":12: prices[1].per_million_tokens.input: must be a decimal number"),
        ("input: 3", "input: true", ":12: prices[1].per_million_tokens.input: must be a decimal number"),
        ("input: 3", "input: [3]", ":12: prices[1].per_million_tokens.input: must be a decimal number"),
        ("input: 3", "input: 0.0000000001", ":12: prices[1].per_million_tokens.input: must have at most 9 decimal"),
        ("input: 3", "input: 1000000000.1", ":12: prices[1].per_million_tokens.input: must be from 0 to 1000000000"),
        (
            "input: 3",
            "in: 3",
            ":12: prices[1].per_million_tokens.in: unknown key; known here: cached_input, input, out",
        ),
        ("{input: 3}", "{}", ":12: prices[1].per_million_tokens: holds no price"),
        (
            "    per_million_tokens: {input: 3}\n",
            "",
            ":10: prices[1]: holds no price; one of per_million_tokens, per_e",
        ),
        ("per_image: 0", "per_picture: 0", ":15: prices[2].per_picture: unknown key; known here: from, model, per_cac"),
        (
            'model: pictures\n    from: "2026-01-01"',
            "model: words\n    from: 2026-01-01T00:00:00Z",
            ":14: prices[2].from: words already has a price from then on, on line 10",
        ),
    ],
)
def test_a_mistake_is_reported_with_its_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    file = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError, match=re.escape(f"{file}{message}")):
        load_prices(file, ["words", "pictures"])


def test_a_model_has_a_bounded_number_of_prices(tmp_path: Path) -> None:
    entries = "".join(
        f"  - {{model: words, version: v{number}, from: 2026-01-01, per_image: 1}}\n"
        for number in range(MOST_PRICES + 1)
    )
    with pytest.raises(ConfigError, match=rf":{MOST_PRICES + 3}: prices\[{MOST_PRICES}\]: words has more than"):
        load_prices(write(tmp_path, f"currency: EUR\nprices:\n{entries}"))


@given(st.integers(0, LARGEST_PRICE * NANOS_PER_UNIT), st.integers(0, 3))
def test_a_decimal_number_keeps_every_digit(nanos: int, zeros: int) -> None:
    text = nanos_text(nanos)
    text += "0" * zeros if "." in text else ""
    assert YamlNode(Path("f"), 1, "k", float(text), text=text).decimal(9, LARGEST_PRICE) == nanos
