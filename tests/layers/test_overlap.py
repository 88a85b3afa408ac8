"""Chains of a layer: in sequence where nothing is captured, with all results and in an order that they may rely on."""

from __future__ import annotations

import pytest

from dsv4dist.layers.overlap import Overlap


def test_in_sequence_without_a_capture() -> None:
    order: list[str] = []

    def chain(name: str) -> str:
        order.append(name)
        return name

    overlap = Overlap()
    assert not overlap.is_open
    main, others = overlap.run(lambda: chain("main"), [lambda: chain("first"), lambda: chain("second")], num_tokens=1)
    assert (main, others) == ("main", ["first", "second"])
    assert overlap.beside(lambda: chain("more")) == "more"
    overlap.join()
    assert order == ["main", "first", "second", "more"]


def test_a_layer_without_chains() -> None:
    overlap = Overlap()
    assert overlap.run(lambda: 1, [], num_tokens=1) == (1, [])
    overlap.join()


def test_streams_are_left_alone_outside_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting across streams in eager code can stall: what would raise at its first use is never used."""
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    overlap = Overlap([object()], main_first_tokens=8)  # type: ignore[list-item]
    assert overlap.run(lambda: 1, [lambda: 2], num_tokens=1) == (1, [2])
    assert overlap.beside(lambda: 3) == 3
    overlap.join()
