"""Loading generated code so that its kernels do nothing."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fxremat.compat.inductor.generated_code import Generated


class _NoKernel:
    """Stands for a compiled kernel, and for all that makes one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return self


class _WithoutKernels(ast.NodeTransformer):
    """Replaces the object that compiles kernels."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id == "AsyncCompile":
            return ast.copy_location(ast.Name("_no_kernel", ast.Load()), node)
        return self.generic_visit(node)


def _empty_like_generated(device: str) -> Callable[..., torch.Tensor]:
    def empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return empty


def _reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def _from_pool(
    pool: torch.Tensor, offset: int, dtype: torch.dtype, size: Any, stride: Any
) -> torch.Tensor:
    return pool.view(dtype).as_strided(size, stride, offset // dtype.itemsize)


def load_without_kernels(
    generated: Generated, constants: Mapping[str, Any], filename: str
) -> Callable[[list[Any]], Any]:
    """The generated ``call``, in which kernels do nothing.

    What it allocates, and the library calls it makes, go through torch's dispatcher: under a
    fake mode it runs on tensors without memory. Its code objects carry ``filename``.
    """
    tree = ast.fix_missing_locations(_WithoutKernels().visit(ast.parse(generated.source)))
    namespace: dict[str, Any] = {"_no_kernel": _NoKernel(), "__name__": filename}
    exec(compile(tree, filename, "exec"), namespace)
    for name in [n for n in namespace if n.startswith("empty_strided_")]:
        device = name.removeprefix("empty_strided_").removesuffix("_pinned")
        namespace[name] = _empty_like_generated(device)
    namespace |= {
        "reinterpret_tensor": _reinterpret,
        "alloc_from_pool": _from_pool,
        "assert_size_stride": _NoKernel(),
        "assert_alignment": _NoKernel(),
        **constants,
    }
    call: Callable[[list[Any]], Any] = namespace["call"]
    return call
