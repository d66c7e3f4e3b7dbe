"""Shapes in signatures, checked while tests run: types by beartype, axes by jaxtyping, in every call of the package.

jaxtyping has such a hook too. It reads the signature of every call anew and checks each argument twice, which made most
of what the proofs took. This one checks each argument and each result once, axes with axes of the same call as there.
It keeps what an annotation says of arrays of one shape.
"""

import ast
import dataclasses
import functools
import inspect
import sys
import typing
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, TypeVar, get_args

import numpy as np
import torch
from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray
from jaxtyping._storage import get_shape_memo, pop_shape_memo, push_shape_memo

Checked = TypeVar("Checked")
CONFIGURATION = BeartypeConf(is_pep484_tower=True)
"""Ints are welcome where floats are asked for."""
NAME = "_checked_by_tests"
"""What `checked` is called within the package's modules; none of them may have a name like it."""
ARRAYS = (torch.Tensor, torch.nn.Parameter, np.ndarray)
"""Classes of which one array fits an annotation as well as another of the same shape and dtype."""


def checked(given: Checked) -> Checked:
    """A function whose arguments and result are checked, or a dataclass whose fields are."""
    if inspect.isclass(given):
        if dataclasses.is_dataclass(given) and "__init__" in vars(given):
            given.__init__ = checked(given.__init__)
        return given
    strict = beartype(given, conf=CONFIGURATION)
    if not any(map(_has_axes, given.__annotations__.values())):
        return strict

    @functools.wraps(strict)
    def in_one_call(*args: object, **named: object) -> object:
        # Axes of one name have one size; calls within this call have sizes of their own.
        push_shape_memo({})
        try:
            return strict(*args, **named)
        finally:
            pop_shape_memo()

    return in_one_call


def _has_axes(annotation: object) -> bool:
    """Whether an annotation names axes, or something within it does."""
    if isinstance(annotation, list | tuple):
        return any(map(_has_axes, annotation))
    if inspect.isclass(annotation) and issubclass(annotation, AbstractArray):
        return True
    return any(map(_has_axes, get_args(annotation)))


def _remember_shapes() -> None:
    """Let jaxtyping read an annotation once for each shape. By itself it reads it at every check."""
    read = type(AbstractArray).__instancecheck__
    known: dict[tuple[object, ...], tuple[dict[str, Any], ...] | None] = {}

    def axes(annotation: type[AbstractArray], array: Any) -> tuple[dict[str, Any], ...] | None:
        """Sizes of the axes that the annotation names; None if they do not follow from the array alone."""
        special = ("elem", "broadcastable", "treepath")
        if any(getattr(axis, name, False) for axis in annotation.dims for name in special):
            return None
        singles, several, *_ = push_shape_memo({})
        try:
            return (singles, several) if read(annotation, array) else None
        finally:
            pop_shape_memo()

    def fits(annotation: type[AbstractArray], value: Any) -> bool:
        kind = type(value)
        if kind not in ARRAYS:
            return read(annotation, value)
        key = annotation, kind, value.dtype, value.shape
        if key not in known:
            known[key] = axes(annotation, value)
        found = known[key]
        if found is None:
            return read(annotation, value)
        call = get_shape_memo()
        for own, sizes in zip(found, call, strict=False):
            for name, size in own.items():
                if sizes.get(name, size) != size:
                    return read(annotation, value)
        call[0].update(found[0])
        call[1].update(found[1])
        return True

    type(AbstractArray).__instancecheck__ = fits


def _remember_protocols() -> None:
    """Let Python 3.11 look for the members of a protocol in a class once, without calling properties, as later ones do.
    By itself it looks for all of them at every check.
    """
    if sys.version_info >= (3, 12):
        return
    members_of = typing._get_protocol_attrs = functools.cache(typing._get_protocol_attrs)
    typing._is_callable_members_only = functools.cache(typing._is_callable_members_only)
    look = typing._ProtocolMeta.__instancecheck__

    @functools.cache
    def of_objects(protocol: type, kind: type) -> tuple[str, ...] | None:
        """Members that objects of a class must have themselves; None if Python must look."""
        if not (vars(protocol).get("_is_protocol") and getattr(protocol, "_is_runtime_protocol", False)):
            return None
        missing = tuple(name for name in members_of(protocol) if getattr(kind, name, None) is None)
        return None if any(callable(getattr(protocol, name, None)) for name in missing) else missing

    def has_members(protocol: type, value: object) -> bool:
        names = of_objects(protocol, type(value))
        return (names is not None and all(hasattr(value, name) for name in names)) or look(protocol, value)

    typing._ProtocolMeta.__instancecheck__ = has_members


class _Decorating(ast.NodeTransformer):
    """Puts `checked` next to every function, and around every class."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.decorator_list.append(ast.Name(NAME, ast.Load()))
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self.generic_visit(node)
        node.decorator_list.insert(0, ast.Name(NAME, ast.Load()))
        return node


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """From the source each time: what Python keeps of it is not decorated, and must not be."""
        path = self.get_filename(fullname)
        tree = _Decorating().visit(ast.parse(self.get_data(path), path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)[NAME] = checked
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._package and not fullname.startswith(f"{self._package}."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def check(package: str) -> None:
    """Check a package, all modules of which are imported later."""
    _remember_shapes()
    _remember_protocols()
    sys.meta_path.insert(0, _Finder(package))
