"""Caught up is judged by positions; the end that a reader is told of counts as well."""

from fairlane_server.kafka.feeds import CatchUp


def test_a_place_is_caught_up_at_its_end_or_beyond_and_all_must_be() -> None:
    catch_up = CatchUp({"a": 0, "b": 5}, {"a": 3, "b": 9})
    catch_up.reached("a", 2)
    assert not catch_up.is_done
    catch_up.reached("a", 3)
    catch_up.reached("b", 8)
    assert not catch_up.is_done
    catch_up.reached("b", 12)
    assert catch_up.is_done


def test_nothing_to_read_is_caught_up_at_once() -> None:
    assert CatchUp({"a": 3, "b": 0}, {"a": 3, "b": 0}).is_done


def test_the_told_end_counts_because_markers_are_no_records() -> None:
    catch_up = CatchUp({"a": 0}, {"a": 3})
    catch_up.reached("a", 2)
    catch_up.ended("a")
    assert catch_up.is_done


def test_a_log_that_was_replaced_has_another_end() -> None:
    catch_up = CatchUp({"a": 0}, {"a": 300})
    catch_up.moved("a", 1)
    catch_up.moved("unknown", 1)
    catch_up.reached("a", 1)
    assert catch_up.is_done
