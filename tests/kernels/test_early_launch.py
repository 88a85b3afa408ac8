"""Kernels that are launched before the one ahead of them ends: each waits before it touches what others write."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsv4dist.kernels

SOURCES = sorted((Path(dsv4dist.kernels.__file__).parent / "_triton").glob("*.py"))
WAITS = {"wait_for_previous", "wait_for_previous_gluon"}
READ_WEIGHTS_FIRST = {
    "hopper_linear_kernel",
    "_vector_kernel",
    "_rms_norm_kernel",
    "_qr_kv_norm_kernel",
}
"""These ask for weights, which no kernel writes, and wait before everything else."""


def names_called(node: ast.AST) -> set[str]:
    calls = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
    return {one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in calls}


def launched_early() -> Iterator[str]:
    """Kernels launched with `**early_launch(device)`, or with a dictionary into which that went."""
    for source in SOURCES:
        nodes = list(ast.walk(ast.parse(source.read_text(encoding="utf-8"))))
        made = [one for one in nodes if isinstance(one, ast.Assign) and "early_launch" in names_called(one.value)]
        options = {ast.unparse(target) for one in made for target in one.targets}
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                unpacked = [keyword.value for keyword in node.keywords if keyword.arg is None]
                if any("early_launch" in names_called(one) or ast.unparse(one) in options for one in unpacked):
                    yield ast.unparse(node.func.value)


def functions() -> dict[str, ast.FunctionDef]:
    trees = [ast.parse(source.read_text(encoding="utf-8")) for source in SOURCES]
    return {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}


KERNELS = sorted(set(launched_early()))


def test_kernels_were_found() -> None:
    assert len(KERNELS) > 15
    assert set(KERNELS) >= {*READ_WEIGHTS_FIRST, "_fill_kernel", "sparse_decode_hopper_kernel"}


@pytest.mark.parametrize("kernel", KERNELS)
def test_it_waits_first(kernel: str) -> None:
    """The wait stands where every program comes by, and nothing is read or written before."""
    body = functions()[kernel].body
    places = [index for index, statement in enumerate(body) if names_called(statement) & WAITS]
    assert places, f"{kernel} never waits"
    if kernel in READ_WEIGHTS_FIRST:
        before = [statement for statement in body[: places[0]] if names_called(statement) & {"store", "atomic_add"}]
        assert not before
        return
    first = body[places[0]]
    assert isinstance(first, ast.Expr), f"{kernel} waits under a condition"
    assert isinstance(first.value, ast.Call)
    docstring = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    assert places[0] == int(docstring), f"{kernel} does something before it waits"
