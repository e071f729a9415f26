"""When memory is given back."""

from producers.gateway.edge.body_limit import TrimWatch, trim


def test_memory_goes_back_once_after_a_peak() -> None:
    watch = TrimWatch(peak_bytes=100)
    assert not watch.is_due(0)
    assert not watch.is_due(99)
    assert not watch.is_due(0), "not worth it"
    assert not watch.is_due(400)
    assert not watch.is_due(101), "it goes on"
    assert watch.is_due(80)
    assert not watch.is_due(0), "it was given back"
    assert not watch.is_due(100)
    assert watch.is_due(25)


def test_memory_is_given_back_whatever_the_c_library_is() -> None:
    trim()
