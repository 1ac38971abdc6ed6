"""The kernels of allreduce/fixed_point/gpu_kernel.py without a GPU: compiled for each architecture, and interpreted."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.fake.device import FakeDevice

ARCHITECTURES = (80, 89, 90, 100, 120)
BLOCKS = (1, 16, 256, 2048, 4096)
POINTERS = {"float32": "*fp32", "float64": "*fp64", "int32": "*i32", "int64": "*i64"}
SHAPES = [*((block, "i32") for block in BLOCKS), (256, "i64")]
"""Block and type of the number of elements: Triton compiles a function anew for 2**31 elements or more."""


def encoders() -> list[tuple[str, dict[str, str], dict[str, Any]]]:
    """(name, the types of the arguments, the constants) of each variant."""
    found = []
    for (values, out), (block, count) in product(
        (("float32", "int32"), ("float32", "int64"), ("float64", "int64")), SHAPES
    ):
        types = {
            "values": POINTERS[values],
            "scales": POINTERS["float32" if out == "int32" else "float64"],
            "out": POINTERS[out],
            "bits": POINTERS["int32" if values == "float32" else "int64"],
            "count": count,
        }
        found.append(("_encode", types, {"block": block, "rows": rows(block), "wide": values == "float64"}))
    return found


def decoders() -> list[tuple[str, dict[str, str], dict[str, Any]]]:
    found = []
    for (total, out), (block, count) in product(
        (("int32", "float32"), ("int64", "float32"), ("int64", "float64")), SHAPES
    ):
        types = {"total": POINTERS[total], "scales": "*fp64", "out": POINTERS[out], "count": count}
        found.append(("_decode", types, {"block": block, "rows": rows(block)}))
    return found


def rows(block: int) -> int:
    return max(2048 // block, 1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_variant_compiles_and_rounds_as_the_cpu_does(
    architecture: int, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from runtime.allreduce.fixed_point import gpu_kernel

    assert rows(1) == gpu_kernel._ELEMENTS
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for name, types, constants in encoders() + decoders():
        signature = {**types, **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(fn=getattr(gpu_kernel, name), signature=signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=gpu_kernel._OPTIONS)
        text = compiled.asm["ptx"]
        assert len(compiled.asm["cubin"]) > 0
        assert f".target sm_{architecture}" in text
        # Not the fast ways to compute: approximations, fused operations, numbers below the normal ones taken for zero.
        assert not re.search(r"\.approx|\bfma\.|\b(mul|add|sub|cvt\.rn)\.(rn\.)?ftz", text), (name, types, constants)


def interpreted() -> list[str]:
    """Where the bits of Triton's interpreter are not those of kernel.c and of torch."""
    import contextlib

    import torch

    from runtime.allreduce.fixed_point import conversion, gpu_kernel
    from tests.gpu.test_conversion import WAYS, values_of

    torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment, misc, return-value]  # none
    assert conversion.kernel() is not None, "kernel.c is not compiled"
    compiled, found = conversion.native_for, []
    for (source, into), block, length in product(WAYS, (16, 256, 2048), (1, 15, 16, 257, 4099)):
        values = values_of(length, source)
        largest = torch.stack([part.abs().max() for part in values.split(block)])
        fitting = (29 if into is torch.int32 else 60) - torch.frexp(largest)[1]
        exponents = fitting.clamp(-100, 100).to(torch.int16)
        results = []
        for gpu, native in ((gpu_kernel, compiled), (None, compiled), (None, lambda values: None)):
            conversion._gpu_kernel = lambda values, block, gpu=gpu: gpu  # type: ignore[misc]
            conversion.native_for = native
            integers, back = torch.empty(length, dtype=into), torch.empty_like(values)
            tops = conversion.encode(values, exponents, block, integers)
            conversion.decode(integers, exponents, block, back)
            results.append([integers, tops, back.view(torch.uint8)])
        for way, others in zip(("kernel.c", "torch"), results[1:], strict=True):
            if not all(ours.equal(theirs) for ours, theirs in zip(results[0], others, strict=True)):
                found.append(f"{way}: {source} {into} blocks of {block}, {length} elements")
    return found


def test_interpreted_kernels_have_the_bits_of_the_compiled_c_and_of_torch(device: FakeDevice) -> None:
    assert device.call(interpreted, environment={"TRITON_INTERPRET": "1"}) == []
