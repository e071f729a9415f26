"""``fairlane costs``: what is printed of sums, as a table, JSON and CSV, and which questions are none."""

import csv
import io
import json
from collections.abc import Sequence
from datetime import date
from typing import Any

import pytest

from fairlane.settings import Settings
from fairlane_server.cli import costs, main
from fairlane_server.costs.daily_sums import Group, SumQuery, UsageSum

SUMS = (
    UsageSum(("acme", date(2026, 1, 1)), "XTS", 1_250, 40, 48_210, 20_480, 0, 0, 310_500, 13_013_000),
    UsageSum(("globex", date(2026, 1, 1)), None, 2, 0, 20, 10, 0, 1, 100, None),
)


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[SumQuery, str | None]]:
    """The questions; all are answered with SUMS."""
    questions: list[tuple[SumQuery, str | None]] = []

    def read(_settings: Settings, query: SumQuery, tenant: str | None) -> Sequence[UsageSum]:
        questions.append((query, tenant))
        return SUMS if len(query.by) == 2 and Group.TENANT in query.by else ()

    monkeypatch.setattr(costs, "read_sums", read)
    return questions


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(("costs", *arguments))
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_a_table_ends_with_the_totals(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--by", "tenant,month") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:4] == ["tenant", "month", "requests", "cached"]
    assert lines[1] == ["acme", "2026-01", "1,250", "40", "48,210", "0", "20,480", "0", "310.5", "0.013013", "XTS"]
    assert lines[2] == ["globex", "2026-01", "2", "0", "20", "0", "10", "1", "0.1", "-", "-"]
    assert [(line[0], line[-2:]) for line in lines[3:]] == [("total", ["-", "-"]), ("total", ["0.013013", "XTS"])]


def test_json_has_exact_amounts_and_the_totals(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--by", "tenant,month", "--since", "2026-01", "--json") == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (told["since"], told["until"]) == ("2026-01-01", None)
    first, second = told["costs"]
    assert (first["tenant"], first["month"], first["cost"], first["cost_nanos"], first["currency"]) == (
        *("acme", "2026-01", "0.013013"),
        *(13_013_000, "XTS"),
    )
    assert (second["cost"], second["cost_nanos"], second["currency"], second["images"]) == (None, None, None, 1)
    assert [one["currency"] for one in told["totals"]] == [None, "XTS"]


def test_csv_is_one_line_a_sum_and_no_formula(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = UsageSum(('=cmd|"x"\x1b[2J',), "XTS", 1, 0, 0, 0, 0, 0, 0, 1)
    monkeypatch.setattr(costs, "read_sums", lambda *_: (hostile,))
    assert run("--by", "caller", "--csv") == 0
    text = capsys.readouterr().out
    head, line = csv.reader(io.StringIO(text))
    assert head[:3] == ["caller", "currency", "cost"]
    assert line[:3] == ['\'=cmd|"x"\N{REPLACEMENT CHARACTER}[2J', "XTS", "0.000000001"]
    assert len(head) == len(line)


def test_options_become_the_query(asked: list[tuple[SumQuery, str | None]]) -> None:
    assert run("--by", "day,class", "--since", "2026-01-15", "--until", "2026-02", "--tenant", "acme") == 0
    options = ("--model", "m", "--version", "2", "--pool", "p", "--class", "high")
    assert run("--by", "model", *options) == 0
    assert run("--by", "caller", "--caller", "key:1") == 0
    assert asked == [
        (
            SumQuery((Group.DAY, Group.CLASS), date(2026, 1, 15), date(2026, 2, 1), {Group.TENANT: "acme"}),
            "acme",
        ),
        (
            SumQuery(
                (Group.MODEL,),
                only={Group.MODEL: "m", Group.VERSION: "2", Group.POOL: "p", Group.CLASS: "high"},
            ),
            None,
        ),
        (SumQuery((Group.CALLER,), only={Group.CALLER: "key:1"}), None),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--by colour", "--by colour: is none of tenant, model, version, pool, class, caller, day, month"),
        ("--by day,day", "--by day,day: names one twice"),
        ("--since yesterday", "--since yesterday: is neither a day (2026-01-31) nor a month (2026-01)"),
        ("--until 2026-13", "--until 2026-13: is neither a day"),
        ("--json --csv", "--json and --csv: choose one"),
        ("--by caller,model", "caller: the sums of callers are not divided by model"),
        ("--class urgent", "Invalid value for '--class'"),
        ("--tenant *", "--tenant *: no tenant can have this name"),
    ],
)
def test_a_wrong_question_is_one_line(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    assert run(*arguments.split()) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_without_postgres_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("POSTGRES_DSN", "postgresql://fairlane:hush@127.0.0.1:1/fairlane")
    assert run() == 1
    said = capsys.readouterr().err
    assert said.startswith("error: fairlane@127.0.0.1:1/fairlane: ")
    assert "hush" not in said
